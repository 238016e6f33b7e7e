//! A member of the control plane: its volatile memory, and its decisions.
//!
//! The work of the binary's services around the cores is done here in the same order. A lookup with its two
//! checks of the map is as in `controlplane/src/directory.rs`, registrations and expiry as in `cluster.rs`.
//! Its standing and the schedule of its lease are production code. Its calls to the store are in `membership.rs`, those of agents in
//! `control_plane.rs`, placement, modes and moves in `member/placement.rs`. The binary's locks, partitions
//! and streams are not reproduced.

mod ledgers;
mod placement;

use std::collections::BTreeMap;
use std::sync::Arc;

use reprise_agent_core::event::Replica;
use reprise_agent_core::outbox::{self, Answer, Batch};
use reprise_controlplane_core::{
    Changes, Directory, HeartbeatResult, LivenessEvent, LivenessSettings, LookupResult, MemberList,
    MemberView, ModeRecord, Modes, NodeLiveness, NodeRecord, NodeTable, Opening, RebalanceRound, SlotStatus,
    Standing, Update, UpdateOutcome,
};
use reprise_policy::lease_schedule::LeaseSchedule;
use reprise_policy::shards::{MemberName, ShardMap};
use reprise_policy::{BlockKey, Epoch, NodeId, SlotSet, Tick};

use crate::membership::{Membership, StoreConnection};
use crate::messages::{CallId, LookupAnswer, MemberListReply, NodeInfo};
use crate::network::LineId;
use crate::setup::{DEAD_AFTER, FORGET_AFTER, Variant};
use crate::store::{LeaseId, Revision};
use ledgers::Tenancy;
pub(crate) use placement::node_name;

/// Number of table entries that one sweep of the directory checks.
const SWEEP_PLACES: usize = 1 << 12;

/// State of a running member.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) name: usize,
    members: NodeTable,
    pub(crate) directory: Directory,
    /// The members as followed from the store.
    pub(crate) list: MemberList,
    /// Epoch of the map from which the directory's slots are derived.
    slots_epoch: Epoch,
    pub(crate) lease: Option<MemberLease>,
    pub(crate) joining: Membership,
    pub(crate) talk: StoreConnection,
    /// Agents that follow this member: their connections and calls.
    pub(crate) followers: Vec<(LineId, CallId)>,
    /// An update of the nodes is scheduled for the followers.
    pub(crate) notifies_nodes: bool,
    /// Hosts of the nodes that have a record.
    hosts: BTreeMap<NodeId, usize>,
    /// Modes of nodes, and the pairs of nodes that move blocks while this member decides that.
    modes: Modes,
    moves: RebalanceRound,
    /// Modes as reported by the store; for the audit.
    pub(crate) reported_modes: BTreeMap<usize, ModeRecord>,
    /// Slots whose inventory was requested from each registration.
    requested_slots: BTreeMap<(NodeId, Epoch), SlotSet>,
    /// Time of each node's last sign of life, by this member's clock.
    pub(crate) last_seen: BTreeMap<NodeId, Tick>,
    /// For each expected node: the slots whose inventory it has completed since this member owns them. For
    /// the audit, which does not query the directory.
    pub(crate) ended: BTreeMap<NodeId, SlotSet>,
    pub(crate) tenancy: Tenancy,
    /// Start time of the member, by its clock.
    begun: Tick,
    /// Number of directory changes since the last audit.
    pub(crate) unaudited: u32,
    variant: Variant,
}

/// A lease that is kept alive.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MemberLease {
    pub(crate) id: LeaseId,
    pub(crate) schedule: LeaseSchedule,
    /// Counts the scheduled checks: only the latest one is executed.
    pub(crate) checks: u64,
}

/// Returns the name of a member in maps.
pub(crate) fn member_name(member: usize) -> MemberName {
    MemberName::new(&format!("m{member:03}")).expect("a printable name")
}

/// Returns the incarnations of the members in a view.
pub(crate) fn incarnations(view: &MemberView) -> BTreeMap<usize, Revision> {
    view.members.iter().map(|member| (number_of_member(&member.name), member.incarnation)).collect()
}

/// Returns the member with a name.
pub(crate) fn number_of_member(name: &MemberName) -> usize {
    name.as_str()[1..].parse().expect("the name of a member contains its number")
}

