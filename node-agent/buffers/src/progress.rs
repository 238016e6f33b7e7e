//! Progress of loads, written by the agent and read by an engine without a system call.
//!
//! One page per session: [`PROGRESS_ENTRIES`] entries of [`PROGRESS_ENTRY_BYTES`] each, in the machine's
//! little-endian order (both sides run on it):
//!
//! ```text
//!  0  u64  load     id of the load the entry belongs to; 0: none, or being prepared
//!  8  u32  changes  counts every change that a waiter may want to know: the futex word
//! 12  u32  layers   leading layers that are verified for every block that has not failed
//! 16  u32  state    0 free, 1 running, 2 done
//! 20  u32  failed   number of failed blocks
//! 24       zero
//! 64  [u32; 256]    a bit for each block of the load: failed
//! ```
//!
//! Ordering. The writer stores failed bits, then `layers` or `state`, then `changes`, each with release
//! order, then wakes. The reader loads `changes`, then `load`, `layers` and `state` with acquire order, then
//! failed bits. A reader that has seen `layers = n` therefore sees every earlier failure, and the bytes of
//! the layers themselves (the agent stored or verified them before). A waiter sleeps only while `changes` has
//! the value from before its check. No wake-up is lost, not even for a change that affects neither `layers`
//! nor the other compared values.
//!
//! Reuse. `begin` stores load 0, then (release fence) clears the entry, then stores the new id. A reader
//! checks the id again after it has loaded the rest (acquire fence between): if the rest contains values of a
//! later load, the id has changed too. Ids are never reused.
//!
//! Only one thread at a time writes an entry. This module does not depend on what a load is.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use crate::error::BufferError;
use crate::shared::SharedMemory;

/// Maximum number of loads of one session that are in progress or held.
pub const PROGRESS_ENTRIES: u16 = 64;

/// Maximum number of blocks of one load: 128 Ki tokens in blocks of 16.
pub const PROGRESS_BLOCKS_MAX: usize = 8192;

/// Size of one entry in bytes: a line of words and a bit for each block.
pub const PROGRESS_ENTRY_BYTES: usize = BITMAP + PROGRESS_BLOCKS_MAX / 8;

/// Size of a session's progress page in bytes: 68 KiB.
pub const PROGRESS_BYTES: usize = PROGRESS_ENTRIES as usize * PROGRESS_ENTRY_BYTES;

/// A wait spins this long before it sleeps: a layer of a load from DRAM takes less, a wake-up costs about as
/// much.
const SPIN: Duration = Duration::from_micros(20);

const LOAD: usize = 0;
const CHANGES: usize = 8;
const LAYERS: usize = 12;
const STATE: usize = 16;
const FAILED: usize = 20;
const BITMAP: usize = 64;
const WORD_BITS: usize = u32::BITS as usize;
const WORD_BYTES: usize = size_of::<u32>();

const STATE_RUNNING: u32 = 1;
const STATE_DONE: u32 = 2;

// Entries keep their words aligned and do not share cache lines with their neighbours.
const _: () = assert!(PROGRESS_ENTRY_BYTES == 1088 && PROGRESS_ENTRY_BYTES.is_multiple_of(64));
const _: () = assert!(PROGRESS_BLOCKS_MAX.is_multiple_of(WORD_BITS));

/// Result of a wait for layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitOutcome {
    /// The layers are ready, for every block that is not marked as failed.
    Ready,
    /// The load has ended with fewer layers: every block has failed or was lost.
    Done,
    /// The timeout has passed.
    Timeout,
    /// The entry belongs to another load now.
    Superseded,
}

/// The agent's side of a progress page.
#[derive(Debug)]
pub struct ProgressWriter {
    shared: SharedMemory,
}

/// An engine's side of a progress page.
#[derive(Debug)]
pub struct ProgressReader {
    shared: SharedMemory,
}

/// Consistent copy of an entry.
enum EntrySnapshot {
    Other,
    Progress { layers: u32, state: u32 },
}

