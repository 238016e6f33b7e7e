//! One accepted operation: its remaining part, and the interpretation of results. Shared by the engines for
//! real files.
//!
//! A transfer that stopped short continues with the rest. An interrupted transfer, or one for which the
//! kernel had no memory, is repeated a limited number of times. This decision is only made here, so that the
//! engines behave alike.

use std::io;

use reprise_buffers::Span;

use crate::error::{Call, IoError, IoErrorKind, is_transient};
use crate::op::{Completion, IO_ALIGN, Op, Submission, Token};

/// Maximum number of consecutive attempts that fail for a transient reason without moving a byte. io_uring
/// waits for resources by itself, so a few would do; the limit only stops a broken driver from spinning
/// forever.
const RETRIES_MAX: u32 = 100;

/// An operation between acceptance and completion.
#[derive(Debug)]
pub(crate) struct Transfer {
    token: Token,
    op: Op,
    total: usize,
    done: usize,
    retries: u32,
}

/// Next action after a system call for a transfer.
#[derive(Debug)]
pub(crate) enum Step {
    /// Call again for [`Transfer::rest`].
    Again,
    /// The operation has ended with this result.
    Ended(Result<(), IoError>),
}

/// The remaining memory of a transfer, in the kernel's form. Reused between operations.
#[derive(Default)]
pub(crate) struct IoVecs(Vec<libc::iovec>);

// SAFETY: the addresses are those of spans, which are Send; they are dereferenced by the kernel only, while
// the transfer that holds the spans is alive.
unsafe impl Send for IoVecs {}

impl IoVecs {
    pub(crate) fn as_slice(&self) -> &[libc::iovec] {
        &self.0
    }
}

impl Transfer {
    /// Starts an operation that [`Bounds::check`](crate::op::Bounds::check) has passed.
    pub(crate) fn new(submission: Submission) -> Transfer {
        let Submission { token, op } = submission;
        let total = op.spans().iter().map(Span::len).sum();
        Transfer { token, op, total, done: 0, retries: 0 }
    }

    pub(crate) fn op(&self) -> &Op {
        &self.op
    }

    /// Returns the first remaining byte on the device.
    pub(crate) fn rest_offset(&self) -> u64 {
        self.op.offset() + self.done as u64
    }

    /// Fills `iovecs` with the remaining memory.
    pub(crate) fn rest(&self, iovecs: &mut IoVecs) {
        iovecs.0.clear();
        let mut skip = self.done;
        for span in self.op.spans() {
            if skip >= span.len() {
                skip -= span.len();
                continue;
            }
            let start = span.as_ptr().cast_mut().wrapping_byte_add(skip);
            iovecs.0.push(libc::iovec { iov_base: start.cast(), iov_len: span.len() - skip });
            skip = 0;
        }
    }

    /// Evaluates the kernel's result: bytes of a transfer (zero for a sync), or an errno.
    pub(crate) fn advance(&mut self, result: io::Result<usize>) -> Step {
        let moved = match result {
            Ok(moved) => moved,
            Err(error) if self.may_repeat(&error) && self.retries < RETRIES_MAX => {
                self.retries += 1;
                return Step::Again;
            }
            Err(error) => return Step::Ended(Err(self.error(error))),
        };
        self.retries = 0;
        self.done += moved;
        assert!(self.done <= self.total, "the kernel never moves more bytes than requested");
        if self.done == self.total {
            return Step::Ended(Ok(()));
        }
        // Nothing moved, or the file ended inside a page: O_DIRECT cannot read or write the rest.
        if moved == 0 || !moved.is_multiple_of(IO_ALIGN) {
            let text = format!("{} ended after {} of {} bytes", self.describe(), self.done, self.total);
            return Step::Ended(Err(IoError::new(IoErrorKind::ShortTransfer, text)));
        }
        Step::Again
    }

    /// Converts the transfer to its completion, which has the memory.
    pub(crate) fn complete(self, result: Result<(), IoError>) -> Completion {
        Completion { token: self.token, op: self.op, result }
    }

