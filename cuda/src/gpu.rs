//! The GPU's driver: devices, streams, events, memory and SM partitions.
//!
//! The driver's library is loaded at run time. A machine without driver or GPU, or with an old driver, is an error of
//! [`Gpu::open`] with its remedy; nothing here panics for it.

pub(crate) mod driver;
mod error;
mod memory;
mod partition;
mod stream;

use std::ffi::{CStr, c_char, c_int};
use std::sync::Arc;

use cudarc::driver::sys;
use sys::CUdevice_attribute_enum as Attribute;
use sys::CUstreamCaptureMode_enum as CaptureMode;
use sys::CUstreamWaitValue_flags_enum as WaitFlags;

pub(crate) use driver::call;
pub use error::{DRIVER_VERSION_MIN, GpuError};
pub use memory::{DeviceMemory, HostMemory};
pub use partition::{Partition, PartitionMethod, SmShare};
pub use stream::{Event, Stream};

/// Description of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuInfo {
    /// Number of the GPU, from 0.
    pub ordinal: u32,
    /// Product name.
    pub name: String,
    /// PCI address, for example `0000:65:00.0`.
    pub pci_address: String,
    /// Compute capability: major, minor.
    pub compute_capability: (u32, u32),
    /// Number of SMs.
    pub sms: u32,
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// Version of CUDA that the driver supports: major, minor.
    pub driver_cuda: (u32, u32),
}

/// A GPU with its primary context, which all handles of this process share. Clones refer to the same GPU.
#[derive(Clone, Debug)]
pub struct Gpu {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    device: sys::CUdevice,
    context: sys::CUcontext,
    info: GpuInfo,
    /// Flags of waits for words, or why streams cannot wait.
    stream_waits: Result<u32, String>,
    /// Stream of synchronous copies. The default stream would wait for streams of the engine, also for those that wait for a
    /// request that needs the copy.
    copies: sys::CUstream,
}

// SAFETY: the driver's functions may be called from any thread with any context handle.
unsafe impl Send for Inner {}
// SAFETY: as for `Send`; the fields do not change.
unsafe impl Sync for Inner {}

impl Gpu {
    /// Returns the number of GPUs. Errors: no driver, an old driver, no GPU.
    pub fn count() -> Result<u32, GpuError> {
        driver::load()?;
        count_devices()
    }

    /// Opens a GPU. Errors: no driver, an old driver, no GPU, fewer GPUs than `ordinal` requires.
    pub fn open(ordinal: u32) -> Result<Gpu, GpuError> {
        let driver_cuda = driver::load()?;
        let count = count_devices()?;
        if ordinal >= count {
            return Err(GpuError::NoSuchDevice { ordinal, count });
        }
        let mut device = 0;
        call!(cuDeviceGet(&mut device, ordinal as c_int))?;
        let info = describe(device, ordinal, driver_cuda)?;
        let mut context = std::ptr::null_mut();
        call!(cuDevicePrimaryCtxRetain(&mut context, device))?;
        let stream_waits = stream_waits(device)?;
        let mut inner = Inner { device, context, info, stream_waits, copies: std::ptr::null_mut() };
        call!(cuCtxSetCurrent(inner.context))?;
        call!(cuStreamCreate(&mut inner.copies, sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32))?;
        Ok(Gpu { inner: Arc::new(inner) })
    }

    /// Returns the description of the GPU.
    pub fn info(&self) -> &GpuInfo {
        &self.inner.info
    }

    /// Returns the free bytes of GPU memory.
    pub fn free_bytes(&self) -> Result<u64, GpuError> {
        self.enter()?;
        let (mut free, mut total) = (0, 0);
        call!(cuMemGetInfo_v2(&mut free, &mut total))?;
        Ok(free as u64)
    }

    /// Waits for all work of the GPU's context.
    pub fn synchronize(&self) -> Result<(), GpuError> {
        self.enter()?;
        call!(cuCtxSynchronize())
    }

    /// Makes the context current for this thread, as most functions of the driver require.
    pub(crate) fn enter(&self) -> Result<(), GpuError> {
        call!(cuCtxSetCurrent(self.inner.context))
    }

