//! Runs of steps: composition, time and end.
//!
//! A run is one step with prompts, or several steps that only decode. Step i of a run with n requests and a context of c
//! tokens in sum has the work of n tokens behind c + i·n tokens, so operations and bytes are linear in i, and the
//! time of a step is the larger of two lines. The time of j steps is the sum of at most two arithmetic series, and the
//! time of each boundary depends on the begin of the run and j only. A run that ends early, because a request can
//! join, ends at the first boundary that is not in the past.

use std::time::Duration;

use reprise_policy::recompute::Step;

use super::Fleet;
use super::server::{Active, Event, Place, Waiting};
use crate::serving::costs::{Costs, Work};
use crate::serving::events::{Nanos, nanos, seconds};

/// Steps that are running.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    pub(super) stamp: u32,
    began: Nanos,
    steps: u64,
    /// Number of decoding requests.
    decodes: u64,
    /// Work of the first step besides its prompts and transfers.
    first: Work,
    /// Work of prompts and transfers, in the first step.
    extra: Work,
    /// Addition to the work with each step.
    growth: Work,
}

/// Work of all steps.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Totalled {
    pub(super) flops: f64,
    pub(super) bytes: f64,
}

impl Run {
    /// Seconds of some steps.
    fn seconds(&self, costs: &Costs, steps: u64) -> f64 {
        if steps == 0 {
            return 0.0;
        }
        let first = costs.seconds(self.first + self.extra);
        // Steps from `turn` on are bound by the other resource than those before.
        let (mut low, mut high) = (1, steps);
        if steps > 2 && self.is_bound_by_compute(costs, 1) != self.is_bound_by_compute(costs, steps - 1) {
            while low + 1 < high {
                let middle = low.midpoint(high);
                match self.is_bound_by_compute(costs, middle) == self.is_bound_by_compute(costs, 1) {
                    true => low = middle,
                    false => high = middle,
                }
            }
        }
        let turn = high;
        first + self.series(costs, 1, turn) + self.series(costs, turn, steps)
    }

    /// Seconds of the steps in a range in which one resource is the bound.
    fn series(&self, costs: &Costs, from: u64, to: u64) -> f64 {
        if to <= from {
            return 0.0;
        }
        let ends = costs.seconds(self.work(from)) + costs.seconds(self.work(to - 1));
        (to - from) as f64 * ends / 2.0
    }

    fn is_bound_by_compute(&self, costs: &Costs, step: u64) -> bool {
        let Work { flops, bytes, .. } = self.work(step);
        flops / costs.flops_per_second > bytes / costs.bytes_per_second
    }

    /// Work of a step behind the first one.
    fn work(&self, step: u64) -> Work {
        let step = step as f64;
        let grown = Work { flops: step * self.growth.flops, bytes: step * self.growth.bytes, sequences: 0.0 };
        self.first + grown
    }

    fn end(&self, costs: &Costs, steps: u64) -> Nanos {
        self.began.after(nanos(self.seconds(costs, steps)).max(1))
    }

    /// Number of steps until the first boundary at or after a time; at most all.
    fn steps_until(&self, costs: &Costs, now: Nanos) -> u64 {
        let (mut low, mut high) = (0, self.steps);
        while low + 1 < high {
            let middle = low.midpoint(high);
            match self.end(costs, middle) >= now {
                true => high = middle,
                false => low = middle,
            }
        }
        high
    }
}

impl Totalled {
    fn add(&mut self, run: &Run) {
        let steps = run.steps as f64;
        let pairs = steps * (steps - 1.0) / 2.0;
        self.flops += steps * run.first.flops + pairs * run.growth.flops + run.extra.flops;
        self.bytes += steps * run.first.bytes + pairs * run.growth.bytes + run.extra.bytes;
    }
}

