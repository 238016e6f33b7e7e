//! Checks of the cache's invariants, for tests.

use std::collections::BTreeMap;

use crate::cache::Cache;
use crate::cache::index::Dram;

impl Cache {
    /// Checks the invariants within the cache. Costs time in proportion to its whole state.
    pub(crate) fn audit(&self) -> Result<(), String> {
        self.arena.audit()?;
        self.audit_index()
    }

    fn audit_index(&self) -> Result<(), String> {
        let (mut stored, mut in_use, mut resident) = (0, 0, 0);
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
                in_use += usize::from(!self.is_in_nvme_order(index));
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
            evictable + in_use == stored as usize,
            "{stored} stored blocks, {in_use} being read or pinned, {evictable} evictable"
        );
        Ok(())
    }
}
