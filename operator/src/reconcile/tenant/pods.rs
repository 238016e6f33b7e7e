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
use super::validate::validate;
use crate::framework::digest;
use crate::reconcile::context::Context;
use crate::reconcile::membership::{applies_to, has_reported};
use crate::reconcile::names::ClusterNames;
use crate::reconcile::selection::selects;

/// Maximum number of names in a message.
const NAMES_MAX: usize = 5;

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
    conflicts: Vec<(String, TenantName)>,
    /// Number of selected names that exceeded the size limit.
    omitted: usize,
}

/// State of a tenant's assignment in one cluster.
#[derive(Clone, Debug, PartialEq)]
pub struct BindingStatus {
    /// `namespace/name` of the cluster.
    cluster: String,
    /// The tenant whose blocks all tenants of the cluster may read.
    public: Option<TenantName>,
    share: TenantShare,
    /// Nodes whose agents serve but do not authorize sessions: they have no bindings file.
    unchecked: Vec<String>,
    /// Nodes whose agents use an older file, which may lack the tenant.
    late: Vec<String>,
    /// Number of nodes whose agents have not reported for a minute, or never.
    silent: usize,
}

/// Whether a tenant selects pods.
pub fn selects_pods(tenant: &CacheTenant) -> bool {
    tenant.spec.namespace_selector.is_some() || !tenant.spec.service_accounts.is_empty()
}

/// Returns the assignment of a cluster from the local stores. It includes rejected tenants, so that an error
/// in a spec does not open a tenant to others.
pub fn assign(cluster: &ClusterNames, context: &Context) -> PodAssignment {
    let tenants = context.stores.tenants.state_filter(|tenant| applies_to(tenant, cluster));
    decide(&tenants, &context.stores.namespaces.state())
}

/// Computes the assignment of a cluster from its tenants.
pub fn decide(tenants: &[Arc<CacheTenant>], namespaces: &[Arc<Namespace>]) -> PodAssignment {
    let (mut bound, mut room) = (PodAssignment::default(), BINDINGS_BYTES_MAX);
    let mut naming: Vec<&CacheTenant> =
        tenants.iter().map(Arc::as_ref).filter(|tenant| selects_pods(tenant)).collect();
    naming.sort_by_key(|tenant| (tenant.creation_timestamp(), tenant.name_any()));
    for tenant in naming {
        // The API server has validated the name.
        let Ok(name) = tenant.name_any().parse::<TenantName>() else { continue };
        let share = bind(&mut bound.bindings, tenant, &name, namespaces, &mut room);
        bound.shares.insert(tenant.name_any(), share);
    }
    if let Some(name) = public_tenant(tenants) {
        bound.bindings.set_public(name);
    }
    bound
}

