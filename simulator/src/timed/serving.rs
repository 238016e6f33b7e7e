//! Engines that serve a trace, one on each node.
//!
//! A request asks its agent which leading blocks of its prompt are available anywhere, loads them into DRAM, copies
//! them to the accelerator, computes the rest in steps ([`super::steps`]), and decodes. New blocks are saved as soon as
//! the prompt is computed: reserved, copied to DRAM, committed.
//!
//! A load is complete before its blocks are copied, and both before the first step: layers do not overlap. No block
//! stays in the accelerator after its request, so each hit is one of the agent.

use std::collections::BTreeMap;
use std::time::Duration;

use reprise_agent_core::effect::{LeaseId, LoadId, PlaceKind, Reply};
use reprise_agent_core::event::{
    CommitItem, CommitRequest, LoadRequest, Priority, Ranks, Request, RequestId, Scope,
};
use reprise_policy::session::Source;
use reprise_policy::{BlockKey, Layout, SessionId, Tick};

use super::channels::Path;
use super::steps::Station;
use crate::engine::RequestKind;
use crate::environment::Environment;
use crate::memory::checksums;
use crate::node::Node;
use crate::observation::Observation;
use crate::serving::costs::Costs;
use crate::simulation::Action;

/// Time after the computation of a prompt for which its engine tries to save its blocks.
const SAVE_TIME: Duration = Duration::from_secs(5);

/// A step of an engine.
#[derive(Debug)]
pub(crate) enum ServeStep {
    /// A request of the trace arrives.
    Arrive(u32),
    /// The agent has answered.
    Answered(RequestId, Answer),
    /// All layers of a load are ready or have failed.
    LoadOver(LoadId),
    /// The loaded blocks of a request are in the accelerator.
    CopiedIn(u32),
    /// Blocks of a request are in these reserved slots.
    CopiedOut(u32, Vec<LeaseId>),
    /// The engine tries again to save blocks of a request.
    SaveAgain(u32),
    /// The step of the accelerator has ended.
    StepOver,
}

/// Answer of an agent, as far as engines need it.
#[derive(Debug)]
pub(crate) enum Answer {
    Matched(usize),
    Loaded(LoadId),
    Reserved(Vec<LeaseId>, Duration),
    Busy(Duration),
}

/// What an engine has asked for a request of the trace.
#[derive(Clone, Copy, Debug)]
enum Asked {
    Match,
    Load,
    Reserve,
}

/// A request of the trace.
#[derive(Debug)]
pub(super) struct Turn {
    pub(super) arrived: Tick,
    /// Blocks of the prompt; empty after the end.
    pub(super) keys: Vec<BlockKey>,
    pub(super) input: u32,
    pub(super) output: u32,
    /// Tokens of the prompt whose KV cache is in the accelerator.
    pub(super) computed: u32,
    pub(super) generated: u32,
    pub(super) first_token: Option<Tick>,
    /// Leading blocks that are saved, or were found.
    saved: usize,
    save_until: Tick,
    pub(super) is_decoded: bool,
    is_saved: bool,
}

/// Results of all engines.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outcome {
    pub(super) references: u64,
    /// Blocks that were loaded, in the order of [`Source::ALL`].
    pub(super) hits: [u64; 4],
    /// Blocks that were matched and not loaded.
    pub(super) unloaded: u64,
    /// Blocks that found no slot in time.
    pub(super) unsaved: u64,
    /// Microseconds of each request from its arrival to its first token.
    pub(super) first_tokens: Vec<u64>,
    /// Microseconds for each further token of each request.
    pub(super) other_tokens: Vec<u64>,
    /// Number of steps of accelerators.
    pub(super) steps: u64,
    pub(super) ended: Tick,
}

/// Engines of all nodes; see the module.
#[derive(Debug)]
pub(crate) struct Serving {
    pub(super) costs: Costs,
    pub(super) layout: Layout,
    /// Tokens whose KV cache an accelerator holds.
    pub(super) kv_tokens: u64,
    pub(super) turns: Vec<Turn>,
    pub(super) stations: Vec<Station>,
    asked: BTreeMap<(usize, RequestId), (u32, Asked)>,
    loads: BTreeMap<(usize, LoadId), u32>,
    /// Number of requests that have not ended.
    pub(super) open: usize,
    pub(super) outcome: Outcome,
}

impl Answer {
    pub(super) fn of(reply: &Reply) -> Option<Answer> {
        match reply {
            Reply::Matched { sources } => Some(Answer::Matched(sources.len())),
            Reply::Loaded { load, .. } => Some(Answer::Loaded(*load)),
            Reply::Reserved { leases, retry_after, .. } => {
                let leases = leases.iter().map(|(lease, _)| *lease).collect();
                Some(Answer::Reserved(leases, *retry_after))
            }
            Reply::Busy { retry_after, .. } => Some(Answer::Busy(*retry_after)),
            Reply::BadRequest(remedy) => panic!("an engine's request was refused: {remedy}"),
            _ => None,
        }
    }
}

