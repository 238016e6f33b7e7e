//! Writes to the NVMe tier of a node: what admission decides, in the sequence of the agent.
//!
//! A block that is refused at its commit is written once a request uses it again, or as the emergency demotion before
//! DRAM evicts it. A full DRAM is always under that pressure in a replay without time.

use reprise_policy::admission::{Admission, AdmissionMode, Candidate, Reuse, Verdict};
use reprise_policy::eviction::restore_cost::RestoreFrom;
use reprise_policy::eviction::{Chains, Group};

use super::node::{Counts, NodeSettings};
use super::tier::{Slot, TierSlots};

/// NVMe of one node.
#[derive(Debug)]
pub(super) struct NvmeTier {
    pub(super) slots: TierSlots,
    admission: Admission,
}

/// Occasion of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Occasion {
    /// The block was committed.
    Commit,
    /// A request used a block that is in DRAM only.
    Use,
    /// DRAM evicts the block.
    Eviction,
}

impl NvmeTier {
    pub(super) fn new(slots: TierSlots, mode: AdmissionMode) -> NvmeTier {
        NvmeTier { slots, admission: Admission::new(mode) }
    }

    /// Records the first use of a block after its commit.
    pub(super) fn reused(&mut self, slot: Slot) {
        self.admission.reused(Group(slot.tenant), Some(slot.depth));
    }

    /// Writes a block, if admission accepts it; returns the block that made room.
    pub(super) fn offer(
        &mut self,
        slot: Slot,
        settings: &NodeSettings,
        occasion: Occasion,
        counts: &mut Counts,
    ) -> Option<u32> {
        let is_active = self.admission.mode() != AdmissionMode::Always;
        if self.slots.find(slot.block).is_some() || !(is_active || occasion == Occasion::Commit) {
            return None;
        }
        let candidate = Candidate {
            key_hash: slot.key_hash(),
            tenant: Group(slot.tenant),
            position: Some(slot.depth),
            reuse: if slot.is_reused { Reuse::Used } else { Reuse::None },
            bytes: settings.block_bytes,
            tokens: settings.block_tokens,
            budget_left_permille: 1000,
        };
        let verdict = if occasion == Occasion::Commit {
            self.admission.committed(Group(slot.tenant), Some(slot.depth));
            self.admission.decide(&candidate)
        } else {
            self.admission.decide_again(&candidate)
        };
        if verdict != Verdict::Admit {
            return None;
        }
        let Ok(victim) = self.slots.make_room(slot.tenant) else {
            counts.unsaved_nvme += 1;
            return None;
        };
        counts.nvme_written += 1;
        counts.nvme_evictions += u64::from(victim.is_some());
        let entry = self.slots.place(Slot { holders: 0, ..slot });
        // An evicted block is computed again.
        self.slots.release(entry, &settings.facts(&slot, RestoreFrom::Recompute));
        if settings.policy.chains == Chains::DescendantsFirst {
            self.slots.order.settle(entry);
        }
        victim.map(|victim| victim.block)
    }
}
