//! The agent's side of Kubernetes: it watches the `CacheNode` of its own node and writes its status (ADR 6).
//!
//! ```text
//!  API server ── watch, one object ──► NodeWatch ── Desired ──► the agent
//!       ▲                                 │  ▲                     │
//!       └──── status, server-side apply ──┘  └─────── Facts ───────┘
//!                                         └──► the last spec, on disk
//! ```
//!
//! The agent sees [`Desired`] and tells [`Facts`]; objects, watches and rights stay here. Everything runs on one thread with a runtime
//! of its own that nothing on the data path waits for: an API server that is away, slow or refuses costs a late status and nothing else.
//!
//! Invariants:
//! * the first [`Desired`] is the one kept on disk, if there is one, so an agent starts without an API server;
//! * a status is written when it has changed, one in [`NodeSettings::status_every`] over time, four in a row when something others act on has; and every
//!   [`UNCHANGED_EVERY`] in any case;
//! * a status is of facts that were found for the object that it is written into, and nothing is kept for GPUs before one was taken: so who reads it
//!   knows of everything that the agent may keep;
//! * every write is of the agent's own fields, which nobody else has: it insists on them, and says so where somebody else has written them.
//!
//! Beside it the API server is asked whose the tokens are that sessions show ([`Reviewer`]).
//!
//! Deliberately absent: what follows from a spec (the agent's), other nodes' objects, events, leases.

mod connect;
mod contested;
mod desired;
mod facts;
mod kept;
mod pace;
mod reviews;
mod status;
mod watch;

pub use connect::{Access, ConnectError};
pub use desired::{Claim, Data, Desired, Part, Problem, ProfileWish, QueueWish, Source};
pub use facts::{
    ClaimFact, ControlPlane, ControllerFact, DeviceFact, DrainFact, Facts, GpuFact, Memory, Phase,
    ProfileFact, QueueFact, Trouble,
};
pub use kept::{KeptSpec, StateDirectory};
pub use pace::UNCHANGED_EVERY;
pub use reprise_crds::fields::{Engine, FallbackEngine, ForeignSignatures, NodeMode};
pub use reprise_crds::node::{DeviceState, PageKind};
pub use reprise_crds::status::Reason;
pub use reviews::{Reviewed, Reviewer, Reviews, reviews};
pub use watch::{NodeSettings, NodeWatch};
