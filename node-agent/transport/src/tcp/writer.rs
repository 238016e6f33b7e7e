//! The writing thread of a connection that a peer opened: sends what the core serves, straight from the arena.
//!
//! Pieces are gathered up to [`BATCH_BYTES`] and handed to one `sendmsg`: 4 MiB are 0.6 ms of a 6.3 GB/s stream, so
//! the system call vanishes, and a block is reported as served at most that much late. A slow peer blocks this
//! thread only.

use std::sync::PoisonError;
use std::time::Instant;

use reprise_buffers::Span;

use super::close::Close;
use super::incoming::{Incoming, State};
use super::socket::{GATHER_MAX, Gather};
use crate::api::TransportEvent;
use crate::counters::{add, raise};
use crate::outbound::{BlockDone, Body, Finished, OutFrame, Step};
use crate::wire::{FRAME_HEADER_BYTES, FrameHeader, Kind};

/// A requester hears from this server at least so many times in its stall timeout.
pub(super) const ALIVE_PER_STALL_TIMEOUT: u32 = 4;

/// Payload gathered for one system call at the most (one frame may exceed it).
const BATCH_BYTES: usize = 4 << 20;

/// Frames gathered at the most: header and body each take a buffer.
const BATCH_FRAMES: usize = GATHER_MAX / 2;

/// What the thread does next.
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
    /// Requests that were cancelled; reported after the frames are written.
    aborted: Vec<u64>,
}

struct Frame {
    header: [u8; FRAME_HEADER_BYTES],
    body: Body,
    done: Option<BlockDone>,
}

/// Body of the writing thread; the reason when writing ended the connection.
pub(super) fn run(incoming: &Incoming) -> Option<Close> {
    let mut batch = Batch { frames: Vec::with_capacity(BATCH_FRAMES), payload_bytes: 0, aborted: Vec::new() };
    let close = loop {
        let close = match next_work(incoming, &mut batch) {
            Work::End => break None,
            Work::Stalled => Some(Close::Stalled("it gives no credit back")),
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
        batch.fill(&mut state);
        if !batch.is_empty() {
            raise(&incoming.common.counters.in_flight_bytes_max, state.outbound.in_flight_bytes());
            return Work::Write;
        }
        let idle = idle_since.elapsed();
        let starved = state.outbound.waits_for_credit();
        if starved && idle >= incoming.common.settings.stall_timeout {
            return Work::Stalled;
        }
        let limit = if starved {
            incoming.common.settings.stall_timeout
        } else if state.outbound.open_requests() > 0 {
            incoming.alive_every
        } else {
            state = incoming.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        if !starved && idle >= limit {
            return Work::Alive;
        }
        let left = limit.saturating_sub(idle);
        state = incoming.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
    }
}

fn send_alive(incoming: &Incoming) -> Option<Close> {
    let frame = FrameHeader::bare(Kind::Alive, 0, 0).encode();
    let mut gather = Gather::with_capacity(1);
    gather.bytes(&frame);
    incoming.socket.send_all(gather).err().map(Close::io)
}

fn write(incoming: &Incoming, batch: &mut Batch) -> Option<Close> {
    let sent = incoming.socket.send_all(batch.gather());
    // After the call nothing reads the spans: sendmsg copies, or has failed.
    if let Err(error) = sent {
        return Some(Close::io(error));
    }
    add(&incoming.common.counters.sent_bytes, batch.payload_bytes as u64);
    for done in batch.frames.drain(..).filter_map(|frame| frame.done) {
        let finished = incoming.lock().outbound.finished(done);
        if finished == Finished::Forgotten {
            continue;
        }
        if finished == Finished::Request {
            incoming.common.unroute(done.serve);
        }
        if done.whole {
            add(&incoming.common.counters.blocks_served, 1);
        }
        (incoming.common.sink)(TransportEvent::ServeDone { serve: done.serve, block: done.block });
    }
    for serve in batch.aborted.drain(..) {
        incoming.report_aborted(serve);
    }
    batch.payload_bytes = 0;
    None
}

impl Batch {
    fn is_empty(&self) -> bool {
        self.frames.is_empty() && self.aborted.is_empty()
    }

    /// Takes what may be sent now.
    fn fill(&mut self, state: &mut State) {
        while self.frames.len() < BATCH_FRAMES && self.payload_bytes < BATCH_BYTES {
            match state.outbound.next() {
                None => return,
                Some(Step::Aborted { serve }) => self.aborted.push(serve),
                Some(Step::Frame(OutFrame { header, body, done })) => {
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
