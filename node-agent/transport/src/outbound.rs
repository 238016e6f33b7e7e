//! The serving side of a connection as a state machine: open requests and offers, queued pieces, credit,
//! deadlines. It has no clock, no socket and no thread: the TCP and the in-memory transport both drive it and
//! pass the time.
//!
//! ```text
//! block:  Waiting ──header──► Headed ──last objects queued──► Closed ──written──► Done (ServeDone)
//!            └───────────────absent──────────────────────────►   │
//!         any ──cancel, deadline, connection gone──► request forgotten (ServeAborted)
//! ```
//!
//! Invariants:
//!
//! * Pieces of one tenant are sent in the order of the core's calls; a range longer than a frame is sent as several
//!   frames. Tenants get shares of the connection by weight ([`FairQueue`]). Ends of requests and answers precede.
//! * A data frame is sent only when the requester's credit covers it. A frame is at most a quarter of the
//!   window, and the requester holds back less than a quarter, so waiting for credit always ends.
//! * A request that has ended is unknown: later pieces of the core for it are dropped.
//! * A request is not open beyond its deadline, no matter how slowly its requester reads.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::time::Duration;

use reprise_buffers::Span;
use reprise_policy::fair_order::Weights;
use reprise_policy::fair_queue::FairQueue;
use reprise_policy::{Layout, TenantName, Tier};

use crate::limits::{
    BLOCKS_PER_CONNECTION_MAX, CREDIT_PARTS, DATA_FRAME_BYTES_MAX, QUEUED_PIECES_MAX,
    REQUESTS_PER_CONNECTION_MAX, SERVER_SLACK,
};
use crate::wire::{
    BlocksBody, FRAME_HEADER_BYTES, FrameHeader, Kind, OfferAnswerBody, ProtocolError, encode_block_header,
};

/// State of all requests and offers of a connection's server.
pub(crate) struct Outbound {
    serves: HashMap<u64, Serve>,
    /// Offers without an answer, or whose answer was not written yet.
    offers: HashMap<u64, OpenOffer>,
    /// Number of each request and offer by its stream.
    streams: HashMap<u64, u64>,
    /// Deadline of each request and offer.
    deadlines: BTreeSet<(Duration, u64)>,
    /// Number of unfinished blocks of all requests.
    blocks: usize,
    /// Ends of cancelled requests, and answers to offers.
    control: VecDeque<Piece>,
    pieces: FairQueue<TenantName, Piece>,
    window: u64,
    credit: u64,
}

/// Next action of the driver.
pub(crate) enum Step {
    /// Write this frame, then report `done` with [`Outbound::finished`].
    Frame(OutFrame),
    /// Notify the core that a cancelled request has ended.
    Aborted { serve: u64 },
}

/// A frame to write.
pub(crate) struct OutFrame {
    pub(crate) serve: u64,
    pub(crate) header: FrameHeader,
    pub(crate) body: Body,
    /// The block that is finished when this frame is written.
    pub(crate) done: Option<BlockDone>,
}

/// Contents behind a frame's header.
pub(crate) enum Body {
    Nothing,
    Bytes(Vec<u8>),
    Memory(Span),
}

/// A block of a request whose pieces have all been written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockDone {
    pub(crate) serve: u64,
    pub(crate) block: u32,
    /// False for a block that was reported absent.
    pub(crate) whole: bool,
}

/// Effect of a written block on its request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlockCompletion {
    /// The request has ended meanwhile; `ServeAborted` notifies the core.
    Stale,
    /// The block is done, but other blocks of the request are not.
    Block,
    /// It was the request's last block.
    Request,
}

/// A call of the core that cannot be executed. The block was reported absent, so that the peer does not wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum InvalidCall {
    #[error("block index outside the request")]
    Block,
    #[error("number of checksums differs from the layout's objects")]
    Checksums,
    #[error("second header, or objects before the header")]
    Order,
    #[error("range outside the arena, or not whole objects inside the block")]
    Range,
    #[error("too many pieces queued for one peer")]
    Queue,
}

/// An offer; offers and requests share one number space.
struct OpenOffer {
    stream: u64,
    /// Number of offered keys; `None` once the answer is queued.
    keys: Option<usize>,
    until: Duration,
}

