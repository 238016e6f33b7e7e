//! Which slots are owned, and what each node has to announce in them.

use reprise_policy::{Epoch, NodeId, SlotSet};

use super::Directory;
use super::announced::Announced;

/// Which slots are owned, and of which a node has to announce its inventory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standing {
    /// Higher whenever other slots are owned.
    pub version: u64,
    /// The slots whose changes are taken.
    pub owned: SlotSet,
    /// Those of them of which the node has begun no inventory.
    pub wanted: SlotSet,
}

impl Directory {
    /// From now on exactly these slots are owned. What was known of the others is gone; of slots that are new nothing
    /// is known. O(slots × nodes) bits, and the entries of slots that come back before they are swept.
    pub fn own(&mut self, owned: &SlotSet) {
        if self.owned == *owned {
            return;
        }
        self.version += 1;
        let (gone, gained) = (self.owned.without(owned), owned.without(&self.owned));
        for slot in self.lost.and(&gained).iter() {
            self.clear(slot);
        }
        self.lost = self.lost.or(&gone).without(&gained);
        for announced in self.nodes.iter_mut().filter_map(|node| node.announced.as_mut()) {
            announced.lose(&gone, &mut self.awaited);
        }
        self.owned = owned.clone();
    }

    /// The slots that are owned.
    pub fn owned(&self) -> &SlotSet {
        &self.owned
    }

    /// Higher whenever other slots are owned.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// What is owned and what a registered node has to announce; `None`: it is fenced.
    pub fn standing(&self, node: NodeId, epoch: Epoch) -> Option<Standing> {
        let announced = self.registered(node, epoch)?.announced.as_ref()?;
        let wanted = self.owned.without(announced.begun());
        Some(Standing { version: self.version, owned: self.owned.clone(), wanted })
    }

    /// A node that others know: slots are partial until it registers and announces its inventory, is given up or
    /// forgotten.
    pub fn expect(&mut self, node: NodeId) {
        let index = self.place(node);
        self.nodes[index].announced.get_or_insert_with(|| Announced::nothing(&mut self.awaited));
    }

    /// An expected node has not come.
    pub fn give_up(&mut self, node: NodeId) {
        let absent = self.nodes.get_mut(usize::from(node.0)).filter(|node| !node.registered);
        if let Some(announced) = absent.and_then(|node| node.announced.take()) {
            announced.leave(&mut self.awaited);
        }
    }
}
