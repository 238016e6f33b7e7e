//! The writing thread of a connection that a peer opened: sends the pieces that the core serves, straight
//! from the arena.
//!
//! Pieces are gathered up to [`BATCH_BYTES`] for one `sendmsg`. 4 MiB take 0.6 ms on a 6.3 GB/s stream: the
//! cost of the system call is negligible, and the report of a served block is at most that late. A slow peer
//! blocks only this thread, and only until the deadlines of its requests.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use reprise_buffers::{GATHER_MAX, Gather, Span};
use reprise_policy::peer::{PeerEvent, ServeId};

use super::close::Close;
use super::incoming::{Incoming, State};
use super::socket::{PendingSend, SendProgress};
use crate::counters::{add, raise};
use crate::outbound::{BlockCompletion, BlockDone, Body, OutFrame, Step};
use crate::wire::{FRAME_HEADER_BYTES, FrameHeader, Kind};

/// Minimum number of frames that a requester receives from this server in its stall timeout.
pub(super) const ALIVE_PER_STALL_TIMEOUT: u32 = 4;

/// Shortest interval between these frames, even for a shorter stall timeout.
pub(super) const ALIVE_EVERY_MIN: Duration = Duration::from_millis(10);

/// Maximum payload gathered for one system call (one frame may exceed it).
const BATCH_BYTES: usize = 4 << 20;

/// Maximum number of gathered frames: header and body take a buffer each.
const BATCH_FRAMES: usize = GATHER_MAX / 2;

/// Next action of the thread.
enum Work {
    Write,
    Alive,
    End,
    Stalled,
}

/// Frames to be written by one system call.
struct Batch {
    frames: Vec<Frame>,
    payload_bytes: usize,
    /// Earliest deadline of their requests.
    until: Option<Duration>,
    /// Requests that were cancelled or have expired; reported after the frames are written.
    aborted: Vec<u64>,
}

struct Frame {
    header: [u8; FRAME_HEADER_BYTES],
    body: Body,
    done: Option<BlockDone>,
}

/// Body of the writing thread; returns the reason if writing ended the connection.
pub(super) fn run(incoming: &Incoming) -> Option<Close> {
    let mut batch = Batch {
        frames: Vec::with_capacity(BATCH_FRAMES),
        payload_bytes: 0,
        until: None,
        aborted: Vec::new(),
    };
    let close = loop {
        let close = match next_work(incoming, &mut batch) {
            Work::End => break None,
            Work::Stalled => Some(Close::Stalled("the peer returns no credit")),
            Work::Alive => send_alive(incoming),
            Work::Write => write(incoming, &mut batch),
        };
        if let Some(close) = close {
            break Some(close);
        }
    };
    if close.is_some() {
        incoming.end();
    }
    for serve in batch.aborted {
        incoming.report_aborted(serve);
    }
    close
}

fn next_work(incoming: &Incoming, batch: &mut Batch) -> Work {
    let mut state = incoming.lock();
    let idle_since = Instant::now();
    loop {
        if state.over {
            return Work::End;
        }
        batch.aborted.extend(state.outbound.expire(incoming.now()));
        batch.fill(&mut state);
        if !batch.is_empty() {
            raise(&incoming.common.counters.in_flight_bytes_max, state.outbound.in_flight_bytes());
            return Work::Write;
        }
        let (limit, work) = if state.outbound.waits_for_credit() {
            (incoming.common.settings.stall_timeout, Work::Stalled)
        } else if state.outbound.open_requests() > 0 {
            (incoming.alive_every, Work::Alive)
        } else {
            incoming.set_idle(&mut state);
            state = incoming.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        let idle = idle_since.elapsed();
        if idle >= limit {
            return work;
        }
        let deadline = state.outbound.next_deadline().map(|until| until.saturating_sub(incoming.now()));
        let left = deadline.map_or(limit - idle, |deadline| deadline.min(limit - idle));
        state = incoming.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
    }
}

fn send_alive(incoming: &Incoming) -> Option<Close> {
    let frame = FrameHeader::bare(Kind::Alive, 0, 0).encode();
    let mut gather = Gather::with_capacity(1);
    gather.bytes(&frame);
    send(incoming, gather, None).err()
}

fn write(incoming: &Incoming, batch: &mut Batch) -> Option<Close> {
    let until = batch.until.take();
    let sent = send(incoming, batch.gather(), until);
    // From here on no thread reads the spans: sendmsg has copied them, or has failed.
    if let Err(close) = sent {
        batch.frames.clear();
        return Some(close);
    }
    add(&incoming.common.counters.sent_bytes, std::mem::take(&mut batch.payload_bytes) as u64);
    for done in batch.frames.drain(..).filter_map(|frame| frame.done) {
        let finished = incoming.lock().outbound.finished(done);
        if finished == BlockCompletion::Stale {
            continue;
        }
        if finished == BlockCompletion::Request {
            incoming.common.unroute(done.serve);
        }
        if done.whole {
            add(&incoming.common.counters.blocks_served, 1);
        }
        (incoming.common.sink)(PeerEvent::ServeDone { serve: ServeId(done.serve), block: done.block }.into());
    }
    for serve in batch.aborted.drain(..) {
        incoming.report_aborted(serve);
    }
    None
}

/// Sends, and checks the deadlines of all requests. `until`: earliest deadline of the requests being sent. A
/// partially sent frame cannot be withdrawn, so an expired deadline then ends the connection.
fn send(incoming: &Incoming, gather: Gather<'_>, until: Option<Duration>) -> Result<(), Close> {
    let mut sending = PendingSend::new(gather);
    loop {
        let next = incoming.lock().outbound.next_deadline();
        let wait_until = until.into_iter().chain(next).min().map(|at| incoming.instant(at));
        if incoming.socket.send(&mut sending, wait_until).map_err(Close::io)? == SendProgress::All {
            return Ok(());
        }
        let now = incoming.now();
        if until.is_some_and(|until| until <= now) {
            return Err(Close::Stalled("the peer reads too slowly for the deadline of its request"));
        }
        // No frame of these is being sent: the deadlines of sent frames are not before `until`.
        let expired = incoming.lock().outbound.expire(now);
        for serve in expired {
            incoming.report_aborted(serve);
        }
    }
}

impl Batch {
    fn is_empty(&self) -> bool {
        self.frames.is_empty() && self.aborted.is_empty()
    }

    /// Takes the frames that may be sent now.
    fn fill(&mut self, state: &mut State) {
        while self.frames.len() < BATCH_FRAMES && self.payload_bytes < BATCH_BYTES {
            match state.outbound.next() {
                None => return,
                Some(Step::Aborted { serve }) => self.aborted.push(serve),
                Some(Step::Frame(OutFrame { serve, header, body, done })) => {
                    self.until = self.until.into_iter().chain(state.outbound.deadline_of(serve)).min();
                    if let Body::Memory(span) = &body {
                        self.payload_bytes += Span::len(span);
                    }
                    self.frames.push(Frame { header: header.encode(), body, done });
                }
            }
        }
    }

    fn gather(&self) -> Gather<'_> {
        let mut gather = Gather::with_capacity(2 * self.frames.len());
        for frame in &self.frames {
            gather.bytes(&frame.header);
            match &frame.body {
                Body::Nothing => {}
                Body::Bytes(bytes) => gather.bytes(bytes),
                Body::Memory(span) => gather.span(span),
            }
        }
        gather
    }
}
