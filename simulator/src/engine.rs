//! An engine, as seen by its agent's session: requests, answers, notices, progress.
//!
//! Panics when an answer breaks the contract. Examples: a region that was not granted, a second or late
//! answer, an extra notice, decreasing progress, bytes that were never committed under the key.

use std::collections::{BTreeMap, BTreeSet};

use reprise_agent_core::effect::{
    Access, ArenaSlot, CommitStatus, LeaseId, LoadId, LoadedBlock, Place, ProgressEntry, ProgressUpdate,
    RegionGrant, RegionId, Reply, Source, Ticket,
};
use reprise_agent_core::event::{RequestId, Scope};
use reprise_agent_core::extents::PinnedBlock;
use reprise_policy::{BlockKey, Layout, TenantId, Tick};

use crate::memory::{Memory, Tag, is_damaged, verified};
use crate::setup::tenant_of;

/// State of an engine's session; see the module.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) tenant: TenantId,
    pub(crate) layout: Layout,
    /// Reserved slots, and the time of the reservation.
    pub(crate) reserved: Vec<(LeaseId, ArenaSlot, Tick)>,
    pub(crate) loads: BTreeMap<LoadId, OpenLoad>,
    /// Commits without a notice: the keys that the notice must account for.
    pub(crate) tickets: BTreeMap<Ticket, Vec<BlockKey>>,
    pending: BTreeMap<RequestId, PendingRequest>,
    /// Arrival of the last message to the agent: the socket preserves the order.
    pub(crate) last_sent: Tick,
    readable: BTreeMap<RegionId, u32>,
    writable: BTreeMap<RegionId, u32>,
    page: BTreeMap<ProgressEntry, Page>,
    requests: u64,
}

/// Kind of a request.
#[derive(Clone, Debug)]
pub(crate) enum RequestKind {
    Reserve(u32),
    Commit(Vec<BlockKey>),
    Match(Vec<BlockKey>, Scope),
    Load(Vec<BlockKey>),
    Release,
    LeaseExtents(u32),
    CommitExtents(Vec<BlockKey>),
    Pin(Vec<BlockKey>),
    Other,
}

/// Answer that the holder of extents handles.
#[derive(Debug)]
pub(crate) enum ExtentAnswer {
    Leased(Vec<(LeaseId, Place)>),
    Pinned(Vec<(BlockKey, PinnedBlock)>),
    /// Committed blocks that are durable.
    Durable(Vec<BlockKey>),
}

#[derive(Debug)]
struct PendingRequest {
    kind: RequestKind,
    /// Indices of keys whose blocks are readable on the node: the request must find them, even without other
    /// nodes.
    held: Vec<usize>,
    /// Deadline of the agent's answer; known once the agent has the request.
    answer_by: Option<Tick>,
}

/// A load that was answered and not released.
#[derive(Debug)]
pub(crate) struct OpenLoad {
    pub(crate) keys: Vec<BlockKey>,
    pub(crate) since: Tick,
    blocks: Vec<LoadedBlock>,
    entry: ProgressEntry,
    /// Blocks whose copy did not match: the engine no longer reads them.
    given_up: BTreeSet<u32>,
}

/// One entry of the progress page.
#[derive(Debug)]
struct Page {
    load: LoadId,
    layers: u32,
    failed: BTreeSet<u32>,
    done: bool,
    /// The load was held too long: the memory of failed blocks may have been reused.
    over: bool,
}

impl Engine {
    pub(crate) fn new(tenant: TenantId, layout: Layout) -> Engine {
        Engine {
            tenant,
            layout,
            reserved: Vec::new(),
            loads: BTreeMap::new(),
            tickets: BTreeMap::new(),
            pending: BTreeMap::new(),
            last_sent: Tick(0),
            readable: BTreeMap::new(),
            writable: BTreeMap::new(),
            page: BTreeMap::new(),
            requests: 0,
        }
    }

    /// Records a request and assigns its id.
    pub(crate) fn ask(&mut self, kind: RequestKind) -> RequestId {
        self.requests += 1;
        let id = RequestId(self.requests);
        self.pending.insert(id, PendingRequest { kind, held: Vec::new(), answer_by: None });
        id
    }

