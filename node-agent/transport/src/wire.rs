//! Wire format of a peer connection: greeting, frame headers, bodies (`docs/PROTOCOL.md`, part 3).
//!
//! Everything is little endian and has a fixed size, or a size that follows from the frame header. Decoding
//! never allocates more than a checked length, never panics, and rejects invalid input.
//!
//! Frame header, 32 bytes:
//!
//! ```text
//!  0  magic "RPRF"        8  stream  u64        20  argument u32 (data: byte offset in the payload;
//!  4  version u8 = 1     16  block   u32            others: CRC32C of the body)
//!  5  kind u8                                    24  length u32 (bytes that follow)
//!  6  zero u16                                   28  CRC32C of bytes 0..28
//! ```

use std::time::Duration;

use reprise_buffers::crc32c;
use reprise_policy::layout::{BLOCK_BYTES_MAX, OBJECTS_MAX};
use reprise_policy::tenant::TENANT_NAME_BYTES_MAX;
use reprise_policy::{BlockKey, Layout, TenantName, Tier};

use crate::limits::{
    BLOCKS_PER_REQUEST_MAX, CREDIT_BYTES_MAX, CREDIT_BYTES_MIN, DATA_FRAME_BYTES_MAX, KEYS_PER_OFFER_MAX,
    NODE_NAME_BYTES_MAX,
};

/// Version of the protocol; both sides of a connection must have the same.
pub(crate) const PROTOCOL_VERSION: u16 = 2;

/// Size of a frame header in bytes.
pub(crate) const FRAME_HEADER_BYTES: usize = 32;

/// Size of a greeting in bytes. Magic and version keep their place in every version.
pub(crate) const HELLO_BYTES: usize = 128;

/// Maximum size of a request's body in bytes: fixed part and keys.
pub(crate) const REQUEST_BODY_BYTES_MAX: usize = BLOCKS_FIXED_BYTES + BLOCKS_PER_REQUEST_MAX * BlockKey::SIZE;

/// Maximum size of an offer's body in bytes: fixed part and keys.
pub(crate) const OFFER_BODY_BYTES_MAX: usize = BLOCKS_FIXED_BYTES + KEYS_PER_OFFER_MAX * BlockKey::SIZE;

/// Maximum size of the body of an offer's answer in bytes: fixed part and a bit for each key.
pub(crate) const OFFER_ANSWER_BODY_BYTES_MAX: usize =
    OFFER_ANSWER_FIXED_BYTES + KEYS_PER_OFFER_MAX.div_ceil(8);

/// Maximum size of a block header's body in bytes: tier, padding, checksums.
pub(crate) const BLOCK_HEADER_BODY_BYTES_MAX: usize = BLOCK_HEADER_FIXED_BYTES + OBJECTS_MAX as usize * 4;

const FRAME_MAGIC: [u8; 4] = *b"RPRF";
const FRAME_VERSION: u8 = 1;
const HELLO_MAGIC: [u8; 8] = *b"RPRSPEER";
const BLOCK_HEADER_FIXED_BYTES: usize = 4;
/// Layout, deadline, number of keys, bytes of the name, three zero bytes, name.
const BLOCKS_FIXED_BYTES: usize = 16 + 8 + 4 + 4 + 64;
/// Time to wait, number of keys, zero.
const OFFER_ANSWER_FIXED_BYTES: usize = 8 + 4 + 4;

const _: () = assert!(BLOCK_BYTES_MAX <= u32::MAX as u64, "offsets in a payload are 32 bits on the wire");
const _: () = assert!(TENANT_NAME_BYTES_MAX <= 64, "a tenant's name has 64 bytes in requests and offers");
const _: () = assert!(24 + NODE_NAME_BYTES_MAX <= HELLO_BYTES - 4);

/// Kind of a frame. Requester to server below 16, server to requester from 16 on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    /// Requests blocks; body: [`BlocksBody`].
    Request = 1,
    /// `stream` more bytes may be in flight.
    Credit = 2,
    /// The requester has cancelled `stream`, a request or an offer.
    Cancel = 3,
    /// Offers blocks; body: [`BlocksBody`].
    Offer = 4,
    /// Tier and checksums of a block; body: [`encode_block_header`].
    BlockHeader = 16,
    /// A range of a block's payload.
    Data = 17,
    /// The block will not be sent.
    Absent = 18,
    /// The server is alive, but has nothing to send yet.
    Alive = 19,
    /// Indices of the accepted blocks of an offer; body: [`OfferAnswerBody`].
    OfferAnswer = 20,
}

