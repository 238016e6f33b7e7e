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
    let refuse = |message: String| Some(Refusal::new(Reason::Unsupported, message));
    if spec.isolation == Isolation::Shared {
        return refuse(format!(
            "isolation {} is not supported by this release: create a CacheTenant with Salted or Encrypted",
            spec.isolation
        ));
    }
    let is_default = tenant.name_any() == TenantName::default_tenant().as_str();
    if spec.isolation == Isolation::Encrypted && is_default {
        let message = "tenant default has no isolation salt, by which agents learn that it must be encrypted: use another \
                       tenant for encrypted blocks";
        return Some(Refusal::new(Reason::InvalidSpec, message));
    }
    if spec.public && spec.isolation == Isolation::Encrypted {
        let message = "a public tenant must not be encrypted, because readers of other tenants would write copies of its \
                       blocks without its key: set public to false, or create a CacheTenant with isolation Salted";
        return Some(Refusal::new(Reason::InvalidSpec, message));
    }
    if spec.public && is_default {
        let message = "tenant default has no isolation salt, so it cannot be public: use another tenant for shared prompts";
        return Some(Refusal::new(Reason::InvalidSpec, message.to_owned()));
    }
    if let Some(message) = unreadable(&spec.budget) {
        return Some(Refusal::new(Reason::InvalidSpec, message));
    }
    if spec.max_gpu_queue_pairs.is_some() {
        return refuse("maxGpuQueuePairs is not supported by this release: remove it".to_owned());
    }
    None
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
    fn rejects_encryption_of_the_default_tenant_and_of_public_ones() {
        let reference = json!({ "namespace": "n", "name": "s", "key": "k" });
        let refused = |name: &str, public: bool| {
            let spec = json!({ "isolation": "Encrypted", "keySecretRef": reference, "public": public });
            let spec = serde_json::from_value(spec).expect("a spec");
            validate(&CacheTenant::new(name, spec)).map(|refused| refused.message).unwrap_or_default()
        };
        assert_eq!(refused("t", false), "");
        assert!(refused("default", false).contains("no isolation salt"));
        assert!(refused("t", true).starts_with("a public tenant must not be encrypted"));
    }

    #[test]
    fn rejects_unsupported_settings() {
        let refused = |spec: serde_json::Value| {
            let spec = serde_json::from_value(spec).expect("a spec");
            validate(&CacheTenant::new("t", spec)).map(|refused| refused.message).unwrap_or_default()
        };
        assert_eq!(refused(json!({ "perNode": { "ssd": { "limit": "1Gi" } }, "number": 7 })), "");
        assert_eq!(refused(json!({ "namespaceSelector": {} })), "");
        for policy in ["Orphan", "Purge"] {
            let spec = json!({ "budget": { "ssd": { "limit": "1Gi" } }, "deletionPolicy": policy });
            assert_eq!(refused(spec), "");
        }
        for (spec, message) in [
            (json!({ "isolation": "Shared" }), "isolation Shared"),
            (json!({ "budget": { "ssd": { "limit": "99999999999Ei" } } }), "budget.ssd.limit"),
            (json!({ "maxGpuQueuePairs": 1 }), "maxGpuQueuePairs"),
        ] {
            assert!(refused(spec.clone()).starts_with(message), "{spec}");
        }
    }
}
