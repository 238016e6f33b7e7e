//! Reads ahead of steps, as the production prefetch policy plans them, and loads of cached prefixes, as the
//! production policy of load or recompute decides them.

use reprise_policy::prefetch::{CONFIDENCE_MAX, Candidate, ChannelState, HIGH_WATER_PERMILLE, Pass, Path};
use reprise_policy::recompute::{Chain, EndedLoad};
use reprise_policy::session::Source;

use std::time::Duration;

use super::engine::{Engine, LoadGroup, Phase, PrefixLoading, Purpose, Transfers};
use super::events::seconds;
use super::fabric::ChannelKind;
use super::tiers::{BlockId, Place};
use super::workload::CacheSource;

/// Channels of a pass: the index of a candidate's channel, and the tier of its blocks.
const CHANNELS: [(ChannelKind, Place); 2] =
    [(ChannelKind::LinkIn, Place::Dram), (ChannelKind::NvmeRead, Place::Nvme)];

impl Engine {
    /// Plans and begins reads for the requests of the next steps. Runs once for each step.
    pub(super) fn look_ahead(&mut self) {
        let Some((window, nvme_window)) = self.setup.lookahead else { return };
        let Some(iteration) = self.iteration.expected() else { return };
        if self.setup.transfers == Transfers::Free {
            return;
        }
        let upcoming = self.upcoming(nvme_window);
        // Blocks of these requests that are in HBM must stay there.
        for (number, iterations) in &upcoming {
            if *iterations <= window {
                self.hold(*number);
            }
        }
        for (index, window) in [(0, window), (1, nvme_window)] {
            let (candidates, blocks) = self.candidates(&upcoming, index, window);
            let channels = CHANNELS.map(|(kind, _)| {
                let channel = self.fabric.channel(kind);
                let path = Path {
                    latency: Duration::from_nanos(channel.latency()),
                    bytes_per_second: channel.bytes_per_second(),
                };
                ChannelState { path, queued_bytes: channel.queued_bytes() }
            });
            let pass = Pass {
                iteration,
                window,
                channels: &channels,
                reserve_bytes: self.tiers.reclaimable().saturating_sub(1) * self.block_bytes,
                high_water_permille: HIGH_WATER_PERMILLE,
            };
            let mut plan = std::mem::take(&mut self.plan);
            plan.make(&pass, &candidates);
            for read in &plan.reads {
                let (number, blocks) = &blocks[read.candidate];
                self.read_ahead(*number, &blocks[..read.blocks as usize], CHANNELS[index].1);
            }
            self.plan = plan;
        }
    }

    /// Requests that run within a number of iterations, with the iterations until then: a place becomes free when the
    /// turn or the output of a running request ends, and the rotation is served in its order.
    fn upcoming(&self, window: u32) -> Vec<(u32, u32)> {
        let mut ends: Vec<u32> = self
            .batch
            .iter()
            .map(|number| {
                let live = &self.requests[*number as usize];
                live.turn_left.min(live.spec.output.saturating_sub(live.produced)).max(1)
            })
            .filter(|iterations| *iterations <= window)
            .collect();
        ends.sort_unstable();
        let free = self.setup.batch_max.saturating_sub(self.batch.len());
        let ends = std::iter::repeat_n(1, free).chain(ends);
        self.rotation.iter().copied().zip(ends).collect()
    }

    fn candidates(
        &self,
        upcoming: &[(u32, u32)],
        channel: usize,
        window: u32,
    ) -> (Vec<Candidate>, Vec<(u32, Vec<BlockId>)>) {
        let from = CHANNELS[channel].1;
        let within = upcoming.iter().filter(|(_, iterations)| *iterations <= window);
        let absent = within.filter_map(|(number, iterations)| {
            let live = &self.requests[*number as usize];
            let blocks: Vec<BlockId> = live
                .blocks
                .iter()
                .copied()
                .filter(|block| self.place(*block) == from && !self.is_staging(*block))
                .collect();
            let candidate = Candidate {
                iterations: *iterations,
                confidence: CONFIDENCE_MAX,
                channel: channel as u8,
                blocks: blocks.len() as u32,
                block_bytes: self.block_bytes,
            };
            (!blocks.is_empty()).then_some((candidate, (*number, blocks)))
        });
        absent.unzip()
    }

    fn is_staging(&self, block: BlockId) -> bool {
        self.is_loading.get(block.0 as usize).copied().unwrap_or(false)
    }

    fn read_ahead(&mut self, number: u32, blocks: &[BlockId], from: Place) {
        if from == Place::Nvme {
            let bytes = blocks.len() as u64 * self.block_bytes;
            for block in blocks {
                self.set_staging(*block, true);
            }
            let group = self.add_group(LoadGroup { request: number, blocks: blocks.to_vec() });
            let legs = [(ChannelKind::NvmeRead, bytes), (ChannelKind::Dram, bytes)];
            self.fabric.start(&mut self.events, self.now, &legs, Purpose::StageAhead(group));
            return;
        }
        let Some(demoted) = self.tiers.make_room(blocks.len() as u64) else { return };
        self.write_back(demoted);
        self.requests[number as usize].prefetched += blocks.len() as u32;
        self.load(number, blocks.to_vec(), from);
    }

