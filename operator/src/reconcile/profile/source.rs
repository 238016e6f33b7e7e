//! Revisions of profiles: the measurement from the spec, or from a ConfigMap of the namespace, as canonical text with a
//! digest.
//!
//! Foreign ConfigMaps are not watched: watching all ConfigMaps of a Kubernetes cluster for a few of them
//! would cost more. A ConfigMap is read again after [`CACHE_TTL`]; until then every reconcile uses the cached
//! revision.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, ResourceExt};
use reprise_crds::SlackProfile;
use reprise_crds::fields::ConfigMapRef;
use reprise_crds::slack::SlackFallback;
use reprise_crds::status::Reason;
use reprise_policy::slack::{Content, Fallback, Measurement, Profile, Subject, Window};
use serde::Deserialize;
use serde_json::Value;
use tokio::time::Instant;

use crate::framework::digest;
use crate::framework::error::OperatorError;
use crate::framework::refusal::Refusal;
use crate::reconcile::context::Context;

/// Lifetime of a cached revision.
pub const CACHE_TTL: Duration = Duration::from_secs(10);
/// Maximum number of ConfigMap keys in a message.
const KEYS_MAX: usize = 5;

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

/// Cached revisions and the times of their readings, by UID and generation of the profile.
pub type SourceCache = Mutex<HashMap<(Option<String>, Option<i64>), (Instant, Result<Revision, Refusal>)>>;

/// Reads the revision of a profile. The inner error has reason `ProfileInvalid` if there is a measurement.
///
/// # Errors
/// The API server did not answer.
pub async fn read(
    profile: &SlackProfile,
    context: &Context,
) -> Result<Result<Revision, Refusal>, OperatorError> {
    let key = (profile.uid(), profile.metadata.generation);
    let cache = || context.profile_sources.lock().unwrap_or_else(PoisonError::into_inner);
    cache().retain(|_, (at, _)| at.elapsed() < CACHE_TTL);
    let cached = cache().get(&key).map(|(_, revision)| revision.clone());
    if let Some(revision) = cached {
        return Ok(revision);
    }
    let revision = match (&profile.spec.measurement, &profile.spec.config_map_ref) {
        (Some(measurement), _) => {
            let text = serde_json::to_string(measurement).expect("serializable measurement");
            revision(profile, "spec.measurement", &text)
        }
        (None, Some(reference)) => {
            let (name, namespace) = (reference.name.as_str(), profile.namespace().unwrap_or_default());
            let api: Api<ConfigMap> = Api::namespaced(context.client.clone(), &namespace);
            let found =
                api.get_opt(name).await.map_err(OperatorError::api(format!("get ConfigMap {name}")))?;
            let location = format!("entry {} of ConfigMap {name}", reference.key);
            entry(reference, found, &namespace).and_then(|text| revision(profile, &location, &text))
        }
        (None, None) => Err(Refusal::new(
            Reason::Unsupported,
            "ociRef is not supported by this release: use measurement or configMapRef",
        )),
    };
    cache().insert(key, (Instant::now(), revision.clone()));
    Ok(revision)
}

/// Returns the text of the referenced entry.
fn entry(reference: &ConfigMapRef, found: Option<ConfigMap>, namespace: &str) -> Result<String, Refusal> {
    let ConfigMapRef { name, key } = reference;
    let missing = |message: String| Refusal::new(Reason::ReferenceNotFound, message);
    let absent = || missing(format!("ConfigMap {name} does not exist in namespace {namespace}: create it"));
    let mut data = found.ok_or_else(absent)?.data.unwrap_or_default();
    data.remove(key.as_str()).ok_or_else(|| {
        let keys: Vec<String> = data.into_keys().take(KEYS_MAX).collect();
        missing(format!(
            "ConfigMap {name} has no entry {key} in data; its entries: {}. Add the entry as text, or correct configMapRef.key",
            if keys.is_empty() { "none".to_owned() } else { keys.join(", ") }
        ))
    })
}

/// Returns the revision of a profile with the measurement at a location.
fn revision(profile: &SlackProfile, location: &str, measurement: &str) -> Result<Revision, Refusal> {
    let invalid = |error: String| Refusal::new(Reason::ProfileInvalid, format!("{location}: {error}"));
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
        measurement: parse(measurement).map_err(invalid)?,
    };
    let checked = Profile::new(content).map_err(|error| invalid(error.to_string()))?;
    let text = serde_json::to_string(checked.content()).expect("serializable content");
    Ok(Revision { digest: digest::of(&text), text })
}

/// Parses a measurement. The error contains the cause, the position and an example.
fn parse(text: &str) -> Result<Measurement, String> {
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
    use crate::reconcile::test_objects::{merged, object};

    /// Must never change: another digest would roll every profile out again after an upgrade of the operator.
    const DIGEST: &str = "sha256:b27d4fb030c625e70c6b94825559bc851bf934f41bb817ed6e5ee0d6d4e1af80";

    fn measurement(phases: [&str; 2]) -> String {
        let window = |phase: &str| {
            json!({
                "phase": phase, "minInputTokens": 0, "maxInputTokens": 8, "minPrefixTokens": 0,
                "maxPrefixTokens": 64, "layerMicros": 70, "slackMicros": 55, "freeSms": 4,
            })
        };
        let measurement = json!({
            "stepTokens": 8, "iocbBytes": 1048576, "windows": phases.map(window),
            "reads": [{ "iocbs": 1, "micros": 20, "sms": 2 }],
            "writes": [{ "iocbs": 1, "micros": 40, "sms": 2 }],
        });
        measurement.to_string()
    }

    fn of(more: &Value, measurement: &str) -> Result<Revision, Refusal> {
        let spec = json!({ "subject": { "model": "m", "gpuProduct": "g", "engineVersion": "e" } });
        let profile = SlackProfile::new("p", object(merged(spec, more.clone())));
        revision(&profile, "spec.measurement", measurement)
    }

    #[test]
    fn digest_depends_only_on_the_content() {
        let text = measurement(["Decode", "Prefill"]);
        for (more, text, is_same) in [
            (json!({}), &text, true),
            // The order of phases is not significant, and rollout settings are not content.
            (json!({}), &measurement(["Prefill", "Decode"]), true),
            (json!({ "rollout": { "maxUnavailablePercent": 50 } }), &text, true),
            (json!({ "usablePercent": 81 }), &text, false),
            (json!({ "fallback": "PauseIo" }), &text, false),
            (json!({ "maxErrorPercent": 31 }), &text, false),
            (json!({ "subject": { "model": "n", "gpuProduct": "g", "engineVersion": "e" } }), &text, false),
        ] {
            let digest = of(&more, text).expect("a profile").digest;
            assert_eq!(digest == DIGEST, is_same, "{more} {text}: {digest}");
        }
    }

    #[test]
    fn example_is_valid_and_others_are_rejected_with_it() {
        of(&json!({}), EXAMPLE).expect("a valid measurement");
        for (text, words) in
            [(String::new(), "EOF"), (EXAMPLE.replacen('{', r#"{"mood":1,"#, 1), "unknown field `mood`")]
        {
            let Refusal { reason, message } = of(&json!({}), &text).expect_err(words);
            assert_eq!(reason, Reason::ProfileInvalid);
            assert!(message.contains(words) && message.contains("\"minInputTokens\""), "{message}");
        }
    }
}
