//! Benchmark baseline: the shortest possible io_uring loop over a file, without the engines.
//!
//! Benchmarks divide the rate of the engines by the rate of this loop on the same file in the same run. It
//! therefore uses the kernel in the fastest known way: O_DIRECT (from the [`DeviceFile`]), registered file,
//! registered buffers, `depth` operations always in flight, one system call per batch.
//!
//! Reading extents that were reserved but never written costs no device time: write the file first.

use std::collections::VecDeque;
use std::io;
use std::num::NonZeroU32;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use io_uring::types::{Fixed, FsyncFlags};
use io_uring::{IoUring, opcode, squeue};
use reprise_buffers::Span;

use crate::device::{DeviceFile, FileAccess};
use crate::error::{Call, IoError, IoErrorKind};
use crate::op::IO_ALIGN;

/// Maximum number of operations in flight.
pub const BARE_DEPTH_MAX: usize = 4096;

/// Maximum number of buffers: the kernel's limit on registered buffers of a ring.
pub const BARE_BUFFERS_MAX: usize = 16_384;

/// Parameters of a loop.
#[derive(Clone, Debug)]
pub struct BareLoop<'a> {
    /// The file; it must have no other user during the loop.
    pub file: &'a DeviceFile,
    /// Size of each operation in bytes, a multiple of 4096.
    pub block_bytes: u32,
    /// Byte offsets of the operations, in order; each is a multiple of 4096 with a whole block inside the
    /// file.
    pub offsets: &'a [u64],
    /// Number of operations in flight.
    pub depth: usize,
    /// Buffers, used in turn; at least `depth`. Each is writable and has at least `block_bytes`. Fewer bytes than
    /// the processor's cache would measure the cache, not memory, where a device copies into memory.
    pub buffers: &'a [Span],
    /// Waits for all operations and calls fdatasync after this many writes, and at the end. `None`: one sync
    /// at the end.
    pub sync_every: Option<NonZeroU32>,
}

/// Result of a loop.
#[derive(Clone, Copy, Debug)]
pub struct BareRun {
    /// Number of transferred bytes.
    pub bytes: u64,
    /// From the first operation to the last completion, syncs included.
    pub elapsed: Duration,
}

struct Ring {
    uring: IoUring,
    in_flight: usize,
    /// The first failure of an operation.
    failure: Option<io::Error>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Read,
    Write,
}

impl BareRun {
    /// Returns the rate in bytes per second.
    pub fn bytes_per_second(&self) -> f64 {
        self.bytes as f64 / self.elapsed.as_secs_f64()
    }
}

/// Reads every offset once.
///
/// # Errors
/// As the kernel reports them; the first failed or short operation ends the loop.
pub fn read_loop(parameters: &BareLoop<'_>) -> Result<BareRun, IoError> {
    run(parameters, Direction::Read)
}

/// Writes every offset once, with the current contents of the buffers.
///
/// # Errors
/// As the kernel reports them; the first failed or short operation ends the loop.
pub fn write_loop(parameters: &BareLoop<'_>) -> Result<BareRun, IoError> {
    if parameters.file.access() != FileAccess::ReadWrite {
        return Err(IoError::new(IoErrorKind::Invalid, "invalid write loop on a file opened read-only"));
    }
    run(parameters, Direction::Write)
}

/// Splits one span into `count` adjacent buffers of `bytes` bytes.
///
/// # Errors
/// `Invalid` when the span is too short.
pub fn cut(span: &Span, bytes: u32, count: usize) -> Result<Vec<Span>, IoError> {
    let bytes = bytes as usize;
    let pieces = (0..count).map(|index| span.slice(index * bytes, bytes));
    pieces.collect::<Result<_, _>>().map_err(|error| IoError::new(IoErrorKind::Invalid, error.to_string()))
}

fn run(parameters: &BareLoop<'_>, direction: Direction) -> Result<BareRun, IoError> {
    check(parameters)?;
    let mut ring = Ring { uring: set_up(parameters)?, in_flight: 0, failure: None };
    let start = Instant::now();
    let outcome = transfer_all(&mut ring, parameters, direction);
    let elapsed = start.elapsed();
    if outcome.is_err() {
        // The caller owns the buffers, so all operations must end before this returns.
        ring.drain(parameters.buffers);
    }
    let bytes = outcome.map_err(|error| IoError::from_call(Call::Transfer, "bare loop", error))?;
    Ok(BareRun { bytes, elapsed })
}

fn check(parameters: &BareLoop<'_>) -> Result<(), IoError> {
    let BareLoop { file, block_bytes, offsets, depth, buffers, .. } = parameters;
    let whole = |bytes: u64| bytes.is_multiple_of(IO_ALIGN as u64);
    let fits = |offset: &u64| {
        whole(*offset) && offset.checked_add(u64::from(*block_bytes)).is_some_and(|end| end <= file.size())
    };
    let usable = |buffer: &Span| {
        buffer.len() >= *block_bytes as usize && buffer.is_writable() && whole(buffer.as_ptr().addr() as u64)
    };
    let sane = *block_bytes > 0
        && whole(u64::from(*block_bytes))
        && (1..=BARE_DEPTH_MAX).contains(depth)
        && (*depth..=BARE_BUFFERS_MAX).contains(&buffers.len());
    if sane && offsets.iter().all(fits) && buffers.iter().all(usable) {
        return Ok(());
    }
    let text = format!(
        "bare loop of {block_bytes} bytes over {} buffers at depth {depth}: misaligned or outside",
        buffers.len()
    );
    Err(IoError::new(IoErrorKind::Invalid, text))
}

