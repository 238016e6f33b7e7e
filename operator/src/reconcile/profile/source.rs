//! Reads the measurement of a profile from its spec, or from a ConfigMap in its namespace.
//!
//! Foreign ConfigMaps are not watched: watching all ConfigMaps of a Kubernetes cluster for a few of them
//! would cost more. A ConfigMap is read again after [`CACHE_TTL`]; until then every reconcile uses the cached
//! content.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, ResourceExt};
use reprise_crds::SlackProfile;
use reprise_crds::fields::ConfigMapRef;
use reprise_crds::status::Reason;
use reprise_policy::slack::Measurement;
use tokio::time::Instant;

use super::content;
use crate::framework::error::OperatorError;
use crate::framework::refusal::Refusal;
use crate::reconcile::context::Context;

/// Lifetime of a cached ConfigMap.
pub const CACHE_TTL: Duration = Duration::from_secs(10);
/// Maximum number of ConfigMap keys in a message.
const KEYS_MAX: usize = 5;

/// The measurement of a profile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// Measurement of the spec, validated by the API server.
    Inline(Measurement),
    /// Text of a ConfigMap, not validated.
    Text {
        /// Where the text comes from, for messages.
        location: String,
        /// The text of the entry.
        text: String,
    },
    /// The measurement is unavailable.
    Missing(Refusal),
}

/// Cache of profiles' ConfigMaps, by the profile's uid.
#[derive(Debug, Default)]
pub struct SourceCache {
    last: Mutex<HashMap<String, CachedSource>>,
}

#[derive(Clone, Debug)]
struct CachedSource {
    at: Instant,
    generation: Option<i64>,
    source: Source,
}

impl SourceCache {
    fn get(&self, profile: &SlackProfile) -> Option<Source> {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let held = last.get(&profile.uid()?)?;
        let holds = held.generation == profile.metadata.generation && held.at.elapsed() < CACHE_TTL;
        holds.then(|| held.source.clone())
    }

    fn insert(&self, profile: &SlackProfile, source: &Source) {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        // Entries that were not renewed for this long belong to deleted profiles.
        last.retain(|_, held| held.at.elapsed() < 100 * CACHE_TTL);
        let generation = profile.metadata.generation;
        let held = CachedSource { at: Instant::now(), generation, source: source.clone() };
        last.insert(profile.uid().unwrap_or_default(), held);
    }
}

/// Reads the measurement.
///
/// # Errors
/// The API server did not answer.
pub async fn read(profile: &SlackProfile, context: &Context) -> Result<Source, OperatorError> {
    let spec = &profile.spec;
    if let Some(measurement) = &spec.measurement {
        return Ok(Source::Inline(content::inline(measurement)));
    }
    let Some(reference) = &spec.config_map_ref else {
        // Profiles of earlier versions have fields that this one does not know, and then no source.
        let message = match &spec.oci_ref {
            Some(_) => "ociRef is not supported by this release: use measurement or configMapRef",
            None => {
                "the profile has no measurement that this release knows: create it again with spec.measurement"
            }
        };
        return Ok(Source::Missing(Refusal::new(Reason::Unsupported, message)));
    };
    if let Some(held) = context.profile_sources.get(profile) {
        return Ok(held);
    }
    let namespace = profile.namespace().unwrap_or_default();
    let api: Api<ConfigMap> = Api::namespaced(context.client.clone(), &namespace);
    let name = reference.name.as_str();
    let found = api.get_opt(name).await.map_err(OperatorError::api(format!("get ConfigMap {name}")))?;
    let source = entry(reference, found, &namespace);
    context.profile_sources.insert(profile, &source);
    Ok(source)
}

/// Returns the referenced entry.
fn entry(reference: &ConfigMapRef, found: Option<ConfigMap>, namespace: &str) -> Source {
    let ConfigMapRef { name, key } = reference;
    let missing = |message: String| Source::Missing(Refusal::new(Reason::ReferenceNotFound, message));
    let Some(map) = found else {
        return missing(format!("ConfigMap {name} does not exist in namespace {namespace}: create it"));
    };
    let mut data = map.data.unwrap_or_default();
    if let Some(text) = data.remove(key.as_str()) {
        return Source::Text { location: format!("entry {key} of ConfigMap {name}"), text };
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
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn reports_missing_entries_with_the_existing_ones() {
        let reference: ConfigMapRef =
            serde_json::from_value(json!({ "name": "measured", "key": "measurement" })).expect("a reference");
        let result = |map: Value| {
            let map = (!map.is_null()).then(|| serde_json::from_value(map).expect("a ConfigMap"));
            match entry(&reference, map, "n") {
                Source::Missing(refusal) => (Some(refusal.reason), refusal.message),
                Source::Text { location, text } => (None, format!("{location}: {text}")),
                Source::Inline(_) => panic!("no inline measurement"),
            }
        };
        let there = json!({ "data": { "measurement": "{}" } });
        assert_eq!(result(there), (None, "entry measurement of ConfigMap measured: {}".to_owned()));
        for (map, words) in [
            (Value::Null, "does not exist in namespace n: create it"),
            (json!({}), "has no entry measurement; its entries: none"),
            (
                json!({ "data": { "a": "", "b": "" } }),
                "has no entry measurement; its entries: a, b. Add the entry",
            ),
            (json!({ "binaryData": { "measurement": "AA==" } }), "is binary: add it as text"),
        ] {
            let (reason, message) = result(map);
            assert_eq!(reason, Some(Reason::ReferenceNotFound));
            assert!(message.contains(words), "{message}");
        }
    }
}
