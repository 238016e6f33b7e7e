//! Blocks the deletion of clusters and pools while engines use them.
//!
//! A deletion waits until no agent has sessions of the object, or until a person confirms it by the
//! annotation [`DELETE_IN_USE`].
//!
//! An object that is being deleted accepts no finalizer. So the finalizer [`IN_USE_FINALIZER`] is set as soon
//! as a node has sessions. It is removed after a quiet period ([`crate::settings::Settings::unused_for`]):
//! during all of it no session was reported, by this process's own clock ([`Quiescence`]). Before the removal
//! the operator also lists the `CacheNode`s from the API server, because its watch may have stalled.
//!
//! * An agent that restarts has no sessions until its engines reconnect. An agent that cannot reach the API
//!   server does not report. Both have the quiet period to report again.
//! * A node that does not report during that period no longer blocks the deletion: its agent is gone, and so
//!   is the cache that it served. The event of the deletion names such nodes.
//! * A pool that will be wiped has the finalizer from the start, until its wipe is confirmed and it is
//!   deleted. The quiet period starts then. So the deletion waits for sessions that began before, because it
//!   would destroy their data.
//! * For other objects, a session that begins within one report interval (10 s) of the deletion does not
//!   block it. That loses no data.
//!
//! Deliberately absent: foreground deletion and deletion of the namespace. There Kubernetes deletes the
//! children regardless of finalizers on the owner. The cluster object remains while the finalizer is set, its
//! pods do not.

use std::fmt::Debug;
use std::time::Duration;

use kube::api::{Api, ListParams};
use kube::{Resource, ResourceExt};
use reprise_crds::status::{ConditionType, Finding, Reason};
use reprise_crds::{CacheNode, KVCacheCluster, SSDPool};
use serde::de::DeserializeOwned;
use tokio::time::Instant;

pub use self::quiescence::Quiescence;
use self::quiescence::SessionReports;
use crate::framework::error::OperatorError;
use crate::framework::finalizers::{Finalizer, FinalizerOutcome, Forbidden, try_set};
use crate::framework::status::publish_event;
use crate::reconcile::context::Context;
use crate::reconcile::membership::belongs_to;
use crate::reconcile::names::{ClusterNames, DELETE_IN_USE, IN_USE_FINALIZER};

mod quiescence;

/// Longest delay until a waiting object is checked again. A node that stops reporting causes no event.
const POLL_INTERVAL: Duration = Duration::from_secs(10);
/// Shortest delay until a waiting object is checked again.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Value of the annotation [`DELETE_IN_USE`] that confirms a deletion.
pub const CONFIRMED: &str = "yes";

/// Users that a deletion waits for, for messages.
pub const WAITED_FOR: &str = "engines that use the object";

/// Kubernetes' finalizer for objects whose children are deleted first.
const FOREGROUND: &str = "foregroundDeletion";

/// Most nodes that a message names.
const NAMES_MAX: usize = 5;

/// Usage of an object by engines, and whether it blocks a deletion.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeletionGuard {
    /// Nodes whose sessions count.
    users: Users,
    /// Latest reports of nodes that have sessions.
    reports: SessionReports,
    /// Number of sessions by node, from `reports`.
    sessions: Vec<NodeSessions>,
    /// Whether the finalizer is needed even without sessions, because the pool will be wiped.
    is_guarded: bool,
    /// Whether a person confirmed the deletion despite sessions.
    confirmed: bool,
    /// Whether the object has the finalizer.
    has_finalizer: bool,
    /// Rest of the quiet period.
    remaining: Duration,
    /// Length of the whole quiet period.
    unused_for: Duration,
}

/// Nodes whose sessions use an object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
enum Users {
    #[default]
    None,
    /// All nodes of a cluster.
    Cluster(ClusterNames),
    /// All nodes with a pool of this unique id.
    Pool(String),
}

/// Sessions of a node in its latest report.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct NodeSessions {
    node: String,
    sessions: u32,
}

/// State of an object after its finalizer was reconciled.
#[derive(Debug)]
pub enum GuardOutcome {
    /// The finalizer was changed. The watch event of that change triggers the next reconcile.
    Changed,
    /// The object is being deleted, and the guard blocks the deletion.
    Blocked,
    /// The guard does not block the object's deletion.
    NotBlocked,
    /// The operator is not allowed to set or remove the finalizer.
    Forbidden(Forbidden),
}

