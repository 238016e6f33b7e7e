//! A member of the control plane: its memory, which dies with it, and what it decides.
//!
//! What the services of the binary do around the cores is done here in the same order: a lookup and its two looks at the
//! map as in `controlplane/src/directory.rs`, registrations and expiry as in `cluster.rs`, [`Member::kept`] and
//! [`Member::certain_map`] as in `shards.rs`, the schedule of the lease as in `controlplane/store/src/held.rs`. How it talks
//! with the store is in `joining.rs`, with agents in `plane.rs`; what it says of places, modes and moves in `member/choosing.rs`. The binary's locks, parts and streams are not here.

mod choosing;
mod ledgers;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use reprise_agent_core::event::Replica;
use reprise_agent_core::outbox::{self, Answer, Batch};
use reprise_controlplane_core::{
    Beat, Changes, Directory, Found, MemberEvent, MemberSettings, MemberState, Members, Modes, MovesRound,
    NodeRecord, Opening, SetMode, Standing, Update, Updated,
};
use reprise_policy::shards::{MemberName, ShardMap};
use reprise_policy::{BlockKey, Epoch, NodeId, SlotSet, Tick};

use crate::joining::{Joining, Talk};
use crate::messages::{Answered, CallId, MemberList, NodeInfo};
use crate::network::LineId;
use crate::setup::{DEAD_AFTER, FORGET_AFTER, Variant};
use crate::store::{LeaseId, Revision};
use ledgers::Tenancy;

/// Places of the directory's tables that one sweep looks at.
const SWEEP_PLACES: usize = 1 << 12;
/// As `held.rs`: keep-alives in one time to live, and tries after one that failed.
const KEEP_ALIVES: u32 = 3;
const RETRIES: u32 = 12;

/// A running member.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) name: usize,
    members: Members,
    pub(crate) directory: Directory,
    /// The members as last seen.
    pub(crate) view: View,
    /// Epoch of the map by which the directory has its slots.
    slots_epoch: Epoch,
    /// Incarnation of this member's entry in the store.
    pub(crate) registration: Option<Revision>,
    pub(crate) lease: Option<HeldLease>,
    pub(crate) joining: Joining,
    pub(crate) talk: Talk,
    /// Agents that follow: their connections and calls.
    pub(crate) followers: Vec<(LineId, CallId)>,
    /// They will be told of nodes soon.
    pub(crate) tells_nodes: bool,
    /// Nodes that have a record, and their machines.
    hosts: BTreeMap<NodeId, usize>,
    /// What nodes are for, and who gives blocks to whom while this member decides that.
    modes: Modes,
    moves: MovesRound,
    /// What the store has said of modes. For the auditor.
    pub(crate) told_modes: BTreeMap<usize, SetMode>,
    /// Slots that registrations have been asked for.
    asked: BTreeMap<(NodeId, Epoch), SlotSet>,
    /// The last sign of life of a node, by this member's clock.
    pub(crate) heard: BTreeMap<NodeId, Tick>,
    /// Of each node that is waited for: the slots whose inventory it has ended since this member has owned them. For the
    /// auditor, who does not ask the directory.
    pub(crate) ended: BTreeMap<NodeId, SlotSet>,
    pub(crate) tenancy: Tenancy,
    /// When it has begun, by its clock.
    begun: Tick,
    /// Changes of the directory since it was audited.
    pub(crate) unaudited: u32,
    variant: Variant,
}

/// The members at an epoch.
#[derive(Clone, Debug)]
pub(crate) struct View {
    /// Name and incarnation.
    pub(crate) members: BTreeMap<usize, Revision>,
    pub(crate) map: Arc<ShardMap>,
}

/// A lease that is kept alive.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeldLease {
    pub(crate) id: LeaseId,
    time_to_live: Duration,
    next: Tick,
    /// Until then it lives for certain, by the member's clock.
    pub(crate) until: Tick,
    /// The question was asked then whose answer says so.
    pub(crate) asked: Tick,
    /// A keep-alive is under way.
    pub(crate) asking: bool,
    /// Counts the looks at it that were scheduled: only the last one is taken.
    pub(crate) looks: u64,
}

/// What is to be done about a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LeaseStep {
    Wait(Tick),
    KeepAlive,
    GiveUp,
}

impl HeldLease {
    /// Granted in answer to a question of this instant.
    pub(crate) fn granted(id: LeaseId, time_to_live: Duration, asked: Tick) -> HeldLease {
        let next = asked.after(time_to_live / KEEP_ALIVES);
        HeldLease { id, time_to_live, next, until: asked.after(time_to_live), asked, asking: false, looks: 0 }
    }

    pub(crate) fn step(&self, now: Tick) -> LeaseStep {
        if now >= self.until {
            LeaseStep::GiveUp
        } else if self.asking {
            LeaseStep::Wait(self.until)
        } else if now >= self.next {
            LeaseStep::KeepAlive
        } else {
            LeaseStep::Wait(self.next.min(self.until))
        }
    }

