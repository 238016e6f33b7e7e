//! The set of live nodes, for lookups in the directory: one bit per node.

use reprise_policy::NodeId;

/// A set of node numbers. 1,000 nodes take 128 bytes, all 65,536 take 8 KiB.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LiveNodes {
    words: Vec<u64>,
}

impl LiveNodes {
    /// Whether the node is in the set.
    pub fn contains(&self, node: NodeId) -> bool {
        let (word, bit) = position(node);
        self.words.get(word).is_some_and(|bits| bits & bit != 0)
    }

    /// Adds a node to the set.
    pub fn insert(&mut self, node: NodeId) {
        let (word, bit) = position(node);
        if self.words.len() <= word {
            self.words.resize(word + 1, 0);
        }
        self.words[word] |= bit;
    }

    /// Removes a node from the set.
    pub fn remove(&mut self, node: NodeId) {
        let (word, bit) = position(node);
        if let Some(bits) = self.words.get_mut(word) {
            *bits &= !bit;
        }
    }

    /// Number of nodes in the set.
    pub fn count(&self) -> usize {
        self.words.iter().map(|bits| bits.count_ones() as usize).sum()
    }
}

impl FromIterator<NodeId> for LiveNodes {
    fn from_iter<I: IntoIterator<Item = NodeId>>(nodes: I) -> LiveNodes {
        let mut live = LiveNodes::default();
        nodes.into_iter().for_each(|node| live.insert(node));
        live
    }
}

fn position(node: NodeId) -> (usize, u64) {
    (usize::from(node.0 / 64), 1 << (node.0 % 64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_in_the_set_from_insertion_to_removal() {
        let mut live = LiveNodes::default();
        for node in [0, 63, 64, u16::MAX] {
            assert!(!live.contains(NodeId(node)));
            live.insert(NodeId(node));
            assert!(live.contains(NodeId(node)));
        }
        assert_eq!(live.count(), 4);
        live.remove(NodeId(64));
        live.remove(NodeId(65));
        assert!(!live.contains(NodeId(64)));
        assert_eq!(live.count(), 3);
    }
}
