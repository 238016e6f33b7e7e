//! An engine's KV memory: one tensor for each layer, by DLPack.
//!
//! ```text
//! layer 0   [block 0 │ block 1 │ …]     a block of a layer is one run of `layer_bytes`;
//! layer 1   [block 0 │ block 1 │ …]     runs may have gaps between them, as where layers take turns in one allocation
//! ```

use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use reprise_client::{PagedMemory, PhysicalBlock};

use crate::geometry::Layout;

mod tensors;

use tensors::{LayerTensor, Tensors};

/// An engine's KV memory, for saves from it and loads to it. Keeps the tensors alive.
///
/// Its bytes are read and written while the engine has it: blocks of a save must not change until it has ended, blocks of
/// a load must not be used until it has.
///
/// Args:
///     tensors: one for each layer, anything with ``__dlpack__`` (PyTorch, NumPy) in host memory, of shape
///         ``[blocks, ...]`` where the other axes have ``layout.layer_bytes`` together and are contiguous.
///     layout: geometry of the blocks.
///
/// Raises:
///     ValueError: a tensor does not fit, and why.
#[pyclass(frozen, module = "reprise")]
#[derive(Debug)]
pub(crate) struct KvMemory {
    pub(crate) paged: Arc<Paged>,
}

/// The memory as the client sees it.
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
                "{} tensors, but the layout has {} layers: give one for each",
                layers.len(),
                layout.0.layers()
            )));
        }
        let tensors = Tensors::new(layers)?;
        Ok(KvMemory { paged: Arc::new(Paged { layout: layout.0, tensors }) })
    }

    /// How many blocks there are.
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
    /// Where an object lies: layer, and offset within the layer's run of a block.
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
