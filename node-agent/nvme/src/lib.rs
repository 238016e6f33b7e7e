//! NVMe controllers in user space.
//!
//! | module | part |
//! |---|---|
//! | [`spec`] | structures and constants of the specifications; no I/O |
//! | [`Controller`], [`QueuePair`] | the driver, generic over its [`Backing`] |
//! | [`RawQueuePair`] | queue pairs that another processor or process drives, in memory of its own |
//! | [`SharedController`] | a controller that an engine and others use, such as the health log |
//! | [`QueueLender`] | queue pairs of an open controller that another process drives |
//! | [`NvmeDevice`], [`NvmeEngine`] | a namespace as a block device, and the I/O engine on it |
//! | [`host`] | what a machine lacks for drivers in user space; reads files only |
//! | [`emulated`] | a controller in this process, with faults on request |
//! | [`vfio`] | a controller of this machine that is bound to vfio-pci; the only unsafe code |
//!
//! A driver resets the controller, identifies it, and creates queue pairs in memory that both access. Interrupts are
//! off: completions are polled. Every command has a deadline. Data is described by SGLs if the controller has them, else
//! by PRP lists ([`Controller::data_format`]).
//!
//! Not included: pools and their format, the choice of a device, retries.

#![deny(unsafe_code)]

mod backing;
mod controller;
mod data;
mod device;
pub mod emulated;
mod engine;
mod error;
#[cfg(test)]
mod fuzz;
pub mod host;
mod lender;
mod queue;
mod relay;
mod shared;
pub mod spec;
pub mod vfio;

pub use backing::{Backing, DmaMapping, DmaMemory, RegisterFile};
pub use controller::{
    Controller, DeletedQueue, DriverSettings, Namespace, QueueAddresses, RawQueuePair, was_aborted,
};
pub use data::{DataFormat, Piece};
pub use device::{DeviceSettings, NvmeDevice};
pub use engine::NvmeEngine;
pub use error::NvmeError;
pub use lender::{DoorbellKind, LentDevice, LentDoorbells, LentQueue, QueueLender};
pub use queue::{CommandId, Ended, QueueMemory, QueuePair, QueueSizes};
pub use shared::{OpenController, SharedController};