    /// A sync is only repeated when it did not start, or was interrupted.
    fn may_repeat(&self, error: &io::Error) -> bool {
        match self.op {
            Op::Sync => matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINTR)),
            Op::Read { .. } | Op::Write { .. } => is_transient(error),
        }
    }

    fn error(&self, source: io::Error) -> IoError {
        let call = if matches!(self.op, Op::Sync) { Call::Sync } else { Call::Transfer };
        IoError::from_call(call, self.describe(), source)
    }

    fn describe(&self) -> String {
        match &self.op {
            Op::Read { offset, .. } => format!("reading {} bytes at {offset}", self.total),
            Op::Write { offset, .. } => format!("writing {} bytes at {offset}", self.total),
            Op::Sync => "syncing".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use reprise_buffers::PageBuffer;

    use super::*;

    fn two_spans() -> Transfer {
        let spans = [2 * IO_ALIGN, IO_ALIGN].map(|bytes| PageBuffer::new(bytes).expect("whole pages").span());
        Transfer::new(Submission { token: Token(7), op: Op::Read { offset: 8192, into: spans.into() } })
    }

    fn errno(number: i32) -> io::Result<usize> {
        Err(io::Error::from_raw_os_error(number))
    }

    #[test]
    fn a_short_transfer_continues_where_it_stopped() {
        let (mut transfer, mut iovecs) = (two_spans(), IoVecs::default());
        transfer.rest(&mut iovecs);
        assert_eq!(iovecs.as_slice().iter().map(|v| v.iov_len).collect::<Vec<_>>(), [8192, 4096]);
        let second_page = iovecs.as_slice()[0].iov_base.wrapping_byte_add(4096);
        assert!(matches!(transfer.advance(Ok(4096)), Step::Again));
        transfer.rest(&mut iovecs);
        assert_eq!(iovecs.as_slice().iter().map(|v| v.iov_len).collect::<Vec<_>>(), [4096, 4096]);
        assert_eq!((iovecs.as_slice()[0].iov_base, transfer.rest_offset()), (second_page, 12_288));
        assert!(matches!(transfer.advance(Ok(4096)), Step::Again));
        transfer.rest(&mut iovecs);
        assert_eq!(iovecs.as_slice().len(), 1);
        assert!(matches!(transfer.advance(Ok(4096)), Step::Ended(Ok(()))));
    }

    #[test]
    fn the_end_of_the_file_is_a_short_transfer_and_not_a_loop() {
        for last in [0, 100] {
            let mut transfer = two_spans();
            assert!(matches!(transfer.advance(Ok(4096)), Step::Again));
            let Step::Ended(Err(error)) = transfer.advance(Ok(last)) else { panic!("it must end") };
            assert_eq!(error.kind(), IoErrorKind::ShortTransfer);
        }
    }

    #[test]
    fn interrupted_transfers_are_repeated_a_limited_number_of_times() {
        let mut transfer = two_spans();
        for number in [libc::EINTR, libc::EAGAIN, libc::ENOMEM] {
            assert!(matches!(transfer.advance(errno(number)), Step::Again));
        }
        let ended = (0..=RETRIES_MAX).find_map(|_| match transfer.advance(errno(libc::ENOMEM)) {
            Step::Ended(Err(error)) => Some(error.kind()),
            _ => None,
        });
        assert_eq!(ended, Some(IoErrorKind::Busy));
    }

    #[test]
    fn a_sync_that_found_no_memory_is_not_repeated() {
        let mut sync = Transfer::new(Submission { token: Token(7), op: Op::Sync });
        assert!(matches!(sync.advance(errno(libc::EINTR)), Step::Again));
        let Step::Ended(Err(error)) = sync.advance(errno(libc::ENOMEM)) else { panic!("it must end") };
        assert_eq!(error.kind(), IoErrorKind::Lost);
    }
}
