//! Steps of the accelerators: continuous batching with chunks of prompts within a token budget. Limits of steps and
//! batches are those of the timed replay, so that times are comparable.
//!
//! Requests are computed in the order in which their blocks are ready. A request is admitted while the accelerator has
//! room for the KV cache of its prompt and output, so none is preempted. The time of a step is that of the cost model
//! of the timed world, alone on the accelerator: copies over the link do not slow it down.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use reprise_agent_core::effect::LoadId;
use reprise_policy::SessionId;

use super::serving::{ServeStep, Serving, Turn};
use crate::environment::Environment;
use crate::node::Node;
use crate::serving::fleet::{BATCH_MAX, STEP_TOKENS_MAX};
use crate::simulation::Action;

/// The accelerator of a node, and its queue.
#[derive(Debug)]
pub(super) struct Station {
    pub(super) session: SessionId,
    /// Loads that are held until their blocks are copied.
    pub(super) held: BTreeMap<u32, LoadId>,
    /// Requests that can be computed.
    pub(super) waiting: VecDeque<u32>,
    /// Requests whose prompts are computed, in order.
    prefilling: VecDeque<u32>,
    decoding: Vec<u32>,
    /// Tokens for which the KV cache has room for admitted requests.
    admitted: u64,
    /// Requests and prompt tokens of the running step.
    chunks: Vec<(u32, u32)>,
    runs: bool,
}

impl Station {
    pub(super) fn new(session: SessionId) -> Station {
        Station {
            session,
            held: BTreeMap::new(),
            waiting: VecDeque::new(),
            prefilling: VecDeque::new(),
            decoding: Vec::new(),
            admitted: 0,
            chunks: Vec::new(),
            runs: false,
        }
    }
}

impl Turn {
    fn kv_tokens(&self) -> u64 {
        u64::from(self.input) + u64::from(self.output)
    }
}

impl Serving {
    fn admit(&mut self, node: usize) {
        let station = &mut self.stations[node];
        while let Some(turn) = station.waiting.front().copied() {
            let tokens = self.turns[turn as usize].kv_tokens();
            let batch = station.prefilling.len() + station.decoding.len();
            let has_room = station.admitted + tokens <= self.kv_tokens && batch < BATCH_MAX;
            // A request that is too large for the accelerator runs alone.
            if !has_room && batch > 0 {
                break;
            }
            station.waiting.pop_front();
            station.admitted += tokens;
            station.prefilling.push_back(turn);
        }
    }

    /// Begins the next step of an accelerator, if it is idle and has work.
    pub(super) fn begin_step(&mut self, env: &mut Environment, node: usize) {
        if self.stations[node].runs {
            return;
        }
        self.admit(node);
        let station = &mut self.stations[node];
        if station.prefilling.is_empty() && station.decoding.is_empty() {
            return;
        }
        let mut work = self.costs.weights();
        for turn in &station.decoding {
            let turn = &self.turns[*turn as usize];
            work = work + self.costs.decode(turn.input + turn.generated);
        }
        let mut budget = STEP_TOKENS_MAX.saturating_sub(station.decoding.len() as u32);
        for number in &station.prefilling {
            let turn = &self.turns[*number as usize];
            let tokens = budget.min(turn.input - turn.computed);
            if tokens == 0 {
                break;
            }
            work = work + self.costs.prefill(tokens, turn.computed);
            station.chunks.push((*number, tokens));
            budget -= tokens;
        }
        station.runs = true;
        self.outcome.steps += 1;
        let time = Duration::from_secs_f64(self.costs.seconds(work));
        env.after(time, Action::Serve { node, what: ServeStep::StepOver });
    }

    /// Ends the running step of an accelerator: prompts have progressed, and each decoding request has a token.
    pub(super) fn end_step(&mut self, env: &mut Environment, node: &mut Node) {
        let index = node.index;
        self.stations[index].runs = false;
        let decoding = std::mem::take(&mut self.stations[index].decoding);
        for turn in decoding {
            self.turns[turn as usize].generated += 1;
            self.decode_on(env, index, turn);
        }
        for (turn, tokens) in std::mem::take(&mut self.stations[index].chunks) {
            let state = &mut self.turns[turn as usize];
            state.computed += tokens;
            if state.computed < state.input {
                continue;
            }
            (state.first_token, state.generated) = (Some(env.now), 1);
            self.outcome.first_tokens.push(env.now.since(state.arrived).as_micros() as u64);
            // Chunks are in the order of the prompts, and those before this one are complete.
            let first = self.stations[index].prefilling.pop_front();
            assert_eq!(first, Some(turn), "prompts are computed in order");
            self.begin_save(env, node, turn);
            self.decode_on(env, index, turn);
        }
        self.begin_step(env, index);
    }

    /// Continues to decode a request, or ends it.
    fn decode_on(&mut self, env: &Environment, node: usize, turn: u32) {
        let state = &mut self.turns[turn as usize];
        if state.generated < state.output {
            return self.stations[node].decoding.push(turn);
        }
        let first = state.first_token.expect("a token was generated");
        if let Some(others) = state.output.checked_sub(1).filter(|others| *others > 0) {
            let time = env.now.since(first).as_micros() as u64;
            self.outcome.other_tokens.push(time / u64::from(others));
        }
        state.is_decoded = true;
        let tokens = state.kv_tokens();
        self.stations[node].admitted -= tokens;
        self.end(env, turn);
    }
}
