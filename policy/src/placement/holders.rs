//! Who has the block of one key: marked once, so that a look at a candidate costs the same however many have it.
//!
//! Deliberately absent: nodes that are not named; they are dead, and what they have counts for nothing.

use super::{Holding, PlacementNode};
use crate::ids::NodeId;
use crate::routing::Domain;
use crate::tier::Tier;

/// No position.
const NONE: u32 = u32::MAX;

/// See the module. Positions are those of the nodes that it was made of.
#[derive(Debug)]
pub(super) struct Holders {
    /// Position of each node, by its number.
    positions: Vec<u32>,
    /// By position.
    marks: Vec<Mark>,
    /// Nodes marked, by the number of their failure domain.
    domains: Vec<u32>,
    /// Positions that are marked.
    marked: Vec<usize>,
    /// Of those, candidates that have the block in DRAM only.
    in_dram: Vec<usize>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Mark {
    #[default]
    None,
    /// It asks, and is not known to have the block.
    Asks,
    /// It has the block.
    Has,
    /// It has a durable copy of it.
    Durable,
}

impl Holders {
    /// For these nodes, by number; nobody is marked.
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

    /// Where a node is.
    pub(super) fn position(&self, node: NodeId) -> Option<usize> {
        let at = self.positions.get(usize::from(node.0)).filter(|at| **at != NONE)?;
        Some(*at as usize)
    }

    /// Marks who has a block instead of those of the block before; `asking` counts among them for its failure domain. `open` are
    /// the positions of candidates.
    pub(super) fn mark(
        &mut self,
        nodes: &[PlacementNode],
        asking: NodeId,
        holdings: &[Holding],
        open: &[usize],
    ) {
        for at in self.marked.drain(..) {
            self.marks[at] = Mark::None;
            self.domains[usize::from(nodes[at].domain.0)] = 0;
        }
        self.in_dram.clear();
        self.add(nodes, asking, Mark::Asks);
        for holding in holdings {
            let mark = match holding.tier {
                Tier::Dram => Mark::Has,
                Tier::Nvme => Mark::Durable,
            };
            self.add(nodes, holding.node, mark);
        }
        let candidates = self.marked.iter().copied().filter(|at| self.marks[*at] == Mark::Has);
        self.in_dram.extend(candidates.filter(|at| open.binary_search(at).is_ok()));
    }

    /// Candidates that have the block in DRAM only.
    pub(super) fn in_dram(&self) -> &[usize] {
        &self.in_dram
    }

    pub(super) fn has(&self, at: usize) -> bool {
        matches!(self.marks[at], Mark::Has | Mark::Durable)
    }

    pub(super) fn is_durable(&self, at: usize) -> bool {
        self.marks[at] == Mark::Durable
    }

    /// Whether another node that is marked fails together with this one.
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
            Mark::Asks => self.marks[at] = mark,
            Mark::Has if mark == Mark::Durable => self.marks[at] = mark,
            Mark::Has | Mark::Durable => {}
        }
    }
}
