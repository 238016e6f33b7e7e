//! Starts of fills: reads of devices, and fetches from peers.
//!
//! Reads of one request form one batch per device, and fetches one group per peer, each in the order of the
//! request's blocks, so that devices and peers can work layer by layer.

use std::time::Duration;

use reprise_policy::eviction::EntryIndex;
use reprise_policy::routing::{self, Candidate, LoadHint};
use reprise_policy::{BlockKey, NodeId, TenantId, Tick};

use crate::cache::{BlockOrigin, Cache, LocalBlock, SizeClassId};
use crate::context::Context;
use crate::effect::{
    BlockRead, DeviceId, Effect, FetchBlock, FetchId, FetchRequest, FillId, LossReason, ReadBatch, ReadClass,
};
use crate::event::Replica;
use crate::transfer::imports::ImportSource;
use crate::transfer::{Fill, FillSource, Transfer, TransferOutcome};
use crate::waiter::{
    Attached, FillRequest, Joins, RemoteBlock, RemoteBlocks, Replicas, WaiterId, WaiterOwner,
};

/// Blocks to read, grouped by device.
#[derive(Debug, Default)]
pub(super) struct Reads {
    pub(super) by_device: Vec<((DeviceId, TenantId), Vec<BlockRead>)>,
}

/// Whether the arena may have room for one more block of a size. Trying again after every failure would cost
/// the request's blocks times the arena's regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ArenaSpace {
    Maybe,
    None,
}

/// Replica to fetch a block from.
#[derive(Debug)]
struct Origin {
    node: NodeId,
    /// Other replicas; `None` if the directory was not asked.
    others: Option<Replicas>,
    /// Key of the replica, if it is one of the public tenant.
    public_key: Option<BlockKey>,
}

impl Reads {
    pub(super) fn push(&mut self, device: (DeviceId, TenantId), read: BlockRead) {
        match self.by_device.iter_mut().find(|(other, _)| *other == device) {
            Some((_, reads)) => reads.push(read),
            None => self.by_device.push((device, vec![read])),
        }
    }
}

impl Transfer {
    /// Starts or joins the fills of a request, and reports for each block whether it was attached.
    pub(crate) fn begin(&mut self, cache: &mut Cache, cx: &mut Context, mut request: FillRequest) {
        let (owner, object) = request.object;
        self.read(cache, cx, &request);
        self.import(cache, cx, &mut request);
        if let Some(remote) = request.remote {
            self.fetch(cache, cx, request.object, remote);
        }
        self.send_promotions(cx);
        self.outcomes.push(TransferOutcome::Started { owner, object });
    }

    /// Starts the fetch of an accepted block that is not on this node; the block will be saved.
    /// [`Transfer::send_fetches`] sends the request to the peer.
    pub(crate) fn pull(
        &mut self,
        cache: &mut Cache,
        block: (BlockKey, SizeClassId),
        node: NodeId,
    ) -> Result<(), LossReason> {
        let from = Origin { node, others: None, public_key: None };
        let (fill, started) = self.begin_fetch(cache, block, from, BlockOrigin::Placed)?;
        self.retain(cache, fill);
        self.pulls.entry((node, block.1)).or_default().push(started);
        Ok(())
    }

    /// Sends the requests of [`Transfer::pull`], one for each peer, tenant and layout.
    pub(crate) fn send_fetches(&mut self, cache: &Cache, cx: &mut Context) {
        for ((node, size_class), blocks) in std::mem::take(&mut self.pulls) {
            let deadline = cx.settings.load_deadline_default;
            let tenant = cache.size_class(size_class).tenant;
            self.send_fetch(cache, cx, (node, tenant, blocks), (size_class, deadline));
        }
    }