struct Serve {
    stream: u64,
    tenant: TenantName,
    layout: Layout,
    phases: Vec<Phase>,
    unfinished: usize,
    until: Duration,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Waiting,
    Headed,
    Closed,
    Done,
}

#[derive(Clone, Copy)]
struct Place {
    serve: u64,
    stream: u64,
    block: u32,
}

enum Piece {
    Header { place: Place, body: Vec<u8> },
    Data { place: Place, from: Span, offset: u64, last: bool },
    Absent { place: Place },
    Aborted { serve: u64 },
    Answer { offer: u64, stream: u64, body: Vec<u8> },
}

impl Outbound {
    /// Creates the state; `window` is the credit that the requester announced.
    pub(crate) fn new(window: u64, weights: Weights<TenantName>) -> Outbound {
        Outbound {
            serves: HashMap::new(),
            offers: HashMap::new(),
            streams: HashMap::new(),
            deadlines: BTreeSet::new(),
            blocks: 0,
            control: VecDeque::new(),
            pieces: FairQueue::new(weights),
            window,
            credit: window,
        }
    }

    /// Opens a request, which ends at `until` at the latest.
    pub(crate) fn open(
        &mut self,
        (serve, stream): (u64, u64),
        body: &BlocksBody,
        until: Duration,
    ) -> Result<(), ProtocolError> {
        let blocks = body.keys.len();
        self.open_stream((serve, stream), blocks, until)?;
        let phases = vec![Phase::Waiting; blocks];
        let (layout, tenant) = (body.layout, body.tenant.clone());
        self.serves.insert(serve, Serve { stream, tenant, layout, phases, unfinished: blocks, until });
        Ok(())
    }

    /// Opens an offer. It ends with its answer or without one; the core is not notified in either case.
    pub(crate) fn open_offer(
        &mut self,
        (offer, stream): (u64, u64),
        body: &BlocksBody,
        until: Duration,
    ) -> Result<(), ProtocolError> {
        self.open_stream((offer, stream), 1, until)?;
        self.offers.insert(offer, OpenOffer { stream, keys: Some(body.keys.len()), until });
        Ok(())
    }

    fn open_stream(
        &mut self,
        (number, stream): (u64, u64),
        blocks: usize,
        until: Duration,
    ) -> Result<(), ProtocolError> {
        if self.open_requests() >= SERVER_SLACK * REQUESTS_PER_CONNECTION_MAX
            || self.blocks + blocks > SERVER_SLACK * BLOCKS_PER_CONNECTION_MAX
        {
            return Err(ProtocolError::Malformed(
                "more requests or blocks in flight than the protocol allows",
            ));
        }
        if self.streams.insert(stream, number).is_some() {
            return Err(ProtocolError::Malformed("request number in use"));
        }
        self.blocks += blocks;
        self.deadlines.insert((until, number));
        Ok(())
    }

    /// Answers an offer; has no effect on an answered offer.
    pub(crate) fn answer(
        &mut self,
        offer: u64,
        taken: &[u32],
        retry_after: Duration,
    ) -> Result<(), InvalidCall> {
        let Some(open) = self.offers.get_mut(&offer) else { return Ok(()) };
        let (stream, Some(keys)) = (open.stream, open.keys.take()) else { return Ok(()) };
        let body = OfferAnswerBody { retry_after, keys, taken: taken.to_vec() }.encode();
        self.check_room()?;
        self.control.push_back(Piece::Answer { offer, stream, body });
        Ok(())
    }

    /// Cancels a request: its pieces are dropped, and [`Step::Aborted`] comes next.
    pub(crate) fn cancel(&mut self, stream: u64) {
        let Some(number) = self.streams.get(&stream).copied() else { return };
        let is_offer = self.offers.contains_key(&number);
        self.forget(number);
        self.pieces.retain(|piece| !piece.is_of(number));
        self.control.retain(|piece| !piece.is_of(number));
        if !is_offer {
            self.control.push_front(Piece::Aborted { serve: number });
        }
    }

