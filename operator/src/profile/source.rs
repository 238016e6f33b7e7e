//! Reads the windows of a profile: from its spec, or from a ConfigMap of its namespace.
//!
//! Nothing tells of ConfigMaps that are not ours, and to watch all of a Kubernetes cluster for a few would be worse: one is looked at again
//! after [`STAYS`]; in between the last look holds, whatever else makes a profile reconcile.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, ResourceExt};
use reprise_crds::SlackProfile;
use reprise_crds::fields::ConfigMapRef;
use reprise_crds::status::Reason;
use reprise_policy::slack::Window;

use super::content;
use crate::context::Context;
use crate::error::OperatorError;
use crate::plan::Refusal;

/// How long a look at a ConfigMap holds.
pub const STAYS: Duration = Duration::from_secs(10);
/// Keys of a ConfigMap that a message names.
const KEYS_MAX: usize = 5;

/// What was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// Windows, as the API server has checked them.
    Windows(Vec<Window>),
    /// A text that nobody has checked.
    Text {
        /// Where it stands.
        place: String,
        /// It.
        text: String,
    },
    /// Nothing; why, and what to do.
    Missing(Refusal),
}

/// The last look at each profile's ConfigMap.
#[derive(Debug, Default)]
pub struct Looks {
    last: Mutex<HashMap<String, Held>>,
}

#[derive(Clone, Debug)]
struct Held {
    at: Instant,
    generation: Option<i64>,
    source: Source,
}

impl Looks {
    fn held(&self, profile: &SlackProfile) -> Option<Source> {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let held = last.get(&profile.uid()?)?;
        let holds = held.generation == profile.metadata.generation && held.at.elapsed() < STAYS;
        holds.then(|| held.source.clone())
    }

    fn keep(&self, profile: &SlackProfile, source: &Source) {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        // What nobody has looked at for so long belongs to a profile that is gone.
        last.retain(|_, held| held.at.elapsed() < 100 * STAYS);
        let generation = profile.metadata.generation;
        let held = Held { at: Instant::now(), generation, source: source.clone() };
        last.insert(profile.uid().unwrap_or_default(), held);
    }
}

/// Reads them.
///
/// # Errors
/// The API server did not answer.
pub async fn read(profile: &SlackProfile, context: &Context) -> Result<Source, OperatorError> {
    let spec = &profile.spec;
    if let Some(windows) = &spec.windows {
        return Ok(Source::Windows(content::inline(windows)));
    }
    let Some(reference) = &spec.config_map_ref else {
        let message = "ociRef is not in this release: use windows or configMapRef";
        return Ok(Source::Missing(Refusal::new(Reason::Unsupported, message)));
    };
    if let Some(held) = context.profile_looks.held(profile) {
        return Ok(held);
    }
    let namespace = profile.namespace().unwrap_or_default();
    let api: Api<ConfigMap> = Api::namespaced(context.client.clone(), &namespace);
    let name = reference.name.as_str();
    let found = api.get_opt(name).await.map_err(OperatorError::api(format!("look at ConfigMap {name}")))?;
    let source = entry(reference, found, &namespace);
    context.profile_looks.keep(profile, &source);
    Ok(source)
}

/// The entry that is meant.
fn entry(reference: &ConfigMapRef, found: Option<ConfigMap>, namespace: &str) -> Source {
    let ConfigMapRef { name, key } = reference;
    let missing = |message: String| Source::Missing(Refusal::new(Reason::ReferenceNotFound, message));
    let Some(map) = found else {
        return missing(format!("ConfigMap {name} is not in namespace {namespace}: make it there"));
    };
    let mut data = map.data.unwrap_or_default();
    if let Some(text) = data.remove(key.as_str()) {
        return Source::Text { place: format!("entry {key} of ConfigMap {name}"), text };
    }
    if map.binary_data.is_some_and(|binary| binary.contains_key(key.as_str())) {
        return missing(format!("entry {key} of ConfigMap {name} is binary: write it as text, below data"));
    }
    let keys: Vec<String> = data.into_keys().take(KEYS_MAX).collect();
    missing(format!(
        "ConfigMap {name} has no entry {key}, but {}: add it, or correct configMapRef.key",
        if keys.is_empty() { "none".to_owned() } else { keys.join(", ") }
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn what_is_not_in_a_config_map_is_missing_with_what_is_there() {
        let reference: ConfigMapRef =
            serde_json::from_value(json!({ "name": "measured", "key": "windows" })).expect("a reference");
        let said = |map: Value| {
            let map = (!map.is_null()).then(|| serde_json::from_value(map).expect("a ConfigMap"));
            match entry(&reference, map, "n") {
                Source::Missing(refusal) => (Some(refusal.reason), refusal.message),
                Source::Text { place, text } => (None, format!("{place}: {text}")),
                Source::Windows(_) => panic!("nothing is inline"),
            }
        };
        let there = json!({ "data": { "windows": "[]" } });
        assert_eq!(said(there), (None, "entry windows of ConfigMap measured: []".to_owned()));
        for (map, words) in [
            (Value::Null, "is not in namespace n: make it there"),
            (json!({}), "has no entry windows, but none"),
            (json!({ "data": { "a": "", "b": "" } }), "has no entry windows, but a, b: add it"),
            (json!({ "binaryData": { "windows": "AA==" } }), "is binary: write it as text"),
        ] {
            let (reason, message) = said(map);
            assert_eq!(reason, Some(Reason::ReferenceNotFound));
            assert!(message.contains(words), "{message}");
        }
    }
}
