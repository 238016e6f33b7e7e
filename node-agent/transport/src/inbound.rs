//! The requester's side of a connection as a state machine: which bytes may be written where, what of it is
//! verified, what the core is told. No clock, no socket, no thread: the TCP and the in-memory transport both
//! drive it.
//!
//! ```text
//! block:  Wanted ──header──► Arriving ──last object verified──► Ended (all layers reported)
//!            │                   │
//!            └── absent, mismatch, deadline, peer lost ───────► Ended (Failed)
//! ```
//!
//! Invariants:
//! * a destination is written ([`Inbound::deliver`]) only while its block is `Arriving` and only where nothing has
//!   arrived before; what comes for an ended block or an unknown stream is dropped;
//! * events of a block come in order, layers only grow, and the event that ends a block is its last;
//! * several ranges of one block coalesce into one `Layers` event until [`Inbound::flush`].
//!
//! A range of data begins at an object's first byte, or where the previous range left an object unfinished;
//! anything else is a protocol error. So one running checksum per block suffices.

mod arrival;

use std::collections::HashMap;

use reprise_buffers::Span;
use reprise_policy::{Layout, Tier};

use crate::api::{FetchBlock, FetchFailure, TransportEvent};
use crate::counters::{Counters, add};
use crate::wire::{OfferAnswerBody, ProtocolError};
use arrival::{Arrival, Outcome};

/// What a connection's requester knows of its fetches.
pub(crate) struct Inbound {
    fetches: HashMap<u64, Fetch>,
    /// Offers without an answer.
    offers: HashMap<u64, NewOffer>,
    /// The data range that is arriving.
    current: Option<Current>,
    /// Blocks with verified layers that were not reported yet.
    burst: Vec<Place>,
    /// Payload that has arrived since the first of them.
    burst_bytes: u64,
    events: Vec<TransportEvent>,
    ended: Ended,
}

/// What enters the machine.
pub(crate) enum Begun {
    Fetch(NewFetch),
    Offer(NewOffer),
}

/// An offer as it enters the machine.
#[derive(Clone, Copy)]
pub(crate) struct NewOffer {
    pub(crate) offer: u64,
    pub(crate) keys: usize,
}

/// A fetch as it enters the machine.
pub(crate) struct NewFetch {
    pub(crate) layout: Layout,
    pub(crate) blocks: Vec<FetchBlock>,
}

/// What came to its end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ended {
    /// Fetches, all of whose blocks have ended, and offers.
    pub(crate) streams: Vec<u64>,
    /// Blocks; an offer counts as one.
    pub(crate) blocks: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct Place {
    stream: u64,
    block: u32,
}

struct Current {
    place: Place,
    /// Next byte of the payload.
    position: u64,
    /// First byte behind the range.
    end: u64,
    /// False once nobody wants the rest.
    wanted: bool,
}

struct Fetch {
    layout: Layout,
    blocks: Vec<Block>,
    unfinished: usize,
}

