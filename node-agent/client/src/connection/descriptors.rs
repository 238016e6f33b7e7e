//! File descriptors that accompany messages.
//!
//! A descriptor arrives with or before the last byte of the message that names it, in the order of the names.
//! A queue is therefore enough to match them.

use std::collections::VecDeque;
use std::os::fd::{BorrowedFd, OwnedFd};

use reprise_buffers::{BufferError, PROGRESS_ENTRIES, PROGRESS_ENTRY_BYTES, ProgressReader, recv_with_fds};
use reprise_proto::local::Welcome;

use crate::error::ClientError;

/// Descriptors that may wait for their message: those of eight messages, with at most 32 each.
const WAITING_MAX: usize = 256;

/// Received descriptors that belong to no decoded message yet.
#[derive(Debug, Default)]
pub(super) struct Descriptors {
    waiting: VecDeque<OwnedFd>,
    received: Vec<OwnedFd>,
}

impl Descriptors {
    /// Receives bytes and the descriptors that come with them; blocks. 0 bytes mean that the agent has closed
    /// the socket.
    ///
    /// # Errors
    /// The system's error, or `Protocol` for too many descriptors.
    pub(super) fn receive(&mut self, socket: BorrowedFd<'_>, into: &mut [u8]) -> Result<usize, ClientError> {
        let count = recv_with_fds(socket, into, &mut self.received)
            .map_err(|source| memory("receive from the agent", source))?;
        self.waiting.extend(self.received.drain(..));
        if self.waiting.len() > WAITING_MAX {
            return Err(ClientError::Protocol(format!(
                "more than {WAITING_MAX} descriptors without a message"
            )));
        }
        Ok(count)
    }

    /// Takes the oldest unclaimed descriptor.
    pub(super) fn next(&mut self) -> Result<OwnedFd, ClientError> {
        let missing = || ClientError::Protocol("message without the descriptor that it names".into());
        self.waiting.pop_front().ok_or_else(missing)
    }

    /// Maps the progress page that came with the greeting.
    pub(super) fn progress_page(&mut self, welcome: &Welcome) -> Result<ProgressReader, ClientError> {
        let descriptor = self.next()?;
        let expected = (u32::from(PROGRESS_ENTRIES), PROGRESS_ENTRY_BYTES as u32);
        let found = (welcome.progress_entries, welcome.progress_entry_bytes);
        if found != expected {
            return Err(ClientError::Version(format!(
                "invalid progress page of the agent: {} entries of {} bytes, this client expects {} of {}",
                found.0, found.1, expected.0, expected.1
            )));
        }
        ProgressReader::map(descriptor).map_err(|source| memory("map the progress page", source))
    }
}

fn memory(context: &'static str, source: BufferError) -> ClientError {
    ClientError::Memory { context, source }
}
