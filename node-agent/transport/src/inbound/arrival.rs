//! One arriving block: its verified objects and leading layers.
//!
//! Bytes are checksummed right after they were received, while they are in the cache. An object that arrives
//! in several pieces has a running checksum; there is at most one such object at a time.

use reprise_buffers::{Crc32c, Span};
use reprise_policy::layout::OBJECTS_MAX;
use reprise_policy::peer::{FillId, FillUpdate, PeerEvent};
use reprise_policy::{Layout, Tier};

use crate::wire::ProtocolError;

const WORDS: usize = (OBJECTS_MAX as usize).div_ceil(64);

/// Effect of received data on its block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Nothing to report yet.
    Partial,
    /// More leading layers are verified.
    NewLayers,
    /// Every object is verified.
    Complete,
    /// An object does not match its checksum.
    Mismatch,
}

/// A block between its header and its end.
pub(super) struct Arrival {
    pub(super) fill: FillId,
    /// Whether it waits in the burst for its layers to be reported.
    pub(super) in_burst: bool,
    into: Span,
    layout: Layout,
    tier: Tier,
    checksums: Box<[u32]>,
    /// Bit per object: verified.
    verified: [u64; WORDS],
    /// Number of verified objects.
    count: u32,
    /// Number of verified leading objects.
    leading: u32,
    /// Layers in the last event; `None` before the first.
    reported: Option<u32>,
    partial: Option<PartialObject>,
}

struct PartialObject {
    object: u32,
    filled: u64,
    crc: Crc32c,
}

impl Arrival {
    pub(super) fn new(fill: FillId, into: Span, layout: Layout, header: (Tier, Box<[u32]>)) -> Arrival {
        let (tier, checksums) = header;
        assert_eq!(checksums.len(), layout.objects() as usize, "the header was checked");
        Arrival {
            fill,
            in_burst: false,
            into,
            layout,
            tier,
            checksums,
            verified: [0; WORDS],
            count: 0,
            leading: 0,
            reported: None,
            partial: None,
        }
    }

    /// Checks that a range may be written: it begins where an object was left unfinished or at an object's
    /// first byte, and none of its objects has arrived before.
    pub(super) fn check_range(&self, offset: u64, length: u64) -> Result<(), ProtocolError> {
        let object_bytes = self.layout.object_bytes();
        let expected = match &self.partial {
            Some(partial) => offset == u64::from(partial.object) * object_bytes + partial.filled,
            None => offset.is_multiple_of(object_bytes),
        };
        if !expected {
            return Err(ProtocolError::Malformed("data begins inside an object"));
        }
        let last = (offset + length - 1) / object_bytes;
        if (offset / object_bytes..=last).any(|object| self.is_verified(object)) {
            return Err(ProtocolError::Malformed("data for a received object"));
        }
        Ok(())
    }

    /// Copies bytes to `offset` of the payload and checksums the copied bytes. The caller has called
    /// `check_range`.
    pub(super) fn deliver(&mut self, offset: u64, bytes: &[u8]) -> Outcome {
        let object_bytes = self.layout.object_bytes();
        let layers_before = self.layers();
        let mut at = offset;
        let mut rest = bytes;
        while !rest.is_empty() {
            let object = at / object_bytes;
            let missing = (object + 1) * object_bytes - at;
            let (piece, behind) =
                rest.split_at(usize::try_from(missing).map_or(rest.len(), |missing| missing.min(rest.len())));
            let mut crc = self.partial.take().map_or_else(Crc32c::new, |partial| partial.crc);
            crc.copy_in(piece, &self.part(at, piece.len()))
                .expect("fetch checked that the destination is writable");
            at += piece.len() as u64;
            rest = behind;
            let filled = at - object * object_bytes;
            let object = u32::try_from(object).expect("at most OBJECTS_MAX objects");
            if filled < object_bytes {
                self.partial = Some(PartialObject { object, filled, crc });
            } else if crc.value() == self.checksums[object as usize] {
                self.mark(object);
            } else {
                return Outcome::Mismatch;
            }
        }
        if self.count == self.layout.objects() {
            Outcome::Complete
        } else if self.layers() > layers_before {
            Outcome::NewLayers
        } else {
            Outcome::Partial
        }
    }

    /// Creates the event for unreported layers, if there are any.
    pub(super) fn report(&mut self) -> Option<PeerEvent> {
        self.in_burst = false;
        let layers = self.layers();
        if self.reported.unwrap_or(0) >= layers {
            return None;
        }
        let first = self.reported.replace(layers).is_none();
        let checksums = first.then(|| self.checksums.clone());
        let update = FillUpdate::Layers { layers, checksums, tier: self.tier };
        Some(PeerEvent::Fill { fill: self.fill, update })
    }

    /// Zeroes the bytes behind the payload: the padding of a slot must be zero (`policy::layout`).
    pub(super) fn zero_padding(&self) {
        const ZERO: [u8; 512] = [0; 512];
        let mut at = usize::try_from(self.layout.block_bytes()).expect("a block is at most 128 MiB");
        while at < self.into.len() {
            let bytes = (self.into.len() - at).min(ZERO.len());
            self.into
                .slice(at, bytes)
                .and_then(|padding| padding.copy_in(&ZERO[..bytes]))
                .expect("fetch checked that the span is writable");
            at += bytes;
        }
    }

    fn part(&self, offset: u64, bytes: usize) -> Span {
        let offset = usize::try_from(offset).expect("a block is at most 128 MiB");
        self.into.slice(offset, bytes).expect("fetch checked the span's length, and the range is inside")
    }

    fn layers(&self) -> u32 {
        self.leading / self.layout.parts()
    }

    fn is_verified(&self, object: u64) -> bool {
        let object = usize::try_from(object).expect("at most OBJECTS_MAX objects");
        self.verified[object / 64] & (1 << (object % 64)) != 0
    }

    fn mark(&mut self, object: u32) {
        self.verified[object as usize / 64] |= 1 << (object % 64);
        self.count += 1;
        while self.leading < self.layout.objects() && self.is_verified(u64::from(self.leading)) {
            self.leading += 1;
        }
    }
}
