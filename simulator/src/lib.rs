//! A simulation in which the production cores of agents and control plane run under simulated clock, network,
//! disks and store, with faults. One seed decides everything: sizes, what engines do, every delay and every
//! fault.
//!
//! ```text
//!  engines ─ requests ─▶ AgentCore, Outboxes ─ calls ─▶ network ─▶ Members, Directory ─ calls, watches ─▶ store
//!     ▲                   │      ▲    │                    ▲        several members              leases, revisions
//!     └── shared memory ──┘   disks   └── fetches ─────────┘          time: a queue of actions, in microseconds
//! ```
//!
//! [`run`] plays one seed: some seconds of engine activity under faults, then a phase without faults
//! ("calm"), then the checks of the final state. The invariants:
//!
//! 1. No reader sees other bytes than those committed under the key.
//! 2. Blocks that were reported durable survive `SIGKILL` and power loss.
//! 3. Memory budgets hold, by the cores' own audits after every event.
//! 4. No slot is assigned while a process reads or writes it.
//! 5. Every request and every lookup ends by its deadline.
//! 6. After the faults, every slot has one owner, which has the union of the inventories and knows that it is
//!    complete.
//! 7. No tenant exceeds its quota or sees another tenant's blocks, and the nodes' grants stay within its
//!    budget.
//! 8. Blocks on a node are found there, even if other nodes and members are unreachable.
//! 9. Nothing is left over at the end.
//!
//! Members: a member that answers has a lease by its own clock, one member answers for a slot under one
//! epoch, and slots reported as complete are complete.
//!
//! Placement:
//!
//! * No block is evicted for a placed block.
//! * A moved block is dropped only if its other replica was durable.
//! * A node that is not active accepts no blocks.
//! * Offers and placement requests end by their deadlines, and moves stay within the bandwidth.
//! * After the faults, a draining node whose offers are not refused becomes drained, and other nodes then
//!   have all of its blocks.
//!
//! Extents, in half of the simulations (`extents.rs`):
//!
//! * Only the holder of a leased extent changes its bytes, and no process those of a pinned one.
//! * No extent is reused while I/O of an ended process or session is in flight, also after a restart of the agent.
//! * Blocks that were committed as durable survive, with the payloads that engines wrote.
//! * A corrupt payload is detected, and the block is a miss.
//!
//! Half of the simulations have engines that report the layers that they compute (`layer_driver.rs`): the cores then
//! defer writes, and every commit still gets its notice.
//!
//! Every process has its own clock (`clock.rs`), which drifts, and stops or jumps when its machine is
//! suspended. Cores get the time of that clock.
//!
//! The contents of a block are one number per layer, and its checksums are functions of that number. Every
//! reader can therefore verify the contents without moving bytes.
//!
//! The agent's conversation with the control plane, and a member's with the store, are decided by production state
//! machines. The order in which their outputs are carried out is a copy (docs/adr/0009). The simulation keeps the contracts of
//! the layers below:
//!
//! | here | there |
//! |---|---|
//! | `store.rs`, `store_process.rs` | the contract of `controlplane/store`, with the behaviour of etcd |
//! | `peers.rs`, `offers.rs` | the contract of `node-agent/transport` |
//!
//! [`timed`] replaces random delays by the times of hardware, and random engines by those that serve a trace.
//! [`replay`] is apart from all this: it replays traces through the eviction policies, without time.
//!
//! The simulation is as deterministic as the cores: no clock, no threads, no environment. The caller provides
//! threads to run many seeds.

mod answer_audit;
mod audit;
mod block_audit;
mod budgets;
mod calls;
mod client;
mod clock;
mod control_plane;
mod counted;
mod disk;
mod engine;
mod engine_driver;
mod engines;
mod environment;
mod extent_driver;
mod extents;
#[cfg(test)]
mod fuzz;
mod hosts;
mod jobs;
mod layer_driver;
mod link;
mod links;
mod lookups;
mod member;
mod membership;
mod memory;
mod messages;
mod names;
mod network;
mod node;
mod observation;
mod offers;
mod operators;
mod outcomes;
mod peers;
mod placement_answers;
mod placement_audit;
mod placement_requests;
pub mod plan;
mod queue;
mod random_faults;
pub mod replay;
mod replicas;
mod reports;
mod rng;
mod scale;
pub mod serving;
mod setup;
mod simulation;
mod store;
mod store_process;
mod tenants;
pub mod timed;
mod trace;

use std::any::Any;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

pub use scale::{Cluster, Measured, scale};
pub use setup::Variant;
pub use trace::Recording;

use audit::finish;
use simulation::Simulation;

/// Result of one seed.
#[derive(Clone, Debug)]
pub struct Run {
    /// Seed of the run.
    pub seed: u64,
    /// Message of the violated invariant.
    pub violation: Option<String>,
    /// Digest of all actions: equal for equal seeds.
    pub digest: u64,
    /// Number of actions that ran.
    pub steps: u64,
    /// Number of occurrences by name: faults, and their consequences.
    pub seen: BTreeMap<&'static str, u64>,
    /// A line for each action, if they were recorded.
    pub lines: Vec<String>,
}

/// Plays one seed. The first violation ends it; a panic of a core counts as one.
pub fn run(seed: u64, variant: Variant, recording: Recording) -> Run {
    let mut simulation = Simulation::new(seed, variant, recording);
    let until = simulation.env.setup.faults_until;
    let played = catch_unwind(AssertUnwindSafe(|| {
        simulation.run_until(until);
        finish(&mut simulation);
    }));
    Run {
        seed,
        violation: played.err().map(|cause| panic_message(cause.as_ref())),
        digest: simulation.env.trace.digest(),
        steps: simulation.env.trace.steps(),
        seen: std::mem::take(&mut simulation.env.seen),
        lines: simulation.env.trace.take_lines(),
    }
}

/// Returns the message of a panic.
fn panic_message(cause: &(dyn Any + Send)) -> String {
    let text = cause.downcast_ref::<String>().cloned();
    text.or_else(|| cause.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default()
}
