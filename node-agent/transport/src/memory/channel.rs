//! One requester's connection to one server: two queues of frames between the two state machines.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::time::Duration;

use reprise_buffers::{PIECE_BYTES, Span};
use reprise_policy::TenantName;
use reprise_policy::fair_order::Weights;
use reprise_policy::peer::{Offer, PeerEvent};

use crate::counters::{Counters, add, raise};
use crate::error::TransportError;
use crate::inbound::{Inbound, NewFetch, NewOffer, NewStream};
use crate::limits::{
    BLOCKS_PER_CONNECTION_MAX, CREDIT_PARTS, REQUEST_DEADLINE_MAX, REQUESTS_PER_CONNECTION_MAX,
};
use crate::outbound::{BlockCompletion, BlockDone, Body, OutFrame, Outbound, Step};
use crate::wire::{BlocksBody, Kind, OfferAnswerBody, decode_block_header};

/// Counters of both ends.
pub(super) struct Ends<'a> {
    pub(super) requester: &'a Counters,
    pub(super) server: &'a Counters,
}

/// Effect of the line on the payload that crosses it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Line {
    Clean,
    /// Flips one bit of every data frame.
    Corrupting,
}

/// Effect of one step on the server.
pub(super) enum DeliveryOutcome {
    Nothing,
    Request { stream: u64, body: BlocksBody },
    Offer { stream: u64, body: BlocksBody },
    Served { done: BlockDone, ended: bool },
    Aborted { serve: u64 },
}

/// State of both ends and of the frames between them.
pub(super) struct Channel {
    pub(super) outbound: Outbound,
    /// Since when the channel owes an answer and is stalled.
    pub(super) stalled_since: Option<Duration>,
    inbound: Inbound,
    upward: VecDeque<UpFrame>,
    downward: VecDeque<OutFrame>,
    next_stream: u64,
    deadlines: BTreeSet<(Duration, u64)>,
    deadline_of: HashMap<u64, Duration>,
    open_blocks: usize,
    window: u64,
    consumed: u64,
}

/// A frame from requester to server.
enum UpFrame {
    Request { stream: u64, body: BlocksBody },
    Offer { stream: u64, body: BlocksBody },
    Credit(u64),
    Cancel { stream: u64 },
}

impl UpFrame {
    /// Reports whether the frame starts a stream on the server.
    fn begins(&self, stream: u64) -> bool {
        match self {
            UpFrame::Request { stream: queued, .. } | UpFrame::Offer { stream: queued, .. } => {
                *queued == stream
            }
            UpFrame::Credit(_) | UpFrame::Cancel { .. } => false,
        }
    }
}

impl Channel {
    pub(super) fn new(window: u64, stalled_since: Option<Duration>) -> Channel {
        Channel {
            outbound: Outbound::new(window, Weights::default()),
            stalled_since,
            inbound: Inbound::new(),
            upward: VecDeque::new(),
            downward: VecDeque::new(),
            next_stream: 1,
            deadlines: BTreeSet::new(),
            deadline_of: HashMap::new(),
            open_blocks: 0,
            window,
            consumed: 0,
        }
    }

    pub(super) fn begin(
        &mut self,
        now: Duration,
        fetch: NewFetch,
        (tenant, deadline): (TenantName, Duration),
    ) -> Result<(), TransportError> {
        let layout = fetch.layout;
        let (stream, deadline) = self.begin_stream(now, fetch.blocks.len(), deadline)?;
        let keys = fetch.blocks.iter().map(|block| block.key).collect();
        let body = BlocksBody { layout, deadline, tenant, keys };
        self.upward.push_back(UpFrame::Request { stream, body });
        self.inbound.begin_stream(stream, NewStream::Fetch(fetch));
        Ok(())
    }

