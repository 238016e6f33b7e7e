//! Streams, which order work of a GPU, and events, which mark points in them.

use std::ffi::c_void;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys;

use super::driver::call;
use super::partition::GreenContext;
use super::{DeviceMemory, Gpu, GpuError, HostMemory};

/// A queue of GPU work. Work of different streams may run at the same time.
#[derive(Debug)]
pub struct Stream {
    raw: sys::CUstream,
    gpu: Gpu,
    sms: u32,
    bounded: bool,
    /// The engine created the stream and destroys it.
    is_foreign: bool,
    // Released after the stream.
    _green: Option<Arc<GreenContext>>,
}

// SAFETY: the driver's functions may be called from any thread with any stream handle.
unsafe impl Send for Stream {}
// SAFETY: as for `Send`; the driver orders concurrent calls for one stream.
unsafe impl Sync for Stream {}

/// A point in a stream.
#[derive(Debug)]
pub struct Event {
    raw: sys::CUevent,
    gpu: Gpu,
}

// SAFETY: the driver's functions may be called from any thread with any event handle.
unsafe impl Send for Event {}
// SAFETY: as for `Send`.
unsafe impl Sync for Event {}

impl Stream {
    /// Creates a stream whose kernels may use all SMs.
    pub fn new(gpu: &Gpu) -> Result<Stream, GpuError> {
        let sms = gpu.info().sms;
        gpu.enter()?;
        let mut raw = std::ptr::null_mut();
        call!(cuStreamCreate(&mut raw, sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32))?;
        Ok(Stream { raw, gpu: gpu.clone(), sms, bounded: false, _green: None, is_foreign: false })
    }

    /// Uses a stream of the engine, such as PyTorch's current stream; dropping the value leaves the stream as it is. The
    /// null handle is the legacy default stream.
    ///
    /// # Safety
    /// `raw` must be a stream of the primary context of the GPU, and stay one until the value and all its clones are gone.
    pub unsafe fn of_engine(gpu: &Gpu, raw: *mut c_void) -> Stream {
        let (sms, gpu) = (gpu.info().sms, gpu.clone());
        Stream { raw: raw.cast(), gpu, sms, bounded: false, is_foreign: true, _green: None }
    }

    /// Creates a stream of the highest priority whose copy kernels run as a grid of at most `sms` blocks, so on at most as many SMs.
    pub(super) fn bounded(gpu: &Gpu, sms: u32) -> Result<Stream, GpuError> {
        let priority = highest_priority(gpu)?;
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        call!(cuStreamCreateWithPriority(&mut raw, flags, priority))?;
        Ok(Stream { raw, gpu: gpu.clone(), sms, bounded: true, _green: None, is_foreign: false })
    }

    /// Takes over a stream of a green context with `sms` SMs.
    pub(super) fn of_green(gpu: &Gpu, raw: sys::CUstream, sms: u32, green: Arc<GreenContext>) -> Stream {
        Stream { raw, gpu: gpu.clone(), sms, bounded: false, _green: Some(green), is_foreign: false }
    }

    /// Returns the GPU of the stream.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Returns the number of SMs that copy kernels of this stream use at most.
    pub fn sms(&self) -> u32 {
        self.sms
    }

    /// Reports whether a bounded grid limits the SMs, in contrast to a green context or no limit.
    pub fn is_bounded(&self) -> bool {
        self.bounded
    }

    /// Waits until all work of the stream has ended. Reports errors of its kernels.
    pub fn synchronize(&self) -> Result<(), GpuError> {
        let _guard = self.gpu.enter_outside_captures()?;
        call!(cuStreamSynchronize(self.raw))
    }

    /// Reports whether all work of the stream has ended.
    pub fn is_idle(&self) -> Result<bool, GpuError> {
        let _guard = self.gpu.enter_outside_captures()?;
        // SAFETY: the stream is live while `self` is.
        let result = unsafe { sys::cuStreamQuery(self.raw) };
        if result == sys::CUresult::CUDA_ERROR_NOT_READY {
            return Ok(false);
        }
        super::driver::check("cuStreamQuery", result).map(|()| true)
    }

    /// Delays later work of this stream until the event has passed.
    pub fn wait(&self, event: &Event) -> Result<(), GpuError> {
        self.gpu.enter()?;
        call!(cuStreamWaitEvent(self.raw, event.raw, 0))
    }