impl Member {
    /// Creates a member whose process has just started.
    pub(crate) fn new(name: usize, begun: Tick, variant: Variant) -> Member {
        let settings = LivenessSettings { dead_after: DEAD_AFTER, forget_after: FORGET_AFTER };
        Member {
            name,
            members: NodeTable::new(settings),
            directory: Directory::new(),
            list: MemberList::default(),
            slots_epoch: Epoch(0),
            lease: None,
            joining: Membership::default(),
            talk: StoreConnection::default(),
            followers: Vec::new(),
            notifies_nodes: false,
            hosts: BTreeMap::new(),
            modes: Modes::default(),
            moves: RebalanceRound::default(),
            reported_modes: BTreeMap::new(),
            requested_slots: BTreeMap::new(),
            last_seen: BTreeMap::new(),
            ended: BTreeMap::new(),
            tenancy: Tenancy::default(),
            begun,
            unaudited: 0,
            variant,
        }
    }

    // ---- its place among the members ----------------------------------------------------------------------

    /// Returns this member's incarnation while its lease is certain to live.
    fn certain_incarnation(&self, now: Tick) -> Option<u64> {
        let lease = self.lease?;
        let certain = now < lease.schedule.deadline() || self.variant == Variant::AnswersAfterLease;
        self.joining.incarnation().filter(|_| certain)
    }

    /// Returns the map if this member's place in it is certain: only then may the member answer for its
    /// slots.
    pub(crate) fn certain_map(&self, now: Tick) -> Option<&Arc<MemberView>> {
        self.standing(now, &member_name(self.name)).is_certain().then_some(self.list.view())
    }

    /// Returns the map of the latest known list of members.
    fn map(&self) -> &ShardMap {
        &self.list.view().map
    }

    fn standing<'a>(&'a self, now: Tick, name: &'a MemberName) -> Standing<'a> {
        let (listed, held) = (self.list.view().incarnation(name), self.certain_incarnation(now));
        Standing { map: self.map(), name, listed, held }
    }

    /// Sets the directory's slots after a change of the member's place, or of its knowledge of members.
    pub(crate) fn update_owned_slots(&mut self, now: Tick) {
        let kept = self.standing(now, &member_name(self.name)).retained_slots(self.directory.owned());
        self.slots_epoch = self.map().epoch();
        self.directory.set_owned_slots(&kept);
        self.ended.values_mut().for_each(|ended| *ended = ended.and(&kept));
    }

    pub(crate) fn member_list(&self, now: Tick) -> MemberListReply {
        let members = incarnations(self.list.view()).into_iter().collect();
        let (answering, registered) = (self.name, self.certain_map(now).is_some());
        MemberListReply { epoch: self.map().epoch(), members, answering, registered }
    }

    // ---- nodes --------------------------------------------------------------------------------------------

    /// Restores nodes from the store: absent until they register, and expected for a while.
    pub(crate) fn restore(&mut self, records: Vec<NodeRecord>) {
        for record in records {
            self.hosts.insert(record.node, machine_of(&record));
            self.directory.expect_node(record.node);
            self.ended.insert(record.node, SlotSet::EMPTY);
            self.members.restore(record);
        }
    }

    /// Stops expecting nodes that have not registered.
    pub(crate) fn drop_absent(&mut self) {
        let absent = self.members.iter().filter(|(_, state)| *state == NodeLiveness::Absent);
        let absent: Vec<NodeId> = absent.map(|(record, _)| record.node).collect();
        for node in absent {
            self.directory.stop_expecting(node);
            self.ended.remove(&node);
        }
    }

    /// Handles a registration that was written to the store; returns whether it is the newest.
    pub(crate) fn registered(&mut self, now: Tick, record: NodeRecord) -> bool {
        let (node, epoch) = (record.node, record.epoch);
        if self.directory.register(node, self.epoch(record.epoch)) {
            self.ended.insert(node, SlotSet::EMPTY);
        }
        self.hosts.insert(node, machine_of(&record));
        let newest = self.members.register(now, record).is_ok();
        if newest {
            self.last_seen.insert(node, now);
            self.register_shares(node, epoch);
        }
        newest
    }

    pub(crate) fn beat(&mut self, now: Tick, node: NodeId, epoch: Epoch) -> bool {
        let known = self.members.heartbeat(now, node, epoch) != HeartbeatResult::Unknown;
        if known {
            self.last_seen.insert(node, now);
        }
        known
    }

    /// Handles a registration at some member; returns whether the node's host is new.
    pub(crate) fn learn(&mut self, record: NodeRecord) -> bool {
        let news = self.hosts.insert(record.node, machine_of(&record)).is_none();
        self.members.learn(record) || news
    }

