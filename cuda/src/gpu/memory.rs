//! GPU memory, and host memory that the GPU accesses.

use std::any::Any;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::sys;
use reprise_buffers::Span;

use super::driver::call;
use super::{Gpu, GpuError};

/// An allocation of GPU memory. Dropping it waits until the GPU has nothing to do: for ever while a kernel of a ring runs,
/// see [`GpuRunner`](crate::ring::GpuRunner).
#[derive(Debug)]
pub struct DeviceMemory {
    gpu: Gpu,
    address: u64,
    bytes: u64,
}

/// Pinned host memory: an allocation, or a registered mapping such as a region of the arena. Dropping it waits as that of
/// [`DeviceMemory`] does.
pub struct HostMemory {
    gpu: Gpu,
    pointer: *mut u8,
    bytes: u64,
    device_address: u64,
    writable: bool,
    origin: Origin,
}

enum Origin {
    /// The driver allocated the memory.
    Allocated,
    /// The memory is registered; the value keeps it mapped.
    Registered(#[allow(dead_code, reason = "kept for its drop")] Box<dyn Any + Send + Sync>),
}

// SAFETY: the memory is plain bytes, which are accessed by raw pointers only.
unsafe impl Send for HostMemory {}
// SAFETY: as for `Send`.
unsafe impl Sync for HostMemory {}

impl DeviceMemory {
    /// Allocates `bytes` bytes, at an address that is a multiple of 256. The contents are undefined.
    pub fn new(gpu: &Gpu, bytes: u64) -> Result<DeviceMemory, GpuError> {
        if bytes == 0 {
            return Err(GpuError::Invalid("invalid GPU memory of 0 bytes".to_owned()));
        }
        gpu.enter()?;
        let mut address = 0;
        call!(cuMemAlloc_v2(&mut address, bytes as usize))?;
        Ok(DeviceMemory { gpu: gpu.clone(), address, bytes })
    }

    /// Allocates memory with the given contents.
    pub fn with_contents(gpu: &Gpu, contents: &[u8]) -> Result<DeviceMemory, GpuError> {
        let memory = DeviceMemory::new(gpu, contents.len() as u64)?;
        memory.write(0, contents)?;
        Ok(memory)
    }

    /// Returns the size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the GPU of the memory.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Returns the GPU's address of `bytes` bytes from `offset`; an error if the range lies outside.
    pub fn address(&self, offset: u64, bytes: u64) -> Result<u64, GpuError> {
        inside(self.bytes, offset, bytes)?;
        Ok(self.address + offset)
    }

    /// Copies bytes to `offset` and waits until the GPU has them. Work of streams is not waited for.
    pub fn write(&self, offset: u64, contents: &[u8]) -> Result<(), GpuError> {
        let to = self.address(offset, contents.len() as u64)?;
        self.gpu.enter()?;
        call!(cuMemcpyHtoDAsync_v2(to, contents.as_ptr().cast(), contents.len(), self.gpu.copies()))?;
        call!(cuStreamSynchronize(self.gpu.copies()))
    }

    /// Copies bytes from `offset`. Work of streams is not waited for.
    pub fn read(&self, offset: u64, contents: &mut [u8]) -> Result<(), GpuError> {
        let from = self.address(offset, contents.len() as u64)?;
        self.gpu.enter()?;
        call!(cuMemcpyDtoHAsync_v2(contents.as_mut_ptr().cast(), from, contents.len(), self.gpu.copies()))?;
        call!(cuStreamSynchronize(self.gpu.copies()))
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // Freeing waits for the work that was enqueued before.
        let released = self.gpu.enter().and_then(|()| call!(cuMemFree_v2(self.address)));
        if let Err(error) = released {
            tracing::warn!(%error, "cannot release GPU memory");
        }
    }
}

impl HostMemory {
    /// Allocates `bytes` pinned bytes. The contents are undefined.
    pub fn new(gpu: &Gpu, bytes: u64) -> Result<HostMemory, GpuError> {
        if bytes == 0 {
            return Err(GpuError::Invalid("invalid pinned memory of 0 bytes".to_owned()));
        }
        gpu.enter()?;
        let mut pointer: *mut c_void = std::ptr::null_mut();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        call!(cuMemHostAlloc(&mut pointer, bytes as usize, flags))?;
        let mut memory = HostMemory {
            gpu: gpu.clone(),
            pointer: pointer.cast(),
            bytes,
            device_address: 0,
            writable: true,
            origin: Origin::Allocated,
        };
        memory.find_device_address()?;
        Ok(memory)
    }

    /// Registers memory of `reprise-buffers`: the GPU can then access it, and copies from it are asynchronous.
    ///
    /// The span stays mapped as long as the registration. Errors: less lockable memory than its size (memlock limit),
    /// memory that is registered already.
    pub fn register(gpu: &Gpu, span: &Span) -> Result<HostMemory, GpuError> {
        let pointer = span.as_ptr().cast_mut();
        let (bytes, writable) = (span.len() as u64, span.is_writable());
        // SAFETY: the span's range is mapped while a clone of the span lives, and the registration has one.
        unsafe { HostMemory::register_range(gpu, pointer, bytes, writable, Box::new(span.clone())) }
    }

