//! Reservations of queue pairs of the node's NVMe controllers for GPUs.
//!
//! The node's spec lists allocations and the queue pairs of each controller that they were granted. The
//! agent reserves a grant completely or not at all, as long as the spec lists it. It reports its
//! reservations, so the operator knows when an ended grant is free.
//!
//! ```text
//! desired ── update ─▶ reserved: sessions may have its queue pairs
//!    ▲                    │ no longer desired
//!    └─ refused           ▼
//!                      ending: sessions' queue pairs are being deleted ── none is left ─▶ released
//! ```
//!
//! An ending reservation keeps its queue pairs, so no other grant gets them before the controller has deleted them.
//!
//! The agent checks grants against the node's controllers. An exclusive controller is not shared, and one
//! queue pair of each controller stays with the kernel, or with the agent that drives the controller. Conflicting grants, which an operator without its
//! lease might write, are never reserved together: the later one is refused and retried.
//!
//! Sessions create the queue pairs ([`crate::queue_grants`]). Reservations are not persisted: after a restart they
//! follow from the spec.

use std::collections::BTreeMap;

use reprise_agent_kubernetes::{ControllerFact, CreatedFact, DesiredQueues, QueueFact};
use reprise_policy::queue_grants::Allocation;

use crate::device::ControllerHandle;
use crate::queue_grants::{CreatedByAllocation, CreatedQueues};

/// Queue pairs of each controller that stay with the kernel, or with the agent that drives the controller.
const OWN_PAIRS: u32 = 1;

/// The reserved and the refused grants.
#[derive(Debug, Default)]
pub(super) struct QueueReservations {
    /// Reserved grants, in the order of reservation.
    kept: Vec<DesiredQueues>,
    /// Reservations that are no longer desired, and whose queue pairs may still exist.
    ending: Vec<DesiredQueues>,
    /// Grants that are not reserved, each with the reason.
    refused: Vec<(DesiredQueues, String)>,
}

impl QueueReservations {
    /// Sets the desired grants; `None` changes nothing. Reservations that are no longer desired, or were
    /// changed, end: [`QueueReservations::update`] releases them.
    pub(super) fn set_desired(&mut self, desired: Option<Vec<DesiredQueues>>) {
        let Some(desired) = desired else { return };
        let kept = std::mem::take(&mut self.kept);
        let (kept, ended): (Vec<_>, Vec<_>) = kept.into_iter().partition(|kept| desired.contains(kept));
        self.kept = kept;
        self.ending.extend(ended);
        let before = std::mem::take(&mut self.refused);
        for grant in desired {
            if !self.kept.contains(&grant) {
                let reason =
                    before.iter().find(|(known, _)| *known == grant).map(|(_, reason)| reason.clone());
                self.refused.push((grant, reason.unwrap_or_default()));
            }
        }
    }

    /// Returns the reservations whose queue pairs sessions may have.
    pub(super) fn allocations(&self) -> Vec<Allocation> {
        let allocation = |grant: &DesiredQueues| Allocation {
            uid: grant.uid.clone(),
            name: grant.allocation.clone(),
            depth: grant.depth,
            memory_bytes: grant.memory_bytes,
            slack_profile: grant.slack_profile.clone(),
            pairs: grant.pairs.clone(),
        };
        self.kept.iter().map(allocation).collect()
    }

    /// Whether a reservation waits for the deletion of its queue pairs.
    pub(super) fn has_ending(&self) -> bool {
        !self.ending.is_empty()
    }

    /// Releases ending reservations without queue pairs, of which `pairs_of` returns the number. Then reserves desired
    /// grants for which these controllers have queue pairs.
    pub(super) fn update(&mut self, controllers: &[ControllerFact], pairs_of: impl Fn(&str) -> u32) {
        self.ending.retain(|ending| {
            let has_queues = pairs_of(&ending.uid) > 0;
            if !has_queues {
                tracing::info!(allocation = ending.allocation, "released queue pairs of a GPU");
            }
            has_queues
        });
        for (grant, previous) in std::mem::take(&mut self.refused) {
            match self.obstacle(&grant, controllers) {
                None => {
                    tracing::info!(allocation = grant.allocation, "reserved queue pairs for a GPU");
                    self.kept.push(grant);
                }
                Some(reason) => {
                    if reason != previous {
                        let allocation = &grant.allocation;
                        tracing::warn!(allocation, reason, "cannot reserve queue pairs for a GPU");
                    }
                    self.refused.push((grant, reason));
                }
            }
        }
    }

