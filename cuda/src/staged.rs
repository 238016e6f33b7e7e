//! Loads and saves through staging: host blocks, a window of slots in GPU memory, paged KV.
//!
//! The window has two halves. While the copy engine fills one half from registered host memory, the scatter kernel
//! empties the other half into paged memory on its own stream (and, for saves, the other way round). Events order the
//! streams; the CPU only enqueues. Copies alternate between two streams, so that the start of one is hidden behind the
//! transfer of another. Checksums are computed on the GPU, from the bytes that the kernel copies.

use std::ops::Range;

use crate::copy::{CopyJob, CopyKind, CopyResult};
use crate::gpu::{DeviceMemory, Event, Gpu, GpuError, HostMemory, Partition, Stream};
use crate::kernels::{DeviceJobs, DeviceLayout, Kernels, Slots};

/// Bytes of the window that make it large enough: half of it is copied in about 0.6 ms over PCIe 5.0.
pub const WINDOW_BYTES: u64 = 64 << 20;

/// One block in host memory.
#[derive(Clone, Copy, Debug)]
pub struct HostBlock<'a> {
    /// Memory of the block.
    pub memory: &'a HostMemory,
    /// Offset of the block's first byte.
    pub offset: u64,
    /// Block of the paged memory.
    pub block: u32,
}

/// Direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Load,
    Save,
}

/// Streams and window of transfers; one transfer at a time uses them. Transfers keep the memory of their jobs for the
/// next one: releasing GPU memory would wait for all work of the GPU.
#[derive(Debug)]
pub struct Staged<'a> {
    kernels: &'a Kernels,
    copies: [Stream; 2],
    pages: Stream,
    halves: [Half; 2],
    window: DeviceMemory,
    /// Memory of the jobs of the last transfer, for the next one.
    room: Option<DeviceMemory>,
    slot_bytes: u64,
    half_slots: u32,
}

/// Events of one half of the window.
#[derive(Debug)]
struct Half {
    /// The copies of each stream have ended.
    copied: [Event; 2],
    /// The kernel has ended.
    converted: Event,
}

