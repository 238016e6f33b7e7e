//! Simulated engine: its requests, replies and notices.
//!
//! Panics if a reply violates the contract: a slot in use, a region without a grant, a second reply, an extra
//! notice, or progress that goes backwards.

use std::collections::{BTreeMap, BTreeSet};

use reprise_agent_core::effect::{
    Access, ArenaSlot, CommitStatus, LeaseId, LoadId, LoadedBlock, Place, ProgressEntry, ProgressUpdate,
    RegionGrant, RegionId, Reply, Source, Ticket,
};
use reprise_agent_core::event::{RequestId, Scope};
use reprise_policy::{BlockKey, Layout, TenantId, Tick};

use crate::extent_client::ExtentClient;
use crate::memory::Memory;

/// State of an engine's session.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) layout: Layout,
    pub(crate) tenant: TenantId,
    pub(crate) reserved: Vec<(LeaseId, ArenaSlot)>,
    pub(crate) loads: BTreeMap<LoadId, HeldLoad>,
    pub(crate) extents: ExtentClient,
    /// Commits without a notice, with the number of items that the notice must cover.
    pub(crate) tickets: BTreeMap<Ticket, u32>,
    pub(crate) requests_open: BTreeMap<RequestId, RequestKind>,
    /// Replies, newest last, for scenarios to check.
    pub(crate) replies: Vec<(RequestId, Reply)>,
    /// Notices: ticket, durable items, lost keys.
    pub(crate) notices: Vec<(Ticket, u32, Vec<BlockKey>)>,
    readable: BTreeMap<RegionId, u32>,
    writable: BTreeMap<RegionId, u32>,
    page: BTreeMap<ProgressEntry, Page>,
    requests: u64,
}

/// Kind and parameters of a request.
#[derive(Clone, Debug)]
pub(crate) enum RequestKind {
    Reserve(u32),
    Commit(Vec<BlockKey>),
    Match(Vec<BlockKey>, Scope),
    Load { keys: Vec<BlockKey>, answer_by: Tick },
    Release,
    LeaseExtents(u32),
    CommitExtents(Vec<BlockKey>),
    PinExtents(Vec<BlockKey>),
    Other,
}

/// Load that was answered and is not released.
#[derive(Debug)]
pub(crate) struct HeldLoad {
    pub(crate) keys: Vec<BlockKey>,
    pub(crate) blocks: Vec<LoadedBlock>,
    pub(crate) entry: ProgressEntry,
    /// Blocks whose copy failed verification: the engine no longer reads them.
    pub(crate) given_up: BTreeSet<u32>,
}

/// Entry of the progress page.
#[derive(Debug)]
pub(crate) struct Page {
    pub(crate) load: LoadId,
    pub(crate) layers: u32,
    pub(crate) failed: BTreeSet<u32>,
    pub(crate) done: bool,
    /// Whether the maximum hold time has passed: slots of failed blocks may be in use by others.
    pub(crate) over: bool,
}

impl Engine {
    pub(crate) fn new(tenant: TenantId, layout: Layout) -> Engine {
        Engine {
            layout,
            tenant,
            reserved: Vec::new(),
            loads: BTreeMap::new(),
            extents: ExtentClient::default(),
            tickets: BTreeMap::new(),
            requests_open: BTreeMap::new(),
            replies: Vec::new(),
            notices: Vec::new(),
            readable: BTreeMap::new(),
            writable: BTreeMap::new(),
            page: BTreeMap::new(),
            requests: 0,
        }
    }

    /// Records a request and assigns its id.
    pub(crate) fn add_request(&mut self, kind: RequestKind) -> RequestId {
        self.requests += 1;
        let id = RequestId(self.requests);
        self.requests_open.insert(id, kind);
        id
    }

    /// Progress of a load that was answered.
    pub(crate) fn progress(&self, load: LoadId) -> &Page {
        let page = &self.page[&self.loads[&load].entry];
        assert_eq!(page.load, load, "the entry belongs to this load");
        page
    }