    fn set_staging(&mut self, block: BlockId, is_staging: bool) {
        let index = block.0 as usize;
        if self.is_loading.len() <= index {
            self.is_loading.resize(index + 1, false);
        }
        self.is_loading[index] = is_staging;
    }

    /// Moves blocks that arrived from NVMe into DRAM. A block that a step has loaded since stays where it is.
    pub(super) fn staged_ahead(&mut self, group: u32) {
        let Some(group) = self.groups[group as usize].take() else { return };
        for block in group.blocks {
            self.set_staging(block, false);
            if self.place(block) == Place::Nvme && self.tiers.make_room_in_dram() {
                self.tiers.promote(block, Place::Dram);
            }
        }
    }

    /// Begins to load the cached prefix of an arrived request, and adds the request to the rotation once it is in HBM.
    /// Returns `false` if HBM has no room.
    pub(super) fn load_prefix(&mut self, number: u32) -> bool {
        let spec = self.requests[number as usize].spec;
        // At least one token is computed, which gives the first output.
        let whole = spec.cached.min(spec.prompt - 1) / self.setup.tokens_per_block;
        let blocks = self.blocks_to_load(whole, spec.source);
        let Some(demoted) = self.tiers.make_room(u64::from(blocks)) else { return false };
        self.write_back(demoted);
        let created: Vec<BlockId> = (0..blocks).map(|_| self.tiers.create()).collect();
        let live = &mut self.requests[number as usize];
        live.blocks = created;
        live.computed = blocks * self.setup.tokens_per_block;
        (live.phase, live.is_held, live.load_began) = (Phase::Waiting, true, self.now);
        let bytes = u64::from(blocks) * self.block_bytes;
        let into = [(ChannelKind::LinkIn, bytes), (ChannelKind::Hbm, bytes)];
        let is_free = blocks == 0 || self.setup.transfers == Transfers::Free;
        let Some(source) = channel_of(spec.source).filter(|_| !is_free) else {
            self.rotation.push_back(number);
            return true;
        };
        if self.prefix_loading != PrefixLoading::Ahead {
            self.requests[number as usize].prefix_bytes = bytes;
            self.rotation.push_back(number);
            return true;
        }
        if let (Some(policy), Some(from)) = (self.setup.load_policy.as_mut(), policy_source(spec.source)) {
            policy.load_started(&counts(from, blocks), reprise_policy::Tick(self.now.0 / 1_000));
        }
        self.fabric.start(
            &mut self.events,
            self.now,
            &[(source, bytes), into[0], into[1]],
            Purpose::Prefix(number),
        );
        true
    }

    /// Number of leading blocks that the production policy loads rather than computes.
    fn blocks_to_load(&self, blocks: u32, source: CacheSource) -> u32 {
        let (Some(policy), Some(from)) = (&self.setup.load_policy, policy_source(source)) else {
            return blocks;
        };
        let sources = vec![from; blocks as usize];
        let chain = Chain { sources: &sources, prefix_tokens: 0, is_computing: self.step_began.is_some() };
        policy.decide(&chain, self.tick()).blocks
    }

    /// Adds a request whose cached prefix is in HBM to the rotation.
    pub(super) fn prefix_arrived(&mut self, number: u32) {
        let (now, tick) = (self.now, self.tick());
        let live = &self.requests[number as usize];
        let blocks = live.blocks.len() as u32;
        if let (Some(policy), Some(from)) = (self.setup.load_policy.as_mut(), policy_source(live.spec.source))
        {
            let counts = counts(from, blocks);
            let seconds = seconds(now.since(live.load_began));
            policy.observe_load(&EndedLoad { requested: counts, loaded: counts, seconds }, tick);
            policy.load_ended(&counts);
        }
        self.rotation.push_back(number);
        self.try_step();
    }
}

/// Channel of a source's bytes, in addition to the link and HBM; `None` if they are in HBM.
pub(super) fn channel_of(source: CacheSource) -> Option<ChannelKind> {
    match source {
        CacheSource::Hbm => None,
        CacheSource::Dram => Some(ChannelKind::Dram),
        CacheSource::Nvme => Some(ChannelKind::NvmeRead),
        CacheSource::Peer => Some(ChannelKind::Network),
        CacheSource::Cold => Some(ChannelKind::Cold),
    }
}

/// Source of the production policy; a cold store is not one of its sources yet.
fn policy_source(source: CacheSource) -> Option<Source> {
    match source {
        CacheSource::Dram => Some(Source::OwnDram),
        CacheSource::Nvme => Some(Source::OwnNvme),
        CacheSource::Peer => Some(Source::PeerDram),
        CacheSource::Hbm | CacheSource::Cold => None,
    }
}

fn counts(source: Source, blocks: u32) -> [u32; 4] {
    let mut counts = [0; 4];
    counts[source as usize - 1] = blocks;
    counts
}
