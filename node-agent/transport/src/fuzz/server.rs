//! Valid and mutated frames of a requester, and any calls of the core, to the state machine of the server.
//!
//! Laws: neither makes it panic. Payload in flight never exceeds the requester's credit, and waiting for credit means that
//! some is in flight. Frames are valid, and belong to open requests and offers. Every request is reported as ended once.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use reprise_fuzz::Unstructured;
use reprise_policy::fair_order::Weights;
use reprise_policy::{BlockKey, Layout, TenantName, Tier};

use super::{PLACE_BYTES, PLACES, arena, layouts};
use crate::limits::{BLOCKS_PER_REQUEST_MAX, REQUESTS_PER_CONNECTION_MAX, SERVER_SLACK};
use crate::outbound::{BlockCompletion, BlockDone, Body, InvalidCall, OutFrame, Outbound, Step};
use crate::wire::{BlocksBody, FrameHeader, Kind};

/// Most operations of an input.
const STEPS_MAX: usize = 300;

/// Credits of requesters. The smaller one cannot be announced, but makes a server wait soon.
const WINDOWS: [u64; 2] = [1024, 64 << 10];

pub(super) fn seeds() -> Vec<Vec<u8>> {
    (0..8_u8)
        .map(|seed| (0..128_u8).map(|at| at.wrapping_mul(41).wrapping_add(seed * 31)).collect())
        .collect()
}

pub(super) fn run() -> impl Fn(&[u8]) {
    let memory = arena();
    move |input| {
        let mut choices = Unstructured::new(input);
        let Ok(window) = choices.choose(&WINDOWS).copied() else { return };
        let mut conversation = Conversation::new(window);
        for _ in 0..STEPS_MAX {
            if choices.is_empty() || conversation.step(&mut choices, &memory).is_none() {
                break;
            }
            conversation.check();
        }
        conversation.end();
    }
}

struct Conversation {
    outbound: Outbound,
    window: u64,
    now: Duration,
    /// Stream and layout of each open request.
    serves: BTreeMap<u64, (u64, Layout)>,
    offers: BTreeMap<u64, u64>,
    reported: BTreeSet<u64>,
    /// Blocks whose frames were taken and not written.
    written_next: Vec<BlockDone>,
    next_number: u64,
    next_stream: u64,
    in_flight: u64,
}

impl Conversation {
    fn new(window: u64) -> Conversation {
        Conversation {
            outbound: Outbound::new(window, Weights::default()),
            window,
            now: Duration::ZERO,
            serves: BTreeMap::new(),
            offers: BTreeMap::new(),
            reported: BTreeSet::new(),
            written_next: Vec::new(),
            next_number: 1,
            next_stream: 1,
            in_flight: 0,
        }
    }

    /// Runs an operation. `None` ends the connection.
    fn step(&mut self, choices: &mut Unstructured<'_>, memory: &reprise_buffers::Arena) -> Option<()> {
        match choices.int_in_range(0..=11_u8).ok()? {
            0 | 1 => self.request(choices),
            2 => self.offer(choices),
            3 => self.credit(choices),
            4 => self.cancel(choices),
            5 => self.expire(choices),
            6..=8 => self.core_call(choices, memory),
            9 => self.written(),
            _ => self.next_frame(),
        }
    }

    /// A stream that is free, open, ended, or any.
    fn some_stream(&mut self, choices: &mut Unstructured<'_>) -> Option<u64> {
        match choices.int_in_range(0..=15_u8).ok()? {
            0 => choices.int_in_range(0..=self.next_stream).ok(),
            1 => choices.arbitrary().ok(),
            _ => {
                self.next_stream += 1;
                Some(self.next_stream - 1)
            }
        }
    }

    fn request(&mut self, choices: &mut Unstructured<'_>) -> Option<()> {
        let layout = *choices.choose(&layouts()).ok()?;
        let count = if choices.ratio(1, 64_u8).ok()? {
            BLOCKS_PER_REQUEST_MAX
        } else {
            choices.int_in_range(1..=4).ok()?
        };
        let deadline = Duration::from_millis(choices.int_in_range(0..=50).ok()?);
        let (tenant, keys) = (TenantName::default_tenant(), vec![BlockKey([3; 16]); count]);
        let sent = BlocksBody { layout, deadline, tenant, keys };
        let body = BlocksBody::decode(&mutated(choices, sent.encode())?).ok()?;
        let (serve, stream) = (self.next_number, self.some_stream(choices)?);
        self.next_number += 1;
        let until = self.now.saturating_add(body.deadline);
        self.outbound.open((serve, stream), &body, until).ok()?;
        self.serves.insert(serve, (stream, body.layout));
        Some(())
    }

    fn offer(&mut self, choices: &mut Unstructured<'_>) -> Option<()> {
        let keys = vec![BlockKey([4; 16]); choices.int_in_range(1..=20).ok()?];
        let (layout, tenant) = (layouts()[0], TenantName::default_tenant());
        let sent = BlocksBody { layout, deadline: Duration::from_millis(20), tenant, keys };
        let body = BlocksBody::decode(&mutated(choices, sent.encode())?).ok()?;
        let (offer, stream) = (self.next_number, self.some_stream(choices)?);
        self.next_number += 1;
        let until = self.now.saturating_add(body.deadline);
        self.outbound.open_offer((offer, stream), &body, until).ok()?;
        self.offers.insert(offer, stream);
        Some(())
    }