impl Users {
    fn has(&self, node: &CacheNode) -> bool {
        match self {
            Users::None => false,
            Users::Cluster(names) => belongs_to(node, names),
            Users::Pool(uid) => node.spec.claims.iter().any(|claim| claim.uid.as_str() == uid),
        }
    }
}

/// Returns the latest reports of nodes that have sessions, sorted.
fn session_reports<'a>(nodes: impl Iterator<Item = &'a CacheNode>) -> SessionReports {
    let of = |node: &CacheNode| {
        let status = node.status.as_ref()?;
        let sessions = status.sessions.filter(|sessions| *sessions > 0)?;
        let when = status.last_updated.as_ref().map(|when| when.0.to_string()).unwrap_or_default();
        Some((node.name_any(), sessions, when))
    };
    let mut reports: SessionReports = nodes.filter_map(of).collect();
    reports.sort();
    reports
}

impl DeletionGuard {
    /// Evaluates the reports of the object's nodes. `unused_for` is the length of the quiet period.
    fn of<K: Resource>(
        object: &K,
        reports: SessionReports,
        is_guarded: bool,
        (quiescence, unused_for, now): (&Quiescence, Duration, Instant),
    ) -> DeletionGuard {
        let has_finalizer = has_guard(object);
        // The end of `is_guarded` restarts the quiet period: recent sessions may not have been reported yet.
        let observed = (reports.clone(), is_guarded);
        let quiet = quiescence.observe(&object.uid().unwrap_or_default(), &observed, has_finalizer, now);
        let of_node = |(node, sessions, _): &(String, u32, String)| NodeSessions {
            node: node.clone(),
            sessions: *sessions,
        };
        DeletionGuard {
            users: Users::None,
            sessions: reports.iter().map(of_node).collect(),
            reports,
            is_guarded,
            confirmed: object.annotations().get(DELETE_IN_USE).is_some_and(|value| value == CONFIRMED),
            has_finalizer,
            remaining: unused_for.saturating_sub(quiet),
            unused_for,
        }
    }

    /// Returns whether the object needs the finalizer.
    fn finalizer(&self) -> Finalizer {
        let blocks = (self.is_guarded || self.is_in_use()) && !self.confirmed;
        if blocks { Finalizer::Present } else { Finalizer::Absent }
    }

    /// Returns whether the object counts as used: the quiet period is not over.
    fn is_in_use(&self) -> bool {
        !self.remaining.is_zero() && (self.has_finalizer || !self.sessions.is_empty())
    }

    /// Returns when the object must be checked again if no event triggers that.
    pub fn requeue_after<K: Resource>(&self, object: &K) -> Option<Duration> {
        let is_deleting = object.meta().deletion_timestamp.is_some();
        // An object with sessions that is not being deleted needs no timer: reports of its agents trigger
        // reconciles.
        let waits = self.has_finalizer
            && self.is_in_use()
            && !self.confirmed
            && (is_deleting || self.sessions.is_empty());
        waits.then(|| self.remaining.clamp(RETRY_INTERVAL, POLL_INTERVAL))
    }

    /// Returns the condition that explains why the deletion is blocked, if it is.
    pub fn blocked_condition<K: Resource>(&self, object: &K) -> Option<Finding> {
        let waits = object.meta().deletion_timestamp.is_some() && self.has_finalizer;
        // A guarded pool without sessions waits for the confirmation of its wipe, which another condition
        // reports.
        let other_reason = self.is_guarded && (self.sessions.is_empty() || self.remaining.is_zero());
        if !waits || other_reason || self.finalizer() == Finalizer::Absent {
            return None;
        }
        let annotation = format!("{DELETE_IN_USE}: \"{CONFIRMED}\"");
        let seconds = self.unused_for.as_secs();
        let message = if self.sessions.is_empty() {
            format!(
                "no engine is known to have a session. The deletion continues after {seconds} s without a \
                 session, so that a restarting agent can report its sessions first; annotate the object with \
                 {annotation} to delete it at once"
            )
        } else {
            format!(
                "engines have sessions on {}: stop them, or annotate the object with {annotation} to delete \
                 it while they run. The deletion does not wait for nodes that do not report for {seconds} s",
                node_list(&self.sessions)
            )
        };
        Some(Finding::yes(ConditionType::DeletionBlocked, Reason::InUse, message))
    }

