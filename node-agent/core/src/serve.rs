//! Serves: blocks that this node sends to peers on request.
//!
//! Blocks in DRAM are sent at once: first all headers, then objects in rounds over the blocks. Each round
//! sends some layers of every block, so that the peer's engine can start early with layer 0. Blocks on a
//! device are read into the arena and sent as their layers are verified. A block is leased from the moment
//! its frame is known until the transport reports that it was sent.
//!
//! Serves must not displace this node's engines: frames leased to serves are at most a share of the arena
//! ([`Settings::arena_serves_permille`](crate::Settings)), and of several tenants at most twice the share. Further blocks
//! wait until earlier ones end; waiting requests of a tenant take turns, and tenants get shares by their weights. One
//! block may always start, so every request completes.
//!
//! A serve neither asks other peers nor waits for a fetch from one. Otherwise two agents could wait for each
//! other's fetches forever.
//!
//! Files call only files before them in this order: `leased`, `send`, `table`, then this one.

use std::collections::BTreeMap;
use std::ops::Range;

use reprise_policy::eviction::EntryIndex;
use reprise_policy::fair_queue::FairQueue;
use reprise_policy::{BlockKey, TenantId, Tick};

use crate::cache::{Cache, LocalBlock, LocalCopy};
use crate::context::Context;
use crate::counters::{Counters, ServeCounters};
use crate::effect::{ReadClass, ServeId};
use crate::event::PeerRequest;
use crate::limits::{SERVE_BLOCKS_MAX, SERVES_MAX};
use crate::serve::leased::{Leased, Space};
use crate::serve::table::{Header, Serve, ServeBlock, waiter};
use crate::settings::Settings;
use crate::timers::Timers;
use crate::waiter::{Advanced, Attached, FillRequest, Joins, WaitId, WaiterId, WaiterOwner};

mod audit;
mod leased;
mod send;
mod table;

/// All requests of peers, and the arena space that they use.
#[derive(Debug)]
pub(crate) struct Serves {
    serves: BTreeMap<ServeId, Serve>,
    leased: Leased,
    /// Requests with blocks that were not started, by tenant.
    waiting: FairQueue<TenantId, ServeId>,
    timers: Timers<ServeId>,
    outcomes: Vec<ServeOutcome>,
    counters: ServeCounters,
}

/// Consequence of a serve for another owner.
#[derive(Debug)]
pub(crate) enum ServeOutcome {
    /// Peers read these stored blocks.
    Read { entries: Vec<EntryIndex> },
    /// Start or join the reads of blocks.
    Fetch(FillRequest),
    /// A block no longer waits.
    Detach { wait: WaitId, waiter: WaiterId },
}

impl Serves {
    /// Creates the owner, without requests.
    pub(crate) fn new(settings: &Settings) -> Serves {
        Serves {
            serves: BTreeMap::new(),
            leased: Leased::new(settings.bandwidth.clone()),
            waiting: FairQueue::new(settings.bandwidth.clone()),
            timers: Timers::default(),
            outcomes: Vec::new(),
            counters: ServeCounters::default(),
        }
    }

    /// Whether there is anything to route.
    pub(crate) fn has_outcomes(&self) -> bool {
        !self.outcomes.is_empty()
    }

    /// Returns the consequences since the last call, in order.
    pub(crate) fn take_outcomes(&mut self) -> Vec<ServeOutcome> {
        std::mem::take(&mut self.outcomes)
    }

    /// Time of the first deadline.
    pub(crate) fn first_due(&self) -> Option<Tick> {
        self.timers.next()
    }

    /// Handles the first deadline, if it is due.
    pub(crate) fn fire_timer(&mut self, cache: &mut Cache, cx: &mut Context) {
        if let Some(serve) = self.timers.pop_due(cx.now) {
            self.expire(cache, cx, serve);
        }
    }

    /// Slot bytes of the blocks that have not ended.
    pub(crate) fn open_bytes(&self) -> u64 {
        self.serves.values().map(Serve::open_bytes).sum()
    }

    /// Sets the counters and gauges of serves.
    pub(crate) fn set_counters(&self, all: &mut Counters) {
        self.counters.copy_to(all);
        all.serves_in_flight = self.serves.len() as u64;
    }

