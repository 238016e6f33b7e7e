//! Loads of found blocks.
//!
//! The parts of a load run at the same time, because blocks are forwarded while they arrive: the slowest channel decides.
//!
//! | blocks from | channels of the node | channels of the peer |
//! |---|---|---|
//! | own DRAM | DRAM, link | |
//! | own NVMe | NVMe read, DRAM twice, link | |
//! | DRAM of a peer | network, DRAM twice, link | DRAM |
//! | NVMe of a peer | network, DRAM twice, link | NVMe read, DRAM |
//! | cold store | cold, network, DRAM twice, link | |
//!
//! The policy counts blocks of the cold store as a peer's NVMe, because agents have no such source yet.
//!
//! The network of the peer is not occupied: links are full duplex, and this direction has its own bandwidth.
//!
//! A load ends at the limit that the production policy sets. The blocks that have arrived by then are the same part of
//! all blocks as the bytes of the slowest transfer; the others are computed, and their transfers end.

use reprise_policy::recompute::{EndedLoad, SourceCounts};
use reprise_policy::session::Source as LoadSource;
use reprise_policy::{NodeId, Tick};

use super::Fleet;
use super::server::{Event, Legs, Part, Place, Purpose};
use crate::replay::Source;
use crate::serving::events::seconds;
use crate::serving::fabric::ChannelKind;

/// Bytes that a load takes from one peer.
#[derive(Clone, Copy, Debug)]
struct FromPeer {
    node: NodeId,
    bytes: u64,
    nvme_bytes: u64,
}