    /// Returns the condition that explains why a blocked deletion continues.
    fn released_condition(&self) -> Finding {
        let kind = ConditionType::DeletionBlocked;
        if self.sessions.is_empty() {
            return Finding::no(kind, Reason::AsDesired, "no engine has a session");
        }
        let nodes = node_list(&self.sessions);
        if self.confirmed {
            let message = format!("{DELETE_IN_USE} is {CONFIRMED}: deleting with engine sessions on {nodes}");
            return Finding::no(kind, Reason::InUse, message);
        }
        let message = format!(
            "not waiting for engine sessions on {nodes}: their agents have not reported for {} s",
            self.unused_for.as_secs()
        );
        Finding::no(kind, Reason::AgentGone, message)
    }
}

fn node_list(nodes: &[NodeSessions]) -> String {
    let one = |node: &NodeSessions| format!("{} ({})", node.node, node.sessions);
    let names = nodes.iter().take(NAMES_MAX).map(one).collect::<Vec<_>>().join(", ");
    match nodes.len().saturating_sub(NAMES_MAX) {
        0 => names,
        more => format!("{names} and {more} more nodes"),
    }
}

/// Returns whether an object has the finalizer [`IN_USE_FINALIZER`].
pub fn has_guard<K: Resource>(object: &K) -> bool {
    has(object, IN_USE_FINALIZER)
}

fn has<K: Resource>(object: &K, finalizer: &str) -> bool {
    object.finalizers().iter().any(|one| one == finalizer)
}

/// Returns whether an object is being deleted and the guard does not block it. Until then it is reconciled as
/// before.
pub fn is_released<K: Resource>(object: &K) -> bool {
    object.meta().deletion_timestamp.is_some() && !has_guard(object)
}

/// Returns whether the operator maintains an object's children. In a foreground deletion Kubernetes deletes
/// them first.
pub fn keeps_children<K: Resource>(object: &K) -> bool {
    object.meta().deletion_timestamp.is_none() || (has_guard(object) && !has(object, FOREGROUND))
}

/// Evaluates the sessions on all nodes of a cluster.
pub fn for_cluster(cluster: &KVCacheCluster, context: &Context) -> DeletionGuard {
    evaluate(cluster, Users::Cluster(ClusterNames::of(cluster)), false, context)
}

/// Evaluates the sessions on all nodes with a pool. With `is_guarded` the finalizer is needed even without
/// sessions.
pub fn for_pool(pool: &SSDPool, is_guarded: bool, context: &Context) -> DeletionGuard {
    evaluate(pool, Users::Pool(pool.uid().unwrap_or_default()), is_guarded, context)
}

fn evaluate<K: Resource>(object: &K, users: Users, is_guarded: bool, context: &Context) -> DeletionGuard {
    let nodes = context.stores.cache_nodes.state_filter(|node| users.has(node));
    let time = (&context.quiescence, context.settings.unused_for, Instant::now());
    let reports = session_reports(nodes.iter().map(AsRef::as_ref));
    let guard = DeletionGuard::of(object, reports, is_guarded, time);
    DeletionGuard { users, ..guard }
}

/// Adds or removes the finalizer. It is kept, and the quiet period restarts, if the API server has newer
/// session reports than this process.
///
/// # Errors
/// A request to the API server failed. The API server did not take it.
pub async fn reconcile_finalizer<K>(
    context: &Context,
    object: &K,
    api: &Api<K>,
    guard: &mut DeletionGuard,
) -> Result<GuardOutcome, OperatorError>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
{
    let is_deleting = object.meta().deletion_timestamp.is_some();
    let wanted = guard.finalizer();
    match (wanted, has_guard(object)) {
        (Finalizer::Present, true) if is_deleting => return Ok(GuardOutcome::Blocked),
        // An object that is being deleted accepts no finalizer.
        (Finalizer::Present, false) if is_deleting => return Ok(GuardOutcome::NotBlocked),
        (Finalizer::Present, true) | (Finalizer::Absent, false) => return Ok(GuardOutcome::NotBlocked),
        (Finalizer::Present, false) | (Finalizer::Absent, true) => {}
    }
    if wanted == Finalizer::Absent && !guard.confirmed && has_newer_reports(context, guard).await? {
        context.quiescence.reset(&object.uid().unwrap_or_default());
        guard.remaining = guard.unused_for;
        return Ok(if is_deleting { GuardOutcome::Blocked } else { GuardOutcome::NotBlocked });
    }
    match try_set(context, object, api, IN_USE_FINALIZER, wanted).await? {
        FinalizerOutcome::Done(_) => {
            if is_deleting {
                publish_event(context, object, &guard.released_condition()).await;
            }
            Ok(GuardOutcome::Changed)
        }
        FinalizerOutcome::Forbidden(refused) => Ok(GuardOutcome::Forbidden(refused)),
    }
}

