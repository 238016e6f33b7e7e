//! Checks of the cache's invariants, for tests.

use std::collections::BTreeMap;

use crate::cache::Cache;
use crate::cache::frames::{CopyState, FrameState};
use crate::cache::index::Dram;

impl Cache {
    /// Checks the invariants within the cache. Costs time in proportion to its whole state.
    pub(crate) fn audit(&self) -> Result<(), String> {
        self.audit_frames()?;
        self.arena.audit()?;
        self.audit_index()
    }

    fn audit_frames(&self) -> Result<(), String> {
        let (mut slots, mut evictable, mut retired) = (BTreeMap::new(), 0, 0);
        for (index, frame) in self.frames.iter() {
            let slot = self.arena.slot(frame.place);
            ensure!(slots.insert((slot.region, slot.offset), index).is_none(), "{slot:?} is in two frames");
            let entry = frame.entry();
            let findable = entry.is_some_and(|entry| match self.index.entry(entry).dram() {
                Dram::Absent => false,
                Dram::Filling(by) => by == index && matches!(frame.state, FrameState::Filling(_)),
                Dram::Resident(by) => {
                    by == index && matches!(frame.state, FrameState::Clean | FrameState::Unsaved(_))
                }
            });
            match frame.state {
                FrameState::Vacant => {}
                FrameState::Reserved => {
                    ensure!(entry.is_none() && frame.leases == 0, "{slot:?} is reserved and readable");
                }
                FrameState::Filling(_) => {
                    ensure!(entry.is_none() || findable, "{slot:?}: its entry does not refer to it");
                }
                FrameState::Unsaved(_) => ensure!(findable, "{slot:?} is unsaved, but not findable"),
                FrameState::Clean => {
                    evictable += usize::from(frame.leases == 0);
                    ensure!(frame.copy_state != CopyState::Damaged, "{slot:?} is damaged, and clean");
                    ensure!(findable && frame.has_checksums(), "{slot:?} is clean, but not findable");
                }
                FrameState::Retired => {
                    retired += slot.bytes;
                    ensure!(entry.is_none(), "{slot:?} is retired, and findable");
                }
                FrameState::Orphan => {
                    ensure!(entry.is_none() && frame.leases > 0, "{slot:?} is an orphan without a lease");
                }
            }
        }
        let bytes: u64 = self.frames.iter().map(|(_, frame)| self.arena.slot(frame.place).bytes).sum();
        ensure!(
            bytes == self.arena.used_bytes(),
            "{bytes} bytes in frames, {} in use",
            self.arena.used_bytes()
        );
        let known = self.frames.iter().filter(|(_, frame)| frame.has_checksums()).count();
        let rows = self.frames.checksum_rows();
        ensure!(known == rows, "checksums of {known} frames are known, {rows} are kept");
        let lost = self.counters.arena_lost_bytes;
        ensure!(retired == lost, "{retired} bytes retired, {lost} counted");
        let listed = self.arena.evictable();
        ensure!(evictable == listed, "{evictable} evictable frames, {listed} in the policies");
        Ok(())
    }

    fn audit_index(&self) -> Result<(), String> {
        let (mut stored, mut being_read, mut resident) = (0, 0, 0);
        let mut places = BTreeMap::new();
        for (index, entry) in self.index.iter() {
            let key = entry.key();
            ensure!(self.index.find(&key) == Some(index), "{key} cannot be found by its key");
            match entry.dram() {
                Dram::Absent => ensure!(entry.stored().is_some(), "{key} has no copy"),
                Dram::Filling(frame) | Dram::Resident(frame) => {
                    let known = self.frames.get(frame).entry() == Some(index);
                    ensure!(known, "{key}: its frame belongs to another block");
                }
            }
            resident += u64::from(matches!(entry.dram(), Dram::Resident(_)));
            if let Some(at) = entry.stored() {
                stored += 1;
                being_read += usize::from(matches!(entry.dram(), Dram::Filling(_)));
                ensure!(self.devices.is_usable(at.device), "{key} is on a lost device");
                let block = self.devices.stored(at);
                ensure!(
                    block.key == key && block.page == at.page,
                    "{key}: its pool slot holds {}",
                    block.key
                );
                ensure!(places.insert((at.device, at.page), key).is_none(), "{key} shares its pool slot");
            }
        }
        ensure!(stored == self.index.stored_blocks(), "{stored} stored blocks, not as counted");
        ensure!(resident == self.resident_blocks, "{resident} resident blocks, not as counted");
        let evictable = self.devices.evictable();
        ensure!(
            evictable + being_read == stored as usize,
            "{stored} stored blocks, {being_read} being read, {evictable} evictable"
        );
        Ok(())
    }
}