    /// Returns the earliest deadline of the open requests.
    pub(crate) fn next_deadline(&self) -> Option<Duration> {
        self.deadlines.first().map(|(until, _)| *until)
    }

    /// Returns the deadline of an open request. Offers have no deadline here; only their queue is limited.
    pub(crate) fn deadline_of(&self, serve: u64) -> Option<Duration> {
        self.serves.get(&serve).map(|serve| serve.until)
    }

    /// Ends the requests and offers whose deadline has passed and drops their pieces. Returns the requests:
    /// report each as aborted once it has no frame in flight.
    pub(crate) fn expire(&mut self, now: Duration) -> Vec<u64> {
        let (mut expired, open) = (Vec::new(), self.deadlines.len());
        while let Some((_, number)) = self.deadlines.first().copied().filter(|(until, _)| *until <= now) {
            if self.serves.contains_key(&number) {
                expired.push(number);
            }
            self.forget(number);
        }
        if self.deadlines.len() < open {
            let (serves, offers) = (&self.serves, &self.offers);
            let is_open = |piece: &Piece| match piece {
                Piece::Aborted { .. } => true,
                Piece::Answer { offer, .. } => offers.contains_key(offer),
                Piece::Header { place, .. } | Piece::Data { place, .. } | Piece::Absent { place } => {
                    serves.contains_key(&place.serve)
                }
            };
            self.pieces.retain(is_open);
            self.control.retain(is_open);
        }
        expired
    }

    /// Adds credit for payload that the requester has consumed, or that will never be sent.
    pub(crate) fn add_credit(&mut self, bytes: u64) -> Result<(), ProtocolError> {
        let credit = self.credit.checked_add(bytes).filter(|credit| *credit <= self.window);
        self.credit = credit.ok_or(ProtocolError::Malformed("more credit returned than was used"))?;
        Ok(())
    }

    pub(crate) fn header(
        &mut self,
        (serve, block): (u64, u32),
        tier: Tier,
        checksums: &[u32],
    ) -> Result<(), InvalidCall> {
        let Some((place, phase, layout)) = self.find(serve, block)? else { return Ok(()) };
        match phase {
            Phase::Closed | Phase::Done => Ok(()),
            Phase::Headed => self.refuse(place, InvalidCall::Order),
            Phase::Waiting if checksums.len() != layout.objects() as usize => {
                self.refuse(place, InvalidCall::Checksums)
            }
            Phase::Waiting => {
                self.set_phase(place, Phase::Headed);
                self.push(Piece::Header { place, body: encode_block_header(tier, checksums) })
            }
        }
    }

    /// Queues objects: the bytes of `from`, at `offset` of the payload. `None`: their place is invalid.
    pub(crate) fn objects(
        &mut self,
        (serve, block): (u64, u32),
        from: Option<Span>,
        (offset, last): (u64, bool),
    ) -> Result<(), InvalidCall> {
        let Some((place, phase, layout)) = self.find(serve, block)? else { return Ok(()) };
        let bytes = from.as_ref().map_or(0, |from| from.len() as u64);
        let inside = offset.checked_add(bytes).is_some_and(|end| end <= layout.block_bytes());
        let whole = [offset, bytes].iter().all(|value| value.is_multiple_of(layout.object_bytes()));
        match (phase, from) {
            (Phase::Closed | Phase::Done, _) => Ok(()),
            (Phase::Waiting, _) => self.refuse(place, InvalidCall::Order),
            (Phase::Headed, Some(from)) if inside && whole && bytes > 0 => {
                if last {
                    self.set_phase(place, Phase::Closed);
                }
                self.push(Piece::Data { place, from, offset, last })
            }
            (Phase::Headed, _) => self.refuse(place, InvalidCall::Range),
        }
    }

    pub(crate) fn absent(&mut self, serve: u64, block: u32) -> Result<(), InvalidCall> {
        let Some((place, phase, _)) = self.find(serve, block)? else { return Ok(()) };
        match phase {
            Phase::Closed | Phase::Done => Ok(()),
            Phase::Waiting | Phase::Headed => {
                self.set_phase(place, Phase::Closed);
                self.push(Piece::Absent { place })
            }
        }
    }