/// A decoded frame header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FrameHeader {
    pub(crate) kind: Kind,
    /// The requester's number of the request on this connection; of a credit: bytes.
    pub(crate) stream: u64,
    pub(crate) block: u32,
    /// For data: byte offset in the payload. For other kinds: CRC32C of the body.
    pub(crate) argument: u32,
    /// Number of bytes that follow.
    pub(crate) length: u32,
}

/// Violation of the protocol by a peer; its connection is closed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ProtocolError {
    #[error("the other side is not a Reprise agent (wrong magic)")]
    Magic,
    #[error("the peer speaks version {found} of the peer protocol, this agent speaks {PROTOCOL_VERSION}")]
    Version { found: u16 },
    #[error("checksum of a {0} does not match")]
    Checksum(&'static str),
    #[error("frame of unknown kind {0}")]
    UnknownKind(u8),
    #[error("frame of {length} bytes exceeds the limit of {limit}")]
    Length { length: u32, limit: u64 },
    #[error("{0}")]
    Malformed(&'static str),
    #[error("TLS: {0}")]
    Record(String),
}

/// The greeting, sent by both sides; the accepting side answers the connecting side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) node_name: String,
    /// Payload bytes that may be in flight towards the sender of this greeting.
    pub(crate) credit_bytes: u64,
    /// Silence of this length counts as a stall for the sender of this greeting.
    pub(crate) stall_timeout: Duration,
}

/// Body of a request or an offer: blocks of one tenant and layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BlocksBody {
    pub(crate) layout: Layout,
    pub(crate) deadline: Duration,
    pub(crate) tenant: TenantName,
    pub(crate) keys: Vec<BlockKey>,
}

impl Kind {
    fn from_wire(number: u8) -> Option<Kind> {
        const ALL: [Kind; 9] = [
            Kind::Request,
            Kind::Credit,
            Kind::Cancel,
            Kind::Offer,
            Kind::BlockHeader,
            Kind::Data,
            Kind::Absent,
            Kind::Alive,
            Kind::OfferAnswer,
        ];
        ALL.into_iter().find(|kind| *kind as u8 == number)
    }

    /// Maximum number of bytes that follow a frame of this kind.
    fn length_max(self) -> u64 {
        match self {
            Kind::Request => REQUEST_BODY_BYTES_MAX as u64,
            Kind::BlockHeader => BLOCK_HEADER_BODY_BYTES_MAX as u64,
            Kind::Data => DATA_FRAME_BYTES_MAX,
            Kind::Offer => OFFER_BODY_BYTES_MAX as u64,
            Kind::OfferAnswer => OFFER_ANSWER_BODY_BYTES_MAX as u64,
            Kind::Credit | Kind::Cancel | Kind::Absent | Kind::Alive => 0,
        }
    }
}

impl FrameHeader {
    /// Creates the header of a frame without body.
    pub(crate) fn bare(kind: Kind, stream: u64, block: u32) -> FrameHeader {
        FrameHeader { kind, stream, block, argument: 0, length: 0 }
    }

    /// Creates the header of a frame with `body`.
    pub(crate) fn with_body(kind: Kind, stream: u64, block: u32, body: &[u8]) -> FrameHeader {
        let length = u32::try_from(body.len()).expect("bodies are bounded far below 4 GiB");
        FrameHeader { kind, stream, block, argument: crc32c(body), length }
    }

    pub(crate) fn encode(&self) -> [u8; FRAME_HEADER_BYTES] {
        let mut out = [0; FRAME_HEADER_BYTES];
        out[0..4].copy_from_slice(&FRAME_MAGIC);
        out[4] = FRAME_VERSION;
        out[5] = self.kind as u8;
        out[8..16].copy_from_slice(&self.stream.to_le_bytes());
        out[16..20].copy_from_slice(&self.block.to_le_bytes());
        out[20..24].copy_from_slice(&self.argument.to_le_bytes());
        out[24..28].copy_from_slice(&self.length.to_le_bytes());
        let crc = crc32c(&out[..28]);
        out[28..32].copy_from_slice(&crc.to_le_bytes());
        out
    }

