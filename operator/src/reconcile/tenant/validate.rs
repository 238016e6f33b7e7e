//! Validates a tenant.

use kube::ResourceExt;
use reprise_crds::CacheTenant;
use reprise_crds::status::Reason;
use reprise_crds::tenant::{Isolation, Quotas};
use reprise_policy::TenantName;

use crate::framework::refusal::Refusal;

/// Returns why a tenant is rejected; `None` if it is accepted.
pub fn validate(tenant: &CacheTenant) -> Option<Refusal> {
    let spec = &tenant.spec;
    let is_default = tenant.name_any() == TenantName::default_tenant().as_str();
    let is_encrypted = spec.isolation == Isolation::Encrypted;
    let refuse = |reason, message: &str| Some(Refusal::new(reason, message));
    if spec.isolation == Isolation::Shared {
        let message = "isolation Shared is not supported by this release: create a CacheTenant with Salted or Encrypted";
        return refuse(Reason::Unsupported, message);
    }
    if is_encrypted && is_default {
        let message = "tenant default has no isolation salt, by which agents learn that it must be encrypted: use another \
                       tenant for encrypted blocks";
        return refuse(Reason::InvalidSpec, message);
    }
    if is_encrypted && spec.public {
        let message = "a public tenant must not be encrypted, because readers of other tenants would write copies of its \
                       blocks without its key: set public to false, or create a CacheTenant with isolation Salted";
        return refuse(Reason::InvalidSpec, message);
    }
    if spec.public && is_default {
        let message = "tenant default has no isolation salt, so it cannot be public: use another tenant for shared prompts";
        return refuse(Reason::InvalidSpec, message);
    }
    if let Some(message) = unreadable(&spec.budget) {
        return refuse(Reason::InvalidSpec, &message);
    }
    let message = "maxGpuQueuePairs is not supported by this release: remove it";
    spec.max_gpu_queue_pairs.and_then(|_| refuse(Reason::Unsupported, message))
}

/// Returns the error of a budget quantity that cannot be parsed.
fn unreadable(budget: &Quotas) -> Option<String> {
    let Quotas { dram, ssd } = budget;
    let reserved = [("dram.reserved", Some(&dram.reserved)), ("ssd.reserved", Some(&ssd.reserved))];
    let limits = [("dram.limit", dram.limit.as_ref()), ("ssd.limit", ssd.limit.as_ref())];
    reserved.into_iter().chain(limits).find_map(|(field, amount)| {
        let error = amount?.bytes().err()?;
        Some(format!("budget.{field}: {error}"))
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn rejects_unsupported_and_contradicting_settings() {
        let encrypted = |public: bool| {
            let reference = json!({ "namespace": "n", "name": "s", "key": "k" });
            json!({ "isolation": "Encrypted", "keySecretRef": reference, "public": public })
        };
        for (name, spec, words) in [
            ("t", json!({ "perNode": { "ssd": { "limit": "1Gi" } }, "number": 7 }), ""),
            ("t", json!({ "namespaceSelector": {}, "public": true }), ""),
            ("t", json!({ "budget": { "ssd": { "limit": "1Gi" } }, "deletionPolicy": "Purge" }), ""),
            ("t", encrypted(false), ""),
            ("t", encrypted(true), "a public tenant must not be encrypted"),
            ("default", encrypted(false), "tenant default has no isolation salt, by which"),
            ("default", json!({ "public": true }), "tenant default has no isolation salt, so"),
            ("t", json!({ "isolation": "Shared" }), "isolation Shared"),
            ("t", json!({ "budget": { "ssd": { "limit": "99999999999Ei" } } }), "budget.ssd.limit"),
            ("t", json!({ "maxGpuQueuePairs": 1 }), "maxGpuQueuePairs"),
        ] {
            let tenant = CacheTenant::new(name, serde_json::from_value(spec).expect("a spec"));
            let message = validate(&tenant).map(|refused| refused.message).unwrap_or_default();
            assert!(message.starts_with(words) && message.is_empty() == words.is_empty(), "{message}");
        }
    }
}
