//! The nodes of the cluster: who they are, which registration is theirs, and whether their heartbeats arrive.
//!
//! ```text
//!            register                  no beat for dead_after               no beat for forget_after
//!   Absent ───────────► Alive ─────────────────────────────► Dead ─────────────────────────────────► Absent
//!                        ▲  ▲                                 │
//!                        │  └───────────── beat ──────────────┘
//!                        └── register, from any state, with a newer epoch
//! ```
//!
//! * `Alive` nodes are offered to others ([`Members::live`]). `Dead` ones are not, but their registration stands and
//!   what the directory knows of them is kept: a pause or a broken link costs no new inventory.
//! * A node without a peer address serves nobody: it lives and may ask, but is never offered.
//! * A beat or registration of an older epoch changes nothing.
//! * `Absent` nodes are known by name and number (from the store) and must register.
//!
//! Beats are O(1); [`Members::expire`] is O(1) until the earliest instant at which a state can change, O(nodes) then.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use reprise_policy::{Epoch, NodeId, Tick};

use crate::live::LiveNodes;
use crate::reports::NodeReport;

/// When a silent node is dead, and when forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberSettings {
    /// A node without a beat for this long is not offered.
    pub dead_after: Duration,
    /// A node without a beat for this long (at least `dead_after`) must register again.
    pub forget_after: Duration,
}

/// What a node says about itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeDetails {
    /// `host:port` of its peer transport; empty when it serves nobody.
    pub peer_address: String,
    /// `host:port` of its admin endpoint.
    pub admin_address: String,
    /// Arena, in bytes.
    pub dram_bytes: u64,
    /// Pool, in bytes.
    pub nvme_bytes: u64,
    /// Nodes of one domain fail together.
    pub failure_domain: String,
    /// Version of its agent.
    pub version: String,
}

/// A node as the store keeps it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeRecord {
    /// Its number, for good.
    pub node: NodeId,
    /// Its name.
    pub name: String,
    /// Its newest registration.
    pub epoch: Epoch,
    /// What it said at that registration.
    pub details: NodeDetails,
}

/// Where a node is in its life; see the drawing of the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemberState {
    /// Beats arrive.
    Alive,
    /// No beat for `dead_after`.
    Dead,
    /// Must register.
    Absent,
}

/// The answer to a beat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beat {
    /// Known and alive.
    Known,
    /// Was dead, is offered again.
    Returned,
    /// Not the current registration: register.
    Unknown,
}

/// A change that silence brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemberEvent {
    /// No longer offered.
    Died(NodeId),
    /// Must register again; the directory may forget this registration.
    Forgotten(NodeId, Epoch),
}

/// A registration that is older than the node's current one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("registration {offered:?} of node {node} is older than {current:?}")]
pub struct StaleEpoch {
    /// The node.
    pub node: NodeId,
    /// The registration refused.
    pub offered: Epoch,
    /// The one that stands.
    pub current: Epoch,
}

/// See the module.
#[derive(Debug)]
pub struct Members {
    settings: MemberSettings,
    members: BTreeMap<NodeId, Member>,
    /// Replaced, never changed: lookups hold on to the set they began with.
    live: Arc<LiveNodes>,
    /// No state changes by silence before this instant. A lower bound: beats only move instants away.
    next_change: Option<Tick>,
}

#[derive(Debug)]
struct Member {
    record: NodeRecord,
    state: MemberState,
    /// Last beat or registration; meaningless when absent.
    last_beat: Tick,
    /// What it last said of itself in this registration.
    report: Option<NodeReport>,
}

impl Members {
    /// No nodes.
    pub fn new(settings: MemberSettings) -> Members {
        Members { settings, members: BTreeMap::new(), live: Arc::default(), next_change: None }
    }

    /// A node that the store knows: absent until it registers.
    pub fn restore(&mut self, record: NodeRecord) {
        let member = Member { state: MemberState::Absent, last_beat: Tick(0), report: None, record };
        self.members.insert(member.record.node, member);
    }

    /// A node registered; it is alive from now on.
    pub fn register(&mut self, now: Tick, record: NodeRecord) -> Result<(), StaleEpoch> {
        let (node, offered) = (record.node, record.epoch);
        if let Some(known) = self.members.get(&node)
            && known.record.epoch >= offered
        {
            return Err(StaleEpoch { node, offered, current: known.record.epoch });
        }
        let member = Member { record, state: MemberState::Alive, last_beat: now, report: None };
        member.offer(&mut self.live);
        self.members.insert(node, member);
        self.expect_change(now.after(self.settings.dead_after));
        Ok(())
    }

    /// A beat of a registration.
    pub fn beat(&mut self, now: Tick, node: NodeId, epoch: Epoch) -> Beat {
        let Some(member) = self.members.get_mut(&node).filter(|member| member.record.epoch == epoch) else {
            return Beat::Unknown;
        };
        match member.state {
            MemberState::Absent => Beat::Unknown,
            MemberState::Alive => {
                member.last_beat = now;
                Beat::Known
            }
            MemberState::Dead => {
                (member.state, member.last_beat) = (MemberState::Alive, now);
                member.offer(&mut self.live);
                self.expect_change(now.after(self.settings.dead_after));
                Beat::Returned
            }
        }
    }

