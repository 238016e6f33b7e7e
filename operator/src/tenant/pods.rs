//! Which pods are which tenant's: out of what tenants say of namespaces and service accounts, and the namespaces that there are. Pure.
//!
//! The outcome of a cluster goes to its agents as a file ([`crate::cluster`]), which check sessions by it, and to the policy that changes pods.
//! Of two tenants that name the same the older one has it, and the younger one is told. A tenant that names any pods is kept for those that it
//! names, also while there are none.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Namespace;
use kube::ResourceExt;
use reprise_crds::status::{ConditionType, Finding, Reason};
use reprise_crds::{CacheNode, CacheTenant};
use reprise_policy::TenantName;
use reprise_policy::identity::{BINDINGS_BYTES_MAX, PodBindings, ServiceAccount};

use crate::cluster::dereference::knows;
use crate::cluster::status::has_reported;
use crate::context::Context;
use crate::digest;
use crate::names::ClusterNames;
use crate::selection::selects;

/// Names in a message, at the most.
const NAMES_MAX: usize = 5;

/// Whose the pods of one cluster are.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Bound {
    /// What agents are told.
    pub bindings: PodBindings,
    /// What came of each tenant that names pods.
    shares: BTreeMap<String, Share>,
}

/// What came of one tenant.
#[derive(Clone, Debug, Default, PartialEq)]
struct Share {
    namespaces: usize,
    accounts: usize,
    /// What it named and others have, with whose it is.
    others: Vec<(String, TenantName)>,
    /// What there was no room for.
    left_out: usize,
}

/// What one cluster has made of a tenant's pods.
#[derive(Clone, Debug, PartialEq)]
pub struct Standing {
    /// The cluster, `namespace/name`.
    cluster: String,
    share: Share,
    /// Nodes whose agents serve and check nobody: they have no such file.
    unchecked: Vec<String>,
    /// Nodes whose agents work by an older file, which may not have the tenant.
    late: Vec<String>,
    /// Nodes whose agents have said nothing for a minute, or never.
    silent: usize,
}

/// Whether a tenant names pods.
pub fn names_pods(tenant: &CacheTenant) -> bool {
    tenant.spec.namespace_selector.is_some() || !tenant.spec.service_accounts.is_empty()
}

/// Whose the pods of a cluster are, from the stores. Of a tenant that is refused, too: what it keeps is not anybody's because of an error.
pub fn bound(cluster: &ClusterNames, context: &Context) -> Bound {
    let tenants = context.world.tenants.state_filter(|tenant| knows(tenant, cluster));
    decide(&tenants, &context.world.namespaces.state())
}

/// Whose the pods of a cluster are, out of its tenants.
pub fn decide(tenants: &[Arc<CacheTenant>], namespaces: &[Arc<Namespace>]) -> Bound {
    let (mut bound, mut room) = (Bound::default(), BINDINGS_BYTES_MAX);
    let mut naming: Vec<&CacheTenant> =
        tenants.iter().map(Arc::as_ref).filter(|tenant| names_pods(tenant)).collect();
    naming.sort_by_key(|tenant| (tenant.creation_timestamp(), tenant.name_any()));
    for tenant in naming {
        // The API server has checked the name.
        let Ok(name) = tenant.name_any().parse::<TenantName>() else { continue };
        let share = bind(&mut bound.bindings, tenant, &name, namespaces, &mut room);
        bound.shares.insert(tenant.name_any(), share);
    }
    bound
}

/// Gives a tenant what it names and nobody has.
fn bind(
    bindings: &mut PodBindings,
    tenant: &CacheTenant,
    name: &TenantName,
    namespaces: &[Arc<Namespace>],
    room: &mut usize,
) -> Share {
    bindings.bind_tenant(name);
    let mut share = Share::default();
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
            Some(other) => share.others.push((format!("service account {account}"), other.clone())),
            None if !account.is_entry() || !fits(&account.key()) => share.left_out += 1,
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
            Some(other) => share.others.push((format!("namespace {namespace}"), other.clone())),
            None if !fits(&namespace) => share.left_out += 1,
            None => {
                bindings.bind_namespace(&namespace, name);
                share.namespaces += 1;
            }
        }
    }
    share
}

/// The file that agents are given.
pub fn file(bindings: &PodBindings) -> String {
    serde_json::to_string(bindings).expect("sets and maps of texts are JSON")
}

/// What the clusters of a tenant have made of its pods, from the stores; nothing of one that names none.
pub fn look(tenant: &CacheTenant, context: &Context) -> Vec<Standing> {
    if !names_pods(tenant) {
        return Vec::new();
    }
    let world = &context.world;
    let plan = world.plan();
    let standing = |cluster: Arc<reprise_crds::KVCacheCluster>| {
        let names = ClusterNames::of(&cluster);
        let bound = bound(&names, context);
        let share = bound.shares.get(&tenant.name_any())?.clone();
        let nodes = plan.cluster(&cluster).map(|plan| plan.nodes.clone()).unwrap_or_default();
        let told = |node: &String| {
            let found = world.cache_nodes.get(&kube::runtime::reflector::ObjectRef::new(node));
            (node.clone(), found)
        };
        Some(stands(&names.key(), share, &digest::of(&file(&bound.bindings)), nodes.iter().map(told)))
    };
    world.clusters.state().into_iter().filter_map(standing).collect()
}