enum Block {
    Wanted { fill: u64, into: Span },
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
            ended: Ended::default(),
        }
    }

    pub(crate) fn begin_stream(&mut self, stream: u64, begun: Begun) {
        match begun {
            Begun::Fetch(fetch) => self.insert(stream, fetch),
            Begun::Offer(offer) => drop(self.offers.insert(stream, offer)),
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

    pub(crate) fn knows(&self, stream: u64) -> bool {
        self.fetches.contains_key(&stream) || self.offers.contains_key(&stream)
    }

    /// Fetches with unfinished blocks, and offers without an answer.
    pub(crate) fn open_streams(&self) -> usize {
        self.fetches.len() + self.offers.len()
    }

    /// The peer has answered an offer.
    pub(crate) fn offer_answer(&mut self, stream: u64, answer: OfferAnswerBody) -> Result<(), ProtocolError> {
        let Some(open) = self.offers.get(&stream) else { return Ok(()) };
        if open.keys != answer.keys {
            return Err(ProtocolError::Malformed("answer to an offer: not as many keys as were offered"));
        }
        let OfferAnswerBody { retry_after, taken, .. } = answer;
        self.end_offer(stream, |offer| TransportEvent::OfferAnswered { offer, taken, retry_after });
        Ok(())
    }

    fn end_offer(&mut self, stream: u64, event: impl FnOnce(u64) -> TransportEvent) {
        if let Some(open) = self.offers.remove(&stream) {
            self.events.push(event(open.offer));
            self.ended.blocks += 1;
            self.ended.streams.push(stream);
        }
    }

    /// The tier and checksums of a block have come.
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

    /// The peer does not have a block.
    pub(crate) fn absent(
        &mut self,
        stream: u64,
        block: u32,
        counters: &Counters,
    ) -> Result<(), ProtocolError> {
        let Some(fetch) = self.fetches.get_mut(&stream) else { return Ok(()) };
        fetch.block(block)?;
        self.fail(Place { stream, block }, FetchFailure::Absent, counters);
        Ok(())
    }

    /// A range of a block's payload begins to arrive.
    pub(crate) fn begin(
        &mut self,
        (stream, block): (u64, u32),
        offset: u64,
        length: u64,
    ) -> Result<(), ProtocolError> {
        assert!(self.current.is_none(), "a range begins when the one before has arrived");
        let mut wanted = false;
        if let Some(fetch) = self.fetches.get_mut(&stream) {
            if length == 0 || offset + length > fetch.layout.block_bytes() {
                return Err(ProtocolError::Malformed("data outside of the block"));
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

    /// Bytes of the arriving range that are still to come; 0 when no range is arriving.
    pub(crate) fn rest(&self) -> u64 {
        self.current.as_ref().map_or(0, |current| current.end - current.position)
    }

    /// The next bytes of the arriving range: copies them to their destination and checksums what was copied, or
    /// drops them when nobody wants them any more.
    pub(crate) fn deliver(&mut self, bytes: &[u8], counters: &Counters) {
        let current = self.current.as_mut().expect("bytes come only while a range is arriving");
        let (place, from, wanted) = (current.place, current.position, current.wanted);
        current.position += bytes.len() as u64;
        assert!(current.position <= current.end, "no more comes than was announced");
        if current.position == current.end {
            self.current = None;
        }
        let block = self.fetches.get_mut(&place.stream).map(|fetch| &mut fetch.blocks[place.block as usize]);
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
            Outcome::Mismatch => self.fail(place, FetchFailure::Corrupt, counters),
        }
    }

    /// The deadline of a fetch or offer has passed, or the peer is gone: its unfinished blocks fail.
    pub(crate) fn expire(&mut self, stream: u64, counters: &Counters) {
        if self.offers.contains_key(&stream) {
            add(&counters.offers_failed, 1);
            return self.end_offer(stream, |offer| TransportEvent::OfferFailed { offer });
        }
        let blocks = self.fetches.get(&stream).map_or(0, |fetch| fetch.blocks.len());
        for block in 0..u32::try_from(blocks).expect("bounded by BLOCKS_PER_REQUEST_MAX") {
            self.fail(Place { stream, block }, FetchFailure::PeerLost, counters);
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

    /// Payload bytes that have arrived since a `Layers` event waits to be reported.
    pub(crate) fn unreported_bytes(&self) -> u64 {
        self.burst_bytes
    }

    /// Turns what is verified but unreported into events: one per block.
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

    /// The events since the last call, in order.
    pub(crate) fn take_events(&mut self) -> std::vec::Drain<'_, TransportEvent> {
        self.events.drain(..)
    }

    /// What has come to its end since the last call. Account for it before handing out the events: whoever sees a
    /// fetch end may begin another at once.
    pub(crate) fn take_ended(&mut self) -> Ended {
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

    fn fail(&mut self, place: Place, failure: FetchFailure, counters: &Counters) {
        let fill = match self.end(place) {
            Some(Block::Wanted { fill, .. }) => fill,
            Some(Block::Arriving(mut arrival)) => {
                self.events.extend(arrival.report());
                arrival.fill
            }
            Some(Block::Ended) | None => return,
        };
        self.events.push(TransportEvent::Failed { fill, failure });
        let counter = match failure {
            FetchFailure::Corrupt => &counters.blocks_corrupt,
            FetchFailure::Absent => &counters.blocks_absent,
            FetchFailure::PeerLost => &counters.blocks_lost,
        };
        add(counter, 1);
        self.count_ended(place.stream);
    }

    /// Takes a block out of its fetch: nothing is written into its destination from here on.
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
        self.blocks
            .get_mut(block as usize)
            .ok_or(ProtocolError::Malformed("block index outside of the request"))
    }
}