impl ProgressWriter {
    /// Creates a page whose entries are all free.
    pub fn create() -> Result<ProgressWriter, BufferError> {
        Ok(ProgressWriter { shared: SharedMemory::create(PROGRESS_BYTES)? })
    }

    /// Returns the descriptor for the engine; it cannot be mapped for writing.
    pub fn readonly_fd(&self) -> BorrowedFd<'_> {
        self.shared.readonly_fd().expect("a created page has a descriptor for readers")
    }

    /// Assigns the entry to a load (an id other than 0 that was never used before), with no layers and no
    /// failures.
    ///
    /// Panics for an invalid entry, as all methods do: the agent chooses the entries.
    pub fn begin(&self, entry: u16, load: u64) {
        let base = writer_base(entry);
        let shared = &self.shared;
        shared.atomic_u64(base + LOAD).store(0, Ordering::Relaxed);
        // A reader that sees one of the stores below also sees load 0 (or a later one).
        fence(Ordering::Release);
        shared.atomic_u32(base + LAYERS).store(0, Ordering::Relaxed);
        shared.atomic_u32(base + STATE).store(STATE_RUNNING, Ordering::Relaxed);
        shared.atomic_u32(base + FAILED).store(0, Ordering::Relaxed);
        for word in (base + BITMAP..base + PROGRESS_ENTRY_BYTES).step_by(WORD_BYTES) {
            shared.atomic_u32(word).store(0, Ordering::Relaxed);
        }
        shared.atomic_u64(base + LOAD).store(load, Ordering::Release);
        self.announce(base);
    }

    /// Announces `layers` leading layers, verified for every block that has not failed.
    pub fn set_layers(&self, entry: u16, layers: u32) {
        let base = writer_base(entry);
        self.shared.atomic_u32(base + LAYERS).store(layers, Ordering::Release);
        self.announce(base);
    }

    /// Marks a block as failed. The caller must call `set_layers` or `done` afterwards, which wake the
    /// waiters. Panics unless the index is below [`PROGRESS_BLOCKS_MAX`].
    pub fn fail_block(&self, entry: u16, block: usize) {
        let base = writer_base(entry);
        let (word, bit) = bit_of(block).expect("a load has at most PROGRESS_BLOCKS_MAX blocks");
        let before = self.shared.atomic_u32(base + word).fetch_or(bit, Ordering::Release);
        if before & bit == 0 {
            self.shared.atomic_u32(base + FAILED).fetch_add(1, Ordering::Release);
        }
    }

    /// Announces that all blocks of the load are verified or failed.
    pub fn done(&self, entry: u16) {
        let base = writer_base(entry);
        self.shared.atomic_u32(base + STATE).store(STATE_DONE, Ordering::Release);
        self.announce(base);
    }

    /// Makes waiters check the entry again.
    fn announce(&self, base: usize) {
        self.shared.atomic_u32(base + CHANGES).fetch_add(1, Ordering::Release);
        self.shared.futex_wake(base + CHANGES);
    }
}

impl ProgressReader {
    /// Maps the page that the agent granted; an error when the file is too short.
    pub fn map(fd: OwnedFd) -> Result<ProgressReader, BufferError> {
        Ok(ProgressReader { shared: SharedMemory::map_readonly(fd, PROGRESS_BYTES)? })
    }

    /// Returns the load that the entry belongs to; 0 for none, and for an invalid entry.
    pub fn load(&self, entry: u16) -> u64 {
        entry_base(entry).map_or(0, |base| self.shared.load_u64(base + LOAD))
    }

    /// Returns the number of leading layers that are verified for every block that has not failed; 0 for an
    /// invalid entry.
    pub fn layers(&self, entry: u16) -> u32 {
        entry_base(entry).map_or(0, |base| self.shared.load_u32(base + LAYERS))
    }

    /// Reports whether all blocks are verified or failed; true for an invalid entry.
    pub fn is_done(&self, entry: u16) -> bool {
        entry_base(entry).is_none_or(|base| self.shared.load_u32(base + STATE) == STATE_DONE)
    }

