//! Kernels of the embedded device code, and their launches.

mod index;
mod layer;

use std::ffi::{CString, c_void};
use std::ops::Range;

use cudarc::driver::sys;

use crate::copy::{ALIGNMENT, CopyArguments, CopyJob, CopyKind, CopyResult, KvLayout};
use crate::gpu::{DeviceMemory, Gpu, GpuError, HostMemory, Stream, call};

pub use index::{GpuIndex, compare_on_gpu};
pub use layer::{HEAD_VALUES, Layer, LayerShape, TOKENS_MULTIPLE};

/// Threads of a block where the grid is not bounded.
const THREADS: u32 = 256;
/// Threads of a block where one block is to use all of its SM.
const THREADS_BOUNDED: u32 = 1024;
/// Blocks of an SM where the grid is not bounded: enough to fill it.
const BLOCKS_PER_SM: u32 = 8;

/// Queues of a ring that one block drives at most, as in `native/ring_kernel.cuh`.
const RING_WARPS_MAX: u32 = 16;

/// The device code that this build has: a fat binary, empty without `nvcc`.
#[cfg(device_code)]
const DEVICE_CODE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/device_code.fatbin"));
#[cfg(not(device_code))]
const DEVICE_CODE: &[u8] = &[];

/// The kernels, loaded on one GPU. Dropping them waits until the GPU has nothing to do.
#[derive(Debug)]
pub struct Kernels {
    gpu: Gpu,
    module: sys::CUmodule,
    copies: [sys::CUfunction; CopyKind::ALL.len()],
    mark_sms: sys::CUfunction,
    ring: sys::CUfunction,
}

// SAFETY: the driver's functions may be called from any thread with any handle.
unsafe impl Send for Kernels {}
// SAFETY: as for `Send`; the handles do not change.
unsafe impl Sync for Kernels {}

/// Slots in GPU memory, or in host memory that the GPU accesses. They lie inside of an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slots {
    /// The GPU's address of slot 0.
    address: u64,
    /// Bytes from one slot to the next.
    stride: u64,
    /// Number of slots.
    count: u32,
}

impl Slots {
    /// Describes `count` slots from the start of GPU memory, which must live until copies have ended.
    ///
    /// # Errors
    /// `Invalid` if the memory has less than `count` times `stride` bytes.
    pub fn on_gpu(memory: &DeviceMemory, stride: u64, count: u32) -> Result<Slots, GpuError> {
        let address = memory.address(0, slots_bytes(stride, count)?)?;
        Ok(Slots { address, stride, count })
    }

    /// Describes `count` slots from the start of host memory, which must live until copies have ended.
    ///
    /// # Errors
    /// `Invalid` if the memory has less than `count` times `stride` bytes.
    pub fn on_host(memory: &HostMemory, stride: u64, count: u32) -> Result<Slots, GpuError> {
        let address = memory.device_address(0, slots_bytes(stride, count)?)?;
        Ok(Slots { address, stride, count })
    }
}

fn slots_bytes(stride: u64, count: u32) -> Result<u64, GpuError> {
    let bytes = stride.checked_mul(u64::from(count));
    bytes
        .ok_or_else(|| GpuError::Invalid(format!("{count} slots of {stride} bytes are more than 2^64 bytes")))
}

/// A layout whose table is in GPU memory, for the pages at one address.
#[derive(Debug)]
pub struct DeviceLayout {
    layout: KvLayout,
    bases: DeviceMemory,
}

/// Jobs in GPU memory, with room for their checksums.
#[derive(Debug)]
pub struct DeviceJobs {
    memory: DeviceMemory,
    arguments: CopyArguments,
    total: usize,
}

impl DeviceLayout {
    /// Stores the layout of pages that are in one allocation. Errors: an allocation that is too small.
    pub fn new(layout: &KvLayout, pages: &DeviceMemory) -> Result<DeviceLayout, GpuError> {
        let address = pages.address(0, layout.end())?;
        // SAFETY: the allocation has all objects of the layout; kernels access it only while the caller keeps it,
        // because releasing GPU memory waits for kernels.
        unsafe { DeviceLayout::at_address(pages.gpu(), layout, address) }
    }