    /// Makes the context current for a thread of this crate, and keeps its calls out of the engine's captures.
    ///
    /// A graph that another thread captures in the global mode, which is the default, forbids calls such as queries of
    /// events to all threads: they fail, and also invalidate the capture. Threads in the relaxed mode are exempt. They
    /// must not touch streams that are being captured.
    pub(crate) fn enter_own_thread(&self) -> Result<(), GpuError> {
        self.enter()?;
        exchange_capture_mode(CaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED).map(|_| ())
    }

    /// Makes the context current for a thread of the engine, and keeps its calls out of captures until the guard is
    /// dropped: see [`enter_own_thread`](Self::enter_own_thread).
    pub(crate) fn enter_outside_captures(&self) -> Result<CaptureGuard, GpuError> {
        self.enter()?;
        Ok(CaptureGuard { before: exchange_capture_mode(CaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED)? })
    }

    /// Returns the flags of waits for words, as they were when the GPU was opened.
    ///
    /// # Errors
    /// `NoStreamWaits` with the reason.
    pub(crate) fn stream_waits(&self) -> Result<u32, GpuError> {
        self.inner.stream_waits.clone().map_err(|reason| GpuError::NoStreamWaits { reason })
    }

    /// Returns the stream of synchronous copies.
    fn copies(&self) -> sys::CUstream {
        self.inner.copies
    }

    fn device(&self) -> sys::CUdevice {
        self.inner.device
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let stream = self.copies;
        if !stream.is_null()
            && let Err(error) =
                call!(cuCtxSetCurrent(self.context)).and_then(|()| call!(cuStreamDestroy_v2(stream)))
        {
            tracing::warn!(%error, "cannot release the stream of copies");
        }
        if let Err(error) = call!(cuDevicePrimaryCtxRelease_v2(self.device)) {
            tracing::warn!(%error, "cannot release the context of a GPU");
        }
    }
}

fn count_devices() -> Result<u32, GpuError> {
    let mut count = 0;
    call!(cuDeviceGetCount(&mut count))?;
    match u32::try_from(count) {
        Ok(0) | Err(_) => Err(GpuError::NoDevice),
        Ok(count) => Ok(count),
    }
}