fn stands(
    cluster: &str,
    share: Share,
    wanted: &str,
    nodes: impl Iterator<Item = (String, Option<Arc<CacheNode>>)>,
) -> Standing {
    let mut standing =
        Standing { cluster: cluster.to_owned(), share, unchecked: Vec::new(), late: Vec::new(), silent: 0 };
    for (node, found) in nodes {
        let Some(found) = found.filter(|found| has_reported(found)) else {
            standing.silent += 1;
            continue;
        };
        let applied = found.status.as_ref().and_then(|status| status.applied.as_ref());
        match applied.and_then(|applied| applied.tenants_digest.as_ref()) {
            None => standing.unchecked.push(node),
            Some(digest) if digest.as_str() != wanted => standing.late.push(node),
            Some(_) => {}
        }
    }
    standing
}

/// What to say of a tenant's pods; nothing of one that names none.
pub fn finding(tenant: &CacheTenant, standings: &[Standing]) -> Option<Finding> {
    if !names_pods(tenant) {
        return None;
    }
    let kind = ConditionType::PodsBound;
    if standings.is_empty() {
        let message = "no KVCacheCluster has the tenant: make one, or correct clusters";
        return Some(Finding::no(kind, Reason::ReferenceNotFound, message));
    }
    Some(standings.iter().find_map(wrong).unwrap_or_else(|| {
        let told: Vec<String> = standings.iter().map(told).collect();
        Finding::yes(kind, Reason::AsDesired, told.join("; "))
    }))
}

/// Whether some node is to take over what is so by now.
pub fn is_awaited(standings: &[Standing]) -> bool {
    standings.iter().any(|standing| !standing.late.is_empty())
}

fn told(standing: &Standing) -> String {
    let Standing { cluster, share: Share { namespaces, accounts, .. }, silent, .. } = standing;
    let silent = match silent {
        0 => String::new(),
        silent => format!(" ({silent} nodes say nothing at present, and serve nobody as far as is known)"),
    };
    format!(
        "new sessions are the tenant in {cluster} that come from pods of {namespaces} namespaces and {accounts} service accounts, and no \
         others{silent}"
    )
}