    /// Records that the agent has a request, the deadline of its answer, and the indices of keys with blocks
    /// on the node.
    pub(crate) fn received(&mut self, request: RequestId, answer_by: Tick, held: Vec<usize>) {
        let pending = self.pending.get_mut(&request).expect("requests come once");
        (pending.answer_by, pending.held) = (Some(answer_by), held);
    }

    /// Returns a request that should have been answered before now.
    pub(crate) fn overdue(&self, now: Tick) -> Option<String> {
        let late = |pending: &&PendingRequest| pending.answer_by.is_some_and(|answer_by| answer_by < now);
        self.pending.values().find(late).map(|pending| format!("{:?}", pending.kind))
    }

    /// Returns an operation that is still open although all must have ended.
    pub(crate) fn unfinished(&self) -> Option<String> {
        if let Some(pending) = self.pending.values().next() {
            return Some(format!("unanswered: {:?}", pending.kind));
        }
        if let Some((ticket, keys)) = self.tickets.iter().next() {
            return Some(format!("without a notice: {ticket:?} of {keys:?}"));
        }
        self.loads
            .keys()
            .find(|load| !self.progress(**load).done)
            .map(|load| format!("without an end: {load:?}"))
    }

    fn progress(&self, load: LoadId) -> &Page {
        let page = &self.page[&self.loads[&load].entry];
        assert_eq!(page.load, load, "a held load's entry is its own");
        page
    }

    /// Returns the load of an entry of the progress page.
    pub(crate) fn load_at(&self, entry: ProgressEntry) -> Option<LoadId> {
        self.page.get(&entry).map(|page| page.load)
    }

    /// Returns the source of each block of a load; `None` if the block was not loaded.
    pub(crate) fn loaded(&self, load: LoadId) -> Vec<Option<Source>> {
        let (blocks, page) = (&self.loads[&load].blocks, self.progress(load));
        let source = |(at, block): (u32, &LoadedBlock)| match block {
            LoadedBlock::Ok { source, .. } if !page.failed.contains(&at) => Some(*source),
            LoadedBlock::Ok { .. } | LoadedBlock::Lost(_) => None,
        };
        (0..).zip(blocks).map(source).collect()
    }

    /// Takes the slot of a reservation.
    pub(crate) fn take_reserved(&mut self, lease: LeaseId) -> ArenaSlot {
        let at = self.reserved.iter().position(|(other, ..)| *other == lease);
        self.reserved.remove(at.expect("the lease is reserved")).1
    }

    /// Reports whether all layers of a load are ready or failed.
    pub(crate) fn is_done(&self, load: LoadId) -> bool {
        self.progress(load).done
    }

    pub(crate) fn on_progress(&mut self, entry: ProgressEntry, update: &ProgressUpdate) {
        if let ProgressUpdate::Begin { load } = *update {
            let held = self.loads.values().any(|load| load.entry == entry);
            assert!(!held, "an entry of an open load was reused");
            let page = Page { load, layers: 0, failed: BTreeSet::new(), done: false, over: false };
            self.page.insert(entry, page);
            return;
        }
        let layers_all = self.layout.layers();
        let page = self.page.get_mut(&entry).expect("updates follow a begin");
        let ends_holding = matches!(update, ProgressUpdate::BlockFailed { .. } | ProgressUpdate::Done);
        assert!(!page.done || ends_holding, "after the end only the release follows");
        match *update {
            ProgressUpdate::Begin { .. } => unreachable!("handled above"),
            ProgressUpdate::Layers { layers } => {
                assert!(layers > page.layers && layers <= layers_all, "layers only grow");
                page.layers = layers;
            }
            ProgressUpdate::BlockFailed { block } => {
                assert!(page.failed.insert(block), "a block fails once");
            }
            ProgressUpdate::Done => {
                assert_eq!(
                    page.layers, layers_all,
                    "at the end, all layers of blocks that did not fail are ready"
                );
                page.over = page.done;
                page.done = true;
            }
        }
    }

