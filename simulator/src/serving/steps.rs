//! Steps of the engine: composition of the batch, blocks that it needs, computation and its end.

use super::costs::Work;
use super::engine::{Engine, LoadGroup, Outcome, Phase, Preemption, Purpose, Transfers};
use super::events::{Nanos, seconds};
use super::fabric::{ChannelKind, FLOPS_PER_UNIT};
use super::tiers::{BlockId, Place};

use std::time::Duration;

impl Engine {
    /// Begins a step, if none runs and a request can run.
    pub(super) fn try_step(&mut self) {
        if self.step_began.is_some() {
            return;
        }
        self.end_turns();
        self.fill_batch();
        if self.batch.is_empty() {
            return;
        }
        self.step_began = Some(self.now);
        self.load_blocking_prefixes();
        self.compute_when_ready();
    }

    /// Moves requests whose turn has ended to the rotation, if others wait there.
    fn end_turns(&mut self) {
        let Some(turn) = self.setup.turn else { return };
        let batch = std::mem::take(&mut self.batch);
        for number in batch {
            let live = &mut self.requests[number as usize];
            if live.turn_left > 0 {
                self.batch.push(number);
            } else if self.rotation.is_empty() {
                live.turn_left = turn;
                self.batch.push(number);
            } else {
                self.suspend(number);
                self.rotation.push_back(number);
            }
        }
    }

    /// Makes the blocks of a request evictable; it waits from now on.
    fn suspend(&mut self, number: u32) {
        let live = &mut self.requests[number as usize];
        (live.phase, live.is_held) = (Phase::Waiting, false);
        let blocks = std::mem::take(&mut live.blocks);
        blocks.iter().for_each(|block| self.tiers.unpin(*block));
        self.requests[number as usize].blocks = blocks;
    }

    fn fill_batch(&mut self) {
        while self.batch.len() < self.setup.batch_max
            && let Some(number) = self.rotation.front().copied()
        {
            if !self.join(number) {
                return;
            }
            self.rotation.pop_front();
            self.batch.push(number);
        }
    }

    /// Brings a request into the batch: pins its blocks and begins the loads of the absent ones. Returns `false` if
    /// HBM has no room for them.
    fn join(&mut self, number: u32) -> bool {
        self.cut_at_lost_block(number);
        self.hold(number);
        let live = &self.requests[number as usize];
        let absent: Vec<BlockId> =
            live.blocks.iter().copied().filter(|block| self.place(*block) != Place::Hbm).collect();
        // One block more: a step needs room for its token.
        let Some(demoted) = self.tiers.make_room(absent.len() as u64 + 1) else {
            self.release_held(number);
            return self.batch.is_empty()
                && self.tiers.reclaimable() > absent.len() as u64
                && self.join(number);
        };
        self.write_back(demoted);
        let turn = self.setup.turn.unwrap_or(u32::MAX);
        let live = &mut self.requests[number as usize];
        live.phase = Phase::Running;
        live.turn_left = if live.turn_left == 0 { turn } else { live.turn_left };
        live.first_step.get_or_insert(self.now);
        let (arrived, in_flight) = (live.prefetched - live.in_flight, live.in_flight);
        live.prefetched = 0;
        self.pending += in_flight;
        self.results.prefetch_hits += u64::from(arrived);
        self.results.waited_blocks += u64::from(in_flight) + absent.len() as u64;
        for block in self.requests[number as usize].blocks.clone() {
            self.tiers.used_again(block);
        }
        for from in [Place::Dram, Place::Nvme] {
            let group: Vec<BlockId> =
                absent.iter().copied().filter(|block| self.place(*block) == from).collect();
            if !group.is_empty() {
                self.pending += group.len() as u32;
                self.load(number, group, from);
            }
        }
        true
    }

    /// Pins the blocks of a request that are in HBM.
    pub(super) fn hold(&mut self, number: u32) {
        let live = &mut self.requests[number as usize];
        if !std::mem::replace(&mut live.is_held, true) {
            for block in live.blocks.iter().copied() {
                if self.tiers.place(block) == Place::Hbm {
                    self.tiers.pin(block);
                }
            }
        }
    }

    /// Makes the blocks of all waiting requests but one evictable, if no request runs: otherwise none could.
    fn release_held(&mut self, except: u32) {
        if !self.batch.is_empty() {
            return;
        }
        for number in self.rotation.clone() {
            let live = &self.requests[number as usize];
            if number != except && live.is_held && live.in_flight == 0 {
                self.suspend(number);
            }
        }
    }

