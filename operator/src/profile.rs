//! `SlackProfile`: read, checked, and brought to the nodes that have its GPU, canary nodes first and few at once.
//!
//! ```text
//!  windows, ConfigMap ──► content, digest ──► which node gets which revision ──► decisions
//!                                                    ▲                            │    │
//!             what nodes say (CacheNode's status) ───┘     CacheNode's spec ◄─────┘    └──► files beside the agents' configuration
//! ```
//!
//! A node has room for [`PROFILES_MAX`] profiles; which of more have a place is a matter of [`order`].
//!
//! Which node gets which revision is decided here and nowhere else, for one profile at a time, so that never more nodes are between two
//! revisions than may be. [`crate::node`] writes what was decided, with everything else that is wanted of the node, and [`crate::cluster`]
//! puts the contents beside the agents' configuration ([`files`]).
//!
//! Invariant: a process that has forgotten its decisions takes those that stand in the specs of `CacheNode`s. Nothing is taken back from a
//! node but by a profile that goes, that its cluster selects no more, or that has no place there.

use std::sync::Arc;
use std::time::Duration;

use kube::runtime::controller::Action;
use kube::{Api, ResourceExt};
use reprise_crds::SlackProfile;

use crate::clock;
use crate::cluster::REPORTED_WITHIN;
use crate::context::Context;
use crate::error::OperatorError;
use build::Pace;

pub mod apply;
pub mod build;
pub mod content;
pub mod decisions;
pub mod dereference;
pub mod files;
pub mod order;
pub mod source;
pub mod status;
pub mod validate;

/// Profiles of one cluster: as many as a CacheNode has.
pub const PROFILES_MAX: usize = 16;

/// Times are kept in whole seconds.
const SOON: Duration = Duration::from_secs(1);

/// Brings a profile to its nodes, and says how far it is.
///
/// # Errors
/// The API server did not do what it was asked for; tried again.
pub async fn reconcile(profile: Arc<SlackProfile>, context: Arc<Context>) -> Result<Action, OperatorError> {
    if profile.metadata.deletion_timestamp.is_some() {
        // No cluster selects what goes, so nodes give it up by themselves.
        return Ok(Action::await_change());
    }
    let found = dereference::dereference(&profile, &context).await?;
    let refused = validate::accepted(&profile, &found);
    let revision = validate::valid(&profile, &found.source);
    let good = revision.as_ref().ok().filter(|_| refused.is_none());
    let digest = good.map(|revision| revision.digest.as_str());
    let now = clock::now();
    let soaking_since = build::soaking_since(&profile, &found.nodes, digest, &now);
    let soaked = soaking_since.as_ref().map(|since| clock::between(since, &now));
    let wave = build::build(&profile, &found.nodes, digest, soaked);
    apply::apply(&profile, good.cloned(), &wave, &context).await;
    let (fresh, findings) = status::of(&status::Seen {
        profile: &profile,
        found: &found,
        refused: refused.as_ref(),
        revision: revision.as_ref(),
        wave: &wave,
        soaking_since,
    });
    let api: Api<SlackProfile> =
        Api::namespaced(context.client.clone(), &profile.namespace().unwrap_or_default());
    let said = crate::status::Found {
        object: &*profile,
        api: &api,
        before: profile.status.as_ref(),
        findings: &findings,
    };
    let wait = crate::status::write(&context, said, fresh).await?;
    let next = match wave.pace {
        Pace::Soaking(rest) => rest.clamp(SOON, REPORTED_WITHIN),
        // A node that has gone silent tells nobody.
        _ => REPORTED_WITHIN,
    };
    let next = if profile.spec.config_map_ref.is_some() { next.min(source::STAYS) } else { next };
    Ok(Action::requeue(wait.map_or(next, |wait| wait.min(next))))
}
