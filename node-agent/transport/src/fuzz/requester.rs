//! Valid and mutated frames of a server, to the state machine of the requester.
//!
//! Laws: no frame makes it panic. Every block and every offer ends once. Reported layers have the checksums of the block's
//! header. No byte of a place is written before its block begins, outside of its place, or after its block has ended.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use reprise_buffers::{Arena, Span, crc32c};
use reprise_fuzz::Unstructured;
use reprise_policy::peer::{FillId, FillUpdate, OfferId, PeerEvent};
use reprise_policy::{BlockKey, Layout, Tier};

use super::{PLACE_BYTES, PLACES, arena, layouts};
use crate::api::Destination;
use crate::counters::Counters;
use crate::inbound::{Inbound, NewFetch, NewOffer, NewStream};
use crate::wire::{
    FrameHeader, Kind, OfferAnswerBody, ProtocolError, decode_block_header, encode_block_header,
};

/// Most operations of an input.
const STEPS_MAX: usize = 200;

/// Most blocks of a fetch.
const BLOCKS_MAX: usize = 4;

pub(super) fn seeds() -> Vec<Vec<u8>> {
    // Sequences without meaning: the first bytes choose operations, and coverage leads from there.
    (0..8_u8).map(|seed| (0..96_u8).map(|at| at.wrapping_mul(37).wrapping_add(seed * 29)).collect()).collect()
}

pub(super) fn run() -> impl Fn(&[u8]) {
    let arena = arena();
    move |input| {
        let mut conversation = Conversation::new(Arc::clone(&arena));
        let mut choices = Unstructured::new(input);
        for _ in 0..STEPS_MAX {
            // An input that is used up, and a violation, end the connection.
            if choices.is_empty() || conversation.step(&mut choices).is_none() {
                break;
            }
        }
        conversation.end();
    }
}

/// A block of an open fetch, as its server knows it.
#[derive(Clone)]
struct Block {
    fill: FillId,
    layout: Layout,
    place: u64,
    checksums: Option<Box<[u32]>>,
    layers: u32,
}

/// A block that has ended, and the bytes of its place then.
struct EndedBlock {
    place: u64,
    bytes: Vec<u8>,
}

struct Conversation {
    arena: Arc<Arena>,
    inbound: Inbound,
    counters: Counters,
    free: Vec<u64>,
    /// Blocks of each stream, in order.
    streams: BTreeMap<u64, Vec<Block>>,
    offers: BTreeMap<u64, (OfferId, usize)>,
    next_stream: u64,
    next_fill: u64,
    blocks_begun: usize,
    blocks_ended: usize,
    open: BTreeMap<FillId, Block>,
    ended: Vec<EndedBlock>,
    open_offers: BTreeMap<OfferId, usize>,
}

impl Conversation {
    fn new(arena: Arc<Arena>) -> Conversation {
        Conversation {
            arena,
            inbound: Inbound::new(),
            counters: Counters::default(),
            free: (0..PLACES).collect(),
            streams: BTreeMap::new(),
            offers: BTreeMap::new(),
            next_stream: 1,
            next_fill: 1,
            blocks_begun: 0,
            blocks_ended: 0,
            open: BTreeMap::new(),
            ended: Vec::new(),
            open_offers: BTreeMap::new(),
        }
    }

    /// Runs an operation. `None` ends the connection.
    fn step(&mut self, choices: &mut Unstructured<'_>) -> Option<()> {
        let done = match choices.int_in_range(0..=9_u8).ok()? {
            0 | 1 => self.fetch(choices),
            2 => self.offer(choices),
            3 => self.expire(choices),
            4 => self.control(choices, Kind::BlockHeader),
            5 => {
                let kinds = [Kind::Absent, Kind::Alive, Kind::OfferAnswer, Kind::Request, Kind::Credit];
                let kind = *choices.choose(&kinds).ok()?;
                self.control(choices, kind)
            }
            _ => self.data(choices),
        };
        if choices.ratio(1, 3_u8).unwrap_or(true) {
            self.inbound.flush();
        }
        self.take_events();
        done
    }

