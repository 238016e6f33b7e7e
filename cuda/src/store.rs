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
//! Nothing here does I/O or waits. [`Backend`] names the ways of blocks, and why one is not used.

mod backend;
mod mapping;
mod plan;
mod stripe;

pub use backend::{Backend, BackendChoice, BackendKind, Unusable, choose};
pub use mapping::{DescriptorMemory, KvGeometry, KvOrder, MappingTable};
pub use plan::{BlockPlace, DevicePlan, PlanCounters, Planned, plan_layer};
pub use stripe::alternate;
