//! Content of a profile as canonical text with a digest, and parsing of measurements. Pure.

use reprise_crds::SlackProfile;
use reprise_crds::slack::{
    KernelTime as SpecKernel, Measurement as SpecMeasurement, Phase as SpecPhase, SlackFallback,
    Window as SpecWindow,
};
use reprise_policy::slack::{
    Content, Fallback, KernelTime, Measurement, Phase, Profile, ProfileError, Subject, Window,
};
use serde::Deserialize;
use serde_json::Value;

use crate::framework::digest;

/// Maximum size of a measurement in a ConfigMap, in bytes; 256 formatted windows have half of it.
const TEXT_BYTES_MAX: usize = 256 << 10;

/// Example of a measurement, for messages.
const EXAMPLE: &str = r#"{"stepTokens": 32, "iocbBytes": 1048576, "windows": [{"phase": "Decode", "minInputTokens": 0, "maxInputTokens": 64, "minPrefixTokens": 0, "maxPrefixTokens": 65536, "layerMicros": 90, "slackMicros": 60, "freeSms": 4}], "reads": [{"iocbs": 1, "micros": 50, "sms": 2}], "writes": [{"iocbs": 1, "micros": 90, "sms": 2}]}"#;

/// One revision of a profile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Revision {
    /// Digest of the text.
    pub digest: String,
    /// The content as agents read it.
    pub text: String,
}

/// Returns the revision of a profile with this measurement.
///
/// # Errors
/// The content is invalid.
pub fn revision(profile: &SlackProfile, measurement: Measurement) -> Result<Revision, ProfileError> {
    let spec = &profile.spec;
    let content = Content {
        subject: Subject {
            model: spec.subject.model.to_string(),
            gpu_product: spec.subject.gpu_product.to_string(),
            tensor_parallel: spec.subject.tensor_parallel,
            engine_version: spec.subject.engine_version.to_string(),
        },
        usable_percent: spec.usable_percent.0,
        fallback: match spec.fallback {
            SlackFallback::ThrottleWrites => Fallback::ThrottleWrites,
            SlackFallback::PauseIo => Fallback::PauseIo,
            SlackFallback::Ignore => Fallback::Ignore,
        },
        max_error_percent: spec.max_error_percent.0,
        measurement,
    };
    let checked = Profile::new(content)?;
    let text = serde_json::to_string(checked.content()).expect("serializable content");
    Ok(Revision { digest: digest::of(&text), text })
}

/// Converts the measurement of a spec.
pub fn inline(measurement: &SpecMeasurement) -> Measurement {
    let window = |window: &SpecWindow| Window {
        phase: match window.phase {
            SpecPhase::Prefill => Phase::Prefill,
            SpecPhase::Decode => Phase::Decode,
        },
        min_input_tokens: window.min_input_tokens,
        max_input_tokens: window.max_input_tokens,
        min_prefix_tokens: window.min_prefix_tokens,
        max_prefix_tokens: window.max_prefix_tokens,
        layer_micros: window.layer_micros,
        slack_micros: window.slack_micros,
        free_sms: window.free_sms,
    };
    let kernel =
        |kernel: &SpecKernel| KernelTime { iocbs: kernel.iocbs, micros: kernel.micros, sms: kernel.sms };
    Measurement {
        step_tokens: measurement.step_tokens,
        iocb_bytes: measurement.iocb_bytes,
        windows: measurement.windows.iter().map(window).collect(),
        reads: measurement.reads.iter().map(kernel).collect(),
        writes: measurement.writes.iter().map(kernel).collect(),
    }
}