    fn fetch(&mut self, choices: &mut Unstructured<'_>) -> Option<()> {
        let layout = *choices.choose(&layouts()).ok()?;
        let count = choices.int_in_range(1..=BLOCKS_MAX).ok()?.min(self.free.len());
        if count == 0 {
            return Some(());
        }
        let mut blocks = Vec::new();
        for place in self.free.split_off(self.free.len() - count) {
            let fill = FillId(self.next_fill);
            self.next_fill += 1;
            let block = Block { fill, layout, place, checksums: None, layers: 0 };
            self.open.insert(fill, block.clone());
            blocks.push(block);
        }
        let destination = |block: &Block| Destination {
            fill: block.fill,
            key: BlockKey([0; 16]),
            into: self.span(block.place, layout.slot_bytes()),
        };
        let fetch = NewFetch { layout, blocks: blocks.iter().map(destination).collect() };
        self.inbound.begin_stream(self.next_stream, NewStream::Fetch(fetch));
        self.blocks_begun += count;
        self.streams.insert(self.next_stream, blocks);
        self.next_stream += 1;
        Some(())
    }

    /// Begins an offer of some keys.
    fn offer(&mut self, choices: &mut Unstructured<'_>) -> Option<()> {
        let keys = choices.int_in_range(1..=20).ok()?;
        let offer = OfferId(self.next_stream);
        self.inbound.begin_stream(self.next_stream, NewStream::Offer(NewOffer { offer, keys }));
        self.offers.insert(self.next_stream, (offer, keys));
        self.open_offers.insert(offer, keys);
        self.blocks_begun += 1;
        self.next_stream += 1;
        Some(())
    }

    fn expire(&mut self, choices: &mut Unstructured<'_>) -> Option<()> {
        let stream = self.some_stream(choices)?;
        self.inbound.expire(stream, &self.counters);
        Some(())
    }

    /// An open stream, one that has ended, the next one, or any number.
    fn some_stream(&self, choices: &mut Unstructured<'_>) -> Option<u64> {
        if choices.ratio(1, 16_u8).ok()? {
            choices.arbitrary().ok()
        } else {
            choices.int_in_range(0..=self.next_stream).ok()
        }
    }

    fn some_block(&self, choices: &mut Unstructured<'_>) -> Option<u32> {
        if choices.ratio(1, 16_u8).ok()? {
            choices.arbitrary().ok()
        } else {
            choices.int_in_range(0..=BLOCKS_MAX as u32 - 1).ok()
        }
    }

    /// A frame without payload, as the receiving thread handles it (`tcp::receiver`).
    fn control(&mut self, choices: &mut Unstructured<'_>, kind: Kind) -> Option<()> {
        let (stream, block) = (self.some_stream(choices)?, self.some_block(choices)?);
        let body = self.body(choices, kind, (stream, block))?;
        let header =
            FrameHeader::decode(&FrameHeader::with_body(kind, stream, block, &body).encode()).ok()?;
        let taken = match header.kind {
            Kind::Absent => self.inbound.absent(stream, block, &self.counters),
            Kind::BlockHeader => decode_block_header(&body).and_then(|(tier, checksums)| {
                let taken = self.inbound.block_header((stream, block), tier, checksums.clone());
                self.note_header((stream, block), &checksums);
                taken
            }),
            Kind::OfferAnswer => {
                OfferAnswerBody::decode(&body).and_then(|answer| self.inbound.offer_answer(stream, answer))
            }
            Kind::Alive => Ok(()),
            Kind::Data | Kind::Request | Kind::Credit | Kind::Cancel | Kind::Offer => {
                Err(ProtocolError::Malformed("frame of a requester from a server"))
            }
        };
        taken.ok()
    }

