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
use reprise_crds::status::{ConditionType, Finding, Reason};
use reprise_crds::{CacheNode, CacheTenant};
use reprise_policy::TenantName;
use reprise_policy::identity::{BINDINGS_BYTES_MAX, PodBindings, ServiceAccount};

use crate::framework::digest;
use crate::reconcile::context::Context;
use crate::reconcile::membership::applies_to;
use crate::reconcile::membership::has_reported;
use crate::reconcile::names::ClusterNames;
use crate::reconcile::selection::selects;
use crate::reconcile::tenant::validate::validate;

/// Maximum number of names in a message.
const NAMES_MAX: usize = 5;

/// Message of a tenant without clusters.
const NO_CLUSTER: &str = "the tenant applies to no KVCacheCluster: create one, or correct spec.clusters";

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
/// pods.
pub fn binding_status(tenant: &CacheTenant, context: &Context) -> Vec<BindingStatus> {
    if !selects_pods(tenant) {
        return Vec::new();
    }
    let stores = &context.stores;
    let assignment = stores.assignment();
    let status = |cluster: Arc<reprise_crds::KVCacheCluster>| {
        let names = ClusterNames::of(&cluster);
        let bound = assign(&names, context);
        let share = bound.shares.get(&tenant.name_any())?.clone();
        let nodes =
            assignment.cluster(&cluster).map(|assignment| assignment.nodes.clone()).unwrap_or_default();
        let node_report = |node: &String| {
            let found = stores.cache_nodes.get(&kube::runtime::reflector::ObjectRef::new(node));
            (node.clone(), found)
        };
        Some(node_status(
            &names.key(),
            share,
            &digest::of(&file(&bound.bindings)),
            nodes.iter().map(node_report),
        ))
    };
    stores.clusters.state().into_iter().filter_map(status).collect()
}

