//! Reservations of queue pairs of the node's NVMe controllers for GPUs.
//!
//! The node's spec lists allocations and the queue pairs of each controller that they were granted. The
//! agent reserves a grant completely or not at all, as long as the spec lists it. It reports its
//! reservations, so the operator knows when an ended grant is free.
//!
//! The agent checks grants against the node's controllers. An exclusive controller is not shared, and one
//! queue pair of each controller stays with the kernel, or with the agent that drives the controller. Conflicting grants, which an operator without its
//! lease might write, are never reserved together: the later one is refused and retried.
//!
//! Out of scope: creating the queues, which needs a driver that this release does not have. Reservations
//! are not persisted: after a restart they follow from the spec.

use reprise_agent_kubernetes::{ControllerFact, DesiredQueues, QueueFact};

/// Queue pairs of each controller that stay with the kernel, or with the agent that drives the controller.
const OWN_PAIRS: u32 = 1;

/// The reserved and the refused grants.
#[derive(Debug, Default)]
pub(super) struct QueueReservations {
    /// Reserved grants, in the order of reservation.
    kept: Vec<DesiredQueues>,
    /// Grants that are not reserved, each with the reason.
    refused: Vec<(DesiredQueues, String)>,
}

impl QueueReservations {
    /// Sets the desired grants; `None` changes nothing. Reservations that are no longer desired, or were
    /// changed, are released.
    pub(super) fn set_desired(&mut self, desired: Option<Vec<DesiredQueues>>) {
        let Some(desired) = desired else { return };
        self.kept.retain(|kept| {
            let stays = desired.contains(kept);
            if !stays {
                tracing::info!(allocation = kept.allocation, "released queue pairs of a GPU");
            }
            stays
        });
        let before = std::mem::take(&mut self.refused);
        for grant in desired {
            if !self.kept.contains(&grant) {
                let reason =
                    before.iter().find(|(known, _)| *known == grant).map(|(_, reason)| reason.clone());
                self.refused.push((grant, reason.unwrap_or_default()));
            }
        }
    }

    /// Reserves desired grants for which these controllers have queue pairs.
    pub(super) fn update(&mut self, controllers: &[ControllerFact]) {
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

    /// Returns the state of all grants.
    pub(super) fn facts(&self) -> Vec<QueueFact> {
        let kept = self.kept.iter().map(|grant| (grant, None));
        let refused = self.refused.iter().map(|(grant, reason)| (grant, Some(reason.clone())));
        let fact = |(grant, refused): (&DesiredQueues, Option<String>)| {
            let all = grant.pairs.values().copied().fold(0, u32::saturating_add);
            QueueFact { uid: grant.uid.clone(), kept: if refused.is_some() { 0 } else { all }, refused }
        };
        kept.chain(refused).map(fact).collect()
    }

    fn obstacle(&self, grant: &DesiredQueues, controllers: &[ControllerFact]) -> Option<String> {
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
        self.kept.iter().filter_map(move |grant| Some((grant, *grant.pairs.get(serial)?)))
    }
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
        DesiredQueues { uid: name.to_owned(), allocation: format!("n/{name}"), exclusive, pairs }
    }

    /// Returns name, reserved queue pairs and refusal of each grant.
    fn reported(queues: &QueueReservations) -> Vec<(String, u32, String)> {
        let reported = |fact: QueueFact| (fact.uid, fact.kept, fact.refused.unwrap_or_default());
        queues.facts().into_iter().map(reported).collect()
    }

    fn set_desired(queues: &mut QueueReservations, desired: &[DesiredQueues]) -> Vec<(String, u32, String)> {
        queues.set_desired(Some(desired.to_vec()));
        queues.update(&controllers());
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
        queues.update(&[]);
        assert_eq!(reported(&queues), [("late".to_owned(), 0, "the node has no controller S1".to_owned())]);
        queues.update(&controllers());
        queues.update(&[]);
        assert_eq!(reported(&queues), [("late".to_owned(), 1, String::new())]);
        assert_eq!(set_desired(&mut queues, &[late]), reported(&queues));
    }
}