/// Parses a measurement.
///
/// # Errors
/// The text is not a measurement; the message contains the cause, the position and an example.
pub fn parse(text: &str) -> Result<Measurement, String> {
    if text.len() > TEXT_BYTES_MAX {
        return Err(format!("too large with {} bytes: expected at most {TEXT_BYTES_MAX}", text.len()));
    }
    let whole: Value = serde_json::from_str(text)
        .map_err(|error| format!("invalid measurement: {error}; expected JSON such as {EXAMPLE}"))?;
    // A row is parsed by itself first, so that the message has its position.
    for (index, window) in whole["windows"].as_array().into_iter().flatten().enumerate() {
        Window::deserialize(window)
            .map_err(|error| format!("windows[{index}]: {error}; expected JSON such as {EXAMPLE}"))?;
    }
    Measurement::deserialize(&whole)
        .map_err(|error| format!("invalid measurement: {error}; expected JSON such as {EXAMPLE}"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn window(phase: &str) -> Value {
        json!({
            "phase": phase, "minInputTokens": 0, "maxInputTokens": 8, "minPrefixTokens": 0,
            "maxPrefixTokens": 64, "layerMicros": 70, "slackMicros": 55, "freeSms": 4,
        })
    }

    fn profile(more: &Value) -> SlackProfile {
        let mut spec = json!({
            "subject": { "model": "m", "gpuProduct": "g", "engineVersion": "e" },
            "measurement": {
                "stepTokens": 8, "iocbBytes": 1048576, "windows": [window("Decode"), window("Prefill")],
                "reads": [{ "iocbs": 1, "micros": 20, "sms": 2 }],
                "writes": [{ "iocbs": 1, "micros": 40, "sms": 2 }],
            },
        });
        spec.as_object_mut().expect("made above").extend(more.as_object().expect("fields").clone());
        SlackProfile::new("p", serde_json::from_value(spec).expect("a spec"))
    }

    fn digest_of(profile: &SlackProfile) -> String {
        let measurement = inline(profile.spec.measurement.as_ref().expect("inline"));
        revision(profile, measurement).expect("a profile").digest
    }

    /// Must never change: another digest would roll every profile out again after an upgrade of the operator.
    const DIGEST: &str = "sha256:b27d4fb030c625e70c6b94825559bc851bf934f41bb817ed6e5ee0d6d4e1af80";

    #[test]
    fn digest_depends_only_on_the_content() {
        let same = digest_of(&profile(&json!({})));
        assert_eq!(same, DIGEST);
        let mut turned = profile(&json!({}));
        turned.spec.measurement.as_mut().expect("inline").windows.reverse();
        turned.metadata.labels = Some([("other".to_owned(), "label".to_owned())].into());
        assert_eq!(digest_of(&turned), same, "the order of phases is not significant");
        let paced = profile(&json!({ "rollout": { "maxUnavailablePercent": 50 } }));
        assert_eq!(digest_of(&paced), same, "rollout settings are not content");
        let read = serde_json::to_string(&profile(&json!({})).spec.measurement).expect("JSON");
        let read = revision(&profile(&json!({})), parse(&read).expect("a measurement")).expect("a profile");
        assert_eq!(read.digest, same, "the source of the measurement is not significant");
        for more in [
            json!({ "usablePercent": 81 }),
            json!({ "fallback": "PauseIo" }),
            json!({ "maxErrorPercent": 31 }),
            json!({ "subject": { "model": "n", "gpuProduct": "g", "engineVersion": "e" } }),
        ] {
            assert_ne!(digest_of(&profile(&more)), same, "{more}");
        }
    }

    #[test]
    fn rejects_invalid_measurements_with_an_example() {
        let window = window("Decode").to_string();
        let colored = window.replace("{", "{\"color\":1,");
        for (text, words) in [
            (String::new(), "EOF"),
            ("{}".to_owned(), "missing field `stepTokens`"),
            ("[".to_owned(), "EOF"),
            (r#"{"windows":[7]}"#.to_owned(), "windows[0]"),
            (format!(r#"{{"windows":[{window},{colored}]}}"#), "windows[1]: unknown field `color`"),
            (r#"{"windows":[{"phase":"Decode"}]}"#.to_owned(), "windows[0]: missing field `minInputTokens`"),
            (r#"{"windows":[{"phase":"Sleep"}]}"#.to_owned(), "unknown variant `Sleep`"),
            (EXAMPLE.replacen('{', r#"{"mood":1,"#, 1), "unknown field `mood`"),
            (" ".repeat(TEXT_BYTES_MAX + 1), "bytes: expected at most"),
        ] {
            let error = parse(&text).expect_err(words);
            assert!(
                error.contains(words) && (error.contains("\"minInputTokens\"") || error.contains("at most")),
                "{error}"
            );
        }
        let mut example = parse(EXAMPLE).expect("a measurement");
        example.validate().expect("a valid measurement");
    }
}
