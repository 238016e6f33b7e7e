//! The world of faults without faults and with the times of hardware: production cores serve a trace.
//!
//! ```text
//!  trace ─▶ engine of a node: match, load, prefill, decode, save     link, DRAM, SSD, network of each node:
//!             │ requests                                             channels with the rates of a profile
//!             ▼                                                         ▲
//!           AgentCore ── reads, writes, copies, fetches ────────────────┘
//!             │ announcements, lookups
//!             ▼
//!           members of the control plane ── store
//! ```
//!
//! Agents, members and store are those of the simulation with faults, with the same checks. Three things differ:
//!
//! * Operations of devices and bytes between agents take their time from [`channels`], instead of a random one.
//! * Engines serve the requests of a trace ([`serving`]), with the cost model of the timed world for their steps.
//! * Blocks have the layout of a model. Checks whose cost grows with the state run at intervals.
//!
//! Calls between agents and members keep the random delays of 40 to 600 µs of a network without faults, and a request
//! reaches the agent within 100 µs.

mod channels;
mod replay;
mod serving;
mod steps;

use std::time::Duration;

use reprise_agent_core::effect::{ProgressEntry, ProgressUpdate, Reply};
use reprise_agent_core::event::RequestId;
use reprise_agent_core::pool::DeviceOpKind;
use reprise_policy::SessionId;

use crate::engines::Engines;
use crate::environment::Environment;
use crate::jobs::Job;
use crate::network::{Host, LineId};
use crate::observation::Observation;
use crate::simulation::{Action, AgentStep, Simulation};
use channels::{Channels, Leg};
use serving::Answer;

pub use channels::Path;
pub use replay::{Checks, CoreReplay, CoreSettings, CoresError, replay_cores};
pub(crate) use serving::{ServeStep, Serving};

/// Number of events of cores from one audit of a core to the next.
const AUDIT_EVERY: u64 = 16_384;
/// Bytes of the header page of a block on a device.
const HEADER_BYTES: u64 = 4096;

/// The hardware of a simulation, and what its checks have seen.
#[derive(Debug)]
pub(crate) struct Timed {
    channels: Channels,
    /// Latency of messages between agents.
    latency: Duration,
    /// Number of events that cores have got.
    events: u64,
    checks: Checks,
}

impl Environment {
    /// Reports whether the core of a node is audited after this event: always, unless time has the rates of hardware.
    pub(crate) fn is_audit_due(&mut self) -> bool {
        let Some(timed) = &mut self.timed else { return true };
        timed.events += 1;
        let is_due = timed.events.is_multiple_of(AUDIT_EVERY);
        timed.checks.audits += u64::from(is_due);
        is_due
    }

    /// Starts a transfer, whose end is an action. Reports whether the simulation has channels.
    fn transfer(&mut self, legs: &[Leg], then: Action) -> bool {
        let Some(timed) = &mut self.timed else { return false };
        timed.channels.start(&mut self.queue, self.now, legs, then);
        true
    }

    fn agent_step(&self, node: usize, what: AgentStep) -> Action {
        Action::Agent { node, life: self.host(Host::Node(node)).life, what }
    }
}

/// Polls a channel whose transfers may have ended.
pub(crate) fn look(env: &mut Environment, channel: usize) {
    if let Some(timed) = &mut env.timed {
        timed.channels.look(&mut env.queue, env.now, channel);
    }
}

/// Starts an operation on a device or in memory. Reports whether channels decide its end.
pub(crate) fn begin_job(env: &mut Environment, node: usize, number: u64, job: &Job) -> bool {
    let (path, bytes) = match job {
        Job::Device { op, .. } => match &op.kind {
            DeviceOpKind::WritePages { bytes, .. } => (Path::NvmeWrite, bytes.len() as u64),
            DeviceOpKind::WriteBlock { slot, .. } => (Path::NvmeWrite, slot.bytes + HEADER_BYTES),
            DeviceOpKind::WriteHeader { .. } => (Path::NvmeWrite, HEADER_BYTES),
            // Its latency, without bytes.
            DeviceOpKind::Sync => (Path::NvmeWrite, 0),
        },
        Job::Read { read, .. } => (Path::NvmeRead, read.slot.bytes + HEADER_BYTES),
        Job::Check(check) => (Path::Dram, check.slot.bytes),
        Job::Renew(_) => return false,
    };
    let then = env.agent_step(node, AgentStep::Job(number));
    match path {
        Path::Dram => env.transfer(&[(node, path, bytes)], then),
        _ => env.transfer(&[(node, path, bytes), (node, Path::Dram, bytes)], then),
    }
}

/// Starts to send bytes of a block to the other end of a connection. Reports whether channels decide the end.
pub(crate) fn begin_send(
    env: &mut Environment,
    node: usize,
    (line, bytes): (LineId, u64),
    then: AgentStep,
) -> bool {
    let far = env.network.line(line).map(|line| line.ends[0].host);
    let Some(Host::Node(to)) = far.filter(|_| env.timed.is_some()) else { return false };
    let legs = [
        (node, Path::Dram, bytes),
        (node, Path::NetworkOut, bytes),
        (to, Path::NetworkIn, bytes),
        (to, Path::Dram, bytes),
    ];
    let then = env.agent_step(node, then);
    env.transfer(&legs, then)
}

/// Latency of a message between agents, if hardware decides it.
pub(crate) fn latency(env: &Environment, line: LineId) -> Option<Duration> {
    let ends = env.network.line(line)?.ends.map(|end| end.host);
    let is_of_agents = ends.iter().all(|host| matches!(host, Host::Node(_)));
    env.timed.as_ref().filter(|_| is_of_agents).map(|timed| timed.latency)
}

/// Passes an answer of an agent on to its engine that serves a trace.
pub(crate) fn note_reply(env: &mut Environment, node: usize, request: RequestId, reply: &Reply) {
    if env.timed.is_some()
        && let Some(answer) = Answer::of(reply)
    {
        env.queue.push(env.now, Action::Serve { node, what: ServeStep::Answered(request, answer) });
    }
}

/// Notifies the engine that serves a trace that one of its loads has ended.
pub(crate) fn note_progress(
    env: &mut Environment,
    engines: &Engines,
    (session, entry): (SessionId, ProgressEntry),
    update: &ProgressUpdate,
) {
    if env.timed.is_none() || !matches!(update, ProgressUpdate::Done) {
        return;
    }
    if let Some(load) = engines.load_at(session, entry) {
        let node = engines.node();
        env.queue.push(env.now, Action::Serve { node, what: ServeStep::LoadOver(load) });
    }
}

/// Counts an observation that the checks see.
pub(crate) fn count(env: &mut Environment, observation: &Observation) {
    let Some(timed) = &mut env.timed else { return };
    let checks = &mut timed.checks;
    match observation {
        Observation::LookupAnswered { .. } => checks.lookups += 1,
        Observation::BlockRead { .. } => checks.blocks_read += 1,
        Observation::LayersReceived { .. } => checks.pieces_received += 1,
        Observation::PlacementAnswered { .. } => checks.placements += 1,
        _ => {}
    }
}

/// Runs a step of the engine of a node.
pub(crate) fn serve(simulation: &mut Simulation, node: usize, what: ServeStep) {
    let Some(mut serving) = simulation.serving.take() else { return };
    serving.step(&mut simulation.env, &mut simulation.nodes[node], what);
    simulation.serving = Some(serving);
}