impl Fleet<'_> {
    /// Begins steps if none run, or lets a request join soon.
    pub(super) fn step_or_join(&mut self, node: usize) {
        let (costs, server) = (&self.common.costs, &mut self.servers[node]);
        let Some(run) = &mut server.run else { return self.begin_run(node) };
        if server.prefilling.is_empty() || run.steps == 1 {
            return;
        }
        let steps = run.steps_until(costs, self.now);
        if steps < run.steps {
            server.stamp = server.stamp.wrapping_add(1);
            (run.steps, run.stamp) = (steps, server.stamp);
            let end = run.end(costs, steps).max(self.now);
            server.events.push(end, Event::StepEnd(server.stamp));
        }
    }

    fn begin_run(&mut self, node: usize) {
        let (costs, server) = (&self.common.costs, &mut self.servers[node]);
        let decodes = server.decoding.len() as u64;
        let mut budget = u64::from(self.common.setup.step_tokens_max).saturating_sub(decodes) as u32;
        let mut extra = Work { bytes: std::mem::take(&mut server.unpaid_bytes) as f64, ..Work::default() };
        server.scheduled.clear();
        for place in server.prefilling.iter().copied() {
            if budget == 0 {
                break;
            }
            let active = server.active[place.0 as usize].as_ref().expect("the request is admitted");
            let tokens = (active.prompt - active.computed).min(budget);
            budget -= tokens;
            extra = extra + costs.prefill(tokens, active.computed);
            server.scheduled.push((place, tokens));
        }
        if decodes == 0 && server.scheduled.is_empty() {
            server.unpaid_bytes = extra.bytes as u64;
            return;
        }
        let until_end = server.decoding.peek().map_or(1, |end| end.0.0 - server.steps);
        let steps = match server.scheduled.is_empty() {
            true => until_end.min(server.hbm.steps_that_fit(decodes)),
            false => 1,
        };
        server.stamp = server.stamp.wrapping_add(1);
        let run = Run {
            stamp: server.stamp,
            began: self.now,
            steps,
            decodes,
            first: costs.weights() + costs.decodes(decodes, server.context),
            extra,
            growth: costs.decodes(0, decodes),
        };
        server.events.push(run.end(costs, steps), Event::StepEnd(server.stamp));
        server.run = Some(run);
    }

    /// Ends the steps that run, and begins the next ones.
    pub(super) fn end_run(&mut self, node: usize) {
        let server = &mut self.servers[node];
        let run = server.run.take().expect("steps run");
        let tokens = run.decodes * run.steps;
        server.steps += run.steps;
        server.context += tokens;
        server.hbm.grow(tokens);
        self.results.steps += run.steps;
        self.results.tokens_out += tokens;
        self.work.add(&run);
        server.iteration.add(Duration::from_nanos(self.now.since(run.began) / run.steps));
        self.count_prompts(node, &run);
        while let Some(std::cmp::Reverse((end, place))) = self.servers[node].decoding.peek().copied()
            && end <= self.servers[node].steps
        {
            self.servers[node].decoding.pop();
            self.finish_request(node, place);
        }
        while !self.servers[node].hbm.shrink() {
            let youngest = self.servers[node].youngest();
            self.preempt(node, youngest.expect("requests of the batch use the memory"));
        }
        self.admit(node);
        self.step_or_join(node);
        self.look_ahead(node);
    }

    /// Counts the tokens of prompts in a step. Those that are complete have their first token.
    fn count_prompts(&mut self, node: usize, run: &Run) {
        let server = &mut self.servers[node];
        let scheduled = std::mem::take(&mut server.scheduled);
        let (mut tokens, mut context) = (0, 0.0);
        for (place, count) in &scheduled {
            let active = server.at(*place);
            tokens += u64::from(*count);
            context += f64::from(*count) * (f64::from(active.computed) + f64::from(*count) / 2.0);
            active.computed += count;
        }
        if let Some(policy) = server.policy.as_mut().filter(|_| tokens > 0) {
            let context = context / tokens as f64;
            policy.observe_step(&Step { tokens, context, seconds: seconds(self.now.since(run.began)) });
        }
        for (place, _) in &scheduled {
            let active = self.servers[node].at(*place);
            if active.computed == active.prompt {
                // Prompts are computed in the order of the queue.
                self.servers[node].prefilling.pop_front();
                self.prompt_ended(node, *place);
            }
        }
        self.servers[node].scheduled = scheduled;
    }

    fn prompt_ended(&mut self, node: usize, place: Place) {
        self.save(node, place);
        let (server, now) = (&mut self.servers[node], self.now);
        let active = server.active[place.0 as usize].as_mut().expect("the request is admitted");
        server.hbm.computed(&active.hbm);
        let request = &self.common.trace.requests()[active.request as usize];
        if active.produced == 0 {
            active.first_token = now;
            let arrival = self.common.arrival(request);
            self.results.ttft_ns.push(now.since(arrival));
        }
        active.produced += 1;
        active.joined = server.steps;
        self.results.tokens_out += 1;
        let left = self.common.output(request).saturating_sub(active.produced);
        server.context += u64::from(active.computed);
        if left == 0 {
            self.finish_request(node, place);
        } else {
            let end = server.steps + u64::from(left);
            server.decoding.push(std::cmp::Reverse((end, place)));
        }
    }

    /// Removes a request that decoded; returns it with the number of tokens of its decoding.
    fn leave(&mut self, node: usize, place: Place) -> (Active, u64) {
        let server = &mut self.servers[node];
        let mut active = server.remove(place);
        let generated = server.steps - active.joined;
        server.context -= u64::from(active.computed) + generated;
        server.hbm.release(std::mem::take(&mut active.hbm), generated);
        server.may_admit = true;
        (active, generated)
    }

    fn finish_request(&mut self, node: usize, place: Place) {
        let (active, _) = self.leave(node, place);
        let request = &self.common.trace.requests()[active.request as usize];
        self.results.tokens_in += request.input_tokens;
        let behind_first = u64::from(self.common.output(request)) - 1;
        if let Some(tpot) = self.now.since(active.first_token).checked_div(behind_first) {
            self.results.tpot_ns.push(tpot);
        }
    }

    /// Takes a request out of the batch. Its blocks may stay in a cache, and it computes the others again.
    fn preempt(&mut self, node: usize, place: Place) {
        self.results.preemptions += 1;
        let server = &mut self.servers[node];
        let (active, generated) = if let Some(at) = server.prefilling.iter().position(|other| *other == place)
        {
            server.prefilling.remove(at);
            let mut active = server.remove(place);
            server.hbm.release(std::mem::take(&mut active.hbm), 0);
            self.cluster.abandon(node, &mut active.in_use);
            (active, 0)
        } else {
            server.decoding.retain(|std::cmp::Reverse((_, other))| *other != place);
            self.leave(node, place)
        };
        let waiting = Waiting {
            request: active.request,
            produced: active.produced + generated as u32,
            first_token: active.first_token,
            is_counted: true,
            is_read_ahead: false,
        };
        let server = &mut self.servers[node];
        (server.may_admit, _) = (true, server.waiting.push_front(waiting));
    }
}

/// Seconds until the end of each step of a run that only decodes.
#[cfg(test)]
pub(super) fn times_for_test(costs: &Costs, (decodes, context): (u64, u64), steps: u64) -> Vec<f64> {
    let run = Run {
        stamp: 0,
        began: Nanos(0),
        steps,
        decodes,
        first: costs.weights() + costs.decodes(decodes, context),
        extra: Work::default(),
        growth: costs.decodes(0, decodes),
    };
    (1..=steps).map(|step| run.seconds(costs, step)).collect()
}
