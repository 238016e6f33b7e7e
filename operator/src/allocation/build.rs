//! What is to be written of a node's allocations, and in which order. Pure.
//!
//! First finalizers of what is to be granted, and nothing else before they are there. Then what is given back, what is granted, what else is to
//! be said, and last the finalizers that nothing needs any more. So whoever is killed between two writes leaves room unused, and never lends it
//! twice.

use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt;
use reprise_crds::GPUQueueAllocation;

use super::dereference::{Found, Referring};
use super::grant::{Claimant, Hold, Queues, Share, Verdict, decide};
use super::life::{Life, life};
use super::status::{self, Said};
use super::validate::validate;
use crate::names::QUEUES_FINALIZER;
use crate::plan::Refusal;

/// One write.
#[derive(Clone, Debug)]
pub struct Step {
    /// What it is about, as it was when this was decided.
    pub object: Arc<GPUQueueAllocation>,
    /// What is written.
    pub what: What,
}

/// What is written of an allocation.
#[derive(Clone, Debug, PartialEq)]
pub enum What {
    /// It gets the finalizer.
    Hold,
    /// Its grant ends, or has ended.
    GiveBack(Said),
    /// It has a grant.
    Grant(Said),
    /// Something else is so.
    Say(Said),
    /// It loses the finalizer.
    LetGo,
}

/// An allocation, while it is decided about.
#[derive(Clone, Debug)]
pub struct Member<'a> {
    /// It, and what it refers to.
    pub of: &'a Referring,
    /// Why it is refused.
    pub refused: Option<Refusal>,
    /// Where it is in its life.
    pub life: Life,
}

/// All writes that are due, in their order.
pub fn steps(found: &Found, now: &Time) -> Vec<Step> {
    let members: Vec<Member<'_>> = found.allocations.iter().map(|of| member(of, found, now)).collect();
    let claimants: Vec<Claimant> = members.iter().map(claimant).collect();
    let verdicts = decide(&found.lenders, &claimants);
    let mut steps: Vec<Step> = members
        .iter()
        .zip(&verdicts)
        .filter_map(|(member, verdict)| step(member, verdict, found, now))
        .collect();
    if steps.iter().any(|step| step.what == What::Hold) {
        steps.retain(|step| step.what == What::Hold);
    }
    steps.sort_by_key(|step| step.what.turn());
    steps
}

fn member<'a>(of: &'a Referring, found: &Found, now: &Time) -> Member<'a> {
    let refused = validate(of, found);
    let life = life(&of.object, found, refused.as_ref(), now);
    Member { of, refused, life }
}

fn claimant(member: &Member<'_>) -> Claimant {
    let (object, spec) = (&member.of.object, &member.of.object.spec);
    let granted = object.status.iter().flat_map(|status| &status.allocations);
    let shares: Vec<Share> =
        granted.map(|grant| Share { serial: grant.serial.to_string(), pairs: grant.queue_pairs }).collect();
    let made = object.metadata.creation_timestamp.as_ref().map_or(i64::MAX, |made| made.0.as_second());
    Claimant {
        name: member.of.name(),
        made,
        pool: spec.pool_ref.name.to_string(),
        pairs: spec.queue_pairs,
        qos: spec.qos,
        isolation: spec.isolation,
        has: match &member.life {
            Life::Refused | Life::Ended(_) | Life::Over => Hold::Nothing,
            Life::Wants => Hold::Wants,
            Life::Stands { listed: Some(_) } => Hold::Stands { shares, queues: Queues::Made },
            Life::Stands { listed: None } => Hold::Stands { shares, queues: Queues::None },
            Life::Ends(..) | Life::Goes => Hold::Ends(shares),
        },
    }
}

/// What is due of one allocation: one write at a time, since each makes a new version of it.
fn step(member: &Member<'_>, verdict: &Verdict, found: &Found, now: &Time) -> Option<Step> {
    let object = &member.of.object;
    let has = object.finalizers().iter().any(|one| one == QUEUES_FINALIZER);
    let goes = object.metadata.deletion_timestamp.is_some();
    let is_granted = matches!(verdict, Verdict::Granted(_));
    let is_held = is_granted || matches!(member.life, Life::Stands { .. } | Life::Ends(..));
    let what = if is_held && !has && !goes {
        What::Hold
    } else if let Some(said) = status::of(member, verdict, found, now) {
        match (&member.life, verdict) {
            (_, Verdict::Granted(_)) => What::Grant(said),
            (_, Verdict::TakenBack { .. }) | (Life::Ends(..) | Life::Ended(_), _) => What::GiveBack(said),
            _ => What::Say(said),
        }
    } else if has && !is_held {
        What::LetGo
    } else {
        return None;
    };
    Some(Step { object: Arc::clone(object), what })
}

impl What {
    /// When it is written, among others.
    fn turn(&self) -> u8 {
        match self {
            What::Hold => 0,
            What::GiveBack(_) => 1,
            What::Grant(_) => 2,
            What::Say(_) => 3,
            What::LetGo => 4,
        }
    }
}