fn node_status(
    cluster: &str,
    share: TenantShare,
    wanted: &str,
    nodes: impl Iterator<Item = (String, Option<Arc<CacheNode>>)>,
) -> BindingStatus {
    let mut status = BindingStatus {
        cluster: cluster.to_owned(),
        share,
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
            None => status.unchecked.push(node),
            Some(digest) if digest.as_str() != wanted => status.late.push(node),
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

/// Returns condition `Public` of a tenant that declares that all tenants may read its blocks.
pub fn public_finding(tenant: &CacheTenant, context: &Context) -> Option<Finding> {
    let names = |cluster: Arc<reprise_crds::KVCacheCluster>| ClusterNames::of(&cluster);
    let clusters = context.stores.clusters.state().into_iter().map(names);
    let owners = clusters.filter(|cluster| applies_to(tenant, cluster)).map(|cluster| {
        let owner = assign(&cluster, context).bindings.public().map(ToString::to_string);
        (cluster.key(), owner)
    });
    is_public_in(tenant, owners)
}

/// Evaluates the public tenants of the clusters that a tenant applies to.
fn is_public_in(
    tenant: &CacheTenant,
    owners: impl Iterator<Item = (String, Option<String>)>,
) -> Option<Finding> {
    if !tenant.spec.public {
        return None;
    }
    let (kind, own) = (ConditionType::Public, tenant.name_any());
    let mut owners = owners.peekable();
    if owners.peek().is_none() {
        return Some(Finding::no(kind, Reason::ReferenceNotFound, NO_CLUSTER));
    }
    let other = owners.find_map(|(cluster, owner)| match owner {
        Some(owner) if owner == own => None,
        owner => Some((cluster, owner)),
    });
    Some(match other {
        None => Finding::yes(
            kind,
            Reason::AsDesired,
            "new sessions of all tenants may read its blocks, once their agents have applied the current file",
        ),
        Some((cluster, Some(owner))) => {
            let message = format!(
                "the older tenant {owner} is public in {cluster}: set public to false for one of them, or limit both to other clusters"
            );
            Finding::no(kind, Reason::Conflict, message)
        }
        Some((cluster, None)) => {
            let message =
                format!("its spec is not accepted, so no tenant of {cluster} is public: correct the spec");
            Finding::no(kind, Reason::InvalidSpec, message)
        }
    })
}

/// Whether some node has yet to apply the current assignment.
pub fn is_awaited(statuses: &[BindingStatus]) -> bool {
    statuses.iter().any(|status| !status.late.is_empty())
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
    let kind = ConditionType::PodsBound;
    let BindingStatus { cluster, share, unchecked, late, .. } = status;
    if !share.conflicts.is_empty() {
        let others =
            share.conflicts.iter().take(NAMES_MAX).map(|(what, whose)| format!("{what} belongs to {whose}"));
        let message = format!(
            "older tenants of {cluster} already have {} of the selected namespaces and accounts ({}): select each in one tenant only",
            share.conflicts.len(),
            others.collect::<Vec<_>>().join(", ")
        );
        return Some(Finding::no(kind, Reason::Conflict, message));
    }
    if share.omitted > 0 {
        let message = format!(
            "{} of the selected namespaces and accounts exceed the limit of {BINDINGS_BYTES_MAX} bytes for their names in {cluster}: \
             select fewer, or use more clusters",
            share.omitted
        );
        return Some(Finding::no(kind, Reason::OverCapacity, message));
    }
    let join_names =
        |nodes: &[String]| nodes.iter().take(NAMES_MAX).cloned().collect::<Vec<String>>().join(", ");
    if !unchecked.is_empty() {
        let message = format!(
            "{} agents of {cluster} do not authorize sessions ({}), so any session there can claim the tenant: upgrade them",
            unchecked.len(),
            join_names(unchecked)
        );
        return Some(Finding::no(kind, Reason::NotReported, message));
    }
    if !late.is_empty() {
        let message = format!(
            "{} agents of {cluster} have not applied the current assignment yet ({}), which takes about a minute: if it persists, check \
             whether the cluster is paused, and their logs",
            late.len(),
            join_names(late)
        );
        return Some(Finding::no(kind, Reason::Progressing, message));
    }
    None
}

#[cfg(test)]
#[allow(clippy::needless_pass_by_value, reason = "specs are made where they are passed")]
mod tests {
    use reprise_crds::status::ConditionStatus;
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

    fn owner(bound: &PodAssignment, namespace: &str, name: &str) -> Option<String> {
        let account = ServiceAccount { namespace: namespace.to_owned(), name: name.to_owned() };
        bound.bindings.owner(&account).map(ToString::to_string)
    }

    fn status(bound: &PodAssignment, tenant: &str) -> BindingStatus {
        node_status("n/c", bound.shares[tenant].clone(), "sha256:1", std::iter::empty())
    }

    #[test]
    fn pods_belong_to_the_tenant_of_their_account_or_else_of_their_namespace() {
        let accounts = json!({ "serviceAccounts": [{ "namespace": "chat", "name": "batch" }] });
        let tenants = [tenant("a", 1, team("a")), tenant("b", 2, accounts), tenant("c", 3, json!({}))];
        let namespaces = [namespace("chat", json!({ "team": "a" })), namespace("other", json!({}))];
        let bound = decide(&tenants, &namespaces);
        assert_eq!(owner(&bound, "chat", "vllm").as_deref(), Some("a"));
        assert_eq!(owner(&bound, "chat", "batch").as_deref(), Some("b"));
        assert_eq!(owner(&bound, "other", "vllm"), None);
        assert!(!bound.bindings.is_bound(&"c".parse().expect("a name")), "it selects no pods");
        let condition = finding(&tenants[0], &[status(&bound, "a")]).expect("it selects pods");
        assert_eq!((condition.status, condition.reason), (ConditionStatus::True, Reason::AsDesired));
        assert!(condition.message.contains("1 namespaces and 0 service accounts"), "{}", condition.message);
        assert_eq!(finding(&tenants[2], &[]), None);
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
        let bound = decide(&tenants, &[]);
        assert_eq!(bound.bindings.public().map(ToString::to_string).as_deref(), Some("old"));
        assert!(!bound.bindings.is_bound(&"old".parse().expect("a name")), "it selects no pods");
        let finding = |tenant: &CacheTenant, owner: Option<&str>| {
            let owners = [("n/c".to_owned(), owner.map(str::to_owned))];
            is_public_in(tenant, owners.into_iter()).map(|found| (found.status, found.reason))
        };
        assert_eq!(finding(&tenants[2], Some("old")), Some((ConditionStatus::True, Reason::AsDesired)));
        assert_eq!(finding(&tenants[1], Some("old")), Some((ConditionStatus::False, Reason::Conflict)));
        assert_eq!(finding(&tenants[0], None), Some((ConditionStatus::False, Reason::InvalidSpec)));
        assert_eq!(finding(&tenants[3], Some("old")), None, "it does not declare it");
        let nowhere = is_public_in(&tenants[2], std::iter::empty()).expect("it declares it");
        assert_eq!((nowhere.status, nowhere.reason), (ConditionStatus::False, Reason::ReferenceNotFound));
        assert_eq!(is_public_in(&tenants[3], std::iter::empty()), None);
        assert_eq!(decide(&tenants[3..], &[]).bindings.public(), None);
    }

    #[test]
    fn older_tenant_gets_a_namespace_that_two_select() {
        let tenants = [tenant("young", 2, team("a")), tenant("old", 1, team("a"))];
        let bound = decide(&tenants, &[namespace("chat", json!({ "team": "a" }))]);
        assert_eq!(owner(&bound, "chat", "vllm").as_deref(), Some("old"));
        let condition = finding(&tenants[0], &[status(&bound, "young")]).expect("it selects pods");
        assert_eq!((condition.status, condition.reason), (ConditionStatus::False, Reason::Conflict));
        assert!(condition.message.contains("namespace chat belongs to old"), "{}", condition.message);
        let old = finding(&tenants[1], &[status(&bound, "old")]).expect("it selects pods");
        assert_eq!(old.status, ConditionStatus::True);
        assert!(
            bound.bindings.is_bound(&"young".parse().expect("a name")),
            "it accepts no sessions instead of all"
        );
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
        let bound_of = bound.bindings.count();
        let entries: usize =
            bound.bindings.entries().map(|(name, tenant)| name.len() + tenant.as_str().len()).sum();
        assert!(file(&bound.bindings).len() + entries < 1 << 20, "it fits in a ConfigMap");
        assert!(bound.bindings.entries().all(|(name, _)| name.len() <= 253), "its keys are valid");
        let condition = finding(&tenants[0], &[status(&bound, "a")]).expect("it selects pods");
        assert_eq!((condition.status, condition.reason), (ConditionStatus::False, Reason::OverCapacity));
        let omitted = 6003 - bound_of;
        assert!(
            omitted > 3 && condition.message.starts_with(&format!("{omitted} of")),
            "{}",
            condition.message
        );
    }

    #[test]
    fn names_nodes_without_the_current_file_and_counts_silent_ones() {
        let node = |digest: Option<&str>, at: &str| -> Option<Arc<CacheNode>> {
            let applied = digest.map_or(json!({}), |digest| json!({ "tenantsDigest": digest }));
            let object = json!({
                "apiVersion": "reprise.dev/v1alpha1", "kind": "CacheNode", "metadata": { "name": "x" },
                "spec": { "nodeName": "x" }, "status": { "applied": applied, "lastUpdated": at },
            });
            Some(Arc::new(serde_json::from_value(object).expect("a node")))
        };
        let now = crate::framework::clock::now().0.to_string();
        let whose = tenant("a", 1, team("a"));
        let bound = decide(std::slice::from_ref(&whose), &[]);
        let evaluate = |nodes: Vec<Option<Arc<CacheNode>>>| {
            let nodes = nodes.into_iter().enumerate().map(|(index, node)| (format!("n{index}"), node));
            let status = node_status("n/c", bound.shares["a"].clone(), "sha256:1", nodes);
            let awaited = is_awaited(std::slice::from_ref(&status));
            let found = finding(&whose, &[status]).expect("it selects pods");
            ((found.status, found.reason, awaited), found.message)
        };
        let well = || node(Some("sha256:1"), &now);
        let (condition, _) = evaluate(vec![well()]);
        assert_eq!(condition, (ConditionStatus::True, Reason::AsDesired, false));
        let (condition, message) = evaluate(vec![node(Some("sha256:0"), &now), well()]);
        assert_eq!(condition, (ConditionStatus::False, Reason::Progressing, true));
        assert!(message.contains("(n0)"), "{message}");
        let (condition, message) = evaluate(vec![well(), node(None, &now)]);
        assert_eq!(condition, (ConditionStatus::False, Reason::NotReported, false));
        assert!(message.contains("(n1)"), "{message}");
        let (condition, message) = evaluate(vec![well(), None, node(None, "2026-01-01T00:00:00Z")]);
        assert_eq!(
            condition,
            (ConditionStatus::True, Reason::AsDesired, false),
            "silent nodes serve no engines"
        );
        assert!(message.contains("2 nodes do not report"), "{message}");
    }
}