    pub(super) fn begin_offer(
        &mut self,
        now: Duration,
        offer: Offer<TenantName>,
    ) -> Result<(), TransportError> {
        let Offer { offer, layout, tenant, deadline, keys } = offer;
        let (stream, deadline) = self.begin_stream(now, 1, deadline)?;
        self.inbound.begin_stream(stream, NewStream::Offer(NewOffer { offer, keys: keys.len() }));
        self.upward.push_back(UpFrame::Offer { stream, body: BlocksBody { layout, deadline, tenant, keys } });
        Ok(())
    }

    /// Allocates a number for a request of so many blocks, and computes its deadline.
    fn begin_stream(
        &mut self,
        now: Duration,
        blocks: usize,
        deadline: Duration,
    ) -> Result<(u64, Duration), TransportError> {
        if self.deadline_of.len() >= REQUESTS_PER_CONNECTION_MAX
            || self.open_blocks + blocks > BLOCKS_PER_CONNECTION_MAX
        {
            return Err(TransportError::busy("too many requests or blocks in flight to this peer"));
        }
        if self.deadline_of.is_empty() && self.stalled_since.is_some() {
            self.stalled_since = Some(now);
        }
        let stream = self.next_stream;
        self.next_stream += 1;
        let deadline = deadline.min(REQUEST_DEADLINE_MAX);
        self.deadlines.insert((now.saturating_add(deadline), stream));
        self.deadline_of.insert(stream, now.saturating_add(deadline));
        self.open_blocks += blocks;
        Ok((stream, deadline))
    }

    pub(super) fn has_work(&self) -> bool {
        !self.upward.is_empty() || !self.downward.is_empty() || self.outbound.has_next()
    }

    /// Moves one frame; requests and credit first.
    pub(super) fn deliver(&mut self, line: Line, ends: &Ends<'_>) -> DeliveryOutcome {
        match self.upward.pop_front() {
            Some(UpFrame::Request { stream, body }) => return DeliveryOutcome::Request { stream, body },
            Some(UpFrame::Offer { stream, body }) => return DeliveryOutcome::Offer { stream, body },
            Some(UpFrame::Credit(bytes)) => {
                self.outbound.add_credit(bytes).expect("only used credit is returned");
                return DeliveryOutcome::Nothing;
            }
            Some(UpFrame::Cancel { stream }) => {
                self.outbound.cancel(stream);
                return DeliveryOutcome::Nothing;
            }
            None => {}
        }
        while let Some(step) = self.outbound.next() {
            match step {
                Step::Aborted { serve } => {
                    self.drop_frames(serve);
                    return DeliveryOutcome::Aborted { serve };
                }
                Step::Frame(frame) => self.downward.push_back(frame),
            }
        }
        raise(&ends.server.in_flight_bytes_max, self.outbound.in_flight_bytes());
        let Some(frame) = self.downward.pop_front() else { return DeliveryOutcome::Nothing };
        self.receive(&frame, line, ends);
        let Some(done) = frame.done else { return DeliveryOutcome::Nothing };
        let finished = self.outbound.finished(done);
        if done.whole && finished != BlockCompletion::Stale {
            add(&ends.server.blocks_served, 1);
        }
        match finished {
            BlockCompletion::Stale => DeliveryOutcome::Nothing,
            BlockCompletion::Block => DeliveryOutcome::Served { done, ended: false },
            BlockCompletion::Request => DeliveryOutcome::Served { done, ended: true },
        }
    }

    fn receive(&mut self, frame: &OutFrame, line: Line, ends: &Ends<'_>) {
        let place = (frame.header.stream, frame.header.block);
        let taken = match (&frame.body, frame.header.kind) {
            (Body::Nothing, Kind::Absent) => self.inbound.absent(place.0, place.1, ends.requester),
            (Body::Bytes(body), Kind::BlockHeader) => decode_block_header(body)
                .and_then(|(tier, checksums)| self.inbound.block_header(place, tier, checksums)),
            (Body::Bytes(body), Kind::OfferAnswer) => {
                OfferAnswerBody::decode(body).and_then(|answer| self.inbound.offer_answer(place.0, answer))
            }
            (Body::Memory(span), Kind::Data) => {
                add(&ends.server.sent_bytes, span.len() as u64);
                self.inbound
                    .begin(place, u64::from(frame.header.argument), span.len() as u64)
                    .map(|()| self.copy(span, line, ends.requester))
            }
            _ => unreachable!("a server makes no other frames"),
        };
        taken.expect("a server in memory respects the protocol");
        self.inbound.flush();
        self.account();
    }