impl<'a> Staged<'a> {
    /// Allocates a window for blocks of `slot_bytes` bytes. Kernels use the SMs that `partition` has for I/O.
    ///
    /// The window has at least two slots, and at most `window_bytes` bytes otherwise.
    pub fn new(
        kernels: &'a Kernels,
        partition: &Partition,
        slot_bytes: u64,
        window_bytes: u64,
    ) -> Result<Staged<'a>, GpuError> {
        if slot_bytes == 0 || !slot_bytes.is_multiple_of(16) {
            return Err(GpuError::Invalid(format!(
                "invalid blocks of {slot_bytes} bytes: expected a multiple of 16"
            )));
        }
        let gpu = kernels.gpu();
        let half_slots = (window_bytes / 2 / slot_bytes).clamp(1, 1 << 16) as u32;
        let half = || {
            let copied = [Event::new(gpu)?, Event::new(gpu)?];
            Ok::<Half, GpuError>(Half { copied, converted: Event::new(gpu)? })
        };
        Ok(Staged {
            kernels,
            copies: [Stream::new(gpu)?, Stream::new(gpu)?],
            pages: partition.io_stream()?,
            halves: [half()?, half()?],
            window: DeviceMemory::new(gpu, 2 * u64::from(half_slots) * slot_bytes)?,
            room: None,
            slot_bytes,
            half_slots,
        })
    }

    /// Returns the bytes of GPU memory that the window takes.
    pub fn window_bytes(&self) -> u64 {
        self.window.bytes()
    }

    /// Returns the GPU of the window.
    pub fn gpu(&self) -> &Gpu {
        self.window.gpu()
    }

    /// Allocates the memory of jobs for transfers of `blocks` blocks. Without it, a transfer that needs more memory than
    /// the last one releases that one, which waits for all streams of the GPU, also for those that wait for the transfer.
    pub fn reserve(&mut self, layout: &DeviceLayout, blocks: usize) -> Result<(), GpuError> {
        let bytes = DeviceJobs::room_bytes(blocks, layout.layout().objects() as usize);
        if self.room.as_ref().is_none_or(|room| room.bytes() < bytes) {
            self.room = Some(DeviceMemory::new(self.gpu(), bytes.next_power_of_two())?);
        }
        Ok(())
    }

    /// Loads blocks from host memory into paged memory and waits until they are there.
    ///
    /// `expected` has the CRC32C of each object of each block, or is empty. Blocks with other checksums are in the
    /// result's mismatches; their pages have the wrong bytes and must not be used. Errors: blocks outside.
    pub fn load(
        &mut self,
        layout: &DeviceLayout,
        blocks: &[HostBlock<'_>],
        expected: &[u32],
    ) -> Result<CopyResult, GpuError> {
        let kind = if expected.is_empty() { CopyKind::Scatter } else { CopyKind::ScatterChecked };
        let jobs = self.jobs(layout, blocks, expected)?;
        self.transfer(Direction::Load, kind, &jobs, blocks)?;
        let result = if expected.is_empty() { Ok(CopyResult::default()) } else { jobs.result() };
        self.room = Some(jobs.into_room());
        result
    }

    /// Saves blocks of paged memory to host memory, waits until they are there, and returns their checksums.
    ///
    /// Errors: blocks outside, host memory that is registered for reading only.
    pub fn save(&mut self, layout: &DeviceLayout, blocks: &[HostBlock<'_>]) -> Result<CopyResult, GpuError> {
        let jobs = self.jobs(layout, blocks, &[])?;
        self.transfer(Direction::Save, CopyKind::GatherChecked, &jobs, blocks)?;
        let result = jobs.result();
        self.room = Some(jobs.into_room());
        result
    }

    /// Uploads the jobs: the slot of a block is its place in the window.
    fn jobs(
        &mut self,
        layout: &DeviceLayout,
        blocks: &[HostBlock<'_>],
        expected: &[u32],
    ) -> Result<DeviceJobs, GpuError> {
        if layout.layout().slot_bytes() != self.slot_bytes {
            return Err(GpuError::Invalid(format!(
                "the window has slots of {} bytes, but blocks have {}",
                self.slot_bytes,
                layout.layout().slot_bytes()
            )));
        }
        let count = 2 * self.half_slots;
        let job = |(index, block): (usize, &HostBlock<'_>)| CopyJob {
            block: block.block,
            slot: (index % count as usize) as u32,
        };
        let jobs: Vec<CopyJob> = blocks.iter().enumerate().map(job).collect();
        let slots = Slots::on_gpu(&self.window, self.slot_bytes, count)?;
        layout.jobs_in(self.room.take(), slots, (&jobs, expected), 0..layout.layout().objects())
    }

    fn transfer(
        &self,
        direction: Direction,
        kind: CopyKind,
        jobs: &DeviceJobs,
        blocks: &[HostBlock<'_>],
    ) -> Result<(), GpuError> {
        let enqueued = self.enqueue(direction, kind, jobs, blocks);
        // Also after an error: memory of the transfer is released when this function returns.
        let [first, second] = [self.copies[0].synchronize(), self.copies[1].synchronize()];
        let ended = self.pages.synchronize();
        enqueued.and(first).and(second).and(ended)
    }

    fn enqueue(
        &self,
        direction: Direction,
        kind: CopyKind,
        jobs: &DeviceJobs,
        blocks: &[HostBlock<'_>],
    ) -> Result<(), GpuError> {
        for (index, chunk) in blocks.chunks(self.half_slots as usize).enumerate() {
            let half = &self.halves[index % 2];
            let start = index as u32 * self.half_slots;
            let part = start..start + chunk.len() as u32;
            match direction {
                Direction::Load => {
                    self.copy_blocks(direction, chunk, index)?;
                    self.convert(half, kind, jobs, part)?;
                }
                Direction::Save => {
                    self.convert(half, kind, jobs, part)?;
                    self.copy_blocks(direction, chunk, index)?;
                }
            }
        }
        Ok(())
    }

    /// Enqueues the kernel of one chunk, behind the last copies of its half.
    fn convert(
        &self,
        half: &Half,
        kind: CopyKind,
        jobs: &DeviceJobs,
        part: Range<u32>,
    ) -> Result<(), GpuError> {
        // Events that were not recorded yet have passed.
        for copied in &half.copied {
            self.pages.wait(copied)?;
        }
        self.kernels.copy_part(&self.pages, kind, jobs, part)?;
        half.converted.record(&self.pages)
    }

    /// Enqueues the copies of one chunk, behind the last kernel of its half; blocks that follow each other in host memory
    /// are one copy.
    fn copy_blocks(
        &self,
        direction: Direction,
        chunk: &[HostBlock<'_>],
        index: usize,
    ) -> Result<(), GpuError> {
        let half = &self.halves[index % 2];
        for stream in &self.copies {
            stream.wait(&half.converted)?;
        }
        let window_start = (index % 2) as u64 * u64::from(self.half_slots) * self.slot_bytes;
        for (number, run) in runs(chunk, self.slot_bytes).into_iter().enumerate() {
            let stream = &self.copies[number % 2];
            let first = &chunk[run.start];
            let bytes = run.len() as u64 * self.slot_bytes;
            let slot = (&self.window, window_start + run.start as u64 * self.slot_bytes);
            let host = (first.memory, first.offset);
            match direction {
                Direction::Load => stream.copy_to_device(host, slot, bytes)?,
                Direction::Save => stream.copy_to_host(slot, host, bytes)?,
            }
        }
        for (stream, copied) in self.copies.iter().zip(&half.copied) {
            copied.record(stream)?;
        }
        Ok(())
    }
}

/// Divides blocks into runs that are contiguous in one memory.
fn runs(blocks: &[HostBlock<'_>], bytes: u64) -> Vec<Range<usize>> {
    let follows = |previous: &HostBlock<'_>, next: &HostBlock<'_>| {
        std::ptr::eq(previous.memory, next.memory) && previous.offset + bytes == next.offset
    };
    let mut found: Vec<Range<usize>> = Vec::new();
    for index in 0..blocks.len() {
        match found.last_mut() {
            Some(run) if follows(&blocks[index - 1], &blocks[index]) => run.end = index + 1,
            _ => found.push(index..index + 1),
        }
    }
    found
}
