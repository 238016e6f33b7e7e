//! What is to be written of a node's allocations, and in which order. Pure.
//!
//! In this order: finalizers of what is to be granted, what is given back, what else is to be said, finalizers that nothing needs any more, and last
//! what is granted. So whoever is killed between two writes leaves room unused, and never lends it twice.
//!
//! * A grant is written in a later turn than its finalizer. Until then nothing is taken back for it, and nothing that this would leave is lent
//!   to others. One that was refused its finalizer in this turn is passed over ([`Found::passed_over`]): it asks for nothing, and what it would
//!   have is lent to others. Those that have the finalizer, and fit only while somebody who is passed over is counted, keep it: without that they
//!   would get it and lose it in turns.
//! * Who has a finalizer and no grant may be about to be granted by a replica that had the lease before. So a finalizer that is not from
//!   this process ([`Found::held`]) is taken away, or a status written, before anything is granted on the node: see [`super::apply`].

use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt;
use reprise_crds::GPUQueueAllocation;

use super::dereference::{Found, Referring, name};
use super::grant::{Claimant, Hold, Queues, Share, Verdict, decide};
use super::life::{Life, life};
use super::room::Room;
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
    /// Something else is so.
    Say(Said),
    /// It loses the finalizer.
    LetGo,
    /// It has a grant.
    Grant(Said),
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
    let claimants: Vec<Claimant> = members.iter().map(|member| claimant(member, found)).collect();
    let verdicts = decide(&found.lenders, &claimants);
    let is_asked = |(member, _): &(&Member<'_>, &Verdict)| !found.is_passed_over(&member.of.object);
    let decided = members.iter().zip(&verdicts).filter(is_asked);
    let due = decided.filter_map(|(member, verdict)| Some((verdict, step(member, verdict, found, now)?)));
    let mut steps = without_early(due.collect());
    steps.sort_by_key(|step| step.what.turn());
    steps
}

/// Without what is taken back for somebody who cannot be granted yet, and without grants that need its room.
fn without_early(mut due: Vec<(&Verdict, Step)>) -> Vec<Step> {
    let is_early = |verdict: &Verdict, step: &Step| {
        matches!(verdict, Verdict::Granted(_)) && !matches!(step.what, What::Grant(_))
    };
    let early = due.iter().filter(|(verdict, step)| is_early(verdict, step));
    let early: BTreeSet<String> = early.map(|(_, step)| name(&step.object)).collect();
    let waits = |verdict: &Verdict| matches!(verdict, Verdict::TakenBack { by } if early.contains(by));
    let mut room = Room::default();
    for (_, step) in due.iter().filter(|(verdict, _)| waits(verdict)) {
        room.waits(step);
    }
    due.retain(|(verdict, step)| !waits(verdict) && room.allows(step));
    due.into_iter().map(|(_, step)| step).collect()
}

fn member<'a>(of: &'a Referring, found: &Found, now: &Time) -> Member<'a> {
    let refused = validate(of, found);
    let life = life(&of.object, found, refused.as_ref(), now);
    Member { of, refused, life }
}

fn claimant(member: &Member<'_>, found: &Found) -> Claimant {
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
            Life::Wants if found.is_passed_over(object) => Hold::Nothing,
            Life::Wants => Hold::Wants,
            Life::Stands { kept: Some(_) } => Hold::Stands { shares, queues: Queues::Kept },
            Life::Stands { kept: None } => Hold::Stands { shares, queues: Queues::None },
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
    } else if is_granted && !found.is_held(object) {
        What::LetGo
    } else if let Some(said) = status::of(member, verdict, found, now) {
        match (&member.life, verdict) {
            (_, Verdict::Granted(_)) => What::Grant(said),
            (_, Verdict::TakenBack { .. }) | (Life::Ends(..) | Life::Ended(_), _) => What::GiveBack(said),
            _ => What::Say(said),
        }
    } else if has && !is_held && !waits_for_others(member, found) {
        What::LetGo
    } else {
        return None;
    };
    Some(Step { object: Arc::clone(object), what })
}

/// Whether one that does not fit may do so as soon as somebody can be written who is passed over.
fn waits_for_others(member: &Member<'_>, found: &Found) -> bool {
    member.life == Life::Wants && !found.passed_over.is_empty()
}

impl What {
    /// When it is written, among others.
    fn turn(&self) -> u8 {
        match self {
            What::Hold => 0,
            What::GiveBack(_) => 1,
            What::Say(_) => 2,
            What::LetGo => 3,
            What::Grant(_) => 4,
        }
    }
}
