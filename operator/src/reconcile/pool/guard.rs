//! Blocks the deletion of a pool while engines use it.
//!
//! A deletion waits until no agent has sessions on a node with the pool, or until a person confirms it by the
//! annotation [`DELETE_IN_USE`].
//!
//! An object that is being deleted accepts no finalizer. So a pool gets the finalizer [`IN_USE_FINALIZER`] as
//! soon as a node has sessions, or its deletion would wipe data. It keeps the finalizer until a quiet period
//! ([`crate::settings::Settings::unused_for`]) has passed without a change of the reports. Before the removal the
//! operator also lists the `CacheNode`s from the API server, because its watch may have stalled.
//!
//! * An agent that restarts has no sessions until its engines reconnect. An agent that cannot reach the API
//!   server does not report. Both have the quiet period to report again. A process without observations, after
//!   a start, waits for the whole period.
//! * A node that does not report during that period no longer blocks the deletion: its agent is gone, and so
//!   is the cache that it served. The event of the deletion names such nodes.
//! * The quiet period of a pool that will be wiped starts when it is deleted and the wipe is confirmed. So the
//!   deletion waits for sessions that began before, because it would destroy their data.
//! * For other pools, a session that begins within one report interval (10 s) of the deletion does not block
//!   it. That loses no data.
//!
//! Timestamps of agents are not compared with local time, because their clocks may differ. Only a change of a
//! report counts, by this process's monotonic clock.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use kube::ResourceExt;
use kube::api::{Api, ListParams};
use reprise_crds::status::{ConditionType, Finding, Reason};
use reprise_crds::{CacheNode, SSDPool};
use tokio::time::Instant;

use crate::framework::error::OperatorError;
use crate::framework::finalizers::{self, Finalizer, has};
use crate::framework::refusal::list;
use crate::framework::status::publish_event;
use crate::reconcile::context::Context;
use crate::reconcile::names::{DELETE_IN_USE, IN_USE_FINALIZER};

/// Shortest delay until a waiting pool is checked again.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Value of the annotation [`DELETE_IN_USE`] that confirms a deletion.
pub const CONFIRMED: &str = "yes";

/// Latest reports of nodes with sessions, sorted: node, number of sessions, and timestamp by the node's clock.
type SessionReports = Vec<(String, u32, String)>;

/// Usage of a pool by engines, and whether it blocks a deletion.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Guard {
    reports: SessionReports,
    /// Whether a deletion would destroy data and is not confirmed.
    protects_data: bool,
    /// Rest of the quiet period.
    remaining: Duration,
    unused_for: Duration,
}

/// State of a pool: unique id, reports, and whether its data is protected.
type Observation = (Option<String>, SessionReports, bool);

/// Latest observation of each pool, by name, and since when it is unchanged.
#[derive(Debug, Default)]
pub struct Quiescence(Mutex<HashMap<String, (Observation, Instant)>>);

impl Quiescence {
    /// Records the current state of a pool and returns how long it has been unchanged.
    fn observe(&self, pool: &SSDPool, reports: &SessionReports, protected: bool, now: Instant) -> Duration {
        let state = (pool.uid(), reports.clone(), protected);
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let last = all.get(&pool.name_any()).filter(|(last, _)| *last == state);
        let since = last.map_or(now, |(_, since)| *since);
        all.insert(pool.name_any(), (state, since));
        now.duration_since(since)
    }

    /// Forgets the observation of a pool, so that the quiet period restarts.
    fn reset(&self, pool: &SSDPool) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&pool.name_any());
    }
}

/// Returns the latest reports of the pool's nodes that have sessions.
fn session_reports<'a>(pool: &SSDPool, nodes: impl IntoIterator<Item = &'a CacheNode>) -> SessionReports {
    let uid = pool.uid().unwrap_or_default();
    let of = |node: &CacheNode| {
        let status = node.status.as_ref()?;
        let sessions = status.sessions.filter(|sessions| *sessions > 0)?;
        let when = status.last_updated.as_ref().map(|when| when.0.to_string()).unwrap_or_default();
        let is_claimed = node.spec.claims.iter().any(|claim| claim.uid.as_str() == uid);
        is_claimed.then(|| (node.name_any(), sessions, when))
    };
    let mut reports: SessionReports = nodes.into_iter().filter_map(of).collect();
    reports.sort();
    reports
}

impl Guard {
    /// Evaluates the reports of the pool's nodes. `protects_data`: a deletion would wipe data without a
    /// confirmation.
    pub fn of(pool: &SSDPool, protects_data: bool, context: &Context) -> Guard {
        let nodes = context.stores.cache_nodes.state();
        let reports = session_reports(pool, nodes.iter().map(AsRef::as_ref));
        let quiet = context.quiescence.observe(pool, &reports, protects_data, Instant::now());
        let unused_for = context.settings.unused_for;
        Guard { reports, protects_data, remaining: unused_for.saturating_sub(quiet), unused_for }
    }

