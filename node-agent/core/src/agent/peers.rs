//! What is known of peers: bytes wanted of each, and who failed lately.
//!
//! Bounded: a peer is listed while something is wanted of it, or while it is suspect; nodes have 16-bit numbers.

use std::collections::BTreeMap;
use std::time::Duration;

use reprise_policy::routing::LoadHint;
use reprise_policy::{NodeId, Tick};

/// For so long a peer that was lost is asked only for what nobody else has: the time in which the control plane
/// notices a death (1.5 s) and stops offering the node.
const SUSPICION: Duration = Duration::from_millis(1500);

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Peers {
    queued: BTreeMap<NodeId, u64>,
    suspects: BTreeMap<NodeId, Tick>,
}

impl Peers {
    /// Bytes wanted of a peer.
    pub(super) fn queued(&self, node: NodeId) -> LoadHint {
        LoadHint(self.queued.get(&node).copied().unwrap_or(0))
    }

    /// So many more bytes are wanted of a peer.
    pub(super) fn enqueue(&mut self, node: NodeId, bytes: u64) {
        *self.queued.entry(node).or_default() += bytes;
    }

    /// So many bytes have arrived or will not.
    pub(super) fn dequeue(&mut self, node: NodeId, bytes: u64) {
        let Some(queued) = self.queued.get_mut(&node) else { return };
        *queued = queued.saturating_sub(bytes);
        if *queued == 0 {
            self.queued.remove(&node);
        }
    }

    /// A peer was lost.
    pub(super) fn suspect(&mut self, node: NodeId, now: Tick) {
        self.suspects.retain(|_, until| *until > now);
        self.suspects.insert(node, now.after(SUSPICION));
    }

    /// Whether a peer was lost lately.
    pub(super) fn is_suspect(&self, node: NodeId, now: Tick) -> bool {
        self.suspects.get(&node).is_some_and(|until| *until > now)
    }

    /// Bytes wanted of all peers.
    pub(super) fn queued_bytes(&self) -> u64 {
        self.queued.values().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wanted_of_a_peer_is_what_has_not_ended() {
        let mut peers = Peers::default();
        peers.enqueue(NodeId(1), 10);
        peers.enqueue(NodeId(1), 5);
        peers.dequeue(NodeId(1), 10);
        assert_eq!(peers.queued(NodeId(1)), LoadHint(5));
        peers.dequeue(NodeId(1), 5);
        assert!(peers.queued.is_empty());
    }

    #[test]
    fn a_lost_peer_is_suspect_for_a_while() {
        let mut peers = Peers::default();
        peers.suspect(NodeId(1), Tick(0));
        assert!(peers.is_suspect(NodeId(1), Tick(1_000_000)));
        assert!(!peers.is_suspect(NodeId(1), Tick(1_500_000)));
        assert!(!peers.is_suspect(NodeId(2), Tick(0)));
    }
}
