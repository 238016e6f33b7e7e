//! Paged KV memory of an engine: of the host, or of a GPU.

use std::sync::Arc;

use reprise_buffers::Span;

use crate::gpu::{DeviceMemory, Partition};
use crate::kernels::Kernels;
use crate::store::KvGeometry;
use crate::store::mover::MoveError;

/// KV memory. Clones share it.
#[derive(Clone, Debug)]
pub enum KvMemory {
    /// Memory of this process.
    Host(Span),
    /// Memory of a GPU.
    Gpu(GpuKv),
}

/// KV memory of a GPU, and what copies it.
#[derive(Clone, Debug)]
pub struct GpuKv {
    /// One allocation with all blocks.
    pub memory: Arc<DeviceMemory>,
    /// Kernels of that GPU.
    pub kernels: Arc<Kernels>,
    /// SMs for I/O.
    pub partition: Arc<Partition>,
}

impl KvMemory {
    /// Reports whether the memory is of a GPU.
    pub fn is_on_gpu(&self) -> bool {
        matches!(self, KvMemory::Gpu(_))
    }

    /// Checks that the memory has all blocks and can be written.
    pub(super) fn check(&self, geometry: &KvGeometry) -> Result<(), MoveError> {
        let (bytes, is_writable) = match self {
            KvMemory::Host(span) => (span.len() as u64, span.is_writable()),
            KvMemory::Gpu(memory) => (memory.memory.bytes(), true),
        };
        if bytes >= geometry.bytes() && is_writable {
            return Ok(());
        }
        let expected = geometry.bytes();
        Err(MoveError::Invalid(format!("KV memory of {bytes} bytes: expected {expected} writable ones")))
    }
}
