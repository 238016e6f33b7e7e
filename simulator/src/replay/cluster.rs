//! Nodes that share a directory.
//!
//! All requests of a session are served by one node, which the session's number selects; a request without a session
//! is its own. A block that the node lacks is read from the peer from which it is expected first
//! ([`reprise_policy::routing::soonest`]), and then is in the node's DRAM too. Every node knows all replicas.
//!
//! A cold store behind all nodes keeps each block that leaves the last node that had it, once and for the whole trace. A
//! block that no node has is read from it into the DRAM of the node. Agents have no cold store yet: this is the rule of the
//! design, without production code.

use reprise_policy::routing::{Candidate, LoadHint, soonest};
use reprise_policy::{NodeId, Tier};

use super::node::{Arrived, Counts, InUse, Matched, Node, NodeSettings, Source};
use super::tier::BlockMap;
use super::trace::{Request, Trace};
use crate::rng::mix;

/// Blocks that a node reads from other nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// All that it lacks and a peer has.
    Peers,
    /// None: nodes are isolated.
    None,
}

/// Nodes of a replay.
#[derive(Debug)]
pub struct Cluster {
    nodes: Vec<Node>,
    sharing: Sharing,
    tenants: u16,
    /// Replicas of each block, in the order of nodes; unused with one node.
    directory: BlockMap<Vec<Candidate>>,
    /// Blocks of the cold store, if there is one.
    cold: Option<BlockMap<()>>,
}

/// Result of a replay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replay {
    /// Sums over all nodes.
    pub counts: Counts,
    /// Blocks that were written to NVMe by the node that wrote most.
    pub nvme_written_max: u64,
}

impl Cluster {
    /// Creates empty nodes that read from each other; at least 1.
    pub fn new(nodes: u16, settings: NodeSettings) -> Cluster {
        Cluster::with_sharing(nodes, settings, Sharing::Peers)
    }

    /// Creates empty nodes; at least 1.
    pub fn with_sharing(nodes: u16, settings: NodeSettings, sharing: Sharing) -> Cluster {
        let count = nodes.max(1);
        let is_tracked = count > 1 && sharing == Sharing::Peers;
        let nodes = (0..count).map(|_| Node::new(settings, is_tracked)).collect();
        Cluster {
            nodes,
            sharing,
            tenants: settings.tenants.max(1),
            directory: BlockMap::default(),
            cold: None,
        }
    }

    /// Adds an empty cold store to a cluster that has served nothing.
    #[must_use]
    pub fn with_cold_store(mut self) -> Cluster {
        self.nodes.iter_mut().for_each(Node::track);
        self.cold = Some(BlockMap::default());
        self
    }

    /// Serves all requests of a trace.
    pub fn replay(mut self, trace: &Trace) -> Replay {
        let (mut chain, mut run) = (Vec::new(), Vec::new());
        for request in trace.requests() {
            trace.chain(request, &mut chain);
            self.serve(request, &chain, &mut run);
        }
        self.results()
    }

    /// Serves all requests of a trace, and passes on the number of each request's blocks that were present.
    pub fn replay_each(mut self, trace: &Trace, mut each: impl FnMut(usize)) {
        let (mut chain, mut run) = (Vec::new(), Vec::new());
        for request in trace.requests() {
            trace.chain(request, &mut chain);
            self.serve(request, &chain, &mut run);
            each(run.len());
        }
    }

    fn serve(&mut self, request: &Request, chain: &[u32], run: &mut Vec<Source>) {
        let own = self.node_of(request);
        self.find_run(own, chain, run);
        let arrived = self.arrived(request, chain);
        self.nodes[own].serve(arrived, run);
        self.update_directory(own);
    }

    /// Node that serves a request.
    pub(crate) fn node_of(&self, request: &Request) -> usize {
        (mix(u64::from(request.session) + 1) % self.nodes.len() as u64) as usize
    }

