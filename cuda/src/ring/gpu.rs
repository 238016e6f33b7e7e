//! The GPU as the processor of a ring: memory that both access, and a kernel with a warp for each queue.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use reprise_buffers::{Arena, ArenaConfig, HugePolicy, PAGE_BYTES};
use reprise_nvme::spec::offset;
use reprise_nvme::{Backing, Controller};

use crate::gpu::{DeviceMemory, Gpu, GpuError, HostMemory, Partition, Stream};
use crate::kernels::Kernels;
use crate::ring::bench::{self, Rig};
use crate::ring::{
    BenchSettings, DRIVEN, Doorbells, OwnedQueue, Request, Ring, RingError, RingFigures, RingMemory, Shared,
    WorkMemory,
};

impl RingMemory {
    /// Allocates zeroed host memory of at least `bytes` bytes and registers it for a GPU.
    ///
    /// # Errors
    /// `Memory` if the machine has too little; `Gpu` if the memory cannot be registered.
    pub fn registered(gpu: &Gpu, bytes: usize) -> Result<RingMemory, RingError> {
        let bytes = bytes.next_multiple_of(PAGE_BYTES) as u64;
        let arena = Arena::new(&ArenaConfig { bytes, region_bytes: bytes, huge: HugePolicy::Never })?;
        let span = arena.span(0, 0, bytes)?;
        let memory = HostMemory::register(gpu, &span)?;
        let address = memory.device_address(0, bytes)?;
        // SAFETY: the GPU reaches the bytes at this address while the registration lives, which is kept.
        unsafe { RingMemory::of_processor(span, address, Arc::new(memory)) }
    }
}

impl WorkMemory {
    /// Allocates zeroed GPU memory.
    ///
    /// # Errors
    /// `Gpu` if the GPU has too little.
    pub fn on_gpu(gpu: &Gpu, bytes: usize) -> Result<WorkMemory, RingError> {
        let memory = DeviceMemory::with_contents(gpu, &vec![0; bytes])?;
        let address = memory.address(0, bytes as u64)?;
        // SAFETY: the GPU reaches the bytes while the allocation lives, which is kept; its addresses are multiples of
        // 256, and only the ring uses them.
        Ok(unsafe { WorkMemory::of_processor(address, bytes, Arc::new(memory)) })
    }
}

/// A kernel that drives queues of a ring. Dropping it parks them, waits for the kernel, and only then releases what the
/// kernel uses: the memory of the ring and of its queue pairs, and the kernels, which it borrows.
///
/// The kernel runs until then. The driver releases memory and kernels of a GPU only when the GPU has nothing to do, so
/// while a runner lives, dropping any [`HostMemory`], [`DeviceMemory`] or [`Kernels`] of the same GPU waits for ever, and
/// so does [`Gpu::synchronize`]. The owner of a runner allocates before its start, keeps buffers for later use, as
/// [`Staged`](crate::staged::Staged) does, and drops the runner first.
#[derive(Debug)]
pub struct GpuRunner<'a> {
    shared: Arc<Shared>,
    queues: Range<usize>,
    stream: Stream,
    /// They must stay loaded while the kernel runs.
    _kernels: &'a Kernels,
}

impl<'a> GpuRunner<'a> {
    /// Starts the kernel for queues that have a queue pair, on at most `sms` SMs. All memory of the ring must be
    /// registered for the GPU: see [`RingMemory::registered`].
    ///
    /// # Errors
    /// `Invalid` if a queue has no queue pair, or is driven; `Gpu`.
    pub fn start(
        ring: &Ring,
        queues: Range<usize>,
        kernels: &'a Kernels,
        stream: Stream,
        sms: u32,
    ) -> Result<GpuRunner<'a>, RingError> {
        let shared = Arc::clone(&ring.shared);
        for queue in queues.clone() {
            if ring.queues.get(queue).is_none_or(|state| state.queue.is_none()) {
                return Err(RingError::Invalid(format!("queue {queue} without a queue pair")));
            }
        }
        let release = |claimed: Range<usize>| {
            for queue in claimed {
                shared.request(queue, Request::Park);
                shared.state(queue).store(super::PARKED, Ordering::Release);
            }
        };
        for queue in queues.clone() {
            if !shared.claim(queue, DRIVEN) {
                release(queues.start..queue);
                return Err(RingError::Invalid(format!("queue {queue} is driven already")));
            }
            shared.request(queue, Request::Run);
        }
        let (first, last) = (queues.start as u32, queues.end as u32);
        // SAFETY: `Ring::new` has written the header, and `init_queue` the queues with addresses that stay valid while
        // `shared` has its `RingQueue`. The claims above keep other processors away. Dropping the runner waits for the
        // kernel, and the runner keeps the memory of the ring.
        let started =
            unsafe { kernels.drive_ring(&stream, shared.memory.processor_address(), first..last, sms) };
        if let Err(error) = started {
            release(queues);
            return Err(error.into());
        }
        Ok(GpuRunner { shared, queues, stream, _kernels: kernels })
    }
}