    /// Returns the state of all grants, each uid once. `open` are the controllers that the agent drives.
    pub(super) fn facts(
        &self,
        created: &CreatedByAllocation,
        open: &BTreeMap<String, ControllerHandle>,
    ) -> Vec<QueueFact> {
        let fact = |grant: &DesiredQueues| QueueFact {
            uid: grant.uid.clone(),
            kept: grant.pairs.values().copied().fold(0, u32::saturating_add),
            created: created.get(&grant.uid).map(created_facts).unwrap_or_default(),
            unavailable: grant.pairs.keys().find_map(|serial| unavailable(serial, open)),
            refused: None,
        };
        let refused = |(grant, reason): &(DesiredQueues, String)| QueueFact {
            refused: Some(reason.clone()),
            kept: 0,
            ..fact(grant)
        };
        let is_ending = |uid: &str| self.ending.iter().any(|ending| ending.uid == uid);
        let later = self.refused.iter().filter(|(grant, _)| !is_ending(&grant.uid)).map(refused);
        self.ending.iter().chain(&self.kept).map(fact).chain(later).collect()
    }

    fn obstacle(&self, grant: &DesiredQueues, controllers: &[ControllerFact]) -> Option<String> {
        if self.ending.iter().any(|ending| ending.uid == grant.uid) {
            return Some("the queue pairs of the earlier grant are being deleted".to_owned());
        }
        grant.pairs.iter().find_map(|(serial, pairs)| {
            let Some(controller) = controllers.iter().find(|one| one.serial == *serial) else {
                return Some(format!("the node has no controller {serial}"));
            };
            let holders: Vec<(&DesiredQueues, u32)> = self.holders(serial).collect();
            let alone = holders.iter().find(|(holder, _)| grant.exclusive || holder.exclusive);
            if let Some((holder, _)) = alone {
                let other = &holder.allocation;
                return Some(format!(
                    "{other} has queue pairs of controller {serial}, which cannot be shared"
                ));
            }
            let most = controller.queue_pairs.saturating_sub(OWN_PAIRS);
            let held = holders.iter().map(|(_, pairs)| *pairs).fold(0, u32::saturating_add);
            let left = most.saturating_sub(held);
            (*pairs > left).then(|| {
                format!("controller {serial} has {left} of {most} queue pairs left, {pairs} requested")
            })
        })
    }

    /// Returns the reservations on a controller with their queue pairs.
    fn holders(&self, serial: &str) -> impl Iterator<Item = (&DesiredQueues, u32)> {
        let all = self.kept.iter().chain(&self.ending);
        all.filter_map(move |grant| Some((grant, *grant.pairs.get(serial)?)))
    }
}

fn created_facts(created: &BTreeMap<String, CreatedQueues>) -> Vec<CreatedFact> {
    let fact = |(serial, created): (&String, &CreatedQueues)| CreatedFact {
        serial: serial.clone(),
        generation: created.generation,
        queues: created.queues.clone(),
    };
    created.iter().map(fact).collect()
}

