//! State of the peers: bytes requested from each, and recent failures.
//!
//! Bounded: a peer is listed only while bytes are requested from it, or while it is suspect. Node numbers
//! have 16 bits.

use std::collections::BTreeMap;
use std::time::Duration;

use reprise_policy::routing::LoadHint;
use reprise_policy::{NodeId, Tick};

/// Time for which a peer that failed is used only for blocks without another replica. In that time (1.5 s)
/// the control plane detects a dead node and removes it from its answers.
const SUSPICION: Duration = Duration::from_millis(1500);

/// Requested bytes and recent failures, by peer.
#[derive(Debug, Default)]
pub(crate) struct Peers {
    queued: BTreeMap<NodeId, u64>,
    suspects: BTreeMap<NodeId, Tick>,
}

impl Peers {
    /// Bytes requested from a peer.
    pub(crate) fn queued(&self, node: NodeId) -> LoadHint {
        LoadHint(self.queued.get(&node).copied().unwrap_or(0))
    }

    /// Adds to the bytes requested from a peer.
    pub(crate) fn enqueue(&mut self, node: NodeId, bytes: u64) {
        *self.queued.entry(node).or_default() += bytes;
    }

    /// Subtracts bytes that have arrived or will not arrive.
    pub(crate) fn dequeue(&mut self, node: NodeId, bytes: u64) {
        let Some(queued) = self.queued.get_mut(&node) else { return };
        *queued = queued.saturating_sub(bytes);
        if *queued == 0 {
            self.queued.remove(&node);
        }
    }

    /// Marks a peer as suspect after a failure.
    pub(crate) fn suspect(&mut self, node: NodeId, now: Tick) {
        self.suspects.retain(|_, until| *until > now);
        self.suspects.insert(node, now.after(SUSPICION));
    }

    /// Whether a peer failed recently.
    pub(crate) fn is_suspect(&self, node: NodeId, now: Tick) -> bool {
        self.suspects.get(&node).is_some_and(|until| *until > now)
    }

    /// Bytes requested from all peers.
    pub(crate) fn queued_bytes(&self) -> u64 {
        self.queued.values().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_requested_bytes_until_they_end() {
        let mut peers = Peers::default();
        peers.enqueue(NodeId(1), 10);
        peers.enqueue(NodeId(1), 5);
        peers.dequeue(NodeId(1), 10);
        assert_eq!(peers.queued(NodeId(1)), LoadHint(5));
        peers.dequeue(NodeId(1), 5);
        assert!(peers.queued.is_empty());
    }

    #[test]
    fn failed_peer_is_suspect_for_a_limited_time() {
        let mut peers = Peers::default();
        peers.suspect(NodeId(1), Tick(0));
        assert!(peers.is_suspect(NodeId(1), Tick(1_000_000)));
        assert!(!peers.is_suspect(NodeId(1), Tick(1_500_000)));
        assert!(!peers.is_suspect(NodeId(2), Tick(0)));
    }
}