    /// Forgets the blocks behind the first lost one: they are computed again.
    fn cut_at_lost_block(&mut self, number: u32) {
        let live = &self.requests[number as usize];
        if let Some(at) = live.blocks.iter().position(|block| self.place(*block) == Place::Lost) {
            for block in self.requests[number as usize].blocks.split_off(at) {
                self.tiers.remove(block);
            }
            let live = &mut self.requests[number as usize];
            live.computed = live.computed.min(at as u32 * self.setup.tokens_per_block);
        }
    }

    /// Begins to load blocks of one tier. The caller made room in HBM.
    pub(super) fn load(&mut self, number: u32, blocks: Vec<BlockId>, from: Place) {
        self.requests[number as usize].in_flight += blocks.len() as u32;
        for block in &blocks {
            self.tiers.promote(*block, Place::Hbm);
            self.tiers.pin(*block);
        }
        let bytes = blocks.len() as u64 * self.block_bytes;
        let group = self.add_group(LoadGroup { request: number, blocks });
        if self.setup.transfers == Transfers::Free {
            self.group_arrived(group);
        } else if from == Place::Nvme {
            let legs = [(ChannelKind::NvmeRead, bytes), (ChannelKind::Dram, bytes)];
            self.fabric.start(&mut self.events, self.now, &legs, Purpose::Stage(group));
        } else {
            self.load_into_hbm(group);
        }
    }

    /// Begins the last hop of a group, from DRAM into HBM.
    pub(super) fn load_into_hbm(&mut self, group: u32) {
        let blocks = self.groups[group as usize].as_ref().map_or(0, |group| group.blocks.len());
        let bytes = blocks as u64 * self.block_bytes;
        let legs = [(ChannelKind::LinkIn, bytes), (ChannelKind::Dram, bytes), (ChannelKind::Hbm, bytes)];
        self.fabric.start(&mut self.events, self.now, &legs, Purpose::Load(group));
    }

    pub(super) fn add_group(&mut self, group: LoadGroup) -> u32 {
        // Groups are few: those in flight.
        match self.groups.iter().position(Option::is_none) {
            Some(at) => {
                self.groups[at] = Some(group);
                at as u32
            }
            None => {
                self.groups.push(Some(group));
                self.groups.len() as u32 - 1
            }
        }
    }

    /// Counts the blocks of a group as loaded.
    pub(super) fn group_arrived(&mut self, group: u32) {
        let Some(group) = self.groups[group as usize].take() else { return };
        let live = &mut self.requests[group.request as usize];
        let blocks = group.blocks.len() as u32;
        live.in_flight -= blocks;
        if live.phase == Phase::Running {
            self.pending -= blocks;
            if self.setup.transfers == Transfers::Timed {
                self.compute_when_ready();
            }
        }
    }

    pub(super) fn compute_when_ready(&mut self) {
        if self.pending == 0 && !self.is_computing && self.step_began.is_some() {
            self.compute();
        }
    }

    /// Begins the computation of a step, whose blocks are all in HBM.
    fn compute(&mut self) {
        self.is_computing = true;
        self.scheduled.clear();
        let decoding = |engine: &Engine, number: u32| engine.requests[number as usize].prefill_left() == 0;
        let decodes = self.batch.iter().filter(|number| decoding(self, **number)).count() as u32;
        let mut budget = self.setup.step_tokens_max.saturating_sub(decodes);
        let mut work = self.costs.weights();
        let mut at = 0;
        while at < self.batch.len() {
            let number = self.batch[at];
            let left = self.requests[number as usize].prefill_left();
            let tokens = if left == 0 { 1 } else { left.min(budget) };
            if tokens > 0 && !self.grow(number, tokens) {
                // The request was preempted, and has left the batch.
                continue;
            }
            at += 1;
            if tokens == 0 {
                continue;
            }
            let context = self.requests[number as usize].computed;
            if left == 0 {
                work = work + self.costs.decode(context);
            } else {
                budget -= tokens;
                work = work + self.costs.prefill(tokens, context);
            }
            self.scheduled.push((number, tokens));
        }
        let noise = (1.0 + self.setup.noise * self.random.normal()).max(0.1);
        let Work { flops, bytes, .. } = work;
        let delay = (self.costs.serial_nanos(work) as f64 * noise) as u64;
        let mut legs = vec![
            (ChannelKind::Compute, (flops * noise / FLOPS_PER_UNIT) as u64),
            (ChannelKind::Hbm, (bytes * noise) as u64),
        ];
        self.add_layer_wise_prefixes(&mut legs);
        self.fabric.start_after(&mut self.events, (self.now, delay), &legs, Purpose::Step);
        self.look_ahead();
    }