impl Fleet<'_> {
    /// Begins the load of blocks.
    pub(super) fn load(&mut self, node: usize, place: Place, blocks: &[Source]) {
        let block_bytes = self.common.block_bytes;
        let sources: Vec<LoadSource> = blocks.iter().map(load_source).collect();
        let (counts, peers) = (counts(&sources), from_peers(blocks, block_bytes));
        let bytes_of = |source: LoadSource| u64::from(counts[source as usize - 1]) * block_bytes;
        let all = blocks.len() as u64 * block_bytes;
        let nvme = bytes_of(LoadSource::OwnNvme);
        let network = bytes_of(LoadSource::PeerDram) + bytes_of(LoadSource::PeerNvme);
        let cold = blocks.iter().filter(|source| matches!(source, Source::Cold)).count() as u64 * block_bytes;
        let legs = Legs::new(&[
            (ChannelKind::LinkIn, all),
            (ChannelKind::Dram, all + nvme + network),
            (ChannelKind::NvmeRead, nvme),
            (ChannelKind::Network, network),
            (ChannelKind::Cold, cold),
        ]);
        let (now, tick) = (self.now, self.tick());
        let server = &mut self.servers[node];
        let mut parts = vec![Part { node, job: server.transfer(now, &legs, Purpose::Load(place)), legs }];
        for peer in peers {
            let legs =
                Legs::new(&[(ChannelKind::Dram, peer.bytes), (ChannelKind::NvmeRead, peer.nvme_bytes)]);
            let (purpose, peer) = (Purpose::LoadOf { node: node as u16, place }, usize::from(peer.node.0));
            parts.push(Part { node: peer, job: self.servers[peer].transfer(now, &legs, purpose), legs });
            self.note(peer);
        }
        let server = &mut self.servers[node];
        server.unpaid_bytes += all;
        if let Some(policy) = &mut server.policy {
            policy.load_started(&counts, tick);
        }
        let active = server.at(place);
        let (number, load) = (active.number, &mut active.load);
        (load.began, load.sources, load.parts) = (now, sources, parts);
        if let Some(limit) = load.limit {
            let after = u64::try_from(limit.after(0).as_nanos()).unwrap_or(u64::MAX);
            server.events.push(now.after(after), Event::WaitLimit { place, number });
        }
    }

    /// Starts a transfer for which no request waits.
    pub(super) fn transfer_unattended(&mut self, node: usize, legs: &[(ChannelKind, u64)]) {
        self.servers[node].transfer(self.now, &Legs::new(legs), Purpose::Unattended);
    }

    /// Handles the end of a transfer at a node.
    pub(super) fn transfer_ended(&mut self, node: usize, purpose: Purpose) {
        match purpose {
            Purpose::Load(place) => self.load_part_ended(node, place, node),
            Purpose::LoadOf { node: own, place } => {
                self.load_part_ended(usize::from(own), place, node);
                self.note(usize::from(own));
            }
            Purpose::ReadAhead(number) => self.read_ahead_ended(node, number),
            Purpose::Unattended => {}
        }
    }

    fn load_part_ended(&mut self, node: usize, place: Place, at: usize) {
        let load = &mut self.servers[node].at(place).load;
        // A load has at most one part at each node.
        load.parts.retain(|part| part.node != at);
        if load.parts.is_empty() {
            let blocks = load.sources.len();
            self.load_ended(node, place, blocks);
        }
    }

    /// Passes the result of a load to the policy. The blocks behind those that were loaded are computed.
    fn load_ended(&mut self, node: usize, place: Place, loaded: usize) {
        let (now, tick) = (self.now, self.tick());
        let server = &mut self.servers[node];
        let active = server.active[place.0 as usize].as_mut().expect("the request is admitted");
        let load = std::mem::take(&mut active.load);
        if let Some(policy) = &mut server.policy {
            let (requested, loaded) = (counts(&load.sources), counts(&load.sources[..loaded]));
            let seconds = seconds(now.since(load.began));
            policy.observe_load(&EndedLoad { requested, loaded, seconds }, tick);
            policy.load_ended(&requested);
        }
        let present = (load.before + loaded) as u64 * self.common.block_tokens;
        active.computed = present.min(u64::from(active.prompt) - 1) as u32;
        server.prefilling.push_back(place);
        self.step_or_join(node);
    }

    /// Ends a load that has taken longer than its limit for the blocks that have arrived.
    pub(super) fn reach_wait_limit(&mut self, node: usize, place: Place, number: u64) {
        let now = self.now;
        let active = self.servers[node].active[place.0 as usize].as_ref();
        let Some(active) = active.filter(|active| active.number == number) else { return };
        let (began, blocks, parts) =
            (active.load.began, active.load.sources.len(), active.load.parts.clone());
        let Some(limit) = active.load.limit.filter(|_| !parts.is_empty()) else { return };
        let mut permille = 1000;
        for Part { node, job, legs } in &parts {
            let server = &mut self.servers[*node];
            let job = (*job, legs.as_slice());
            permille = permille.min(server.fabric.served_permille(&mut server.events, now, job));
        }
        let leading = blocks * permille as usize / 1000;
        let after = u64::try_from(limit.after(leading).as_nanos()).unwrap_or(u64::MAX);
        let is_over = now >= began.after(after);
        for Part { node, job, legs } in &parts {
            let server = &mut self.servers[*node];
            if is_over {
                let job = (*job, legs.as_slice());
                server.fabric.cancel(&mut server.events, now, job, Purpose::Unattended);
            }
            self.note(*node);
        }
        if is_over {
            self.results.stopped_loads += 1;
            self.load_ended(node, place, leading);
        } else {
            self.servers[node].events.push(began.after(after), Event::WaitLimit { place, number });
        }
    }

    /// Time as the policies count it.
    pub(super) fn tick(&self) -> Tick {
        Tick(self.now.0 / 1_000)
    }
}

fn counts(sources: &[LoadSource]) -> SourceCounts {
    let mut counts = SourceCounts::default();
    sources.iter().for_each(|source| counts[*source as usize - 1] += 1);
    counts
}

/// Divides the blocks that peers have among the peers.
fn from_peers(blocks: &[Source], block_bytes: u64) -> Vec<FromPeer> {
    let mut peers = Vec::<FromPeer>::new();
    for source in blocks {
        let (node, nvme_bytes) = match source {
            Source::PeerDram(peer) => (*peer, 0),
            Source::PeerNvme(peer) => (*peer, block_bytes),
            Source::Dram(_) | Source::Nvme(_) | Source::Cold => continue,
        };
        match peers.iter_mut().find(|known| known.node == node) {
            Some(known) => {
                known.bytes += block_bytes;
                known.nvme_bytes += nvme_bytes;
            }
            None => peers.push(FromPeer { node, bytes: block_bytes, nvme_bytes }),
        }
    }
    peers
}

/// Source as the production policy counts it.
pub(super) fn load_source(source: &Source) -> LoadSource {
    match source {
        Source::Dram(_) => LoadSource::OwnDram,
        Source::Nvme(_) => LoadSource::OwnNvme,
        Source::PeerDram(_) => LoadSource::PeerDram,
        Source::PeerNvme(_) | Source::Cold => LoadSource::PeerNvme,
    }
}
