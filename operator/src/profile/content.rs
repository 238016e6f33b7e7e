//! What a profile says, as one text with a digest, and how windows are read. Pure.

use reprise_crds::SlackProfile;
use reprise_crds::slack::{Phase as SpecPhase, SlackFallback, Window as SpecWindow};
use reprise_policy::slack::{Content, Fallback, Phase, Profile, ProfileError, Subject, Window};
use serde_json::Value;

use crate::digest;

/// A list of windows in a ConfigMap: 256 of them with spaces and line breaks have a third of it.
const TEXT_BYTES_MAX: usize = 256 << 10;

/// How a list of windows looks.
const EXAMPLE: &str =
    r#"[{"phase": "Decode", "minTokens": 0, "maxTokens": 512, "slackMicros": 60, "maxIoSms": 4}]"#;

/// One revision of a profile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Revision {
    /// Digest of the text.
    pub digest: String,
    /// The content, as agents read it.
    pub text: String,
}

/// The revision that a profile is with these windows.
///
/// # Errors
/// They are no profile, in words.
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
    let text = serde_json::to_string(checked.content()).expect("texts and numbers are JSON");
    Ok(Revision { digest: digest::of(&text), text })
}

/// The windows of a spec.
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

/// The windows of a text.
///
/// # Errors
/// It is no list of windows; what is wrong, and what to write.
pub fn parse(text: &str) -> Result<Vec<Window>, String> {
    if text.len() > TEXT_BYTES_MAX {
        return Err(format!("it has {} bytes: use at most {TEXT_BYTES_MAX}", text.len()));
    }
    let windows: Vec<Value> = serde_json::from_str(text)
        .map_err(|error| format!("it is no JSON list of windows: {error}; write one like {EXAMPLE}"))?;
    let read = |(index, window): (usize, &Value)| {
        serde_json::from_value::<Window>(window.clone())
            .map_err(|error| format!("windows[{index}]: {error}; write it like {EXAMPLE}"))
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

    /// Kept for good: with another digest every node would get every profile anew after an upgrade of the operator.
    const DIGEST: &str = "sha256:09134aea0e8cc9d2ab914994b8c22e0ace22713e6a7655ee1a54d0a96a1f7398";

    #[test]
    fn a_digest_follows_the_content_and_nothing_else() {
        let same = digest_of(&profile(&json!({})));
        assert_eq!(same, DIGEST);
        let mut turned = profile(&json!({}));
        turned.spec.windows.as_mut().expect("inline").reverse();
        turned.metadata.labels = Some([("other".to_owned(), "label".to_owned())].into());
        assert_eq!(digest_of(&turned), same, "phases in another order are the same measurements");
        let paced = profile(&json!({ "rollout": { "maxUnavailablePercent": 50 } }));
        assert_eq!(digest_of(&paced), same, "how it reaches the nodes is none of its content");
        let read = serde_json::to_string(&profile(&json!({})).spec.windows).expect("JSON");
        let read = revision(&profile(&json!({})), parse(&read).expect("windows")).expect("a profile");
        assert_eq!(read.digest, same, "wherever the windows stand");
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
    fn a_text_that_is_no_list_of_windows_is_refused_with_what_to_write() {
        let window = r#"{"phase":"Decode","minTokens":0,"maxTokens":8,"slackMicros":5,"maxIoSms":4"#;
        for (text, words) in [
            (String::new(), "EOF"),
            ("{}".to_owned(), "expected a sequence"),
            ("[".to_owned(), "EOF"),
            ("[7]".to_owned(), "windows[0]"),
            (format!("[{window}}},{window},\"color\":1}}]"), "windows[1]: unknown field `color`"),
            (r#"[{"phase":"Decode"}]"#.to_owned(), "windows[0]: missing field `minTokens`"),
            (r#"[{"phase":"Sleep"}]"#.to_owned(), "unknown variant `Sleep`"),
            (" ".repeat(TEXT_BYTES_MAX + 1), "bytes: use at most"),
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