    /// Returns the next action; `None` when nothing is queued or the credit does not cover the next frame.
    pub(crate) fn next(&mut self) -> Option<Step> {
        if self.control.is_empty() && self.waits_for_credit() {
            return None;
        }
        let next = match self.control.pop_front() {
            Some(piece) => piece,
            None => self.next_piece()?,
        };
        Some(match next {
            Piece::Aborted { serve } => Step::Aborted { serve },
            Piece::Answer { offer, stream, body } => {
                self.forget(offer);
                let header = FrameHeader::with_body(Kind::OfferAnswer, stream, 0, &body);
                Step::Frame(OutFrame { serve: offer, header, body: Body::Bytes(body), done: None })
            }
            Piece::Header { place, body } => {
                let header = FrameHeader::with_body(Kind::BlockHeader, place.stream, place.block, &body);
                Step::Frame(place.frame(header, Body::Bytes(body), None))
            }
            Piece::Absent { place } => {
                let header = FrameHeader::bare(Kind::Absent, place.stream, place.block);
                Step::Frame(place.frame(header, Body::Nothing, Some(place.done(false))))
            }
            Piece::Data { place, from, offset, last } => Step::Frame(data_frame(place, from, (offset, last))),
        })
    }

    /// Removes the next piece of the tenant whose turn it is. Of a range longer than a frame, it is one frame.
    fn next_piece(&mut self) -> Option<Piece> {
        let frame_bytes_max = self.frame_bytes_max();
        let front = self.pieces.front_mut()?;
        if let Piece::Data { place, from, offset, last: _ } = front
            && from.len() as u64 > frame_bytes_max
        {
            let (split, place, at) = (frame_bytes_max as usize, *place, *offset);
            let part = from.slice(0, split).expect("the split lies inside");
            *from = from.slice(split, from.len() - split).expect("the split lies inside");
            *offset += frame_bytes_max;
            self.credit -= frame_bytes_max;
            self.pieces.charge(frame_bytes(frame_bytes_max));
            return Some(Piece::Data { place, from: part, offset: at, last: false });
        }
        let piece = self.pieces.pop(|piece| frame_bytes(piece.data_bytes()))?;
        self.credit -= piece.data_bytes();
        Some(piece)
    }

    /// Reports whether [`Outbound::next`] would return an action.
    pub(crate) fn has_next(&self) -> bool {
        !self.control.is_empty() || (!self.pieces.is_empty() && !self.waits_for_credit())
    }

    /// Reports whether a queued piece waits for credit.
    pub(crate) fn waits_for_credit(&self) -> bool {
        self.next_data_bytes().is_some_and(|bytes| bytes > self.credit)
    }

    /// Handles the write of a frame with `done`.
    pub(crate) fn finished(&mut self, done: BlockDone) -> BlockCompletion {
        let Some(serve) = self.serves.get_mut(&done.serve) else { return BlockCompletion::Stale };
        serve.phases[done.block as usize] = Phase::Done;
        serve.unfinished -= 1;
        self.blocks -= 1;
        if serve.unfinished == 0 {
            self.forget(done.serve);
            return BlockCompletion::Request;
        }
        BlockCompletion::Block
    }

    /// Clears all state and returns the requests that were open or not yet reported as aborted, in order.
    pub(crate) fn abort_all(&mut self) -> Vec<u64> {
        self.pieces.retain(|_| false);
        let unreported = self.control.drain(..).filter_map(|piece| match piece {
            Piece::Aborted { serve } => Some(serve),
            _ => None,
        });
        let mut serves: Vec<u64> = unreported.chain(self.serves.drain().map(|(serve, _)| serve)).collect();
        self.offers.clear();
        self.streams.clear();
        self.deadlines.clear();
        self.blocks = 0;
        serves.sort_unstable();
        serves
    }

    /// Returns the number of open requests and offers.
    pub(crate) fn open_requests(&self) -> usize {
        self.serves.len() + self.offers.len()
    }

    /// Returns the number of sent payload bytes whose credit was not returned.
    pub(crate) fn in_flight_bytes(&self) -> u64 {
        self.window - self.credit
    }