impl ServeStep {
    /// Returns a number for the digest of the run.
    pub(crate) fn code(&self) -> u64 {
        match self {
            ServeStep::Arrive(turn) => 1 + (u64::from(*turn) << 8),
            ServeStep::Answered(request, _) => 2 + (request.0 << 8),
            ServeStep::LoadOver(load) => 3 + (load.0 << 8),
            ServeStep::CopiedIn(turn) => 4 + (u64::from(*turn) << 8),
            ServeStep::CopiedOut(turn, leases) => 5 + (u64::from(*turn) << 8) + ((leases.len() as u64) << 40),
            ServeStep::SaveAgain(turn) => 6 + (u64::from(*turn) << 8),
            ServeStep::StepOver => 7,
        }
    }
}

impl Turn {
    pub(super) fn new(arrived: Tick, keys: Vec<BlockKey>, input: u64, output: u64) -> Turn {
        let tokens = |count: u64| u32::try_from(count).unwrap_or(u32::MAX / 4).max(1);
        Turn {
            arrived,
            keys,
            input: tokens(input),
            output: tokens(output),
            computed: 0,
            generated: 0,
            first_token: None,
            saved: 0,
            save_until: Tick(0),
            is_decoded: false,
            is_saved: false,
        }
    }
}

impl Serving {
    pub(super) fn new(
        costs: Costs,
        layout: Layout,
        kv_tokens: u64,
        sessions: &[SessionId],
        turns: Vec<Turn>,
    ) -> Serving {
        Serving {
            costs,
            layout,
            kv_tokens,
            open: turns.len(),
            turns,
            stations: sessions.iter().map(|session| Station::new(*session)).collect(),
            asked: BTreeMap::new(),
            loads: BTreeMap::new(),
            outcome: Outcome::default(),
        }
    }

    /// Runs a step of the engine of a node.
    pub(super) fn step(&mut self, env: &mut Environment, node: &mut Node, what: ServeStep) {
        match what {
            ServeStep::Arrive(turn) => self.arrive(env, node, turn),
            ServeStep::Answered(request, answer) => {
                if let Some((turn, asked)) = self.asked.remove(&(node.index, request)) {
                    self.answered(env, node, (turn, asked), answer);
                }
            }
            ServeStep::LoadOver(load) => self.load_over(env, node, load),
            ServeStep::CopiedIn(turn) => self.wait(env, node, turn),
            ServeStep::CopiedOut(turn, leases) => self.commit(env, node, turn, &leases),
            ServeStep::SaveAgain(turn) => self.save(env, node, turn),
            ServeStep::StepOver => self.end_step(env, node),
        }
    }

    fn arrive(&mut self, env: &mut Environment, node: &mut Node, turn: u32) {
        let keys = self.turns[turn as usize].keys.clone();
        self.outcome.references += keys.len() as u64;
        if keys.is_empty() {
            return self.wait(env, node, turn);
        }
        let scope = Scope::Cluster;
        let body =
            Request::Match { keys: keys.clone(), ranks: Ranks::Own, position: Some(0), scope, public: None };
        self.ask(env, node, (turn, Asked::Match), (RequestKind::Match(keys, scope), body));
    }

    fn ask(
        &mut self,
        env: &mut Environment,
        node: &mut Node,
        of: (u32, Asked),
        (kind, body): (RequestKind, Request),
    ) {
        let session = self.stations[node.index].session;
        let request = node.process().engines.request(env, session, kind, body);
        self.asked.insert((node.index, request), of);
    }

    fn answered(
        &mut self,
        env: &mut Environment,
        node: &mut Node,
        (turn, asked): (u32, Asked),
        answer: Answer,
    ) {
        match (asked, answer) {
            (Asked::Match, Answer::Matched(count)) if count > 0 => self.load(env, node, turn, count),
            (Asked::Match | Asked::Load, Answer::Matched(_) | Answer::Busy(_)) => self.wait(env, node, turn),
            (Asked::Load, Answer::Loaded(load)) => {
                self.loads.insert((node.index, load), turn);
                let session = self.stations[node.index].session;
                if node.process().engines.session(session).is_done(load) {
                    self.load_over(env, node, load);
                }
            }
            (Asked::Reserve, Answer::Reserved(leases, retry_after)) => {
                self.reserved(env, node, turn, (leases, retry_after));
            }
            (Asked::Reserve, Answer::Busy(retry_after)) => {
                self.reserved(env, node, turn, (Vec::new(), retry_after));
            }
            (asked, answer) => panic!("node {}: {asked:?} was answered with {answer:?}", node.index),
        }
    }

    // ---- loads --------------------------------------------------------------------------------------------

    fn load(&mut self, env: &mut Environment, node: &mut Node, turn: u32, count: usize) {
        let keys = self.turns[turn as usize].keys[..count].to_vec();
        let load = LoadRequest {
            keys: keys.clone(),
            deadline: Duration::ZERO,
            read_bytes: 0,
            scope: Scope::Cluster,
            public: None,
        };
        self.ask(env, node, (turn, Asked::Load), (RequestKind::Load(keys), Request::Load(load)));
    }

