//! The control plane's one member: its memory dies with it, numbers and epochs of nodes are in a store that does not.
//!
//! What the services of the binary do around the cores (`controlplane/src/{cluster,directory,registry}.rs`) is done here
//! in the same order: a registration goes to the store, then to the directory, then to the members; every lookup expires
//! members first. The binary's locks, parts and streams are not here.

use std::collections::BTreeMap;

use reprise_agent_core::event::Replica;
use reprise_agent_core::outbox::{self, Answer, Batch};
use reprise_controlplane_core::{
    Beat, Changes, Directory, Found, MemberEvent, MemberSettings, Members, NodeDetails, NodeRecord, Opening,
    Standing, Update, Updated,
};
use reprise_policy::{BlockKey, Epoch, NodeId, SlotSet, Tick};

use crate::setup::{DEAD_AFTER, FORGET_AFTER, Variant};

/// Places of the directory's tables that one sweep looks at.
const SWEEP_PLACES: usize = 1 << 12;

/// What survives the member.
#[derive(Debug, Default)]
pub(crate) struct Store {
    records: BTreeMap<usize, NodeRecord>,
}

/// A running member.
#[derive(Debug)]
pub(crate) struct Member {
    members: Members,
    pub(crate) directory: Directory,
    /// Slots that registrations have been asked for.
    asked: BTreeMap<(NodeId, Epoch), SlotSet>,
    variant: Variant,
}

impl Store {
    /// Gives a node its number (the same as ever for its name) and a higher epoch than ever.
    pub(crate) fn register(&mut self, name: usize) -> NodeRecord {
        let number = u16::try_from(self.records.len() + 1).expect("few nodes");
        let details = NodeDetails { peer_address: format!("n{name}:1"), ..NodeDetails::default() };
        let record = self.records.entry(name).or_insert_with(|| NodeRecord {
            node: NodeId(number),
            name: format!("n{name}"),
            epoch: Epoch(0),
            details,
        });
        record.epoch = Epoch(record.epoch.0 + 1);
        record.clone()
    }

    /// Number of a node's name, if it was ever registered.
    pub(crate) fn node_of(&self, name: usize) -> Option<NodeId> {
        self.records.get(&name).map(|record| record.node)
    }

    /// The name that has a number.
    pub(crate) fn name_of(&self, node: NodeId) -> Option<usize> {
        self.records.iter().find(|(_, record)| record.node == node).map(|(name, _)| *name)
    }
}

impl Member {
    /// A member that has just started.
    pub(crate) fn start(store: &Store, variant: Variant) -> Member {
        let settings = MemberSettings { dead_after: DEAD_AFTER, forget_after: FORGET_AFTER };
        let mut members = Members::new(settings);
        store.records.values().for_each(|record| members.restore(record.clone()));
        let mut directory = Directory::new();
        directory.own(&SlotSet::ALL);
        Member { members, directory, asked: BTreeMap::new(), variant }
    }

    /// A registration is in the store.
    pub(crate) fn registered(&mut self, now: Tick, record: NodeRecord) {
        self.directory.register(record.node, self.epoch(record.epoch));
        // A registration that was overtaken by a newer one changes nothing.
        let _ = self.members.register(now, record);
    }

    pub(crate) fn beat(&mut self, now: Tick, node: NodeId, epoch: Epoch) -> bool {
        self.members.beat(now, node, epoch) != Beat::Unknown
    }

    /// Others own some slots from now on, or no more.
    pub(crate) fn own(&mut self, slots: &SlotSet) {
        self.directory.own(slots);
    }

    pub(crate) fn standing(&mut self, node: NodeId, epoch: Epoch) -> Option<Standing> {
        let standing = self.directory.standing(node, self.epoch(epoch))?;
        let before = self.asked.entry((node, epoch)).or_default();
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
            Updated::Expecting { expected, .. } => Answer::Expecting(expected),
        }
    }

    pub(crate) fn lookup(
        &mut self,
        now: Tick,
        keys: &[BlockKey],
        asking: Option<NodeId>,
    ) -> Vec<Vec<Replica>> {
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
        (0..keys.len()).map(of).collect()
    }

    /// Finds nodes that have been silent too long; sweeps. Returns when to come again.
    pub(crate) fn expire(&mut self, now: Tick) -> Option<Tick> {
        if self.variant == Variant::DeadNodesOffered {
            return None;
        }
        for event in self.members.expire(now) {
            if let MemberEvent::Forgotten(node, epoch) = event {
                self.directory.forget(node, self.epoch(epoch));
            }
        }
        self.directory.sweep(SWEEP_PLACES);
        self.members.next_deadline()
    }

    /// The registration as the directory is told.
    fn epoch(&self, epoch: Epoch) -> Epoch {
        if self.variant == Variant::RegistrationKeepsDirectory { Epoch(1) } else { epoch }
    }
}
