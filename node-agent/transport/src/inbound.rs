//! The requester's side of a connection as a state machine: permitted writes, verification, events for the
//! core. It has no clock, no socket and no thread: the TCP and the in-memory transport both drive it.
//!
//! ```text
//! block:  Wanted ──header──► Arriving ──last object verified──► Ended (all layers reported)
//!            │                   │
//!            └── absent, mismatch, deadline, peer lost ───────► Ended (Failed)
//! ```
//!
//! Invariants:
//!
//! * A destination is written ([`Inbound::deliver`]) only while its block is `Arriving`, and each byte at
//!   most once. Data for an ended block or an unknown stream is dropped.
//! * Events of a block are ordered, layers only grow, and the event that ends a block is its last.
//! * Several ranges of one block coalesce into one `Layers` event until [`Inbound::flush`].
//!
//! A range of data begins at an object's first byte, or where the previous range left an object unfinished.
//! Any other range is a protocol error. One running checksum per block is therefore enough.

mod arrival;

use std::collections::HashMap;

use reprise_buffers::Span;
use reprise_policy::peer::{FillError, FillId, FillUpdate, OfferId, PeerEvent};
use reprise_policy::{Layout, Tier};

use crate::api::Destination;
use crate::counters::{Counters, add};
use crate::wire::{OfferAnswerBody, ProtocolError};
use arrival::{Arrival, Outcome};

/// State of all fetches and offers of a connection's requester.
pub(crate) struct Inbound {
    fetches: HashMap<u64, Fetch>,
    /// Offers without an answer.
    offers: HashMap<u64, NewOffer>,
    /// The data range that is arriving.
    current: Option<Current>,
    /// Blocks with verified layers that were not reported yet.
    burst: Vec<Place>,
    /// Payload bytes that have arrived since the first of them.
    burst_bytes: u64,
    events: Vec<PeerEvent>,
    ended: EndedStreams,
}

/// A new fetch or offer.
pub(crate) enum NewStream {
    Fetch(NewFetch),
    Offer(NewOffer),
}

#[derive(Clone, Copy)]
pub(crate) struct NewOffer {
    pub(crate) offer: OfferId,
    pub(crate) keys: usize,
}

pub(crate) struct NewFetch {
    pub(crate) layout: Layout,
    pub(crate) blocks: Vec<Destination>,
}

/// Fetches, offers and blocks that have ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct EndedStreams {
    /// Fetches whose blocks have all ended, and offers.
    pub(crate) streams: Vec<u64>,
    /// Number of blocks; an offer counts as one.
    pub(crate) blocks: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct Place {
    stream: u64,
    block: u32,
}

struct Current {
    place: Place,
    /// Offset of the next byte in the payload.
    position: u64,
    /// End of the range in the payload.
    end: u64,
    /// False once the block has ended; the rest is dropped.
    wanted: bool,
}

struct Fetch {
    layout: Layout,
    blocks: Vec<Block>,
    unfinished: usize,
}

enum Block {
    Wanted { fill: FillId, into: Span },
    Arriving(Box<Arrival>),
    Ended,
}

impl Inbound {
    pub(crate) fn new() -> Inbound {
        Inbound {
            fetches: HashMap::new(),
            offers: HashMap::new(),
            current: None,
            burst: Vec::new(),
            burst_bytes: 0,
            events: Vec::new(),
            ended: EndedStreams::default(),
        }
    }

    pub(crate) fn begin_stream(&mut self, stream: u64, begun: NewStream) {
        match begun {
            NewStream::Fetch(fetch) => self.insert(stream, fetch),
            NewStream::Offer(offer) => drop(self.offers.insert(stream, offer)),
        }
    }

    fn insert(&mut self, stream: u64, fetch: NewFetch) {
        let blocks: Vec<Block> = fetch
            .blocks
            .into_iter()
            .map(|block| Block::Wanted { fill: block.fill, into: block.into })
            .collect();
        let unfinished = blocks.len();
        let previous = self.fetches.insert(stream, Fetch { layout: fetch.layout, blocks, unfinished });
        assert!(previous.is_none(), "stream numbers count up");
    }

    pub(crate) fn is_open(&self, stream: u64) -> bool {
        self.fetches.contains_key(&stream) || self.offers.contains_key(&stream)
    }

    /// Number of fetches with unfinished blocks, and of offers without an answer.
    pub(crate) fn open_streams(&self) -> usize {
        self.fetches.len() + self.offers.len()
    }

