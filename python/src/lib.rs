//! `reprise._native`: the client library for Python.
//!
//! This crate only converts arguments and results. Every call that may wait or copy releases the GIL, so that
//! other Python threads keep running.
//!
//! Unsafe code is only in `memory/tensors.rs`, which accesses memory that Python's tensors own.

mod arguments;
mod client;
mod error;
mod extents;
mod geometry;
mod layers;
mod lookahead;
mod manage;
mod memory;
mod outcome;
mod recompute;
mod session;
mod transfers;

use pyo3::prelude::*;

/// Native module that `reprise/__init__.py` imports.
#[pymodule]
mod _native {
    #[pymodule_export]
    use crate::client::Client;
    #[pymodule_export]
    use crate::error::{
        AgentAbsent, AgentLost, BadRequest, Busy, Forbidden, Internal, LimitReached, Memory, Protocol,
        RepriseError, Stalled, Timeout, Version,
    };
    #[pymodule_export]
    use crate::extents::ExtentReport;
    #[pymodule_export]
    use crate::geometry::{Layout, Namespace, TenantKeys, block_keys};
    #[pymodule_export]
    use crate::layers::{LayerGuidance, PendingReport};
    #[pymodule_export]
    use crate::lookahead::{LookaheadReport, PendingLookahead};
    #[pymodule_export]
    use crate::manage::{BlocksReport, PendingBlocks};
    #[pymodule_export]
    use crate::memory::KvMemory;
    #[pymodule_export]
    use crate::outcome::{Durable, Finished, Loaded, Saved};
    #[pymodule_export]
    use crate::recompute::{LoadDecision, LoadPolicy};
    #[pymodule_export]
    use crate::session::{PendingMatch, Session};
    #[pymodule_export]
    use crate::transfers::Transfers;
}