    /// Returns whether the pool needs the finalizer.
    fn finalizer(&self, pool: &SSDPool) -> Finalizer {
        // A node that does not report delays a deletion only for the quiet period.
        let has_sessions = pool.metadata.deletion_timestamp.is_none() && !self.reports.is_empty();
        let is_quiet = self.remaining.is_zero();
        let needs = self.protects_data || has_sessions || (has_guard(pool) && !is_quiet);
        if needs && !is_confirmed(pool) { Finalizer::Present } else { Finalizer::Absent }
    }

    /// Returns when the end of the quiet period must be checked. Reports of agents with sessions, and the confirmation of a
    /// wipe, are events.
    pub fn requeue_after(&self, pool: &SSDPool) -> Option<Duration> {
        (has_guard(pool) && !self.remaining.is_zero()).then(|| self.remaining.max(RETRY_INTERVAL))
    }

    /// Returns the condition that explains why the deletion is blocked, if it is.
    pub fn blocked_condition(&self, pool: &SSDPool) -> Option<Finding> {
        let is_deleting = pool.metadata.deletion_timestamp.is_some() && has_guard(pool);
        // A pool without sessions waits for the confirmation of its wipe, which another condition reports.
        let is_unconfirmed = self.protects_data && (self.reports.is_empty() || self.remaining.is_zero());
        if !is_deleting || self.finalizer(pool) == Finalizer::Absent || is_unconfirmed {
            return None;
        }
        let sessions = match self.reports.is_empty() {
            true => "no engine is known to have a session".to_owned(),
            false => format!("engines have sessions on {}: stop them", self.nodes()),
        };
        let message = format!(
            "{sessions}. The deletion continues once no node has reported sessions for {} s, so that a restarting agent can \
             report its sessions first. To delete it at once, annotate the object with {DELETE_IN_USE}: \"{CONFIRMED}\"",
            self.unused_for.as_secs()
        );
        Some(Finding::yes(ConditionType::DeletionBlocked, Reason::InUse, message))
    }

    /// Returns the condition that explains why a blocked deletion continues.
    fn released_condition(&self, pool: &SSDPool) -> Finding {
        let kind = ConditionType::DeletionBlocked;
        if self.reports.is_empty() {
            return Finding::no(kind, Reason::AsDesired, "no engine has a session");
        }
        let (reason, why) = match is_confirmed(pool) {
            true => (Reason::InUse, format!("{DELETE_IN_USE} is {CONFIRMED}")),
            false => {
                let seconds = self.unused_for.as_secs();
                (Reason::AgentGone, format!("their agents have not reported for {seconds} s"))
            }
        };
        let nodes = self.nodes();
        Finding::no(kind, reason, format!("deleting despite engine sessions on {nodes}: {why}"))
    }

    /// Names the nodes with sessions, for messages.
    fn nodes(&self) -> String {
        list(self.reports.iter().map(|(node, sessions, _)| format!("{node} ({sessions})")))
    }
}

/// Returns whether a pool has the finalizer [`IN_USE_FINALIZER`]. Until it is removed, no node wipes the pool.
pub fn has_guard(pool: &SSDPool) -> bool {
    has(pool, IN_USE_FINALIZER)
}

/// Whether a person confirmed the deletion despite sessions.
fn is_confirmed(pool: &SSDPool) -> bool {
    pool.annotations().get(DELETE_IN_USE).is_some_and(|value| value == CONFIRMED)
}

/// Adds or removes the finalizer, and returns whether it changed. It is kept, and the quiet period restarts, if
/// the API server has newer session reports than this process.
///
/// # Errors
/// A request to the API server failed. The API server did not take it.
pub async fn reconcile_finalizer(
    context: &Context,
    pool: &SSDPool,
    api: &Api<SSDPool>,
    guard: &mut Guard,
) -> Result<bool, OperatorError> {
    let wanted = guard.finalizer(pool);
    let is_deleting = pool.metadata.deletion_timestamp.is_some();
    // An object that is being deleted accepts no finalizer.
    if (wanted == Finalizer::Present) == has_guard(pool) || (wanted == Finalizer::Present && is_deleting) {
        return Ok(false);
    }
    if wanted == Finalizer::Absent && !is_confirmed(pool) {
        let nodes: Api<CacheNode> = Api::all(context.client.clone());
        let listed = nodes.list(&ListParams::default()).await;
        let live = listed.map_err(OperatorError::api("list CacheNodes before a deletion continues"))?;
        if session_reports(pool, live.iter()) != guard.reports {
            context.quiescence.reset(pool);
            guard.remaining = guard.unused_for;
            return Ok(false);
        }
    }
    finalizers::set(context, pool, api, IN_USE_FINALIZER, wanted).await?;
    if is_deleting {
        publish_event(context, pool, &guard.released_condition(pool)).await;
    }
    Ok(true)
}

