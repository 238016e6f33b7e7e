//! Reads the measurement of a profile from its spec, or from a ConfigMap in its namespace.
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
use reprise_crds::status::Reason;
use tokio::time::Instant;

use super::content::{self, Revision};
use crate::framework::error::OperatorError;
use crate::framework::refusal::Refusal;
use crate::reconcile::context::Context;

/// Lifetime of a cached revision.
pub const CACHE_TTL: Duration = Duration::from_secs(10);
/// Maximum number of ConfigMap keys in a message.
const KEYS_MAX: usize = 5;

/// UID and generation of a profile.
type Key = (Option<String>, Option<i64>);
/// The time of a reading, and the revision that was read.
type Reading = (Instant, Result<Revision, Refusal>);

/// Cache of profiles' revisions.
pub type SourceCache = Mutex<HashMap<Key, Reading>>;

/// Reads the revision of a profile. The inner error has reason `ProfileInvalid` if there is a measurement.
///
/// # Errors
/// The API server did not answer.
pub async fn read(
    profile: &SlackProfile,
    context: &Context,
) -> Result<Result<Revision, Refusal>, OperatorError> {
    let (key, cache) = ((profile.uid(), profile.metadata.generation), &context.profile_sources);
    let cached = {
        let mut cache = cache.lock().unwrap_or_else(PoisonError::into_inner);
        cache.retain(|_, (at, _)| at.elapsed() < CACHE_TTL);
        cache.get(&key).map(|(_, revision)| revision.clone())
    };
    if let Some(revision) = cached {
        return Ok(revision);
    }
    let text = text(profile, context).await?;
    let revision = text.and_then(|(location, text)| {
        let invalid = |error| Refusal::new(Reason::ProfileInvalid, format!("{location}: {error}"));
        content::revision(profile, &text).map_err(invalid)
    });
    cache.lock().unwrap_or_else(PoisonError::into_inner).insert(key, (Instant::now(), revision.clone()));
    Ok(revision)
}

/// Returns location and text of a profile's measurement.
async fn text(
    profile: &SlackProfile,
    context: &Context,
) -> Result<Result<(String, String), Refusal>, OperatorError> {
    let spec = &profile.spec;
    if let Some(measurement) = &spec.measurement {
        let text = serde_json::to_string(measurement).expect("serializable measurement");
        return Ok(Ok(("spec.measurement".to_owned(), text)));
    }
    let Some(reference) = &spec.config_map_ref else {
        // Profiles of earlier versions have fields that this one does not know, and then no source.
        let message = match &spec.oci_ref {
            Some(_) => "ociRef is not supported by this release: use measurement or configMapRef",
            None => {
                "the profile has no measurement that this release knows: create it again with spec.measurement"
            }
        };
        return Ok(Err(Refusal::new(Reason::Unsupported, message)));
    };
    let namespace = profile.namespace().unwrap_or_default();
    let api: Api<ConfigMap> = Api::namespaced(context.client.clone(), &namespace);
    let name = reference.name.as_str();
    let found = api.get_opt(name).await.map_err(OperatorError::api(format!("get ConfigMap {name}")))?;
    Ok(entry(reference, found, &namespace))
}

/// Returns location and text of the referenced entry.
fn entry(
    reference: &ConfigMapRef,
    found: Option<ConfigMap>,
    namespace: &str,
) -> Result<(String, String), Refusal> {
    let ConfigMapRef { name, key } = reference;
    let missing = |message: String| Err(Refusal::new(Reason::ReferenceNotFound, message));
    let Some(map) = found else {
        return missing(format!("ConfigMap {name} does not exist in namespace {namespace}: create it"));
    };
    let mut data = map.data.unwrap_or_default();
    if let Some(text) = data.remove(key.as_str()) {
        return Ok((format!("entry {key} of ConfigMap {name}"), text));
    }
    if map.binary_data.is_some_and(|binary| binary.contains_key(key.as_str())) {
        return missing(format!("entry {key} of ConfigMap {name} is binary: add it as text, under data"));
    }
    let keys: Vec<String> = data.into_keys().take(KEYS_MAX).collect();
    missing(format!(
        "ConfigMap {name} has no entry {key}; its entries: {}. Add the entry, or correct configMapRef.key",
        if keys.is_empty() { "none".to_owned() } else { keys.join(", ") }
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn reports_missing_entries_with_the_existing_ones() {
        let reference: ConfigMapRef =
            serde_json::from_value(json!({ "name": "measured", "key": "measurement" })).expect("a reference");
        for (map, words) in [
            (json!({}), "has no entry measurement; its entries: none"),
            (json!({ "data": { "a": "", "b": "" } }), "its entries: a, b. Add the entry"),
            (json!({ "binaryData": { "measurement": "AA==" } }), "is binary: add it as text"),
        ] {
            let map = serde_json::from_value(map).expect("a ConfigMap");
            let refusal = entry(&reference, Some(map), "n").expect_err(words);
            assert_eq!(refusal.reason, Reason::ReferenceNotFound);
            assert!(refusal.message.contains(words), "{}", refusal.message);
        }
    }
}