    /// Handles an answer; returns one about extents. An answer after its deadline is excused until an instant at
    /// which the agent could not run yet.
    pub(crate) fn on_reply(
        &mut self,
        request: RequestId,
        reply: &Reply,
        now: Tick,
        excused: Tick,
    ) -> Option<ExtentAnswer> {
        let (kind, held) = self.answered(request, now, excused);
        match (kind, reply) {
            (RequestKind::Reserve(count), Reply::Reserved { regions, leases, .. }) => {
                self.granted(regions);
                assert!(leases.len() <= count as usize);
                for (lease, place) in leases {
                    let slot = place.arena().expect("engines reserve slots of the arena");
                    assert!(
                        self.writable.contains_key(&slot.region),
                        "the region of a slot is granted before"
                    );
                    assert_eq!(slot.bytes, self.layout.slot_bytes());
                    self.reserved.push((*lease, slot, now));
                }
            }
            (RequestKind::Commit(keys), Reply::Committed { ticket, statuses }) => {
                assert_eq!(keys.len(), statuses.len());
                let ticket = ticket.expect("a commit of the arena has a notice");
                let counted = |(_, status): &(BlockKey, &CommitStatus)| {
                    matches!(status, CommitStatus::Committed | CommitStatus::Duplicate)
                };
                let keys = keys.into_iter().zip(statuses).filter(counted).map(|(key, _)| key).collect();
                assert!(self.tickets.insert(ticket, keys).is_none(), "tickets are used once");
            }
            (RequestKind::Match(keys, scope), Reply::Matched { sources }) => {
                assert!(sources.len() <= keys.len());
                let own = |source: &Source| matches!(source, Source::OwnDram | Source::OwnNvme);
                assert!(scope == Scope::Cluster || sources.iter().all(own), "a local match is local");
                let run = held.iter().enumerate().take_while(|(at, place)| at == *place).count();
                assert!(
                    sources.len() >= run,
                    "{run} blocks are on the node and {} are matched",
                    sources.len()
                );
                let mut seen = keys.iter().zip(sources);
                let foreign = seen.find(|(key, source)| own(source) && tenant_of(key) != self.tenant);
                assert!(foreign.is_none(), "{:?} sees {foreign:?} of another tenant", self.tenant);
            }
            (RequestKind::Load(keys), Reply::Loaded { load, entry, regions, blocks }) => {
                assert_eq!(keys.len(), blocks.len());
                self.granted(regions);
                let lost = held.iter().find(|place| matches!(blocks[**place], LoadedBlock::Lost(_)));
                assert!(
                    lost.is_none(),
                    "a block in DRAM was not loaded: {:?}",
                    lost.map(|place| blocks[*place].clone())
                );
                let mut seen = keys.iter().zip(blocks);
                let foreign = seen.find(|(key, block)| {
                    tenant_of(key) != self.tenant && matches!(block, LoadedBlock::Ok { .. })
                });
                assert!(foreign.is_none(), "{:?} gets {foreign:?} of another tenant", self.tenant);
                let page = &self.page[entry];
                assert!(page.load == *load && page.layers > 0, "an answer comes with the first layer");
                let (blocks, entry, given_up) = (blocks.clone(), *entry, BTreeSet::new());
                let held = OpenLoad { keys, since: now, blocks, entry, given_up };
                assert!(self.loads.insert(*load, held).is_none(), "load ids are unique");
            }
            (RequestKind::Release, Reply::Released)
            | (RequestKind::Other, _)
            | (_, Reply::Busy { .. } | Reply::BadRequest(_)) => {}
            (kind, reply) => return Some(self.extent_answer(kind, reply)),
        }
        None
    }

    /// Ends a request, whose answer must be in time. Returns its kind, and the indices of keys with blocks on the node.
    fn answered(&mut self, request: RequestId, now: Tick, excused: Tick) -> (RequestKind, Vec<usize>) {
        let PendingRequest { kind, held, answer_by } =
            self.pending.remove(&request).expect("one answer per request");
        let answer_by = answer_by.expect("answers follow requests").max(excused);
        assert!(now <= answer_by, "{kind:?} was answered at {now:?}, due by {answer_by:?}");
        (kind, held)
    }

