//! Moving blocks to a node that has more room.
//!
//! The control plane says where to and how much, and says it anew with every report. Blocks come from the end of the order
//! of eviction that goes first, but not from its very end: what would be evicted soon is not worth the way. A block's own
//! copy is dropped when the control plane says that the other one is durable, unless somebody reads it: then later.

use std::collections::{BTreeMap, BTreeSet};

use reprise_policy::eviction::{EntryIndex, Group};
use reprise_policy::{BlockKey, NodeId, Tick};

use super::super::AgentCore;
use super::super::index::Dram;
use super::super::limits::{
    GIVING_STEP_ENTRIES, GIVING_STEP_EVERY, MOVE_PASSES_PERMILLE, PLACE_KEYS_MAX, WALK_AGAIN,
};
use super::super::shapes::ShapeId;
use super::super::tenants::nvme_bytes;
use crate::effect::PlaceReason;
use crate::event::Move;

/// A move under way.
#[derive(Debug)]
pub(super) struct Moving {
    order: Move,
    /// Slot bytes dropped here since the order came.
    moved: u64,
    /// Whose order of eviction is looked at.
    tenant: u16,
    /// Behind which block.
    after: Option<EntryIndex>,
    /// Bytes of blocks of this tenant that are still passed over.
    pass_bytes: u64,
    /// Not before then.
    step_at: Tick,
}

/// Whether the own copy of a moved block has gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dropped {
    /// It has, or there is none.
    Done,
    /// Somebody reads it.
    NotNow,
}

impl AgentCore {
    /// The control plane has said what is to move.
    pub(in crate::agent) fn set_move(&mut self, order: Option<Move>) {
        let order = order.filter(|order| order.bytes > 0);
        let to = order.map(|order| order.to);
        let known = self.giving.moving.as_ref().map(|moving| moving.order.to);
        if known != to {
            self.giving.forget(|reason| matches!(reason, PlaceReason::Move(_)));
            self.giving.moving = None;
        }
        let (pass_bytes, step_at) = (self.passed_bytes(0), self.now);
        let begin = |order| Moving { order, moved: 0, tenant: 0, after: None, pass_bytes, step_at };
        match (order, &mut self.giving.moving) {
            (Some(order), Some(moving)) => (moving.order, moving.moved) = (order, 0),
            (Some(order), none) => *none = Some(begin(order)),
            (None, _) => {}
        }
    }

    /// Finds blocks to move, as many as are wanted.
    pub(super) fn collect_moves(&mut self) {
        let wanted = self.wanted_of_move();
        let Some(moving) = &self.giving.moving else { return };
        if wanted == 0 || moving.step_at > self.now {
            return;
        }
        let to = moving.order.to;
        let mut room = self.room_for_moves();
        for (shape, keys) in self.look_for_cold(wanted) {
            for keys in keys.chunks(PLACE_KEYS_MAX) {
                if room > 0 {
                    self.giving.begin(PlaceReason::Move(to), shape, keys.to_vec(), self.now);
                    room -= 1;
                }
            }
        }
    }

    /// Bytes that are still to be found; 0 while there are as many batches as there may be.
    fn wanted_of_move(&self) -> u64 {
        let Some(moving) = &self.giving.moving else { return 0 };
        if self.room_for_moves() == 0 {
            return 0;
        }
        let of_move = self.giving.batches.iter().map(|(_, batch)| batch);
        let pending: u64 = of_move
            .filter(|batch| matches!(batch.reason, PlaceReason::Move(_)))
            .map(|batch| batch.blocks.len() as u64 * nvme_bytes(self.shapes.get(batch.shape).slot_bytes))
            .sum();
        moving.order.bytes.saturating_sub(moving.moved + pending)
    }

    fn room_for_moves(&self) -> usize {
        self.giving.room_for(|reason| matches!(reason, PlaceReason::Move(_)))
    }

