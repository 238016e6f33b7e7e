//! Copies between paged KV memory and slots: layouts, jobs, and the host build of the kernels.
//!
//! A block of KV is one object for each layer and each part: K and V, or a single part for MLA. A slot has the objects
//! of one block one after the other, in order of layer and part. See `native/copy.h`.

use std::ops::Range;

use reprise_buffers::Span;

use crate::gpu::GpuError;

/// Alignment of addresses, strides and sizes, in bytes.
pub const ALIGNMENT: u64 = 16;

/// Largest object in bytes: kernels count its parts with 32 bits.
pub const OBJECT_BYTES_MAX: u32 = 1 << 30;
/// Most objects of a block.
pub const OBJECTS_MAX: u32 = 1 << 20;
/// Most units of one copy, chunks of 4 KiB: kernels count them with 32 bits.
const UNITS_MAX: u64 = u32::MAX as u64 / 2;

/// Size of a paged KV memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Number of layers.
    pub layers: u32,
    /// Parts of each layer: 2 for K and V, 1 for MLA.
    pub parts: u32,
    /// Number of blocks.
    pub blocks: u32,
    /// Bytes of one part of one layer of one block.
    pub object_bytes: u32,
}

/// Where the objects of a paged KV memory are.
///
/// Object `o` of block `b` is at offset `offsets[o] + b * block_stride` from the start of the memory. An engine with
/// separate tensors uses their addresses as offsets from address 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvLayout {
    offsets: Vec<u64>,
    block_stride: u64,
    blocks: u32,
    object_bytes: u32,
    end: u64,
}

/// One block and its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct CopyJob {
    /// Block of the paged memory.
    pub block: u32,
    /// Slot that the block is copied to or from.
    pub slot: u32,
}

/// What a copy does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyKind {
    /// Copies from pages to slots.
    Gather,
    /// Copies from slots to pages.
    Scatter,
    /// Copies from pages to slots and computes the CRC32C of each object.
    GatherChecked,
    /// Copies from slots to pages and computes the CRC32C of each object.
    ScatterChecked,
    /// Computes the CRC32C of each object of the slots.
    Checksum,
}

impl CopyKind {
    /// All kinds of copies.
    pub const ALL: [CopyKind; 5] = [
        CopyKind::Gather,
        CopyKind::Scatter,
        CopyKind::GatherChecked,
        CopyKind::ScatterChecked,
        CopyKind::Checksum,
    ];

    /// Reports whether the kind computes checksums.
    pub fn has_checksums(self) -> bool {
        !matches!(self, CopyKind::Gather | CopyKind::Scatter)
    }
}

/// Arguments of all copy kernels, as in `native/copy.h`. Addresses are those of the processor that copies.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct CopyArguments {
    pub(crate) bases: u64,
    pub(crate) block_stride: u64,
    pub(crate) slots: u64,
    pub(crate) slot_stride: u64,
    pub(crate) jobs: u64,
    pub(crate) expected: u64,
    pub(crate) checksums: u64,
    pub(crate) mismatches: u64,
    pub(crate) job_count: u32,
    pub(crate) first_object: u32,
    pub(crate) objects: u32,
    pub(crate) object_bytes: u32,
}

const _: () = assert!(size_of::<CopyArguments>() == 80, "shared with native/copy.h");

impl KvShape {
    /// Returns the number of objects of a block, at most `u32::MAX`; layouts have at most [`OBJECTS_MAX`].
    pub fn objects(self) -> u32 {
        self.layers.saturating_mul(self.parts)
    }

    /// Returns the bytes of one block.
    pub fn block_bytes(self) -> u64 {
        u64::from(self.objects()) * u64::from(self.object_bytes)
    }

    /// Returns the bytes of all blocks, at most `u64::MAX`.
    pub fn bytes(self) -> u64 {
        self.block_bytes().saturating_mul(u64::from(self.blocks))
    }

    /// Checks that layouts can be computed: bounded objects, and offsets of less than 2^63 bytes.
    fn check(self) -> Result<(), GpuError> {
        if self.objects() > OBJECTS_MAX || self.object_bytes > OBJECT_BYTES_MAX {
            return Err(too_large(u64::from(self.objects()), self.object_bytes));
        }
        if self.bytes() > i64::MAX as u64 {
            return Err(GpuError::Invalid(format!("invalid KV layout: {self:?} has more than 2^63 bytes")));
        }
        Ok(())
    }
}

