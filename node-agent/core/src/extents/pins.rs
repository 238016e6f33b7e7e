//! Pins: durable blocks that a client reads from the device.

use reprise_policy::{BlockKey, SessionId};

use crate::cache::{Cache, Stored};
use crate::context::{Caller, Context};
use crate::effect::Reply;
use crate::extents::{Extents, PinId, PinRefusal, PinnedBlock};
use crate::limits::{EXTENTS_PER_SESSION_MAX, EXTENTS_PERMILLE, EXTENTS_SESSION_PERMILLE, LOAD_BLOCKS_MAX};
use crate::slab::SlabId;

/// Pin of a session.
#[derive(Debug)]
pub(super) struct HeldPin {
    pub(super) session: SessionId,
    pub(super) stored: Stored,
    /// Bytes of the slot, header page included.
    bytes: u64,
}

impl Extents {
    /// Pins the blocks that are durable on devices that clients may read. Returns the keys of these blocks.
    pub(crate) fn pin(
        &mut self,
        cache: &mut Cache,
        cx: &mut Context,
        from: Caller,
        keys: &[BlockKey],
    ) -> Vec<BlockKey> {
        if keys.len() > LOAD_BLOCKS_MAX {
            let text = format!("{} keys in one pin: send at most {LOAD_BLOCKS_MAX}", keys.len());
            cx.reply(from, Reply::BadRequest(text));
            return Vec::new();
        }
        let (bytes, of_session) = cache.extent_share(from.size_class, EXTENTS_SESSION_PERMILLE);
        let (_, of_all) = cache.extent_share(from.size_class, EXTENTS_PERMILLE);
        let held = self.holders.get(&from.session).map_or(0, |holder| holder.pins.len());
        let in_share = self.bytes_left(from.session, of_session, of_all) / bytes;
        let mut left = in_share.min(EXTENTS_PER_SESSION_MAX.saturating_sub(held) as u64);
        let mut pin = |key| {
            if left == 0 {
                return PinnedBlock::Refused(PinRefusal::Limit);
            }
            let pinned = self.pin_one(cache, (from, bytes), key);
            left -= u64::from(matches!(pinned, PinnedBlock::Pinned { .. }));
            pinned
        };
        let blocks: Vec<PinnedBlock> = keys.iter().map(&mut pin).collect();
        let is_pinned = |block: &PinnedBlock| matches!(block, PinnedBlock::Pinned { .. });
        let pinned = keys.iter().zip(&blocks).filter(|(_, block)| is_pinned(block)).map(|(key, _)| *key);
        let pinned = pinned.collect();
        cx.reply(from, Reply::Pinned { blocks });
        pinned
    }

    fn pin_one(&mut self, cache: &mut Cache, (from, bytes): (Caller, u64), key: &BlockKey) -> PinnedBlock {
        let (stored, place) = match cache.pin(key, from.size_class) {
            Ok(pinned) => pinned,
            Err(refusal) => return PinnedBlock::Refused(refusal),
        };
        let id = self.pins.insert(HeldPin { session: from.session, stored, bytes });
        self.change_holder(from.session, |holder| {
            holder.pins.insert(id);
            holder.bytes += bytes;
        });
        self.held_bytes += bytes;
        self.counters.extent_pins += 1;
        PinnedBlock::Pinned { pin: PinId(id.0), place }
    }

    /// Ends a pin of a session.
    pub(super) fn end_pin(&mut self, cache: &mut Cache, session: SessionId, id: SlabId) {
        if self.pins.get(id).is_none_or(|pin| pin.session != session) {
            return;
        }
        let HeldPin { stored, bytes, .. } = self.pins.remove(id).expect("just seen");
        self.change_holder(session, |holder| {
            holder.pins.remove(&id);
            holder.bytes -= bytes;
        });
        self.held_bytes -= bytes;
        cache.unpin(stored);
    }
}
