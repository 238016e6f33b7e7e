//! What is refused of a tenant.

use reprise_crds::CacheTenant;
use reprise_crds::status::Reason;
use reprise_crds::tenant::{Isolation, Quotas};

use crate::plan::Refusal;

/// Why a tenant is refused, if it is.
pub fn validate(tenant: &CacheTenant) -> Option<Refusal> {
    let spec = &tenant.spec;
    let refuse = |message: String| Some(Refusal::new(Reason::Unsupported, message));
    if spec.isolation != Isolation::Salted {
        return refuse(format!(
            "isolation {} is not in this release: use Salted, in a new CacheTenant",
            spec.isolation
        ));
    }
    if let Some(message) = unreadable(&spec.budget) {
        return Some(Refusal::new(Reason::InvalidSpec, message));
    }
    if spec.max_gpu_queue_pairs.is_some() {
        return refuse(
            "maxGpuQueuePairs is not in this release, which counts queue pairs of controllers only: remove it".to_owned(),
        );
    }
    None
}

/// Sums that a control plane cannot be told.
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
    fn what_this_release_does_not_have_is_refused() {
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
        for (spec, words) in [
            (json!({ "isolation": "Shared" }), "isolation Shared"),
            (json!({ "budget": { "ssd": { "limit": "99999999999Ei" } } }), "budget.ssd.limit"),
            (json!({ "maxGpuQueuePairs": 1 }), "maxGpuQueuePairs"),
        ] {
            assert!(refused(spec.clone()).starts_with(words), "{spec}");
        }
    }
}