    pub(crate) fn confirmed(&mut self, asked: Tick) {
        *self = HeldLease { looks: self.looks, ..HeldLease::granted(self.id, self.time_to_live, asked) };
    }

    pub(crate) fn failed(&mut self, now: Tick) {
        self.next = now.after(self.time_to_live / RETRIES);
        self.asking = false;
    }
}

/// The name of a member in maps.
pub(crate) fn member_name(member: usize) -> MemberName {
    MemberName::new(&format!("m{member:03}")).expect("a printable name")
}

impl View {
    /// Nobody: what is known before the store has answered.
    pub(crate) fn nobody() -> View {
        let map = ShardMap::new(Epoch(0), []).expect("a map of nobody");
        View { members: BTreeMap::new(), map: Arc::new(map) }
    }
}

impl Member {
    /// A member whose process has just started, before it knows anything.
    pub(crate) fn new(name: usize, begun: Tick, variant: Variant) -> Member {
        let settings = MemberSettings { dead_after: DEAD_AFTER, forget_after: FORGET_AFTER };
        Member {
            name,
            members: Members::new(settings),
            directory: Directory::new(),
            view: View::nobody(),
            slots_epoch: Epoch(0),
            registration: None,
            lease: None,
            joining: Joining::default(),
            talk: Talk::default(),
            followers: Vec::new(),
            tells_nodes: false,
            hosts: BTreeMap::new(),
            modes: Modes::default(),
            moves: MovesRound::default(),
            told_modes: BTreeMap::new(),
            asked: BTreeMap::new(),
            heard: BTreeMap::new(),
            ended: BTreeMap::new(),
            tenancy: Tenancy::default(),
            begun,
            unaudited: 0,
            variant,
        }
    }

    // ---- its place among the members ---------------------------------------------------------------------------

    /// This member's incarnation while its lease lives for certain.
    fn certain_incarnation(&self, now: Tick) -> Option<Revision> {
        let lease = self.lease?;
        let certain = now < lease.until || self.variant == Variant::AnswersAfterLease;
        self.registration.filter(|_| certain)
    }

    /// The map, when this member's place in it is certain: only then may it answer for its slots.
    pub(crate) fn certain_map(&self, now: Tick) -> Option<&View> {
        let incarnation = self.certain_incarnation(now)?;
        (self.view.members.get(&self.name) == Some(&incarnation)).then_some(&self.view)
    }

    /// The slots to keep: its own, or, while its place is not certain, what nobody else has been given.
    fn kept(&self, now: Tick) -> SlotSet {
        let name = member_name(self.name);
        match self.certain_map(now) {
            Some(view) => view.map.owned_by(&name),
            None => self.directory.owned().without(&self.view.map.owned_by_others(&name)),
        }
    }

    /// Its place has changed, or what it knows of others.
    pub(crate) fn own_kept(&mut self, now: Tick) {
        let kept = self.kept(now);
        self.slots_epoch = self.view.map.epoch();
        self.directory.own(&kept);
        self.ended.values_mut().for_each(|ended| *ended = ended.and(&kept));
    }

    pub(crate) fn list(&self, now: Tick) -> MemberList {
        let members = self.view.members.iter().map(|(name, incarnation)| (*name, *incarnation)).collect();
        let (answering, registered) = (self.name, self.certain_map(now).is_some());
        MemberList { epoch: self.view.map.epoch(), members, answering, registered }
    }

    // ---- nodes -------------------------------------------------------------------------------------------------

    /// Nodes that the store knows: absent until they register, and waited for.
    pub(crate) fn restore(&mut self, records: Vec<NodeRecord>) {
        for record in records {
            self.hosts.insert(record.node, machine_of(&record));
            self.directory.expect(record.node);
            self.ended.insert(record.node, SlotSet::EMPTY);
            self.members.restore(record);
        }
    }

    /// Those that have not registered are waited for no longer.
    pub(crate) fn give_up_absent(&mut self) {
        let absent = self.members.iter().filter(|(_, state)| *state == MemberState::Absent);
        let absent: Vec<NodeId> = absent.map(|(record, _)| record.node).collect();
        for node in absent {
            self.directory.give_up(node);
            self.ended.remove(&node);
        }
    }

    /// A registration is in the store. Whether it is the newest.
    pub(crate) fn registered(&mut self, now: Tick, record: NodeRecord) -> bool {
        let (node, epoch) = (record.node, record.epoch);
        if self.directory.register(node, self.epoch(record.epoch)) {
            self.ended.insert(node, SlotSet::EMPTY);
        }
        self.hosts.insert(node, machine_of(&record));
        let newest = self.members.register(now, record).is_ok();
        if newest {
            self.heard.insert(node, now);
            self.register_shares(node, epoch);
        }
        newest
    }