impl KvLayout {
    /// Creates a layout from the offset of each object of block 0 and the bytes from one block to the next.
    ///
    /// Errors: no objects, an offset, stride or size that is not a multiple of 16, a stride less than an object, more than
    /// [`OBJECTS_MAX`] objects or [`OBJECT_BYTES_MAX`] bytes of one, an end beyond 64 bits.
    pub fn new(
        offsets: Vec<u64>,
        block_stride: u64,
        blocks: u32,
        object_bytes: u32,
    ) -> Result<KvLayout, GpuError> {
        let invalid = |text: String| Err(GpuError::Invalid(text));
        if offsets.is_empty() || blocks == 0 || object_bytes == 0 {
            return invalid("invalid KV layout: expected at least one object, block and byte".to_owned());
        }
        let sizes = [block_stride, u64::from(object_bytes)];
        if let Some(value) = offsets.iter().chain(&sizes).find(|value| !value.is_multiple_of(ALIGNMENT)) {
            return invalid(format!("invalid KV layout: {value} is not a multiple of {ALIGNMENT} bytes"));
        }
        if block_stride < u64::from(object_bytes) {
            return invalid(format!(
                "invalid KV layout: blocks of {object_bytes} bytes overlap at a stride of {block_stride}"
            ));
        }
        if offsets.len() as u64 > u64::from(OBJECTS_MAX) || object_bytes > OBJECT_BYTES_MAX {
            return Err(too_large(offsets.len() as u64, object_bytes));
        }
        let last = offsets.iter().max().copied().unwrap_or(0);
        let end = block_stride
            .checked_mul(u64::from(blocks - 1))
            .and_then(|blocks| blocks.checked_add(last)?.checked_add(u64::from(object_bytes)));
        let Some(end) = end else {
            return invalid(format!(
                "invalid KV layout: {blocks} blocks with a stride of {block_stride} bytes and an object at {last} end beyond 64 bits"
            ));
        };
        Ok(KvLayout { offsets, block_stride, blocks, object_bytes, end })
    }

    /// One tensor of the shape `[blocks][layers][parts][object]`: all layers of a block are contiguous.
    pub fn block_major(shape: KvShape) -> Result<KvLayout, GpuError> {
        shape.check()?;
        let object = u64::from(shape.object_bytes);
        let offsets = (0..u64::from(shape.objects())).map(|index| index * object).collect();
        KvLayout::new(offsets, shape.block_bytes(), shape.blocks, shape.object_bytes)
    }

    /// One tensor for each layer, `[layers][blocks][parts][object]`: K and V of a block are contiguous.
    pub fn layer_major(shape: KvShape) -> Result<KvLayout, GpuError> {
        shape.check()?;
        let object = u64::from(shape.object_bytes);
        let block = object * u64::from(shape.parts);
        let offset = |layer: u64, part: u64| layer * block * u64::from(shape.blocks) + part * object;
        KvLayout::new(offsets_of(shape, offset), block, shape.blocks, shape.object_bytes)
    }

    /// One tensor for each layer with K and V apart, `[layers][parts][blocks][object]`.
    pub fn split(shape: KvShape) -> Result<KvLayout, GpuError> {
        shape.check()?;
        let object = u64::from(shape.object_bytes);
        let part_bytes = object * u64::from(shape.blocks);
        let offset = |layer: u64, part: u64| (layer * u64::from(shape.parts) + part) * part_bytes;
        KvLayout::new(offsets_of(shape, offset), object, shape.blocks, shape.object_bytes)
    }

    /// One tensor for each layer without parts, as MLA has: `[layers][blocks][object]`.
    pub fn mla(layers: u32, blocks: u32, object_bytes: u32) -> Result<KvLayout, GpuError> {
        KvLayout::split(KvShape { layers, parts: 1, blocks, object_bytes })
    }

    /// Returns the offsets of the objects of block 0.
    pub fn offsets(&self) -> &[u64] {
        &self.offsets
    }

    /// Returns the number of objects of a block.
    pub fn objects(&self) -> u32 {
        self.offsets.len() as u32
    }

    /// Returns the bytes of an object.
    pub fn object_bytes(&self) -> u32 {
        self.object_bytes
    }

