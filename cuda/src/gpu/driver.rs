//! Calls of the driver: the check that all functions exist, and results as errors.

use std::ffi::{CStr, c_char};

use cudarc::driver::sys;

use super::error::{DRIVER_VERSION_MIN, GpuError};

/// Functions that every use of a GPU needs. A missing one would panic in `cudarc`, so all are looked up first.
const REQUIRED: &[&str] = &[
    "cuInit",
    "cuDriverGetVersion",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceGetAttribute",
    "cuDeviceTotalMem_v2",
    "cuDeviceGetPCIBusId",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuThreadExchangeStreamCaptureMode",
    "cuStreamCreate",
    "cuStreamCreateWithPriority",
    "cuCtxGetStreamPriorityRange",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuStreamQuery",
    "cuStreamWaitEvent",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuEventQuery",
    "cuEventElapsedTime_v2",
    "cuEventDestroy_v2",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemGetInfo_v2",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemHostGetDevicePointer_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuMemsetD8Async",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuModuleGetFunction",
    "cuLaunchKernel",
    "cuGetErrorName",
    "cuGetErrorString",
];

/// Functions of green contexts, which older drivers lack.
pub(super) const GREEN_CONTEXTS: &[&str] = &[
    "cuDeviceGetDevResource",
    "cuDevSmResourceSplitByCount",
    "cuDevResourceGenerateDesc",
    "cuGreenCtxCreate",
    "cuGreenCtxStreamCreate",
    "cuGreenCtxDestroy",
];

/// Functions that let a stream wait for a word of memory.
pub(super) const STREAM_WAITS: &[&str] = &["cuStreamWaitValue32_v2", "cuStreamIsCapturing"];

/// Calls a function of the driver and converts its result.
///
/// Contract of all uses: [`load`] succeeded before, so the function exists; handles come from the driver and their
/// owner has not released them; out pointers are to locals or fields of the type that the function writes; memory
/// ranges are inside their allocations.
macro_rules! call {
    ($name:ident($($argument:expr),* $(,)?)) => {
        // SAFETY: the contract of the macro.
        $crate::gpu::driver::check(stringify!($name), unsafe { cudarc::driver::sys::$name($($argument),*) })
    };
}
pub(crate) use call;

/// Converts the result of a call.
pub(crate) fn check(call: &'static str, result: sys::CUresult) -> Result<(), GpuError> {
    if result == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    if result == sys::CUresult::CUDA_ERROR_NO_DEVICE {
        return Err(GpuError::NoDevice);
    }
    let describe = |function: unsafe fn(sys::CUresult, *mut *const c_char) -> sys::CUresult| {
        let mut text: *const c_char = std::ptr::null();
        // SAFETY: `load` found both functions that are passed here; `text` is a local.
        let known = unsafe { function(result, &mut text) };
        if known != sys::CUresult::CUDA_SUCCESS || text.is_null() {
            return "unknown".to_owned();
        }
        // SAFETY: the driver returns a static string that ends with a zero.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    };
    Err(GpuError::Driver {
        call,
        code: result as u32,
        name: describe(sys::cuGetErrorName),
        text: describe(sys::cuGetErrorString),
    })
}

/// Reports whether the loaded driver has a function.
fn has(symbol: &str) -> bool {
    let name = format!("{symbol}\0");
    // SAFETY: the library is present (callers checked), and initialising it has no precondition.
    let library = unsafe { sys::culib() };
    // SAFETY: the symbol is only looked up, never used with this type.
    unsafe { library.get::<*const ()>(name.as_bytes()) }.is_ok()
}

/// Returns the first of the functions that the driver lacks.
pub(super) fn first_missing(symbols: &[&'static str]) -> Option<&'static str> {
    symbols.iter().copied().find(|symbol| !has(symbol))
}

/// Loads the driver, checks its functions and version, and initialises it. Returns the version of its interface.
pub(super) fn load() -> Result<(u32, u32), GpuError> {
    // SAFETY: loading the driver's library runs its initialisers, which have no precondition.
    if !unsafe { sys::is_culib_present() } {
        return Err(GpuError::NoDriver);
    }
    if let Some(symbol) = first_missing(REQUIRED) {
        return Err(GpuError::MissingSymbol { symbol });
    }
    let mut version = 0;
    call!(cuDriverGetVersion(&mut version))?;
    let version = u32::try_from(version).unwrap_or(0);
    let found = (version / 1000, version % 1000 / 10);
    if found < DRIVER_VERSION_MIN {
        return Err(GpuError::DriverTooOld { found });
    }
    call!(cuInit(0))?;
    Ok(found)
}