    pub(crate) fn beat(&mut self, now: Tick, node: NodeId, epoch: Epoch) -> bool {
        let known = self.members.beat(now, node, epoch) != Beat::Unknown;
        if known {
            self.heard.insert(node, now);
        }
        known
    }

    /// A node has registered with some member. Returns whether its machine is news.
    pub(crate) fn learn(&mut self, record: NodeRecord) -> bool {
        let news = self.hosts.insert(record.node, machine_of(&record)).is_none();
        self.members.learn(record) || news
    }

    pub(crate) fn nodes(&self) -> Arc<[NodeInfo]> {
        self.hosts.iter().map(|(node, host)| NodeInfo { node: *node, host: *host }).collect()
    }

    /// Finds nodes that have been silent too long. Returns when to come again.
    pub(crate) fn expire(&mut self, now: Tick) -> Option<Tick> {
        if self.variant == Variant::DeadNodesOffered {
            return None;
        }
        for event in self.members.expire(now) {
            match event {
                MemberEvent::Forgotten(node, epoch) => {
                    self.directory.forget(node, self.epoch(epoch));
                    self.ended.remove(&node);
                    self.forget_shares(node);
                }
                MemberEvent::Died(node) => self.node_died(node),
            }
        }
        self.members.next_deadline()
    }

    /// Removes some of what is not current any more.
    pub(crate) fn sweep(&mut self) {
        if self.directory.has_to_sweep() {
            self.directory.sweep(SWEEP_PLACES);
        }
    }

    // ---- the directory -----------------------------------------------------------------------------------------

    pub(crate) fn standing(&mut self, node: NodeId, epoch: Epoch) -> Option<Standing> {
        let standing = self.directory.standing(node, self.epoch(epoch))?;
        let before = self.asked.entry((node, epoch)).or_insert(SlotSet::EMPTY);
        let asked = before.clone();
        *before = before.or(&standing.wanted);
        match self.variant {
            Variant::RegainedSlotsUnasked => {
                Some(Standing { wanted: standing.wanted.without(&asked), ..standing })
            }
            _ => Some(standing),
        }
    }

    pub(crate) fn update(&mut self, batch: &Batch) -> Answer {
        let opening = match &batch.opening {
            outbox::Opening::Nothing => Opening::Nothing,
            outbox::Opening::Slots(slots) => Opening::Slots(slots),
            outbox::Opening::Anew(slots) => Opening::Anew(slots),
        };
        let changes = Changes::parse(&batch.keys, &batch.operations).expect("agents send whole changes");
        let (node, epoch, sequence) = (batch.node, self.epoch(batch.epoch), batch.sequence);
        match self.directory.update(&Update { node, epoch, sequence, opening, changes, ends: &batch.ends }) {
            Updated::Fenced => Answer::Fenced,
            Updated::Expecting { expected, .. } => {
                if let Some(ended) = self.ended.get_mut(&node) {
                    *ended = ended.or(&batch.ends.and(self.directory.owned()));
                }
                Answer::Expecting(expected)
            }
        }
    }

    /// Answers for its own slots, when its place is certain.
    pub(crate) fn lookup(&mut self, now: Tick, keys: &[BlockKey], asking: Option<NodeId>) -> Answered {
        let map_epoch = self.view.map.epoch();
        let follows = self.slots_epoch == map_epoch || self.variant == Variant::AnswersBetweenMaps;
        if self.certain_map(now).is_none() || !follows {
            let elsewhere = (0..keys.len() as u32).collect();
            return Answered { found: vec![Vec::new(); keys.len()], elsewhere, partial: 0, map_epoch };
        }
        self.expire(now);
        let mut found = Found::default();
        self.directory.lookup(keys, &self.members.live(), asking, &mut found);
        let of = |index| {
            found
                .of(index)
                .iter()
                .map(|replica| Replica { node: replica.node, tier: replica.tier, load: replica.load })
                .collect()
        };
        Answered {
            found: (0..keys.len()).map(of).collect(),
            elsewhere: found.elsewhere().to_vec(),
            partial: if self.variant == Variant::NewOwnerWhole { 0 } else { found.partial() as usize },
            map_epoch,
        }
    }

    /// Whether some node that is waited for has not said what it has in a key's slot.
    pub(crate) fn silent_about(&self, key: &BlockKey) -> bool {
        self.ended.values().any(|ended| !ended.has_key(key))
    }

    /// The registration as the directory is told.
    fn epoch(&self, epoch: Epoch) -> Epoch {
        if self.variant == Variant::RegistrationKeepsDirectory { Epoch(1) } else { epoch }
    }
}

/// The machine that an address of a node means.
fn machine_of(record: &NodeRecord) -> usize {
    let number = record.details.peer_address.strip_prefix('n').and_then(|text| text.strip_suffix(":1"));
    number.and_then(|number| number.parse().ok()).expect("agents give their machine as their address")
}