fn set_up(parameters: &BareLoop<'_>) -> Result<IoUring, IoError> {
    let refused = |error: io::Error| {
        IoError::with_source(IoErrorKind::Unsupported, "setting up a bare io_uring", error)
    };
    let entries = parameters.depth.next_power_of_two() as u32;
    let best = IoUring::builder().setup_single_issuer().setup_defer_taskrun().build(entries);
    let ring = best.or_else(|_| IoUring::new(entries)).map_err(refused)?;
    ring.submitter().register_files(&[parameters.file.file().as_raw_fd()]).map_err(refused)?;
    let iovec = |span: &Span| libc::iovec {
        iov_base: span.as_ptr().cast_mut().cast(),
        iov_len: parameters.block_bytes as usize,
    };
    let iovecs: Vec<_> = parameters.buffers.iter().map(iovec).collect();
    // SAFETY: the spans are borrowed for longer than the ring lives.
    unsafe { ring.submitter().register_buffers(&iovecs) }.map_err(refused)?;
    Ok(ring)
}

/// Transfers all blocks; returns the number of bytes.
fn transfer_all(ring: &mut Ring, parameters: &BareLoop<'_>, direction: Direction) -> io::Result<u64> {
    let batch = match (direction, parameters.sync_every) {
        (Direction::Write, Some(count)) => count.get() as usize,
        _ => parameters.offsets.len().max(1),
    };
    let mut idle = VecDeque::with_capacity(parameters.buffers.len());
    for offsets in parameters.offsets.chunks(batch) {
        idle.clear();
        idle.extend(0..parameters.buffers.len());
        transfer_batch(ring, parameters, (direction, offsets), &mut idle)?;
        if direction == Direction::Write {
            let entry = opcode::Fsync::new(Fixed(0)).flags(FsyncFlags::DATASYNC).build();
            // SAFETY: a sync names no memory.
            unsafe { ring.push(&entry) };
            ring.wait(0, &mut idle)?;
        }
    }
    Ok(u64::from(parameters.block_bytes) * parameters.offsets.len() as u64)
}

/// Keeps `depth` operations in flight until all offsets are done.
fn transfer_batch(
    ring: &mut Ring,
    parameters: &BareLoop<'_>,
    (direction, offsets): (Direction, &[u64]),
    idle: &mut VecDeque<usize>,
) -> io::Result<()> {
    let mut todo = offsets.iter().peekable();
    while todo.peek().is_some() || ring.in_flight > 0 {
        while let Some(offset) = todo.next_if(|_| ring.in_flight < parameters.depth) {
            let index = idle.pop_front().expect("there are at least as many buffers as operations");
            let (memory, bytes) = (parameters.buffers[index].as_ptr().cast_mut(), parameters.block_bytes);
            let (file, buffer) = (Fixed(0), index as u16);
            let entry = match direction {
                Direction::Read => {
                    opcode::ReadFixed::new(file, memory, bytes, buffer).offset(*offset).build()
                }
                Direction::Write => {
                    opcode::WriteFixed::new(file, memory, bytes, buffer).offset(*offset).build()
                }
            };
            // SAFETY: the caller borrows the spans until every operation has ended; `check` saw their size.
            unsafe { ring.push(&entry.user_data(index as u64)) };
        }
        ring.wait(parameters.block_bytes, idle)?;
    }
    Ok(())
}

impl Ring {
    /// # Safety
    /// The entry's memory is valid until the operation has ended.
    unsafe fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: passed on to the caller.
        let pushed = unsafe { self.uring.submission().push(entry) };
        pushed.expect("there is one entry per operation in flight");
        self.in_flight += 1;
    }

    /// Starts the pushed operations and reaps the ended ones, at least one. Buffer indices go to `idle`.
    /// Every operation must have moved `bytes`.
    fn wait(&mut self, bytes: u32, idle: &mut VecDeque<usize>) -> io::Result<()> {
        match self.uring.submit_and_wait(1) {
            Err(error) if error.raw_os_error() != Some(libc::EINTR) => return Err(error),
            _ => {}
        }
        for entry in self.uring.completion() {
            self.in_flight -= 1;
            idle.push_back(entry.user_data() as usize);
            let failure = match u32::try_from(entry.result()) {
                Ok(moved) if moved == bytes => continue,
                Ok(moved) => io::Error::other(format!("an operation moved {moved} of {bytes} bytes")),
                Err(_) => io::Error::from_raw_os_error(-entry.result()),
            };
            self.failure.get_or_insert(failure);
        }
        self.failure.take().map_or(Ok(()), Err)
    }

    /// Waits until nothing is in flight, ignoring the results. If the wait fails, the memory is leaked,
    /// because the device may still write to it.
    fn drain(&mut self, buffers: &[Span]) {
        while self.in_flight > 0 {
            match self.uring.submit_and_wait(1) {
                Err(error) if error.raw_os_error() != Some(libc::EINTR) => {
                    std::mem::forget(buffers.to_vec());
                    return;
                }
                _ => self.in_flight -= self.uring.completion().count(),
            }
        }
    }
}