    /// Returns the number of blocks.
    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Returns the bytes from one block to the next.
    pub fn block_stride(&self) -> u64 {
        self.block_stride
    }

    /// Returns the bytes of a slot: all objects of a block.
    pub fn slot_bytes(&self) -> u64 {
        u64::from(self.objects()) * u64::from(self.object_bytes)
    }

    /// Returns the offset behind the last byte of the memory.
    pub fn end(&self) -> u64 {
        self.end
    }

    /// Checks jobs: blocks and slots that exist, objects that exist, and a number of objects that kernels can count.
    pub(crate) fn check(&self, jobs: &[CopyJob], slots: u32, objects: &Range<u32>) -> Result<(), GpuError> {
        let invalid = |text: String| Err(GpuError::Invalid(text));
        if objects.is_empty() || objects.end > self.objects() {
            return invalid(format!("invalid objects {objects:?}: a block has {}", self.objects()));
        }
        if let Some(job) = jobs.iter().find(|job| job.block >= self.blocks || job.slot >= slots) {
            return invalid(format!(
                "invalid copy of block {} and slot {}: there are {} blocks and {slots} slots",
                job.block, job.slot, self.blocks
            ));
        }
        let chunks = u64::from(self.object_bytes.div_ceil(4096)) * u64::from(objects.len() as u32);
        if (jobs.len() as u64).checked_mul(chunks).is_none_or(|units| units > UNITS_MAX) {
            return invalid(format!(
                "{} jobs of {chunks} chunks of 4 KiB in one copy: at most {UNITS_MAX} chunks, so use fewer jobs",
                jobs.len()
            ));
        }
        Ok(())
    }
}

fn too_large(objects: u64, object_bytes: u32) -> GpuError {
    GpuError::Invalid(format!(
        "invalid KV layout: {objects} objects of {object_bytes} bytes, expected at most {OBJECTS_MAX} of at most {OBJECT_BYTES_MAX}"
    ))
}

fn offsets_of(shape: KvShape, offset: impl Fn(u64, u64) -> u64) -> Vec<u64> {
    let of_layer = |layer: u32| (0..shape.parts).map(move |part| (u64::from(layer), u64::from(part)));
    (0..shape.layers).flat_map(of_layer).map(|(layer, part)| offset(layer, part)).collect()
}

/// Checksums of a copy with checksums.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CopyResult {
    /// CRC32C of each object, in order of jobs; empty for kinds without checksums.
    pub checksums: Vec<u32>,
    /// For each job, the number of objects with another checksum than expected.
    pub mismatches: Vec<u32>,
}

unsafe extern "C" {
    fn reprise_host_gather(arguments: *const CopyArguments);
    fn reprise_host_scatter(arguments: *const CopyArguments);
    fn reprise_host_gather_checked(arguments: *const CopyArguments);
    fn reprise_host_scatter_checked(arguments: *const CopyArguments);
    fn reprise_host_checksum(arguments: *const CopyArguments);
}

/// Runs the host build of a copy kernel on this thread.
///
/// `pages` has the layout; `slots` are contiguous. `expected` is empty, or has the CRC32C of each object of each job.
/// Errors: jobs outside, memory that is too small, expected checksums of another number.
pub fn copy_on_host(
    kind: CopyKind,
    layout: &KvLayout,
    memory: HostCopy<'_>,
    jobs: &[CopyJob],
    objects: Range<u32>,
) -> Result<CopyResult, GpuError> {
    let HostCopy { pages, slots, expected } = memory;
    let (pages, slots) = ((pages.as_mut_ptr(), pages.len()), (slots.as_mut_ptr(), slots.len()));
    // SAFETY: pages and slots are exclusive borrows of these lengths.
    unsafe { run_on_host(kind, layout, (pages, slots, expected), jobs, objects) }
}

/// Runs a copy kernel as [`copy_on_host`] does, on memory that other processes or devices may write at the same time.
/// The result for bytes that change meanwhile is unspecified.
///
/// Errors: also memory that is read-only.
pub fn copy_spans_on_host(
    kind: CopyKind,
    layout: &KvLayout,
    memory: HostSpans<'_>,
    jobs: &[CopyJob],
    objects: Range<u32>,
) -> Result<CopyResult, GpuError> {
    let HostSpans { pages, slots, expected } = memory;
    let (Some(to_pages), Some(to_slots)) = (pages.as_mut_ptr(), slots.as_mut_ptr()) else {
        return Err(GpuError::Invalid("copies between pages and slots that are read-only".to_owned()));
    };
    let memory = ((to_pages, pages.len()), (to_slots, slots.len()), expected);
    // SAFETY: both ranges are mapped for writing while the spans live. The kernels are C++ that accesses the bytes
    // through pointers, so no reference of Rust to them exists.
    unsafe { run_on_host(kind, layout, memory, jobs, objects) }
}

