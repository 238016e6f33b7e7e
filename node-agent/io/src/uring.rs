//! The io_uring engine.
//!
//! One ring for one device: registered file, registered arena regions, one `io_uring_enter` per batch (it
//! starts submitted operations, waits, and makes many completions available in shared memory). While the
//! engine waits, a read of the doorbell's eventfd is in the ring, so that a wake is just another completion.
//!
//! A transfer of several spans (a header page and its payload) is one vectored entry without a registered
//! buffer; only single spans use one. The alternative is a fixed entry for each span (the header in a
//! registered page) with one completion for both. It was measured with 16 blocks in flight on a virtual NVMe
//! disk of about 2 GB/s. In 2 MiB pages the rates were equal for payloads of 512 KiB and 2 MiB (1831 : 1855
//! and 2130 : 2135 MB/s read, 2760 : 2725 and 3009 : 2935 written). They were lower for 128 KiB (1366 : 1503
//! read, 1622 : 1931 written), where the doubled requests cost more than pinning 33 pages. CPU time fell by
//! at most 0.01 s/GB of reads (0.04 in 4 KiB pages). That does not justify a second form of operation with a
//! half-done state.
//!
//! The table of slots owns the operations. The engine owns the table and frees it only when the kernel has
//! completed every operation. If that takes longer than [`DRAIN_LIMIT`], the operations are leaked instead of
//! freed, and [`close`](IoEngine::close) reports it.

use std::io;
use std::mem;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use io_uring::types::{Fixed, FsyncFlags};
use io_uring::{opcode, squeue};
use reprise_buffers::{Region, Span};

use crate::device::DeviceFile;
use crate::engine::{CloseOutcome, EngineKind, IoEngine, Wait};
use crate::error::IoError;
use crate::op::{Completion, Op, Submission};
use crate::transfer::{IoVecs, Step, Transfer};
use crate::waker::{Doorbell, Waker};

mod fixed;
mod ring;
mod slots;

pub(crate) use fixed::FixedBuffers;
pub(crate) use ring::Ring;
use ring::{EnterOutcome, EnterWait, FILE_BELL, FILE_DEVICE};
use slots::{SlotId, Slots};

/// How long dropping an engine waits for operations in flight. The kernel's timeout for a stuck request is 30
/// s (`/sys/block/*/queue/io_timeout`); after it the request has failed.
const DRAIN_LIMIT: Duration = Duration::from_secs(45);

/// `user_data` of the doorbell's read. No slot uses it: its generation would be all ones with index 2^32 - 1.
const BELL: u64 = u64::MAX;

/// The io_uring engine; see the module.
///
/// Fields are dropped in order: the ring is closed before its file is unlocked and its buffers are freed.
pub(crate) struct UringEngine {
    ring: Ring,
    slots: Slots,
    fixed: FixedBuffers,
    file: DeviceFile,
    bell: Doorbell,
    /// Destination of the doorbell's read; the count is not used.
    bell_count: Box<u64>,
    bell_read: DoorbellRead,
    capacity: usize,
    /// Completions of operations that [`Bounds::check`](crate::op::Bounds::check) rejected, for the next
    /// reap.
    refused: Vec<Completion>,
    /// Set by the first attempt to end the engine.
    closed: Option<CloseOutcome>,
}

/// Whether a read of the doorbell is in the ring.
#[derive(Clone, Copy, PartialEq, Eq)]
enum DoorbellRead {
    Idle,
    InRing,
}

impl UringEngine {
    /// Performs all steps that the kernel may reject, without consuming the file, so that another engine can
    /// still use it.
    ///
    /// # Errors
    /// `Unsupported` with the rejected step.
    pub(crate) fn prepare(file: &DeviceFile, capacity: usize) -> Result<(Ring, Doorbell), IoError> {
        let (ring, bell) = (Ring::set_up(capacity)?, Doorbell::new()?);
        ring.register_files(file.as_fd(), bell.fd())?;
        Ok((ring, bell))
    }