    /// A node says how it is; whether that is its current registration. No sign of life: beats are.
    pub fn report(&mut self, node: NodeId, epoch: Epoch, report: NodeReport) -> bool {
        let member = self.members.get_mut(&node).filter(|member| member.record.epoch == epoch);
        let Some(member) = member.filter(|member| member.state != MemberState::Absent) else { return false };
        member.report = Some(report);
        true
    }

    /// What a node last said of itself in its current registration.
    pub fn report_of(&self, node: NodeId) -> Option<&NodeReport> {
        self.members.get(&node)?.report.as_ref()
    }

    /// Finds those that have been silent too long. A node silent for long enough dies and is forgotten at once.
    pub fn expire(&mut self, now: Tick) -> Vec<MemberEvent> {
        if self.next_change.is_none_or(|next| now < next) {
            return Vec::new();
        }
        let MemberSettings { dead_after, forget_after } = self.settings;
        let mut events = Vec::new();
        let mut next_change: Option<Tick> = None;
        for (node, member) in &mut self.members {
            let silence = now.since(member.last_beat);
            if member.state == MemberState::Alive && silence >= dead_after {
                member.state = MemberState::Dead;
                Arc::make_mut(&mut self.live).remove(*node);
                events.push(MemberEvent::Died(*node));
            }
            if member.state == MemberState::Dead && silence >= forget_after {
                member.state = MemberState::Absent;
                events.push(MemberEvent::Forgotten(*node, member.record.epoch));
            }
            let change = match member.state {
                MemberState::Alive => member.last_beat.after(dead_after),
                MemberState::Dead => member.last_beat.after(forget_after),
                MemberState::Absent => continue,
            };
            next_change = Some(next_change.map_or(change, |next| next.min(change)));
        }
        self.next_change = next_change;
        events
    }

    /// When [`Members::expire`] may find something next.
    pub fn next_deadline(&self) -> Option<Tick> {
        self.next_change
    }

    /// The nodes to offer, as of the last call of `expire`.
    pub fn live(&self) -> Arc<LiveNodes> {
        self.live.clone()
    }

    /// A node.
    pub fn get(&self, node: NodeId) -> Option<(&NodeRecord, MemberState)> {
        self.members.get(&node).map(|member| (&member.record, member.state))
    }

    /// All nodes, by number.
    pub fn iter(&self) -> impl Iterator<Item = (&NodeRecord, MemberState)> {
        self.members.values().map(|member| (&member.record, member.state))
    }

    fn expect_change(&mut self, at: Tick) {
        self.next_change = Some(self.next_change.map_or(at, |next| next.min(at)));
    }
}