    /// Handles the peer's answer to an offer.
    pub(crate) fn offer_answer(&mut self, stream: u64, answer: OfferAnswerBody) -> Result<(), ProtocolError> {
        let Some(open) = self.offers.get(&stream) else { return Ok(()) };
        if open.keys != answer.keys {
            return Err(ProtocolError::Malformed("answer to an offer: wrong number of keys"));
        }
        let OfferAnswerBody { retry_after, taken, .. } = answer;
        self.end_offer(stream, |offer| PeerEvent::OfferAnswered { offer, taken, retry_after });
        Ok(())
    }

    fn end_offer(&mut self, stream: u64, event: impl FnOnce(OfferId) -> PeerEvent) {
        if let Some(open) = self.offers.remove(&stream) {
            self.events.push(event(open.offer));
            self.ended.blocks += 1;
            self.ended.streams.push(stream);
        }
    }

    /// Handles the tier and checksums of a block.
    pub(crate) fn block_header(
        &mut self,
        (stream, block): (u64, u32),
        tier: Tier,
        checksums: Box<[u32]>,
    ) -> Result<(), ProtocolError> {
        let Some(fetch) = self.fetches.get_mut(&stream) else { return Ok(()) };
        let objects = fetch.layout.objects() as usize;
        let layout = fetch.layout;
        let slot = fetch.block(block)?;
        let (fill, into) = match slot {
            Block::Ended => return Ok(()),
            Block::Arriving(_) => return Err(ProtocolError::Malformed("second header of a block")),
            Block::Wanted { .. } if checksums.len() != objects => {
                return Err(ProtocolError::Malformed(
                    "block header: number of checksums does not match the layout",
                ));
            }
            Block::Wanted { fill, into } => (*fill, into.clone()),
        };
        *slot = Block::Arriving(Box::new(Arrival::new(fill, into, layout, (tier, checksums))));
        Ok(())
    }

    /// Handles a block that the peer does not have.
    pub(crate) fn absent(
        &mut self,
        stream: u64,
        block: u32,
        counters: &Counters,
    ) -> Result<(), ProtocolError> {
        let Some(fetch) = self.fetches.get_mut(&stream) else { return Ok(()) };
        fetch.block(block)?;
        self.fail(Place { stream, block }, FillError::Absent, counters);
        Ok(())
    }

    /// Begins a range of a block's payload.
    pub(crate) fn begin(
        &mut self,
        (stream, block): (u64, u32),
        offset: u64,
        length: u64,
    ) -> Result<(), ProtocolError> {
        assert!(self.current.is_none(), "a range begins when the one before has arrived");
        // Also of an unknown stream: a range ends with its last byte.
        if length == 0 {
            return Err(ProtocolError::Malformed("data without a byte"));
        }
        let mut wanted = false;
        if let Some(fetch) = self.fetches.get_mut(&stream) {
            if offset + length > fetch.layout.block_bytes() {
                return Err(ProtocolError::Malformed("data outside the block"));
            }
            match fetch.block(block)? {
                Block::Wanted { .. } => {
                    return Err(ProtocolError::Malformed("data before the block's header"));
                }
                Block::Arriving(arrival) => {
                    arrival.check_range(offset, length)?;
                    wanted = true;
                }
                Block::Ended => {}
            }
        }
        self.current =
            Some(Current { place: Place { stream, block }, position: offset, end: offset + length, wanted });
        Ok(())
    }

    /// Remaining bytes of the arriving range; 0 when no range is arriving.
    pub(crate) fn rest(&self) -> u64 {
        self.current.as_ref().map_or(0, |current| current.end - current.position)
    }

    /// Copies the next bytes of the arriving range to their destination and checksums the copied bytes. Drops
    /// them if the block has ended.
    pub(crate) fn deliver(&mut self, bytes: &[u8], counters: &Counters) {
        let current = self.current.as_mut().expect("bytes come only while a range is arriving");
        let (place, from, wanted) = (current.place, current.position, current.wanted);
        current.position += bytes.len() as u64;
        assert!(current.position <= current.end, "a range has at most its announced length");
        if current.position == current.end {
            self.current = None;
        }
        // A fetch may have begun within a range of its number, which has any block then.
        let fetch = self.fetches.get_mut(&place.stream);
        let block = fetch.and_then(|fetch| fetch.blocks.get_mut(place.block as usize));
        let Some(Block::Arriving(arrival)) = block.filter(|_| wanted) else {
            add(&counters.discarded_bytes, bytes.len() as u64);
            return;
        };
        add(&counters.received_bytes, bytes.len() as u64);
        match arrival.deliver(from, bytes) {
            Outcome::Partial if self.burst.is_empty() => {}
            Outcome::Partial => self.burst_bytes += bytes.len() as u64,
            Outcome::NewLayers => {
                self.burst_bytes += bytes.len() as u64;
                if !std::mem::replace(&mut arrival.in_burst, true) {
                    self.burst.push(place);
                }
            }
            Outcome::Complete => self.complete(place, counters),
            Outcome::Mismatch => self.fail(place, FillError::Corrupt, counters),
        }
    }

