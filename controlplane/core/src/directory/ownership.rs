//! Owned slots, and the inventories that nodes must announce in them.

use reprise_policy::{Epoch, NodeId, SlotSet};

use super::Directory;
use super::inventory_progress::InventoryProgress;

/// Owned slots, and those for which a node must announce its inventory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotStatus {
    /// Version of the owned slots; increases with every change.
    pub version: u64,
    /// Owned slots, in which changes are accepted.
    pub owned: SlotSet,
    /// Owned slots for which the node has not begun its inventory.
    pub wanted: SlotSet,
}

impl Directory {
    /// Sets the owned slots. Contents of slots that are no longer owned become invisible; new slots start
    /// empty. O(slots × nodes) bits, plus the entries of slots that are regained before they are swept.
    pub fn set_owned_slots(&mut self, owned: &SlotSet) {
        if self.owned == *owned {
            return;
        }
        self.version += 1;
        let (gone, gained) = (self.owned.without(owned), owned.without(&self.owned));
        for slot in self.lost.and(&gained).iter() {
            self.clear(slot);
        }
        self.lost = self.lost.or(&gone).without(&gained);
        for progress in self.nodes.iter_mut().filter_map(|node| node.progress.as_mut()) {
            progress.discard(&gone, &mut self.incomplete);
        }
        self.owned = owned.clone();
    }

    /// Slots that are owned.
    pub fn owned(&self) -> &SlotSet {
        &self.owned
    }

    /// Version of the owned slots; increases with every change.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Owned slots, and those that a registered node must announce; `None` if it is fenced.
    pub fn slot_status(&self, node: NodeId, epoch: Epoch) -> Option<SlotStatus> {
        let progress = self.registered(node, epoch)?.progress.as_ref()?;
        let wanted = self.owned.without(progress.begun());
        Some(SlotStatus { version: self.version, owned: self.owned.clone(), wanted })
    }

    /// Expects a known node to register: slots are partial until it announces its inventory, is forgotten, or
    /// is no longer expected.
    pub fn expect_node(&mut self, node: NodeId) {
        let index = self.node_index(node);
        self.nodes[index]
            .progress
            .get_or_insert_with(|| InventoryProgress::none_announced(&mut self.incomplete));
    }

    /// Stops expecting a node that has not registered.
    pub fn stop_expecting(&mut self, node: NodeId) {
        let absent = self.nodes.get_mut(usize::from(node.0)).filter(|node| !node.registered);
        if let Some(progress) = absent.and_then(|node| node.progress.take()) {
            progress.remove(&mut self.incomplete);
        }
    }
}
