//! Transfers of IOCBs between pinned host memory and paged KV, next to layers.
//!
//! [`Method::CopyEngine`] does what the backend `staged` does: the copy engine moves bytes over PCIe, and a kernel copies
//! them between a window in GPU memory and the pages. [`Method::Kernel`] has no window: the kernel itself accesses host
//! memory, and occupies its multiprocessors for as long as PCIe takes.

use std::fmt;

use super::gpu::{IOCB_BLOCKS, IOCB_BYTES, OBJECT_BYTES};
use crate::copy::{CopyJob, CopyKind, KvLayout, KvShape};
use crate::gpu::{DeviceMemory, Event, GpuError, HostMemory, Stream};
use crate::kernels::{DeviceJobs, DeviceLayout, Kernels, Slots};

use reprise_policy::slack::Direction;

/// IOCBs between two orders of a copy and a kernel: 8 MiB, about 0.15 ms over PCIe 5.0.
const CHUNK_IOCBS: u32 = 8;

/// What moves bytes between host memory and the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// The copy engine, with a window in GPU memory.
    CopyEngine,
    /// Kernels that access host memory, on at most `sms` multiprocessors unless a launch is without limits.
    Kernel {
        /// Multiprocessors of a limited launch.
        sms: u32,
    },
}

impl fmt::Display for Method {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Method::CopyEngine => "the copy engine and kernels",
            Method::Kernel { .. } => "kernels that access host memory",
        })
    }
}

/// Streams of launches: all work of a launch lies between two points of `kernels`.
#[derive(Debug)]
pub(super) struct Lane {
    pub(super) kernels: Stream,
    copies: Stream,
}

impl Lane {
    pub(super) fn new(kernels: Stream) -> Result<Lane, GpuError> {
        let copies = Stream::new(kernels.gpu())?;
        Ok(Lane { kernels, copies })
    }
}

/// Memory of one direction: host memory, and a window of the same size for the copy engine.
#[derive(Debug)]
struct Side {
    jobs: DeviceJobs,
    host: HostMemory,
    window: Option<DeviceMemory>,
}

/// Pages and memory of transfers in both directions.
#[derive(Debug)]
pub(super) struct Transfers<'a> {
    kernels: &'a Kernels,
    reads: Side,
    writes: Side,
    /// Orders the two streams of a lane; a wait counts for the last record before it.
    order: Event,
    _layout: DeviceLayout,
    _pages: DeviceMemory,
}

impl<'a> Transfers<'a> {
    /// Allocates memory of `iocbs` IOCBs in each direction.
    pub(super) fn new(kernels: &'a Kernels, method: Method, iocbs: u32) -> Result<Transfers<'a>, GpuError> {
        let gpu = kernels.gpu();
        let blocks = iocbs * IOCB_BLOCKS;
        let shape = KvShape { layers: 1, parts: 2, blocks: 2 * blocks, object_bytes: OBJECT_BYTES };
        let pages = DeviceMemory::new(gpu, shape.bytes())?;
        let layout = DeviceLayout::new(&KvLayout::split(shape)?, &pages)?;
        let bytes = u64::from(blocks) * shape.block_bytes();
        // Reads go to the first half of the pages, writes come from the second one.
        let side = |half: u32| {
            let host = HostMemory::new(gpu, bytes)?;
            let window = match method {
                Method::CopyEngine => Some(DeviceMemory::new(gpu, bytes)?),
                Method::Kernel { .. } => None,
            };
            let slots = match &window {
                Some(window) => Slots::on_gpu(window, shape.block_bytes(), blocks)?,
                None => Slots::on_host(&host, shape.block_bytes(), blocks)?,
            };
            let job = |slot: u32| CopyJob { block: half * blocks + slot, slot };
            let jobs: Vec<CopyJob> = (0..blocks).map(job).collect();
            let jobs = layout.jobs(slots, &jobs, 0..shape.objects(), &[])?;
            Ok::<Side, GpuError>(Side { jobs, host, window })
        };
        let (reads, writes) = (side(0)?, side(1)?);
        Ok(Transfers { kernels, reads, writes, order: Event::new(gpu)?, _layout: layout, _pages: pages })
    }

    /// Enqueues a launch on the streams of a lane. Launches with more IOCBs than there is memory for repeat transfers.
    pub(super) fn launch(&self, lane: &Lane, direction: Direction, iocbs: u32) -> Result<(), GpuError> {
        let side = match direction {
            Direction::Read => &self.reads,
            Direction::Write => &self.writes,
        };
        let most = side.jobs.count() / IOCB_BLOCKS;
        let mut rest = iocbs;
        while rest > 0 {
            let part = rest.min(most);
            match &side.window {
                Some(window) => self.through_window(lane, (side, window), direction, part)?,
                None => {
                    let blocks = 0..part * IOCB_BLOCKS;
                    self.kernels.copy_part(&lane.kernels, kind(direction), &side.jobs, blocks)?;
                }
            }
            rest -= part;
        }
        Ok(())
    }

    /// Enqueues `iocbs` IOCBs in chunks, behind the work of the lane: a kernel converts one while the next one is copied.
    fn through_window(
        &self,
        lane: &Lane,
        (side, window): (&Side, &DeviceMemory),
        direction: Direction,
        iocbs: u32,
    ) -> Result<(), GpuError> {
        // The launch before has the same window.
        self.follow(&lane.copies, &lane.kernels)?;
        let mut start = 0;
        while start < iocbs {
            let end = iocbs.min(start + CHUNK_IOCBS);
            let blocks = start * IOCB_BLOCKS..end * IOCB_BLOCKS;
            let offset = u64::from(start) * u64::from(IOCB_BYTES);
            let bytes = u64::from(end - start) * u64::from(IOCB_BYTES);
            if direction == Direction::Read {
                lane.copies.copy_to_device((&side.host, offset), (window, offset), bytes)?;
                self.follow(&lane.kernels, &lane.copies)?;
                self.kernels.copy_part(&lane.kernels, CopyKind::Scatter, &side.jobs, blocks)?;
            } else {
                self.kernels.copy_part(&lane.kernels, CopyKind::Gather, &side.jobs, blocks)?;
                self.follow(&lane.copies, &lane.kernels)?;
                lane.copies.copy_to_host((window, offset), (&side.host, offset), bytes)?;
            }
            start = end;
        }
        self.follow(&lane.kernels, &lane.copies)
    }

    /// Delays later work of a stream until the work that another one has now is done.
    fn follow(&self, later: &Stream, earlier: &Stream) -> Result<(), GpuError> {
        self.order.record(earlier)?;
        later.wait(&self.order)
    }
}

fn kind(direction: Direction) -> CopyKind {
    match direction {
        Direction::Read => CopyKind::Scatter,
        Direction::Write => CopyKind::Gather,
    }
}