/// Returns the tenant whose blocks all tenants may read: the oldest accepted one that declares it. Not `default`, which has
/// no salt.
fn public_tenant(tenants: &[Arc<CacheTenant>]) -> Option<TenantName> {
    let is_public = |tenant: &&Arc<CacheTenant>| tenant.spec.public && validate(tenant).is_none();
    let oldest = tenants
        .iter()
        .filter(is_public)
        .min_by_key(|tenant| (tenant.creation_timestamp(), tenant.name_any()))?;
    oldest.name_any().parse().ok()
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
    let mut fits = |entry: &str| match room.checked_sub(PodBindings::cost(entry, name)) {
        Some(left) => {
            *room = left;
            true
        }
        None => false,
    };
    for named in &tenant.spec.service_accounts {
        let account = ServiceAccount { namespace: named.namespace.to_string(), name: named.name.to_string() };
        match bindings.service_account(&account) {
            Some(other) => share.conflicts.push((format!("service account {account}"), other.clone())),
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
            Some(other) => share.conflicts.push((format!("namespace {namespace}"), other.clone())),
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

/// Returns the state of a tenant's assignment in its clusters, from the local stores; empty if it selects no
/// pods and is not public.
pub fn binding_status(
    tenant: &CacheTenant,
    clusters: &TenantClusters,
    context: &Context,
) -> Vec<BindingStatus> {
    if !selects_pods(tenant) && !tenant.spec.public {
        return Vec::new();
    }
    let stores = &context.stores;
    let assignment = stores.assignment();
    let status = |one: &TenantCluster| {
        let bound = assign(&one.names, context);
        let nodes = assignment.cluster(&one.cluster).map(|own| own.nodes.as_slice()).unwrap_or_default();
        let nodes = nodes.iter().map(|node| (node.as_str(), stores.cache_nodes.get(&ObjectRef::new(node))));
        node_status(&one.names.key(), &bound, tenant, nodes)
    };
    clusters.members().map(status).collect()
}

fn node_status<'a>(
    cluster: &str,
    bound: &PodAssignment,
    tenant: &CacheTenant,
    nodes: impl Iterator<Item = (&'a str, Option<Arc<CacheNode>>)>,
) -> BindingStatus {
    let wanted = digest::of(&file(&bound.bindings));
    let mut status = BindingStatus {
        cluster: cluster.to_owned(),
        public: bound.bindings.public().cloned(),
        share: bound.shares.get(&tenant.name_any()).cloned().unwrap_or_default(),
        unchecked: Vec::new(),
        late: Vec::new(),
        silent: 0,
    };
    for (node, found) in nodes {
        let Some(found) = found.filter(|found| has_reported(found)) else {
            status.silent += 1;
            continue;
        };
        let applied = found.status.as_ref().and_then(|status| status.applied.as_ref());
        match applied.and_then(|applied| applied.tenants_digest.as_ref()) {
            None => status.unchecked.push(node.to_owned()),
            Some(digest) if digest.as_str() != wanted => status.late.push(node.to_owned()),
            Some(_) => {}
        }
    }
    status
}

/// Returns condition `PodsBound`; `None` if the tenant selects no pods.
pub fn finding(tenant: &CacheTenant, statuses: &[BindingStatus]) -> Option<Finding> {
    if !selects_pods(tenant) {
        return None;
    }
    let kind = ConditionType::PodsBound;
    if statuses.is_empty() {
        return Some(Finding::no(kind, Reason::ReferenceNotFound, NO_CLUSTER));
    }
    Some(statuses.iter().find_map(problem).unwrap_or_else(|| {
        let clusters: Vec<String> = statuses.iter().map(describe).collect();
        Finding::yes(kind, Reason::AsDesired, clusters.join("; "))
    }))
}

/// Returns condition `Public`; `None` for a tenant that does not declare that all tenants may read its blocks.
pub fn public_finding(tenant: &CacheTenant, statuses: &[BindingStatus]) -> Option<Finding> {
    if !tenant.spec.public {
        return None;
    }
    let (kind, own) = (ConditionType::Public, tenant.name_any());
    if statuses.is_empty() {
        return Some(Finding::no(kind, Reason::ReferenceNotFound, NO_CLUSTER));
    }
    let is_other = |status: &&BindingStatus| status.public.as_ref().is_none_or(|owner| owner.as_str() != own);
    Some(match statuses.iter().find(is_other) {
        None => Finding::yes(
            kind,
            Reason::AsDesired,
            "new sessions of all tenants may read its blocks, once their agents have applied the current file",
        ),
        Some(BindingStatus { cluster, public: Some(owner), .. }) => {
            let message = format!(
                "the older tenant {owner} is public in {cluster}: set public to false for one of them, or limit both to other clusters"
            );
            Finding::no(kind, Reason::Conflict, message)
        }
        Some(BindingStatus { cluster, public: None, .. }) => {
            let message =
                format!("its spec is not accepted, so no tenant of {cluster} is public: correct the spec");
            Finding::no(kind, Reason::InvalidSpec, message)
        }
    })
}

fn describe(status: &BindingStatus) -> String {
    let BindingStatus { cluster, share: TenantShare { namespaces, accounts, .. }, silent, .. } = status;
    let silent = match silent {
        0 => String::new(),
        silent => format!(" ({silent} nodes do not report at present and presumably serve no engines)"),
    };
    format!(
        "in {cluster}, only new sessions from pods of {namespaces} namespaces and {accounts} service accounts belong to the \
         tenant{silent}"
    )
}

/// Returns the first problem, if there is one.
fn problem(status: &BindingStatus) -> Option<Finding> {
    let BindingStatus { cluster, share, unchecked, late, .. } = status;
    let names = |nodes: &[String]| nodes[..nodes.len().min(NAMES_MAX)].join(", ");
    let (reason, message) = if !share.conflicts.is_empty() {
        let conflicts = share.conflicts.iter().map(|(what, whose)| format!("{what} belongs to {whose}"));
        let conflicts: Vec<String> = conflicts.collect();
        let message = format!(
            "older tenants of {cluster} already have {} of the selected namespaces and accounts ({}): select each in one tenant only",
            conflicts.len(),
            names(&conflicts)
        );
        (Reason::Conflict, message)
    } else if share.omitted > 0 {
        let message = format!(
            "{} of the selected namespaces and accounts exceed the limit of {BINDINGS_BYTES_MAX} bytes for their names in {cluster}: \
             select fewer, or use more clusters",
            share.omitted
        );
        (Reason::OverCapacity, message)
    } else if !unchecked.is_empty() {
        let message = format!(
            "{} agents of {cluster} do not authorize sessions ({}), so any session there can claim the tenant: upgrade them",
            unchecked.len(),
            names(unchecked)
        );
        (Reason::NotReported, message)
    } else if !late.is_empty() {
        let message = format!(
            "{} agents of {cluster} have not applied the current assignment yet ({}), which takes about a minute: if it persists, check \
             whether the cluster is paused, and their logs",
            late.len(),
            names(late)
        );
        (Reason::Progressing, message)
    } else {
        return None;
    };
    Some(Finding::no(ConditionType::PodsBound, reason, message))
}

#[cfg(test)]
#[allow(clippy::needless_pass_by_value, reason = "specs are made where they are passed")]
mod tests {
    use reprise_crds::status::ConditionStatus::{False, True};
    use serde_json::{Value, json};

    use super::*;

    fn tenant(name: &str, day: u8, spec: Value) -> Arc<CacheTenant> {
        Arc::new(
            serde_json::from_value(json!({
                "apiVersion": "reprise.dev/v1alpha1", "kind": "CacheTenant", "spec": spec,
                "metadata": { "name": name, "creationTimestamp": format!("2026-01-{day:02}T00:00:00Z") },
            }))
            .expect("a tenant"),
        )
    }

    fn namespace(name: &str, labels: Value) -> Arc<Namespace> {
        let metadata = json!({ "name": name, "labels": labels });
        Arc::new(serde_json::from_value(json!({ "metadata": metadata })).expect("a namespace"))
    }

    fn team(name: &str) -> Value {
        json!({ "namespaceSelector": { "matchLabels": { "team": name } } })
    }

    fn name(text: &str) -> TenantName {
        text.parse().expect("a name")
    }

    #[test]
    fn oldest_accepted_tenant_that_declares_it_is_public() {
        let public = || json!({ "public": true });
        let refused = json!({ "public": true, "maxGpuQueuePairs": 4 });
        let tenants = [
            tenant("refused", 1, refused),
            tenant("young", 3, public()),
            tenant("old", 2, public()),
            tenant("other", 1, json!({})),
        ];
        let (all, none) = (decide(&tenants, &[]), decide(&tenants[..1], &[]));
        assert_eq!(all.bindings.public(), Some(&name("old")));
        assert!(!all.bindings.is_bound(&name("old")), "it selects no pods");
        assert_eq!(none.bindings.public(), None);
        for (index, bound, expected) in [
            (2, Some(&all), Some((True, Reason::AsDesired))),
            (1, Some(&all), Some((False, Reason::Conflict))),
            (0, Some(&none), Some((False, Reason::InvalidSpec))),
            (2, None, Some((False, Reason::ReferenceNotFound))),
            (3, Some(&all), None),
        ] {
            let tenant = &tenants[index];
            let statuses = bound.map(|bound| node_status("n/c", bound, tenant, std::iter::empty()));
            let found = public_finding(tenant, statuses.as_slice());
            assert_eq!(found.map(|found| (found.status, found.reason)), expected, "{}", tenant.name_any());
        }
    }

    #[test]
    fn counts_names_beyond_the_limit_and_the_rest_fits_in_a_config_map() {
        let long = |index: usize| format!("{index:0>63}");
        let namespaces: Vec<Arc<Namespace>> =
            (0..6000).map(|index| namespace(&long(index), json!({ "team": "a" }))).collect();
        let accounts: Vec<Value> =
            (0..3).map(|index| json!({ "namespace": long(index), "name": "b".repeat(190) })).collect();
        let mut spec = team("a");
        spec["serviceAccounts"] = json!(accounts);
        let tenants = [tenant("a", 1, spec)];
        let bound = decide(&tenants, &namespaces);
        let entries: usize =
            bound.bindings.entries().map(|(name, tenant)| name.len() + tenant.as_str().len()).sum();
        assert!(file(&bound.bindings).len() + entries < 1 << 20, "it fits in a ConfigMap");
        assert!(bound.bindings.entries().all(|(name, _)| name.len() <= 253), "its keys are valid");
        let status = node_status("n/c", &bound, &tenants[0], std::iter::empty());
        let Finding { status, reason, message, .. } =
            finding(&tenants[0], &[status]).expect("it selects pods");
        assert_eq!((status, reason), (False, Reason::OverCapacity));
        let omitted = 6003 - bound.bindings.count();
        assert!(omitted > 3 && message.starts_with(&format!("{omitted} of")), "{message}");
    }
}
