//! A member of the control plane: its volatile memory, and its decisions.
//!
//! The parts, the order in which they change ([`member_parts`]) and the rules are production code. Here are their
//! memory, the flaws that are injected between them, and what the audits need to know. Calls to the store are in
//! `membership.rs`, those of agents in `control_plane.rs`, placement, modes and moves in `member/placement.rs`.
//! The binary's locks, partitions and streams are not reproduced.
//!
//! The outputs are carried out in the order of `controlplane/src/directory.rs`.

mod ledgers;
mod placement;

use std::collections::BTreeMap;
use std::sync::Arc;

use reprise_agent_core::outbox::{self, Answer, Batch};
use reprise_controlplane_core::joining::Joining;
use reprise_controlplane_core::{
    AssignedSlots, Changes, Directory, HeartbeatResult, LivenessSettings, LookupCall, LookupResult,
    MemberList, MemberParts, MemberView, ModeRecord, Modes, NodeEnd, NodeEvent, NodeRecord, NodeTable,
    Opening, RebalanceRound, RecordUpdate, SlotStatus, Standing, Update, UpdateOutcome, member_parts,
};
use reprise_policy::lease_schedule::LeaseSchedule;
use reprise_policy::shards::{MemberName, ShardMap};
use reprise_policy::{BlockKey, Epoch, NodeId, SlotSet, Tick};

use crate::environment::Environment;
use crate::membership::{Membership, StoreConnection};
use crate::messages::{CallId, LookupAnswer, MemberListReply, NodeInfo};
use crate::names::{member_name, number_of_member};
use crate::network::{Host, LineId};
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
    nodes: NodeTable,
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
    /// The node table has changes of which followers are not notified.
    nodes_changed: bool,
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

/// Returns the incarnations of the members in a view.
pub(crate) fn incarnations(view: &MemberView) -> BTreeMap<usize, Revision> {
    view.members.iter().map(|member| (number_of_member(&member.name), member.incarnation)).collect()
}

impl Member {
    /// Creates a member whose process has just started.
    pub(crate) fn new(name: usize, begun: Tick, variant: Variant) -> Member {
        let settings = LivenessSettings { dead_after: DEAD_AFTER, forget_after: FORGET_AFTER };
        Member {
            name,
            nodes: NodeTable::new(settings),
            nodes_changed: false,
            directory: Directory::new(),
            list: MemberList::default(),
            slots_epoch: Epoch(0),
            lease: None,
            joining: Membership::default(),
            talk: StoreConnection::new(name),
            followers: Vec::new(),
            notifies_nodes: false,
            modes: Modes::default(),
            moves: RebalanceRound::default(),
            reported_modes: BTreeMap::new(),
            requested_slots: BTreeMap::new(),
            last_seen: BTreeMap::new(),
            ended: BTreeMap::new(),
            tenancy: Tenancy::new(variant),
            begun,
            variant,
        }
    }

    /// Reports whether the member serves, and is not stopped.
    pub(crate) fn reachable(&self, env: &Environment) -> bool {
        self.joining.serving && env.is_awake(Host::Member(self.name))
    }

    // ---- its place among the members ----------------------------------------------------------------------

    /// Returns this member's incarnation while its lease is certain to live.
    fn certain_incarnation(&self, now: Tick) -> Option<u64> {
        let lease = self.lease?;
        let certain = now < lease.schedule.deadline() || self.variant == Variant::AnswersAfterLease;
        self.joining.entry.as_ref().and_then(Joining::incarnation).filter(|_| certain)
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
        let name = member_name(self.name);
        let AssignedSlots { slots, epoch } = self.standing(now, &name).assigned_slots(self.directory.owned());
        self.slots_epoch = epoch;
        self.directory.set_owned_slots(&slots);
        self.ended.values_mut().for_each(|ended| *ended = ended.and(&slots));
    }

    pub(crate) fn member_list(&self, now: Tick) -> MemberListReply {
        let members = incarnations(self.list.view()).into_iter().collect();
        let (answering, registered) = (self.name, self.certain_map(now).is_some());
        MemberListReply { epoch: self.map().epoch(), members, answering, registered }
    }

    // ---- nodes --------------------------------------------------------------------------------------------

    /// Restores nodes from the store: absent until they register, and expected for a while.
    pub(crate) fn restore(&mut self, records: Vec<NodeRecord>, revision: Revision) {
        member_parts::restore(self, records, revision);
    }

    /// Stops expecting nodes that have not registered.
    pub(crate) fn drop_absent(&mut self) {
        member_parts::stop_expecting_absent(self);
    }

    /// Handles a registration that was written to the store; returns whether it is the newest.
    pub(crate) fn registered(&mut self, now: Tick, record: NodeRecord) -> bool {
        let node = record.node;
        let newest = member_parts::register(self, now, record).is_ok();
        if newest {
            self.last_seen.insert(node, now);
        }
        newest
    }

