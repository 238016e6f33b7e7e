//! What must be so when faults have stopped and time has passed: everything has come to its end, nothing is left over,
//! and the directory is the union of the agents' inventories.
//!
//! What must be so at every step is checked where it happens: the audits of the cores in `node.rs` and `plane.rs`, bytes
//! in `engine.rs` and `peers.rs`, promises in `faults.rs`.

use std::collections::BTreeSet;

use reprise_policy::{BlockKey, NodeId, SessionId, Tier};

use crate::node::count_all;
use crate::setup::{SETTLE, all_keys, layout_of};
use crate::world::World;

/// A header page in front of every block on a device.
const HEADER_BYTES: u64 = 4096;

impl World {
    /// Faults stop; what was asked is answered; engines go; nothing is left.
    pub(crate) fn settle(&mut self) {
        self.end_faults();
        self.run_until(self.now.after(SETTLE));
        for node in 0..self.nodes.len() {
            let sessions: Vec<SessionId> = self.process(node).sessions.keys().copied().collect();
            for session in sessions {
                let left = self.process(node).sessions[&session].unfinished();
                assert!(left.is_none(), "node {node}: {}", left.unwrap_or_default());
                self.close_session(node, session);
            }
        }
        self.run_until(self.now.after(SETTLE));
        for node in 0..self.nodes.len() {
            count_all(&mut self.seen, self.nodes[node].process.as_ref().expect("it runs"));
            self.assert_nothing_left(node);
        }
        self.assert_converged();
    }

    fn assert_nothing_left(&mut self, node: usize) {
        let process = self.process(node);
        let link = &process.link;
        let counters = process.core.counters();
        let left = [
            ("sessions", counters.sessions),
            ("reserved bytes", counters.reserved_bytes),
            ("read leases", counters.read_leases),
            ("loads", counters.loads_held),
            ("fills", counters.fills_in_flight),
            ("serves", counters.serves_in_flight),
            ("unsaved blocks", counters.unsaved_blocks),
            ("pending frees", counters.pool_pending_free_bytes),
            ("jobs", process.jobs.len() as u64),
            ("fetches", process.fetches.len() as u64),
            ("requests of peers", process.serves.len() as u64),
            ("announcements", link.outbox.queued() as u64),
            ("calls", link.waiting() as u64),
        ];
        for (what, count) in left {
            assert_eq!(count, 0, "node {node}: {what} are left");
        }
        assert_eq!(process.core.next_deadline(), None, "node {node}: nothing is left to wait for");
        self.assert_space(node);
    }

    /// The bytes in use are those of the blocks that were announced, and of slots that lost devices kept.
    fn assert_space(&mut self, node: usize) {
        let process = self.process(node);
        let counters = process.core.counters();
        let bytes = |tier: Tier, header: u64| -> u64 {
            let of_tier = process.inventory.iter().filter(|(_, other)| *other == tier);
            of_tier.map(|(key, _)| layout_of(key).slot_bytes() + header).sum()
        };
        let dram = bytes(Tier::Dram, 0) + counters.arena_lost_bytes;
        assert_eq!(counters.arena_used_bytes, dram, "node {node}: slots of the arena leak");
        assert_eq!(
            counters.pool_used_bytes,
            bytes(Tier::Nvme, HEADER_BYTES),
            "node {node}: slots of the pool leak"
        );
        assert!(
            counters.arena_used_bytes <= counters.arena_bytes,
            "node {node}: the arena is over its budget"
        );
    }

    fn assert_converged(&mut self) {
        let now = self.now;
        let member = self.member.as_mut().expect("it was started again");
        let mut known: BTreeSet<(NodeId, BlockKey, Tier)> = BTreeSet::new();
        let keys = all_keys();
        for (key, replicas) in keys.iter().zip(member.lookup(now, &keys, None)) {
            known.extend(replicas.iter().map(|replica| (replica.node, *key, replica.tier)));
        }
        let mut held = BTreeSet::new();
        for node in 0..self.nodes.len() {
            let number = self.store.node_of(node).expect("every agent has registered");
            let process = self.process(node);
            assert!(
                process.link.granted.is_some_and(|granted| granted.node == number),
                "node {node} is registered"
            );
            held.extend(process.inventory.iter().map(|(key, tier)| (number, *key, *tier)));
        }
        let phantom: Vec<_> = known.difference(&held).collect();
        let missing: Vec<_> = held.difference(&known).collect();
        assert!(phantom.is_empty(), "the directory names what is not there: {phantom:?}");
        assert!(missing.is_empty(), "the directory does not name what is there: {missing:?}");
    }
}