    /// Fails the unfinished blocks of a fetch, or an offer: its deadline has passed, or the peer is lost.
    pub(crate) fn expire(&mut self, stream: u64, counters: &Counters) {
        if self.offers.contains_key(&stream) {
            add(&counters.offers_failed, 1);
            return self.end_offer(stream, |offer| PeerEvent::OfferFailed { offer });
        }
        let blocks = self.fetches.get(&stream).map_or(0, |fetch| fetch.blocks.len());
        for block in 0..u32::try_from(blocks).expect("bounded by BLOCKS_PER_REQUEST_MAX") {
            self.fail(Place { stream, block }, FillError::PeerLost, counters);
        }
    }

    /// Expires every fetch and offer, in the order in which they began.
    pub(crate) fn expire_all(&mut self, counters: &Counters) {
        let mut streams: Vec<u64> = self.fetches.keys().chain(self.offers.keys()).copied().collect();
        streams.sort_unstable();
        for stream in streams {
            self.expire(stream, counters);
        }
    }

    /// Number of payload bytes received since the oldest unreported layer.
    pub(crate) fn unreported_bytes(&self) -> u64 {
        self.burst_bytes
    }

    /// Creates an event for each block with verified but unreported layers.
    pub(crate) fn flush(&mut self) {
        self.burst_bytes = 0;
        for place in std::mem::take(&mut self.burst) {
            let block = self
                .fetches
                .get_mut(&place.stream)
                .and_then(|fetch| fetch.blocks.get_mut(place.block as usize));
            if let Some(Block::Arriving(arrival)) = block {
                self.events.extend(arrival.report());
            }
        }
    }

    /// Takes the events since the last call, in order.
    pub(crate) fn take_events(&mut self) -> std::vec::Drain<'_, PeerEvent> {
        self.events.drain(..)
    }

    /// Takes the streams and blocks that have ended since the last call. Account for them before delivering
    /// the events: an observer of a fetch's end may begin another fetch at once.
    pub(crate) fn take_ended(&mut self) -> EndedStreams {
        std::mem::take(&mut self.ended)
    }

    fn complete(&mut self, place: Place, counters: &Counters) {
        if let Some(Block::Arriving(mut arrival)) = self.end(place) {
            arrival.zero_padding();
            self.events.extend(arrival.report());
            add(&counters.blocks_received, 1);
        }
        self.count_ended(place.stream);
    }

    fn fail(&mut self, place: Place, error: FillError, counters: &Counters) {
        let fill = match self.end(place) {
            Some(Block::Wanted { fill, .. }) => fill,
            Some(Block::Arriving(mut arrival)) => {
                self.events.extend(arrival.report());
                arrival.fill
            }
            Some(Block::Ended) | None => return,
        };
        self.events.push(PeerEvent::Fill { fill, update: FillUpdate::Failed(error) });
        match error {
            FillError::Corrupt => add(&counters.blocks_corrupt, 1),
            FillError::Absent => add(&counters.blocks_absent, 1),
            FillError::PeerLost => add(&counters.blocks_lost, 1),
            FillError::Device | FillError::Refused | FillError::Stranded => {
                unreachable!("a device's error is not passed here")
            }
        }
        self.count_ended(place.stream);
    }

    /// Removes a block from its fetch; its destination is no longer written.
    fn end(&mut self, place: Place) -> Option<Block> {
        if let Some(current) = self.current.as_mut().filter(|current| current.place == place) {
            current.wanted = false;
        }
        let fetch = self.fetches.get_mut(&place.stream)?;
        let block = std::mem::replace(fetch.blocks.get_mut(place.block as usize)?, Block::Ended);
        if !matches!(block, Block::Ended) {
            fetch.unfinished -= 1;
        }
        Some(block)
    }

    fn count_ended(&mut self, stream: u64) {
        self.ended.blocks += 1;
        if self.fetches.get(&stream).is_some_and(|fetch| fetch.unfinished == 0) {
            self.fetches.remove(&stream);
            self.ended.streams.push(stream);
        }
    }
}

impl Fetch {
    fn block(&mut self, block: u32) -> Result<&mut Block, ProtocolError> {
        self.blocks.get_mut(block as usize).ok_or(ProtocolError::Malformed("block index outside the request"))
    }
}
