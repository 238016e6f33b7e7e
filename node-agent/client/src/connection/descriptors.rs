//! File descriptors that travel beside the messages.
//!
//! A descriptor arrives with or before the last byte of the message that names it, and in the order named: a
//! queue is enough to bring them together.

use std::collections::VecDeque;
use std::os::fd::{BorrowedFd, OwnedFd};

use reprise_buffers::{BufferError, PROGRESS_ENTRIES, PROGRESS_ENTRY_BYTES, ProgressReader, recv_with_fds};
use reprise_proto::local::Welcome;

use crate::error::ClientError;

/// Descriptors that may wait for their message: eight messages' worth of the 32 that one may carry.
const WAITING_MAX: usize = 256;

/// Descriptors that no message has claimed yet.
#[derive(Debug, Default)]
pub(super) struct Descriptors {
    waiting: VecDeque<OwnedFd>,
    received: Vec<OwnedFd>,
}

impl Descriptors {
    /// Receives bytes and whatever descriptors come with them; blocks. 0 bytes: the other side has closed.
    ///
    /// # Errors
    /// What the system says, or too many descriptors.
    pub(super) fn receive(&mut self, socket: BorrowedFd<'_>, into: &mut [u8]) -> Result<usize, ClientError> {
        let count = recv_with_fds(socket, into, &mut self.received)
            .map_err(|source| memory("receive from the agent", source))?;
        self.waiting.extend(self.received.drain(..));
        if self.waiting.len() > WAITING_MAX {
            return Err(ClientError::Protocol(format!("more than {WAITING_MAX} unclaimed descriptors")));
        }
        Ok(count)
    }

    /// The next descriptor.
    pub(super) fn next(&mut self) -> Result<OwnedFd, ClientError> {
        let missing =
            || ClientError::Protocol("a message names a descriptor that did not come with it".into());
        self.waiting.pop_front().ok_or_else(missing)
    }

    /// Maps the progress page that came with the greeting.
    pub(super) fn progress_page(&mut self, welcome: &Welcome) -> Result<ProgressReader, ClientError> {
        let descriptor = self.next()?;
        let expected = (u32::from(PROGRESS_ENTRIES), PROGRESS_ENTRY_BYTES as u32);
        let found = (welcome.progress_entries, welcome.progress_entry_bytes);
        if found != expected {
            return Err(ClientError::Version(format!(
                "the agent's progress page has {} entries of {} bytes, this client reads {} of {}",
                found.0, found.1, expected.0, expected.1
            )));
        }
        ProgressReader::map(descriptor).map_err(|source| memory("map the progress page", source))
    }
}

fn memory(context: &'static str, source: BufferError) -> ClientError {
    ClientError::Memory { context, source }
}