    /// Checks an answer about extents.
    fn extent_answer(&self, kind: RequestKind, reply: &Reply) -> ExtentAnswer {
        match (kind, reply) {
            (RequestKind::LeaseExtents(count), Reply::Reserved { leases, .. }) => {
                assert!(leases.len() <= count as usize);
                ExtentAnswer::Leased(leases.clone())
            }
            (RequestKind::CommitExtents(keys), Reply::Committed { ticket, statuses }) => {
                assert_eq!((keys.len(), *ticket), (statuses.len(), None), "the statuses are final");
                assert!(!statuses.contains(&CommitStatus::NoLease), "the lease of a commit has ended");
                let durable = |(_, status): &(BlockKey, &CommitStatus)| **status == CommitStatus::Durable;
                let durable = keys.into_iter().zip(statuses).filter(durable).map(|(key, _)| key);
                ExtentAnswer::Durable(durable.collect())
            }
            (RequestKind::Pin(keys), Reply::Pinned { blocks }) => {
                assert_eq!(keys.len(), blocks.len());
                let mut seen = keys.iter().zip(blocks);
                let foreign =
                    seen.find(|(key, block)| tenant_of(key) != self.tenant && block.pin().is_some());
                assert!(foreign.is_none(), "{:?} pins {foreign:?} of another tenant", self.tenant);
                ExtentAnswer::Pinned(keys.into_iter().zip(blocks.iter().copied()).collect())
            }
            (kind, reply) => panic!("unexpected answer to {kind:?}: {reply:?}"),
        }
    }

    /// Handles the notice for a ticket; returns the keys that are durable.
    pub(crate) fn on_notice(&mut self, ticket: Ticket, durable: u32, lost: &[BlockKey]) -> Vec<BlockKey> {
        let mut keys = self.tickets.remove(&ticket).expect("one notice per ticket, after its reply");
        assert_eq!(keys.len(), durable as usize + lost.len(), "a notice accounts for every item");
        keys.retain(|key| !lost.contains(key));
        keys
    }

    /// Reads all readable blocks and calls back with key and content. Returns loads and their blocks that did
    /// not match because memory was damaged; the engine does not read these again.
    pub(crate) fn read_all(
        &mut self,
        memory: &Memory,
        mut read: impl FnMut(&BlockKey, Tag),
    ) -> Vec<(LoadId, u32)> {
        let mut suspects = Vec::new();
        for (id, load) in &mut self.loads {
            let page = &self.page[&load.entry];
            for (at, block) in (0..).zip(&load.blocks) {
                let LoadedBlock::Ok { place: Place::Arena(slot), checksums, .. } = block else { continue };
                if page.failed.contains(&at) || load.given_up.contains(&at) {
                    continue;
                }
                assert!(self.readable.contains_key(&slot.region), "the region of a slot is granted before");
                let key = &load.keys[at as usize];
                let layers = memory.layers(*slot).get(..page.layers as usize).unwrap_or_default();
                match verified(layers, 0, &self.layout, checksums) {
                    Some(tag) => read(key, tag),
                    None if is_damaged(layers) => {
                        load.given_up.insert(at);
                        suspects.push((*id, at));
                    }
                    None => panic!("{key}: {layers:?} is not the committed content"),
                }
            }
        }
        suspects
    }

    /// Returns the slots that the engine may write or read.
    pub(crate) fn slots(&self) -> impl Iterator<Item = ArenaSlot> {
        let held = self.loads.iter().filter(|(id, _)| !self.progress(**id).over);
        let loaded = held.flat_map(|(_, load)| &load.blocks).filter_map(|block| match block {
            LoadedBlock::Ok { place, .. } => place.arena(),
            LoadedBlock::Lost(_) => None,
        });
        self.reserved.iter().map(|(_, slot, _)| *slot).chain(loaded)
    }

    fn granted(&mut self, regions: &[RegionGrant]) {
        for RegionGrant { region, generation, access } in regions {
            let known = match access {
                Access::ReadOnly => &mut self.readable,
                Access::ReadWrite => &mut self.writable,
            };
            let earlier = known.insert(*region, *generation);
            assert!(earlier.is_none_or(|earlier| earlier < *generation), "memory is granted once per access");
        }
    }
}
