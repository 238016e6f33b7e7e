//! An engine's KV memory: one DLPack tensor for each layer.
//!
//! ```text
//! layer 0   [block 0 │ block 1 │ …]     a block of a layer is one run of `layer_bytes`;
//! layer 1   [block 0 │ block 1 │ …]     runs may have gaps, e.g. if layers alternate in one allocation
//! ```

use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use reprise_client::{PagedMemory, PhysicalBlock};

use crate::geometry::Layout;

mod tensors;

use tensors::{LayerTensor, Tensors};

/// KV memory of an engine, for saves from it and loads into it. Keeps the tensors alive.
///
/// Transfers access the memory concurrently with the engine: blocks of a save must not change until the save
/// has ended, and blocks of a load must not be used until the load has ended.
///
/// Args:
///     tensors: one tensor per layer: any object with ``__dlpack__`` (PyTorch, NumPy) in host memory, of
///     shape
///         ``[blocks, ...]``, whose other axes have ``layout.layer_bytes`` in total and are contiguous.
///     layout: geometry of the blocks.
///
/// Raises:
///     ValueError: a tensor does not match the layout; the message has the reason.
#[pyclass(frozen, module = "reprise")]
#[derive(Debug)]
pub(crate) struct KvMemory {
    pub(crate) paged: Arc<Paged>,
}

/// Implementation of the client's paged memory over the tensors.
#[derive(Debug)]
pub(crate) struct Paged {
    layout: reprise_policy::Layout,
    tensors: Tensors,
}

#[pymethods]
impl KvMemory {
    #[new]
    fn new(tensors: &Bound<'_, PyAny>, layout: &Layout) -> PyResult<KvMemory> {
        let layers = tensors
            .try_iter()?
            .enumerate()
            .map(|(layer, tensor)| LayerTensor::take(&tensor?, layer, &layout.0))
            .collect::<PyResult<Vec<_>>>()?;
        if layers.len() as u64 != u64::from(layout.0.layers()) {
            return Err(PyValueError::new_err(format!(
                "{} tensors, but the layout has {} layers: pass one tensor for each layer",
                layers.len(),
                layout.0.layers()
            )));
        }
        let tensors = Tensors::new(layers)?;
        Ok(KvMemory { paged: Arc::new(Paged { layout: layout.0, tensors }) })
    }

    /// Number of blocks in the memory.
    #[getter]
    fn blocks(&self) -> usize {
        self.paged.blocks()
    }

    /// Geometry of the blocks.
    #[getter]
    fn layout(&self) -> Layout {
        Layout(self.paged.layout)
    }
}

impl Paged {
    /// Returns the layer of an object, and its offset within the layer's run of a block.
    fn place(&self, object: u32) -> (usize, usize) {
        let parts = self.layout.parts();
        let offset = u64::from(object % parts) * self.layout.object_bytes();
        ((object / parts) as usize, offset as usize)
    }
}

impl PagedMemory for Paged {
    fn layout(&self) -> &reprise_policy::Layout {
        &self.layout
    }

    fn blocks(&self) -> usize {
        self.tensors.blocks()
    }

    fn read_object(&self, block: PhysicalBlock, object: u32, read: &mut dyn FnMut(&[u8])) {
        let (layer, offset) = self.place(object);
        self.tensors.read(layer, block.0, |run| read(&run[offset..][..self.layout.object_bytes() as usize]));
    }

    fn write_object(&self, block: PhysicalBlock, object: u32, write: &mut dyn FnMut(&mut [u8])) {
        let (layer, offset) = self.place(object);
        self.tensors
            .write(layer, block.0, |run| write(&mut run[offset..][..self.layout.object_bytes() as usize]));
    }
}
