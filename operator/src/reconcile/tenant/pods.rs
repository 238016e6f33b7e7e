//! Assigns pods to tenants by the namespaces and service accounts that tenants select. Pure.
//!
//! The assignment of a cluster is a file for its agents ([`crate::reconcile::cluster`]), which authorize sessions by it,
//! and the parameters of the admission policy. If two tenants select the same namespace or account, the older
//! one gets it and the younger one reports the conflict. A tenant with a selection accepts only sessions of
//! the selected pods, even without any such pods.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Namespace;
use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use reprise_crds::status::{ConditionType, Finding, Reason};
use reprise_crds::{CacheNode, CacheTenant};
use reprise_policy::TenantName;
use reprise_policy::identity::{BINDINGS_BYTES_MAX, PodBindings, ServiceAccount};

use super::NO_CLUSTER;
use super::dereference::{TenantCluster, TenantClusters};
use super::validate::rejected;
use crate::framework::digest;
use crate::framework::refusal::{Refusal, list};
use crate::reconcile::context::Context;
use crate::reconcile::membership::{applies_to, has_reported};
use crate::reconcile::names::ClusterNames;
use crate::reconcile::selection::selects;

/// Assignment of pods to tenants in one cluster.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PodAssignment {
    /// The bindings for agents.
    pub bindings: PodBindings,
    /// Result for each tenant with a selection.
    shares: BTreeMap<String, TenantShare>,
}

/// Result for one tenant.
#[derive(Clone, Debug, Default, PartialEq)]
struct TenantShare {
    namespaces: usize,
    accounts: usize,
    /// Selected names that other tenants already have, with their tenants.
    conflicts: Vec<String>,
    /// Number of selected names that exceeded the size limit.
    omitted: usize,
}

/// Assignment in one of a tenant's clusters, and the nodes whose agents apply it.
#[derive(Clone, Debug)]
pub struct ClusterAssignment {
    /// `namespace/name` of the cluster.
    cluster: String,
    assignment: PodAssignment,
    nodes: Vec<(String, Option<Arc<CacheNode>>)>,
}

/// Whether a tenant selects pods.
pub fn selects_pods(tenant: &CacheTenant) -> bool {
    tenant.spec.namespace_selector.is_some() || !tenant.spec.service_accounts.is_empty()
}

/// Returns the assignment of a cluster from the local stores. It includes rejected tenants, so that an error
/// in a spec does not open a tenant to others.
pub fn assign(cluster: &ClusterNames, context: &Context) -> PodAssignment {
    let mut tenants = context.stores.tenants.state();
    let rejected = rejected(&tenants);
    tenants.retain(|tenant| applies_to(tenant, cluster));
    decide(&tenants, &rejected, &context.stores.namespaces.state())
}

/// Computes the assignment of a cluster from its tenants, given the rejected ones of all clusters.
fn decide(
    tenants: &[Arc<CacheTenant>],
    rejected: &BTreeMap<String, Refusal>,
    namespaces: &[Arc<Namespace>],
) -> PodAssignment {
    let (mut bound, mut room) = (PodAssignment::default(), BINDINGS_BYTES_MAX);
    let mut by_age: Vec<&Arc<CacheTenant>> = tenants.iter().collect();
    by_age.sort_by_key(|tenant| (tenant.creation_timestamp(), tenant.name_any()));
    for tenant in by_age {
        // The API server has validated the name.
        let Ok(name) = tenant.name_any().parse::<TenantName>() else { continue };
        if selects_pods(tenant) {
            let share = bind(&mut bound.bindings, tenant, &name, namespaces, &mut room);
            bound.shares.insert(tenant.name_any(), share);
        }
        // The oldest accepted tenant that declares it.
        let is_accepted = !rejected.contains_key(&tenant.name_any());
        if tenant.spec.public && bound.bindings.public().is_none() && is_accepted {
            bound.bindings.set_public(name);
        }
    }
    bound
}

/// Binds the selected names that no other tenant has.
fn bind(
    bindings: &mut PodBindings,
    tenant: &CacheTenant,
    name: &TenantName,
    namespaces: &[Arc<Namespace>],
    room: &mut usize,
) -> TenantShare {
    bindings.bind_tenant(name);
    let mut share = TenantShare::default();
    let mut fits = |entry: &str| {
        let left = room.checked_sub(PodBindings::cost(entry, name));
        *room = left.unwrap_or(*room);
        left.is_some()
    };
    for named in &tenant.spec.service_accounts {
        let account = ServiceAccount { namespace: named.namespace.to_string(), name: named.name.to_string() };
        match bindings.service_account(&account) {
            Some(other) => share.conflicts.push(format!("service account {account} belongs to {other}")),
            None if !account.is_entry() || !fits(&account.key()) => share.omitted += 1,
            None => {
                bindings.bind_service_account(&account, name);
                share.accounts += 1;
            }
        }
    }
    let Some(selector) = &tenant.spec.namespace_selector else { return share };
    let selected: BTreeSet<String> = namespaces
        .iter()
        .filter(|namespace| selects(selector, namespace.labels()))
        .map(|namespace| namespace.name_any())
        .collect();
    for namespace in selected {
        match bindings.namespace(&namespace) {
            Some(other) => share.conflicts.push(format!("namespace {namespace} belongs to {other}")),
            None if !fits(&namespace) => share.omitted += 1,
            None => {
                bindings.bind_namespace(&namespace, name);
                share.namespaces += 1;
            }
        }
    }
    share
}