    /// Copies payload into its destination, or drops it.
    fn copy(&mut self, span: &Span, line: Line, counters: &Counters) {
        let mut buffer = vec![0; PIECE_BYTES];
        let mut at = 0;
        while self.inbound.rest() > 0 {
            let piece = &mut buffer[..PIECE_BYTES.min(span.len() - at)];
            span.slice(at, piece.len()).expect("the piece lies inside").copy_out(piece);
            if line == Line::Corrupting && at == 0 {
                piece[0] ^= 1;
            }
            self.inbound.deliver(piece, counters);
            at += piece.len();
        }
        self.consumed += span.len() as u64;
        if self.consumed >= (self.window / CREDIT_PARTS).max(1) {
            self.upward.push_back(UpFrame::Credit(std::mem::take(&mut self.consumed)));
        }
    }

    pub(super) fn pass_deadlines(&mut self, now: Duration, counters: &Counters) {
        while let Some((at, stream)) = self.deadlines.first().copied().filter(|(at, _)| *at <= now) {
            self.deadlines.remove(&(at, stream));
            add(&counters.deadlines_passed, 1);
            self.inbound.expire(stream, counters);
            let before = self.upward.len();
            self.upward.retain(|up| !up.begins(stream));
            if self.upward.len() == before {
                self.upward.push_back(UpFrame::Cancel { stream });
            }
        }
        self.account();
    }

    /// Ends the serves whose deadline has passed; their memory is no longer read.
    pub(super) fn expire_serves(&mut self, now: Duration) -> Vec<u64> {
        let expired = self.outbound.expire(now);
        for serve in &expired {
            self.drop_frames(*serve);
        }
        expired
    }

    /// Reports whether the requester must give up the channel.
    pub(super) fn is_lost(&self, now: Duration, stall_timeout: Duration) -> bool {
        self.stall_deadline(stall_timeout).is_some_and(|at| at <= now)
    }

    pub(super) fn next_deadline(&self, stall_timeout: Duration) -> Option<Duration> {
        let deadline = self.deadlines.first().map(|(at, _)| *at);
        let serve = self.outbound.next_deadline();
        deadline.into_iter().chain(self.stall_deadline(stall_timeout)).chain(serve).min()
    }

    pub(super) fn fail_all(&mut self, counters: &Counters) {
        self.inbound.expire_all(counters);
        self.account();
    }

    pub(super) fn take_events(&mut self) -> std::vec::Drain<'_, PeerEvent> {
        self.inbound.take_events()
    }

    fn stall_deadline(&self, stall_timeout: Duration) -> Option<Duration> {
        let since = self.stalled_since.filter(|_| !self.deadline_of.is_empty())?;
        Some(since + stall_timeout)
    }

    /// Drops the frames of a serve that are in flight, and returns their credit to the server.
    fn drop_frames(&mut self, serve: u64) {
        let mut dropped_bytes = 0;
        self.downward.retain(|frame| {
            if let (true, Body::Memory(span)) = (frame.serve == serve, &frame.body) {
                dropped_bytes += span.len() as u64;
            }
            frame.serve != serve
        });
        self.outbound.add_credit(dropped_bytes).expect("the frames used this credit");
    }

    fn account(&mut self) {
        let ended = self.inbound.take_ended();
        self.open_blocks -= ended.blocks;
        for stream in ended.streams {
            if let Some(deadline) = self.deadline_of.remove(&stream) {
                self.deadlines.remove(&(deadline, stream));
            }
        }
    }
}