    pub(crate) fn decode(bytes: &[u8; FRAME_HEADER_BYTES]) -> Result<FrameHeader, ProtocolError> {
        if bytes[0..4] != FRAME_MAGIC {
            return Err(ProtocolError::Magic);
        }
        if crc32c(&bytes[..28]) != u32_at(bytes, 28) {
            return Err(ProtocolError::Checksum("frame header"));
        }
        if bytes[4] != FRAME_VERSION {
            return Err(ProtocolError::Version { found: u16::from(bytes[4]) });
        }
        let kind = Kind::from_wire(bytes[5]).ok_or(ProtocolError::UnknownKind(bytes[5]))?;
        let header = FrameHeader {
            kind,
            stream: u64_at(bytes, 8),
            block: u32_at(bytes, 16),
            argument: u32_at(bytes, 20),
            length: u32_at(bytes, 24),
        };
        if u64::from(header.length) > kind.length_max() {
            return Err(ProtocolError::Length { length: header.length, limit: kind.length_max() });
        }
        Ok(header)
    }

    /// Checks a body against its header.
    pub(crate) fn check_body(&self, body: &[u8]) -> Result<(), ProtocolError> {
        if crc32c(body) == self.argument { Ok(()) } else { Err(ProtocolError::Checksum("frame body")) }
    }
}

impl Hello {
    pub(crate) fn encode(&self) -> [u8; HELLO_BYTES] {
        let name = self.node_name.as_bytes();
        let stall_timeout_ms = u32::try_from(self.stall_timeout.as_millis()).unwrap_or(u32::MAX);
        let mut out = [0; HELLO_BYTES];
        out[0..8].copy_from_slice(&HELLO_MAGIC);
        out[8..10].copy_from_slice(&PROTOCOL_VERSION.to_le_bytes());
        let name_length = u16::try_from(name.len()).expect("settings bound the name to 64 bytes");
        out[10..12].copy_from_slice(&name_length.to_le_bytes());
        out[12..16].copy_from_slice(&stall_timeout_ms.to_le_bytes());
        out[16..24].copy_from_slice(&self.credit_bytes.to_le_bytes());
        out[24..24 + name.len()].copy_from_slice(name);
        let crc = crc32c(&out[..124]);
        out[124..128].copy_from_slice(&crc.to_le_bytes());
        out
    }

    pub(crate) fn decode(bytes: &[u8; HELLO_BYTES]) -> Result<Hello, ProtocolError> {
        if bytes[0..8] != HELLO_MAGIC {
            return Err(ProtocolError::Magic);
        }
        let version = u16_at(bytes, 8);
        if version != PROTOCOL_VERSION {
            return Err(ProtocolError::Version { found: version });
        }
        if crc32c(&bytes[..124]) != u32_at(bytes, 124) {
            return Err(ProtocolError::Checksum("greeting"));
        }
        let name_length = usize::from(u16_at(bytes, 10));
        if name_length == 0 || name_length > NODE_NAME_BYTES_MAX {
            return Err(ProtocolError::Malformed("greeting: node name must have 1 to 64 bytes"));
        }
        let node_name = std::str::from_utf8(&bytes[24..24 + name_length])
            .map_err(|_| ProtocolError::Malformed("greeting: node name is not UTF-8"))?;
        let credit_bytes = u64_at(bytes, 16);
        if !(CREDIT_BYTES_MIN..=CREDIT_BYTES_MAX).contains(&credit_bytes) {
            return Err(ProtocolError::Malformed("greeting: credit out of range"));
        }
        let stall_timeout = Duration::from_millis(u64::from(u32_at(bytes, 12)));
        if stall_timeout.is_zero() {
            return Err(ProtocolError::Malformed("greeting: stall timeout is zero"));
        }
        Ok(Hello { node_name: node_name.to_owned(), credit_bytes, stall_timeout })
    }
}

/// Body of the answer to an offer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OfferAnswerBody {
    pub(crate) retry_after: Duration,
    /// Number of keys of the offer.
    pub(crate) keys: usize,
    /// Indices of the accepted keys, ascending.
    pub(crate) taken: Vec<u32>,
}