    /// Stores the layout of pages at an address of the GPU; 0 if the layout's offsets are addresses.
    ///
    /// # Safety
    ///
    /// All objects of the layout must be in GPU memory (or memory that the GPU accesses) as long as copies use them.
    pub unsafe fn at_address(gpu: &Gpu, layout: &KvLayout, address: u64) -> Result<DeviceLayout, GpuError> {
        if !address.is_multiple_of(ALIGNMENT) {
            return Err(GpuError::Invalid(format!(
                "invalid address {address:#x} of pages: expected a multiple of 16"
            )));
        }
        if address.checked_add(layout.end()).is_none() {
            return Err(GpuError::Invalid(format!(
                "invalid address {address:#x} of pages of {} bytes: they end beyond 64 bits",
                layout.end()
            )));
        }
        let bases: Vec<u8> =
            layout.offsets().iter().flat_map(|offset| (address + offset).to_ne_bytes()).collect();
        Ok(DeviceLayout { layout: layout.clone(), bases: DeviceMemory::with_contents(gpu, &bases)? })
    }

    /// Returns the layout of the pages.
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Uploads jobs for the given slots. `expected` is empty, or has the CRC32C of each object of each job.
    ///
    /// Errors: no jobs, blocks, slots or objects that do not exist, slots that overlap or are not aligned.
    pub fn jobs(
        &self,
        slots: Slots,
        jobs: &[CopyJob],
        objects: Range<u32>,
        expected: &[u32],
    ) -> Result<DeviceJobs, GpuError> {
        self.jobs_in(None, slots, (jobs, expected), objects)
    }

    /// Uploads jobs as [`DeviceLayout::jobs`] does, into `room` if that is large enough, because the release of GPU
    /// memory waits for all work of the GPU. No work may use `room`.
    pub(crate) fn jobs_in(
        &self,
        room: Option<DeviceMemory>,
        slots: Slots,
        (jobs, expected): (&[CopyJob], &[u32]),
        objects: Range<u32>,
    ) -> Result<DeviceJobs, GpuError> {
        self.layout.check(jobs, slots.count, &objects)?;
        let invalid = |text: String| Err(GpuError::Invalid(text));
        if jobs.is_empty() {
            return invalid("no blocks to copy".to_owned());
        }
        if slots.stride < self.layout.slot_bytes()
            || !(slots.address | slots.stride).is_multiple_of(ALIGNMENT)
        {
            return invalid(format!(
                "invalid slots at {:#x} with a stride of {}: expected multiples of 16 and at least {} bytes",
                slots.address,
                slots.stride,
                self.layout.slot_bytes()
            ));
        }
        let total = jobs.len() * objects.len();
        if !expected.is_empty() && expected.len() != total {
            return invalid(format!("{} expected checksums for {total} objects", expected.len()));
        }
        // Jobs, checksums, mismatches, expected checksums.
        let mut contents: Vec<u8> =
            Vec::with_capacity(DeviceJobs::room_bytes(jobs.len(), objects.len()) as usize);
        for job in jobs {
            contents.extend(job.block.to_ne_bytes());
            contents.extend(job.slot.to_ne_bytes());
        }
        let checksums = contents.len() as u64;
        contents.resize(contents.len() + total * 4, 0);
        let mismatches = contents.len() as u64;
        contents.resize(contents.len() + jobs.len() * 4, 0);
        let expected_at = contents.len() as u64;
        contents.extend(expected.iter().flat_map(|checksum| checksum.to_ne_bytes()));
        let bytes = contents.len() as u64;
        let memory = match room.filter(|room| room.bytes() >= bytes) {
            Some(room) => room,
            None => DeviceMemory::new(self.bases.gpu(), bytes.next_power_of_two())?,
        };
        memory.write(0, &contents)?;
        let start = memory.address(0, contents.len() as u64)?;
        let arguments = CopyArguments {
            bases: self.bases.address(0, self.bases.bytes())?,
            block_stride: self.layout.block_stride(),
            slots: slots.address,
            slot_stride: slots.stride,
            jobs: start,
            expected: if expected.is_empty() { 0 } else { start + expected_at },
            checksums: start + checksums,
            mismatches: start + mismatches,
            job_count: jobs.len() as u32,
            first_object: objects.start,
            objects: objects.len() as u32,
            object_bytes: self.layout.object_bytes(),
        };
        Ok(DeviceJobs { memory, arguments, total })
    }
}

impl DeviceJobs {
    /// Returns the bytes of GPU memory for jobs that have this number of objects each.
    pub(crate) fn room_bytes(jobs: usize, objects: usize) -> u64 {
        (jobs * 12 + jobs * objects * 8) as u64
    }

    /// Returns the memory for other jobs; no copy may use it any longer.
    pub(crate) fn into_room(self) -> DeviceMemory {
        self.memory
    }

    /// Returns the number of jobs.
    pub fn count(&self) -> u32 {
        self.arguments.job_count
    }

