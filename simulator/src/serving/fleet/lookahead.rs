//! Reads ahead: blocks on NVMe of requests that wait are read into DRAM, as the production prefetch policy plans.
//!
//! A waiting request is expected to be admitted when the next of the decoding requests ends, the one behind it when the
//! second one ends, and so on. The window is that of the policy: it covers the time of the reads. Each request is read
//! ahead once. A load that begins before these blocks have arrived reads
//! its blocks from NVMe itself.

use std::cmp::Reverse;
use std::time::Duration;

use reprise_policy::prefetch::{
    CONFIDENCE_MAX, Candidate, ChannelState, HIGH_WATER_PERMILLE, Pass, Path, WINDOW_MAX,
};

use super::Fleet;
use super::server::{Legs, Purpose, Staging};
use crate::serving::fabric::ChannelKind;

impl Fleet<'_> {
    /// Plans and begins reads for the requests that are admitted within the window.
    pub(super) fn look_ahead(&mut self, node: usize) {
        if !self.common.setup.reads_ahead || self.common.setup.tiers.nvme_blocks == 0 {
            return;
        }
        let server = &self.servers[node];
        let Some(iteration) = server.iteration.expected().filter(|_| !server.waiting.is_empty()) else {
            return;
        };
        let mut ends: Vec<u64> = server.decoding.iter().map(|Reverse((end, _))| end - server.steps).collect();
        ends.retain(|steps| *steps <= u64::from(WINDOW_MAX));
        ends.sort_unstable();
        let mut scratch = std::mem::take(&mut self.scratch);
        let (mut candidates, mut staged) = (Vec::new(), Vec::new());
        for (at, steps) in (0..self.servers[node].waiting.len()).zip(ends) {
            let waiting = self.servers[node].waiting[at];
            if waiting.is_read_ahead {
                continue;
            }
            let request = &self.common.trace.requests()[waiting.request as usize];
            self.common.trace.chain(request, &mut scratch.chain);
            let positions = self.cluster.on_nvme_only(node, &scratch.chain);
            if positions.is_empty() {
                self.servers[node].waiting[at].is_read_ahead = true;
                continue;
            }
            candidates.push(Candidate {
                iterations: (steps as u32).max(1),
                confidence: CONFIDENCE_MAX,
                channel: 0,
                blocks: positions.len() as u32,
                block_bytes: self.common.block_bytes,
            });
            staged.push((at, Staging { request: waiting.request, positions }));
        }
        self.scratch = scratch;
        if !candidates.is_empty() {
            self.read_ahead(node, iteration, &candidates, staged);
        }
    }

    fn read_ahead(
        &mut self,
        node: usize,
        iteration: Duration,
        candidates: &[Candidate],
        mut staged: Vec<(usize, Staging)>,
    ) {
        let channel = self.servers[node].fabric.channel(ChannelKind::NvmeRead);
        let path = Path {
            latency: Duration::from_nanos(channel.latency()),
            bytes_per_second: channel.bytes_per_second(),
        };
        let queued_bytes = channel.queued_bytes();
        let blocks: u64 = candidates.iter().map(|candidate| u64::from(candidate.blocks)).sum();
        let bytes = blocks * self.common.block_bytes + queued_bytes;
        let window = &mut self.servers[node].window;
        window.cover(
            path.latency + Duration::from_secs_f64(bytes as f64 / path.bytes_per_second as f64),
            iteration,
        );
        let pass = Pass {
            iteration,
            window: window.iterations(),
            channels: &[ChannelState { path, queued_bytes }],
            reserve_bytes: self.cluster.evictable_dram(node) * self.common.block_bytes,
            high_water_permille: HIGH_WATER_PERMILLE,
        };
        let mut plan = std::mem::take(&mut self.plan);
        plan.make(&pass, candidates);
        for read in &plan.reads {
            let (at, staging) = &mut staged[read.candidate];
            let mut staging = std::mem::take(staging);
            staging.positions.truncate(read.blocks as usize);
            let bytes = staging.positions.len() as u64 * self.common.block_bytes;
            let server = &mut self.servers[node];
            server.waiting[*at].is_read_ahead = true;
            let number = server.add_staging(staging);
            let legs = Legs::new(&[(ChannelKind::NvmeRead, bytes), (ChannelKind::Dram, bytes)]);
            server.transfer(self.now, &legs, Purpose::ReadAhead(number));
        }
        self.plan = plan;
    }

    /// Puts blocks that were read ahead into DRAM.
    pub(super) fn read_ahead_ended(&mut self, node: usize, number: u32) {
        let Staging { request, positions } = self.servers[node].take_staging(number);
        let mut scratch = std::mem::take(&mut self.scratch);
        let request = &self.common.trace.requests()[request as usize];
        self.common.trace.chain(request, &mut scratch.chain);
        let arrived = self.cluster.arrived(request, &scratch.chain);
        self.results.read_ahead += self.cluster.stage(node, arrived, &positions);
        self.scratch = scratch;
        self.write(node);
    }
}