impl BlocksBody {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let name = self.tenant.as_str().as_bytes();
        let mut out = Vec::with_capacity(BLOCKS_FIXED_BYTES + self.keys.len() * BlockKey::SIZE);
        out.extend_from_slice(&self.layout.encode());
        out.extend_from_slice(&micros(self.deadline).to_le_bytes());
        let count = u32::try_from(self.keys.len()).expect("bounded by BLOCKS_PER_REQUEST_MAX");
        out.extend_from_slice(&count.to_le_bytes());
        out.push(u8::try_from(name.len()).expect("a tenant's name has at most 63 bytes"));
        out.extend_from_slice(&[0; 3]);
        out.extend_from_slice(name);
        out.resize(BLOCKS_FIXED_BYTES, 0);
        out.extend_from_slice(&BlockKey::pack(&self.keys));
        out
    }

    pub(crate) fn decode(body: &[u8]) -> Result<BlocksBody, ProtocolError> {
        let (fixed, packed) = body
            .split_first_chunk::<BLOCKS_FIXED_BYTES>()
            .ok_or(ProtocolError::Malformed("list of blocks: too short"))?;
        let layout = fixed
            .first_chunk::<16>()
            .and_then(Layout::decode)
            .ok_or(ProtocolError::Malformed("list of blocks: invalid layout"))?;
        let keys =
            BlockKey::unpack(packed).ok_or(ProtocolError::Malformed("list of blocks: incomplete key"))?;
        if keys.is_empty() || keys.len() != u32_at(fixed, 24) as usize {
            return Err(ProtocolError::Malformed("list of blocks: number of keys does not match"));
        }
        let name = fixed[32..].get(..usize::from(fixed[28])).filter(|name| !name.is_empty());
        let tenant = name
            .and_then(|name| std::str::from_utf8(name).ok()?.parse().ok())
            .ok_or(ProtocolError::Malformed("list of blocks: invalid tenant name"))?;
        Ok(BlocksBody { layout, deadline: Duration::from_micros(u64_at(fixed, 16)), tenant, keys })
    }
}

impl OfferAnswerBody {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = vec![0; OFFER_ANSWER_FIXED_BYTES + self.keys.div_ceil(8)];
        out[..8].copy_from_slice(&micros(self.retry_after).to_le_bytes());
        let count = u32::try_from(self.keys).expect("bounded by KEYS_PER_OFFER_MAX");
        out[8..12].copy_from_slice(&count.to_le_bytes());
        for at in self.taken.iter().map(|at| *at as usize).filter(|at| *at < self.keys) {
            out[OFFER_ANSWER_FIXED_BYTES + at / 8] |= 1 << (at % 8);
        }
        out
    }

    pub(crate) fn decode(body: &[u8]) -> Result<OfferAnswerBody, ProtocolError> {
        let (fixed, bits) = body
            .split_first_chunk::<OFFER_ANSWER_FIXED_BYTES>()
            .ok_or(ProtocolError::Malformed("answer to an offer: too short"))?;
        let keys = u32_at(fixed, 8) as usize;
        if keys == 0 || bits.len() != keys.div_ceil(8) {
            return Err(ProtocolError::Malformed("answer to an offer: number of keys does not match"));
        }
        let is_set = |at: &u32| bits[*at as usize / 8] & (1 << (at % 8)) != 0;
        let taken = (0..keys as u32).filter(is_set).collect();
        Ok(OfferAnswerBody { retry_after: Duration::from_micros(u64_at(fixed, 0)), keys, taken })
    }
}

/// Encodes the body of a block header: tier, three zero bytes, 4 bytes of CRC32C per object.
pub(crate) fn encode_block_header(tier: Tier, checksums: &[u32]) -> Vec<u8> {
    let mut out = Vec::with_capacity(BLOCK_HEADER_FIXED_BYTES + checksums.len() * 4);
    out.extend_from_slice(&[tier as u8, 0, 0, 0]);
    for checksum in checksums {
        out.extend_from_slice(&checksum.to_le_bytes());
    }
    out
}

/// Decodes the form of [`encode_block_header`].
pub(crate) fn decode_block_header(body: &[u8]) -> Result<(Tier, Box<[u32]>), ProtocolError> {
    let (fixed, packed) = body
        .split_first_chunk::<BLOCK_HEADER_FIXED_BYTES>()
        .ok_or(ProtocolError::Malformed("block header: too short"))?;
    let tier = Tier::from_wire(fixed[0]).ok_or(ProtocolError::Malformed("block header: unknown tier"))?;
    let (checksums, rest) = packed.as_chunks::<4>();
    if !rest.is_empty() {
        return Err(ProtocolError::Malformed("block header: incomplete checksum"));
    }
    Ok((tier, checksums.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect()))
}

fn micros(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX)
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

#[cfg(test)]
mod tests;
