//! The way out of a session: straight to the socket when it takes the frame, else through a bounded queue and
//! a writer thread.
//!
//! Invariants: frames leave whole and in order; the core thread never waits for a client; what waits is bounded
//! by [`QUEUE_FRAMES_MAX`] and [`QUEUE_BYTES_MAX`], and a session that exceeds them is closed, as is one whose
//! socket takes nothing for [`SEND_TIMEOUT`].
//!
//! Why straight: a wake-up of the writer costs as much (about 50 µs on a small virtual machine) as the match it would carry.
//! Large load replies go to the writer, which then also encodes them: 8,192 blocks take about a millisecond.

use std::collections::VecDeque;
use std::io;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use reprise_agent_core::effect::Reply;
use reprise_agent_core::event::RequestId;
use reprise_buffers::{Arena, BufferError, send_with_fds, try_send_with_fds};

use super::encode;
use super::frame::Frame;

/// Frames that may wait for one client: as many as it may have requests in flight, and as many notices.
pub(super) const QUEUE_FRAMES_MAX: usize = 2 * super::REQUESTS_IN_FLIGHT_MAX;

/// Bytes that may wait for one client: 27 load replies of the largest kind (2.3 MiB).
pub(super) const QUEUE_BYTES_MAX: usize = 64 << 20;

/// A client that reads nothing for so long has stopped.
pub(super) const SEND_TIMEOUT: Duration = Duration::from_secs(10);

/// Load replies of more blocks are encoded by the writer. 256 blocks of 64 checksums: 70 KiB, 20 µs.
const DIRECT_BLOCKS_MAX: usize = 256;

/// Something to send.
pub(super) enum Outgoing {
    /// Ready.
    Frame(Frame),
    /// To be encoded.
    Reply { request: RequestId, reply: Reply },
}

/// The way out of one session; shared by core thread, reader and writer.
pub(super) struct Outbound {
    socket: UnixStream,
    arena: Arc<Arena>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Outgoing>,
    queued_bytes: usize,
    phase: Phase,
}

/// ```text
/// Open ◄──► Writing ──close_when_sent──► Closing ──queue empty──► Closed
///  └────────────────────────────────────────┴── failure, close ─────┘
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Phase {
    /// With nothing queued, a frame goes straight to the socket.
    #[default]
    Open,
    /// The writer is handing a frame to the socket: nobody else may.
    Writing,
    /// Nothing more is taken; it closes as soon as the queue is empty.
    Closing,
    Closed,
}

impl Outgoing {
    fn bytes_estimated(&self) -> usize {
        match self {
            Outgoing::Frame(frame) => frame.len(),
            Outgoing::Reply { reply: Reply::Loaded { blocks, .. }, .. } => {
                // Place, status and source take about 24 bytes; objects of a block are alike in number.
                let objects = blocks.iter().find_map(|block| match block {
                    reprise_agent_core::effect::LoadedBlock::Ok { checksums, .. } => Some(checksums.len()),
                    reprise_agent_core::effect::LoadedBlock::Lost(_) => None,
                });
                blocks.len() * (24 + 4 * objects.unwrap_or(0))
            }
            Outgoing::Reply { .. } => 64,
        }
    }

    fn is_large(&self) -> bool {
        matches!(self, Outgoing::Reply { reply: Reply::Loaded { blocks, .. }, .. } if blocks.len() > DIRECT_BLOCKS_MAX)
    }

    fn into_frame(self, arena: &Arena) -> Frame {
        match self {
            Outgoing::Frame(frame) => frame,
            Outgoing::Reply { request, reply } => encode::reply(arena, request, reply),
        }
    }
}

impl Outbound {
    /// `socket` is the session's, with a send timeout of [`SEND_TIMEOUT`].
    pub(super) fn new(socket: UnixStream, arena: Arc<Arena>) -> Outbound {
        Outbound { socket, arena, state: Mutex::default(), changed: Condvar::new() }
    }