    /// Handles a request of a peer. Its blocks start with [`Serves::begin_next`].
    pub(crate) fn begin(&mut self, cx: &mut Context, request: PeerRequest) {
        let id = request.serve;
        self.counters.serves += 1;
        let count = request.keys.len();
        let is_rejected =
            self.is_full(request.tenant) || count > SERVE_BLOCKS_MAX || self.serves.contains_key(&id);
        if is_rejected {
            (0..count as u32).for_each(|block| self.send_absent(cx, id, block));
            return;
        }
        if count == 0 {
            return;
        }
        let expires = cx.now.after(request.deadline);
        self.waiting.push(&request.tenant, id);
        self.serves.insert(id, Serve::new(request, expires));
        self.timers.set(expires, id);
    }

    /// Whether a tenant may not begin a request: at [`SERVES_MAX`] only tenants with more than half of them, and all
    /// tenants at twice the number.
    fn is_full(&self, tenant: TenantId) -> bool {
        let of_tenant = || self.serves.values().filter(|serve| serve.tenant == tenant).count();
        self.serves.len() >= 2 * SERVES_MAX
            || (self.serves.len() >= SERVES_MAX && of_tenant() > SERVES_MAX / 2)
    }

    /// Starts blocks of the first waiting request that may start some now; `false` without one. The outcomes must be
    /// routed before the next call.
    pub(crate) fn begin_next(&mut self, cache: &mut Cache, cx: &mut Context) -> bool {
        while let Some((tenant, id, blocks)) = self.next_start(cache, cx) {
            let Some(serve) = self.serves.get(&id) else {
                self.waiting.pop_of(&tenant, 0);
                continue;
            };
            let is_begun = blocks.end as usize == serve.blocks.len();
            let slot_bytes = |id: &ServeId| self.serves.get(id).map_or(0, |serve| serve.layout.slot_bytes());
            self.waiting.pass_over_until(&tenant, slot_bytes);
            self.waiting.pop_of(&tenant, blocks.len() as u64 * serve.layout.slot_bytes());
            self.begin_blocks(cache, cx, id, blocks);
            if !is_begun {
                self.waiting.push(&tenant, id);
            }
            return true;
        }
        false
    }

    /// Returns the first waiting request with blocks that may start, or one that has ended.
    fn next_start(&self, cache: &Cache, cx: &Context) -> Option<(TenantId, ServeId, Range<u32>)> {
        self.waiting.fronts().find_map(|(tenant, id)| {
            let Some(serve) = self.serves.get(id) else { return Some((*tenant, *id, 0..0)) };
            let blocks = serve.next..self.limit(cache, cx, serve);
            (!blocks.is_empty()).then_some((*tenant, *id, blocks))
        })
    }

    /// Stores the wait of a block whose read was started or joined, and sends the layers that are verified.
    pub(crate) fn attached(
        &mut self,
        cache: &mut Cache,
        cx: &mut Context,
        waiter: WaiterId,
        attached: Attached,
    ) {
        let (id, block) = (ServeId(waiter.object), waiter.block);
        let Attached { lease, wait, layers, .. } = attached;
        if !self.serves.contains_key(&id) {
            self.outcomes.push(ServeOutcome::Detach { wait, waiter });
            return cache.release(lease);
        }
        cache.count_served(lease.frame());
        self.set_block(id, block, ServeBlock::Waiting { lease, wait, header: Header::Due });
        if layers > 0 {
            self.stream(cache, cx, (id, block), 0..u32::from(layers));
        }
    }

    /// Reports a block as absent that cannot be read.
    pub(crate) fn refused(&mut self, cx: &mut Context, waiter: WaiterId) {
        self.lose(cx, ServeId(waiter.object), waiter.block);
    }

    /// Continues a request whose reads were started: sends its blocks in DRAM.
    pub(crate) fn started(&mut self, cache: &mut Cache, cx: &mut Context, object: u64) {
        self.send_in_dram(cache, cx, ServeId(object));
        self.end_if_complete(cache, ServeId(object));
    }

    /// Sends verified layers of a block that a peer waits for.
    pub(crate) fn advanced(
        &mut self,
        cache: &Cache,
        cx: &mut Context,
        waiter: WaiterId,
        Advanced { from, to, .. }: Advanced,
    ) {
        self.stream(cache, cx, (ServeId(waiter.object), waiter.block), u32::from(from)..u32::from(to));
    }

    /// Reports a block as absent after its fill failed. Its lease ends now or, if sending has begun, with the
    /// sending.
    pub(crate) fn failed(&mut self, cache: &mut Cache, cx: &mut Context, waiter: WaiterId) {
        let (id, block) = (ServeId(waiter.object), waiter.block);
        let Some(serve) = self.serves.get(&id) else { return };
        let begun = matches!(serve.blocks[block as usize], ServeBlock::Waiting { header: Header::Sent, .. });
        self.send_absent(cx, id, block);
        if begun {
            self.mark_sending(id, block);
        } else {
            self.end_block(cache, id, block);
        }
        self.end_if_complete(cache, id);
    }

