//! Pure types and decisions of Reprise, shared by all components.
//!
//! Nothing here performs I/O, reads a clock or uses randomness. Time is an argument ([`Tick`]), and decisions
//! are functions or small state machines. Every other crate of the workspace may depend on this one; this
//! crate depends on none of them.
//!
//! Out of scope: wire formats (crate `reprise-proto`) and the on-disk format (`reprise-agent-core`).

pub mod admission;
pub mod arena_slot;
pub mod block_command;
pub mod connection_table;
pub mod content;
pub mod demotion;
pub mod device_place;
pub mod eviction;
pub mod fair_order;
pub mod fair_queue;
#[cfg(test)]
mod fuzz;
pub mod identity;
pub mod ids;
pub mod key;
pub mod key_inputs;
pub mod layout;
pub mod lease_schedule;
pub mod log_rate;
pub mod namespace;
pub mod peer;
pub mod placement;
pub mod prefetch;
pub mod prefix_hash;
pub mod queue_grants;
pub mod quota;
pub mod recompute;
pub mod routing;
pub mod salt;
pub mod session;
pub mod shards;
pub mod slack;
pub mod slot_set;
pub mod tenant;
pub mod tier;
pub mod time;
pub mod trace;
pub mod units;

pub use arena_slot::{ArenaSlot, RegionId};
pub use content::ContentId;
pub use device_place::{DevicePlace, Distance, GpuPlace, PciAddress, PciAddressError};
pub use ids::{Epoch, Generation, NodeId, SessionId, TenantId};
pub use key::BlockKey;
pub use key_inputs::KeyInputs;
pub use layout::{Dtype, Layout, LayoutDigest, LayoutSpec, Parts};
pub use namespace::{NamespaceDigest, NamespaceSpec};
pub use placement::{DrainProgress, NodeMode};
pub use quota::Quota;
pub use salt::TenantSalt;
pub use slot_set::SlotSet;
pub use tenant::TenantName;
pub use tier::{Amounts, Tier};
pub use time::Tick;
pub use units::{ByteSize, Interval};
