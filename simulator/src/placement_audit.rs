//! Checks of placed replicas: no block is evicted for them, a moved block is dropped only if its other
//! replica was durable, a node that must not accept blocks accepts none, and moves stay within the bandwidth.
//!
//! Deadlines of placement requests and offers are checked here too. `audit.rs` checks that none is left over,
//! and `operators.rs` that a drain completes.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use reprise_agent_core::TenantUsage;
use reprise_agent_core::directives::{NewDirectives, REBALANCER_SLOT, ReplyDirectives};
use reprise_agent_core::effect::PlaceReason;
use reprise_agent_core::event::{Event, Grant, Move, Request};
use reprise_policy::{BlockKey, Epoch, NodeId, NodeMode, Quota, TenantId, Tick};

use crate::link::LinkId;
use crate::messages::Direction;
use crate::network::Host;
use crate::reports::owner;
use crate::setup::{Variant, large_layout};
use crate::simulation::Simulation;

/// A deadline is detected when the clock shows the next microsecond.
const CLOCK_GRAIN: Duration = Duration::from_micros(2);
/// Time within which the directory knows of a removed replica, during faults and without them. A lost
/// announcement is sent again after the timeout of a call, or with a new registration.
const STALE_MAX: Duration = Duration::from_secs(30);
pub(crate) const STALE_IN_CALM_MAX: Duration = Duration::from_secs(5);
/// Maximum number of concurrent offers of a node: one to each other node for each batch.
const OFFERS_PER_NODE_MAX: usize = 42;

/// State of the placement checks of a process.
#[derive(Debug, Default)]
pub(crate) struct PlacementAudit {
    /// Time at which an offer was last refused for lack of room, not answered, or not allowed.
    pub(crate) refused: Option<Tick>,
    /// A grant is about to be applied.
    pub(crate) granted: bool,
    /// Engines have saved blocks that are not durable yet.
    saving: bool,
    may_evict: bool,
    evictions: u64,
    devices_lost: u64,
    /// Time of a member's last answer to a placement request of a draining node.
    pub(crate) asked_to_drain: Option<Tick>,
    /// Number of blocks that may be dropped because they have moved, and of those that were.
    may_drop: u64,
    moved: u64,
    /// The newest mode that the node has received: identity of the store, and revision.
    mode_revision: (u64, u64),
    inactive: bool,
    /// Hosts that members mean by the number of a move's target. After a replacement of the store, different
    /// members and the node itself may mean different hosts; the node offers to its own.
    pub(crate) moves_to: BTreeMap<NodeId, BTreeSet<usize>>,
    /// Slot bytes that others have fetched since then.
    given: u64,
    since: Option<Tick>,
}

impl Simulation {
    // ---- events of a core ---------------------------------------------------------------------------------

    /// Records the permitted consequences of an event.
    pub(crate) fn before_event(&mut self, node: usize, event: &Event) {
        let now = self.env.time(Host::Node(node));
        let kept_free = u64::from(self.env.setup.settings.pool_free_permille);
        let process = self.process(node);
        let (counters, placed) = (process.core.counters(), &mut process.placed);
        if placed.since.is_none() {
            // Blocks that a core drops before its first event exceeded the limits of its tenants.
            (placed.since, placed.evictions) = (Some(now), counters.nvme_evictions);
        }
        placed.saving |= matches!(event, Event::Request { body: Request::Commit(_), .. });
        let free = counters.pool_free_bytes + counters.pool_pending_free_bytes;
        let short = free < counters.pool_capacity_bytes * kept_free / 1000;
        let over = process.core.tenant_usage().any(|usage| usage.nvme.used > usage.nvme.quota.limit());
        let granted = std::mem::take(&mut placed.granted);
        placed.may_evict =
            placed.saving || short || over || granted || matches!(event, Event::DeviceLost { .. });
    }