    /// Creates an engine on a prepared ring. Regions that the kernel does not register are used unregistered.
    pub(crate) fn new(
        file: DeviceFile,
        (ring, bell): (Ring, Doorbell),
        capacity: usize,
        regions: &[Arc<Region>],
    ) -> UringEngine {
        let path = file.path().display();
        let fixed = FixedBuffers::register(&ring.uring, regions).unwrap_or_else(|error| {
            tracing::warn!(%path, %error, "io_uring cannot register buffers, each operation maps its memory");
            FixedBuffers::default()
        });
        let (mode, caching, registered) = (ring.mode, file.caching(), fixed.count());
        tracing::info!(%path, engine = "io_uring", capacity, ?mode, ?caching, registered, "device opened");
        let (slots, refused) = (Slots::new(capacity), Vec::new());
        let (bell_count, bell_read) = (Box::new(0), DoorbellRead::Idle);
        UringEngine { ring, slots, fixed, file, bell, bell_count, bell_read, capacity, refused, closed: None }
    }

    /// Pushes the next entry of an operation to the ring.
    fn push(&mut self, id: SlotId) {
        let slot = self.slots.get(id).expect("the caller has just inserted or found it");
        let transfer = slot.transfer.as_ref().expect("an occupied slot");
        let entry = entry(transfer, &mut slot.iovecs, &self.fixed).user_data(id.user_data());
        // SAFETY: spans and iovecs stay in the slot until `take` has seen the completion; Bounds::check
        // ensures that destinations are writable.
        unsafe { self.ring.push(&entry) };
    }

    /// Takes completions from shared memory; no system call. Pushes transfers that stopped short again.
    fn take(&mut self, out: &mut Vec<Completion>) {
        while let Some(entry) = { self.ring.uring.completion().next() } {
            if entry.user_data() == BELL {
                self.bell_read = DoorbellRead::Idle;
                continue;
            }
            let id = SlotId::from_user_data(entry.user_data());
            let Some(transfer) = self.slots.get(id).and_then(|slot| slot.transfer.as_mut()) else {
                tracing::error!(
                    user_data = entry.user_data(),
                    "io_uring completed an operation that was not in flight"
                );
                continue;
            };
            let result = entry.result();
            let result = usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result));
            match transfer.advance(result) {
                Step::Again => self.push(id),
                Step::Ended(result) => {
                    out.extend(self.slots.remove(id).map(|transfer| transfer.complete(result)));
                }
            }
        }
    }

    /// Waits for a completion, a wake or `limit`.
    fn wait(&mut self, limit: Duration, out: &mut Vec<Completion>) -> Result<(), IoError> {
        let (start, before) = (Instant::now(), out.len());
        loop {
            let elapsed = start.elapsed();
            self.listen();
            // Even when rung, submitted operations must still be started.
            let may_block = elapsed < limit && self.bell.begin_sleep();
            let wait = if may_block { EnterWait::One(limit - elapsed) } else { EnterWait::No };
            let entered = self.ring.enter(wait);
            self.bell.end_sleep();
            let rung = self.bell.answer();
            let entered = entered?;
            self.take(out);
            if out.len() > before || rung || !may_block || entered == EnterOutcome::TimedOut {
                return Ok(());
            }
        }
    }

    /// Puts a read of the doorbell into the ring unless there is one.
    fn listen(&mut self) {
        if self.bell_read == DoorbellRead::InRing {
            return;
        }
        let into: *mut u64 = &raw mut *self.bell_count;
        let entry = opcode::Read::new(Fixed(FILE_BELL), into.cast(), 8).build().user_data(BELL);
        // SAFETY: the count is boxed, and neither read nor freed while the read is in the ring, as
        // `bell_read` records.
        unsafe { self.ring.push(&entry) };
        self.bell_read = DoorbellRead::InRing;
    }

    /// Completes all operations, or leaks the memory that the kernel may still use; runs once.
    fn end(&mut self) -> CloseOutcome {
        if let Some(closed) = self.closed {
            return closed;
        }
        let closed = self.drain();
        if closed == CloseOutcome::Leaked {
            self.file.keep_lock_until_operations_end();
            mem::forget(mem::replace(&mut self.slots, Slots::new(0)));
            mem::forget(mem::take(&mut self.bell_count));
            mem::forget(mem::take(&mut self.fixed));
        }
        self.closed = Some(closed);
        closed
    }

    fn drain(&mut self) -> CloseOutcome {
        let start = Instant::now();
        let mut ended = Vec::new();
        if self.bell_read == DoorbellRead::InRing {
            self.bell.force();
        }
        loop {
            self.take(&mut ended);
            if self.slots.in_use() == 0 && self.bell_read == DoorbellRead::Idle {
                return CloseOutcome::Drained;
            }
            let Some(left) = DRAIN_LIMIT.checked_sub(start.elapsed()) else { return CloseOutcome::Leaked };
            if let Err(error) = self.ring.enter(EnterWait::One(left)) {
                tracing::error!(path = %self.file.path().display(), %error, "an I/O engine cannot be drained");
                return CloseOutcome::Leaked;
            }
        }
    }
}

