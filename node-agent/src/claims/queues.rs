//! Queue pairs of the node's controllers that are kept for GPUs.
//!
//! The node's spec names allocations, and how many queue pairs of which controllers each was granted. They are kept for it, whole or not at all,
//! as long as the spec names it, and told; so who grants knows when what has ended is free. It goes by what the node has, not by who
//! granted: a controller that somebody has for himself is shared with nobody, and one queue pair of each stays with the kernel. So two grants that cannot
//! both be, as an operator that has lost its lease might write, are never kept at once: the later one is refused in words, and tried again.
//!
//! Deliberately absent: queues of these pairs, which takes a driver that this release does not have; what is kept after a restart: the spec says it
//! again.

use reprise_agent_kubernetes::{ControllerFact, QueueFact, QueueWish};

/// Queue pairs of a controller that are never kept for anybody.
const KERNEL_PAIRS: u32 = 1;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Queues {
    /// What is wanted and kept, in the order in which it came.
    kept: Vec<QueueWish>,
    /// What is wanted and not kept, and why.
    refused: Vec<(QueueWish, String)>,
}

impl Queues {
    /// What is wanted from now on; `None`: as before. What is wanted no more, or otherwise, is let go of.
    pub(super) fn want(&mut self, wishes: Option<Vec<QueueWish>>) {
        let Some(wishes) = wishes else { return };
        self.kept.retain(|kept| {
            let stays = wishes.contains(kept);
            if !stays {
                tracing::info!(allocation = kept.allocation, "queue pairs of a GPU are let go of");
            }
            stays
        });
        let before = std::mem::take(&mut self.refused);
        for wish in wishes {
            if !self.kept.contains(&wish) {
                let said = before.iter().find(|(known, _)| *known == wish).map(|(_, why)| why.clone());
                self.refused.push((wish, said.unwrap_or_default()));
            }
        }
    }

    /// Keeps what is wanted and can be kept, of these controllers.
    pub(super) fn look(&mut self, controllers: &[ControllerFact]) {
        for (wish, said) in std::mem::take(&mut self.refused) {
            match self.obstacle(&wish, controllers) {
                None => {
                    tracing::info!(allocation = wish.allocation, "queue pairs are kept for a GPU");
                    self.kept.push(wish);
                }
                Some(why) => {
                    if why != said {
                        let allocation = &wish.allocation;
                        tracing::warn!(allocation, why, "queue pairs cannot be kept for a GPU");
                    }
                    self.refused.push((wish, why));
                }
            }
        }
    }

    /// What is told of them.
    pub(super) fn facts(&self) -> Vec<QueueFact> {
        let kept = self.kept.iter().map(|wish| (wish, None));
        let refused = self.refused.iter().map(|(wish, why)| (wish, Some(why.clone())));
        let fact = |(wish, refused): (&QueueWish, Option<String>)| {
            let all = wish.pairs.values().copied().fold(0, u32::saturating_add);
            QueueFact { uid: wish.uid.clone(), kept: if refused.is_some() { 0 } else { all }, refused }
        };
        kept.chain(refused).map(fact).collect()
    }

    fn obstacle(&self, wish: &QueueWish, controllers: &[ControllerFact]) -> Option<String> {
        wish.pairs.iter().find_map(|(serial, pairs)| {
            let Some(controller) = controllers.iter().find(|one| one.serial == *serial) else {
                return Some(format!("the node has no controller {serial}"));
            };
            let holders: Vec<(&QueueWish, u32)> = self.holders(serial).collect();
            let alone = holders.iter().find(|(holder, _)| wish.exclusive || holder.exclusive);
            if let Some((holder, _)) = alone {
                let other = &holder.allocation;
                return Some(format!("{other} has controller {serial}, which is to be shared with nobody"));
            }
            let most = controller.queue_pairs.saturating_sub(KERNEL_PAIRS);
            let held = holders.iter().map(|(_, pairs)| *pairs).fold(0, u32::saturating_add);
            let left = most.saturating_sub(held);
            (*pairs > left).then(|| {
                format!("controller {serial} has {left} queue pairs left of {most}, and {pairs} are wanted")
            })
        })
    }

