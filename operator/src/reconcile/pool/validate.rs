//! Validates a pool.

use kube::ResourceExt;
use reprise_crds::SSDPool;
use reprise_crds::fields::{Engine, FallbackEngine};
use reprise_crds::status::Reason;

use super::dereference::PoolInputs;
use crate::framework::refusal::Refusal;

/// Maximum length of a pool's directory: its file is `<directory>/pool`, and paths in a CacheNode have at
/// most 90 characters.
const DIRECTORY_CHARS_MAX: usize = 85;

/// Returns why a pool is rejected; `None` if it is accepted.
pub fn validate(pool: &SSDPool, inputs: &PoolInputs) -> Option<Refusal> {
    unsupported(pool).or_else(|| inputs.assignment.refused.clone()).or_else(|| {
        let name = pool.name_any();
        let unused = || {
            let message = format!("no KVCacheCluster lists this pool: add {name} to spec.pools of a cluster");
            Refusal::new(Reason::ReferenceNotFound, message)
        };
        inputs.assignment.cluster.is_none().then(unused)
    })
}

/// Rejects modes that this release does not support.
pub fn unsupported(pool: &SSDPool) -> Option<Refusal> {
    let spec = &pool.spec;
    let refuse = |message: String| Some(Refusal::new(Reason::Unsupported, message));
    if spec.claims.is_some() {
        return refuse(
            "claims is not supported by this release: use directory, on a file system of the node".to_owned(),
        );
    }
    let path = spec.directory.as_ref().map(|directory| directory.path.as_str()).unwrap_or_default();
    if path.len() > DIRECTORY_CHARS_MAX {
        let message =
            format!("directory.path has {} characters: expected at most {DIRECTORY_CHARS_MAX}", path.len());
        return Some(Refusal::new(Reason::InvalidSpec, message));
    }
    if ![Engine::IoUring, Engine::Plain, Engine::UserNvme].contains(&spec.engine) {
        let engine = spec.engine;
        return refuse(format!(
            "engine {engine} is not supported by this release: use IoUring, Plain or UserNvme"
        ));
    }
    // The CRD schema permits this combination, but it has no meaning: a fallback must differ from the engine.
    if spec.engine == Engine::Plain && spec.fallback_engine == FallbackEngine::Plain {
        return refuse("fallbackEngine equals engine: use None".to_owned());
    }
    None
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::reconcile::test_objects;

    #[test]
    fn rejects_unsupported_modes() {
        let pool = |spec: Value| test_objects::pool(json!({}), spec);
        assert_eq!(unsupported(&pool(json!({}))), None);
        let health = json!({ "maxReadLatency": "50ms", "maxMediaErrors": 0, "minSparePercent": 10 });
        assert_eq!(unsupported(&pool(json!({ "health": health }))), None);
        assert_eq!(unsupported(&pool(json!({ "engine": "Plain", "fallbackEngine": "IoUring" }))), None);
        assert_eq!(unsupported(&pool(json!({ "engine": "UserNvme" }))), None);
        for (more, words) in [
            (json!({ "claims": { "storageClassName": "s", "size": "1Gi" } }), "claims"),
            (json!({ "engine": "Gds" }), "engine Gds"),
            (json!({ "engine": "GpuQueue" }), "engine GpuQueue"),
        ] {
            let refused = unsupported(&pool(more)).expect(words);
            assert!(refused.message.starts_with(words), "{}", refused.message);
        }
    }
}
