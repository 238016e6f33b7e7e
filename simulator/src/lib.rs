//! A world in which the production cores of agents and control plane run under simulated clock, network, disks and
//! store, with faults. One seed decides everything: sizes, what engines do, every delay and every fault.
//!
//! ```text
//!  engines ─ requests ─▶ AgentCore, Outboxes ─ calls ─▶ network ─▶ Members, Directory ─ calls, watches ─▶ store
//!     ▲                   │      ▲    │                    ▲        several members              leases, revisions
//!     └── shared memory ──┘   disks   └── fetches ─────────┘          time: a queue of actions, in microseconds
//! ```
//!
//! [`run`] plays one seed: some seconds of engines at work while things break, then calm, then the question whether all
//! is well. What is checked (DESIGN §9): no reader sees other bytes than were committed under the key (1); what was
//! announced durable is there after `SIGKILL` and power loss (2); budgets, by the cores' own audits after every event
//! (3); no slot is handed out while anybody reads or writes it (4); every request and every lookup is over by its deadline
//! (5); when faults have stopped every slot has one owner, who names the union of the inventories and knows that nothing is
//! missing (6); no tenant gets more than its quota, or sees another's blocks, and what nodes may hold of it stays within its budget (7); what is on a node is found there, whoever
//! is away (8); nothing is left over. Of members besides: who answers has a lease by its own clock, under one epoch one member
//! answers for a slot, and what is said to be whole is. Of placement: nothing is evicted for a placed block, a moved block is
//! dropped only when its other replica was durable, who is not active takes nothing, offers and questions are over by their
//! deadlines and what moves is within the bandwidth; when faults have stopped, a node that leaves and is refused nothing becomes
//! drained, and then others have all that it has.
//!
//! Every process has a clock of its own (`clock.rs`), which runs a little wrong, and stands still or jumps when its machine is
//! suspended; cores get what it shows.
//!
//! A block's bytes are one number per layer and its checksums functions of that number, so that every reader can say
//! whether it got what was committed, without bytes being moved.
//!
//! Not the production code, because it is made of futures and sockets, and followed here step by step:
//!
//! | here | there |
//! |---|---|
//! | `link.rs`, `client.rs`, `asking.rs`, `reporting.rs` | `node-agent/src/directory/{link,heartbeat,members,asking,reporting}.rs` |
//! | `placing.rs`, `placements.rs` (`directed`) | `node-agent/src/directory/{placing,reporting}.rs` |
//! | `member.rs`, `plane.rs` | `controlplane/src/{cluster,directory,membership,server}.rs` |
//! | `member/choosing.rs`, `member/ledgers.rs` | `controlplane/src/{placement/places,placement/reports,cluster/choosing,server}.rs` |
//! | `joining.rs`, `joining/` | `controlplane/src/{identity,registry,shards,followed,modes,tenants}.rs`, `controlplane/store/src/held.rs` |
//! | `store.rs`, `keeper.rs` | the contract of `controlplane/store`, as etcd keeps it |
//! | `peers.rs`, `offers.rs` | `node-agent/transport`, `node-agent/src/executor.rs` (offers) |
//!
//! Pure as the cores are: no clock, no threads, no environment; whoever runs many seeds brings the threads.

mod answers;
mod asking;
mod audit;
mod budgets;
mod client;
mod clock;
mod disk;
mod engine;
mod faults;
mod jobs;
mod joining;
mod keeper;
mod link;
mod member;
mod memory;
mod messages;
mod network;
mod node;
mod offers;
mod operators;
mod peers;
mod placements;
mod places;
mod placing;
mod plane;
mod queue;
mod reporting;
mod rng;
mod scale;
mod setup;
mod store;
mod tenants;
mod trace;
mod turns;
mod world;

use std::any::Any;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

pub use scale::{Cluster, Measured, scale};
pub use setup::Variant;
pub use trace::Recording;

use world::World;

/// What became of one seed.
#[derive(Clone, Debug)]
pub struct Run {
    /// Which.
    pub seed: u64,
    /// The invariant that did not hold, in words.
    pub violation: Option<String>,
    /// Digest of everything that happened: equal for equal seeds.
    pub digest: u64,
    /// How many things happened.
    pub steps: u64,
    /// How often what happened, by name: faults, and what they led to.
    pub seen: BTreeMap<&'static str, u64>,
    /// A line for each step, when they were wanted.
    pub lines: Vec<String>,
}

/// Plays one seed. A violation ends it; so does a panic of a core, which is one.
pub fn run(seed: u64, variant: Variant, recording: Recording) -> Run {
    let mut world = World::new(seed, variant, recording);
    let until = world.setup.faults_until;
    let played = catch_unwind(AssertUnwindSafe(|| {
        world.run_until(until);
        world.settle();
    }));
    Run {
        seed,
        violation: played.err().map(|cause| words(cause.as_ref())),
        digest: world.trace.digest(),
        steps: world.trace.steps(),
        seen: std::mem::take(&mut world.seen),
        lines: world.trace.take_lines(),
    }
}

/// What a panic said.
fn words(cause: &(dyn Any + Send)) -> String {
    let text = cause.downcast_ref::<String>().cloned();
    text.or_else(|| cause.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default()
}
