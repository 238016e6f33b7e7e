//! Every limit of the transport, with its derivation. Both sides of a connection use the same numbers: they
//! belong to the protocol version.

use std::time::Duration;

/// Maximum number of blocks of one request: a 128K-token request in blocks of 16 tokens.
pub const BLOCKS_PER_REQUEST_MAX: usize = 8192;

/// Maximum number of requests in flight on one connection. A request is one peer's share of one load; a node
/// has tens of loads in flight.
pub const REQUESTS_PER_CONNECTION_MAX: usize = 256;

/// Maximum number of blocks in flight on one connection: four of the largest requests. At ≈ 100 bytes of
/// state a block this is 3.2 MiB a connection.
pub const BLOCKS_PER_CONNECTION_MAX: usize = 4 * BLOCKS_PER_REQUEST_MAX;

/// Maximum number of keys of one offer: 16 KiB. An offer counts as one request and one block of its
/// connection.
pub const KEYS_PER_OFFER_MAX: usize = 1024;

/// Longest deadline of a request or offer: the maximum deadline of a load. A requester with a longer deadline
/// gives up then; a server holds memory no longer than this.
pub const REQUEST_DEADLINE_MAX: Duration = Duration::from_secs(600);

/// Factor by which a server tolerates more than the two limits above. A requester counts a request as ended
/// when its last byte has arrived, the server when its `sendmsg` has returned, which may be later.
pub const SERVER_SLACK: usize = 2;

/// Maximum number of pieces (headers, ranges, absences) queued on one serving connection: every block in
/// flight in pieces of one of its 64 objects. A piece has 72 bytes, so this is at most 150 MiB, while
/// gigabytes of the arena wait for that peer. Beyond it the connection ends.
pub const QUEUED_PIECES_MAX: usize = 64 * BLOCKS_PER_CONNECTION_MAX;

/// Maximum payload of one data frame: larger than any useful `sendmsg`, and small enough that four fit the
/// default credit.
pub const DATA_FRAME_BYTES_MAX: u64 = 8 << 20;

/// Minimum credit that a requester may announce.
pub const CREDIT_BYTES_MIN: u64 = 64 << 10;

/// Maximum credit that a requester may announce: offsets of a window cannot overflow.
pub const CREDIT_BYTES_MAX: u64 = 1 << 40;

/// Credit is returned when a quarter of the window has been consumed: one 32-byte frame per 16 MiB by
/// default. A server never needs more than a quarter for one frame, so it always makes progress.
pub const CREDIT_PARTS: u64 = 4;

/// Maximum length of a node's name in bytes.
pub const NODE_NAME_BYTES_MAX: usize = 64;

const _: () = assert!(CREDIT_BYTES_MIN / CREDIT_PARTS >= 4096);
const _: () = assert!(DATA_FRAME_BYTES_MAX <= u32::MAX as u64);
