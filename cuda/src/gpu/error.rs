//! Errors of the GPU's driver, each with its remedy.

use thiserror::Error;

/// First driver interface that can load the device code of this build: CUDA 13.0, which driver 580 has.
pub const DRIVER_VERSION_MIN: (u32, u32) = (13, 0);

/// A GPU that cannot be used, or a call of its driver that failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum GpuError {
    /// The driver's library is not installed.
    #[error("cannot load libcuda.so: no GPU driver is installed; install NVIDIA driver 580 or later")]
    NoDriver,
    /// The driver is older than the device code.
    #[error(
        "the GPU driver supports CUDA {}.{}: expected at least {}.{}; install NVIDIA driver 580 or later",
        found.0, found.1, DRIVER_VERSION_MIN.0, DRIVER_VERSION_MIN.1
    )]
    DriverTooOld {
        /// Version of the driver's interface: major, minor.
        found: (u32, u32),
    },
    /// The driver lacks a function that every use of a GPU needs.
    #[error("the GPU driver lacks the function {symbol}; install NVIDIA driver 580 or later")]
    MissingSymbol {
        /// Name of the function.
        symbol: &'static str,
    },
    /// The driver finds no GPU.
    #[error(
        "the GPU driver finds no device; check that nvidia-smi lists one and that this process may use it"
    )]
    NoDevice,
    /// The machine has fewer GPUs.
    #[error("no GPU {ordinal}: the machine has {count}; use a number from 0 to {}", count - 1)]
    NoSuchDevice {
        /// Number of the requested GPU.
        ordinal: u32,
        /// Number of GPUs, at least 1.
        count: u32,
    },
    /// The crate was built without `nvcc`.
    #[error(
        "this build has no code for GPUs: build it with nvcc 13.0 (set REPRISE_NVCC to the path that \
         cuda/toolkit.sh prints)"
    )]
    NoDeviceCode,
    /// The driver or the GPU cannot reserve SMs.
    #[error("the GPU has no green contexts ({reason}); a bounded grid limits the SMs instead")]
    NoGreenContexts {
        /// The missing function or failed call.
        reason: String,
    },
    /// The driver or the GPU cannot let a stream wait for the end of a request.
    #[error(
        "streams of the GPU cannot wait for requests ({reason}); wait for the ticket of a request on the CPU instead"
    )]
    NoStreamWaits {
        /// The missing function or ability.
        reason: String,
    },
    /// A call of the driver failed.
    #[error("{call} failed: {name} ({code}): {text}{}", remedy(*code))]
    Driver {
        /// Name of the driver's function.
        call: &'static str,
        /// Result of the call.
        code: u32,
        /// The driver's name of the result.
        name: String,
        /// The driver's description of the result.
        text: String,
    },
    /// An argument that no GPU accepts.
    #[error("{0}")]
    Invalid(String),
}

impl GpuError {
    /// Reports whether this machine cannot run GPU code at all, in contrast to a failure of code that runs.
    pub fn is_unavailable(&self) -> bool {
        matches!(
            self,
            GpuError::NoDriver
                | GpuError::DriverTooOld { .. }
                | GpuError::MissingSymbol { .. }
                | GpuError::NoDevice
                | GpuError::NoDeviceCode
        )
    }

    /// Reports whether the same call on the same handles fails again, in contrast to one that another thread of the
    /// process has disturbed, for example by the capture of a graph.
    ///
    /// An unknown code is not permanent: callers that repeat a call have a deadline.
    pub fn is_permanent(&self) -> bool {
        match self {
            // Handles and arguments (1, 101, 201, 400), the end of the driver (4), lost devices (46, 100), and errors
            // after which the context is unusable.
            GpuError::Driver { code, .. } => matches!(
                code,
                1 | 4 | 46 | 100 | 101 | 201 | 214 | 220 | 400 | 700 | 702 | 709 | 710 | 714..=719
            ),
            _ => true,
        }
    }
}

/// Returns what to do about a result of the driver, for results with a common cause.
fn remedy(code: u32) -> &'static str {
    match code {
        2 => "; use less GPU memory or end other processes that use the GPU",
        46 => "; the GPU is in use exclusively or was lost, check nvidia-smi",
        209 | 218 | 222 => "; the device code has no version for this GPU, build it with a newer nvcc",
        700 | 715 | 716 | 719 => "; a kernel accessed invalid memory, later calls of this process fail too",
        900..=908 => {
            "; a graph is being captured: capture it without requests of layers, or in thread-local mode"
        }
        801 => "; the GPU or the system does not support this call",
        802 | 803 => {
            "; the driver's library and kernel module differ, restart the machine or reinstall the driver"
        }
        _ => "",
    }
}