    /// Who has something of a controller, and how much.
    fn holders(&self, serial: &str) -> impl Iterator<Item = (&QueueWish, u32)> {
        self.kept.iter().filter_map(move |wish| Some((wish, *wish.pairs.get(serial)?)))
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

    fn wish(name: &str, exclusive: bool, pairs: &[(&str, u32)]) -> QueueWish {
        let pairs = pairs.iter().map(|(serial, pairs)| ((*serial).to_owned(), *pairs)).collect();
        QueueWish { uid: name.to_owned(), allocation: format!("n/{name}"), exclusive, pairs }
    }

    /// What is told: of each how many are kept, and why not.
    fn told(queues: &Queues) -> Vec<(String, u32, String)> {
        let told = |fact: QueueFact| (fact.uid, fact.kept, fact.refused.unwrap_or_default());
        queues.facts().into_iter().map(told).collect()
    }

    fn want(queues: &mut Queues, wishes: &[QueueWish]) -> Vec<(String, u32, String)> {
        queues.want(Some(wishes.to_vec()));
        queues.look(&controllers());
        told(queues)
    }

    #[test]
    fn what_is_granted_is_kept_until_it_is_wanted_no_more() {
        let mut queues = Queues::default();
        let (a, b) = (wish("a", false, &[("S1", 8), ("S2", 8)]), wish("b", false, &[("S1", 8)]));
        let all = [("a".to_owned(), 16, String::new()), ("b".to_owned(), 8, String::new())];
        assert_eq!(want(&mut queues, &[a.clone(), b.clone()]), all);
        assert_eq!(want(&mut queues, &[b.clone(), a]), all, "in whatever order it is named");
        queues.want(None);
        assert_eq!(told(&queues), all);
        assert_eq!(want(&mut queues, &[b]), all[1..]);
        assert_eq!(want(&mut queues, &[]), []);
    }

    #[test]
    fn what_cannot_be_beside_others_is_refused_whole_until_they_have_gone() {
        let mut queues = Queues::default();
        let (a, own) = (wish("a", false, &[("S1", 8)]), wish("own", true, &[("S1", 1), ("S2", 1)]));
        let big = wish("big", false, &[("S2", 16), ("S1", 9)]);
        let now = want(&mut queues, &[a.clone(), own.clone(), big.clone()]);
        assert_eq!(now[0], ("a".to_owned(), 8, String::new()));
        let why = |at: usize| (now[at].1, now[at].2.as_str());
        assert_eq!(why(1), (0, "n/a has controller S1, which is to be shared with nobody"));
        assert_eq!(why(2), (0, "controller S1 has 8 queue pairs left of 16, and 9 are wanted"));
        let now = want(&mut queues, &[own, big.clone()]);
        assert_eq!(now[0], ("own".to_owned(), 2, String::new()));
        assert!(now[1].2.contains("n/own has controller S1"), "{now:?}");
        assert_eq!(want(&mut queues, &[big]), [("big".to_owned(), 25, String::new())]);
        let more = wish("more", false, &[("S2", 1)]);
        assert_eq!(want(&mut queues, std::slice::from_ref(&more)), [("more".to_owned(), 1, String::new())]);
        // Another grant under the same id is another one.
        let changed = QueueWish { pairs: BTreeMap::from([("S2".to_owned(), 17)]), ..more };
        assert!(want(&mut queues, &[changed])[0].2.contains("17 are wanted"));
    }

    #[test]
    fn a_controller_that_comes_later_is_found_and_one_that_has_gone_takes_nothing_away() {
        let mut queues = Queues::default();
        let late = wish("late", false, &[("S1", 1)]);
        queues.want(Some(vec![late.clone()]));
        queues.look(&[]);
        assert_eq!(told(&queues), [("late".to_owned(), 0, "the node has no controller S1".to_owned())]);
        queues.look(&controllers());
        queues.look(&[]);
        assert_eq!(told(&queues), [("late".to_owned(), 1, String::new())]);
        assert_eq!(want(&mut queues, &[late]), told(&queues));
    }
}