    /// Checks the consequences of an event.
    pub(crate) fn after_event(&mut self, node: usize) {
        let nodes = self.nodes.len();
        let process = self.process(node);
        let (counters, placed) = (process.core.counters(), &mut process.placed);
        let evicted =
            counters.nvme_evictions - std::mem::replace(&mut placed.evictions, counters.nvme_evictions);
        // A lost device also reduces the memory of its tenants.
        placed.may_evict |= counters.devices_lost > placed.devices_lost;
        placed.devices_lost = counters.devices_lost;
        assert!(
            evicted == 0 || placed.may_evict,
            "node {node} evicts {evicted} blocks although only offered blocks need room"
        );
        let moved = counters.moved_blocks - std::mem::replace(&mut placed.moved, counters.moved_blocks);
        assert!(moved <= placed.may_drop, "node {node} drops {moved} moved blocks without an answer");
        // A block that is committed during its fetch is saved when the fetch has ended.
        placed.saving &= counters.unsaved_blocks + counters.fills_in_flight > 0;
        let offers = process.offers.len();
        assert!(offers <= OFFERS_PER_NODE_MAX * nodes, "node {node} has {offers} offers open");
        self.assert_placed_in_time(node);
    }

    fn assert_placed_in_time(&self, node: usize) {
        let host = Host::Node(node);
        let now = self.env.time(host);
        if !self.env.is_awake(host) || self.env.host(host).resumed >= now {
            return;
        }
        let process = self.nodes[node].process.as_ref().expect("the agent runs");
        let late = |deadline: Tick| deadline.after(CLOCK_GRAIN) < now;
        let offer = process.offers.values().find(|offer| late(offer.deadline));
        assert!(offer.is_none(), "node {node}: an offer exceeds its deadline: {offer:?}");
        let placing = process.client.placements.values().find(|placing| late(placing.deadline));
        assert!(placing.is_none(), "node {node}: a placement request exceeds its deadline: {placing:?}");
    }

    // ---- drops -------------------------------------------------------------------------------

    /// Reports whether a node has a block durably, or the directory may not know yet that the block was
    /// removed.
    pub(crate) fn was_durable(&self, host: usize, key: &BlockKey) -> bool {
        let (node, stale) = (&self.nodes[host], if self.env.calm { STALE_IN_CALM_MAX } else { STALE_MAX });
        let settling = self.env.calm && self.env.now.since(self.env.setup.faults_until) < STALE_MAX;
        let stale = if settling { STALE_MAX } else { stale };
        node.reported_durable.contains(key)
            || node.withdrawn.get(key).is_some_and(|at| self.env.now.since(*at) < stale)
    }

    /// Passes the answer to the core, which drops moving blocks that have another durable replica.
    pub(crate) fn placed(
        &mut self,
        node: usize,
        reason: PlaceReason,
        enough: &BTreeSet<BlockKey>,
        event: Event,
    ) {
        let PlaceReason::Move(to) = reason else { return self.apply(node, event) };
        let before: BTreeSet<BlockKey> =
            self.nodes[node].reported_durable.intersection(enough).copied().collect();
        self.process(node).placed.may_drop = before.len() as u64;
        self.apply(node, event);
        self.process(node).placed.may_drop = 0;
        let dropped: Vec<BlockKey> = before.difference(&self.nodes[node].reported_durable).copied().collect();
        if let Some(hosts) = self.process(node).placed.moves_to.get(&to).cloned() {
            let lost = dropped.iter().find(|key| !hosts.iter().any(|host| self.was_durable(*host, key)));
            assert!(lost.is_none(), "node {node} drops {lost:?} without a replica on {hosts:?}");
        }
        if !dropped.is_empty() {
            self.env.count("moves with a drop");
        }
    }

    // ---- offers -------------------------------------------------------------------------------------------

    /// Records, under the name `words`, that an offer or move of a node was refused: its blocks may stay
    /// there.
    pub(crate) fn note_refusal(&mut self, node: usize, words: &'static str) {
        let now = self.env.now;
        if self.env.calm {
            self.env.count(words);
        }
        self.process(node).placed.refused = Some(now);
    }