    /// Errors if the stream is being captured into a graph, whose replays would find the word advanced.
    ///
    /// # Errors
    /// `Invalid` with the remedy.
    pub fn require_no_capture(&self) -> Result<(), GpuError> {
        self.gpu.enter()?;
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        call!(cuStreamIsCapturing(self.raw, &mut status))?;
        if status == sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
            return Ok(());
        }
        Err(GpuError::Invalid(
            "the stream is being captured into a graph: submit requests of layers outside of the capture"
                .to_owned(),
        ))
    }

    /// Runs a function while this stream is captured in the global mode, which forbids unsafe calls to all threads that have
    /// not left it. The graph is empty and is discarded.
    ///
    /// # Errors
    /// The capture was invalidated by a call.
    pub fn while_captured<T>(&self, run: impl FnOnce() -> T) -> Result<T, GpuError> {
        self.gpu.enter()?;
        call!(cuStreamBeginCapture_v2(
            self.raw,
            sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_GLOBAL
        ))?;
        let result = run();
        let mut graph = std::ptr::null_mut();
        call!(cuStreamEndCapture(self.raw, &mut graph))?;
        call!(cuGraphDestroy(graph))?;
        Ok(result)
    }

    /// Delays later work of this stream until the word at `offset` of the memory has reached `value`, in the cyclic order
    /// of 32-bit numbers. The word must be advanced: nothing else ends the wait.
    ///
    /// # Errors
    /// `NoStreamWaits`; a range outside.
    pub fn wait_word(&self, word: (&HostMemory, u64), value: u32) -> Result<(), GpuError> {
        self.require_no_capture()?;
        let flags = self.gpu.stream_waits()?;
        let address = word.0.device_address(word.1, 4)?;
        self.gpu.enter()?;
        call!(cuStreamWaitValue32_v2(self.raw, address, value, flags))
    }

    /// Enqueues a copy of `bytes` bytes from pinned host memory to GPU memory. Errors: a range outside.
    pub fn copy_to_device(
        &self,
        source: (&HostMemory, u64),
        target: (&DeviceMemory, u64),
        bytes: u64,
    ) -> Result<(), GpuError> {
        let from = source.0.pointer(source.1, bytes)?;
        let to = target.0.address(target.1, bytes)?;
        self.gpu.enter()?;
        call!(cuMemcpyHtoDAsync_v2(to, from.cast_const().cast(), bytes as usize, self.raw))
    }

    /// Enqueues a copy of `bytes` bytes from GPU memory to pinned host memory. Errors: a range outside, memory that is
    /// registered for reading only.
    pub fn copy_to_host(
        &self,
        source: (&DeviceMemory, u64),
        target: (&HostMemory, u64),
        bytes: u64,
    ) -> Result<(), GpuError> {
        let from = source.0.address(source.1, bytes)?;
        let to = target.0.pointer(target.1, bytes)?;
        target.0.require_writable()?;
        self.gpu.enter()?;
        call!(cuMemcpyDtoHAsync_v2(to.cast(), from, bytes as usize, self.raw))
    }

    /// Enqueues a copy inside GPU memory. The ranges must not overlap. Errors: a range outside.
    pub fn copy_on_device(
        &self,
        source: (&DeviceMemory, u64),
        target: (&DeviceMemory, u64),
        bytes: u64,
    ) -> Result<(), GpuError> {
        let from = source.0.address(source.1, bytes)?;
        let to = target.0.address(target.1, bytes)?;
        self.gpu.enter()?;
        call!(cuMemcpyDtoDAsync_v2(to, from, bytes as usize, self.raw))
    }

    /// Enqueues a fill of GPU memory with one byte value. Errors: a range outside.
    pub fn fill(&self, target: (&DeviceMemory, u64), bytes: u64, value: u8) -> Result<(), GpuError> {
        let to = target.0.address(target.1, bytes)?;
        self.gpu.enter()?;
        call!(cuMemsetD8Async(to, value, bytes as usize, self.raw))
    }

    pub(crate) fn raw(&self) -> sys::CUstream {
        self.raw
    }
}

/// Returns the highest priority of streams. Blocks of such a stream start before waiting blocks of other streams, so
/// that I/O does not wait for the end of a layer's kernels.
pub(super) fn highest_priority(gpu: &Gpu) -> Result<i32, GpuError> {
    gpu.enter()?;
    let (mut least, mut greatest) = (0, 0);
    call!(cuCtxGetStreamPriorityRange(&mut least, &mut greatest))?;
    Ok(greatest)
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.is_foreign {
            return;
        }
        let released = self.gpu.enter().and_then(|()| call!(cuStreamDestroy_v2(self.raw)));
        if let Err(error) = released {
            tracing::warn!(%error, "cannot release a stream");
        }
    }
}

impl Event {
    /// Creates an event. Until it is recorded, streams do not wait for it.
    pub fn new(gpu: &Gpu) -> Result<Event, GpuError> {
        gpu.enter()?;
        let mut raw = std::ptr::null_mut();
        call!(cuEventCreate(&mut raw, 0))?;
        Ok(Event { raw, gpu: gpu.clone() })
    }

    /// Creates an event that is only waited for: recording it is cheaper than one that measures time.
    pub fn without_time(gpu: &Gpu) -> Result<Event, GpuError> {
        gpu.enter()?;
        let mut raw = std::ptr::null_mut();
        call!(cuEventCreate(&mut raw, sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32))?;
        Ok(Event { raw, gpu: gpu.clone() })
    }

    /// Records the event behind all work that the stream has so far.
    pub fn record(&self, stream: &Stream) -> Result<(), GpuError> {
        self.gpu.enter()?;
        call!(cuEventRecord(self.raw, stream.raw))
    }

    /// Reports whether the work before the event has ended; true if the event was not recorded yet.
    pub fn has_passed(&self) -> Result<bool, GpuError> {
        let _guard = self.gpu.enter_outside_captures()?;
        // SAFETY: the event is live while `self` is.
        let result = unsafe { sys::cuEventQuery(self.raw) };
        if result == sys::CUresult::CUDA_ERROR_NOT_READY {
            return Ok(false);
        }
        super::driver::check("cuEventQuery", result).map(|()| true)
    }

    /// Waits until the work before the event has ended.
    pub fn synchronize(&self) -> Result<(), GpuError> {
        let _guard = self.gpu.enter_outside_captures()?;
        call!(cuEventSynchronize(self.raw))
    }

    /// Returns the time from an earlier event to this one. Both must have passed.
    pub fn since(&self, earlier: &Event) -> Result<Duration, GpuError> {
        self.gpu.enter()?;
        let mut milliseconds = 0.0_f32;
        call!(cuEventElapsedTime_v2(&mut milliseconds, earlier.raw, self.raw))?;
        Ok(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let released = self.gpu.enter().and_then(|()| call!(cuEventDestroy_v2(self.raw)));
        if let Err(error) = released {
            tracing::warn!(%error, "cannot release an event");
        }
    }
}
