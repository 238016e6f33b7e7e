//! The outgoing side of a session: frames go directly to the socket if it accepts them, else through a
//! bounded queue and a writer thread.
//!
//! Invariants: frames are sent completely and in order, and the core thread never waits for a client. The
//! queue is bounded by [`QUEUE_FRAMES_MAX`] and [`QUEUE_BYTES_MAX`]; a session that exceeds them is closed.
//! So is a session whose socket accepts nothing for [`SEND_TIMEOUT`].
//!
//! Frames are sent directly because waking the writer takes as long as a match (about 50 µs on a small
//! virtual machine). Large load replies go to the writer, which also encodes them: 8,192 blocks take about
//! a millisecond.

use std::collections::VecDeque;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use reprise_agent_core::effect::{DeviceId, Reply};
use reprise_agent_core::event::RequestId;
use reprise_buffers::{Arena, BufferError, send_with_fds, try_send_with_fds};

use super::encode;
use super::frame::Frame;

/// Maximum number of queued frames: the maximum of requests in flight, and as many notices.
pub(super) const QUEUE_FRAMES_MAX: usize = 2 * super::REQUESTS_IN_FLIGHT_MAX;

/// Maximum number of queued bytes: 27 load replies of the maximum size (2.3 MiB).
pub(super) const QUEUE_BYTES_MAX: usize = 64 << 20;

/// How long a client may read nothing before its session is closed.
pub(super) const SEND_TIMEOUT: Duration = Duration::from_secs(10);

/// Load replies with more blocks are encoded by the writer. 256 blocks of 64 checksums: 70 KiB, 20 µs.
const DIRECT_BLOCKS_MAX: usize = 256;

pub(super) enum Outgoing {
    Frame(Frame),
    /// A reply to be encoded by the writer.
    Reply {
        request: RequestId,
        reply: Reply,
        /// Devices that the session does not know, with their descriptors, if they have one.
        devices: Vec<(DeviceId, Option<OwnedFd>)>,
    },
}

/// The outgoing side of one session, shared by core thread, reader and writer.
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
    /// Queued frames that pass queue pairs, the one that is being sent included.
    queued_grants: usize,
    phase: Phase,
}

/// ```text
/// Open ◄──► Writing ──close_when_sent──► Closing ──queue empty──► Closed
///  └────────────────────────────────────────┴── failure, close ─────┘
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Phase {
    /// Nothing is queued: frames go directly to the socket.
    #[default]
    Open,
    /// The writer is sending a frame; other threads must queue.
    Writing,
    /// No further frames are accepted; closes once the queue is empty.
    Closing,
    Closed,
}

impl Outgoing {
    fn bytes_estimated(&self) -> usize {
        match self {
            Outgoing::Frame(frame) => frame.len(),
            Outgoing::Reply { reply: Reply::Loaded { blocks, .. }, .. } => {
                // Place, status and source take about 24 bytes; all blocks have the same number of objects.
                let objects = blocks.iter().find_map(|block| match block {
                    reprise_agent_core::effect::LoadedBlock::Ok { checksums, .. } => Some(checksums.len()),
                    reprise_agent_core::effect::LoadedBlock::Lost(_) => None,
                });
                blocks.len() * (24 + 4 * objects.unwrap_or(0))
            }
            Outgoing::Reply { .. } => 64,
        }
    }

    fn is_grant(&self) -> bool {
        matches!(self, Outgoing::Frame(frame) if frame.is_grant())
    }

    fn is_large(&self) -> bool {
        matches!(self, Outgoing::Reply { reply: Reply::Loaded { blocks, .. }, .. } if blocks.len() > DIRECT_BLOCKS_MAX)
    }

    fn into_frame(self, arena: &Arena) -> Frame {
        match self {
            Outgoing::Frame(frame) => frame,
            Outgoing::Reply { request, reply, devices } => encode::reply(arena, request, reply, devices),
        }
    }
}

impl Outbound {
    /// `socket` must have a send timeout of [`SEND_TIMEOUT`].
    pub(super) fn new(socket: UnixStream, arena: Arc<Arena>) -> Outbound {
        Outbound { socket, arena, state: Mutex::default(), changed: Condvar::new() }
    }