    pub(crate) fn nodes(&self) -> Arc<[NodeInfo]> {
        self.hosts.iter().map(|(node, host)| NodeInfo { node: *node, host: *host }).collect()
    }

    /// Expires silent nodes; returns the time of the next check.
    pub(crate) fn expire(&mut self, now: Tick) -> Option<Tick> {
        if self.variant == Variant::LookupsNameDeadNodes {
            return None;
        }
        for event in self.members.expire(now) {
            match event {
                LivenessEvent::Forgotten(node, epoch) => {
                    self.directory.forget(node, self.epoch(epoch));
                    self.ended.remove(&node);
                    self.forget_shares(node);
                }
                LivenessEvent::Died(node) => self.node_died(node),
            }
        }
        self.members.next_deadline()
    }

    /// Removes a part of the outdated entries.
    pub(crate) fn sweep(&mut self) {
        if self.directory.needs_sweep() {
            self.directory.sweep(SWEEP_PLACES);
        }
    }

    // ---- the directory ------------------------------------------------------------------------------------

    pub(crate) fn slot_status(&mut self, node: NodeId, epoch: Epoch) -> Option<SlotStatus> {
        let status = self.directory.slot_status(node, self.epoch(epoch))?;
        let before = self.requested_slots.entry((node, epoch)).or_insert(SlotSet::EMPTY);
        let requested = before.clone();
        *before = before.or(&status.wanted);
        match self.variant {
            Variant::RegainedSlotsWithoutInventory => {
                Some(SlotStatus { wanted: status.wanted.without(&requested), ..status })
            }
            _ => Some(status),
        }
    }

    pub(crate) fn update(&mut self, batch: &Batch) -> Answer {
        let opening = match &batch.opening {
            outbox::Opening::Nothing => Opening::Nothing,
            outbox::Opening::Slots(slots) => Opening::Slots(slots),
            outbox::Opening::Reset(slots) => Opening::Reset(slots),
        };
        let changes = Changes::parse(&batch.keys, &batch.operations).expect("agents send whole changes");
        let (node, epoch, sequence) = (batch.node, self.epoch(batch.epoch), batch.sequence);
        match self.directory.update(&Update { node, epoch, sequence, opening, changes, ends: &batch.ends }) {
            UpdateOutcome::Fenced => Answer::Fenced,
            UpdateOutcome::Expecting { expected, .. } => {
                if let Some(ended) = self.ended.get_mut(&node) {
                    *ended = ended.or(&batch.ends.and(self.directory.owned()));
                }
                Answer::Expecting(expected)
            }
        }
    }

    /// Answers a lookup for its own slots, if its place is certain.
    pub(crate) fn lookup(&mut self, now: Tick, keys: &[BlockKey], requester: Option<NodeId>) -> LookupAnswer {
        let map_epoch = self.map().epoch();
        let follows = self.slots_epoch == map_epoch || self.variant == Variant::AnswersBetweenMaps;
        if self.certain_map(now).is_none() || !follows {
            let elsewhere = (0..keys.len() as u32).collect();
            return LookupAnswer { found: vec![Vec::new(); keys.len()], elsewhere, partial: 0, map_epoch };
        }
        self.expire(now);
        let mut found = LookupResult::default();
        self.directory.lookup(keys, &self.members.live(), requester, &mut found);
        let of = |index| {
            found
                .of(index)
                .iter()
                .map(|replica| Replica { node: replica.node, tier: replica.tier, load: replica.load })
                .collect()
        };
        LookupAnswer {
            found: (0..keys.len()).map(of).collect(),
            elsewhere: found.elsewhere().to_vec(),
            partial: if self.variant == Variant::NewOwnerClaimsComplete {
                0
            } else {
                found.partial() as usize
            },
            map_epoch,
        }
    }

    /// Reports whether an expected node has not completed its inventory of a key's slot.
    pub(crate) fn silent_about(&self, key: &BlockKey) -> bool {
        self.ended.values().any(|ended| !ended.has_key(key))
    }

    /// Returns the registration's epoch for the directory; an injected flaw uses a constant.
    fn epoch(&self, epoch: Epoch) -> Epoch {
        if self.variant == Variant::RegistrationKeepsDirectory { Epoch(1) } else { epoch }
    }
}

/// Returns the host of a node's address.
fn machine_of(record: &NodeRecord) -> usize {
    let number = record.details.peer_address.strip_prefix('n').and_then(|text| text.strip_suffix(":1"));
    number.and_then(|number| number.parse().ok()).expect("the address of an agent is its host")
}