    /// Copies the leading blocks that were loaded to the accelerator.
    fn load_over(&mut self, env: &mut Environment, node: &mut Node, load: LoadId) {
        let Some(turn) = self.loads.remove(&(node.index, load)) else { return };
        node.check_readers(env);
        let index = node.index;
        let engines = &mut node.process().engines;
        let session = self.stations[index].session;
        let sources = engines.session(session).loaded(load);
        let run: Vec<Source> = sources.iter().map_while(|source| *source).collect();
        for source in &run {
            self.outcome.hits[*source as usize - 1] += 1;
        }
        self.outcome.unloaded += (sources.len() - run.len()) as u64;
        let tokens = u32::try_from(run.len() as u64 * self.layout.tokens()).unwrap_or(u32::MAX);
        let state = &mut self.turns[turn as usize];
        state.saved = run.len();
        // At least one token is computed: its output is the first one of the answer.
        state.computed = tokens.min(state.input - 1);
        let bytes = run.len() as u64 * self.layout.block_bytes();
        // The slots stay readable until the copy has ended; the release is in `wait`.
        self.stations[index].held.insert(turn, load);
        let legs = [(index, Path::LinkIn, bytes), (index, Path::Dram, bytes)];
        env.transfer(&legs, Action::Serve { node: index, what: ServeStep::CopiedIn(turn) });
    }

    /// Appends a request to those that wait for computation.
    fn wait(&mut self, env: &mut Environment, node: &mut Node, turn: u32) {
        let index = node.index;
        if let Some(load) = self.stations[index].held.remove(&turn) {
            let session = self.stations[index].session;
            let engines = &mut node.process().engines;
            engines.session(session).loads.remove(&load);
            engines.ask(env, session, RequestKind::Release, Request::Release { load });
        }
        self.stations[index].waiting.push_back(turn);
        self.begin_step(env, index);
    }

    // ---- saves --------------------------------------------------------------------------------------------

    /// Begins to save the new blocks of a computed prompt.
    pub(super) fn begin_save(&mut self, env: &mut Environment, node: &mut Node, turn: u32) {
        self.turns[turn as usize].save_until = env.now.after(SAVE_TIME);
        self.save(env, node, turn);
    }

    fn save(&mut self, env: &mut Environment, node: &mut Node, turn: u32) {
        let state = &mut self.turns[turn as usize];
        let left = state.keys.len() - state.saved;
        if left == 0 || env.now > state.save_until {
            self.outcome.unsaved += left as u64;
            state.is_saved = true;
            return self.end(env, turn);
        }
        let count = left as u32;
        let body = Request::Reserve { count, kind: PlaceKind::Arena };
        self.ask(env, node, (turn, Asked::Reserve), (RequestKind::Reserve(count), body));
    }

    fn reserved(
        &mut self,
        env: &mut Environment,
        node: &mut Node,
        turn: u32,
        (leases, retry_after): (Vec<LeaseId>, Duration),
    ) {
        let index = node.index;
        if leases.is_empty() {
            let what = ServeStep::SaveAgain(turn);
            return env.after(retry_after.max(Duration::from_millis(1)), Action::Serve { node: index, what });
        }
        let bytes = leases.len() as u64 * self.layout.block_bytes();
        let legs = [(index, Path::LinkOut, bytes), (index, Path::Dram, bytes)];
        let what = ServeStep::CopiedOut(turn, leases);
        env.transfer(&legs, Action::Serve { node: index, what });
    }

    /// Commits the next blocks of a request in these slots, and saves the others.
    fn commit(&mut self, env: &mut Environment, node: &mut Node, turn: u32, leases: &[LeaseId]) {
        let (layout, session) = (self.layout, self.stations[node.index].session);
        let state = &mut self.turns[turn as usize];
        let first = state.saved;
        let keys = state.keys[first..first + leases.len()].to_vec();
        state.saved += keys.len();
        let parent = first.checked_sub(1).map(|before| state.keys[before]);
        let process = node.process();
        let mut items = Vec::new();
        for (lease, key) in leases.iter().zip(&keys) {
            let slot = process.engines.session(session).take_reserved(*lease);
            let tag = env.new_content();
            env.observe(Observation::BlockCommitted { key: *key, content: tag });
            let tags = vec![tag; layout.layers() as usize];
            process.memory.write(slot, layout.layers(), 0..layout.layers(), &tags);
            items.push(CommitItem { lease: *lease, key: Some(*key), checksums: checksums(tag, &layout) });
        }
        let position = u32::try_from(first).ok();
        let body = Request::Commit(CommitRequest { items, priority: Priority::Normal, parent, position });
        process.engines.ask(env, session, RequestKind::Commit(keys), body);
        self.save(env, node, turn);
    }

    /// Ends a request that is decoded and saved.
    pub(super) fn end(&mut self, env: &Environment, turn: u32) {
        let state = &mut self.turns[turn as usize];
        if state.is_decoded && state.is_saved {
            state.keys = Vec::new();
            self.open -= 1;
            self.outcome.ended = env.now;
        }
    }
}
