//! Arrivals, admission, and transfers of blocks.
//!
//! A request is admitted once the memory of the accelerators has room for its prompt. Then the leading run of its blocks
//! is found, first in that memory, and the production policy chooses how many blocks behind it are loaded. The parts of a
//! load run at the same time, because blocks are forwarded while they arrive: the slowest channel decides.
//!
//! | blocks from | channels of the node | channels of the peer |
//! |---|---|---|
//! | own DRAM | DRAM, link | |
//! | own NVMe | NVMe read, DRAM twice, link | |
//! | DRAM of a peer | network, DRAM twice, link | DRAM |
//! | NVMe of a peer | network, DRAM twice, link | NVMe read, DRAM |
//!
//! The network of the peer is not occupied: links are full duplex, and this direction has its own bandwidth.

use reprise_policy::recompute::{Chain, EndedLoad, SourceCounts};
use reprise_policy::session::Source as LoadSource;
use reprise_policy::{NodeId, Tick};

use super::server::{Active, Load, Place, Purpose, Waiting};
use super::{Common, Fleet};
use crate::replay::{InUse, Matched, Request, Source};
use crate::serving::events::{Nanos, seconds};
use crate::serving::fabric::ChannelKind;

/// Bytes that a load takes from one peer.
#[derive(Clone, Copy, Debug)]
struct FromPeer {
    node: NodeId,
    bytes: u64,
    nvme_bytes: u64,
}

impl Common<'_> {
    /// Time of a request's arrival.
    pub(super) fn arrival(&self, request: &Request) -> Nanos {
        let begin_ms = self.trace.requests().first().map_or(0, |first| first.at_ms);
        Nanos(((request.at_ms - begin_ms) as f64 * self.setup.time_scale * 1e6).round() as u64)
    }

    /// Tokens that a request generates; at least 1.
    pub(super) fn output(&self, request: &Request) -> u32 {
        u32::try_from(request.output_tokens).unwrap_or(u32::MAX).max(1)
    }
}