/// Start and length of pages and of slots, and expected checksums.
type HostRanges<'a> = ((*mut u8, usize), (*mut u8, usize), &'a [u32]);

/// # Safety
/// Both ranges must be valid for reads and writes.
unsafe fn run_on_host(
    kind: CopyKind,
    layout: &KvLayout,
    ((pages, pages_bytes), (slots, slots_bytes), expected): HostRanges<'_>,
    jobs: &[CopyJob],
    objects: Range<u32>,
) -> Result<CopyResult, GpuError> {
    let slot_count = u32::try_from(slots_bytes as u64 / layout.slot_bytes()).unwrap_or(u32::MAX);
    layout.check(jobs, slot_count, &objects)?;
    if (pages_bytes as u64) < layout.end() {
        return Err(GpuError::Invalid(format!(
            "pages have {pages_bytes} bytes, but their layout has {}",
            layout.end()
        )));
    }
    let total = jobs.len() * objects.len();
    if !expected.is_empty() && expected.len() != total {
        return Err(GpuError::Invalid(format!("{} expected checksums for {total} objects", expected.len())));
    }
    let bases: Vec<u64> = layout.offsets.iter().map(|offset| pages as u64 + offset).collect();
    let counts = if kind.has_checksums() { (total, jobs.len()) } else { (0, 0) };
    let mut result = CopyResult { checksums: vec![0; counts.0], mismatches: vec![0; counts.1] };
    let arguments = CopyArguments {
        bases: bases.as_ptr() as u64,
        block_stride: layout.block_stride,
        slots: slots as u64,
        slot_stride: layout.slot_bytes(),
        jobs: jobs.as_ptr() as u64,
        expected: if expected.is_empty() { 0 } else { expected.as_ptr() as u64 },
        checksums: result.checksums.as_mut_ptr() as u64,
        mismatches: result.mismatches.as_mut_ptr() as u64,
        job_count: jobs.len() as u32,
        first_object: objects.start,
        objects: objects.len() as u32,
        object_bytes: layout.object_bytes,
    };
    let function = match kind {
        CopyKind::Gather => reprise_host_gather,
        CopyKind::Scatter => reprise_host_scatter,
        CopyKind::GatherChecked => reprise_host_gather_checked,
        CopyKind::ScatterChecked => reprise_host_scatter_checked,
        CopyKind::Checksum => reprise_host_checksum,
    };
    // SAFETY: all addresses are those of live arrays of this function and of ranges that the caller answers for;
    // `check` and the lengths above compare them with the jobs.
    unsafe { function(&arguments) };
    Ok(result)
}

/// Memory of a copy on the host.
#[derive(Debug)]
pub struct HostCopy<'a> {
    /// Paged memory.
    pub pages: &'a mut [u8],
    /// Slots, one after the other.
    pub slots: &'a mut [u8],
    /// Expected CRC32C of each object of each job, or empty.
    pub expected: &'a [u32],
}

/// Memory of a copy on the host that others may write too.
#[derive(Clone, Copy, Debug)]
pub struct HostSpans<'a> {
    /// Paged memory.
    pub pages: &'a Span,
    /// Slots, one after the other.
    pub slots: &'a Span,
    /// Expected CRC32C of each object of each job, or empty.
    pub expected: &'a [u32],
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_has_as_many_units_as_kernels_count() {
        let layout = KvLayout::new(vec![0], u64::from(OBJECT_BYTES_MAX), 1, OBJECT_BYTES_MAX).expect("valid");
        let jobs = |count: usize| vec![CopyJob { block: 0, slot: 0 }; count];
        // 2^18 chunks each.
        layout.check(&jobs((1 << 13) - 1), 1, &(0..1)).expect("less than 2^31 units");
        let error = layout.check(&jobs(1 << 13), 1, &(0..1)).expect_err("2^31 units");
        assert!(error.to_string().contains("use fewer jobs"), "{error}");
    }
}