    /// Adds the blocks for some tokens of a request. Without room, preempts the youngest request of the batch, which
    /// may be this one; then returns `false`.
    fn grow(&mut self, number: u32, tokens: u32) -> bool {
        let live = &self.requests[number as usize];
        let needed = (live.computed + tokens).div_ceil(self.setup.tokens_per_block);
        let more = u64::from(needed.saturating_sub(live.blocks.len() as u32));
        loop {
            if let Some(demoted) = self.tiers.make_room(more) {
                self.write_back(demoted);
                for _ in 0..more {
                    let block = self.tiers.create();
                    self.requests[number as usize].blocks.push(block);
                }
                return true;
            }
            let youngest = *self.batch.last().expect("the batch has the growing request");
            self.preempt(youngest);
            if youngest == number {
                return false;
            }
        }
    }

    /// Removes a request from the batch for lack of HBM; it waits at the head of the rotation.
    fn preempt(&mut self, number: u32) {
        self.batch.retain(|other| *other != number);
        self.scheduled.retain(|(other, _)| *other != number);
        self.results.preemptions += 1;
        match self.setup.preemption {
            Preemption::Swap => self.suspend(number),
            Preemption::Recompute => {
                let live = &mut self.requests[number as usize];
                (live.phase, live.is_held, live.computed) = (Phase::Waiting, false, 0);
                for block in std::mem::take(&mut live.blocks) {
                    self.tiers.remove(block);
                }
            }
        }
        self.rotation.push_front(number);
    }

    /// Ends a step: counts its tokens and removes the requests that are complete.
    pub(super) fn end_step(&mut self) {
        let began = self.step_began.take().expect("a step runs");
        self.is_computing = false;
        let duration = self.now.since(began);
        self.iteration.add(Duration::from_nanos(duration));
        self.results.steps.push(duration);
        self.observe_computation(duration);
        let scheduled = std::mem::take(&mut self.scheduled);
        for (number, tokens) in &scheduled {
            self.count_tokens(*number, *tokens, duration);
        }
        self.scheduled = scheduled;
        let ended = |engine: &Engine, number: u32| {
            let live = &engine.requests[number as usize];
            live.produced >= live.spec.output
        };
        let batch = std::mem::take(&mut self.batch);
        for number in batch {
            if ended(self, number) {
                self.finish(number);
            } else {
                self.batch.push(number);
            }
        }
    }

    fn count_tokens(&mut self, number: u32, tokens: u32, duration: u64) {
        let now = self.now;
        let live = &mut self.requests[number as usize];
        let was_decode = live.prefill_left() == 0;
        live.computed += tokens;
        live.turn_left = live.turn_left.saturating_sub(1);
        if was_decode {
            live.decode += duration;
            live.decoded += 1;
            live.produced += 1;
            self.results.tokens += 1;
        } else if live.prefill_left() == 0 && live.produced == 0 {
            live.first_token = Some(now);
            live.produced = 1;
            self.results.tokens += 1;
            self.results.service_ttfts.push(now.since(live.first_step.unwrap_or(now)));
        }
    }

    fn finish(&mut self, number: u32) {
        let live = &mut self.requests[number as usize];
        live.phase = Phase::Done;
        let first_token = live.first_token.unwrap_or(self.now);
        let outcome = Outcome {
            number,
            service_ttft: first_token.since(live.first_step.unwrap_or(first_token)),
            ttft: first_token.since(live.spec.arrival),
            decode: live.decode,
            decoded: live.decoded,
            end: self.now,
        };
        for block in std::mem::take(&mut live.blocks) {
            self.tiers.remove(block);
        }
        let live = &self.requests[number as usize];
        self.admitted_blocks -= self.blocks_at_most(live);
        self.results.outcomes.push(outcome);
    }

    /// Passes the time of a step with prompts to the policy that chooses between load and computation.
    fn observe_computation(&mut self, duration: u64) {
        let Some(policy) = self.setup.load_policy.as_mut() else { return };
        let (mut tokens, mut context) = (0, 0.0);
        for (number, count) in self.scheduled.iter().filter(|(_, count)| *count > 1) {
            let prefix = f64::from(self.requests[*number as usize].computed);
            tokens += u64::from(*count);
            context += f64::from(*count) * (prefix + f64::from(*count) / 2.0);
        }
        let context = if tokens == 0 { 0.0 } else { context / tokens as f64 };
        policy.observe_step(&reprise_policy::recompute::Step { tokens, context, seconds: seconds(duration) });
    }

    /// Time of the simulated world as the policies count it.
    pub(super) fn tick(&self) -> reprise_policy::Tick {
        let Nanos(now) = self.now;
        reprise_policy::Tick(now / 1_000)
    }
}
