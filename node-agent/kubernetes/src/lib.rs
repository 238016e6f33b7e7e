//! Kubernetes client of the agent: watches the `CacheNode` of its node and writes its status (ADR 6).
//!
//! ```text
//!  API server ── watch, one object ──► NodeWatch ── Desired ──► the agent
//!       ▲                                 │  ▲                     │
//!       └──── status, server-side apply ──┘  └─────── Facts ───────┘
//!                                         └──► the last spec, on disk
//! ```
//!
//! The agent receives [`Desired`] and reports [`Facts`]; objects, watches and permissions stay in this
//! crate. Everything runs on one thread with its own runtime, and the data path never waits for it. An API
//! server that is unreachable, slow or rejects requests only delays the status.
//!
//! Invariants:
//! * The first [`Desired`] is the persisted spec, if any, so an agent can start without an API server.
//! * A changed status is written at most once per [`NodeSettings::status_every`] on average. Changes of
//!   state may be written in bursts of four. An unchanged status is written every [`UNCHANGED_EVERY`].
//! * A status contains only facts collected for the object that it is written to. No queue pairs are
//!   reserved for GPUs before the first status was accepted, so readers of the status know every
//!   reservation.
//! * The agent owns the status fields that it writes. It overwrites changes by other writers and reports
//!   them in a condition.
//!
//! The crate also verifies the tokens of sessions with the API server ([`TokenReviewer`]).
//!
//! Out of scope: acting on a spec (the agent does that), objects of other nodes, events, leases.

mod connect;
mod desired;
mod facts;
mod persisted;
mod status;
mod status_conflict;
mod token_review;
mod watch;
mod write_pacer;

pub use connect::{Access, ConnectError};
pub use desired::{Claim, DataPolicy, Desired, DesiredProfile, DesiredQueues, Source, SpecError, SpecPart};
pub use facts::{
    ClaimFact, ControlPlane, ControllerFact, CreatedFact, DeviceFact, DeviceFault, DrainFact, Facts, GpuFact,
    Memory, Phase, ProfileFact, QueueFact,
};
pub use persisted::{PersistedSpec, StateDirectory};
pub use reprise_crds::fields::{Engine, FallbackEngine, ForeignSignatures, NodeMode};
pub use reprise_crds::node::{DeviceState, PageKind};
pub use reprise_crds::status::Reason;
pub use token_review::{TokenReviewService, TokenReviewer, token_review_channel};
pub use watch::{NodeSettings, NodeWatch};
pub use write_pacer::UNCHANGED_EVERY;