    /// Starts reads of stored blocks, one batch per device. The blocks stay in the index meanwhile.
    fn read(&mut self, cache: &mut Cache, cx: &mut Context, request: &FillRequest) {
        let (owner, object) = request.object;
        let (mut reads, mut room) = (Reads::default(), ArenaSpace::Maybe);
        for (block, from) in &request.local {
            let waiter = WaiterId { object, block: *block, owner };
            let (fill, joined) = match *from {
                LocalBlock::Filling(fill) => (Some(fill), true),
                LocalBlock::Stored(entry) => match cache.fill_of(entry) {
                    // A duplicate within the request joins the fill of the first one.
                    Some(fill) => (Some(fill), true),
                    None if room == ArenaSpace::Maybe => {
                        (self.begin_read(cache, (cx.now, request.class), entry, &mut reads), false)
                    }
                    None => (None, false),
                },
            };
            match fill {
                Some(fill) if self.may_join(fill, request.joins) => self.attach(cache, fill, waiter, joined),
                Some(_) => self.refuse(waiter, LossReason::Miss),
                None => {
                    room = ArenaSpace::None;
                    self.refuse(waiter, LossReason::NoSpace);
                }
            }
        }
        for ((device, tenant), blocks) in reads.by_device {
            let (class, layout) = (request.class, request.layout);
            let batch = ReadBatch { tenant, class, blocks, layout, read_bytes: request.read_bytes };
            cx.emit(Effect::ReadBlocks { device, batch });
        }
    }

    /// Starts to read a stored block; returns the slot of its fill, or `None` if the arena has no room.
    fn begin_read(
        &mut self,
        cache: &mut Cache,
        (now, class): (Tick, ReadClass),
        entry: EntryIndex,
        reads: &mut Reads,
    ) -> Option<u32> {
        let (device, lease, read) = cache.begin_read(entry, self.fills.next_id())?;
        let size_class = cache.size_class_of(&lease);
        reads.push((device, size_class.tenant), read);
        self.device_reads += 1;
        self.reads.begin(device, size_class.slot_bytes, now);
        let fill = Fill { class, ..Fill::new(lease, FillSource::Device(device), None) };
        Some(self.fills.insert(fill).slot())
    }

    /// Fetches each block from its best replica; blocks without a replica are refused.
    fn fetch(
        &mut self,
        cache: &mut Cache,
        cx: &mut Context,
        (owner, object): (WaiterOwner, u64),
        remote: RemoteBlocks,
    ) {
        let RemoteBlocks { size_class, deadline, otherwise, public, blocks } = remote;
        let own = cache.size_class(size_class).tenant;
        let mut groups: Vec<((NodeId, TenantId), Vec<FetchBlock>)> = Vec::new();
        let mut room = ArenaSpace::Maybe;
        for RemoteBlock { block, key, public_key, replicas } in blocks {
            let waiter = WaiterId { object, block, owner };
            // An earlier block with the same key may have started the fill.
            if let Some(fill) = cache.fill_of_key(&key, size_class) {
                self.attach(cache, fill, waiter, true);
                continue;
            }
            let public = public.zip(public_key);
            let Some(from) = self.choose_origin(replicas, public.map(|(_, key)| key), cx.now) else {
                self.refuse(waiter, otherwise);
                continue;
            };
            let tenant = public.filter(|_| from.public_key.is_some()).map_or(own, |(tenant, _)| tenant);
            let to = (from.node, tenant);
            let begun = match room {
                ArenaSpace::Maybe => self.begin_fetch(cache, (key, size_class), from, BlockOrigin::Loaded),
                ArenaSpace::None => Err(LossReason::NoSpace),
            };
            let (fill, started) = match begun {
                Ok(begun) => begun,
                Err(reason) => {
                    if reason == LossReason::NoSpace {
                        room = ArenaSpace::None;
                    }
                    self.refuse(waiter, reason);
                    continue;
                }
            };
            self.attach(cache, fill, waiter, false);
            match groups.iter_mut().find(|(known, _)| *known == to) {
                Some((_, blocks)) => blocks.push(started),
                None => groups.push((to, vec![started])),
            }
        }
        for ((node, tenant), blocks) in groups {
            self.send_fetch(cache, cx, (node, tenant, blocks), (size_class, deadline));
        }
    }

    /// Starts the fetch of a block that is not on this node; returns the slot of its fill.
    fn begin_fetch(
        &mut self,
        cache: &mut Cache,
        wanted: (BlockKey, SizeClassId),
        Origin { node, others, public_key }: Origin,
        origin: BlockOrigin,
    ) -> Result<(u32, FetchBlock), LossReason> {
        let (lease, mut block) = cache.begin_fetch(wanted, self.fills.next_id(), origin)?;
        self.peers.enqueue(node, block.into.bytes);
        let import = public_key.map(|_| ImportSource::Peer);
        block.key = public_key.unwrap_or(block.key);
        let fill = self.fills.insert(Fill { import, ..Fill::new(lease, FillSource::Peer(node), others) });
        Ok((fill.slot(), block))
    }

