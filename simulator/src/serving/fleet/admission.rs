//! Arrivals, admission and saves.
//!
//! A request is admitted once the memory of the accelerators has room for its prompt. Then the leading run of its blocks
//! is found, first in that memory, and the production policy chooses how many blocks behind it are loaded
//! ([`super::loads`]). The blocks of the request are saved when its prompt is computed.

use reprise_policy::recompute::{Chain, WaitLimit};
use reprise_policy::session::Source as LoadSource;

use super::loads::load_source;
use super::server::{Active, Load, Place, Waiting};
use super::{Common, Fleet};
use crate::replay::{InUse, Matched, Request, Source};
use crate::serving::events::Nanos;
use crate::serving::fabric::ChannelKind;

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
        server.waiting.push_back(Waiting {
            request: number,
            produced: 0,
            first_token: Nanos(0),
            is_counted: false,
            is_read_ahead: false,
        });
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
        let found = &scratch.run[behind..];
        let (blocks, limit) = self.blocks_to_load(node, found, in_hbm, &mut scratch.sources);
        let matched = Matched { run: &scratch.run, in_hbm, loaded: behind..behind + blocks };
        let arrived = self.cluster.arrived(&request, chain);
        if !waiting.is_counted {
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
            load: Load { limit, before: in_hbm, ..Load::default() },
        });
        self.write(node);
        match blocks {
            0 => self.servers[node].prefilling.push_back(place),
            _ => self.load(node, place, &scratch.run[behind..behind + blocks]),
        }
        self.scratch = scratch;
        true
    }

    /// Number of blocks that the production policy loads rather than computes, and the limit of the wait for them.
    fn blocks_to_load(
        &self,
        node: usize,
        run: &[Source],
        before: usize,
        sources: &mut Vec<LoadSource>,
    ) -> (usize, Option<WaitLimit>) {
        let server = &self.servers[node];
        let Some(policy) = server.policy.as_ref().filter(|_| !run.is_empty()) else {
            return (run.len(), None);
        };
        sources.clear();
        sources.extend(run.iter().map(load_source));
        let prefix_tokens = before as u64 * self.common.block_tokens;
        let chain = Chain { sources, prefix_tokens, is_computing: server.run.is_some() };
        let decision = policy.decide(&chain, self.tick());
        (decision.blocks as usize, decision.limit)
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
            self.transfer_unattended(node, &[(ChannelKind::LinkOut, bytes), (ChannelKind::Dram, bytes)]);
        }
        self.write(node);
    }

    /// Begins the writes of blocks that admission has accepted, or the cold store got, since the last call.
    pub(super) fn write(&mut self, node: usize) {
        let (written, server) = (self.cluster.nvme_written(node), &mut self.servers[node]);
        let bytes = (written - server.nvme_written) * self.common.block_bytes;
        server.nvme_written = written;
        if bytes > 0 {
            self.transfer_unattended(node, &[(ChannelKind::NvmeWrite, bytes), (ChannelKind::Dram, bytes)]);
        }
        let (written, server) = (self.cluster.cold_written(node), &mut self.servers[node]);
        let bytes = (written - server.cold_written) * self.common.block_bytes;
        server.cold_written = written;
        if bytes > 0 {
            let legs =
                [(ChannelKind::Cold, bytes), (ChannelKind::Network, bytes), (ChannelKind::Dram, bytes)];
            self.transfer_unattended(node, &legs);
        }
    }
}