    /// Looks at the next blocks in the order of eviction; blocks of so many bytes at the most, or one.
    fn look_for_cold(&mut self, wanted: u64) -> BTreeMap<ShapeId, Vec<BlockKey>> {
        let mut found: BTreeMap<ShapeId, Vec<BlockKey>> = BTreeMap::new();
        let Some(Moving { tenant, after, .. }) = self.giving.moving else { return found };
        let pending = self.keys_being_moved();
        let entries = self.devices.next_victims(Group(tenant), after, GIVING_STEP_ENTRIES);
        let mut bytes_found = 0;
        for entry in &entries {
            if bytes_found >= wanted {
                break;
            }
            let state = self.index.entry(*entry);
            let bytes = nvme_bytes(self.shapes.get(state.shape()).slot_bytes);
            let moving = self.giving.moving.as_mut().expect("just seen");
            moving.after = Some(*entry);
            if moving.pass_bytes >= bytes {
                moving.pass_bytes -= bytes;
            } else if !pending.contains(&state.key()) {
                bytes_found += bytes;
                found.entry(state.shape()).or_default().push(state.key());
            }
        }
        if entries.is_empty() {
            self.enter_next_tenant(tenant);
        } else if let Some(moving) = &mut self.giving.moving {
            moving.step_at = self.now.after(GIVING_STEP_EVERY);
        }
        found
    }

    fn keys_being_moved(&self) -> BTreeSet<BlockKey> {
        let of_move = |reason| matches!(reason, PlaceReason::Move(_));
        let batches = self.giving.batches.iter().filter(|(_, batch)| of_move(batch.reason));
        batches.flat_map(|(_, batch)| batch.blocks.iter().map(|block| block.key)).collect()
    }

    /// Goes on with the next tenant's blocks; behind the last tenant with the first one's, after a while.
    fn enter_next_tenant(&mut self, tenant: u16) {
        let next = self.tenants.ids().map(|known| known.0).find(|known| *known > tenant);
        let rest = if next.is_some() { GIVING_STEP_EVERY } else { WALK_AGAIN };
        let next = next.unwrap_or(0);
        let (pass_bytes, step_at) = (self.passed_bytes(next), self.now.after(rest));
        if let Some(moving) = &mut self.giving.moving {
            (moving.tenant, moving.after, moving.pass_bytes) = (next, None, pass_bytes);
            moving.step_at = step_at;
        }
    }

    /// Bytes of a tenant's blocks that would be evicted soon.
    fn passed_bytes(&self, tenant: u16) -> u64 {
        let known = self.tenants.ids().find(|known| known.0 == tenant);
        known.map_or(0, |known| self.tenants.nvme(known).used / 1000 * MOVE_PASSES_PERMILLE)
    }

    /// Drops the own copy on a device of a block that is durable elsewhere. A copy in DRAM stays until its room is needed.
    pub(super) fn drop_moved(&mut self, key: &BlockKey, shape: ShapeId, to: NodeId) -> Dropped {
        if !self.is_givable(key, shape) {
            return Dropped::Done;
        }
        let Some(entry) = self.index.find(key) else { return Dropped::Done };
        let is_read = match self.index.entry(entry).dram() {
            Dram::Filling(_) => true,
            Dram::Resident(frame) => self.frames.get(frame).leases > 0,
            Dram::Absent => false,
        };
        if is_read {
            return Dropped::NotNow;
        }
        let bytes = nvme_bytes(self.shapes.get(shape).slot_bytes);
        self.counters.moved_blocks += 1;
        self.counters.moved_bytes += bytes;
        self.end_stored(entry);
        if let Some(moving) = self.giving.moving.as_mut().filter(|moving| moving.order.to == to) {
            moving.moved += bytes;
        }
        Dropped::Done
    }

    /// When blocks are looked for though nothing happens.
    pub(super) fn next_move(&self) -> Option<Tick> {
        let moving = self.giving.moving.as_ref()?;
        (self.wanted_of_move() > 0).then_some(moving.step_at)
    }
}
