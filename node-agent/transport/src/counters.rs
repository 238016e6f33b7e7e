//! Totals of a transport: atomic counters, read as one struct.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Totals since start, as the agent exports them.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct TransportStats {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl TransportStats {
            /// Returns name and value of every total.
            pub fn fields(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name),)*].into_iter()
            }

            /// Returns the sums of the totals of two transports. The sum of two maxima is an upper bound.
            pub(crate) fn plus(&self, other: &TransportStats) -> TransportStats {
                TransportStats { $($name: self.$name.saturating_add(other.$name),)* }
            }
        }

        /// The live counters behind the totals.
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
    /// Payload bytes received for wanted blocks.
    received_bytes,
    /// Payload bytes received too late and discarded.
    discarded_bytes,
    /// Payload bytes handed to sockets.
    sent_bytes,
    /// Fetches that were started.
    fetches,
    /// Blocks that arrived complete and verified.
    blocks_received,
    /// Blocks with an object that did not match its checksum.
    blocks_corrupt,
    /// Blocks that the peer did not have.
    blocks_absent,
    /// Blocks lost with a peer, a stall or a deadline.
    blocks_lost,
    /// Fetches whose deadline passed.
    deadlines_passed,
    /// Requests received from peers.
    requests,
    /// Blocks that were served completely.
    blocks_served,
    /// Requests of peers that ended before all was sent.
    serves_aborted,
    /// Offers made to peers.
    offers,
    /// Offers without an answer.
    offers_failed,
    /// Offers received from peers.
    offers_received,
    /// Connections that were closed because the other side violated the protocol.
    protocol_errors,
    /// Connections that ended because one side refused the certificate of the other, or spoke no TLS.
    handshakes_refused,
    /// Connections that were closed because the other side stalled.
    stalls,
    /// Connections opened to peers.
    connections_opened,
    /// Connections accepted from peers.
    connections_accepted,
    /// Connections rejected because all others had requests.
    connections_refused,
    /// Idle connections closed to accept others.
    connections_evicted,
    /// Maximum number of payload bytes in flight to one requester.
    in_flight_bytes_max,
}

/// Adds `amount` to a total.
pub(crate) fn add(counter: &AtomicU64, amount: u64) {
    counter.fetch_add(amount, Ordering::Relaxed);
}

/// Raises a maximum to `value`.
pub(crate) fn raise(counter: &AtomicU64, value: u64) {
    counter.fetch_max(value, Ordering::Relaxed);
}