#[cfg(test)]
#[allow(clippy::needless_pass_by_value, reason = "metadata is made where it is passed")]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::reconcile::test_objects;

    const AFTER: Duration = Duration::from_secs(60);

    fn pool(metadata: Value) -> SSDPool {
        test_objects::pool(metadata, json!({}))
    }

    fn deleted() -> Value {
        json!({ "deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": [IN_USE_FINALIZER] })
    }

    fn annotated(mut metadata: Value, value: &str) -> Value {
        metadata["annotations"] = json!({ DELETE_IN_USE: value });
        metadata
    }

    fn reports(nodes: &[(&str, u32)], when: &str) -> SessionReports {
        nodes.iter().map(|(node, sessions)| ((*node).to_owned(), *sessions, when.to_owned())).collect()
    }

    #[test]
    fn only_reports_of_nodes_with_the_pool_and_sessions_count() {
        let node = |name: &str, uid: &str, status: Value| -> CacheNode {
            let claim = json!({ "pool": "p", "uid": uid, "generation": 1 });
            let spec = json!({ "nodeName": name, "claims": [claim] });
            test_objects::resource(json!({ "name": name }), json!({ "spec": spec, "status": status }))
        };
        let now = |sessions: u32| json!({ "lastUpdated": "2026-01-01T00:00:00Z", "sessions": sessions });
        let nodes = [
            node("n2", "u", now(3)),
            node("n1", "u", now(1)),
            node("n3", "u", now(0)),
            node("n4", "other", now(1)),
            node("n5", "u", json!({ "lastUpdated": "2026-01-01T00:00:00Z" })),
            node("n6", "u", Value::Null),
        ];
        let found = session_reports(&pool(json!({})), &nodes);
        assert_eq!(found, reports(&[("n1", 1), ("n2", 3)], "2026-01-01T00:00:00Z"));
    }

    #[test]
    fn finalizer_is_present_from_first_use_until_quiet_or_confirmed() {
        let (used, unused): (&[_], &[_]) = (&[("n1", 1)], &[]);
        let kept = json!({ "finalizers": [IN_USE_FINALIZER] });
        for (metadata, nodes, protects_data, at_first, after_quiet_period) in [
            (json!({}), unused, false, false, false),
            (json!({}), used, false, true, true),
            (json!({}), unused, true, true, true),
            (annotated(json!({}), CONFIRMED), used, false, false, false),
            (annotated(json!({}), "true"), used, false, true, true),
            (kept.clone(), unused, false, true, false),
            (kept, used, false, true, true),
            (deleted(), unused, false, true, false),
            (deleted(), used, false, true, false),
            (deleted(), unused, true, true, true),
            (annotated(deleted(), CONFIRMED), used, true, false, false),
        ] {
            let object = pool(metadata.clone());
            let found = [AFTER, Duration::ZERO].map(|remaining| {
                let reports = reports(nodes, "now");
                let guard = Guard { reports, protects_data, remaining, unused_for: AFTER };
                guard.finalizer(&object) == Finalizer::Present
            });
            assert_eq!(found, [at_first, after_quiet_period], "{metadata} {nodes:?} {protects_data}");
        }
    }

    #[test]
    fn quiet_period_starts_again_after_any_change_of_the_observed_state() {
        let (quiescence, begun, object) = (Quiescence::default(), Instant::now(), pool(deleted()));
        let none = SessionReports::new();
        let (early, late) = (reports(&[("n1", 1)], "early"), reports(&[("n1", 1)], "late"));
        let other = pool(json!({ "uid": "other" }));
        for (second, object, reports, protected, expected) in [
            (0, &object, &early, false, 0),
            (20, &object, &early, false, 20),
            // The same count in a new report.
            (30, &object, &late, false, 0),
            (40, &object, &none, false, 0),
            (65, &object, &none, false, 25),
            (66, &object, &none, true, 0),
            (70, &object, &none, true, 4),
            (75, &object, &none, false, 0),
            // A pool of the same name.
            (80, &other, &none, false, 0),
        ] {
            let at = begun + Duration::from_secs(second);
            let quiet = quiescence.observe(object, reports, protected, at);
            assert_eq!(quiet, Duration::from_secs(expected), "after {second} s");
        }
        quiescence.reset(&other);
        let at = begun + Duration::from_secs(90);
        assert_eq!(quiescence.observe(&other, &none, false, at), Duration::ZERO);
    }
}