fn describe(device: sys::CUdevice, ordinal: u32, driver_cuda: (u32, u32)) -> Result<GpuInfo, GpuError> {
    let attribute = |which: Attribute| {
        let mut value = 0;
        call!(cuDeviceGetAttribute(&mut value, which, device))?;
        Ok::<u32, GpuError>(u32::try_from(value).unwrap_or(0))
    };
    let mut name = [0 as c_char; 128];
    call!(cuDeviceGetName(name.as_mut_ptr(), name.len() as c_int, device))?;
    let mut address = [0 as c_char; 32];
    call!(cuDeviceGetPCIBusId(address.as_mut_ptr(), address.len() as c_int, device))?;
    let mut memory_bytes = 0;
    call!(cuDeviceTotalMem_v2(&mut memory_bytes, device))?;
    Ok(GpuInfo {
        ordinal,
        name: text(&name),
        pci_address: text(&address),
        compute_capability: (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        sms: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        memory_bytes: memory_bytes as u64,
        driver_cuda,
    })
}

/// The mode of captures that a thread had before.
pub(crate) struct CaptureGuard {
    before: CaptureMode,
}

impl Drop for CaptureGuard {
    fn drop(&mut self) {
        if let Err(error) = exchange_capture_mode(self.before) {
            tracing::warn!(%error, "cannot restore the mode of captures of a thread");
        }
    }
}

/// Sets the mode in which captures concern this thread; returns the mode before.
fn exchange_capture_mode(mode: CaptureMode) -> Result<CaptureMode, GpuError> {
    let mut mode = mode;
    call!(cuThreadExchangeStreamCaptureMode(&mut mode))?;
    Ok(mode)
}

/// Returns the flags of waits for words, or why streams of a device cannot wait.
fn stream_waits(device: sys::CUdevice) -> Result<Result<u32, String>, GpuError> {
    if let Some(symbol) = driver::first_missing(driver::STREAM_WAITS) {
        return Ok(Err(format!("the driver lacks {symbol}")));
    }
    let attribute = |which: Attribute| {
        let mut value = 0;
        call!(cuDeviceGetAttribute(&mut value, which, device))?;
        Ok::<c_int, GpuError>(value)
    };
    let writes = RemoteWrites {
        has_flush: attribute(Attribute::CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES)? != 0,
        ordering: attribute(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING)?,
    };
    // The driver reads the variable once, too: when it is initialised.
    let connections = std::env::var(CONNECTIONS).ok();
    Ok(wait_flags(connections.as_deref(), writes))
}

/// How writes of other devices to memory of a GPU become visible to it.
#[derive(Clone, Copy, Debug)]
struct RemoteWrites {
    /// A wait of a stream can flush them.
    has_flush: bool,
    /// Scope in which they need no flush: `CUGPUDirectRDMAWritesOrdering`, 0 for none.
    ordering: c_int,
}

/// Returns the flags of waits for words, or why streams must not wait.
fn wait_flags(connections: Option<&str>, writes: RemoteWrites) -> Result<u32, String> {
    if let Some(reason) = too_few_queues(connections) {
        return Err(reason);
    }
    match writes {
        RemoteWrites { has_flush: true, .. } => {
            Ok(WaitFlags::CU_STREAM_WAIT_VALUE_GEQ as u32 | WaitFlags::CU_STREAM_WAIT_VALUE_FLUSH as u32)
        }
        RemoteWrites { ordering: 0, .. } => Err(
            "it neither orders writes of other devices nor flushes them for a stream, so work behind a wait could read \
             old bytes: use a GPU of compute capability 8.0 or later with the current driver"
                .to_owned(),
        ),
        RemoteWrites { .. } => Ok(WaitFlags::CU_STREAM_WAIT_VALUE_GEQ as u32),
    }
}

/// Converts a string of the driver, which ends with a zero inside its buffer.
fn text(buffer: &[c_char]) -> String {
    let bytes: Vec<u8> = buffer.iter().map(|&byte| byte.to_ne_bytes()[0]).collect();
    CStr::from_bytes_until_nul(&bytes).map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
}
/// Variable with the number of hardware queues of a process.
const CONNECTIONS: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
/// Hardware queues of a process without the variable.
const CONNECTIONS_DEFAULT: u32 = 8;

/// Returns why streams must not wait for words, if the variable leaves fewer queues than the driver's default.
///
/// Streams of one queue run in its order. With one queue, copies waited behind the stream that waited for them on an H100.
fn too_few_queues(connections: Option<&str>) -> Option<String> {
    let connections = connections?.trim().parse::<u32>().ok()?;
    (connections < CONNECTIONS_DEFAULT).then(|| {
        format!(
            "{CONNECTIONS} is {connections}, so a stream that waits could hold up the copies that it waits for: start the process with {CONNECTIONS_DEFAULT} or more, or without the variable"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stream_waits_need_a_flush_or_ordered_writes() {
        let flags = |has_flush, ordering| wait_flags(None, RemoteWrites { has_flush, ordering });
        let reason = flags(false, 0).expect_err("bytes could be old");
        assert!(reason.contains("neither orders writes") && reason.contains("use a GPU"), "{reason}");
        let flush = WaitFlags::CU_STREAM_WAIT_VALUE_FLUSH as u32;
        assert_eq!(flags(true, 0).expect("a flush") & flush, flush);
        assert_eq!(flags(false, 100).expect("ordered for the owner") & flush, 0);
        let few = wait_flags(Some("1"), RemoteWrites { has_flush: true, ordering: 200 });
        assert!(few.expect_err("few queues").contains(CONNECTIONS));
    }

    #[test]
    fn streams_do_not_wait_with_few_hardware_queues() {
        for few in ["1", " 7"] {
            let reason = too_few_queues(Some(few)).expect("too few");
            assert!(
                reason.contains("CUDA_DEVICE_MAX_CONNECTIONS is") && reason.contains("8 or more"),
                "{reason}"
            );
        }
        for enough in [None, Some("8"), Some("32"), Some("many")] {
            assert_eq!(too_few_queues(enough), None);
        }
    }
}
