//! Block-device I/O of Reprise: one trait, four engines, three of them here.
//!
//! An [`IoEngine`] moves whole 4 KiB pages between one [`DeviceFile`] and memory in the form of
//! [`Span`](reprise_buffers::Span)s. An operation owns its memory from submission to completion, the engine
//! owns the operation, and dropping the engine ends every operation first. Memory is therefore never freed
//! while a device may still write to it.
//!
//! * [`EngineKind::IoUring`]: O_DIRECT, registered file and buffers, one system call per batch.
//! * [`EngineKind::Plain`]: `preadv`/`pwritev` on a few threads, for kernels that refuse io_uring.
//! * [`EngineKind::UserNvme`]: a driver in user space; in the crate `reprise-nvme`.
//! * [`EngineKind::Simulated`]: a device in memory with latency, faults and crashes, all drawn from a seed.
//!
//! In addition, [`health_log`] reads the wear indicators of an NVMe drive, [`foreign_signature`] recognises data of
//! other programs, and [`device_place`] reads where a device is in the machine.
//!
//! [`open_engine`] chooses between the first two. The suite in `tests/io/conformance` holds for all of them.
//!
//! A [`DeviceDescription`] states what a device is; an open device is a [`BlockDevice`], from which its engine
//! is started.
//!
//! Not included: ordering between operations in flight, the pool's format, checksums, and retries of media
//! errors. [`bare`] is the baseline of the benchmarks, not a second I/O path.

pub mod bare;
mod block_device;
mod description;
mod device;
mod engine;
mod error;
#[cfg(test)]
mod fuzz;
mod op;
mod open;
mod place;
mod plain;
mod probe;
mod queue;
mod shared;
mod signature;
pub mod simulated;
mod smart;
mod sys;
mod transfer;
mod uring;
mod waker;

pub use block_device::BlockDevice;
pub use description::{ControllerDescription, DeviceDescription};
pub use device::{Caching, DeviceFile, FileAccess, HOLDER_PATIENCE, IfMissing, Preallocation, Reserve};
pub use engine::{CloseOutcome, EngineKind, IoEngine, Wait};
pub use error::{IoError, IoErrorKind};
pub use op::{Bounds, Completion, IO_ALIGN, IOVECS_MAX, Op, Submission, TRANSFER_BYTES_MAX, Token};
pub use open::{EngineChoice, EngineSettings, QUEUE_DEPTH_DEFAULT, QUEUE_DEPTH_MAX, open_engine};
pub use place::{device_place, gpu_place, pci_place};
pub use probe::{IoProbe, RingMode, probe};
pub use queue::{OpClass, QueueSettings, ReadFirstQueue, WriteFlow};
pub use shared::{HolderNumber, SharedFile};
pub use signature::{POOL_MAGIC, SIGNATURE_BYTES, foreign_signature};
pub use smart::{HealthLog, health_log};
pub use waker::{Doorbell, Waker};

pub use reprise_policy::{PciAddress, PciAddressError};