    fn next_data_bytes(&self) -> Option<u64> {
        match self.pieces.front()? {
            Piece::Data { from, .. } => Some((from.len() as u64).min(self.frame_bytes_max())),
            _ => None,
        }
    }

    fn frame_bytes_max(&self) -> u64 {
        DATA_FRAME_BYTES_MAX.min(self.window / CREDIT_PARTS)
    }

    fn find(&self, serve: u64, block: u32) -> Result<Option<(Place, Phase, Layout)>, InvalidCall> {
        let Some(open) = self.serves.get(&serve) else { return Ok(None) };
        let phase = *open.phases.get(block as usize).ok_or(InvalidCall::Block)?;
        Ok(Some((Place { serve, stream: open.stream, block }, phase, open.layout)))
    }

    fn refuse(&mut self, place: Place, error: InvalidCall) -> Result<(), InvalidCall> {
        self.set_phase(place, Phase::Closed);
        self.push(Piece::Absent { place })?;
        Err(error)
    }

    fn set_phase(&mut self, place: Place, phase: Phase) {
        let serve = self.serves.get_mut(&place.serve).expect("find found it");
        serve.phases[place.block as usize] = phase;
    }

    /// Queues a piece of an open request.
    fn push(&mut self, piece: Piece) -> Result<(), InvalidCall> {
        self.check_room()?;
        let serve = piece.serve().and_then(|serve| self.serves.get(&serve));
        let tenant = &serve.expect("find found the request").tenant;
        self.pieces.push(tenant, piece);
        Ok(())
    }

    fn check_room(&self) -> Result<(), InvalidCall> {
        let is_full = self.pieces.len() + self.control.len() >= QUEUED_PIECES_MAX;
        if is_full { Err(InvalidCall::Queue) } else { Ok(()) }
    }

    fn forget(&mut self, serve: u64) {
        if let Some(open) = self.serves.remove(&serve) {
            self.streams.remove(&open.stream);
            self.deadlines.remove(&(open.until, serve));
            self.blocks -= open.unfinished;
        }
        if let Some(open) = self.offers.remove(&serve) {
            self.streams.remove(&open.stream);
            self.deadlines.remove(&(open.until, serve));
            self.blocks -= 1;
        }
    }
}

impl Place {
    fn done(self, whole: bool) -> BlockDone {
        BlockDone { serve: self.serve, block: self.block, whole }
    }

    fn frame(self, header: FrameHeader, body: Body, done: Option<BlockDone>) -> OutFrame {
        OutFrame { serve: self.serve, header, body, done }
    }
}

/// Bytes of a frame, for the shares.
fn frame_bytes(data_bytes: u64) -> u64 {
    FRAME_HEADER_BYTES as u64 + data_bytes
}

/// The frame of a range that fits into one.
fn data_frame(place: Place, from: Span, (offset, last): (u64, bool)) -> OutFrame {
    let header = FrameHeader {
        kind: Kind::Data,
        stream: place.stream,
        block: place.block,
        argument: u32::try_from(offset).expect("a block is at most 128 MiB"),
        length: u32::try_from(from.len()).expect("a frame is at most 8 MiB"),
    };
    place.frame(header, Body::Memory(from), last.then(|| place.done(true)))
}

impl Piece {
    /// Payload bytes of the piece.
    fn data_bytes(&self) -> u64 {
        match self {
            Piece::Data { from, .. } => from.len() as u64,
            _ => 0,
        }
    }

    /// Request of a piece that is queued for a tenant.
    fn serve(&self) -> Option<u64> {
        match self {
            Piece::Header { place, .. } | Piece::Data { place, .. } | Piece::Absent { place } => {
                Some(place.serve)
            }
            Piece::Aborted { .. } | Piece::Answer { .. } => None,
        }
    }

    /// Reports whether the piece belongs to the request or offer of this number.
    fn is_of(&self, number: u64) -> bool {
        match self {
            Piece::Header { place, .. } | Piece::Data { place, .. } | Piece::Absent { place } => {
                place.serve == number
            }
            Piece::Aborted { serve } => *serve == number,
            Piece::Answer { offer, .. } => *offer == number,
        }
    }
}

#[cfg(test)]
mod tests;
