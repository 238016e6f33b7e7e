//! One turn of a node: its writes one after the other, and what is decided when one of them fails. Calls nobody.
//!
//! Who is refused its finalizer is passed over in this turn: before anything but finalizers is written it is decided again, as if that one asked for
//! nothing. So the room that it would have had is lent to others, for as long as nobody may write it. Each time at least one more is passed over,
//! so a turn decides once for each allocation at the most. Of one object a turn writes no finalizer twice: what was written made a new version of
//! it, which the next turn knows.

use std::collections::{BTreeSet, VecDeque};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt;

use super::build::{Step, What, steps};
use super::dereference::{Found, name};
use super::room::{Failure, Room};

/// What is to be written in one turn.
#[derive(Debug)]
pub struct Turn {
    found: Found,
    now: Time,
    due: VecDeque<Step>,
    room: Room,
    /// Unique ids of those that were given the finalizer in this turn, or were to be.
    tried: BTreeSet<String>,
    /// Whether what is due was decided with one that is passed over since.
    is_outdated: bool,
}

impl Turn {
    /// What is due of a node as it was found.
    pub fn of(found: Found, now: Time) -> Turn {
        let (room, tried) = (Room::default(), BTreeSet::new());
        let mut turn = Turn { found, now, due: VecDeque::new(), room, tried, is_outdated: false };
        turn.decide();
        turn
    }

    /// The next write, if there is one.
    pub fn next_step(&mut self) -> Option<Step> {
        loop {
            if self.is_outdated && self.due.front().is_none_or(|step| step.what != What::Hold) {
                self.decide();
            }
            let step = self.due.pop_front()?;
            if step.what == What::Hold {
                self.tried.insert(step.object.uid().unwrap_or_default());
            }
            if self.room.allows(&step) {
                return Some(step);
            }
            tracing::info!(allocation = name(&step.object), "it is granted once others could be written");
        }
    }

    /// A step could not be written.
    pub fn failed(&mut self, step: &Step, failure: Failure) {
        if step.what == What::Hold && failure == Failure::Refused {
            self.found.passed_over.insert(step.object.uid().unwrap_or_default());
            self.is_outdated = true;
        } else {
            self.room.failed(step, failure);
        }
    }

    fn decide(&mut self) {
        self.is_outdated = false;
        let mut due = steps(&self.found, &self.now);
        due.retain(|step| step.object.uid().is_none_or(|uid| !self.tried.contains(&uid)));
        self.due = due.into();
    }
}
