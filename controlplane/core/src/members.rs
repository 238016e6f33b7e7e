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
//! * A node registers with every member, each time under a higher epoch. What the store says of a registration with another
//!   member ([`Members::learn`]) tells where the node is to be reached, and neither that it lives nor which registration
//!   is this member's: that is for its own beats and registrations to say.
//! * A node whose record the store has no more ([`Members::deleted`], [`Members::only`]) is none from any state on: its number is
//!   never given out again, so what carries it is not believed. A registration that was in the store before its record was
//!   deleted, and arrives here afterwards, is told by the revision of the record: up to the one that
//!   [`Members::followed`] names all records are known here.
//!
//! Beats are O(1); [`Members::expire`] is O(1) until the earliest instant at which a state can change, O(nodes) then.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use reprise_policy::{DrainProgress, Epoch, NodeId, Tick};

use crate::ledgers::{KnownNode, Presence};
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

/// What does not change while a node's agent runs. What does is in its reports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeDetails {
    /// `host:port` of its peer transport; empty when it serves nobody.
    pub peer_address: String,
    /// `host:port` of its admin endpoint.
    pub admin_address: String,
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
    /// Revision of the store that this record is of.
    pub revision: u64,
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

/// Why a registration is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotRegistered {
    /// The node has a newer one.
    #[error("registration {offered:?} of node {node} is older than {current:?}")]
    Stale {
        /// The node.
        node: NodeId,
        /// The registration refused.
        offered: Epoch,
        /// The one that stands.
        current: Epoch,
    },
    /// The store has the node's record no more.
    #[error("node {0} was forgotten while it registered: register again")]
    Forgotten(NodeId),
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
    /// All records that the store had at this revision are known.
    followed: Option<u64>,
}

#[derive(Debug)]
struct Member {
    record: NodeRecord,
    /// The newest registration that this member has granted, or that the store had when it started.
    fence: Epoch,
    /// The newest one that `record.details` are of.
    details_of: Epoch,
    state: MemberState,
    /// Last beat or registration; meaningless when absent.
    last_beat: Tick,
    /// What it last said of itself in this registration.
    report: Option<NodeReport>,
    /// Bytes that were placed on it since.
    placed: u64,
    /// Revision of the mode that it was last told, and of the one that it had been told when it reported.
    told: u64,
    knew: u64,
}

impl Members {
    /// No nodes.
    pub fn new(settings: MemberSettings) -> Members {
        Members {
            settings,
            members: BTreeMap::new(),
            live: Arc::default(),
            next_change: None,
            followed: None,
        }
    }

    /// A node that the store knows: absent until it registers.
    pub fn restore(&mut self, record: NodeRecord) {
        let fence = record.epoch;
        self.members.insert(record.node, Member::new(record, fence, (MemberState::Absent, Tick(0))));
    }

    /// The store has a record of a registration with some member. Returns whether that was news.
    pub fn learn(&mut self, record: NodeRecord) -> bool {
        if self.is_gone(&record) {
            return false;
        }
        let Some(known) = self.members.get_mut(&record.node) else {
            self.members.insert(record.node, Member::new(record, Epoch(0), (MemberState::Absent, Tick(0))));
            return true;
        };
        known.record.revision = known.record.revision.max(record.revision);
        if known.details_of >= record.epoch {
            return false;
        }
        known.details_of = record.epoch;
        let news = known.record.details != record.details;
        known.record.details = record.details;
        if known.state == MemberState::Absent {
            known.record.epoch = record.epoch;
        } else if known.state == MemberState::Alive && news {
            known.offer(&mut self.live);
        }
        news
    }

    /// A node registered; it is alive from now on.
    ///
    /// # Errors
    /// A newer registration has come first, or the node was forgotten.
    pub fn register(&mut self, now: Tick, mut record: NodeRecord) -> Result<(), NotRegistered> {
        let (node, offered) = (record.node, record.epoch);
        if self.is_gone(&record) {
            return Err(NotRegistered::Forgotten(node));
        }
        if let Some(known) = self.members.get(&node) {
            if known.fence >= offered {
                return Err(NotRegistered::Stale { node, offered, current: known.fence });
            }
            record.revision = record.revision.max(known.record.revision);
        }
        let member = Member::new(record, offered, (MemberState::Alive, now));
        member.offer(&mut self.live);
        self.members.insert(node, member);
        self.expect_change(now.after(self.settings.dead_after));
        Ok(())
    }