/// What is not as the spec says, the first of it.
fn wrong(standing: &Standing) -> Option<Finding> {
    let kind = ConditionType::PodsBound;
    let Standing { cluster, share, unchecked, late, .. } = standing;
    if !share.others.is_empty() {
        let others = share.others.iter().take(NAMES_MAX).map(|(what, whose)| format!("{what} is {whose}'s"));
        let message = format!(
            "older tenants of {cluster} have {} of what this one names, and keep it ({}): name it in one of them only",
            share.others.len(),
            others.collect::<Vec<_>>().join(", ")
        );
        return Some(Finding::no(kind, Reason::Conflict, message));
    }
    if share.left_out > 0 {
        let message = format!(
            "{} of what this tenant names has no place in {cluster}, which has {BINDINGS_BYTES_MAX} bytes for names of namespaces and service \
             accounts: bind fewer, or use more clusters",
            share.left_out
        );
        return Some(Finding::no(kind, Reason::OverCapacity, message));
    }
    let few = |nodes: &[String]| nodes.iter().take(NAMES_MAX).cloned().collect::<Vec<String>>().join(", ");
    if !unchecked.is_empty() {
        let message = format!(
            "{} agents of {cluster} do not check sessions ({}): any session there may name the tenant. Upgrade them",
            unchecked.len(),
            few(unchecked)
        );
        return Some(Finding::no(kind, Reason::NotReported, message));
    }
    if !late.is_empty() {
        let message = format!(
            "{} agents of {cluster} work by what was so before ({}), for a minute or so: if it stays, look whether the cluster is paused, and \
             at their logs",
            late.len(),
            few(late)
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

    fn owner(bound: &Bound, namespace: &str, name: &str) -> Option<String> {
        let account = ServiceAccount { namespace: namespace.to_owned(), name: name.to_owned() };
        bound.bindings.owner(&account).map(ToString::to_string)
    }

    fn standing(bound: &Bound, tenant: &str) -> Standing {
        stands("n/c", bound.shares[tenant].clone(), "sha256:1", std::iter::empty())
    }

    #[test]
    fn pods_are_the_tenant_that_names_their_namespace_or_before_it_their_account() {
        let accounts = json!({ "serviceAccounts": [{ "namespace": "chat", "name": "batch" }] });
        let tenants = [tenant("a", 1, team("a")), tenant("b", 2, accounts), tenant("c", 3, json!({}))];
        let namespaces = [namespace("chat", json!({ "team": "a" })), namespace("other", json!({}))];
        let bound = decide(&tenants, &namespaces);
        assert_eq!(owner(&bound, "chat", "vllm").as_deref(), Some("a"));
        assert_eq!(owner(&bound, "chat", "batch").as_deref(), Some("b"));
        assert_eq!(owner(&bound, "other", "vllm"), None);
        assert!(!bound.bindings.is_bound(&"c".parse().expect("a name")), "it names nobody");
        let said = finding(&tenants[0], &[standing(&bound, "a")]).expect("it names pods");
        assert_eq!((said.status, said.reason), (ConditionStatus::True, Reason::AsDesired));
        assert!(said.message.contains("1 namespaces and 0 service accounts"), "{}", said.message);
        assert_eq!(finding(&tenants[2], &[]), None);
    }

    #[test]
    fn of_two_that_name_the_same_the_older_has_it_and_the_younger_is_told() {
        let tenants = [tenant("young", 2, team("a")), tenant("old", 1, team("a"))];
        let bound = decide(&tenants, &[namespace("chat", json!({ "team": "a" }))]);
        assert_eq!(owner(&bound, "chat", "vllm").as_deref(), Some("old"));
        let said = finding(&tenants[0], &[standing(&bound, "young")]).expect("it names pods");
        assert_eq!((said.status, said.reason), (ConditionStatus::False, Reason::Conflict));
        assert!(said.message.contains("namespace chat is old's"), "{}", said.message);
        let old = finding(&tenants[1], &[standing(&bound, "old")]).expect("it names pods");
        assert_eq!(old.status, ConditionStatus::True);
        assert!(
            bound.bindings.is_bound(&"young".parse().expect("a name")),
            "it is nobody's rather than anybody's"
        );
    }

    #[test]
    fn what_there_is_no_room_for_is_counted_and_the_rest_fits_a_config_map() {
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
        assert!(file(&bound.bindings).len() + entries < 1 << 20, "a ConfigMap takes it");
        assert!(bound.bindings.entries().all(|(name, _)| name.len() <= 253), "and each of its keys");
        let said = finding(&tenants[0], &[standing(&bound, "a")]).expect("it names pods");
        assert_eq!((said.status, said.reason), (ConditionStatus::False, Reason::OverCapacity));
        let left_out = 6003 - bound_of;
        assert!(left_out > 3 && said.message.starts_with(&format!("{left_out} of")), "{}", said.message);
    }

    #[test]
    fn nodes_that_serve_and_check_nobody_or_by_an_older_file_are_named_and_silent_ones_are_counted() {
        let node = |digest: Option<&str>, at: &str| -> Option<Arc<CacheNode>> {
            let applied = digest.map_or(json!({}), |digest| json!({ "tenantsDigest": digest }));
            let object = json!({
                "apiVersion": "reprise.dev/v1alpha1", "kind": "CacheNode", "metadata": { "name": "x" },
                "spec": { "nodeName": "x" }, "status": { "applied": applied, "lastUpdated": at },
            });
            Some(Arc::new(serde_json::from_value(object).expect("a node")))
        };
        let now = k8s_openapi::jiff::Timestamp::now().to_string();
        let whose = tenant("a", 1, team("a"));
        let bound = decide(std::slice::from_ref(&whose), &[]);
        let said = |nodes: Vec<Option<Arc<CacheNode>>>| {
            let nodes = nodes.into_iter().enumerate().map(|(index, node)| (format!("n{index}"), node));
            let standing = stands("n/c", bound.shares["a"].clone(), "sha256:1", nodes);
            let awaited = is_awaited(std::slice::from_ref(&standing));
            let found = finding(&whose, &[standing]).expect("it names pods");
            ((found.status, found.reason, awaited), found.message)
        };
        let well = || node(Some("sha256:1"), &now);
        let (told, _) = said(vec![well()]);
        assert_eq!(told, (ConditionStatus::True, Reason::AsDesired, false));
        let (told, message) = said(vec![node(Some("sha256:0"), &now), well()]);
        assert_eq!(told, (ConditionStatus::False, Reason::Progressing, true));
        assert!(message.contains("(n0)"), "{message}");
        let (told, message) = said(vec![well(), node(None, &now)]);
        assert_eq!(told, (ConditionStatus::False, Reason::NotReported, false));
        assert!(message.contains("(n1)"), "{message}");
        let (told, message) = said(vec![well(), None, node(None, "2026-01-01T00:00:00Z")]);
        assert_eq!(told, (ConditionStatus::True, Reason::AsDesired, false), "nobody serves there");
        assert!(message.contains("2 nodes say nothing"), "{message}");
    }
}