    pub(crate) fn on_progress(&mut self, entry: ProgressEntry, update: &ProgressUpdate) {
        if let ProgressUpdate::Begin { load } = *update {
            let held = self.loads.values().any(|load| load.entry == entry);
            assert!(!held, "the entry of a held load was reassigned");
            self.page
                .insert(entry, Page { load, layers: 0, failed: BTreeSet::new(), done: false, over: false });
            return;
        }
        let layers_all = self.layout.layers();
        let page = self.page.get_mut(&entry).expect("updates follow a beginning");
        let ends_holding = matches!(update, ProgressUpdate::BlockFailed { .. } | ProgressUpdate::Done);
        assert!(!page.over && (!page.done || ends_holding), "no update follows the end of a load");
        match *update {
            ProgressUpdate::Begin { .. } => unreachable!("handled above"),
            ProgressUpdate::Layers { layers } => {
                assert!(layers > page.layers && layers <= layers_all, "layers only increase");
                page.layers = layers;
            }
            ProgressUpdate::BlockFailed { block } => {
                assert!(page.failed.insert(block), "a block fails at most once");
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

    pub(crate) fn on_reply(&mut self, request: RequestId, reply: Reply, now: Tick) {
        let kind = self.requests_open.remove(&request).expect("one answer per request");
        match (kind, &reply) {
            (RequestKind::Reserve(count), Reply::Reserved { regions, leases, retry_after }) => {
                self.granted(regions);
                assert!(leases.len() <= count as usize);
                assert_eq!(
                    leases.len() < count as usize,
                    !retry_after.is_zero(),
                    "an incomplete reservation has a retry delay"
                );
                for (lease, place) in leases {
                    let slot = place.arena().expect("a slot of the arena");
                    assert!(self.writable.contains_key(&slot.region), "the region of a slot was granted");
                    assert_eq!(slot.bytes, self.layout.slot_bytes());
                    self.reserved.push((*lease, slot));
                }
            }
            (RequestKind::Commit(keys), Reply::Committed { ticket, statuses }) => {
                assert_eq!(keys.len(), statuses.len());
                let counted = |status: &&CommitStatus| {
                    matches!(status, CommitStatus::Committed | CommitStatus::Duplicate)
                };
                let items = statuses.iter().filter(counted).count() as u32;
                let ticket = ticket.expect("a commit of the arena has a notice");
                assert!(self.tickets.insert(ticket, items).is_none(), "tickets are used once");
            }
            (RequestKind::Match(keys, scope), Reply::Matched { sources }) => {
                assert!(sources.len() <= keys.len());
                let own = |source: &Source| matches!(source, Source::OwnDram | Source::OwnNvme);
                assert!(scope == Scope::Cluster || sources.iter().all(own), "a local match is local");
            }
            (RequestKind::Load { keys, answer_by }, Reply::Loaded { load, entry, regions, blocks }) => {
                assert!(now <= answer_by, "a load is answered by its deadline");
                assert_eq!(keys.len(), blocks.len());
                self.granted(regions);
                for block in blocks {
                    if let LoadedBlock::Ok { place, .. } = block {
                        let slot = place.arena().expect("loads end in the arena");
                        assert!(self.readable.contains_key(&slot.region), "the region of a slot was granted");
                    }
                }
                let page = &self.page[entry];
                assert!(page.load == *load && page.layers > 0, "an answer comes with the first layer");
                let held =
                    HeldLoad { keys, blocks: blocks.clone(), entry: *entry, given_up: BTreeSet::new() };
                assert!(self.loads.insert(*load, held).is_none(), "load ids are unique");
            }
            (RequestKind::LeaseExtents(count), Reply::Reserved { regions, leases, retry_after }) => {
                assert!(regions.is_empty());
                assert_eq!((leases.len() as u32) < count, !retry_after.is_zero());
                self.extents.on_leased(leases);
            }
            (RequestKind::CommitExtents(keys), Reply::Committed { ticket: None, statuses }) => {
                self.extents.on_committed(&keys, statuses);
            }
            (RequestKind::PinExtents(keys), Reply::Pinned { blocks }) => {
                self.extents.on_pinned(&keys, blocks);
            }
            (RequestKind::Release, Reply::Released)
            | (RequestKind::Other, _)
            | (_, Reply::Busy { .. } | Reply::BadRequest(_)) => {}
            (kind, reply) => panic!("{reply:?} is not a reply to {kind:?}"),
        }
        self.replies.push((request, reply));
    }

    pub(crate) fn on_notice(&mut self, ticket: Ticket, durable: u32, lost: Vec<BlockKey>) {
        let items = self.tickets.remove(&ticket).expect("one notice per ticket, after its reply");
        assert_eq!(items, durable + lost.len() as u32, "a notice accounts for every item");
        self.notices.push((ticket, durable, lost));
    }

    /// Reads everything that the engine may read; passes each key and content to `read`.
    pub(crate) fn read_all(&self, memory: &Memory, mut read: impl FnMut(&BlockKey, u64)) {
        for (id, load) in &self.loads {
            let page = self.progress(*id);
            for (at, block) in (0..).zip(&load.blocks) {
                let LoadedBlock::Ok { place: Place::Arena(slot), checksums, .. } = block else { continue };
                if page.failed.contains(&at) || load.given_up.contains(&at) {
                    continue;
                }
                let key = &load.keys[at as usize];
                let tag = memory.verify(*slot, &self.layout, checksums, page.layers);
                read(
                    key,
                    tag.unwrap_or_else(|| {
                        panic!("{key}: {:?} is not the committed content", memory.layers(*slot))
                    }),
                );
            }
        }
    }

    /// Stops reading a block whose copy failed verification.
    pub(crate) fn ignore_block(&mut self, load: LoadId, block: u32) {
        self.loads.get_mut(&load).expect("a held load").given_up.insert(block);
    }

    /// Slots that the engine may read or write.
    pub(crate) fn slots(&self) -> impl Iterator<Item = ArenaSlot> {
        let held = self.loads.iter().filter(|(id, _)| !self.progress(**id).over);
        let loaded = held.flat_map(|(_, load)| &load.blocks).filter_map(|block| match block {
            LoadedBlock::Ok { place, .. } => place.arena(),
            LoadedBlock::Lost(_) => None,
        });
        self.reserved.iter().map(|(_, slot)| *slot).chain(loaded)
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
