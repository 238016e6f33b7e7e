//! Validates tenants, except for rules of the schema.
//!
//! Agents refuse a configuration in which two tenants have the same number, or with too many tenants. So the younger of two
//! tenants is rejected, if one cluster has both. Age is `creationTimestamp`, then UID.

use std::collections::BTreeMap;
use std::sync::Arc;

use kube::ResourceExt;
use reprise_crds::CacheTenant;
use reprise_crds::fields::ClusterRef;
use reprise_crds::status::Reason;
use reprise_crds::tenant::Isolation;
use reprise_policy::tenant::TENANTS_MAX;
use reprise_policy::{TenantId, TenantName};

use crate::framework::refusal::Refusal;

/// Maximum number of tenants of a cluster: an agent has one more, for sessions without a tenant.
const TENANTS_OF_CLUSTER_MAX: usize = TENANTS_MAX - 1;

/// Returns the rejected tenants of all, by name, and why.
pub fn rejected(tenants: &[Arc<CacheTenant>]) -> BTreeMap<String, Refusal> {
    let mut rejected = BTreeMap::new();
    let mut by_age: Vec<&Arc<CacheTenant>> = tenants.iter().collect();
    by_age.sort_by_cached_key(|tenant| (tenant.creation_timestamp(), tenant.uid()));
    let mut by_number: BTreeMap<TenantId, Vec<&CacheTenant>> = BTreeMap::new();
    let mut accepted: Vec<&CacheTenant> = Vec::new();
    for tenant in by_age {
        let number = number(tenant);
        let same = by_number.entry(number).or_default();
        let refusal = validate(tenant)
            .or_else(|| Some(same_number(number, same.iter().find(|other| share_cluster(tenant, other))?)))
            .or_else(|| (!is_default(tenant) && is_excess(tenant, &accepted)).then(too_many));
        match refusal {
            Some(refusal) => drop(rejected.insert(tenant.name_any(), refusal)),
            None => {
                same.push(tenant);
                if !is_default(tenant) {
                    accepted.push(tenant);
                }
            }
        }
    }
    rejected
}

fn is_default(tenant: &CacheTenant) -> bool {
    tenant.name_any() == TenantName::default_tenant().as_str()
}

/// Returns the number of a tenant in the headers of blocks.
fn number(tenant: &CacheTenant) -> TenantId {
    // The API server has validated the name.
    let of_name = || tenant.name_any().parse().map_or(TenantId::DEFAULT, |name: TenantName| name.number());
    tenant.spec.number.map_or_else(of_name, TenantId)
}

/// Whether one cluster may have both tenants.
fn share_cluster(one: &CacheTenant, other: &CacheTenant) -> bool {
    let (ours, theirs) = (&one.spec.clusters, &other.spec.clusters);
    ours.is_empty() || theirs.is_empty() || ours.iter().any(|cluster| theirs.contains(cluster))
}

/// Whether a cluster of a tenant has as many older tenants as agents accept.
fn is_excess(tenant: &CacheTenant, older: &[&CacheTenant]) -> bool {
    if older.len() < TENANTS_OF_CLUSTER_MAX {
        return false;
    }
    let everywhere = older.iter().filter(|other| other.spec.clusters.is_empty()).count();
    let mut naming: BTreeMap<&ClusterRef, usize> = BTreeMap::new();
    for cluster in older.iter().flat_map(|other| &other.spec.clusters) {
        *naming.entry(cluster).or_default() += 1;
    }
    let of_cluster = |cluster| naming.get(cluster).copied().unwrap_or_default();
    let most = match tenant.spec.clusters.as_slice() {
        [] => naming.values().copied().max(),
        named => named.iter().map(of_cluster).max(),
    };
    everywhere + most.unwrap_or_default() >= TENANTS_OF_CLUSTER_MAX
}

fn same_number(number: TenantId, other: &CacheTenant) -> Refusal {
    let message = format!(
        "CacheTenant {}, which is older, has the same number {}: set spec.number to one that no tenant of these clusters has; \
         a number that is set cannot change, so then create the tenant again",
        other.name_any(),
        number.0
    );
    Refusal::new(Reason::Conflict, message)
}

fn too_many() -> Refusal {
    let message = format!(
        "{TENANTS_OF_CLUSTER_MAX} older tenants apply to the same clusters, the most for an agent: delete some, or set \
         spec.clusters"
    );
    Refusal::new(Reason::OverCapacity, message)
}

/// Returns why a tenant is rejected for its own spec.
fn validate(tenant: &CacheTenant) -> Option<Refusal> {
    let spec = &tenant.spec;
    let is_default = is_default(tenant);
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
    use crate::reconcile::test_objects::{object, resource};

    fn tenant(name: &str, age: u32, spec: &serde_json::Value) -> Arc<CacheTenant> {
        let created = format!("2026-01-{:02}T00:00:00Z", 28 - age);
        let metadata = json!({ "name": name, "uid": name, "creationTimestamp": created });
        Arc::new(resource(metadata, json!({ "spec": spec })))
    }

    #[test]
    fn younger_tenant_with_the_same_number_in_one_cluster_is_rejected() {
        let in_clusters = |names: &[&str], number: u16| {
            let clusters = names.iter().map(|name| json!({ "namespace": "n", "name": name }));
            json!({ "clusters": clusters.collect::<Vec<_>>(), "number": number })
        };
        let derived = number(&tenant("young", 1, &json!({}))).0;
        for (old, young, is_rejected) in [
            (in_clusters(&[], 7), in_clusters(&[], 7), true),
            (in_clusters(&[], 7), in_clusters(&[], 8), false),
            (in_clusters(&["a", "b"], 7), in_clusters(&["b"], 7), true),
            (in_clusters(&["a"], 7), in_clusters(&["b"], 7), false),
            (in_clusters(&["a"], 7), in_clusters(&[], 7), true),
            // The number of the younger one comes from its name.
            (in_clusters(&[], derived), json!({}), true),
            // A tenant that is rejected has no number.
            (json!({ "isolation": "Shared", "number": 7 }), in_clusters(&[], 7), false),
        ] {
            let rejected = rejected(&[tenant("young", 1, &young), tenant("old", 5, &old)]);
            let message = rejected.get("young").map(|refusal| refusal.message.as_str()).unwrap_or_default();
            assert_eq!(
                message.starts_with("CacheTenant old, which is older"),
                is_rejected,
                "{old} {young}: {message}"
            );
        }
    }

    #[test]
    fn agents_accept_the_oldest_tenants_of_a_cluster() {
        let last = u16::try_from(TENANTS_OF_CLUSTER_MAX).expect("few") + 1;
        let of_cluster = |number: u16| {
            let cluster = json!({ "namespace": "n", "name": format!("c{}", number % 2) });
            tenant(&format!("t{number:04}"), 2, &json!({ "number": number, "clusters": [cluster] }))
        };
        let mut divided: Vec<Arc<CacheTenant>> = (1..=last).map(of_cluster).collect();
        divided.push(tenant("everywhere", 1, &json!({ "number": 60_000 })));
        assert!(super::rejected(&divided).is_empty(), "each cluster has half of them");
        let numbered = |number: u16| tenant(&format!("t{number:04}"), 1, &json!({ "number": number }));
        let all: Vec<Arc<CacheTenant>> = (1..=last).map(numbered).collect();
        let rejected = rejected(&all);
        assert_eq!(rejected.keys().collect::<Vec<_>>(), [&format!("t{last:04}")]);
        assert_eq!(rejected.values().next().map(|refusal| refusal.reason), Some(Reason::OverCapacity));
    }

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
