//! Totals of a transport: plain atomics, read as one struct.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Totals since start, as the agent exports them.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct TransportStats {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl TransportStats {
            /// Name and value of every total.
            pub fn fields(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name),)*].into_iter()
            }
        }

        /// The totals while they are counted.
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub(crate) $name: AtomicU64,)*
        }

        impl Counters {
            pub(crate) fn snapshot(&self) -> TransportStats {
                TransportStats { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }
    };
}

counters! {
    /// Payload bytes received for blocks that were wanted.
    received_bytes,
    /// Payload bytes received too late for anybody and thrown away.
    discarded_bytes,
    /// Payload bytes handed to sockets.
    sent_bytes,
    /// Fetches begun.
    fetches,
    /// Blocks that arrived whole and verified.
    blocks_received,
    /// Blocks with an object that did not match its checksum.
    blocks_corrupt,
    /// Blocks that the peer did not have.
    blocks_absent,
    /// Blocks lost with a peer, a stall or a deadline.
    blocks_lost,
    /// Fetches whose deadline passed.
    deadlines_passed,
    /// Requests of peers.
    requests,
    /// Blocks served whole.
    blocks_served,
    /// Requests of peers that ended before all was sent.
    serves_aborted,
    /// Offers made to peers.
    offers,
    /// Offers without an answer.
    offers_failed,
    /// Offers of peers.
    offers_received,
    /// Connections that were closed because the other side broke the protocol.
    protocol_errors,
    /// Connections that were closed because the other side stalled.
    stalls,
    /// Connections opened to peers.
    connections_opened,
    /// Connections accepted from peers.
    connections_accepted,
    /// Connections refused because all others had requests.
    connections_refused,
    /// Idle connections closed to accept others.
    connections_evicted,
    /// Most payload bytes in flight to one requester at a time.
    in_flight_bytes_max,
}

/// Adds to a total.
pub(crate) fn add(counter: &AtomicU64, amount: u64) {
    counter.fetch_add(amount, Ordering::Relaxed);
}

/// Raises a maximum.
pub(crate) fn raise(counter: &AtomicU64, value: u64) {
    counter.fetch_max(value, Ordering::Relaxed);
}
