//! SMs for I/O kernels, apart from those of computation.
//!
//! A green context reserves SMs: kernels of its streams run on these only. The rest of the SMs is a second green
//! context for computation. Without green contexts, I/O kernels run as a grid of at most as many blocks as SMs are
//! meant for I/O, each with as many threads as an SM takes; computation then shares those SMs.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use cudarc::driver::sys;

use super::driver::{GREEN_CONTEXTS, call, first_missing};
use super::stream::highest_priority;
use super::{Gpu, GpuError, Stream};

/// SMs that I/O kernels get: a number (`8`) or a percentage of all SMs (`6%`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SmShare {
    /// Number of SMs.
    Count(u32),
    /// Percentage of all SMs, 1 to 100.
    Percent(u32),
}

/// How SMs are limited.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PartitionMethod {
    /// Two green contexts, for I/O and for computation.
    GreenContexts,
    /// A grid of few blocks, and why green contexts are not used.
    BoundedGrid(String),
    /// No limit: I/O kernels run on all SMs with the priority of computation.
    Unlimited,
}

/// A division of a GPU's SMs.
#[derive(Debug)]
pub struct Partition {
    gpu: Gpu,
    method: PartitionMethod,
    io_sms: u32,
    compute_sms: u32,
    green: Option<(Arc<GreenContext>, Arc<GreenContext>)>,
}

/// A context that owns some SMs.
#[derive(Debug)]
pub(super) struct GreenContext {
    raw: sys::CUgreenCtx,
    gpu: Gpu,
}

// SAFETY: the driver's functions may be called from any thread with any handle.
unsafe impl Send for GreenContext {}
// SAFETY: as for `Send`.
unsafe impl Sync for GreenContext {}

impl SmShare {
    /// Returns the number of SMs of a GPU with `sms` SMs: at least 1, at most all.
    pub fn of(self, sms: u32) -> u32 {
        let wanted = match self {
            SmShare::Count(count) => count,
            SmShare::Percent(percent) => (sms * percent).div_ceil(100),
        };
        wanted.clamp(1, sms.max(1))
    }
}

impl FromStr for SmShare {
    type Err = GpuError;

    fn from_str(text: &str) -> Result<SmShare, GpuError> {
        let invalid = || {
            GpuError::Invalid(format!(
                "invalid share of SMs \"{text}\": expected a number or a percentage as in 6%"
            ))
        };
        let (digits, percent) = match text.strip_suffix('%') {
            Some(digits) => (digits, true),
            None => (text, false),
        };
        match (digits.parse::<u32>().map_err(|_| invalid())?, percent) {
            (0, _) => Err(invalid()),
            (value, true) if value <= 100 => Ok(SmShare::Percent(value)),
            (value, false) if value <= 4096 => Ok(SmShare::Count(value)),
            _ => Err(invalid()),
        }
    }
}

impl fmt::Display for SmShare {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SmShare::Count(count) => write!(formatter, "{count}"),
            SmShare::Percent(percent) => write!(formatter, "{percent}%"),
        }
    }
}

impl fmt::Display for PartitionMethod {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PartitionMethod::GreenContexts => formatter.write_str("green contexts"),
            PartitionMethod::BoundedGrid(reason) => write!(formatter, "bounded grid ({reason})"),
            PartitionMethod::Unlimited => formatter.write_str("no limit"),
        }
    }
}

impl Partition {
    /// Divides the SMs: by green contexts where the driver has them, otherwise by a bounded grid.
    ///
    /// The driver rounds the number of SMs up (to a multiple of 8 on many GPUs); [`Partition::io_sms`] returns the
    /// result.
    pub fn new(gpu: &Gpu, share: SmShare) -> Result<Partition, GpuError> {
        match Partition::with_green_contexts(gpu, share) {
            Ok(partition) => Ok(partition),
            Err(error) => {
                tracing::info!(%error, "limiting the SMs of I/O kernels by a bounded grid");
                Ok(Partition::with_bounded_grid(gpu, share, &error))
            }
        }
    }

    /// Divides the SMs by green contexts. Errors: a driver without them, too few SMs.
    pub fn with_green_contexts(gpu: &Gpu, share: SmShare) -> Result<Partition, GpuError> {
        if let Some(symbol) = first_missing(GREEN_CONTEXTS) {
            return Err(GpuError::NoGreenContexts { reason: format!("the driver lacks {symbol}") });
        }
        let unsupported = |error: GpuError| GpuError::NoGreenContexts { reason: error.to_string() };
        gpu.enter()?;
        let wanted = share.of(gpu.info().sms);
        let (io, compute) = split(gpu, wanted).map_err(unsupported)?;
        let (io_sms, compute_sms) = (sm_count(&io), sm_count(&compute));
        if compute_sms == 0 {
            return Err(GpuError::NoGreenContexts {
                reason: format!("{wanted} of {} SMs leave none for computation", gpu.info().sms),
            });
        }
        let io = GreenContext::new(gpu, io).map_err(unsupported)?;
        let compute = GreenContext::new(gpu, compute).map_err(unsupported)?;
        let green = Some((Arc::new(io), Arc::new(compute)));
        Ok(Partition { gpu: gpu.clone(), method: PartitionMethod::GreenContexts, io_sms, compute_sms, green })
    }