    /// Sends or queues; never waits for the client.
    pub(super) fn send(&self, outgoing: Outgoing) {
        let mut state = self.lock();
        if matches!(state.phase, Phase::Closing | Phase::Closed) {
            return;
        }
        let idle = state.queue.is_empty() && state.phase == Phase::Open;
        let outgoing = if idle && !outgoing.is_large() {
            let mut frame = outgoing.into_frame(&self.arena);
            match self.send_now(&mut frame) {
                Ok(()) if frame.is_sent() => return,
                Ok(()) => Outgoing::Frame(frame),
                Err(error) => {
                    tracing::debug!(%error, "session's socket failed");
                    self.close_locked(&mut state);
                    return;
                }
            }
        } else {
            outgoing
        };
        state.queued_bytes += outgoing.bytes_estimated();
        state.queue.push_back(outgoing);
        if state.queue.len() > QUEUE_FRAMES_MAX || state.queued_bytes > QUEUE_BYTES_MAX {
            tracing::warn!(
                frames = state.queue.len(),
                bytes = state.queued_bytes,
                "session closed: its client does not read"
            );
            self.close_locked(&mut state);
            return;
        }
        drop(state);
        self.changed.notify_one();
    }

    /// Ends the session now. The reader and the writer notice.
    pub(super) fn close(&self) {
        self.close_locked(&mut self.lock());
    }

    /// Ends the session when everything queued has been sent.
    pub(super) fn close_when_sent(&self) {
        let mut state = self.lock();
        if state.phase != Phase::Closed {
            state.phase = Phase::Closing;
        }
        drop(state);
        self.changed.notify_one();
    }

    /// Whether the session is about to end because of [`Outbound::close_when_sent`].
    pub(super) fn is_closing(&self) -> bool {
        self.lock().phase == Phase::Closing
    }

    /// The writer thread: until the session is closed.
    pub(super) fn write_queued(&self) {
        let mut state = self.lock();
        loop {
            if state.phase == Phase::Closed {
                return;
            }
            if let Some(outgoing) = state.queue.pop_front() {
                state.queued_bytes -= outgoing.bytes_estimated();
                if state.phase == Phase::Open {
                    state.phase = Phase::Writing;
                }
                drop(state);
                let sent = self.send_whole(outgoing.into_frame(&self.arena));
                state = self.lock();
                if state.phase == Phase::Writing {
                    state.phase = Phase::Open;
                }
                if let Err(error) = sent {
                    tracing::debug!(%error, "session's socket failed or its client does not read");
                    self.close_locked(&mut state);
                }
            } else if state.phase == Phase::Closing {
                self.close_locked(&mut state);
            } else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Hands to the socket what it takes at once.
    fn send_now(&self, frame: &mut Frame) -> Result<(), BufferError> {
        while !frame.is_sent() {
            let (bytes, descriptors) = frame.next_part();
            match try_send_with_fds(self.socket.as_fd(), bytes, &descriptors)? {
                Some(sent) => frame.advance(sent),
                None => break,
            }
        }
        Ok(())
    }

    fn send_whole(&self, frame: Frame) -> Result<(), BufferError> {
        send_frame(&self.socket, frame)
    }

    fn close_locked(&self, state: &mut State) {
        state.phase = Phase::Closed;
        state.queue.clear();
        state.queued_bytes = 0;
        match self.socket.shutdown(Shutdown::Both) {
            Err(error) if error.kind() != io::ErrorKind::NotConnected => {
                tracing::debug!(%error, "cannot shut a session's socket down");
            }
            _ => {}
        }
        self.changed.notify_one();
    }

    /// A panic aborts the process (see `main`), so a poisoned lock is never seen.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sends a frame, waiting for the client up to the socket's send timeout per part.
pub(super) fn send_frame(socket: &UnixStream, mut frame: Frame) -> Result<(), BufferError> {
    while !frame.is_sent() {
        let (bytes, descriptors) = frame.next_part();
        send_with_fds(socket.as_fd(), bytes, &descriptors)?;
        let sent = bytes.len();
        frame.advance(sent);
    }
    Ok(())
}
