//! Validates a tenant, except for rules of the schema.

use kube::ResourceExt;
use reprise_crds::CacheTenant;
use reprise_crds::status::Reason;
use reprise_crds::tenant::Isolation;
use reprise_policy::TenantName;

use crate::framework::refusal::Refusal;

/// Returns why a tenant is rejected; `None` if it is accepted.
pub fn validate(tenant: &CacheTenant) -> Option<Refusal> {
    let spec = &tenant.spec;
    let is_default = tenant.name_any() == TenantName::default_tenant().as_str();
    let (reason, message) = if spec.isolation == Isolation::Shared {
        let message = "isolation Shared is not supported by this release: create a CacheTenant with Salted or Encrypted";
        (Reason::Unsupported, message)
    } else if is_default && spec.isolation == Isolation::Encrypted {
        let message = "tenant default has no isolation salt, by which agents learn that it must be encrypted: use another \
                       tenant for encrypted blocks";
        (Reason::InvalidSpec, message)
    } else if is_default && spec.public {
        let message = "tenant default has no isolation salt, so it cannot be public: use another tenant for shared prompts";
        (Reason::InvalidSpec, message)
    } else if spec.max_gpu_queue_pairs.is_some() {
        (Reason::Unsupported, "maxGpuQueuePairs is not supported by this release: remove it")
    } else {
        return None;
    };
    Some(Refusal::new(reason, message))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::reconcile::test_objects::object;

    #[test]
    fn rejects_unsupported_and_contradicting_settings() {
        for (name, spec, words) in [
            ("t", json!({ "public": true, "budget": { "ssd": { "limit": "1Gi" } } }), ""),
            ("t", json!({ "isolation": "Encrypted" }), ""),
            (
                "default",
                json!({ "isolation": "Encrypted" }),
                "tenant default has no isolation salt, by which",
            ),
            ("default", json!({ "public": true }), "tenant default has no isolation salt, so"),
            ("t", json!({ "isolation": "Shared" }), "isolation Shared"),
            ("t", json!({ "maxGpuQueuePairs": 1 }), "maxGpuQueuePairs"),
        ] {
            let tenant = CacheTenant::new(name, object(spec));
            let message = validate(&tenant).map(|refused| refused.message).unwrap_or_default();
            assert!(message.starts_with(words) && message.is_empty() == words.is_empty(), "{message}");
        }
    }
}