    /// Records a block that a peer cannot read. Blocks of a tenant without memory on the node cannot be read
    /// there, and hence not served; memory that a lost device may still write to has no owner.
    pub(crate) fn note_unreadable(&mut self, node: usize) {
        let core = &self.process(node).core;
        let lost = core.counters().arena_lost_bytes;
        let without_memory = |usage: TenantUsage| usage.dram.used <= lost && usage.nvme.used > 0;
        if core.tenant_usage().any(without_memory) {
            self.note_refusal(node, "refused in calm: unreadable");
        }
    }

    /// Checks that peers have fetched at most the bytes that a node's bandwidth allows, plus one block.
    pub(crate) fn note_given(&mut self, node: usize, bytes: u64) {
        let now = self.env.time(Host::Node(node));
        let rate = u128::from(self.env.setup.settings.placement_bandwidth);
        let placed = &mut self.process(node).placed;
        placed.given += bytes;
        let time_us = now.since(placed.since.unwrap_or(now)).as_micros() + 1_000_000;
        let allowed = rate * time_us / 1_000_000 + u128::from(large_layout().slot_bytes());
        assert!(
            u128::from(placed.given) <= allowed,
            "node {node} served {} bytes, more than the {allowed} that its bandwidth allows",
            placed.given
        );
    }

    /// Checks that a node that knows that it is not active accepts no blocks.
    pub(crate) fn assert_may_take(&mut self, node: usize, taken: &[u32]) {
        let inactive = self.process(node).placed.inactive;
        assert!(taken.is_empty() || !inactive, "node {node} takes {} blocks and is not active", taken.len());
    }

    /// An injected flaw: makes room for offered blocks by lowering the limit of their tenant.
    pub(crate) fn evict_for_offer(&mut self, node: usize, tenant: TenantId, bytes: u64) {
        if self.env.setup.variant != Variant::OffersEvictBlocks {
            return;
        }
        let usage = self.process(node).core.tenant_usage().find(|usage| usage.tenant == tenant);
        let Some(usage) = usage else { return };
        let limit = usage.nvme.used.saturating_sub(bytes);
        let nvme = Quota::new(0, limit).expect("nothing is reserved");
        let dram = Quota::new(0, u64::MAX).expect("nothing is reserved");
        let version = usage.grant.map_or(0, |grant| grant.version) + 1;
        self.apply(node, Event::Budget(Grant { tenant, version, dram, nvme }));
    }

    // ---- instructions -------------------------------------------------------------------------------------

    /// Handles a member's instructions in the answer to a report.
    pub(crate) fn directed(&mut self, node: usize, (link, epoch): (LinkId, Epoch), direction: Direction) {
        let Direction { set, given } = direction;
        let placed = &mut self.process(node).placed;
        // Revisions of different stores are not comparable.
        let mode_revision = (epoch.0 >> 32, set.revision);
        if mode_revision.0 != placed.mode_revision.0 || mode_revision.1 >= placed.mode_revision.1 {
            (placed.mode_revision, placed.inactive) = (mode_revision, set.mode != NodeMode::Active);
        }
        let variant = self.env.setup.variant;
        let client = self.client(node);
        let from = owner(client.members.routes().map(|routes| &**routes), link, REBALANCER_SLOT);
        let reply = ReplyDirectives { mode_revision: Some(set.revision), order: given, from };
        let NewDirectives { mode_number, order } = client.directions.receive(epoch, reply);
        let ignored = match variant {
            Variant::CordonsIgnored => set.mode == NodeMode::Cordoned,
            Variant::DrainsIgnored => set.mode == NodeMode::Draining,
            _ => false,
        };
        if let Some(revision) = mode_number.filter(|_| !ignored) {
            self.apply(node, Event::Mode { mode: set.mode, revision });
        }
        if let Some(given) = order.filter(|order| order.is_some() || variant != Variant::MoveEndIgnored) {
            self.note_move(given);
            self.apply(node, Event::Move(given));
        }
    }

    fn note_move(&mut self, given: Option<Move>) {
        self.env.count(if given.is_some() { "moves started" } else { "moves ended" });
    }
}
