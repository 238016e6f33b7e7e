//! Holders of one key's block. They are marked once, so that checking a candidate does not depend on their
//! number.
//!
//! Locations on unknown nodes are ignored: those nodes are dead.

use super::{PlacementNode, ReplicaLocation};
use crate::ids::NodeId;
use crate::routing::Domain;
use crate::tier::Tier;

/// Marker for "no position".
const NONE: u32 = u32::MAX;

/// Marks of all nodes, by position in the list that it was created for.
#[derive(Debug)]
pub(super) struct Holders {
    /// Position of each node, by node number.
    positions: Vec<u32>,
    /// Mark of each position.
    marks: Vec<Mark>,
    /// Number of marked nodes in each failure domain.
    domains: Vec<u32>,
    /// Positions with a mark.
    marked: Vec<usize>,
    /// Marked candidates that hold the block in DRAM only.
    in_dram: Vec<usize>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Mark {
    #[default]
    None,
    /// The node sent the query, and is not known to hold the block.
    Asking,
    /// The node holds the block.
    Holds,
    /// The node holds a durable copy of the block.
    Durable,
}

impl Holders {
    /// Creates the marks for these nodes, which are sorted by number.
    pub(super) fn of(nodes: &[PlacementNode]) -> Holders {
        let numbers = nodes.last().map_or(0, |node| usize::from(node.node.0) + 1);
        let mut positions = vec![NONE; numbers];
        for (at, node) in (0..).zip(nodes) {
            positions[usize::from(node.node.0)] = at;
        }
        let domains = nodes.iter().map(|node| usize::from(node.domain.0) + 1).max().unwrap_or(0);
        let (marks, domains) = (vec![Mark::None; nodes.len()], vec![0; domains]);
        Holders { positions, marks, domains, marked: Vec::new(), in_dram: Vec::new() }
    }

    /// Position of a node.
    pub(super) fn position(&self, node: NodeId) -> Option<usize> {
        let at = self.positions.get(usize::from(node.0)).filter(|at| **at != NONE)?;
        Some(*at as usize)
    }

    /// Replaces the marks with those for the next block; `asking` counts as a holder for its failure domain.
    /// `open` contains the positions of candidates.
    pub(super) fn mark(
        &mut self,
        nodes: &[PlacementNode],
        asking: NodeId,
        holdings: &[ReplicaLocation],
        open: &[usize],
    ) {
        for at in self.marked.drain(..) {
            self.marks[at] = Mark::None;
            self.domains[usize::from(nodes[at].domain.0)] = 0;
        }
        self.in_dram.clear();
        self.add(nodes, asking, Mark::Asking);
        for holding in holdings {
            let mark = match holding.tier {
                Tier::Dram => Mark::Holds,
                Tier::Nvme => Mark::Durable,
            };
            self.add(nodes, holding.node, mark);
        }
        let candidates = self.marked.iter().copied().filter(|at| self.marks[*at] == Mark::Holds);
        self.in_dram.extend(candidates.filter(|at| open.binary_search(at).is_ok()));
    }

    /// Candidates that hold the block in DRAM only.
    pub(super) fn in_dram(&self) -> &[usize] {
        &self.in_dram
    }

    pub(super) fn has(&self, at: usize) -> bool {
        matches!(self.marks[at], Mark::Holds | Mark::Durable)
    }

    pub(super) fn is_durable(&self, at: usize) -> bool {
        self.marks[at] == Mark::Durable
    }

    /// Whether another marked node shares this node's failure domain.
    pub(super) fn shares_domain(&self, at: usize, domain: Domain) -> bool {
        let itself = u32::from(self.marks[at] != Mark::None);
        domain.is_shared_with(domain) && self.domains[usize::from(domain.0)] > itself
    }

    fn add(&mut self, nodes: &[PlacementNode], node: NodeId, mark: Mark) {
        let Some(at) = self.position(node) else { return };
        match self.marks[at] {
            Mark::None => {
                self.marked.push(at);
                self.domains[usize::from(nodes[at].domain.0)] += 1;
                self.marks[at] = mark;
            }
            Mark::Asking => self.marks[at] = mark,
            Mark::Holds if mark == Mark::Durable => self.marks[at] = mark,
            Mark::Holds | Mark::Durable => {}
        }
    }
}
