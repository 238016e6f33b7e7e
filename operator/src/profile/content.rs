//! Content of a profile as canonical text with a digest, and parsing of windows. Pure.

use reprise_crds::SlackProfile;
use reprise_crds::slack::{Phase as SpecPhase, SlackFallback, Window as SpecWindow};
use reprise_policy::slack::{Content, Fallback, Phase, Profile, ProfileError, Subject, Window};
use serde_json::Value;

use crate::digest;

/// Maximum size of a list of windows in a ConfigMap, in bytes; 256 formatted windows have a third of it.
const TEXT_BYTES_MAX: usize = 256 << 10;

/// Example of a list of windows, for messages.
const EXAMPLE: &str =
    r#"[{"phase": "Decode", "minTokens": 0, "maxTokens": 512, "slackMicros": 60, "maxIoSms": 4}]"#;

/// One revision of a profile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Revision {
    /// Digest of the text.
    pub digest: String,
    /// The content as agents read it.
    pub text: String,
}

/// Returns the revision of a profile with these windows.
///
/// # Errors
/// The content is invalid.
pub fn revision(profile: &SlackProfile, windows: Vec<Window>) -> Result<Revision, ProfileError> {
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
        windows,
    };
    let checked = Profile::new(content)?;
    let text = serde_json::to_string(checked.content()).expect("serializable content");
    Ok(Revision { digest: digest::of(&text), text })
}

/// Converts the windows of a spec.
pub fn inline(windows: &[SpecWindow]) -> Vec<Window> {
    let window = |window: &SpecWindow| Window {
        phase: match window.phase {
            SpecPhase::Prefill => Phase::Prefill,
            SpecPhase::Decode => Phase::Decode,
        },
        min_tokens: window.min_tokens,
        max_tokens: window.max_tokens,
        slack_micros: window.slack_micros,
        max_io_sms: window.max_io_sms,
    };
    windows.iter().map(window).collect()
}

/// Parses a list of windows.
///
/// # Errors
/// The text is not a list of windows; the message contains the cause and an example.
pub fn parse(text: &str) -> Result<Vec<Window>, String> {
    if text.len() > TEXT_BYTES_MAX {
        return Err(format!("too large with {} bytes: expected at most {TEXT_BYTES_MAX}", text.len()));
    }
    let windows: Vec<Value> = serde_json::from_str(text)
        .map_err(|error| format!("invalid list of windows: {error}; expected JSON such as {EXAMPLE}"))?;
    let read = |(index, window): (usize, &Value)| {
        serde_json::from_value::<Window>(window.clone())
            .map_err(|error| format!("windows[{index}]: {error}; expected JSON such as {EXAMPLE}"))
    };
    windows.iter().enumerate().map(read).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn profile(more: &Value) -> SlackProfile {
        let mut spec = json!({
            "subject": { "model": "m", "gpuProduct": "g", "engineVersion": "e" },
            "windows": [
                { "phase": "Decode", "minTokens": 0, "maxTokens": 8, "slackMicros": 55, "maxIoSms": 4 },
                { "phase": "Prefill", "minTokens": 0, "maxTokens": 8, "slackMicros": 55, "maxIoSms": 4 },
            ],
        });
        spec.as_object_mut().expect("made above").extend(more.as_object().expect("fields").clone());
        SlackProfile::new("p", serde_json::from_value(spec).expect("a spec"))
    }

    fn digest_of(profile: &SlackProfile) -> String {
        let windows = inline(profile.spec.windows.as_ref().expect("inline"));
        revision(profile, windows).expect("a profile").digest
    }

    /// Must never change: another digest would roll every profile out again after an upgrade of the operator.
    const DIGEST: &str = "sha256:09134aea0e8cc9d2ab914994b8c22e0ace22713e6a7655ee1a54d0a96a1f7398";

    #[test]
    fn digest_depends_only_on_the_content() {
        let same = digest_of(&profile(&json!({})));
        assert_eq!(same, DIGEST);
        let mut turned = profile(&json!({}));
        turned.spec.windows.as_mut().expect("inline").reverse();
        turned.metadata.labels = Some([("other".to_owned(), "label".to_owned())].into());
        assert_eq!(digest_of(&turned), same, "the order of phases is not significant");
        let paced = profile(&json!({ "rollout": { "maxUnavailablePercent": 50 } }));
        assert_eq!(digest_of(&paced), same, "rollout settings are not content");
        let read = serde_json::to_string(&profile(&json!({})).spec.windows).expect("JSON");
        let read = revision(&profile(&json!({})), parse(&read).expect("windows")).expect("a profile");
        assert_eq!(read.digest, same, "the source of the windows is not significant");
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
    fn rejects_invalid_lists_of_windows_with_an_example() {
        let window = r#"{"phase":"Decode","minTokens":0,"maxTokens":8,"slackMicros":5,"maxIoSms":4"#;
        for (text, words) in [
            (String::new(), "EOF"),
            ("{}".to_owned(), "expected a sequence"),
            ("[".to_owned(), "EOF"),
            ("[7]".to_owned(), "windows[0]"),
            (format!("[{window}}},{window},\"color\":1}}]"), "windows[1]: unknown field `color`"),
            (r#"[{"phase":"Decode"}]"#.to_owned(), "windows[0]: missing field `minTokens`"),
            (r#"[{"phase":"Sleep"}]"#.to_owned(), "unknown variant `Sleep`"),
            (" ".repeat(TEXT_BYTES_MAX + 1), "bytes: expected at most"),
        ] {
            let error = parse(&text).expect_err(words);
            assert!(
                error.contains(words) && (error.contains("\"minTokens\"") || error.contains("at most")),
                "{error}"
            );
        }
        assert_eq!(parse(EXAMPLE).expect("windows").len(), 1);
    }
}
