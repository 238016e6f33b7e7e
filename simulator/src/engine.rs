//! An engine as its agent's session sees it: what it asked for, what it was given, what it was told.
//!
//! Panics when an answer breaks the contract: a region that was not granted, a second answer, a late one, a notice too
//! many, progress that goes back, bytes that nobody has committed under the key.

use std::collections::{BTreeMap, BTreeSet};

use reprise_agent_core::effect::{
    Access, ArenaSlot, CommitStatus, LeaseId, LoadId, LoadedBlock, ProgressEntry, ProgressUpdate, RegionId,
    Reply, Source, Ticket,
};
use reprise_agent_core::event::{RequestId, Scope};
use reprise_policy::{BlockKey, Layout, TenantId, Tick};

use crate::memory::{Memory, Tag, is_damaged, verified};
use crate::setup::tenant_of;

/// See the module.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) tenant: TenantId,
    pub(crate) layout: Layout,
    /// Reserved slots, and since when.
    pub(crate) reserved: Vec<(LeaseId, ArenaSlot, Tick)>,
    pub(crate) loads: BTreeMap<LoadId, HeldLoad>,
    /// Commits whose notice has not come: the keys that it must account for.
    pub(crate) tickets: BTreeMap<Ticket, Vec<BlockKey>>,
    asked: BTreeMap<RequestId, Question>,
    /// The last message to the agent arrives then: the socket keeps their order.
    pub(crate) last_sent: Tick,
    readable: BTreeSet<RegionId>,
    writable: BTreeSet<RegionId>,
    page: BTreeMap<ProgressEntry, Page>,
    requests: u64,
}

/// What a request was.
#[derive(Clone, Debug)]
pub(crate) enum Asked {
    Reserve(u32),
    Commit(Vec<BlockKey>),
    Match(Vec<BlockKey>, Scope),
    Load(Vec<BlockKey>),
    Release,
    Other,
}

#[derive(Debug)]
struct Question {
    asked: Asked,
    /// Places of keys whose blocks are readable on the node: they must be found whatever else is away.
    held: Vec<usize>,
    /// The agent must answer by then; known when it has the request.
    answer_by: Option<Tick>,
}

/// A load that was answered and is not released.
#[derive(Debug)]
pub(crate) struct HeldLoad {
    pub(crate) keys: Vec<BlockKey>,
    pub(crate) since: Tick,
    blocks: Vec<LoadedBlock>,
    entry: ProgressEntry,
    /// Blocks whose copy did not match: the engine looks at them no more.
    given_up: BTreeSet<u32>,
}

