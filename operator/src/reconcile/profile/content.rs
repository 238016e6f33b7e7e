//! Content of a profile as canonical text with a digest, from the text of a measurement. Pure.

use reprise_crds::SlackProfile;
use reprise_crds::slack::SlackFallback;
use reprise_policy::slack::{Content, Fallback, Measurement, Profile, Subject, Window};
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
/// The text is not a measurement, or its values contradict each other.
pub fn revision(profile: &SlackProfile, measurement: &str) -> Result<Revision, String> {
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
        measurement: parse(measurement)?,
    };
    let checked = Profile::new(content).map_err(|error| error.to_string())?;
    let text = serde_json::to_string(checked.content()).expect("serializable content");
    Ok(Revision { digest: digest::of(&text), text })
}

/// Parses a measurement. The error contains the cause, the position and an example.
fn parse(text: &str) -> Result<Measurement, String> {
    if text.len() > TEXT_BYTES_MAX {
        return Err(format!("too large with {} bytes: expected at most {TEXT_BYTES_MAX}", text.len()));
    }
    let invalid =
        |what: &str, error: serde_json::Error| format!("{what}: {error}; expected JSON such as {EXAMPLE}");
    let whole: Value = serde_json::from_str(text).map_err(|error| invalid("invalid measurement", error))?;
    // A row is parsed by itself first, so that the message has its position.
    for (index, window) in whole["windows"].as_array().into_iter().flatten().enumerate() {
        Window::deserialize(window).map_err(|error| invalid(&format!("windows[{index}]"), error))?;
    }
    Measurement::deserialize(&whole).map_err(|error| invalid("invalid measurement", error))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Must never change: another digest would roll every profile out again after an upgrade of the operator.
    const DIGEST: &str = "sha256:b27d4fb030c625e70c6b94825559bc851bf934f41bb817ed6e5ee0d6d4e1af80";

    fn window(phase: &str) -> Value {
        json!({
            "phase": phase, "minInputTokens": 0, "maxInputTokens": 8, "minPrefixTokens": 0,
            "maxPrefixTokens": 64, "layerMicros": 70, "slackMicros": 55, "freeSms": 4,
        })
    }

    fn measurement(windows: &[Value]) -> Value {
        json!({
            "stepTokens": 8, "iocbBytes": 1048576, "windows": windows,
            "reads": [{ "iocbs": 1, "micros": 20, "sms": 2 }],
            "writes": [{ "iocbs": 1, "micros": 40, "sms": 2 }],
        })
    }

    fn of(more: &Value, measurement: &str) -> Result<Revision, String> {
        let mut spec = json!({ "subject": { "model": "m", "gpuProduct": "g", "engineVersion": "e" } });
        spec.as_object_mut().expect("made above").extend(more.as_object().expect("fields").clone());
        let profile = SlackProfile::new("p", serde_json::from_value(spec).expect("a spec"));
        revision(&profile, measurement)
    }

    #[test]
    fn digest_depends_only_on_the_content() {
        let text = measurement(&[window("Decode"), window("Prefill")]).to_string();
        let digest_of = |more: Value, text: &str| of(&more, text).expect("a profile").digest;
        assert_eq!(digest_of(json!({}), &text), DIGEST);
        let turned = measurement(&[window("Prefill"), window("Decode")]).to_string();
        assert_eq!(digest_of(json!({}), &turned), DIGEST, "the order of phases is not significant");
        let paced = json!({ "rollout": { "maxUnavailablePercent": 50 } });
        assert_eq!(digest_of(paced, &text), DIGEST, "rollout settings are not content");
        for more in [
            json!({ "usablePercent": 81 }),
            json!({ "fallback": "PauseIo" }),
            json!({ "maxErrorPercent": 31 }),
            json!({ "subject": { "model": "n", "gpuProduct": "g", "engineVersion": "e" } }),
        ] {
            assert_ne!(digest_of(more.clone(), &text), DIGEST, "{more}");
        }
    }

    #[test]
    fn rejects_invalid_measurements_with_an_example() {
        let mut colored = window("Decode");
        colored["color"] = json!(1);
        for (text, words) in [
            (String::new(), "EOF"),
            (measurement(&[window("Decode"), colored]).to_string(), "windows[1]: unknown field `color`"),
            (EXAMPLE.replacen('{', r#"{"mood":1,"#, 1), "unknown field `mood`"),
        ] {
            let error = of(&json!({}), &text).expect_err(words);
            assert!(error.contains(words) && error.contains("\"minInputTokens\""), "{error}");
        }
        let error = of(&json!({}), &" ".repeat(TEXT_BYTES_MAX + 1)).expect_err("it is too large");
        assert!(error.contains("bytes: expected at most"), "{error}");
        of(&json!({}), EXAMPLE).expect("a valid measurement");
    }
}