    /// The body of a frame: right for its block, or any bytes.
    fn body(
        &self,
        choices: &mut Unstructured<'_>,
        kind: Kind,
        (stream, block): (u64, u32),
    ) -> Option<Vec<u8>> {
        if choices.ratio(1, 16_u8).ok()? {
            let count = choices.int_in_range(0..=32_usize).ok()?;
            return Some(choices.bytes(count).ok()?.to_vec());
        }
        Some(match kind {
            Kind::BlockHeader => {
                let known = self.streams.get(&stream).and_then(|blocks| blocks.get(block as usize));
                let layout = known.map_or(layouts()[0], |block| block.layout);
                let object_bytes = usize::try_from(layout.object_bytes()).expect("small objects");
                let checksums: Vec<u32> = (0..layout.objects())
                    .map(|object| crc32c(&vec![content(block, object); object_bytes]))
                    .collect();
                encode_block_header(*choices.choose(&[Tier::Dram, Tier::Nvme]).ok()?, &checksums)
            }
            Kind::OfferAnswer => {
                let keys = self.offers.get(&stream).map_or(1, |(_, keys)| *keys);
                let taken = (0..keys as u32).filter(|at| at % 2 == 0).collect();
                OfferAnswerBody { retry_after: Duration::from_millis(5), keys, taken }.encode()
            }
            _ => Vec::new(),
        })
    }

    fn note_header(&mut self, (stream, block): (u64, u32), checksums: &[u32]) {
        let known = self.streams.get(&stream).and_then(|blocks| blocks.get(block as usize));
        let Some(open) = known.and_then(|block| self.open.get_mut(&block.fill)) else { return };
        if open.checksums.is_none() && checksums.len() == open.layout.objects() as usize {
            open.checksums = Some(checksums.into());
        }
    }

    /// A range of payload in pieces; between them, streams may end and begin.
    fn data(&mut self, choices: &mut Unstructured<'_>) -> Option<()> {
        let (stream, block) = (self.some_stream(choices)?, self.some_block(choices)?);
        let known = self.streams.get(&stream).and_then(|blocks| blocks.get(block as usize));
        let layout = known.map_or(layouts()[0], |block| block.layout);
        let object_bytes = layout.object_bytes();
        let first = choices.int_in_range(0..=layout.objects()).ok()?;
        let (offset, length) = if choices.ratio(1, 8_u8).ok()? {
            (choices.arbitrary::<u32>().ok()?, choices.int_in_range(0..=512_u32).ok()?)
        } else {
            let count = choices.int_in_range(0..=layout.objects()).ok()?;
            let bytes =
                |objects: u32| u32::try_from(u64::from(objects) * object_bytes).expect("small blocks");
            (bytes(first), bytes(count))
        };
        self.inbound.begin((stream, block), u64::from(offset), u64::from(length)).ok()?;
        let damaged = choices.ratio(1, 8_u8).unwrap_or(false);
        let mut at = u64::from(offset);
        while self.inbound.rest() > 0 {
            let rest = usize::try_from(self.inbound.rest()).expect("small ranges");
            let count = choices.int_in_range(1..=rest).unwrap_or(rest);
            let bytes = (at..at + count as u64).map(|at| {
                let object = u32::try_from(at / object_bytes).unwrap_or(u32::MAX);
                content(block, object) ^ u8::from(damaged)
            });
            self.inbound.deliver(&bytes.collect::<Vec<u8>>(), &self.counters);
            at += count as u64;
            match choices.int_in_range(0..=7_u8) {
                Ok(1) => _ = self.expire(choices),
                Ok(2) => _ = self.fetch(choices),
                Ok(3) => self.take_events(),
                _ => {}
            }
        }
        Some(())
    }