/// Returns the bindings file for agents.
pub fn file(bindings: &PodBindings) -> String {
    serde_json::to_string(bindings).expect("serializable bindings")
}

/// Returns the assignments of a tenant's clusters from the local stores; empty if it selects no pods and is not public.
pub fn assignments(
    tenant: &CacheTenant,
    clusters: &TenantClusters,
    context: &Context,
) -> Vec<ClusterAssignment> {
    if !selects_pods(tenant) && !tenant.spec.public {
        return Vec::new();
    }
    let stores = &context.stores;
    let of_pools = stores.assignment();
    let of_cluster = |TenantCluster { cluster, names, .. }: &TenantCluster| {
        let nodes = of_pools.cluster(cluster).map(|own| own.nodes.as_slice()).unwrap_or_default();
        let found = |node: &String| (node.clone(), stores.cache_nodes.get(&ObjectRef::new(node)));
        ClusterAssignment {
            cluster: names.key(),
            assignment: assign(names, context),
            nodes: nodes.iter().map(found).collect(),
        }
    };
    clusters.members().map(of_cluster).collect()
}

/// Returns condition `PodsBound`; `None` if the tenant selects no pods.
pub fn finding(tenant: &CacheTenant, assignments: &[ClusterAssignment]) -> Option<Finding> {
    if !selects_pods(tenant) {
        return None;
    }
    let kind = ConditionType::PodsBound;
    if assignments.is_empty() {
        return Some(Finding::no(kind, Reason::ReferenceNotFound, NO_CLUSTER));
    }
    let described: Result<Vec<String>, Refusal> =
        assignments.iter().map(|assignment| describe(tenant, assignment)).collect();
    Some(match described {
        Ok(clusters) => Finding::yes(kind, Reason::AsDesired, clusters.join("; ")),
        Err(Refusal { reason, message }) => Finding::no(kind, reason, message),
    })
}

/// Returns condition `Public`; `None` for a tenant that does not declare that all tenants may read its blocks.
pub fn public_finding(tenant: &CacheTenant, assignments: &[ClusterAssignment]) -> Option<Finding> {
    if !tenant.spec.public {
        return None;
    }
    let (kind, name) = (ConditionType::Public, tenant.name_any());
    if assignments.is_empty() {
        return Some(Finding::no(kind, Reason::ReferenceNotFound, NO_CLUSTER));
    }
    for ClusterAssignment { cluster, assignment, .. } in assignments {
        let (reason, message) = match assignment.bindings.public() {
            Some(owner) if owner.as_str() == name => continue,
            Some(owner) => {
                let message = format!(
                    "the older tenant {owner} is public in {cluster}: set public to false for one of them, or limit both to other \
                     clusters"
                );
                (Reason::Conflict, message)
            }
            None => {
                let message = format!(
                    "its spec is not accepted, so no tenant of {cluster} is public: correct the spec"
                );
                (Reason::InvalidSpec, message)
            }
        };
        return Some(Finding::no(kind, reason, message));
    }
    let message =
        "new sessions of all tenants may read its blocks, once their agents have applied the current file";
    Some(Finding::yes(kind, Reason::AsDesired, message))
}