/// One entry of the progress page.
#[derive(Debug)]
struct Page {
    load: LoadId,
    layers: u32,
    failed: BTreeSet<u32>,
    done: bool,
    /// It was held too long: what has failed may be anybody's.
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
            asked: BTreeMap::new(),
            last_sent: Tick(0),
            readable: BTreeSet::new(),
            writable: BTreeSet::new(),
            page: BTreeMap::new(),
            requests: 0,
        }
    }

    /// Notes a request and gives it an id.
    pub(crate) fn ask(&mut self, asked: Asked) -> RequestId {
        self.requests += 1;
        let id = RequestId(self.requests);
        self.asked.insert(id, Question { asked, held: Vec::new(), answer_by: None });
        id
    }

    /// The agent has a request and must answer by then; it has the blocks of the keys at these places.
    pub(crate) fn received(&mut self, request: RequestId, answer_by: Tick, held: Vec<usize>) {
        let question = self.asked.get_mut(&request).expect("requests come once");
        (question.answer_by, question.held) = (Some(answer_by), held);
    }

    /// A question that should have been answered before now.
    pub(crate) fn overdue(&self, now: Tick) -> Option<String> {
        let late = |question: &&Question| question.answer_by.is_some_and(|answer_by| answer_by < now);
        self.asked.values().find(late).map(|question| format!("{:?}", question.asked))
    }

    /// What is still open when everything should have come to its end.
    pub(crate) fn unfinished(&self) -> Option<String> {
        if let Some(question) = self.asked.values().next() {
            return Some(format!("unanswered: {:?}", question.asked));
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

    /// Whether the layers of a load are all there or failed.
    pub(crate) fn is_done(&self, load: LoadId) -> bool {
        self.progress(load).done
    }

    pub(crate) fn on_progress(&mut self, entry: ProgressEntry, update: &ProgressUpdate) {
        if let ProgressUpdate::Begin { load } = *update {
            let held = self.loads.values().any(|load| load.entry == entry);
            assert!(!held, "an entry of a held load was given to another");
            let page = Page { load, layers: 0, failed: BTreeSet::new(), done: false, over: false };
            self.page.insert(entry, page);
            return;
        }
        let layers_all = self.layout.layers();
        let page = self.page.get_mut(&entry).expect("updates follow a beginning");
        let ends_holding = matches!(update, ProgressUpdate::BlockFailed { .. } | ProgressUpdate::Done);
        assert!(!page.done || ends_holding, "after the end only the end of the holding comes");
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
                assert_eq!(page.layers, layers_all, "at the end, all layers of what did not fail are ready");
                page.over = page.done;
                page.done = true;
            }
        }
    }

    /// An answer; one that comes after its time is excused until an instant at which the agent could not yet run.
    pub(crate) fn on_reply(&mut self, request: RequestId, reply: &Reply, now: Tick, excused: Tick) {
        let Question { asked, held, answer_by } =
            self.asked.remove(&request).expect("one answer per request");
        let answer_by = answer_by.expect("answers follow requests").max(excused);
        assert!(now <= answer_by, "{asked:?} was answered at {now:?}, due by {answer_by:?}");
        match (asked, reply) {
            (Asked::Reserve(count), Reply::Reserved { regions, leases, .. }) => {
                self.granted(regions);
                assert!(leases.len() <= count as usize);
                for (lease, slot) in leases {
                    assert!(self.writable.contains(&slot.region), "the region of a slot is granted before");
                    assert_eq!(slot.bytes, self.layout.slot_bytes());
                    self.reserved.push((*lease, *slot, now));
                }
            }
            (Asked::Commit(keys), Reply::Committed { ticket, statuses }) => {
                assert_eq!(keys.len(), statuses.len());
                let counted = |(_, status): &(BlockKey, &CommitStatus)| {
                    matches!(status, CommitStatus::Committed | CommitStatus::Duplicate)
                };
                let keys = keys.into_iter().zip(statuses).filter(counted).map(|(key, _)| key).collect();
                assert!(self.tickets.insert(*ticket, keys).is_none(), "tickets are used once");
            }
            (Asked::Match(keys, scope), Reply::Matched { sources }) => {
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
            (Asked::Load(keys), Reply::Loaded { load, entry, regions, blocks }) => {
                assert_eq!(keys.len(), blocks.len());
                self.granted(regions);
                let lost = held.iter().find(|place| matches!(blocks[**place], LoadedBlock::Lost(_)));
                assert!(
                    lost.is_none(),
                    "a block in DRAM is lost: {:?}",
                    lost.map(|place| blocks[*place].clone())
                );
                let mut seen = keys.iter().zip(blocks);
                let foreign = seen.find(|(key, block)| {
                    tenant_of(key) != self.tenant && matches!(block, LoadedBlock::Ok { .. })
                });
                assert!(foreign.is_none(), "{:?} is given {foreign:?} of another tenant", self.tenant);
                let page = &self.page[entry];
                assert!(page.load == *load && page.layers > 0, "an answer comes with the first layer");
                let (blocks, entry, given_up) = (blocks.clone(), *entry, BTreeSet::new());
                let held = HeldLoad { keys, since: now, blocks, entry, given_up };
                assert!(self.loads.insert(*load, held).is_none(), "loads have ids of their own");
            }
            (Asked::Release, Reply::Released)
            | (Asked::Other, _)
            | (_, Reply::Busy { .. } | Reply::BadRequest(_)) => {}
            (asked, reply) => panic!("{reply:?} is no answer to {asked:?}"),
        }
    }

    /// A ticket has come to its end; returns the keys that are durable.
    pub(crate) fn on_notice(&mut self, ticket: Ticket, durable: u32, lost: &[BlockKey]) -> Vec<BlockKey> {
        let mut keys = self.tickets.remove(&ticket).expect("one notice per ticket, after its reply");
        assert_eq!(keys.len(), durable as usize + lost.len(), "a notice accounts for every item");
        keys.retain(|key| !lost.contains(key));
        keys
    }

    /// Reads everything that the engine may read and calls back with key and content. Returns what did not match because
    /// memory was damaged: loads and their blocks, at which it will not look again.
    pub(crate) fn read_all(
        &mut self,
        memory: &Memory,
        mut read: impl FnMut(&BlockKey, Tag),
    ) -> Vec<(LoadId, u32)> {
        let mut suspects = Vec::new();
        for (id, load) in &mut self.loads {
            let page = &self.page[&load.entry];
            for (at, block) in (0..).zip(&load.blocks) {
                let LoadedBlock::Ok { slot, checksums, .. } = block else { continue };
                if page.failed.contains(&at) || load.given_up.contains(&at) {
                    continue;
                }
                assert!(self.readable.contains(&slot.region), "the region of a slot is granted before");
                let key = &load.keys[at as usize];
                let layers = memory.layers(*slot).get(..page.layers as usize).unwrap_or_default();
                match verified(layers, 0, &self.layout, checksums) {
                    Some(tag) => read(key, tag),
                    None if is_damaged(layers) => {
                        load.given_up.insert(at);
                        suspects.push((*id, at));
                    }
                    None => panic!("{key}: {layers:?} is not what was committed"),
                }
            }
        }
        suspects
    }

    /// Slots that the engine may write or read.
    pub(crate) fn slots(&self) -> impl Iterator<Item = ArenaSlot> {
        let held = self.loads.iter().filter(|(id, _)| !self.progress(**id).over);
        let loaded = held.flat_map(|(_, load)| &load.blocks).filter_map(|block| match block {
            LoadedBlock::Ok { slot, .. } => Some(*slot),
            LoadedBlock::Lost(_) => None,
        });
        self.reserved.iter().map(|(_, slot, _)| *slot).chain(loaded)
    }

    fn granted(&mut self, regions: &[(RegionId, Access)]) {
        for (region, access) in regions {
            let set = match access {
                Access::ReadOnly => &mut self.readable,
                Access::ReadWrite => &mut self.writable,
            };
            assert!(set.insert(*region), "a region is granted once per access");
        }
    }
}