    /// Returns the bytes of all objects of all jobs.
    pub fn bytes(&self) -> u64 {
        self.total as u64 * u64::from(self.arguments.object_bytes)
    }

    /// Reads the checksums, after the stream of the copy was synchronized.
    pub fn result(&self) -> Result<CopyResult, GpuError> {
        let read = |offset: u64, count: usize| {
            let mut bytes = vec![0_u8; count * 4];
            self.memory.read(offset, &mut bytes)?;
            let word = |chunk: &[u8]| u32::from_ne_bytes([chunk[0], chunk[1], chunk[2], chunk[3]]);
            Ok::<Vec<u32>, GpuError>(bytes.chunks_exact(4).map(word).collect())
        };
        let jobs = self.arguments.job_count as usize;
        let checksums = read(self.arguments.checksums - self.arguments.jobs, self.total)?;
        let mismatches = read(self.arguments.mismatches - self.arguments.jobs, jobs)?;
        Ok(CopyResult { checksums, mismatches })
    }

    /// Returns the arguments for a range of the jobs.
    fn part(&self, jobs: &Range<u32>) -> CopyArguments {
        let mut arguments = self.arguments;
        let first = u64::from(jobs.start);
        let objects = first * u64::from(arguments.objects);
        arguments.jobs += first * size_of::<CopyJob>() as u64;
        arguments.checksums += objects * 4;
        arguments.mismatches += first * 4;
        if arguments.expected != 0 {
            arguments.expected += objects * 4;
        }
        arguments.job_count = jobs.len() as u32;
        arguments
    }
}

impl Kernels {
    /// Loads the embedded device code. Errors: a build without it, a GPU that it has no version for.
    pub fn load(gpu: &Gpu) -> Result<Kernels, GpuError> {
        if DEVICE_CODE.is_empty() {
            return Err(GpuError::NoDeviceCode);
        }
        Kernels::load_image(gpu, DEVICE_CODE)
    }

    /// Loads device code from a fat binary, a cubin or PTX that was compiled from the sources of this build.
    pub fn load_image(gpu: &Gpu, image: &[u8]) -> Result<Kernels, GpuError> {
        gpu.enter()?;
        // Text (PTX) must end with a zero; binaries have their own length.
        let mut contents = image.to_vec();
        contents.push(0);
        let mut module = std::ptr::null_mut();
        call!(cuModuleLoadData(&mut module, contents.as_ptr().cast()))?;
        let mut kernels = Kernels {
            gpu: gpu.clone(),
            module,
            copies: [std::ptr::null_mut(); CopyKind::ALL.len()],
            mark_sms: std::ptr::null_mut(),
            ring: std::ptr::null_mut(),
        };
        for (index, kind) in CopyKind::ALL.into_iter().enumerate() {
            let name = match kind {
                CopyKind::Gather => "reprise_gather",
                CopyKind::Scatter => "reprise_scatter",
                CopyKind::GatherChecked => "reprise_gather_checked",
                CopyKind::ScatterChecked => "reprise_scatter_checked",
                CopyKind::Checksum => "reprise_checksum",
            };
            kernels.copies[index] = kernels.function(name)?;
        }
        kernels.mark_sms = kernels.function("reprise_mark_sms")?;
        kernels.ring = kernels.function("reprise_ring")?;
        Ok(kernels)
    }

    /// Returns the GPU that the kernels are loaded on.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Enqueues a copy. Its checksums are in [`DeviceJobs::result`] when the stream has been synchronized.
    ///
    /// `jobs`, its layout and its slots must live until then. Errors: jobs outside.
    pub fn copy(&self, stream: &Stream, kind: CopyKind, jobs: &DeviceJobs) -> Result<(), GpuError> {
        self.copy_part(stream, kind, jobs, 0..jobs.count())
    }

    /// Enqueues a copy of some of the jobs, as [`Kernels::copy`] does.
    pub fn copy_part(
        &self,
        stream: &Stream,
        kind: CopyKind,
        jobs: &DeviceJobs,
        part: Range<u32>,
    ) -> Result<(), GpuError> {
        if part.is_empty() || part.end > jobs.count() {
            return Err(GpuError::Invalid(format!("invalid jobs {part:?}: there are {}", jobs.count())));
        }
        let mut arguments = jobs.part(&part);
        let function = self.copies[kind as usize];
        let (blocks, threads) = if stream.is_bounded() {
            (stream.sms(), THREADS_BOUNDED)
        } else {
            (stream.sms() * BLOCKS_PER_SM, THREADS)
        };
        // At most one warp for each object or chunk of 4 KiB.
        let objects = arguments.job_count * arguments.objects;
        let units =
            if kind.has_checksums() { objects } else { objects * arguments.object_bytes.div_ceil(4096) };
        let blocks = blocks.min(units.div_ceil(threads / 32));
        // SAFETY: the kernel has one parameter of this type; its addresses are those of live memory (see `jobs`).
        unsafe { self.launch(stream, function, (blocks, 1, threads), &mut [(&raw mut arguments).cast()]) }
    }