/// Returns why sessions cannot have queue pairs of a controller.
fn unavailable(serial: &str, open: &BTreeMap<String, ControllerHandle>) -> Option<String> {
    let is_open = open.values().any(|handle| handle.properties().serial == serial);
    (!is_open).then(|| {
        format!(
            "the agent does not drive controller {serial}: engines get queue pairs of open devices of engine UserNvme only"
        )
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn controllers() -> [ControllerFact; 2] {
        ["S1", "S2"].map(|serial| ControllerFact {
            serial: serial.to_owned(),
            pci_address: None,
            pool: None,
            queue_pairs: 17,
        })
    }

    fn grant(name: &str, exclusive: bool, pairs: &[(&str, u32)]) -> DesiredQueues {
        let pairs = pairs.iter().map(|(serial, pairs)| ((*serial).to_owned(), *pairs)).collect();
        DesiredQueues {
            uid: name.to_owned(),
            allocation: format!("n/{name}"),
            exclusive,
            depth: 1024,
            memory_bytes: None,
            slack_profile: None,
            pairs,
        }
    }

    /// Returns name, reserved queue pairs and refusal of each grant.
    fn reported(queues: &QueueReservations) -> Vec<(String, u32, String)> {
        let reported = |fact: QueueFact| (fact.uid, fact.kept, fact.refused.unwrap_or_default());
        queues.facts(&CreatedByAllocation::new(), &BTreeMap::new()).into_iter().map(reported).collect()
    }

    fn set_desired(queues: &mut QueueReservations, desired: &[DesiredQueues]) -> Vec<(String, u32, String)> {
        queues.set_desired(Some(desired.to_vec()));
        queues.update(&controllers(), |_| 0);
        reported(queues)
    }

    #[test]
    fn grants_are_reserved_until_they_are_no_longer_desired() {
        let mut queues = QueueReservations::default();
        let (a, b) = (grant("a", false, &[("S1", 8), ("S2", 8)]), grant("b", false, &[("S1", 8)]));
        let all = [("a".to_owned(), 16, String::new()), ("b".to_owned(), 8, String::new())];
        assert_eq!(set_desired(&mut queues, &[a.clone(), b.clone()]), all);
        assert_eq!(set_desired(&mut queues, &[b.clone(), a]), all, "in any order");
        queues.set_desired(None);
        assert_eq!(reported(&queues), all);
        assert_eq!(set_desired(&mut queues, &[b]), all[1..]);
        assert_eq!(set_desired(&mut queues, &[]), []);
    }

    #[test]
    fn conflicting_grants_are_refused_completely_until_the_conflict_is_gone() {
        let mut queues = QueueReservations::default();
        let (a, own) = (grant("a", false, &[("S1", 8)]), grant("own", true, &[("S1", 1), ("S2", 1)]));
        let big = grant("big", false, &[("S2", 16), ("S1", 9)]);
        let now = set_desired(&mut queues, &[a.clone(), own.clone(), big.clone()]);
        assert_eq!(now[0], ("a".to_owned(), 8, String::new()));
        let reason = |at: usize| (now[at].1, now[at].2.as_str());
        assert_eq!(reason(1), (0, "n/a has queue pairs of controller S1, which cannot be shared"));
        assert_eq!(reason(2), (0, "controller S1 has 8 of 16 queue pairs left, 9 requested"));
        let now = set_desired(&mut queues, &[own, big.clone()]);
        assert_eq!(now[0], ("own".to_owned(), 2, String::new()));
        assert!(now[1].2.contains("n/own has queue pairs of controller S1"), "{now:?}");
        assert_eq!(set_desired(&mut queues, &[big]), [("big".to_owned(), 25, String::new())]);
        let more = grant("more", false, &[("S2", 1)]);
        assert_eq!(
            set_desired(&mut queues, std::slice::from_ref(&more)),
            [("more".to_owned(), 1, String::new())]
        );
        // A changed grant with the same id replaces the reservation.
        let changed = DesiredQueues { pairs: BTreeMap::from([("S2".to_owned(), 17)]), ..more };
        assert!(set_desired(&mut queues, &[changed])[0].2.contains("17 requested"));
    }

    #[test]
    fn controllers_may_appear_later_and_disappear_without_ending_reservations() {
        let mut queues = QueueReservations::default();
        let late = grant("late", false, &[("S1", 1)]);
        queues.set_desired(Some(vec![late.clone()]));
        queues.update(&[], |_| 0);
        assert_eq!(reported(&queues), [("late".to_owned(), 0, "the node has no controller S1".to_owned())]);
        queues.update(&controllers(), |_| 0);
        queues.update(&[], |_| 0);
        assert_eq!(reported(&queues), [("late".to_owned(), 1, String::new())]);
        assert_eq!(set_desired(&mut queues, &[late]), reported(&queues));
    }

    #[test]
    fn ended_grants_keep_their_queue_pairs_until_they_are_deleted() {
        let mut queues = QueueReservations::default();
        let (a, b) = (grant("a", false, &[("S1", 12)]), grant("b", false, &[("S1", 8)]));
        set_desired(&mut queues, std::slice::from_ref(&a));
        assert_eq!(queues.allocations()[0].pairs, a.pairs);
        let numbers = CreatedQueues { generation: 7, queues: vec![2, 3] };
        let created =
            CreatedByAllocation::from([("a".to_owned(), BTreeMap::from([("S1".to_owned(), numbers)]))]);
        let fact = &queues.facts(&created, &BTreeMap::new())[0];
        assert_eq!(
            fact.created,
            [CreatedFact { serial: "S1".to_owned(), generation: 7, queues: vec![2, 3] }]
        );
        let unavailable = fact.unavailable.as_deref().unwrap_or_default();
        assert!(unavailable.contains("does not drive controller S1"), "{unavailable}");

        let shrunk = grant("a", false, &[("S1", 4)]);
        queues.set_desired(Some(vec![shrunk, b]));
        assert!(queues.allocations().is_empty(), "sessions no longer get its queue pairs");
        let has_two = |uid: &str| if uid == "a" { 2 } else { 0 };
        queues.update(&controllers(), has_two);
        assert!(queues.has_ending());
        let now = reported(&queues);
        assert_eq!(now[0], ("a".to_owned(), 12, String::new()), "the operator must not grant them");
        assert_eq!(
            (now.len(), now[1].2.as_str()),
            (2, "controller S1 has 4 of 16 queue pairs left, 8 requested")
        );
        queues.update(&controllers(), |_| 0);
        assert!(!queues.has_ending());
        let all = [("a".to_owned(), 4, String::new()), ("b".to_owned(), 8, String::new())];
        assert_eq!(reported(&queues), all);
    }
}
