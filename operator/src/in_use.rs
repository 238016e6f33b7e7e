//! Deletion of what engines use: a cluster or pool whose agents have sessions waits until they have none, or until somebody has said that
//! it need not.
//!
//! An object that is being deleted takes no finalizer, so ours ([`IN_USE_FINALIZER`]) is there while a node has sessions, and no longer. A
//! session that begins within a report of the deletion (10 s) is not waited for. A node that has not reported for
//! [`crate::cluster::REPORTED_WITHIN`] holds nobody: its agent is away, and so is what it served; a deletion that goes on without it says so.
//!
//! Deliberately absent: a deletion in the foreground, in which Kubernetes removes the children whatever finalizers the owner has. The
//! cluster stays as long as one of ours is on it, its pods do not.

use std::fmt::Debug;
use std::time::Duration;

use kube::api::Api;
use kube::{Resource, ResourceExt};
use reprise_crds::status::{ConditionType, Finding, Reason};
use reprise_crds::{CacheNode, KVCacheCluster, SSDPool};
use serde::de::DeserializeOwned;

use crate::cluster::dereference::is_of;
use crate::cluster::status::has_reported;
use crate::context::Context;
use crate::error::OperatorError;
use crate::finalizers::{Finalizer, set};
use crate::names::{ClusterNames, DELETE_IN_USE, IN_USE_FINALIZER};
use crate::status::tell;

/// A deletion that waits is looked at again so often: a node that falls silent tells nobody.
pub const LOOK_AGAIN: Duration = Duration::from_secs(10);

/// What the annotation [`DELETE_IN_USE`] says.
pub const YES: &str = "yes";

/// So many nodes are named, at the most.
const NAMES_MAX: usize = 5;

/// Who uses an object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Nodes with sessions, by name.
    used: Vec<NodeSessions>,
    /// Nodes that had some and have not reported lately.
    silent: Vec<NodeSessions>,
    /// Somebody has said that it does not matter.
    confirmed: bool,
}

/// Sessions of a node, as it said last.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct NodeSessions {
    node: String,
    sessions: u32,
}

/// What is so of an object after its finalizer was looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept {
    /// Its finalizer was changed; that is a change of the object, which is looked at again.
    Changed,
    /// It is being deleted, and waits.
    Held,
    /// It is not held.
    Free,
}

impl Usage {
    /// Out of what its nodes say.
    fn of<K: Resource>(object: &K, nodes: &[impl AsRef<CacheNode>]) -> Usage {
        let sessions = |node: &CacheNode| node.status.as_ref().and_then(|status| status.sessions);
        let mut usage = Usage {
            confirmed: object.annotations().get(DELETE_IN_USE).is_some_and(|said| said == YES),
            ..Usage::default()
        };
        for node in nodes.iter().map(AsRef::as_ref) {
            let Some(sessions) = sessions(node).filter(|sessions| *sessions > 0) else { continue };
            let of_node = NodeSessions { node: node.name_any(), sessions };
            if has_reported(node) { usage.used.push(of_node) } else { usage.silent.push(of_node) }
        }
        usage.used.sort();
        usage.silent.sort();
        usage
    }

    /// Whether the object must not go yet.
    fn finalizer(&self) -> Finalizer {
        if self.used.is_empty() || self.confirmed { Finalizer::Unwanted } else { Finalizer::Wanted }
    }

    /// What its deletion waits for, if it does.
    pub fn blocked<K: Resource>(&self, object: &K) -> Option<Finding> {
        let waits = object.meta().deletion_timestamp.is_some() && holds(object);
        if !waits || self.finalizer() == Finalizer::Unwanted {
            return None;
        }
        let message = format!(
            "engines have sessions on {}: stop them, or annotate the object with {DELETE_IN_USE}: \"{YES}\" to let it go with them \
             under way{}",
            named(&self.used),
            self.passed_over(),
        );
        Some(Finding::yes(ConditionType::DeletionBlocked, Reason::InUse, message))
    }

    /// Why a deletion goes on that waited.
    fn let_go(&self) -> Finding {
        let kind = ConditionType::DeletionBlocked;
        if self.confirmed && !self.used.is_empty() {
            let message = format!("{DELETE_IN_USE} is {YES}: it goes with sessions on {}", named(&self.used));
            return Finding::no(kind, Reason::InUse, message);
        }
        if self.silent.is_empty() {
            return Finding::no(kind, Reason::AsDesired, "no engine has a session any more");
        }
        let message = format!("no engine is known to have a session any more{}", self.passed_over());
        Finding::no(kind, Reason::AgentGone, message)
    }

    /// Of nodes that are not waited for.
    fn passed_over(&self) -> String {
        if self.silent.is_empty() {
            return String::new();
        }
        format!(
            "; not waited for, since their agents have not reported for a minute: {}",
            named(&self.silent)
        )
    }
}

fn named(nodes: &[NodeSessions]) -> String {
    let one = |node: &NodeSessions| format!("{} ({})", node.node, node.sessions);
    let names = nodes.iter().take(NAMES_MAX).map(one).collect::<Vec<_>>().join(", ");
    match nodes.len().saturating_sub(NAMES_MAX) {
        0 => names,
        more => format!("{names} and {more} more nodes"),
    }
}

/// Whether an object has our finalizer.
pub fn holds<K: Resource>(object: &K) -> bool {
    object.finalizers().iter().any(|one| one == IN_USE_FINALIZER)
}

/// Who uses a cluster.
pub fn of_cluster(cluster: &KVCacheCluster, context: &Context) -> Usage {
    let names = ClusterNames::of(cluster);
    Usage::of(cluster, &context.world.cache_nodes.state_filter(|node| is_of(node, &names)))
}