    /// Returns the SMs on which a grid of `blocks` blocks runs on this stream, in ascending order.
    pub fn used_sms(&self, stream: &Stream, blocks: u32) -> Result<Vec<u32>, GpuError> {
        // Numbers of SMs may have gaps.
        let mut count = 1024_u32;
        let memory = DeviceMemory::with_contents(&self.gpu, &vec![0; count as usize * 4])?;
        let mut address = memory.address(0, memory.bytes())?;
        let mut nanoseconds = 200_000_u64;
        let parameters: &mut [*mut c_void] =
            &mut [(&raw mut address).cast(), (&raw mut count).cast(), (&raw mut nanoseconds).cast()];
        // SAFETY: the kernel has these three parameters, and writes only to the first `count` words of `memory`.
        unsafe { self.launch(stream, self.mark_sms, (blocks, 1, THREADS_BOUNDED), parameters) }?;
        stream.synchronize()?;
        let mut marks = vec![0_u8; count as usize * 4];
        memory.read(0, &mut marks)?;
        Ok((0..count).filter(|&sm| marks[sm as usize * 4..][..4] != [0; 4]).collect())
    }

    /// Enqueues the kernel that drives `queues` of a ring, a warp for each, on at most `sms` SMs. It ends when the CPU has
    /// requested an end for all of them.
    ///
    /// Errors: no queues, more queues than 16 for each SM.
    ///
    /// # Safety
    ///
    /// `shared` must be the GPU's address of a ring whose header is valid and whose queues have queue pairs. Their memory
    /// must stay accessible until the kernel has ended, and no other processor may drive these queues meanwhile.
    pub unsafe fn drive_ring(
        &self,
        stream: &Stream,
        shared: u64,
        queues: Range<u32>,
        sms: u32,
    ) -> Result<(), GpuError> {
        let mut count = queues.len() as u32;
        let blocks = sms.min(count);
        if blocks == 0 || count.div_ceil(blocks) > RING_WARPS_MAX {
            return Err(GpuError::Invalid(format!(
                "a ring of {count} queues on {sms} SMs: expected at most {RING_WARPS_MAX} for each SM"
            )));
        }
        let threads = 32 * count.div_ceil(blocks);
        let (mut shared, mut first) = (shared, queues.start);
        let parameters: &mut [*mut c_void] =
            &mut [(&raw mut shared).cast(), (&raw mut first).cast(), (&raw mut count).cast()];
        // SAFETY: the kernel has these three parameters; the caller guarantees the ring.
        unsafe { self.launch(stream, self.ring, (blocks, 1, threads), parameters) }
    }

    fn function(&self, name: &str) -> Result<sys::CUfunction, GpuError> {
        let name =
            CString::new(name).map_err(|_| GpuError::Invalid("a name of a kernel with a zero".to_owned()))?;
        let mut function = std::ptr::null_mut();
        call!(cuModuleGetFunction(&mut function, self.module, name.as_ptr()))?;
        Ok(function)
    }

    /// Enqueues a kernel: columns and rows of its grid, and threads of each block.
    ///
    /// # Safety
    ///
    /// `parameters` must point to values of the types of the kernel's parameters, and addresses among them must be
    /// valid until the kernel has ended.
    unsafe fn launch(
        &self,
        stream: &Stream,
        function: sys::CUfunction,
        (columns, rows, threads): (u32, u32, u32),
        parameters: &mut [*mut c_void],
    ) -> Result<(), GpuError> {
        self.gpu.enter()?;
        call!(cuLaunchKernel(
            function,
            columns,
            rows,
            1,
            threads,
            1,
            1,
            0,
            stream.raw(),
            parameters.as_mut_ptr(),
            std::ptr::null_mut(),
        ))
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        // Kernels that run still use the module.
        let released = self.gpu.synchronize().and_then(|()| call!(cuModuleUnload(self.module)));
        if let Err(error) = released {
            tracing::warn!(%error, "cannot unload the kernels");
        }
    }
}