    /// Reports whether a block (index within the load) has failed; true for an invalid entry or block. Call
    /// it after a wait for layers: it then sees all earlier failures.
    pub fn is_failed(&self, entry: u16, block: usize) -> bool {
        match (entry_base(entry), bit_of(block)) {
            (Some(base), Some((word, bit))) => self.shared.load_u32(base + word) & bit != 0,
            _ => true,
        }
    }

    /// Returns the number of failed blocks, which saves checking each if it is 0; 0 for an invalid entry.
    pub fn failed_count(&self, entry: u16) -> u32 {
        entry_base(entry).map_or(0, |base| self.shared.load_u32(base + FAILED))
    }

    /// Waits until `want` layers of the load are ready, the load has ended, the entry belongs to another
    /// load, or the timeout has passed. Spins first, then sleeps.
    pub fn wait_layers(&self, entry: u16, load: u64, want: u32, timeout: Duration) -> WaitOutcome {
        let Some(base) = entry_base(entry) else { return WaitOutcome::Superseded };
        let mut clock = WaitClock::new(timeout);
        loop {
            let changes = self.shared.load_u32(base + CHANGES);
            match self.snapshot(base, load) {
                EntrySnapshot::Other => return WaitOutcome::Superseded,
                EntrySnapshot::Progress { layers, .. } if layers >= want => return WaitOutcome::Ready,
                EntrySnapshot::Progress { state: STATE_DONE, .. } => return WaitOutcome::Done,
                EntrySnapshot::Progress { .. } => {}
            }
            match clock.next() {
                WaitStep::Spin => std::hint::spin_loop(),
                WaitStep::TimedOut => return WaitOutcome::Timeout,
                WaitStep::Sleep(left) => {
                    // Woken, changed or timed out: check again, the clock decides. The kernel has no other
                    // errors for a mapped word; if it had, this loop would spin until the deadline.
                    let _ = self.shared.futex_wait(base + CHANGES, changes, left);
                }
            }
        }
    }

    fn snapshot(&self, base: usize, load: u64) -> EntrySnapshot {
        if self.shared.load_u64(base + LOAD) != load {
            return EntrySnapshot::Other;
        }
        // Read `state` first: the last `set_layers` precedes `done`, so "done" with too few layers is then
        // correct.
        let state = self.shared.load_u32(base + STATE);
        let layers = self.shared.load_u32(base + LAYERS);
        // Every load above is an acquire: see "Reuse" in the module's doc.
        if self.shared.load_u64(base + LOAD) == load {
            EntrySnapshot::Progress { layers, state }
        } else {
            EntrySnapshot::Other
        }
    }
}

/// Next action of a waiter.
enum WaitStep {
    Spin,
    Sleep(Duration),
    TimedOut,
}

struct WaitClock {
    start: Instant,
    timeout: Duration,
}

impl WaitClock {
    fn new(timeout: Duration) -> WaitClock {
        WaitClock { start: Instant::now(), timeout }
    }

    fn next(&mut self) -> WaitStep {
        let waited = self.start.elapsed();
        match self.timeout.checked_sub(waited) {
            None | Some(Duration::ZERO) => WaitStep::TimedOut,
            Some(_) if waited < SPIN => WaitStep::Spin,
            Some(left) => WaitStep::Sleep(left),
        }
    }
}

fn entry_base(entry: u16) -> Option<usize> {
    (entry < PROGRESS_ENTRIES).then(|| usize::from(entry) * PROGRESS_ENTRY_BYTES)
}

fn writer_base(entry: u16) -> usize {
    entry_base(entry).expect("the agent uses entries below PROGRESS_ENTRIES only")
}

/// Offset of a block's word in its entry, and the block's bit.
fn bit_of(block: usize) -> Option<(usize, u32)> {
    (block < PROGRESS_BLOCKS_MAX).then(|| (BITMAP + block / WORD_BITS * WORD_BYTES, 1 << (block % WORD_BITS)))
}

#[cfg(test)]
mod tests;