    /// Registers `bytes` bytes at `pointer`.
    ///
    /// # Safety
    ///
    /// The range must be mapped, and writable if `writable`, as long as `keep` lives.
    pub unsafe fn register_range(
        gpu: &Gpu,
        pointer: *mut u8,
        bytes: u64,
        writable: bool,
        keep: Box<dyn Any + Send + Sync>,
    ) -> Result<HostMemory, GpuError> {
        gpu.enter()?;
        let read_only = if writable { 0 } else { sys::CU_MEMHOSTREGISTER_READ_ONLY };
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP | read_only;
        call!(cuMemHostRegister_v2(pointer.cast(), bytes as usize, flags))?;
        let mut memory = HostMemory {
            gpu: gpu.clone(),
            pointer,
            bytes,
            device_address: 0,
            writable,
            origin: Origin::Registered(keep),
        };
        memory.find_device_address()?;
        Ok(memory)
    }

    fn find_device_address(&mut self) -> Result<(), GpuError> {
        call!(cuMemHostGetDevicePointer_v2(&mut self.device_address, self.pointer.cast(), 0))
    }

    /// Returns the size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns this process's address of `bytes` bytes from `offset`; an error if the range lies outside.
    pub fn pointer(&self, offset: u64, bytes: u64) -> Result<*mut u8, GpuError> {
        inside(self.bytes, offset, bytes)?;
        Ok(self.pointer.wrapping_add(offset as usize))
    }

    /// Returns the GPU's address of `bytes` bytes from `offset`; an error if the range lies outside.
    pub fn device_address(&self, offset: u64, bytes: u64) -> Result<u64, GpuError> {
        inside(self.bytes, offset, bytes)?;
        Ok(self.device_address + offset)
    }

    /// Copies bytes to `offset`. The GPU must not write there at the same time.
    pub fn write(&self, offset: u64, contents: &[u8]) -> Result<(), GpuError> {
        self.require_writable()?;
        let to = self.pointer(offset, contents.len() as u64)?;
        // SAFETY: `to` is valid for writing as many bytes; no reference to the memory exists, so nothing overlaps.
        unsafe { std::ptr::copy_nonoverlapping(contents.as_ptr(), to, contents.len()) };
        Ok(())
    }

    /// Copies bytes from `offset`. The GPU must not write there at the same time.
    pub fn read(&self, offset: u64, contents: &mut [u8]) -> Result<(), GpuError> {
        let from = self.pointer(offset, contents.len() as u64)?;
        // SAFETY: `from` is valid for reading as many bytes; no reference to the memory exists, so nothing overlaps.
        unsafe { std::ptr::copy_nonoverlapping(from.cast_const(), contents.as_mut_ptr(), contents.len()) };
        Ok(())
    }

    /// Stores a word at `offset`, after all earlier writes of this thread and of those that it has waited for.
    ///
    /// # Errors
    /// A range outside, an offset that is not a multiple of 4, memory that is registered for reading only.
    pub fn store_word(&self, offset: u64, value: u32) -> Result<(), GpuError> {
        self.require_writable()?;
        let word: *mut u32 = self.pointer(offset, 4)?.cast();
        if !word.is_aligned() {
            return Err(GpuError::Invalid(format!("a word at {offset}: expected a multiple of 4")));
        }
        // SAFETY: the word is inside of the memory, aligned, and accessed by atomics and the GPU only.
        unsafe { AtomicU32::from_ptr(word) }.store(value, Ordering::Release);
        Ok(())
    }

    pub(super) fn require_writable(&self) -> Result<(), GpuError> {
        if self.writable {
            return Ok(());
        }
        Err(GpuError::Invalid(
            "host memory is registered for reading only: register a writable mapping".to_owned(),
        ))
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // Work that was enqueued may still access the memory.
        let released = self.gpu.synchronize().and_then(|()| match self.origin {
            Origin::Allocated => call!(cuMemFreeHost(self.pointer.cast())),
            Origin::Registered(_) => call!(cuMemHostUnregister(self.pointer.cast())),
        });
        if let Err(error) = released {
            tracing::warn!(%error, "cannot release pinned host memory");
        }
    }
}

impl std::fmt::Debug for HostMemory {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let registered = matches!(self.origin, Origin::Registered(_));
        formatter
            .debug_struct("HostMemory")
            .field("bytes", &self.bytes)
            .field("registered", &registered)
            .finish()
    }
}

fn inside(size: u64, offset: u64, bytes: u64) -> Result<(), GpuError> {
    match offset.checked_add(bytes) {
        Some(end) if end <= size => Ok(()),
        _ => Err(GpuError::Invalid(format!(
            "invalid range of {bytes} bytes at {offset}: the memory has {size} bytes"
        ))),
    }
}