impl Drop for GpuRunner<'_> {
    fn drop(&mut self) {
        // Before the fields are dropped: releasing memory waits for the kernel, which waits for this request.
        for queue in self.queues.clone() {
            self.shared.request(queue, Request::Park);
        }
        if let Err(error) = self.stream.synchronize() {
            tracing::warn!(%error, "the kernel of a ring has failed");
        }
    }
}

/// Keeps registers of an emulated controller mapped while they are registered.
struct Registers<B: Backing>(#[allow(dead_code, reason = "kept for its drop")] Arc<B>);

/// Measures the kernel: reads from an emulated controller in this process, with a warp for each queue pair on the SMs
/// that `partition` has for I/O. Queues, descriptors and doorbells are in host memory that is registered for the GPU.
///
/// # Errors
/// `Invalid` for a setting outside its range or a transfer that fails; `Memory`, `Nvme`, `Gpu`.
pub fn measure_on_gpu(
    kernels: &Kernels,
    partition: &Partition,
    settings: &BenchSettings,
) -> Result<RingFigures, RingError> {
    bench::check(settings)?;
    with_kernel(kernels, partition, settings, |rig, ring| rig.drive(ring, settings))
}

/// Runs a function on a ring that the kernel drives.
pub(super) fn with_kernel<T>(
    kernels: &Kernels,
    partition: &Partition,
    settings: &BenchSettings,
    run: impl FnOnce(&Rig, &mut Ring) -> Result<T, RingError>,
) -> Result<T, RingError> {
    let gpu = kernels.gpu();
    let rig = Rig::start(settings, |bytes| RingMemory::registered(gpu, bytes))?;
    let ring_settings = bench::ring_settings(settings);
    let (shared, work) = ring_settings.memory_bytes()?;
    let mut ring =
        Ring::new(&ring_settings, RingMemory::registered(gpu, shared)?, WorkMemory::on_gpu(gpu, work)?)?;
    connect_gpu(&mut ring, gpu, &rig.controller, &rig.owned)?;
    let runner =
        GpuRunner::start(&ring, 0..settings.queues, kernels, partition.io_stream()?, partition.io_sms())?;
    let result = run(&rig, &mut ring);
    drop(runner);
    rig.stop()?;
    result
}

/// Gives a ring queue pairs of a controller, with doorbells that the GPU reaches: their pages are registered for it.
///
/// # Errors
/// `Invalid` if the registers are not mapped, or for queue pairs that do not fit the ring; `Gpu`.
pub(crate) fn connect_gpu<B: Backing>(
    ring: &mut Ring,
    gpu: &Gpu,
    controller: &Controller<B>,
    queues: &[OwnedQueue<B>],
) -> Result<(), RingError> {
    let registers = Arc::new(register_doorbells(gpu, controller, queues)?);
    let base = registers.device_address(0, registers.bytes())?;
    let reached = base + offset::DOORBELLS as u64..base + registers.bytes();
    for (index, queue) in queues.iter().enumerate() {
        let address = |at: usize| registers.device_address(at as u64, 4);
        let (submission, completion) = queue.doorbell_offsets();
        let words = (address(submission)?, address(completion)?);
        // SAFETY: the GPU may store to doorbells at any time, and reaches them while the registration lives.
        let doorbells =
            unsafe { Doorbells::of_processor(words, reached.clone(), Arc::clone(&registers) as Arc<_>) };
        ring.init_queue(index, queue.with_doorbells(doorbells)?)?;
    }
    Ok(())
}

/// Registers the pages with the doorbells of queue pairs for the GPU.
fn register_doorbells<B: Backing>(
    gpu: &Gpu,
    controller: &Controller<B>,
    queues: &[OwnedQueue<B>],
) -> Result<HostMemory, RingError> {
    let backing = Arc::clone(controller.backing());
    let unmapped = || RingError::Invalid("registers that are not mapped".to_owned());
    let base = backing.register_address(0).ok_or_else(unmapped)?;
    let last = queues.iter().map(|queue| queue.doorbell_offsets().1).max().unwrap_or(offset::DOORBELLS);
    let bytes = (last + 4).next_multiple_of(PAGE_BYTES) as u64;
    let keep: Box<dyn Any + Send + Sync> = Box::new(Registers(backing));
    // SAFETY: registers are mapped in whole pages, and stay mapped while the backing lives, which `keep` has.
    let registered = unsafe { HostMemory::register_range(gpu, base.as_ptr().cast(), bytes, true, keep) };
    registered.map_err(|error: GpuError| error.into())
}