    /// Request with its blocks and its tenant.
    pub(crate) fn arrived<'a>(&self, request: &Request, chain: &'a [u32]) -> Arrived<'a> {
        Arrived { chain, tenant: (request.session % u32::from(self.tenants)) as u16 }
    }

    /// Finds the leading run of blocks that the node or a peer has.
    pub(crate) fn find_run(&mut self, own: usize, chain: &[u32], run: &mut Vec<Source>) {
        run.clear();
        for block in chain {
            let source = self.nodes[own].find(*block);
            let source = source.or_else(|| self.read_from_peer(own, *block));
            let source = source.or_else(|| self.find_in_cold_store(*block));
            let Some(source) = source else { break };
            run.push(source);
        }
    }

    /// Counts a request and its hits.
    pub(crate) fn count(&mut self, own: usize, request: Arrived<'_>, matched: &Matched<'_>) {
        self.nodes[own].count(request, matched);
    }

    /// Takes the blocks that a request hits into use.
    pub(crate) fn begin(
        &mut self,
        own: usize,
        request: Arrived<'_>,
        matched: &Matched<'_>,
        in_use: &mut InUse,
    ) {
        self.nodes[own].begin(request, matched, in_use);
        self.update_directory(own);
    }

    /// Keeps the blocks of a request behind its run, and ends the use of all. Returns the number of saved blocks.
    pub(crate) fn complete(
        &mut self,
        own: usize,
        request: Arrived<'_>,
        run: usize,
        in_use: &mut InUse,
    ) -> u64 {
        let saved = self.nodes[own].complete(request, run, in_use);
        self.update_directory(own);
        saved
    }

    /// Ends the use of a request's blocks.
    pub(crate) fn abandon(&mut self, own: usize, in_use: &mut InUse) {
        self.nodes[own].abandon(in_use);
        self.update_directory(own);
    }

    /// Positions of a leading run's blocks that a node has on NVMe only.
    pub(crate) fn on_nvme_only(&self, own: usize, chain: &[u32]) -> Vec<u32> {
        self.nodes[own].on_nvme_only(chain)
    }

    /// Number of blocks that DRAM of a node can take.
    pub(crate) fn evictable_dram(&self, own: usize) -> u64 {
        self.nodes[own].evictable_dram()
    }

    /// Copies blocks of a request from NVMe of a node into its DRAM; returns their number.
    pub(crate) fn stage(&mut self, own: usize, request: Arrived<'_>, positions: &[u32]) -> u64 {
        let staged = self.nodes[own].stage(request, positions);
        self.update_directory(own);
        staged
    }

    /// Blocks that a node has written to NVMe so far.
    pub(crate) fn nvme_written(&self, own: usize) -> u64 {
        self.nodes[own].counts.nvme_written
    }

    /// Blocks that the cold store got from a node so far.
    pub(crate) fn cold_written(&self, own: usize) -> u64 {
        self.nodes[own].counts.cold_written
    }

    /// Sums over all nodes.
    pub(crate) fn results(&self) -> Replay {
        let mut counts = Counts::default();
        self.nodes.iter().for_each(|node| counts.merge(&node.counts));
        let written = self.nodes.iter().map(|node| node.counts.nvme_written).max();
        Replay { counts, nvme_written_max: written.unwrap_or(0) }
    }

    fn read_from_peer(&mut self, own: usize, block: u32) -> Option<Source> {
        if self.sharing == Sharing::None {
            return None;
        }
        let replicas = self.directory.get(&block)?;
        let peer = soonest(replicas, |node| usize::from(node.0) == own)?;
        let (node, tier) = (peer.node, peer.tier);
        self.nodes[usize::from(node.0)].read_by_peer(block);
        if tier == Tier::Nvme {
            self.update_directory(usize::from(node.0));
        }
        Some(match tier {
            Tier::Dram => Source::PeerDram(node),
            Tier::Nvme => Source::PeerNvme(node),
        })
    }

    fn find_in_cold_store(&self, block: u32) -> Option<Source> {
        self.cold.as_ref()?.contains_key(&block).then_some(Source::Cold)
    }

    /// Reports the changed blocks of a node to the directory.
    fn update_directory(&mut self, own: usize) {
        let mut changed = std::mem::take(&mut self.nodes[own].changed);
        let id = NodeId(own as u16);
        for block in changed.drain(..) {
            let tier = match self.nodes[own].find(block) {
                Some(Source::Dram(_)) => Some(Tier::Dram),
                Some(_) => Some(Tier::Nvme),
                None => None,
            };
            let replicas = self.directory.entry(block).or_default();
            let at = replicas.partition_point(|replica| replica.node < id);
            let is_known = replicas.get(at).is_some_and(|replica| replica.node == id);
            match tier {
                Some(tier) if is_known => replicas[at].tier = tier,
                Some(tier) => replicas.insert(at, Candidate { node: id, tier, load: LoadHint::default() }),
                None if is_known => drop(replicas.remove(at)),
                None => {}
            }
            if replicas.is_empty() {
                self.directory.remove(&block);
                if is_known && let Some(cold) = &mut self.cold {
                    self.nodes[own].counts.cold_written += u64::from(cold.insert(block, ()).is_none());
                }
            }
        }
        self.nodes[own].changed = changed;
    }
}
