//! The object store as an engine sees it: which transfers move the objects of blocks between paged KV memory and extents.
//!
//! A block has 2·L objects (L with latent attention), tensor by tensor: key and value of layer 0, of layer 1, and so on. In
//! an extent they lie one after the other. In KV memory each lies where the engine's layout puts it ([`KvGeometry`]).
//!
//! ```text
//!   registration: MappingTable ── one descriptor of 16 bytes for each object of each block of the KV memory
//!   layer:        plan_layer ──── (blocks, layer) ─▶ transfers, in one call and without a call to the agent
//! ```
//!
//! Planning does no I/O and waits for nothing. Backends move the bytes: [`LayerMover`] is their trait, and
//! [`open_backend`] opens the first one that this machine can run.
//!
//! | backend | devices of a place | KV memory |
//! |---|---|---|
//! | [`RingMover`] | NVMe namespaces, through queue pairs | any that controllers reach |
//! | [`GdsMover`] | files | of a GPU |
//! | [`StagedMover`] | files | of a GPU; of the host as `staged-host` |
//! | [`HostMover`] | regions of slots in host memory | of the host |

mod backend;
mod backoff;
mod gds;
mod host;
mod keeper;
mod mapping;
mod memory;
mod mover;
mod open;
mod plan;
mod pool;
mod progress;
mod rings;
mod staged;
mod stream;
mod stream_cost;
mod stripe;
pub mod verify;
mod waiting;

pub use backend::{Backend, BackendChoice, BackendKind, Unusable, choose};
pub use gds::{CuFile, GdsMover};
pub use host::HostMover;
pub use mapping::{DescriptorMemory, KvGeometry, KvOrder, MappingTable};
pub use memory::{GpuKv, KvMemory};
pub use mover::{
    BlockError, BlockFailure, LayerMover, LayerOutcome, LayerRequest, LayerTicket, MoveError, MoverCounters,
    REQUESTS_MAX,
};
pub use open::{Means, open_backend};
pub use plan::{BlockPlace, DevicePlan, PlanCounters, Planned, plan_layer};
pub use rings::{DetachedRing, NamespaceLimits, Processor, RingCounters, RingDevice, RingMover};
pub use staged::StagedMover;
pub use stream::{EngineStream, HostStream, Point, RequestOrder};
pub use stream_cost::{CostMode, StreamCost, stream_cost};
pub use stripe::alternate;
