//! `SlackProfile`: reads and validates a profile and rolls it out to the nodes with its GPU, canary nodes
//! first, a few at a time.
//!
//! ```text
//! measurement, ConfigMap ──► content, digest ──► revision per node ──► decisions
//!                                                    ▲                  │    │
//!     agents' reports (CacheNode status) ────────────┘  CacheNode spec ◄┘    └──► files next to the agents' configuration
//! ```
//!
//! The revision of each node is decided only here, for one profile at a time, so the limit on nodes between
//! two revisions holds. [`crate::reconcile::node`] writes the decisions with the rest of a node's spec, and
//! [`crate::reconcile::cluster`] provides the contents as files ([`files`]).
//!
//! Invariant: after a restart, decisions start from the specs of `CacheNode`s. A node loses a profile only if
//! the profile is deleted, the cluster no longer selects it, or it exceeds the limit.

use std::sync::Arc;
use std::time::Duration;

use kube::runtime::controller::Action;
use kube::{Api, ResourceExt};
use reprise_crds::SlackProfile;

use crate::framework::clock;
use crate::framework::error::OperatorError;
use crate::reconcile::context::Context;
use crate::reconcile::membership::REPORT_TIMEOUT;
use decisions::ProfileDecision;

pub mod build;
pub mod controller;
pub mod decisions;
pub mod dereference;
pub mod files;
pub mod source;
pub mod status;

/// Shortest requeue delay; timestamps have second resolution.
const SOON: Duration = Duration::from_secs(1);

/// Rolls a profile out to its nodes and reports the progress.
///
/// # Errors
/// Returns an error if an API request failed; the reconcile is retried.
pub async fn reconcile(profile: Arc<SlackProfile>, context: Arc<Context>) -> Result<Action, OperatorError> {
    if profile.metadata.deletion_timestamp.is_some() {
        // Clusters do not select a profile that is being deleted, so nodes drop it without further action.
        return Ok(Action::await_change());
    }
    let found = dereference::dereference(&profile, &context).await?;
    let now = clock::now();
    let soaking_since = build::soaking_since(&profile, &found, &now);
    let soak_left = soaking_since.as_ref().and_then(|since| build::soak_left(&profile, since, &now));
    let (nodes, obstacle) = build::build(&profile, &found, soak_left.is_some());
    let decision = ProfileDecision { revision: found.current().cloned(), nodes };
    decisions::publish(&profile, decision, &context).await;
    let (fresh, findings) = status::compute(&profile, &found, obstacle, soaking_since);
    let api: Api<SlackProfile> =
        Api::namespaced(context.client.clone(), &profile.namespace().unwrap_or_default());
    let wait = crate::framework::status::write(&context, &*profile, &api, &findings, fresh).await?;
    // A node that stops reporting causes no event.
    let next = soak_left.map_or(REPORT_TIMEOUT, |left| left.clamp(SOON, REPORT_TIMEOUT));
    let next = if profile.spec.config_map_ref.is_some() { next.min(source::CACHE_TTL) } else { next };
    Ok(Action::requeue(wait.map_or(next, |wait| wait.min(next))))
}