/// Who uses a pool: whoever has sessions on a node that has it.
pub fn of_pool(pool: &SSDPool, context: &Context) -> Usage {
    let uid = pool.uid().unwrap_or_default();
    let has = |node: &CacheNode| node.spec.claims.iter().any(|claim| claim.uid.as_str() == uid);
    Usage::of(pool, &context.world.cache_nodes.state_filter(has))
}

/// Makes an object have our finalizer, or not have it.
///
/// # Errors
/// The API server did not take it.
pub async fn keep<K>(
    context: &Context,
    object: &K,
    api: &Api<K>,
    usage: &Usage,
) -> Result<Kept, OperatorError>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
{
    let goes = object.meta().deletion_timestamp.is_some();
    match (usage.finalizer(), holds(object)) {
        (Finalizer::Wanted, true) if goes => Ok(Kept::Held),
        // It came too late for one that is being deleted.
        (Finalizer::Wanted, false) if goes => Ok(Kept::Free),
        (Finalizer::Wanted, true) | (Finalizer::Unwanted, false) => Ok(Kept::Free),
        (wanted, _) => {
            if goes {
                // Before the finalizer goes: the object may go with it.
                tell(context, object, &usage.let_go()).await;
            }
            set(context, object, api, IN_USE_FINALIZER, wanted).await?;
            Ok(Kept::Changed)
        }
    }
}

#[cfg(test)]
#[allow(clippy::needless_pass_by_value, reason = "metadata is made where it is passed")]
mod tests {
    use std::sync::Arc;

    use serde_json::{Value, json};

    use super::*;

    fn pool(more: Value) -> SSDPool {
        let mut metadata = json!({ "name": "p", "uid": "u" });
        metadata.as_object_mut().expect("made above").extend(more.as_object().expect("fields").clone());
        let whole = json!({
            "apiVersion": "reprise.dev/v1alpha1", "kind": "SSDPool", "metadata": metadata,
            "spec": { "directory": { "path": "/p", "size": "1Gi" } },
        });
        serde_json::from_value(whole).expect("a pool")
    }

    fn node(name: &str, status: Value) -> Arc<CacheNode> {
        let node = json!({
            "apiVersion": "reprise.dev/v1alpha1", "kind": "CacheNode",
            "metadata": { "name": name }, "spec": { "nodeName": name }, "status": status,
        });
        Arc::new(serde_json::from_value(node).expect("a CacheNode"))
    }

    fn now(sessions: u32) -> Value {
        json!({ "lastUpdated": crate::clock::now(), "sessions": sessions })
    }

    fn going() -> Value {
        json!({ "deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": [IN_USE_FINALIZER] })
    }

    #[test]
    fn sessions_hold_a_deletion_and_say_where_they_are_and_what_lets_it_go() {
        let nodes = [node("n2", now(3)), node("n1", now(1)), node("n3", now(0))];
        let usage = Usage::of(&pool(json!({})), &nodes);
        assert_eq!(usage.finalizer(), Finalizer::Wanted);
        assert_eq!(usage.blocked(&pool(json!({}))), None, "nobody deletes it");
        let said = usage.blocked(&pool(going())).expect("it waits");
        assert_eq!((said.kind, said.reason), (ConditionType::DeletionBlocked, Reason::InUse));
        assert!(said.message.contains("n1 (1), n2 (3)"), "{}", said.message);
        assert!(said.message.contains("reprise.dev/delete-in-use: \"yes\""), "{}", said.message);
        let gone = json!({ "deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["reprise.dev/wipe"] });
        assert_eq!(usage.blocked(&pool(gone)), None, "something else holds it");
    }

    #[test]
    fn who_has_said_yes_is_not_held_and_other_words_say_nothing() {
        let nodes = [node("n1", now(1))];
        let said = |word: &str| Usage::of(&pool(json!({ "annotations": { DELETE_IN_USE: word } })), &nodes);
        assert_eq!(said("true").finalizer(), Finalizer::Wanted);
        assert_eq!(said(YES).finalizer(), Finalizer::Unwanted);
        assert!(said(YES).let_go().message.contains("n1 (1)"), "{:?}", said(YES).let_go());
    }

    #[test]
    fn nodes_that_do_not_report_hold_nobody_and_are_named() {
        let old = json!({ "lastUpdated": "2026-01-01T00:00:00Z", "sessions": 2 });
        let usage = Usage::of(&pool(going()), &[node("n1", old.clone())]);
        assert_eq!(usage.finalizer(), Finalizer::Unwanted);
        let said = usage.let_go();
        assert_eq!(said.reason, Reason::AgentGone);
        assert!(said.message.contains("n1 (2)"), "{}", said.message);
        let both = Usage::of(&pool(going()), &[node("n1", old), node("n2", now(1))]);
        let said = both.blocked(&pool(going())).expect("it waits for the other");
        let (first, passed) = said.message.split_once("; not waited for").expect("both are named");
        assert!(first.contains("n2 (1)") && passed.contains("n1 (2)"), "{}", said.message);
        // Agents that do not tell, and those that have never said anything.
        for status in [json!({ "lastUpdated": crate::clock::now() }), json!(null)] {
            assert_eq!(Usage::of(&pool(going()), &[node("n1", status)]), Usage::default());
        }
    }

    #[test]
    fn of_many_nodes_a_few_are_named() {
        let nodes: Vec<Arc<CacheNode>> = (0..9).map(|index| node(&format!("n{index}"), now(1))).collect();
        let said = Usage::of(&pool(going()), &nodes).blocked(&pool(going())).expect("it waits");
        assert!(said.message.contains("n4 (1) and 4 more nodes"), "{}", said.message);
    }
}
