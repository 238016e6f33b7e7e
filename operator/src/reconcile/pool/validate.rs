//! Validates a pool.

use kube::ResourceExt;
use reprise_crds::SSDPool;
use reprise_crds::fields::Engine;
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
        let message = format!("no KVCacheCluster lists this pool: add {name} to spec.pools of a cluster");
        let is_unlisted = inputs.assignment.cluster.is_none();
        is_unlisted.then(|| Refusal::new(Reason::ReferenceNotFound, message))
    })
}

/// Rejects modes that this release does not support.
pub fn unsupported(pool: &SSDPool) -> Option<Refusal> {
    let (spec, engine) = (&pool.spec, pool.spec.engine);
    let chars = spec.directory.as_ref().map_or(0, |directory| directory.path.as_str().len());
    let (reason, message) = if spec.claims.is_some() {
        let message = "claims is not supported by this release: use directory, on a file system of the node";
        (Reason::Unsupported, message.to_owned())
    } else if chars > DIRECTORY_CHARS_MAX {
        let message =
            format!("directory.path has {chars} characters: expected at most {DIRECTORY_CHARS_MAX}");
        (Reason::InvalidSpec, message)
    } else if ![Engine::IoUring, Engine::Plain, Engine::UserNvme].contains(&engine) {
        let message =
            format!("engine {engine} is not supported by this release: use IoUring, Plain or UserNvme");
        (Reason::Unsupported, message)
    } else {
        return None;
    };
    Some(Refusal::new(reason, message))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::reconcile::test_objects;

    #[test]
    fn rejects_unsupported_modes() {
        let long = format!("/{}", "d".repeat(DIRECTORY_CHARS_MAX));
        for (spec, words) in [
            (json!({}), ""),
            (json!({ "engine": "UserNvme" }), ""),
            (json!({ "directory": { "path": long, "size": "1Gi" } }), "directory.path has 86 characters"),
            (json!({ "claims": { "storageClassName": "s", "size": "1Gi" } }), "claims"),
            (json!({ "engine": "Gds" }), "engine Gds"),
            (json!({ "engine": "GpuQueue" }), "engine GpuQueue"),
        ] {
            let refused = unsupported(&test_objects::pool(json!({}), spec));
            let message = refused.map(|refused| refused.message).unwrap_or_default();
            assert!(message.starts_with(words) && message.is_empty() == words.is_empty(), "{message}");
        }
    }
}
