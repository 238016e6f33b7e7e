//! What pods of all components have in common.

use reprise_crds::cluster::Images;
use reprise_crds::fields::{Amounts, PullPolicy, Quantity, Resources, Toleration};
use serde_json::{Map, Value, json};

/// For so long a pod has to be ready before the next one is replaced. A member has heard of its part of the directory by then, from agents that
/// come back to it; members have heard of an agent's blocks; and a pod that is not ready once more for a moment is over it.
pub(super) const SETTLED_SECONDS: u32 = 5;

/// CPU and memory that a container gets when the cluster says nothing.
pub(super) struct Reckoned {
    /// Thousandths of a core.
    pub(super) cpu_millis: u64,
    /// Bytes.
    pub(super) memory: u64,
    /// Bytes that come on top of what the cluster says: the arena.
    pub(super) beside: u64,
}

/// Requests and limits. What is not said is reckoned; the limit of memory is what was requested, since what is taken is taken whole.
pub(super) fn resources(said: Option<&Resources>, reckoned: &Reckoned) -> Value {
    let nothing = Amounts::default();
    let requests = said.and_then(|said| said.requests.as_ref()).unwrap_or(&nothing);
    let limits = said.and_then(|said| said.limits.as_ref()).unwrap_or(&nothing);
    let bytes = |amount: &Option<Quantity>| amount.as_ref().and_then(|amount| amount.bytes().ok());
    let memory = bytes(&requests.memory).unwrap_or(reckoned.memory);
    let most = bytes(&limits.memory).unwrap_or(memory).max(memory);
    let cpu = requests.cpu.as_ref().map(|cpu| cpu.as_str().to_owned());
    let cpu = cpu.unwrap_or_else(|| format!("{}m", reckoned.cpu_millis));
    let mut limit = Map::new();
    limit.insert("memory".to_owned(), json!(Quantity::of_bytes(most + reckoned.beside)));
    if let Some(cpu) = &limits.cpu {
        limit.insert("cpu".to_owned(), json!(as_stored(cpu.as_str())));
    }
    json!({
        "requests": { "cpu": as_stored(&cpu), "memory": Quantity::of_bytes(memory + reckoned.beside) },
        "limits": limit,
    })
}

/// As the API server writes an amount of CPU back: whole cores without `m`.
fn as_stored(cpu: &str) -> String {
    let millis = cpu.strip_suffix('m').and_then(|millis| millis.parse::<u64>().ok());
    match millis {
        Some(millis) if millis % 1000 == 0 => (millis / 1000).to_string(),
        _ => cpu.to_owned(),
    }
}

/// Fetching of images: for the container, and for the pod.
pub(super) fn pull(images: &Images) -> (PullPolicy, Value) {
    let secrets: Vec<Value> =
        images.pull_secrets.iter().map(|secret| json!({ "name": secret.name })).collect();
    (images.pull_policy, json!(secrets))
}

/// Tolerations as pods have them.
pub(super) fn tolerations(said: &[Toleration]) -> Value {
    json!(said)
}

/// Removes what is empty, which the API server would not store.
pub(super) fn without_empty(mut fields: Value) -> Value {
    if let Some(fields) = fields.as_object_mut() {
        fields.retain(|_, value| match value {
            Value::Null => false,
            Value::Array(items) => !items.is_empty(),
            Value::Object(items) => !items.is_empty(),
            _ => true,
        });
    }
    fields
}

/// What a container may, at the least: nothing beyond its user.
pub(super) fn confined() -> Value {
    json!({
        "allowPrivilegeEscalation": false,
        "readOnlyRootFilesystem": true,
        "capabilities": { "drop": ["ALL"] },
    })
}

/// What a pod of the level `restricted` says.
pub(super) fn restricted() -> Value {
    json!({
        "runAsNonRoot": true,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "seccompProfile": { "type": "RuntimeDefault" },
    })
}

/// The user of our images.
const USER: u32 = 65_532;

/// A probe of a page.
pub(super) fn probe(path: &str, port: &str, every_seconds: u32, failures: u32) -> Value {
    json!({
        "httpGet": { "path": path, "port": port, "scheme": "HTTP" },
        "periodSeconds": every_seconds,
        "timeoutSeconds": 2,
        "failureThreshold": failures,
    })
}

/// A start-up probe of a page that is answered when the start is over.
///
/// A probe that fails is a warning among the events of its pod, also during a start. So our programs listen before anything that takes long, and
/// the kubelet waits for their answer: in a normal start the first probe succeeds.
pub(super) fn startup_probe(path: &str, port: &str, starts_within_seconds: u32) -> Value {
    json!({
        "httpGet": { "path": path, "port": port, "scheme": "HTTP" },
        "initialDelaySeconds": LISTENS_SECONDS,
        "periodSeconds": 2,
        "timeoutSeconds": starts_within_seconds,
        "failureThreshold": START_ATTEMPTS,
    })
}

/// Our programs listen this soon after their start.
const LISTENS_SECONDS: u32 = 2;
/// A start that takes longer than this many times what it may is given up.
const START_ATTEMPTS: u32 = 2;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_not_said_is_reckoned_and_the_arena_comes_on_top() {
        let reckoned = Reckoned { cpu_millis: 1000, memory: 1 << 30, beside: 4 << 30 };
        let expected = json!({
            "requests": { "cpu": "1", "memory": "5Gi" }, "limits": { "memory": "5Gi" },
        });
        assert_eq!(resources(None, &reckoned), expected);
        let said: Resources = serde_json::from_value(json!({
            "requests": { "memory": "512Mi", "cpu": "250m" }, "limits": { "memory": "2Gi", "cpu": "2000m" },
        }))
        .expect("resources");
        let expected = json!({
            "requests": { "cpu": "250m", "memory": "4608Mi" }, "limits": { "memory": "6Gi", "cpu": "2" },
        });
        assert_eq!(resources(Some(&said), &reckoned), expected);
    }
}