impl IoEngine for UringEngine {
    fn capacity(&self) -> usize {
        self.capacity
    }

    fn in_flight(&self) -> usize {
        self.slots.in_use() + self.refused.len()
    }

    fn submit(&mut self, submission: Submission) -> Result<(), Submission> {
        if self.in_flight() == self.capacity {
            return Err(submission);
        }
        if let Err(error) = self.file.bounds().check(&submission.op) {
            let Submission { token, op } = submission;
            self.refused.push(Completion { token, op, result: Err(error) });
            return Ok(());
        }
        let id = self.slots.insert(Transfer::new(submission)).expect("fewer than capacity are in flight");
        self.push(id);
        Ok(())
    }

    fn reap(&mut self, wait: Wait, out: &mut Vec<Completion>) -> Result<(), IoError> {
        let before = out.len();
        out.append(&mut self.refused);
        self.take(out);
        match wait {
            Wait::Until(limit) if out.len() == before => self.wait(limit, out),
            _ if self.ring.wants_entering() => {
                self.ring.enter(EnterWait::No)?;
                self.take(out);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn release_region(&mut self, region: u16) {
        if let Err(error) = self.fixed.release(&self.ring.uring, region) {
            tracing::warn!(region, %error, "io_uring cannot release the memory of a region, which stays allocated");
        }
    }

    fn add_region(&mut self, region: &Arc<Region>) {
        if let Err(error) = self.fixed.add(&self.ring.uring, region) {
            tracing::warn!(region = region.id(), %error, "io_uring cannot register a region, each operation on it maps its memory");
        }
    }

    fn waker(&self) -> Waker {
        self.bell.waker()
    }

    fn close(mut self: Box<Self>) -> CloseOutcome {
        self.end()
    }

    fn kind(&self) -> EngineKind {
        EngineKind::IoUring
    }
}

impl Drop for UringEngine {
    fn drop(&mut self) {
        // A plain drop does not report the outcome; `close` does.
        let _ = self.end();
    }
}

/// Builds the ring entry for the rest of an operation.
fn entry(transfer: &Transfer, iovecs: &mut IoVecs, fixed: &FixedBuffers) -> squeue::Entry {
    let file = Fixed(FILE_DEVICE);
    let spans: &[Span] = transfer.op().spans();
    if spans.is_empty() {
        return opcode::Fsync::new(file).flags(FsyncFlags::DATASYNC).build();
    }
    transfer.rest(iovecs);
    let (offset, rest) = (transfer.rest_offset(), iovecs.as_slice());
    let read = matches!(transfer.op(), Op::Read { .. });
    let count = u32::try_from(rest.len()).expect("at most IOVECS_MAX");
    if count > 1 {
        return match read {
            true => opcode::Readv::new(file, rest.as_ptr(), count).offset(offset).build(),
            false => opcode::Writev::new(file, rest.as_ptr(), count).offset(offset).build(),
        };
    }
    let (memory, bytes) = (rest[0].iov_base.cast::<u8>(), u32::try_from(rest[0].iov_len));
    let bytes = bytes.expect("at most TRANSFER_BYTES_MAX");
    // The rest of a transfer lies at the end of its last span.
    let index = spans.last().and_then(|span| fixed.index_of(span));
    match (read, index) {
        (true, Some(index)) => opcode::ReadFixed::new(file, memory, bytes, index).offset(offset).build(),
        (true, None) => opcode::Read::new(file, memory, bytes).offset(offset).build(),
        (false, Some(index)) => opcode::WriteFixed::new(file, memory, bytes, index).offset(offset).build(),
        (false, None) => opcode::Write::new(file, memory, bytes).offset(offset).build(),
    }
}
