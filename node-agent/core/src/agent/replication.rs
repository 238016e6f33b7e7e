//! Replicas of blocks on several nodes.
//!
//! [`outbound`] offers blocks of this node to peers, [`inbound`] accepts and fetches blocks that peers offer.
//! Each node decides for itself: an offer carries no state, so either side may drop it at any time.

pub(crate) mod inbound;
pub(crate) mod outbound;