    /// Handles the end of sending a block.
    pub(crate) fn done(&mut self, cache: &mut Cache, id: ServeId, block: u32) {
        let Some(serve) = self.serves.get(&id) else { return };
        if let Some(ServeBlock::Sending { .. }) = serve.blocks.get(block as usize) {
            self.end_block(cache, id, block);
            self.end_if_complete(cache, id);
        }
    }

    /// Handles the loss of the peer's connection.
    pub(crate) fn aborted(&mut self, cache: &mut Cache, id: ServeId) {
        let count = self.serves.get(&id).map_or(0, |serve| serve.blocks.len() as u32);
        for block in 0..count {
            self.detach(id, block);
            self.end_block(cache, id, block);
        }
        self.remove(cache, id);
    }

    /// Handles the deadline of a request: incomplete blocks are reported as absent.
    fn expire(&mut self, cache: &mut Cache, cx: &mut Context, id: ServeId) {
        let count = self.serves.get(&id).map_or(0, |serve| serve.blocks.len() as u32);
        for block in 0..count {
            let Some(serve) = self.serves.get_mut(&id) else { return };
            serve.next = count;
            match serve.blocks[block as usize] {
                ServeBlock::Waiting { .. } => {
                    self.detach(id, block);
                    self.failed(cache, cx, waiter(id, block));
                }
                ServeBlock::Due => self.lose(cx, id, block),
                ServeBlock::Ended | ServeBlock::Sending { .. } => {}
            }
        }
        self.waiting.retain(|waiting| *waiting != id);
        self.end_if_complete(cache, id);
    }

    /// Returns the end of the range of a request's blocks that may start now.
    fn limit(&self, cache: &Cache, cx: &Context, serve: &Serve) -> u32 {
        let share = cache.share_of_arena(cx.settings.arena_serves_permille);
        let space = Space::new(share, cache.share_of_arena(1000));
        let blocks = self.leased.blocks(serve.tenant, serve.layout.slot_bytes(), space);
        (u64::from(serve.next) + blocks).min(serve.blocks.len() as u64) as u32
    }

    fn begin_blocks(&mut self, cache: &mut Cache, cx: &mut Context, id: ServeId, blocks: Range<u32>) {
        let Some(serve) = self.serves.get_mut(&id) else { return };
        serve.next = blocks.end;
        let layout = serve.layout;
        let keys = serve.keys[blocks.start as usize..blocks.end as usize].to_vec();
        let wanted: Vec<(u32, BlockKey)> = blocks.zip(keys).collect();
        let local = self.partition(cache, cx, id, &wanted);
        if local.is_empty() {
            return self.started(cache, cx, id.0);
        }
        self.outcomes.push(ServeOutcome::Fetch(FillRequest {
            object: (WaiterOwner::Serve, id.0),
            layout,
            read_bytes: cx.settings.read_bytes_default,
            class: ReadClass::Awaited,
            joins: Joins::Local,
            local,
            imports: None,
            remote: None,
        }));
    }

    /// Leases the blocks in DRAM, and reports absent blocks. Returns the blocks to be read.
    fn partition(
        &mut self,
        cache: &mut Cache,
        cx: &mut Context,
        id: ServeId,
        wanted: &[(u32, BlockKey)],
    ) -> Vec<(u32, LocalBlock)> {
        let (mut local, mut in_dram, mut entries) = (Vec::new(), Vec::new(), Vec::new());
        let Some(&Serve { tenant, layout, .. }) = self.serves.get(&id) else { return local };
        for (block, key) in wanted.iter().copied() {
            let Some((entry, copy)) = cache.acquire_of(&key, (tenant, &layout)) else {
                self.lose(cx, id, block);
                continue;
            };
            if cache.entry(entry).stored().is_some() {
                entries.push(entry);
            }
            match copy {
                LocalCopy::InDram(lease) => {
                    cache.count_served(lease.frame());
                    self.set_block(id, block, ServeBlock::Sending { lease });
                    in_dram.push(block);
                }
                LocalCopy::Elsewhere(found) => local.push((block, found)),
                LocalCopy::Absent => self.lose(cx, id, block),
            }
        }
        if !entries.is_empty() {
            self.outcomes.push(ServeOutcome::Read { entries });
        }
        if let Some(serve) = self.serves.get_mut(&id) {
            serve.in_dram = in_dram;
        }
        local
    }
}
