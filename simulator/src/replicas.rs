//! The replicas that a node's agents have announced, and those of them that must survive.

use std::collections::{BTreeMap, BTreeSet};

use reprise_agent_core::effect::{Change, ReplicaChange};
use reprise_policy::{BlockKey, SlotSet, Tick, Tier};

/// Durable blocks of a node, over all processes of its agent.
#[derive(Debug, Default)]
pub(crate) struct DurableBlocks {
    /// Blocks that were reported durable and not withdrawn.
    pub(crate) reported: BTreeSet<BlockKey>,
    /// Blocks that were durable, and the time at which they were withdrawn.
    pub(crate) withdrawn: BTreeMap<BlockKey, Tick>,
}

/// Replicas that one process of an agent has announced.
#[derive(Debug, Default)]
pub(crate) struct AnnouncedReplicas {
    pub(crate) held: BTreeSet<(BlockKey, Tier)>,
    /// Number of replicas in the largest inventory so far.
    pub(crate) held_max: usize,
    /// The core has announced its recovered blocks.
    recovered: bool,
    /// Blocks that were on NVMe at any time of this process.
    ever_stored: BTreeSet<BlockKey>,
}

impl AnnouncedReplicas {
    pub(crate) fn has(&self, key: &BlockKey, tier: Tier) -> bool {
        self.held.contains(&(*key, tier))
    }

    /// Records changes, which must have an effect.
    pub(crate) fn change(&mut self, durable: &mut DurableBlocks, now: Tick, changes: &[ReplicaChange]) {
        for change in changes {
            let replica = (change.key, change.tier);
            let new = match change.change {
                Change::Added => self.held.insert(replica),
                Change::Removed => self.held.remove(&replica),
            };
            assert!(new, "{change:?} has no effect");
            match (change.tier, change.change) {
                (Tier::Nvme, Change::Added) => {
                    self.ever_stored.insert(change.key);
                    durable.reported.insert(change.key);
                    durable.withdrawn.remove(&change.key);
                }
                (Tier::Nvme, Change::Removed) => {
                    durable.reported.remove(&change.key);
                    durable.withdrawn.insert(change.key, now);
                }
                (Tier::Dram, _) => {}
            }
        }
    }

    /// Checks an inventory: the first one of a process announces the recovered blocks; later ones must equal
    /// the announced blocks.
    pub(crate) fn inventory(
        &mut self,
        durable: &mut DurableBlocks,
        now: Tick,
        (slots, replicas): (&SlotSet, &[(BlockKey, Tier)]),
    ) {
        let announced: BTreeSet<_> = replicas.iter().copied().collect();
        assert_eq!(announced.len(), replicas.len(), "a replica is announced once");
        if std::mem::replace(&mut self.recovered, true) {
            let known = self.held.iter().filter(|(key, _)| slots.has_key(key)).copied();
            assert!(known.eq(announced), "the inventory differs from the announced replicas");
            return;
        }
        self.held = announced;
        let stored = self.held.iter().filter(|(_, tier)| *tier == Tier::Nvme).map(|(key, _)| *key);
        let stored: BTreeSet<_> = stored.collect();
        self.ever_stored.extend(&stored);
        let gone = durable.reported.difference(&stored).map(|key| (*key, now));
        durable.withdrawn.extend(gone);
        durable.withdrawn.retain(|key, _| !stored.contains(key));
        durable.reported = stored;
    }

    /// Records the size of the inventory after an event.
    pub(crate) fn note_size(&mut self) {
        self.held_max = self.held_max.max(self.held.len());
    }

    /// Checks that blocks that are reported durable to engines were announced.
    pub(crate) fn assert_stored(&self, durable: &[BlockKey]) {
        for key in durable {
            assert!(self.ever_stored.contains(key), "{key} was reported durable but never announced on NVMe");
        }
    }
}
