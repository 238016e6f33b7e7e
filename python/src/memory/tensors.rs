//! Validation of Python's tensors and access to their bytes. The only unsafe code of the package.
//!
//! Invariants:
//! * A run lies inside its tensor. The tensor's owner neither frees nor moves it while the DLPack capsule
//!   exists (DLPack, "DLManagedTensor").
//! * No two runs share bytes.
//! * A lock per block allows several readers or one writer of its runs.
//!
//! The engine must not compute on a block during a transfer, as with any shared tensor.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{PoisonError, RwLock};

use pyo3::exceptions::{PyAttributeError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3_dlpack::PyTensor;
use reprise_policy::{Dtype, Layout};

const DEVICE_CPU: i32 = 1;

/// `kDLCUDAHost` of DLPack: pinned host memory.
const DEVICE_CUDA_HOST: i32 = 3;

/// Element kinds that are accepted for every dtype of the same width: `kDLInt` and `kDLUInt` of DLPack. NumPy
/// has no bfloat16, and engines store fp8 as bytes.
const KINDS_OF_CARRIERS: [u8; 2] = [0, 1];

/// Kinds of 8-bit floats of DLPack, from `kDLFloat8_e3m4` to `kDLFloat8_e8m0fnu`.
const KINDS_OF_FP8: std::ops::RangeInclusive<u8> = 7..=14;

/// Tensor with the blocks of one layer.
#[derive(Debug)]
pub(super) struct LayerTensor {
    /// Keeps the memory alive.
    _tensor: PyTensor,
    first: NonNull<u8>,
    blocks: usize,
    /// Distance from one block to the next.
    stride_bytes: usize,
    run_bytes: usize,
}

/// Tensors of all layers.
#[derive(Debug)]
pub(super) struct Tensors {
    layers: Vec<LayerTensor>,
    /// One lock per block, for its runs in all layers.
    locks: Box<[RwLock<()>]>,
}

// SAFETY: the pointer is to memory that the tensor keeps alive and that is not bound to a thread. Any thread
// may release a DLPack tensor: producers acquire the GIL for it.
unsafe impl Send for LayerTensor {}

// SAFETY: shared references only read fields. The memory behind the pointer is accessed only through
// `Tensors`, whose locks order reads and writes.
unsafe impl Sync for LayerTensor {}

impl LayerTensor {
    /// Validates the tensor of a layer against the layout.
    pub(super) fn take(object: &Bound<'_, PyAny>, layer: usize, layout: &Layout) -> PyResult<LayerTensor> {
        check_device(object, layer)?;
        let wrong = |words: String| PyValueError::new_err(format!("layer {layer}: {words}"));
        let tensor = PyTensor::from_pyany(object.py(), object)
            .map_err(|error| wrong(format!("cannot export the tensor: {error}")))?;
        if tensor.is_read_only() {
            return Err(wrong("the tensor is read-only, but loads write to it".into()));
        }
        let element_bytes = layout.spec().dtype.bytes() as usize;
        let dtype = tensor.dtype();
        if dtype.lanes != 1 || usize::from(dtype.bits) != 8 * element_bytes {
            return Err(wrong(format!(
                "elements of {} bits, but the layout's dtype has {element_bytes} bytes",
                dtype.bits
            )));
        }
        if !may_hold(dtype.code, layout.spec().dtype) {
            return Err(wrong(format!(
                "the elements have another kind (DLPack code {}) than the layout's dtype {:?}: use the tensor's dtype in \
                 the layout, or pass a view as integers of this width",
                dtype.code,
                layout.spec().dtype
            )));
        }
        let run_bytes = layout.layer_bytes() as usize;
        let shape = Shape::of(&tensor).ok_or_else(|| wrong("a shape with negative numbers".into()))?;
        let stride_bytes = shape.block_stride_bytes(element_bytes, run_bytes).map_err(wrong)?;
        let first = NonNull::new(tensor.data_ptr().cast::<u8>())
            .ok_or_else(|| wrong("the tensor has no memory".into()))?;
        Ok(LayerTensor { _tensor: tensor, first, blocks: shape.blocks(), stride_bytes, run_bytes })
    }

    /// Returns the addresses from the first byte of the first run to the last byte of the last run.
    fn addresses(&self) -> Range<usize> {
        let first = self.first.as_ptr().addr();
        first..first + (self.blocks - 1) * self.stride_bytes + self.run_bytes
    }

    /// Returns whether a run of one tensor shares bytes with a run of the other.
    fn overlaps(&self, other: &LayerTensor) -> bool {
        let (mine, theirs) = (self.addresses(), other.addresses());
        if mine.end <= theirs.start || theirs.end <= mine.start {
            return false;
        }
        // Layers may alternate in one allocation: with equal strides and enough space for each other's runs
        // in between.
        let (low, high) = if mine.start <= theirs.start { (self, other) } else { (other, self) };
        let step = low.stride_bytes;
        let apart = (high.addresses().start - low.addresses().start) % step;
        step != high.stride_bytes || apart < low.run_bytes || apart + high.run_bytes > step
    }

    /// Returns the start of a block's run.
    fn run(&self, block: usize) -> NonNull<u8> {
        assert!(block < self.blocks, "block {block} of {}", self.blocks);
        // SAFETY: `take` has checked that this number of blocks with this stride lies inside the tensor.
        unsafe { self.first.add(block * self.stride_bytes) }
    }
}

impl Tensors {
    /// Combines the layers' tensors, which must have the same number of blocks and share no bytes.
    pub(super) fn new(layers: Vec<LayerTensor>) -> PyResult<Tensors> {
        let blocks = layers.first().map_or(0, |layer| layer.blocks);
        if let Some(layer) = layers.iter().position(|layer| layer.blocks != blocks) {
            return Err(PyValueError::new_err(format!(
                "layer {layer}: {} blocks, but layer 0 has {blocks}",
                layers[layer].blocks
            )));
        }
        for (number, layer) in layers.iter().enumerate() {
            if let Some(other) = layers[..number].iter().position(|other| layer.overlaps(other)) {
                return Err(PyValueError::new_err(format!(
                    "layer {number}: the blocks share memory with those of layer {other}"
                )));
            }
        }
        Ok(Tensors { layers, locks: (0..blocks).map(|_| RwLock::new(())).collect() })
    }

    pub(super) fn blocks(&self) -> usize {
        self.locks.len()
    }

    /// Calls `read` with a run, under the block's shared lock.
    pub(super) fn read<T>(&self, layer: usize, block: usize, read: impl FnOnce(&[u8]) -> T) -> T {
        let _shared = self.locks[block].read().unwrap_or_else(PoisonError::into_inner);
        let layer = &self.layers[layer];
        // SAFETY: a run is `run_bytes` initialised bytes inside a tensor that is kept alive; a writer holds
        // the exclusive lock.
        let run = unsafe { std::slice::from_raw_parts(layer.run(block).as_ptr(), layer.run_bytes) };
        read(run)
    }

    /// Calls `write` with a run, under the block's exclusive lock.
    pub(super) fn write<T>(&self, layer: usize, block: usize, write: impl FnOnce(&mut [u8]) -> T) -> T {
        let _alone = self.locks[block].write().unwrap_or_else(PoisonError::into_inner);
        let layer = &self.layers[layer];
        // SAFETY: as in `read`. The lock is exclusive, runs of other blocks and layers share no bytes with
        // this one, and the tensor is not read-only.
        let run = unsafe { std::slice::from_raw_parts_mut(layer.run(block).as_ptr(), layer.run_bytes) };
        write(run)
    }
}

/// Shape and strides of a tensor, in elements.
struct Shape {
    shape: Vec<usize>,
    /// Strides; `None` for row-major without gaps.
    strides: Option<Vec<usize>>,
}

impl Shape {
    /// Reads shape and strides; returns `None` if a number is negative.
    fn of(tensor: &PyTensor) -> Option<Shape> {
        let unsigned = |numbers: &[i64]| {
            numbers.iter().map(|number| usize::try_from(*number).ok()).collect::<Option<Vec<usize>>>()
        };
        let strides = match tensor.strides() {
            Some(strides) => Some(unsigned(strides)?),
            None => None,
        };
        Some(Shape { shape: unsigned(tensor.shape())?, strides })
    }

    fn blocks(&self) -> usize {
        self.shape.first().copied().unwrap_or(0)
    }

    /// Returns the bytes from one block to the next.
    ///
    /// # Errors
    /// A block is not one run of `run_bytes`; the text has the reason.
    fn block_stride_bytes(&self, element_bytes: usize, run_bytes: usize) -> Result<usize, String> {
        let Some((blocks, axes)) = self.shape.split_first().filter(|(blocks, _)| **blocks > 0) else {
            return Err(format!(
                "shape {:?} has no blocks: the first axis must be the number of blocks",
                self.shape
            ));
        };
        let run_elements =
            axes.iter().try_fold(1_usize, |product, axis| product.checked_mul(*axis)).unwrap_or(usize::MAX);
        let found = run_elements.saturating_mul(element_bytes);
        if found != run_bytes {
            return Err(format!(
                "a block of shape {axes:?} has {found} bytes, but the layout has {run_bytes} bytes per layer of a block"
            ));
        }
        let Some(strides) = &self.strides else {
            return Ok(run_bytes);
        };
        if let Some(axis) = self.gap(strides) {
            return Err(format!(
                "a block is not contiguous: shape {:?} with strides {strides:?} (axis {axis}); the block axis must be first, \
                 and the others row-major without gaps",
                self.shape
            ));
        }
        let stride_bytes = strides[0].saturating_mul(element_bytes);
        if *blocks > 1 && stride_bytes < run_bytes {
            return Err(format!("the blocks overlap: {stride_bytes} bytes apart, {run_bytes} bytes long"));
        }
        Ok(stride_bytes.max(run_bytes))
    }

    /// Returns the last axis after the first whose stride differs from that of a contiguous tensor.
    fn gap(&self, strides: &[usize]) -> Option<usize> {
        let mut expected = 1;
        for axis in (1..self.shape.len()).rev() {
            if self.shape[axis] > 1 && strides[axis] != expected {
                return Some(axis);
            }
            expected *= self.shape[axis];
        }
        None
    }
}

/// Returns whether a DLPack element kind is accepted for a dtype of the same width.
fn may_hold(kind: u8, dtype: Dtype) -> bool {
    let is_of_dtype = match dtype {
        // `kDLBfloat` and `kDLFloat`.
        Dtype::Bf16 => kind == 4,
        Dtype::Fp16 | Dtype::Fp32 => kind == 2,
        Dtype::Fp8 => KINDS_OF_FP8.contains(&kind),
        Dtype::Int8 => false,
    };
    is_of_dtype || KINDS_OF_CARRIERS.contains(&kind)
}

/// Checks that a tensor is in host memory, before any call that would synchronise with a device.
fn check_device(object: &Bound<'_, PyAny>, layer: usize) -> PyResult<()> {
    let device = object.call_method0("__dlpack_device__").map_err(|error| {
        if error.is_instance_of::<PyAttributeError>(object.py()) {
            let kind = object.get_type();
            return PyTypeError::new_err(format!(
                "layer {layer}: {kind} is not a tensor: __dlpack_device__ is missing"
            ));
        }
        PyValueError::new_err(format!("layer {layer}: cannot read the tensor's device: {error}"))
    })?;
    let (kind, number): (i32, i32) = device.extract()?;
    if kind == DEVICE_CPU || kind == DEVICE_CUDA_HOST {
        return Ok(());
    }
    let name = match kind {
        2 => "CUDA device",
        10 => "ROCm device",
        13 => "CUDA managed memory of device",
        8 => "Metal device",
        _ => "DLPack device",
    };
    Err(PyValueError::new_err(format!(
        "layer {layer}: the tensor is on {name} {number}: expected host memory"
    )))
}