    pub(crate) fn beat(&mut self, now: Tick, node: NodeId, epoch: Epoch) -> bool {
        let known = member_parts::heartbeat(self, now, node, epoch) != HeartbeatResult::Unknown;
        if known {
            self.last_seen.insert(node, now);
        }
        known
    }

    /// Handles node records from the store.
    pub(crate) fn apply_nodes(&mut self, revision: Revision, update: RecordUpdate<String, NodeRecord>) {
        member_parts::apply_records(self, revision, update);
    }

    /// Reports whether the nodes have changed since the last call.
    pub(crate) fn take_nodes_changed(&mut self) -> bool {
        std::mem::take(&mut self.nodes_changed)
    }

    pub(crate) fn node_list(&self) -> Arc<[NodeInfo]> {
        let info = |record: &NodeRecord| NodeInfo { node: record.node, host: machine_of(record) };
        self.nodes.iter().map(|(record, _)| info(record)).collect()
    }

    /// Expires silent nodes; returns the time of the next check.
    pub(crate) fn expire(&mut self, now: Tick) -> Option<Tick> {
        if self.variant == Variant::LookupsNameDeadNodes {
            return None;
        }
        member_parts::expire(self, now)
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
        let mut call = LookupCall::begin(keys.len() as u32, self.answerable_map(now));
        let mut found = LookupResult::default();
        if call.is_certain() {
            let live = match self.variant {
                Variant::LookupsNameDeadNodes => self.nodes.live(),
                _ => member_parts::live_nodes(self, now),
            };
            self.directory.lookup(keys, &live, requester, &mut found);
            call.add(&found);
        }
        let answer = call.end(self.answerable_map(now), self.map().epoch());
        let replicas = |index| match answer.is_certain {
            true => found.of(index).to_vec(),
            false => Vec::new(),
        };
        LookupAnswer {
            found: (0..keys.len()).map(replicas).collect(),
            partial: if self.variant == Variant::NewOwnerClaimsComplete {
                0
            } else {
                answer.partial as usize
            },
            elsewhere: answer.elsewhere,
            map_epoch: answer.map_epoch,
        }
    }

    /// Returns the map, if this member may answer for its slots by it.
    fn answerable_map(&self, now: Tick) -> Option<Arc<MemberView>> {
        let slots_epoch = match self.variant {
            Variant::AnswersBetweenMaps => self.map().epoch(),
            _ => self.slots_epoch,
        };
        let answers = self.standing(now, &member_name(self.name)).answers(slots_epoch);
        answers.then(|| self.list.view().clone())
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

impl MemberParts for Member {
    fn nodes<R>(&mut self, act: impl FnOnce(&mut NodeTable) -> (R, Vec<NodeEvent>)) -> R {
        let (result, events) = act(&mut self.nodes);
        for event in events {
            match event {
                NodeEvent::Registered { .. } | NodeEvent::Learned(_) | NodeEvent::Removed(_) => {
                    self.nodes_changed = true;
                }
                NodeEvent::Died(node) if self.variant == Variant::DeadNodeGrantsReused => {
                    self.tenancy.ledgers.forget(node);
                }
                // Followers here do not get the liveness of nodes.
                NodeEvent::Died(_) | NodeEvent::Returned(_) | NodeEvent::Forgotten(..) => {}
            }
        }
        result
    }

    fn begin_inventory(&mut self, node: NodeId, epoch: Epoch) {
        if self.directory.register(node, self.epoch(epoch)) {
            self.ended.insert(node, SlotSet::EMPTY);
        }
    }

    fn end_inventory(&mut self, node: NodeId, epoch: Epoch, end: NodeEnd) {
        self.directory.forget(node, self.epoch(epoch));
        if end == NodeEnd::Removed {
            self.directory.stop_expecting(node);
        }
        self.ended.remove(&node);
    }

    fn expect_nodes(&mut self, nodes: &[NodeId]) {
        for node in nodes {
            self.directory.expect_node(*node);
            self.ended.insert(*node, SlotSet::EMPTY);
        }
    }

    fn stop_expecting(&mut self, nodes: &[NodeId]) {
        for node in nodes {
            self.directory.stop_expecting(*node);
            self.ended.remove(node);
        }
    }

    fn register_grants(&mut self, node: NodeId, epoch: Epoch) {
        self.tenancy.ledgers.register(node, epoch);
    }

    fn forget_grants(&mut self, node: NodeId) {
        self.tenancy.ledgers.forget(node);
        self.tenancy.given_up.push(node);
    }
}

/// Returns the host of a node's address.
fn machine_of(record: &NodeRecord) -> usize {
    let address = record.details.peer_endpoints.first().map(|endpoint| endpoint.address.as_str());
    let number = address.and_then(|text| text.strip_prefix('n')?.strip_suffix(":1"));
    number.and_then(|number| number.parse().ok()).expect("the address of an agent is its host")
}