    /// The store has deleted the record of a name at a revision: whoever had the name before is gone. Returns who that is. Who
    /// has registered under it since stays, under another number.
    pub fn deleted(&mut self, name: &str, revision: u64) -> Vec<NodeRecord> {
        self.remove(|record| record.name == name && record.revision < revision)
    }

    /// The store has records of these nodes and no others at a revision. Returns who is gone; who has registered since stays.
    pub fn only(&mut self, is_there: impl Fn(&NodeRecord) -> bool, revision: u64) -> Vec<NodeRecord> {
        self.remove(|record| record.revision <= revision && !is_there(record))
    }

    /// All records that the store had at this revision have been told, and all deletions up to it.
    pub fn followed(&mut self, revision: u64) {
        self.followed = self.followed.max(Some(revision));
    }

    fn remove(&mut self, is_gone: impl Fn(&NodeRecord) -> bool) -> Vec<NodeRecord> {
        let records = self.members.values().map(|member| &member.record);
        let gone: Vec<NodeRecord> = records.filter(|record| is_gone(record)).cloned().collect();
        for NodeRecord { node, .. } in &gone {
            self.members.remove(node);
            Arc::make_mut(&mut self.live).remove(*node);
        }
        gone
    }

    /// Whether a record was deleted since it was read.
    fn is_gone(&self, record: &NodeRecord) -> bool {
        let is_told = self.followed.is_some_and(|followed| record.revision <= followed);
        is_told && !self.members.contains_key(&record.node)
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
        (member.report, member.placed, member.knew) = (Some(report), 0, member.told);
        true
    }

    /// A node is told its mode, of a revision of the store.
    pub fn tell_mode(&mut self, node: NodeId, revision: u64) {
        if let Some(member) = self.members.get_mut(&node) {
            member.told = revision;
        }
    }

    /// How far a node has come with the drain of this revision; `None` before it has reported in the knowledge of it.
    pub fn drain_of(&self, node: NodeId, revision: u64) -> Option<DrainProgress> {
        let member = self.members.get(&node).filter(|member| member.knew == revision)?;
        member.report.as_ref().map(|report| report.drain)
    }

    /// Bytes were placed on a node: it has less room until it reports.
    pub fn place(&mut self, node: NodeId, bytes: u64) {
        if let Some(member) = self.members.get_mut(&node) {
            member.placed = member.placed.saturating_add(bytes);
        }
    }

    /// Bytes that were placed on a node since it reported.
    pub fn placed_on(&self, node: NodeId) -> u64 {
        self.members.get(&node).map_or(0, |member| member.placed)
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

    /// Whether this is the current registration of a node.
    pub fn is_registered(&self, node: NodeId, epoch: Epoch) -> bool {
        let known = self.get(node).filter(|(_, state)| *state != MemberState::Absent);
        known.is_some_and(|(record, _)| record.epoch == epoch)
    }

    /// All nodes, by number.
    pub fn iter(&self) -> impl Iterator<Item = (&NodeRecord, MemberState)> {
        self.members.values().map(|member| (&member.record, member.state))
    }

    /// All nodes, as ledgers want to know them.
    pub fn known(&self) -> impl Iterator<Item = KnownNode> {
        let presence = |state| if state == MemberState::Absent { Presence::Away } else { Presence::Here };
        self.iter().map(move |(record, state)| (record.node, record.epoch, presence(state)))
    }

    fn expect_change(&mut self, at: Tick) {
        self.next_change = Some(self.next_change.map_or(at, |next| next.min(at)));
    }
}

impl Member {
    fn new(record: NodeRecord, fence: Epoch, (state, last_beat): (MemberState, Tick)) -> Member {
        let details_of = record.epoch;
        Member { record, fence, details_of, state, last_beat, report: None, placed: 0, told: 0, knew: 0 }
    }

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
mod tests;
