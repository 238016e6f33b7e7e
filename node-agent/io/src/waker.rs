//! Wakes a thread that waits in [`IoEngine::reap`](crate::IoEngine::reap).
//!
//! Two flags keep system calls rare: `rung` (a wake is requested) and `sleeping` (the reaper is about to
//! block). The reaper sets `sleeping`, then reads `rung`; a waker sets `rung`, then reads `sleeping`. All
//! four accesses are sequentially consistent, so at least one side sees the other (Dekker's algorithm), and
//! the eventfd is written only when the reaper may be blocked.
//!
//! A late write to the eventfd ends a later wait early; waits may end spuriously.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::error::{Call, IoError};
use crate::sys;

/// Makes a blocked `reap` return, or the next blocking one if none is blocked. Cheap when no thread waits.
#[derive(Clone)]
pub struct Waker {
    shared: Arc<Shared>,
}

/// The side of a [`Waker`] that an engine has.
pub struct Doorbell {
    shared: Arc<Shared>,
}

struct Shared {
    /// Blocking eventfd: io_uring then arms a poll for a read of it instead of failing with EAGAIN.
    event: OwnedFd,
    rung: AtomicBool,
    sleeping: AtomicBool,
}

impl Waker {
    /// Wakes the engine's thread.
    pub fn wake(&self) {
        self.shared.ring();
    }
}

impl fmt::Debug for Waker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Waker").field("rung", &self.shared.rung).finish_non_exhaustive()
    }
}

impl fmt::Debug for Doorbell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Doorbell").field("rung", &self.shared.rung).finish_non_exhaustive()
    }
}

impl Doorbell {
    /// Creates the side of an engine.
    ///
    /// # Errors
    /// `Unavailable` when the process is out of file descriptors.
    pub fn new() -> Result<Doorbell, IoError> {
        let event =
            sys::eventfd().map_err(|error| IoError::from_call(Call::Open, "creating an eventfd", error))?;
        let shared = Shared { event, rung: AtomicBool::new(false), sleeping: AtomicBool::new(false) };
        Ok(Doorbell { shared: Arc::new(shared) })
    }

    /// Returns a handle that ends a sleep.
    pub fn waker(&self) -> Waker {
        Waker { shared: Arc::clone(&self.shared) }
    }

    /// Returns the eventfd; a read of 8 bytes completes when a sleeper is woken.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.shared.event.as_fd()
    }

    /// Announces that the caller is about to block; returns false if it must not, because it was rung.
    pub(crate) fn begin_sleep(&self) -> bool {
        self.shared.sleeping.store(true, Ordering::SeqCst);
        let may_block = !self.shared.rung.load(Ordering::SeqCst);
        if !may_block {
            self.end_sleep();
        }
        may_block
    }

    /// Ends the sleep announced by [`begin_sleep`](Self::begin_sleep).
    pub(crate) fn end_sleep(&self) {
        self.shared.sleeping.store(false, Ordering::SeqCst);
    }

    /// Consumes a wake; returns whether there was one.
    pub fn answer(&self) -> bool {
        self.shared.rung.swap(false, Ordering::SeqCst)
    }

    /// Writes the eventfd regardless of the flags: completes a read of it that the kernel holds.
    pub(crate) fn force(&self) {
        sys::eventfd_add(self.fd());
    }

    /// Blocks until rung or until `limit` has passed, for engines without a ring.
    pub fn sleep(&self, limit: Duration) {
        if self.begin_sleep() {
            if sys::poll_readable(self.fd(), limit) {
                sys::eventfd_take(self.fd());
            }
            self.end_sleep();
        }
    }
}

impl Shared {
    fn ring(&self) {
        if !self.rung.swap(true, Ordering::SeqCst) && self.sleeping.load(Ordering::SeqCst) {
            sys::eventfd_add(self.event.as_fd());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    const FOREVER: Duration = Duration::from_secs(60);

    #[test]
    fn a_wake_before_the_sleep_is_not_lost() {
        let bell = Doorbell::new().expect("an eventfd");
        bell.waker().wake();
        let start = Instant::now();
        bell.sleep(FOREVER);
        assert!(start.elapsed() < FOREVER / 2);
        assert!(bell.answer());
        assert!(!bell.answer());
    }

    #[test]
    fn a_wake_always_ends_a_sleep_in_another_thread() {
        let bell = Doorbell::new().expect("an eventfd");
        let waker = bell.waker();
        let (to_waker, asked) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || asked.iter().for_each(|()| waker.wake()));
        let start = Instant::now();
        for _ in 0..2_000 {
            to_waker.send(()).expect("the waker listens");
            while !bell.answer() {
                bell.sleep(FOREVER);
            }
        }
        drop(to_waker);
        thread.join().expect("the waker ended well");
        assert!(start.elapsed() < FOREVER);
    }
}
