//! What is refused of a pool.

use kube::ResourceExt;
use reprise_crds::SSDPool;
use reprise_crds::fields::{Engine, FallbackEngine};
use reprise_crds::status::Reason;

use super::dereference::Found;
use crate::plan::Refusal;

/// A pool's file is `<directory>/pool`, and paths in a CacheNode have at most 90 characters.
const DIRECTORY_CHARS_MAX: usize = 85;

/// Why a pool is refused, if it is.
pub fn validate(pool: &SSDPool, found: &Found) -> Option<Refusal> {
    unsupported(pool).or_else(|| found.plan.refused.clone()).or_else(|| {
        let name = pool.name_any();
        let nobody = || {
            let message =
                format!("no KVCacheCluster names this pool: add {name} to pools of the one that it is for");
            Refusal::new(Reason::ReferenceNotFound, message)
        };
        found.plan.cluster.is_none().then(nobody)
    })
}

/// Modes that this release does not have.
pub fn unsupported(pool: &SSDPool) -> Option<Refusal> {
    let spec = &pool.spec;
    let refuse = |message: String| Some(Refusal::new(Reason::Unsupported, message));
    if spec.claims.is_some() {
        return refuse(
            "claims are not in this release: use directory, on a file system of the node".to_owned(),
        );
    }
    let path = spec.directory.as_ref().map(|directory| directory.path.as_str()).unwrap_or_default();
    if path.len() > DIRECTORY_CHARS_MAX {
        let message =
            format!("directory.path has {} characters: use at most {DIRECTORY_CHARS_MAX}", path.len());
        return Some(Refusal::new(Reason::InvalidSpec, message));
    }
    if ![Engine::IoUring, Engine::Plain].contains(&spec.engine) {
        let engine = spec.engine;
        return refuse(format!("engine {engine} is not in this release: use IoUring or Plain"));
    }
    // Words of the definitions that have no meaning together: io_uring cannot be what is left when it is wanted and cannot be had.
    if spec.engine == Engine::Plain && spec.fallback_engine == FallbackEngine::Plain {
        return refuse("fallbackEngine is the engine itself: use None".to_owned());
    }
    None
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn what_this_release_does_not_have_is_refused() {
        let pool = |more: Value| {
            let mut spec = json!({ "directory": { "path": "/p", "size": "1Gi" } });
            spec.as_object_mut().expect("made above").extend(more.as_object().expect("fields").clone());
            SSDPool::new("p", serde_json::from_value(spec).expect("a spec"))
        };
        assert_eq!(unsupported(&pool(json!({}))), None);
        let health = json!({ "maxReadLatency": "50ms", "maxMediaErrors": 0, "minSparePercent": 10 });
        assert_eq!(unsupported(&pool(json!({ "health": health }))), None);
        assert_eq!(unsupported(&pool(json!({ "engine": "Plain", "fallbackEngine": "IoUring" }))), None);
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