    fn take_events(&mut self) {
        self.blocks_ended += self.inbound.take_ended().blocks;
        let events: Vec<PeerEvent> = self.inbound.take_events().collect();
        for event in events {
            match event {
                PeerEvent::Fill { fill, update } => self.fill(fill, update),
                PeerEvent::OfferAnswered { offer, taken, .. } => {
                    let keys = self.open_offers.remove(&offer).expect("an offer ends once");
                    assert!(taken.iter().all(|at| (*at as usize) < keys));
                }
                PeerEvent::OfferFailed { offer } => {
                    self.open_offers.remove(&offer).expect("an offer ends once");
                }
                other => panic!("{other:?} is not an event of a requester"),
            }
        }
    }

    fn fill(&mut self, fill: FillId, update: FillUpdate) {
        let block = self.open.get_mut(&fill).expect("no event follows the end of a block");
        let is_over = match update {
            FillUpdate::Layers { layers, checksums, .. } => {
                assert!(layers > block.layers && layers <= block.layout.layers(), "layers only grow");
                let expected = block.checksums.clone().expect("layers follow a header");
                assert!(checksums.is_none_or(|first| block.layers == 0 && first == expected));
                block.layers = layers;
                let block = block.clone();
                self.verify(&block, &expected);
                layers == block.layout.layers()
            }
            FillUpdate::Failed(_) => true,
        };
        if is_over {
            let block = self.open.remove(&fill).expect("it is open");
            let bytes = self.bytes(block.place, block.layout.block_bytes());
            self.ended.push(EndedBlock { place: block.place, bytes });
        }
    }

    /// Checks the bytes of all reported layers.
    fn verify(&self, block: &Block, checksums: &[u32]) {
        let bytes = self.bytes(block.place, block.layout.block_bytes());
        let objects = (block.layers * block.layout.parts()) as usize;
        let object_bytes = usize::try_from(block.layout.object_bytes()).expect("small objects");
        for (object, checksum) in bytes.chunks(object_bytes).zip(checksums).take(objects) {
            assert_eq!(crc32c(object), *checksum, "a reported layer has other bytes than its header states");
        }
    }

    fn span(&self, place: u64, bytes: u64) -> Span {
        self.arena.span(0, place * PLACE_BYTES, bytes).expect("inside the arena")
    }

    fn bytes(&self, place: u64, bytes: u64) -> Vec<u8> {
        let mut out = vec![0; usize::try_from(bytes).expect("small blocks")];
        self.span(place, bytes).copy_out(&mut out);
        out
    }

    /// Ends the connection and checks what must hold then.
    fn end(mut self) {
        self.take_events();
        self.inbound.expire_all(&self.counters);
        self.take_events();
        assert_eq!(self.inbound.open_streams(), 0);
        assert!(self.open.is_empty() && self.open_offers.is_empty(), "every block and offer ends");
        assert_eq!(self.blocks_ended, self.blocks_begun);
        for block in &self.ended {
            let now = self.bytes(block.place, block.bytes.len() as u64);
            assert_eq!(now, block.bytes, "an ended block was written");
        }
    }
}

/// Byte of an object that a server sends.
fn content(block: u32, object: u32) -> u8 {
    (block.wrapping_mul(31).wrapping_add(object).wrapping_add(1)) as u8
}

#[test]
fn data_without_a_byte_is_a_violation_also_in_an_unknown_stream() {
    let mut inbound = Inbound::new();
    assert!(inbound.begin((9, 0), 0, 0).is_err());
    inbound.begin((9, 0), 0, 64).expect("data of an unknown stream is dropped");
}

#[test]
fn data_of_a_stream_that_begins_within_it_is_dropped() {
    let (arena, layout, counters) = (arena(), layouts()[0], Counters::default());
    let mut inbound = Inbound::new();
    inbound.begin((1, 99), 0, 64).expect("data of an unknown stream is dropped");
    let into = arena.span(0, 0, layout.slot_bytes()).expect("inside the arena");
    let blocks = vec![Destination { fill: FillId(1), key: BlockKey([0; 16]), into }];
    inbound.begin_stream(1, NewStream::Fetch(NewFetch { layout, blocks }));
    inbound.deliver(&[7; 64], &counters);
    assert_eq!((inbound.rest(), inbound.open_streams()), (0, 1));
}