    /// Sends or queues an item; never waits for the client.
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
                // Partly sent: the rest must precede all later frames, so it is queued first.
                Ok(()) => Outgoing::Frame(frame),
                Err(error) => {
                    tracing::debug!(%error, "the socket of a session failed");
                    self.close_locked(&mut state);
                    return;
                }
            }
        } else {
            outgoing
        };
        state.queued_bytes += outgoing.bytes_estimated();
        state.queued_grants += usize::from(outgoing.is_grant());
        state.queue.push_back(outgoing);
        if state.queue.len() > QUEUE_FRAMES_MAX || state.queued_bytes > QUEUE_BYTES_MAX {
            tracing::warn!(
                frames = state.queue.len(),
                bytes = state.queued_bytes,
                "session closed: the client does not read"
            );
            self.close_locked(&mut state);
            return;
        }
        drop(state);
        self.changed.notify_one();
    }

    /// Whether queue pairs wait for the client, with a descriptor for each.
    pub(super) fn has_queued_grant(&self) -> bool {
        self.lock().queued_grants > 0
    }

    /// Closes the session immediately; reader and writer detect it.
    pub(super) fn close(&self) {
        self.close_locked(&mut self.lock());
    }

    /// Closes the session after everything queued has been sent.
    pub(super) fn close_when_sent(&self) {
        let mut state = self.lock();
        if state.phase != Phase::Closed {
            state.phase = Phase::Closing;
        }
        drop(state);
        self.changed.notify_one();
    }

    /// Returns whether [`Outbound::close_when_sent`] was called.
    pub(super) fn is_closing(&self) -> bool {
        self.lock().phase == Phase::Closing
    }

    /// Runs the writer thread until the session is closed.
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
                let is_grant = outgoing.is_grant();
                // Sending may block for up to `SEND_TIMEOUT`; the core thread must be able to queue
                // meanwhile.
                drop(state);
                let sent = self.send_whole(outgoing.into_frame(&self.arena));
                state = self.lock();
                state.queued_grants = state.queued_grants.saturating_sub(usize::from(is_grant));
                if state.phase == Phase::Writing {
                    state.phase = Phase::Open;
                }
                if let Err(error) = sent {
                    tracing::debug!(%error, "the socket of a session failed, or its client does not read");
                    self.close_locked(&mut state);
                }
            } else if state.phase == Phase::Closing {
                self.close_locked(&mut state);
            } else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Sends as much as the socket accepts immediately.
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
        state.queued_grants = 0;
        match self.socket.shutdown(Shutdown::Both) {
            Err(error) if error.kind() != io::ErrorKind::NotConnected => {
                tracing::debug!(%error, "cannot shut down the socket of a session");
            }
            _ => {}
        }
        self.changed.notify_one();
    }

    /// A panic aborts the process (see `main`), so the lock is never poisoned.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sends a frame; waits for the client up to the socket's send timeout per part.
pub(super) fn send_frame(socket: &UnixStream, mut frame: Frame) -> Result<(), BufferError> {
    while !frame.is_sent() {
        let (bytes, descriptors) = frame.next_part();
        send_with_fds(socket.as_fd(), bytes, &descriptors)?;
        let sent = bytes.len();
        frame.advance(sent);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::time::Instant;

    use reprise_buffers::{ArenaConfig, HugePolicy, MappedRegion};
    use reprise_proto::local::{self, response::Body};

    use super::super::frame::Descriptor;
    use super::*;

    #[test]
    fn queue_pairs_wait_until_the_client_reads() {
        let (mut client, agent) = UnixStream::pair().expect("a socket pair");
        let config = ArenaConfig { bytes: 2 << 20, region_bytes: 2 << 20, huge: HugePolicy::Never };
        let arena = Arc::new(Arena::new(&config).expect("an arena of 2 MiB"));
        let outbound = Arc::new(Outbound::new(agent, arena));
        let frame = |descriptors| {
            let body = Some(Body::Released(local::Released {}));
            Outgoing::Frame(Frame::new(&local::Response { id: 1, body }, descriptors))
        };
        let grant = || frame(vec![Descriptor::Memory(MappedRegion::allocate(4096).expect("memory").1)]);
        outbound.send(grant());
        assert!(!outbound.has_queued_grant(), "the socket has it");
        while outbound.lock().queue.is_empty() {
            outbound.send(frame(Vec::new()));
        }
        outbound.send(grant());
        assert!(outbound.has_queued_grant());
        let writer = std::thread::spawn({
            let outbound = Arc::clone(&outbound);
            move || outbound.write_queued()
        });
        let start = Instant::now();
        // The last byte may be here before the writer has counted its frame as sent.
        client.set_read_timeout(Some(Duration::from_millis(10))).expect("a socket");
        while outbound.has_queued_grant() {
            assert!(start.elapsed() < SEND_TIMEOUT, "the grant is not sent");
            match client.read(&mut [0]) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                read => assert_eq!(read.expect("the agent sends"), 1),
            }
        }
        outbound.close();
        writer.join().expect("it ends");
    }
}