    /// Requests blocks from a peer.
    fn send_fetch(
        &mut self,
        cache: &Cache,
        cx: &mut Context,
        (node, tenant, blocks): (NodeId, TenantId, Vec<FetchBlock>),
        (size_class, deadline): (SizeClassId, Duration),
    ) {
        self.fetches += 1;
        let layout = cache.size_class(size_class).layout;
        let request = FetchRequest { fetch: FetchId(self.fetches), tenant, layout, deadline, blocks };
        cx.emit(Effect::PeerFetch { node, request });
    }

    /// Selects a replica of a block; of the public tenant's block if the tenant has none.
    fn choose_origin(&self, replicas: Replicas, public_key: Option<BlockKey>, now: Tick) -> Option<Origin> {
        let Replicas { own, public } = replicas;
        if let Some((node, own)) = self.choose_peer(own, now) {
            return Some(Origin { node, others: Some(Replicas { own, public }), public_key: None });
        }
        let (public_key, (node, public)) = public_key.zip(self.choose_peer(public, now))?;
        let others = Some(Replicas { own: Vec::new(), public });
        Some(Origin { node, others, public_key: Some(public_key) })
    }

    /// Selects the peer to fetch a block from; returns it and the remaining replicas. The load of a peer is
    /// what the directory last reported plus what this node has requested since.
    fn choose_peer(&self, mut replicas: Vec<Replica>, now: Tick) -> Option<(NodeId, Vec<Replica>)> {
        let candidate = |replica: &Replica| Candidate {
            node: replica.node,
            tier: replica.tier,
            load: LoadHint(replica.load.hint().0.saturating_add(self.peers.queued(replica.node).0)),
        };
        let candidates: Vec<Candidate> = replicas.iter().map(candidate).collect();
        let suspect = |node| self.peers.is_suspect(node, now);
        let Candidate { node, .. } =
            routing::soonest(&candidates, suspect).or_else(|| routing::soonest(&candidates, |_| false))?;
        replicas.retain(|replica| replica.node != node);
        Some((node, replicas))
    }

    fn may_join(&self, fill: u32, joins: Joins) -> bool {
        let is_local = |fill: &Fill| !matches!(fill.origin, FillSource::Peer(_));
        joins == Joins::All || self.fills.at(fill).is_some_and(is_local)
    }

    pub(super) fn attach(&mut self, cache: &mut Cache, slot: u32, waiter: WaiterId, joined: bool) {
        let id = self.fills.id_at(slot).expect("a frame that is being filled has a fill");
        let fill = self.fills.get_mut(id).expect("just seen");
        if let (true, FillSource::Device(device)) = (waiter.owner.awaits(), fill.origin)
            && std::mem::replace(&mut fill.class, ReadClass::Awaited) == ReadClass::Prefetch
        {
            self.promoted.push((device, FillId(id.0)));
        }
        let attached = Attached {
            lease: cache.lease_filling(&fill.lease),
            wait: self.waits.push(&mut fill.waiters, slot, waiter),
            source: fill.source(),
            layers: fill.layers,
            joined,
        };
        self.outcomes.push(TransferOutcome::Attached(waiter, attached));
    }

    /// Gives the reads ahead that something awaits now the rank of other awaited reads.
    fn send_promotions(&mut self, cx: &mut Context) {
        let mut by_device: Vec<(DeviceId, Vec<FillId>)> = Vec::new();
        for (device, fill) in self.promoted.drain(..) {
            match by_device.iter_mut().find(|(other, _)| *other == device) {
                Some((_, fills)) => fills.push(fill),
                None => by_device.push((device, vec![fill])),
            }
        }
        for (device, fills) in by_device {
            cx.emit(Effect::PromoteReads { device, fills });
        }
    }

    pub(super) fn refuse(&mut self, waiter: WaiterId, reason: LossReason) {
        self.outcomes.push(TransferOutcome::Refused(waiter, reason));
    }
}
