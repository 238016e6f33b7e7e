//! `reprise._native`: the client library for Python.
//!
//! Conversions only: keys and block numbers come in, the client does the rest without the GIL. Every call that may
//! wait or copy releases it, so other Python threads run meanwhile.
//!
//! Unsafe code is in `memory/tensors.rs` alone, which reads and writes memory that Python's tensors own.

mod arguments;
mod client;
mod error;
mod geometry;
mod memory;
mod outcome;
mod session;
mod transfers;

use pyo3::prelude::*;

/// The module that `reprise/__init__.py` imports from.
#[pymodule]
mod _native {
    #[pymodule_export]
    use crate::client::Client;
    #[pymodule_export]
    use crate::error::{
        AgentAbsent, AgentLost, BadRequest, Busy, Forbidden, Internal, Memory, Protocol, RepriseError,
        Stalled, Timeout, Version,
    };
    #[pymodule_export]
    use crate::geometry::{Layout, Namespace, block_keys};
    #[pymodule_export]
    use crate::memory::KvMemory;
    #[pymodule_export]
    use crate::outcome::{Durable, Finished, Loaded, Saved};
    #[pymodule_export]
    use crate::session::{PendingMatch, Session};
    #[pymodule_export]
    use crate::transfers::Transfers;
}