/// Returns whether the API server has other session reports than this process.
async fn has_newer_reports(context: &Context, guard: &DeletionGuard) -> Result<bool, OperatorError> {
    let nodes: Api<CacheNode> = Api::all(context.client.clone());
    let listed = nodes.list(&ListParams::default()).await;
    let live = listed.map_err(OperatorError::api("list CacheNodes before a deletion continues"))?;
    Ok(session_reports(live.iter().filter(|node| guard.users.has(node))) != guard.reports)
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
        json!({ "lastUpdated": crate::framework::clock::now(), "sessions": sessions })
    }

    const AFTER: Duration = Duration::from_secs(60);

    fn evaluate(
        object: &SSDPool,
        nodes: &[Arc<CacheNode>],
        quiescence: &Quiescence,
        now: Instant,
    ) -> DeletionGuard {
        let reports = session_reports(nodes.iter().map(AsRef::as_ref));
        DeletionGuard::of(object, reports, false, (quiescence, AFTER, now))
    }

    /// The guard at the first observation.
    fn first_guard(object: &SSDPool, nodes: &[Arc<CacheNode>]) -> DeletionGuard {
        evaluate(object, nodes, &Quiescence::default(), Instant::now())
    }

    /// The guard after a quiet period without changes.
    fn quiet_guard(object: &SSDPool, nodes: &[Arc<CacheNode>]) -> DeletionGuard {
        let (quiescence, begun) = (Quiescence::default(), Instant::now());
        let guards = (0..=3).map(|time| evaluate(object, nodes, &quiescence, begun + time * AFTER / 3));
        guards.last().expect("four guards")
    }

    fn going() -> Value {
        json!({ "deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": [IN_USE_FINALIZER] })
    }

    #[test]
    fn sessions_block_deletion_with_a_condition_that_names_nodes_and_remedy() {
        let nodes = [node("n2", now(3)), node("n1", now(1)), node("n3", now(0))];
        let guard = first_guard(&pool(json!({})), &nodes);
        assert_eq!(guard.finalizer(), Finalizer::Present);
        assert_eq!(guard.blocked_condition(&pool(json!({}))), None, "it is not being deleted");
        let blocked = first_guard(&pool(going()), &nodes).blocked_condition(&pool(going())).expect("blocked");
        assert_eq!((blocked.kind, blocked.reason), (ConditionType::DeletionBlocked, Reason::InUse));
        assert!(blocked.message.contains("n1 (1), n2 (3)"), "{}", blocked.message);
        assert!(blocked.message.contains("reprise.dev/delete-in-use: \"yes\""), "{}", blocked.message);
        let gone = json!({ "deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["reprise.dev/wipe"] });
        assert_eq!(
            first_guard(&pool(gone.clone()), &nodes).blocked_condition(&pool(gone)),
            None,
            "another finalizer blocks it"
        );
    }

    #[test]
    fn only_the_annotation_value_yes_confirms_a_deletion() {
        let nodes = [node("n1", now(1))];
        let annotated =
            |value: &str| first_guard(&pool(json!({ "annotations": { DELETE_IN_USE: value } })), &nodes);
        assert_eq!(annotated("true").finalizer(), Finalizer::Present);
        assert_eq!(annotated(CONFIRMED).finalizer(), Finalizer::Absent);
        let released = annotated(CONFIRMED).released_condition();
        assert!(released.message.contains("n1 (1)"), "{released:?}");
    }

    #[test]
    fn keeps_finalizer_of_used_object_for_the_quiet_period() {
        let (going, none) = (pool(going()), [node("n1", now(0))]);
        let first = first_guard(&going, &none);
        assert_eq!(
            (first.finalizer(), first.requeue_after(&going)),
            (Finalizer::Present, Some(POLL_INTERVAL))
        );
        let message = first.blocked_condition(&going).expect("blocked").message;
        assert!(
            message.contains("no engine is known") && message.contains("after 60 s without"),
            "{message}"
        );
        let last = quiet_guard(&going, &none);
        assert_eq!((last.finalizer(), last.requeue_after(&going)), (Finalizer::Absent, None));
        assert_eq!(
            (last.blocked_condition(&going), last.released_condition().reason),
            (None, Reason::AsDesired)
        );
        // An object that was never used gets no finalizer.
        assert_eq!(first_guard(&pool(json!({})), &none).finalizer(), Finalizer::Absent);
        // Agents that do not report sessions, and agents that never reported.
        for status in [json!({ "lastUpdated": crate::framework::clock::now() }), json!(null)] {
            assert_eq!(first_guard(&pool(json!({})), &[node("n1", status)]).finalizer(), Finalizer::Absent);
        }
    }

    #[test]
    fn new_reports_restart_the_quiet_period_independently_of_the_node_clock() {
        let (quiescence, begun, going) = (Quiescence::default(), Instant::now(), pool(going()));
        for (time, year) in (0..9).zip(2001..) {
            let report = json!({ "lastUpdated": format!("{year}-01-01T00:00:00Z"), "sessions": 1 });
            let guard = evaluate(&going, &[node("n1", report)], &quiescence, begun + time * AFTER / 3);
            assert_eq!(guard.finalizer(), Finalizer::Present, "evaluation {time}");
        }
    }

    #[test]
    fn nodes_that_do_not_report_block_only_for_the_quiet_period_and_are_named() {
        let old = json!({ "lastUpdated": "2026-01-01T00:00:00Z", "sessions": 2 });
        let nodes = [node("n1", old.clone())];
        assert_eq!(first_guard(&pool(going()), &nodes).finalizer(), Finalizer::Present);
        let guard = quiet_guard(&pool(going()), &nodes);
        assert_eq!(guard.finalizer(), Finalizer::Absent);
        let released = guard.released_condition();
        assert_eq!(released.reason, Reason::AgentGone);
        assert!(released.message.contains("n1 (2)"), "{}", released.message);
    }

    #[test]
    fn guarded_pool_keeps_finalizer_without_sessions_until_confirmed() {
        let (plain, deleting) = (pool(json!({})), pool(going()));
        let guarded = |object: &SSDPool, nodes: &[Arc<CacheNode>]| DeletionGuard {
            is_guarded: true,
            ..quiet_guard(object, nodes)
        };
        assert_eq!(guarded(&plain, &[]).finalizer(), Finalizer::Present, "before its first use");
        let unused = guarded(&deleting, &[node("n1", now(0))]);
        assert_eq!((unused.finalizer(), unused.blocked_condition(&deleting)), (Finalizer::Present, None));
        assert_eq!(unused.requeue_after(&deleting), None, "the confirmation triggers a reconcile");
        let used = DeletionGuard { is_guarded: true, ..first_guard(&deleting, &[node("n1", now(1))]) };
        assert!(
            used.blocked_condition(&deleting).expect("sessions would lose data").message.contains("n1 (1)")
        );
        let mut confirmed = going();
        confirmed["annotations"] = json!({ DELETE_IN_USE: CONFIRMED });
        assert_eq!(guarded(&pool(confirmed), &[]).finalizer(), Finalizer::Absent);
    }

    #[test]
    fn keeps_children_of_blocked_object_except_in_foreground_deletion() {
        let of = |more: Value| (keeps_children(&pool(more.clone())), is_released(&pool(more)));
        assert_eq!(of(json!({})), (true, false));
        assert_eq!(of(going()), (true, false));
        let gone = json!({ "deletionTimestamp": "2026-01-01T00:00:00Z" });
        assert_eq!(of(gone.clone()), (false, true));
        let mut foreground = gone;
        foreground["finalizers"] = json!([IN_USE_FINALIZER, FOREGROUND]);
        assert_eq!(of(foreground), (false, false));
    }

    #[test]
    fn message_names_at_most_five_nodes() {
        let nodes: Vec<Arc<CacheNode>> = (0..9).map(|index| node(&format!("n{index}"), now(1))).collect();
        let blocked = first_guard(&pool(going()), &nodes).blocked_condition(&pool(going())).expect("blocked");
        assert!(blocked.message.contains("n4 (1) and 4 more nodes"), "{}", blocked.message);
    }
}
