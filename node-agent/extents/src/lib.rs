//! The way of blocks through extents: an engine's backend moves blocks between memory and devices of the node, without a
//! copy in the agent.
//!
//! ```text
//! save: checksums ─▶ lease extents ─▶ store_layer, layer by layer ─▶ commit
//! load: pin ─▶ header pages ─▶ retrieve_layer, layer by layer ─▶ checksums ─▶ unpin
//! ```
//!
//! | path | backend | devices | memory |
//! |---|---|---|---|
//! | [`RingPath`] | `gpu-queue` | queue pairs that the agent grants | registered with the agent |
//! | [`FilePath`] | `staged` | pool files that the agent lends | of this process |
//!
//! [`ExtentBlocks`] is the way for engines whose memory no controller may access: a window of such a path, between which
//! and the engine's memory the CPU copies. It opens the first backend that the session's agent allows.
//!
//! Threads of this process drive the queue pairs (the host build of the GPU's source), so the backend of a [`RingPath`] is
//! `gpu-queue-host`, or `gpu-queue-emulated` if a controller is emulated.
//!
//! A command that is given up may still write its memory. Its queue pairs are therefore returned to the agent, which
//! deletes them, before a block or an extent has another use. Operations on files cannot be stopped: their extents are
//! kept until they end.

#![forbid(unsafe_code)]

mod blocks;
mod device;
mod files;
mod headers;
mod path;
mod rings;
mod way;

pub use blocks::{DirectionReport, ExtentBlocks, ExtentReport};
pub use files::{FileDevices, FilePath};
pub use path::{Devices, ExtentDevice, ExtentPath, RingLoad};
pub use reprise_cuda::store::{Backend, KvOrder, RingCounters};
pub use rings::{PendingWindow, RingDevices, RingPath, RingPathSettings, RingWindow};