impl Fleet<'_> {
    /// Puts a request into the queue of its node.
    pub(super) fn arrive(&mut self, number: u32, at: Nanos) {
        self.now = at;
        let request = &self.common.trace.requests()[number as usize];
        let node = self.cluster.node_of(request);
        let tokens = request.input_tokens.saturating_add(request.output_tokens);
        let server = &mut self.servers[node];
        if !server.hbm.can_hold(self.common.trace.len_of(request), tokens) {
            self.results.refused += 1;
            return;
        }
        server.waiting.push_back(Waiting { request: number, produced: 0, first_token: Nanos(0) });
        self.admit(node);
        self.step_or_join(node);
        self.note(node);
    }

    /// Admits waiting requests in their order, as long as they have room.
    pub(super) fn admit(&mut self, node: usize) {
        loop {
            let server = &mut self.servers[node];
            let is_full = server.active_count() >= self.common.setup.batch_max;
            let Some(waiting) = server.waiting.front().copied().filter(|_| server.may_admit && !is_full)
            else {
                return;
            };
            if !self.admit_first(node, waiting) {
                self.servers[node].may_admit = false;
                return;
            }
            self.servers[node].waiting.pop_front();
        }
    }

    fn admit_first(&mut self, node: usize, waiting: Waiting) -> bool {
        let request = self.common.trace.requests()[waiting.request as usize];
        let mut scratch = std::mem::take(&mut self.scratch);
        self.common.trace.chain(&request, &mut scratch.chain);
        let chain = &scratch.chain;
        // Prompts of requests that fit have 32 bits.
        let prompt = (request.input_tokens as u32).max(1) + waiting.produced;
        let server = &mut self.servers[node];
        let in_hbm = server.hbm.leading(chain);
        let is_alone = server.active_count() == 0;
        let Some(hbm) = server.hbm.admit(chain, u64::from(prompt), is_alone) else {
            self.scratch = scratch;
            return false;
        };
        self.cluster.find_run(node, chain, &mut scratch.run);
        let run = scratch.run.len();
        let behind = in_hbm.min(run);
        let blocks = self.blocks_to_load(node, &scratch.run[behind..], in_hbm, &mut scratch.sources);
        let matched = Matched { run: &scratch.run, in_hbm, loaded: behind..behind + blocks };
        let arrived = self.cluster.arrived(&request, chain);
        if waiting.produced == 0 {
            self.cluster.count(node, arrived, &matched);
            self.results.computed_hits += (run - behind - blocks) as u64;
        }
        let mut in_use = InUse::default();
        self.cluster.begin(node, arrived, &matched, &mut in_use);
        let present = (in_hbm + blocks) as u64 * self.common.block_tokens;
        let server = &mut self.servers[node];
        server.admitted += 1;
        let place = server.insert(Active {
            request: waiting.request,
            number: server.admitted,
            prompt,
            // The last token is always computed: it gives the next one.
            computed: present.min(u64::from(prompt) - 1) as u32,
            produced: waiting.produced,
            first_token: waiting.first_token,
            joined: 0,
            run,
            in_use,
            hbm,
            load: Load::default(),
        });
        self.write_nvme(node);
        match blocks {
            0 => self.servers[node].prefilling.push_back(place),
            _ => self.load(node, place, &scratch.run[behind..behind + blocks]),
        }
        self.scratch = scratch;
        true
    }

    /// Number of blocks that the production policy loads rather than computes.
    fn blocks_to_load(
        &self,
        node: usize,
        run: &[Source],
        before: usize,
        sources: &mut Vec<LoadSource>,
    ) -> usize {
        let server = &self.servers[node];
        let Some(policy) = server.policy.as_ref().filter(|_| !run.is_empty()) else { return run.len() };
        sources.clear();
        sources.extend(run.iter().map(load_source));
        let prefix_tokens = before as u64 * self.common.block_tokens;
        let chain = Chain { sources, prefix_tokens, is_computing: server.run.is_some() };
        policy.decide(&chain, self.tick()).blocks as usize
    }

    /// Begins the load of blocks.
    fn load(&mut self, node: usize, place: Place, blocks: &[Source]) {
        let block_bytes = self.common.block_bytes;
        let (mut counts, mut peers) = (SourceCounts::default(), Vec::<FromPeer>::new());
        for source in blocks {
            counts[load_source(source) as usize - 1] += 1;
            let (peer, nvme_bytes) = match source {
                Source::PeerDram(peer) => (*peer, 0),
                Source::PeerNvme(peer) => (*peer, block_bytes),
                Source::Dram(_) | Source::Nvme(_) => continue,
            };
            match peers.iter_mut().find(|known| known.node == peer) {
                Some(known) => {
                    known.bytes += block_bytes;
                    known.nvme_bytes += nvme_bytes;
                }
                None => peers.push(FromPeer { node: peer, bytes: block_bytes, nvme_bytes }),
            }
        }
        let bytes_of = |sources: &[LoadSource]| {
            sources.iter().map(|source| u64::from(counts[*source as usize - 1])).sum::<u64>() * block_bytes
        };
        let all = blocks.len() as u64 * block_bytes;
        let (nvme, network) =
            (bytes_of(&[LoadSource::OwnNvme]), bytes_of(&[LoadSource::PeerDram, LoadSource::PeerNvme]));
        let now = self.now;
        let tick = self.tick();
        let server = &mut self.servers[node];
        server.at(place).load = Load { began: now, blocks: counts, parts: 1 + peers.len() as u32 };
        server.unpaid_bytes += all;
        if let Some(policy) = &mut server.policy {
            policy.load_started(&counts, tick);
        }
        let legs = [
            (ChannelKind::LinkIn, all),
            (ChannelKind::Dram, all + nvme + network),
            (ChannelKind::NvmeRead, nvme),
            (ChannelKind::Network, network),
        ];
        self.transfer(node, &legs, Purpose::Load(place));
        for peer in peers {
            let legs = [(ChannelKind::Dram, peer.bytes), (ChannelKind::NvmeRead, peer.nvme_bytes)];
            self.transfer(usize::from(peer.node.0), &legs, Purpose::LoadOf { node: node as u16, place });
            self.note(usize::from(peer.node.0));
        }
    }

    /// Starts a transfer at a node, without the channels that it does not use.
    fn transfer(&mut self, node: usize, legs: &[(ChannelKind, u64)], purpose: Purpose) {
        let mut used = [(ChannelKind::Dram, 0); 4];
        let mut count = 0;
        for leg in legs.iter().filter(|(_, bytes)| *bytes > 0) {
            (used[count], count) = (*leg, count + 1);
        }
        self.servers[node].transfer(self.now, &used[..count], purpose);
    }

    /// Handles the end of a transfer.
    pub(super) fn transfer_ended(&mut self, node: usize, purpose: Purpose) {
        match purpose {
            Purpose::Load(place) => self.load_part_ended(node, place),
            Purpose::LoadOf { node: other, place } => {
                self.load_part_ended(usize::from(other), place);
                self.note(usize::from(other));
            }
            Purpose::Save => {}
        }
    }

    fn load_part_ended(&mut self, node: usize, place: Place) {
        let (now, tick) = (self.now, self.tick());
        let server = &mut self.servers[node];
        let load = &mut server.at(place).load;
        load.parts -= 1;
        if load.parts > 0 {
            return;
        }
        let Load { began, blocks, .. } = *load;
        if let Some(policy) = &mut server.policy {
            let seconds = seconds(now.since(began));
            policy.observe_load(&EndedLoad { requested: blocks, loaded: blocks, seconds }, tick);
            policy.load_ended(&blocks);
        }
        server.prefilling.push_back(place);
        self.step_or_join(node);
    }

    /// Saves the blocks of a request whose prompt is computed.
    pub(super) fn save(&mut self, node: usize, place: Place) {
        let mut scratch = std::mem::take(&mut self.scratch);
        let active = self.servers[node].at(place);
        let (run, mut in_use) = (active.run, std::mem::take(&mut active.in_use));
        let request = &self.common.trace.requests()[active.request as usize];
        self.common.trace.chain(request, &mut scratch.chain);
        let arrived = self.cluster.arrived(request, &scratch.chain);
        let saved = self.cluster.complete(node, arrived, run, &mut in_use);
        self.scratch = scratch;
        let bytes = saved * self.common.block_bytes;
        if bytes > 0 {
            self.servers[node].unpaid_bytes += bytes;
            self.transfer(node, &[(ChannelKind::LinkOut, bytes), (ChannelKind::Dram, bytes)], Purpose::Save);
        }
        self.write_nvme(node);
    }

    /// Begins the writes of blocks that admission has accepted since the last call.
    fn write_nvme(&mut self, node: usize) {
        let (written, server) = (self.cluster.nvme_written(node), &mut self.servers[node]);
        let bytes = (written - server.nvme_written) * self.common.block_bytes;
        server.nvme_written = written;
        if bytes > 0 {
            self.transfer(
                node,
                &[(ChannelKind::NvmeWrite, bytes), (ChannelKind::Dram, bytes)],
                Purpose::Save,
            );
        }
    }

    /// Time as the policies count it.
    fn tick(&self) -> Tick {
        Tick(self.now.0 / 1_000)
    }
}

fn load_source(source: &Source) -> LoadSource {
    match source {
        Source::Dram(_) => LoadSource::OwnDram,
        Source::Nvme(_) => LoadSource::OwnNvme,
        Source::PeerDram(_) => LoadSource::PeerDram,
        Source::PeerNvme(_) => LoadSource::PeerNvme,
    }
}