impl Member {
    /// Sets whether the living node is offered to others.
    fn offer(&self, live: &mut Arc<LiveNodes>) {
        let live = Arc::make_mut(live);
        if self.record.details.peer_address.is_empty() {
            live.remove(self.record.node);
        } else {
            live.insert(self.record.node);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SETTINGS: MemberSettings =
        MemberSettings { dead_after: Duration::from_micros(15), forget_after: Duration::from_micros(60) };

    fn record(node: u16, epoch: u64) -> NodeRecord {
        NodeRecord {
            node: NodeId(node),
            name: format!("n{node}"),
            epoch: Epoch(epoch),
            details: NodeDetails { peer_address: "host:1".to_owned(), ..NodeDetails::default() },
        }
    }

    fn state(members: &Members, node: u16) -> MemberState {
        members.get(NodeId(node)).expect("a member").1
    }

    #[test]
    fn a_silent_node_dies_is_forgotten_and_must_register_again() {
        let mut members = Members::new(SETTINGS);
        members.register(Tick(100), record(1, 1)).expect("newer");
        assert!(members.expire(Tick(114)).is_empty());
        assert!(members.live().contains(NodeId(1)));
        assert_eq!(members.expire(Tick(115)), [MemberEvent::Died(NodeId(1))]);
        assert!(!members.live().contains(NodeId(1)));
        assert_eq!(members.next_deadline(), Some(Tick(160)));
        assert_eq!(members.expire(Tick(160)), [MemberEvent::Forgotten(NodeId(1), Epoch(1))]);
        assert_eq!(members.beat(Tick(161), NodeId(1), Epoch(1)), Beat::Unknown);
        assert_eq!(members.next_deadline(), None);
        members.register(Tick(162), record(1, 2)).expect("newer");
        assert_eq!(members.beat(Tick(163), NodeId(1), Epoch(2)), Beat::Known);
    }

    #[test]
    fn a_dead_node_that_beats_again_is_offered_again() {
        let mut members = Members::new(SETTINGS);
        members.register(Tick(0), record(1, 1)).expect("newer");
        assert_eq!(members.expire(Tick(20)).len(), 1);
        assert_eq!(members.beat(Tick(30), NodeId(1), Epoch(1)), Beat::Returned);
        assert!(members.live().contains(NodeId(1)));
        assert_eq!(
            members.expire(Tick(45)),
            [MemberEvent::Died(NodeId(1))],
            "silence counts from the last beat"
        );
    }

    #[test]
    fn a_node_that_serves_nobody_lives_but_is_not_offered() {
        let mut members = Members::new(SETTINGS);
        members.register(Tick(0), record(1, 1)).expect("newer");
        let silent = NodeRecord { details: NodeDetails::default(), ..record(1, 2) };
        members.register(Tick(1), silent).expect("newer");
        assert_eq!((state(&members, 1), members.live().contains(NodeId(1))), (MemberState::Alive, false));
        members.expire(Tick(20));
        assert_eq!(members.beat(Tick(21), NodeId(1), Epoch(2)), Beat::Returned);
        assert!(!members.live().contains(NodeId(1)));
    }

    #[test]
    fn an_older_registration_neither_beats_nor_registers() {
        let mut members = Members::new(SETTINGS);
        members.register(Tick(0), record(1, 5)).expect("newer");
        assert_eq!(members.beat(Tick(1), NodeId(1), Epoch(4)), Beat::Unknown);
        assert_eq!(members.beat(Tick(1), NodeId(2), Epoch(5)), Beat::Unknown);
        let refused = members.register(Tick(1), record(1, 5)).expect_err("not newer");
        assert_eq!((refused.offered, refused.current), (Epoch(5), Epoch(5)));
        members.register(Tick(1), record(1, 6)).expect("newer");
    }

    #[test]
    fn a_restored_node_is_known_but_absent() {
        let mut members = Members::new(SETTINGS);
        members.restore(record(3, 7));
        assert_eq!(state(&members, 3), MemberState::Absent);
        assert_eq!(members.beat(Tick(1), NodeId(3), Epoch(7)), Beat::Unknown);
        assert!(members.register(Tick(1), record(3, 7)).is_err(), "its epoch was used");
        assert_eq!(members.live().count(), 0);
    }

    #[test]
    fn a_report_is_of_one_registration() {
        let mut members = Members::new(SETTINGS);
        members.register(Tick(0), record(1, 1)).expect("newer");
        let report = NodeReport { queued_bytes: 7, ..NodeReport::default() };
        assert!(!members.report(NodeId(1), Epoch(2), report));
        assert!(members.report(NodeId(1), Epoch(1), report));
        assert_eq!(members.report_of(NodeId(1)), Some(&report));
        members.register(Tick(1), record(1, 2)).expect("newer");
        assert_eq!(members.report_of(NodeId(1)), None);
        members.expire(Tick(100));
        assert!(!members.report(NodeId(1), Epoch(2), report), "it must register again");
    }

    #[test]
    fn a_lookup_keeps_the_set_of_nodes_it_began_with() {
        let mut members = Members::new(SETTINGS);
        members.register(Tick(0), record(1, 1)).expect("newer");
        let before = members.live();
        members.expire(Tick(15));
        assert!(before.contains(NodeId(1)) && !members.live().contains(NodeId(1)));
    }

    proptest! {
        /// Against the definition: alive exactly when the last accepted sign of life is younger than `dead_after`.
        #[test]
        fn a_node_is_live_exactly_while_its_last_beat_is_young(
            steps in prop::collection::vec((0u8..4, 1u16..4, 0u64..20), 1..200),
        ) {
            let mut members = Members::new(SETTINGS);
            let mut last: BTreeMap<u16, (u64, u64)> = BTreeMap::new(); // node → epoch, last sign of life
            let mut now = 0;
            for (operation, node, wait) in steps {
                now += wait;
                for event in members.expire(Tick(now)) {
                    if let MemberEvent::Forgotten(gone, epoch) = event {
                        prop_assert!(now - last[&gone.0].1 >= 60);
                        prop_assert_eq!(epoch, Epoch(last[&gone.0].0));
                    }
                }
                let epoch = last.get(&node).map_or(0, |known| known.0);
                if operation == 0 {
                    prop_assert!(members.register(Tick(now), record(node, epoch + 1)).is_ok());
                    last.insert(node, (epoch + 1, now));
                } else {
                    let beat = members.beat(Tick(now), NodeId(node), Epoch(epoch));
                    let silence = last.get(&node).map(|known| now - known.1);
                    prop_assert_eq!(beat, match silence {
                        Some(0..15) => Beat::Known,
                        Some(15..60) => Beat::Returned,
                        _ => Beat::Unknown,
                    });
                    if beat != Beat::Unknown {
                        last.insert(node, (epoch, now));
                    }
                }
                for (node, (_, sign)) in &last {
                    prop_assert_eq!(members.live().contains(NodeId(*node)), now - sign < 15);
                }
                prop_assert!(members.next_deadline().is_none_or(|next| next > Tick(now)));
            }
        }
    }
}
