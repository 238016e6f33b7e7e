//! Every bound of the transport, with its arithmetic. Both sides of a connection know the same numbers: they
//! belong to the protocol version.

use std::time::Duration;

/// Blocks of one request at the most: a 128K-token request in blocks of 16 tokens.
pub const BLOCKS_PER_REQUEST_MAX: usize = 8192;

/// Requests in flight on one connection at the most. A request is one load's share of one peer; a node has tens
/// of loads in flight.
pub const REQUESTS_PER_CONNECTION_MAX: usize = 256;

/// Blocks in flight on one connection at the most: four of the largest requests. At ≈ 100 bytes of state a block
/// 3.2 MiB a connection.
pub const BLOCKS_PER_CONNECTION_MAX: usize = 4 * BLOCKS_PER_REQUEST_MAX;

/// Keys of one offer at the most: 16 KiB. An offer counts as one request and as one block of its connection.
pub const KEYS_PER_OFFER_MAX: usize = 1024;

/// Longest deadline of a request or offer: as long as a load may wait. A requester with more patience gives up then, a server
/// that is told of more holds memory for so long only.
pub const REQUEST_DEADLINE_MAX: Duration = Duration::from_secs(600);

/// A server tolerates this many times the two limits above: a requester counts a request as ended when its last
/// byte arrived, the server when its `sendmsg` returned, which may be later.
pub const SERVER_SLACK: usize = 2;

/// Pieces (headers, ranges, absences) queued on one serving connection at the most: every block in flight in pieces
/// of one of its 64 objects. A piece is 72 bytes, so 150 MiB at the worst, and then gigabytes of the arena wait
/// for that peer. Beyond it the connection is ended.
pub const QUEUED_PIECES_MAX: usize = 64 * BLOCKS_PER_CONNECTION_MAX;

/// Payload of one data frame at the most. Larger than any useful `sendmsg`, small enough that four of them fit
/// the default credit.
pub const DATA_FRAME_BYTES_MAX: u64 = 8 << 20;

/// Least credit that a requester may announce.
pub const CREDIT_BYTES_MIN: u64 = 64 << 10;

/// Most credit that a requester may announce: offsets of a window stay far from any overflow.
pub const CREDIT_BYTES_MAX: u64 = 1 << 40;

/// Credit is given back when a quarter of the window has been consumed: one 32-byte frame per 16 MiB at the
/// default. A server never needs more than a quarter for one frame, so it always gets on.
pub const CREDIT_PARTS: u64 = 4;

/// Bytes of a node's name at the most.
pub const NODE_NAME_BYTES_MAX: usize = 64;

const _: () = assert!(CREDIT_BYTES_MIN / CREDIT_PARTS >= 4096);
const _: () = assert!(DATA_FRAME_BYTES_MAX <= u32::MAX as u64);