    fn credit(&mut self, choices: &mut Unstructured<'_>) -> Option<()> {
        let bytes = if choices.ratio(1, 8_u8).ok()? {
            choices.arbitrary().ok()?
        } else {
            choices.int_in_range(0..=self.in_flight).ok()?
        };
        let accepted = self.outbound.add_credit(bytes);
        assert_eq!(accepted.is_ok(), bytes <= self.in_flight, "credit is accepted up to the used amount");
        self.in_flight -= accepted.ok().map(|()| bytes)?;
        Some(())
    }

    fn cancel(&mut self, choices: &mut Unstructured<'_>) -> Option<()> {
        let stream = choices.int_in_range(0..=self.next_stream).ok()?;
        self.outbound.cancel(stream);
        self.offers.retain(|_, of| *of != stream);
        Some(())
    }

    fn expire(&mut self, choices: &mut Unstructured<'_>) -> Option<()> {
        self.now += Duration::from_millis(choices.int_in_range(0..=30).ok()?);
        for serve in self.outbound.expire(self.now) {
            self.report(serve);
        }
        assert!(
            self.outbound.next_deadline().is_none_or(|until| until > self.now),
            "nothing outlives its deadline"
        );
        Some(())
    }

    fn core_call(&mut self, choices: &mut Unstructured<'_>, memory: &reprise_buffers::Arena) -> Option<()> {
        let number = choices.int_in_range(0..=self.next_number).ok()?;
        let block = if choices.ratio(1, 16_u8).ok()? {
            choices.arbitrary().ok()?
        } else {
            choices.int_in_range(0..=3).ok()?
        };
        let layout = self.serves.get(&number).map_or(layouts()[0], |(_, layout)| *layout);
        let called = match choices.int_in_range(0..=5_u8).ok()? {
            0 | 1 => {
                let more = u32::from(choices.ratio(1, 16_u8).ok()?);
                self.outbound.header(
                    (number, block),
                    Tier::Dram,
                    &vec![0; (layout.objects() + more) as usize],
                )
            }
            2 | 3 => {
                let first = u64::from(choices.int_in_range(0..=layout.objects()).ok()?);
                let count = u64::from(choices.int_in_range(0..=layout.objects()).ok()?);
                let odd = u64::from(choices.ratio(1, 16_u8).ok()?);
                let place = choices.int_in_range(0..=PLACES - 1).ok()? * PLACE_BYTES;
                let from = memory.span(0, place, count * layout.object_bytes()).ok();
                let offset = first * layout.object_bytes() + odd;
                self.outbound.objects((number, block), from, (offset, choices.arbitrary().ok()?))
            }
            4 => self.outbound.absent(number, block),
            _ => {
                let taken = [0, 2, 500];
                self.outbound.answer(number, &taken, Duration::from_millis(3))
            }
        };
        if called == Err(InvalidCall::Queue) { None } else { Some(()) }
    }

    fn next_frame(&mut self) -> Option<()> {
        let has_next = self.outbound.has_next();
        let step = self.outbound.next();
        assert_eq!(step.is_some(), has_next);
        match step {
            Some(Step::Aborted { serve }) => self.report(serve),
            Some(Step::Frame(frame)) => self.frame(&frame),
            None => {}
        }
        Some(())
    }

    fn frame(&mut self, frame: &OutFrame) {
        let header = FrameHeader::decode(&frame.header.encode()).expect("a requester accepts its form");
        let stream = match header.kind {
            Kind::OfferAnswer => self.offers.remove(&frame.serve).expect("an open offer"),
            _ => self.serves[&frame.serve].0,
        };
        assert_eq!(header.stream, stream);
        assert!(!self.reported.contains(&frame.serve), "an ended request sends nothing");
        match &frame.body {
            Body::Nothing => assert_eq!(header.length, 0),
            Body::Bytes(bytes) => header.check_body(bytes).expect("a right checksum"),
            Body::Memory(span) => {
                assert_eq!((header.kind, header.length as usize), (Kind::Data, span.len()));
                let end = u64::from(header.argument) + u64::from(header.length);
                assert!(end <= self.serves[&frame.serve].1.block_bytes(), "data outside of the block");
                self.in_flight += u64::from(header.length);
            }
        }
        self.written_next.extend(frame.done);
    }

    /// The socket has accepted a frame that ends a block.
    fn written(&mut self) -> Option<()> {
        if let Some(done) = self.written_next.pop()
            && self.outbound.finished(done) == BlockCompletion::Request
        {
            self.report(done.serve);
        }
        Some(())
    }

    /// Notes that the core was notified of the end of a request.
    fn report(&mut self, serve: u64) {
        assert!(self.serves.contains_key(&serve), "a request that was opened");
        assert!(self.reported.insert(serve), "a request ends once");
    }

    fn check(&self) {
        assert_eq!(self.outbound.in_flight_bytes(), self.in_flight);
        assert!(self.in_flight <= self.window, "payload in flight exceeds the credit");
        assert!(!self.outbound.waits_for_credit() || self.in_flight > 0, "credit that never comes");
        assert!(self.outbound.open_requests() <= SERVER_SLACK * REQUESTS_PER_CONNECTION_MAX);
    }

    fn end(mut self) {
        for serve in self.outbound.abort_all() {
            self.report(serve);
        }
        assert_eq!(self.reported.len(), self.serves.len(), "every request is reported as ended");
        assert_eq!(self.outbound.open_requests(), 0);
    }
}

/// Changes some bytes of a message, rarely.
fn mutated(choices: &mut Unstructured<'_>, mut message: Vec<u8>) -> Option<Vec<u8>> {
    if choices.ratio(1, 8_u8).ok()? {
        let at = choices.choose_index(message.len()).ok()?;
        message[at] = choices.arbitrary().ok()?;
        if choices.ratio(1, 4_u8).ok()? {
            message.truncate(at);
        }
    }
    Some(message)
}