/// Describes the assignment of a tenant in a cluster. The error is the first problem.
fn describe(tenant: &CacheTenant, of_cluster: &ClusterAssignment) -> Result<String, Refusal> {
    let ClusterAssignment { cluster, assignment, nodes } = of_cluster;
    let share = assignment.shares.get(&tenant.name_any()).cloned().unwrap_or_default();
    let TenantShare { namespaces, accounts, conflicts, omitted } = share;
    if !conflicts.is_empty() {
        let message = format!(
            "older tenants of {cluster} already have {} of the selected namespaces and accounts ({}): select each in one tenant only",
            conflicts.len(),
            list(&conflicts)
        );
        return Err(Refusal::new(Reason::Conflict, message));
    }
    if omitted > 0 {
        let message = format!(
            "{omitted} of the selected namespaces and accounts exceed the limit of {BINDINGS_BYTES_MAX} bytes for their names in \
             {cluster}: select fewer, or use more clusters"
        );
        return Err(Refusal::new(Reason::OverCapacity, message));
    }
    let wanted = digest::of(&file(&assignment.bindings));
    let (mut unchecked, mut late, mut silent) = (Vec::new(), Vec::new(), 0);
    for (node, found) in nodes {
        let Some(found) = found.as_ref().filter(|found| has_reported(found)) else {
            silent += 1;
            continue;
        };
        let applied = found.status.as_ref().and_then(|status| status.applied.as_ref());
        match applied.and_then(|applied| applied.tenants_digest.as_ref()) {
            None => unchecked.push(node.clone()),
            Some(digest) if digest.as_str() != wanted => late.push(node.clone()),
            Some(_) => {}
        }
    }
    if !unchecked.is_empty() {
        let message = format!(
            "{} agents of {cluster} do not authorize sessions ({}), so any session there can claim the tenant: upgrade them",
            unchecked.len(),
            list(&unchecked)
        );
        return Err(Refusal::new(Reason::NotReported, message));
    }
    if !late.is_empty() {
        let message = format!(
            "{} agents of {cluster} have not applied the current assignment yet ({}), which takes about a minute: if it persists, check \
             whether the cluster is paused, and their logs",
            late.len(),
            list(&late)
        );
        return Err(Refusal::new(Reason::Progressing, message));
    }
    let silent = match silent {
        0 => String::new(),
        silent => format!(" ({silent} nodes do not report at present and presumably serve no engines)"),
    };
    Ok(format!(
        "in {cluster}, only new sessions from pods of {namespaces} namespaces and {accounts} service accounts belong to the \
         tenant{silent}"
    ))
}

#[cfg(test)]
#[allow(clippy::needless_pass_by_value, reason = "specs are made where they are passed")]
mod tests {
    use reprise_crds::status::ConditionStatus::{False, True};
    use serde_json::{Value, json};

    use super::*;
    use crate::reconcile::test_objects::{object, resource};

    fn tenant(name: &str, day: u8, spec: Value) -> Arc<CacheTenant> {
        let metadata = json!({ "name": name, "creationTimestamp": format!("2026-01-{day:02}T00:00:00Z") });
        Arc::new(resource(metadata, json!({ "spec": spec })))
    }

    fn in_cluster(assignment: PodAssignment) -> ClusterAssignment {
        ClusterAssignment { cluster: "n/c".to_owned(), assignment, nodes: Vec::new() }
    }

    #[test]
    fn oldest_accepted_tenant_that_declares_it_is_public() {
        let public = || json!({ "public": true });
        let tenants = [
            tenant("refused", 1, json!({ "public": true, "maxGpuQueuePairs": 4 })),
            tenant("young", 3, public()),
            tenant("old", 2, public()),
            tenant("other", 1, json!({})),
        ];
        let [all, none] = [&tenants[..], &tenants[..1]]
            .map(|tenants| vec![in_cluster(decide(tenants, &rejected(tenants), &[]))]);
        assert!(all[0].assignment.bindings.is_empty(), "they select no pods");
        for (index, assignments, expected) in [
            (2, &all, Some((True, Reason::AsDesired))),
            (1, &all, Some((False, Reason::Conflict))),
            (0, &none, Some((False, Reason::InvalidSpec))),
            (2, &vec![], Some((False, Reason::ReferenceNotFound))),
            (3, &all, None),
        ] {
            let found = public_finding(&tenants[index], assignments);
            assert_eq!(found.map(|found| (found.status, found.reason)), expected, "{index}");
        }
    }

    #[test]
    fn counts_names_beyond_the_limit_and_the_rest_fits_in_a_config_map() {
        let long = |index: usize| format!("{index:0>63}");
        let namespace = |index| -> Arc<Namespace> {
            Arc::new(object(json!({ "metadata": { "name": long(index), "labels": { "team": "a" } } })))
        };
        let accounts: Vec<Value> =
            (0..3).map(|index| json!({ "namespace": long(index), "name": "b".repeat(190) })).collect();
        let selector = json!({ "matchLabels": { "team": "a" } });
        let spec = json!({ "namespaceSelector": selector, "serviceAccounts": accounts });
        let tenants = [tenant("a", 1, spec)];
        let bound =
            in_cluster(decide(&tenants, &BTreeMap::new(), &(0..6000).map(namespace).collect::<Vec<_>>()));
        let bindings = &bound.assignment.bindings;
        let entries: usize =
            bindings.entries().map(|(name, tenant)| name.len() + tenant.as_str().len()).sum();
        assert!(file(bindings).len() + entries < 1 << 20, "it fits in a ConfigMap");
        assert!(bindings.entries().all(|(name, _)| name.len() <= 253), "its keys are valid");
        let omitted = 6003 - bindings.count();
        let Finding { status, reason, message, .. } =
            finding(&tenants[0], &[bound]).expect("it selects pods");
        assert_eq!((status, reason), (False, Reason::OverCapacity));
        assert!(omitted > 3 && message.starts_with(&format!("{omitted} of")), "{message}");
    }
}