    /// Limits the SMs by a bounded grid; computation may use all SMs. `reason` is why green contexts are not used.
    pub fn with_bounded_grid(gpu: &Gpu, share: SmShare, reason: &dyn fmt::Display) -> Partition {
        let sms = gpu.info().sms;
        Partition {
            gpu: gpu.clone(),
            method: PartitionMethod::BoundedGrid(reason.to_string()),
            io_sms: share.of(sms),
            compute_sms: sms,
            green: None,
        }
    }

    /// Divides nothing: I/O kernels take free room on all SMs, and no SM before a kernel that came first.
    pub fn unlimited(gpu: &Gpu) -> Partition {
        let sms = gpu.info().sms;
        let method = PartitionMethod::Unlimited;
        Partition { gpu: gpu.clone(), method, io_sms: sms, compute_sms: sms, green: None }
    }

    /// Returns how the SMs are limited.
    pub fn method(&self) -> &PartitionMethod {
        &self.method
    }

    /// Returns the number of SMs that I/O kernels use at most.
    pub fn io_sms(&self) -> u32 {
        self.io_sms
    }

    /// Returns the number of SMs that streams of [`Partition::compute_stream`] use at most.
    pub fn compute_sms(&self) -> u32 {
        self.compute_sms
    }

    /// Creates a stream for I/O kernels, of the highest priority if their SMs are limited.
    pub fn io_stream(&self) -> Result<Stream, GpuError> {
        match (&self.green, &self.method) {
            (Some((io, _)), _) => io.stream(self.io_sms, highest_priority(&self.gpu)?),
            (None, PartitionMethod::Unlimited) => Stream::new(&self.gpu),
            (None, _) => Stream::bounded(&self.gpu, self.io_sms),
        }
    }

    /// Creates a stream for computation, on the SMs that are not for I/O. Without green contexts it may use all SMs.
    pub fn compute_stream(&self) -> Result<Stream, GpuError> {
        match &self.green {
            Some((_, compute)) => compute.stream(self.compute_sms, 0),
            None => Stream::new(&self.gpu),
        }
    }
}

/// Splits the SMs of a GPU: at least `wanted`, and the rest.
fn split(gpu: &Gpu, wanted: u32) -> Result<(sys::CUdevResource, sys::CUdevResource), GpuError> {
    let mut all = empty_resource();
    call!(cuDeviceGetDevResource(gpu.device(), &mut all, sys::CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM))?;
    let (mut io, mut rest) = (empty_resource(), empty_resource());
    let mut groups = 1;
    call!(cuDevSmResourceSplitByCount(&mut io, &mut groups, &all, &mut rest, 0, wanted))?;
    Ok((io, rest))
}

fn empty_resource() -> sys::CUdevResource {
    // SAFETY: the structure has integers only, and 0 is the type `INVALID`.
    unsafe { std::mem::zeroed() }
}

fn sm_count(resource: &sys::CUdevResource) -> u32 {
    if resource.type_ != sys::CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM {
        return 0;
    }
    // SAFETY: a resource of type SM has this member of the union.
    unsafe { resource.__bindgen_anon_1.sm.smCount }
}

impl GreenContext {
    fn new(gpu: &Gpu, mut resource: sys::CUdevResource) -> Result<GreenContext, GpuError> {
        let mut description = std::ptr::null_mut();
        call!(cuDevResourceGenerateDesc(&mut description, &mut resource, 1))?;
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUgreenCtxCreate_flags::CU_GREEN_CTX_DEFAULT_STREAM as u32;
        call!(cuGreenCtxCreate(&mut raw, description, gpu.device(), flags))?;
        Ok(GreenContext { raw, gpu: gpu.clone() })
    }

    fn stream(self: &Arc<Self>, sms: u32, priority: i32) -> Result<Stream, GpuError> {
        self.gpu.enter()?;
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        call!(cuGreenCtxStreamCreate(&mut raw, self.raw, flags, priority))?;
        Ok(Stream::of_green(&self.gpu, raw, sms, Arc::clone(self)))
    }
}

impl Drop for GreenContext {
    fn drop(&mut self) {
        if let Err(error) = self.gpu.enter().and_then(|()| call!(cuGreenCtxDestroy(self.raw))) {
            tracing::warn!(%error, "cannot release a green context");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_a_number_or_a_percentage() {
        assert_eq!("8".parse::<SmShare>().expect("a number"), SmShare::Count(8));
        assert_eq!("6%".parse::<SmShare>().expect("a percentage").of(132), 8);
        for text in ["", "0", "0%", "101%", "-1", "8 %", "5000", "x"] {
            let error = text.parse::<SmShare>().expect_err(text);
            assert!(error.to_string().contains("expected a number or a percentage"), "{error}");
        }
        assert_eq!(SmShare::Count(500).of(132), 132);
        assert_eq!(SmShare::Percent(1).of(10), 1);
    }
}
