//! What must be so of replicas that are placed: nothing is evicted for them, a moved block is dropped only when its other
//! replica was durable, who is to take nothing takes nothing, and what moves is within the bandwidth.
//!
//! That questions and offers end in time is looked at here too; that nothing of them is left, in `audit.rs`; that a drain
//! comes to its end, in `operators.rs`.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use reprise_agent_core::agent::TenantUsage;
use reprise_agent_core::agent::limits::PLACE_KEYS_MAX;
use reprise_agent_core::directions::REBALANCER_SLOT;
use reprise_agent_core::effect::PlaceReason;
use reprise_agent_core::event::{Event, Grant, Move, Placement, Request};
use reprise_policy::{BlockKey, Epoch, NodeId, NodeMode, Quota, TenantId, Tick};

use crate::link::LinkId;
use crate::messages::{Direction, PlaceAnswer, PlaceQuestion};
use crate::network::Host;
use crate::setup::{DEAD_AFTER, Variant, large_layout};
use crate::world::World;

/// A deadline is noticed when the clock next shows another microsecond.
const CLOCK_GRAIN: Duration = Duration::from_micros(2);
/// That a replica is gone is known to the directory within this, while things break and when they do not: what was lost on
/// the way is sent again after a call's time, or announced anew with a registration.
const STALE_MAX: Duration = Duration::from_secs(30);
pub(crate) const STALE_IN_CALM_MAX: Duration = Duration::from_secs(5);
/// Offers of a node at once: one to each other node for each batch.
const OFFERS_PER_NODE_MAX: usize = 42;

/// What the auditor knows of a process.
#[derive(Debug, Default)]
pub(crate) struct Placed {
    /// When it last was refused room, was not answered, or was not allowed to offer something.
    pub(crate) refused: Option<Tick>,
    /// A grant is about to come.
    pub(crate) granted: bool,
    /// Engines have saved what is not durable yet.
    saving: bool,
    may_evict: bool,
    evictions: u64,
    devices_lost: u64,
    /// When a member last answered where blocks of a node go that is to leave.
    pub(crate) asked_to_drain: Option<Tick>,
    /// Blocks that may be dropped because they have moved, and that were.
    may_drop: u64,
    moved: u64,
    /// The newest mode that it was told: of which store, and its revision.
    told: (u64, u64),
    inactive: bool,
    /// Whom members mean by the number of a node that blocks move to. Where the store was replaced, one member may mean
    /// another than the next, and the node itself a third, to whom it offers.
    moves_to: BTreeMap<NodeId, BTreeSet<usize>>,
    /// Slot bytes that others have taken, since then.
    given: u64,
    since: Option<Tick>,
}

impl World {
    // ---- events of a core --------------------------------------------------------------------------------------

    /// What may follow from an event.
    pub(crate) fn before_event(&mut self, node: usize, event: &Event) {
        let now = self.time(Host::Node(node));
        let kept_free = u64::from(self.setup.settings.pool_free_permille);
        let process = self.process(node);
        let (counters, placed) = (process.core.counters(), &mut process.placed);
        if placed.since.is_none() {
            // What a core drops before its first event was too much for its tenants.
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

    /// What has followed.
    pub(crate) fn after_event(&mut self, node: usize) {
        let nodes = self.nodes.len();
        let process = self.process(node);
        let (counters, placed) = (process.core.counters(), &mut process.placed);
        let evicted =
            counters.nvme_evictions - std::mem::replace(&mut placed.evictions, counters.nvme_evictions);
        // With a device a tenant loses its part of it.
        placed.may_evict |= counters.devices_lost > placed.devices_lost;
        placed.devices_lost = counters.devices_lost;
        assert!(
            evicted == 0 || placed.may_evict,
            "node {node} evicts {evicted} blocks, and only what was offered to it needs room"
        );
        let moved = counters.moved_blocks - std::mem::replace(&mut placed.moved, counters.moved_blocks);
        assert!(moved <= placed.may_drop, "node {node} drops {moved} moved blocks unasked");
        // What is committed while it is being fetched is saved when it is there.
        placed.saving &= counters.unsaved_blocks + counters.fills_in_flight > 0;
        let offers = process.offers.len();
        assert!(offers <= OFFERS_PER_NODE_MAX * nodes, "node {node} has {offers} offers open");
        self.assert_placed_in_time(node);
    }

    fn assert_placed_in_time(&self, node: usize) {
        let host = Host::Node(node);
        let now = self.time(host);
        if !self.is_awake(host) || self.place(host).resumed >= now {
            return;
        }
        let process = self.nodes[node].process.as_ref().expect("it runs");
        let late = |deadline: Tick| deadline.after(CLOCK_GRAIN) < now;
        let offer = process.offers.values().find(|offer| late(offer.deadline));
        assert!(offer.is_none(), "node {node}: an offer is not over in time: {offer:?}");
        let placing = process.client.placings.values().find(|placing| late(placing.deadline));
        assert!(placing.is_none(), "node {node}: a question of places is not over in time: {placing:?}");
    }

    // ---- where blocks go ---------------------------------------------------------------------------------------

    /// A member has said where blocks go.
    pub(crate) fn audit_places(&mut self, member: usize, question: &PlaceQuestion, answer: &PlaceAnswer) {
        assert!(question.keys.len() <= PLACE_KEYS_MAX, "{} keys in a question", question.keys.len());
        let now = self.time(Host::Member(member));
        self.note_asked(member, question);
        let running = self.members[member].as_ref().expect("it answers");
        let mut seen: BTreeSet<NodeId> = BTreeSet::new();
        for (key, answer) in question.keys.iter().zip(&answer.answers) {
            match *answer {
                Placement::To(to) if seen.insert(to) => {
                    let host = running.host_of(to).expect("only known nodes are named");
                    let mode = running.told_modes.get(&host).copied().unwrap_or_default().mode;
                    assert_eq!(mode, NodeMode::Active, "member {member} places blocks on node {host}");
                    assert!(to != question.holder, "a block is placed on its holder");
                    let silence = running.heard.get(&to).map(|heard| now.since(*heard));
                    assert!(
                        silence.is_some_and(|silence| silence < DEAD_AFTER),
                        "{to} is named, silent for {silence:?}"
                    );
                }
                Placement::Enough => self.assert_enough(member, question, key),
                _ => {}
            }
        }
    }

    fn note_asked(&mut self, member: usize, question: &PlaceQuestion) {
        let running = self.members[member].as_ref().expect("it answers");
        let Some(holder) = running.host_of(question.holder) else { return };
        let Some(process) = self.nodes[holder].process.as_mut() else { return };
        match question.reason {
            PlaceReason::Move(to) => {
                if let Some(host) = running.host_of(to) {
                    process.placed.moves_to.entry(to).or_default().insert(host);
                }
            }
            PlaceReason::Drain => process.placed.asked_to_drain = Some(self.now),
            PlaceReason::Hot => {}
        }
    }

    /// There is another durable replica, or was one until a moment ago.
    fn assert_enough(&self, member: usize, question: &PlaceQuestion, key: &BlockKey) {
        let running = self.members[member].as_ref().expect("it answers");
        let durable = match question.reason {
            PlaceReason::Move(to) => running.host_of(to).is_some_and(|host| self.was_durable(host, key)),
            PlaceReason::Drain | PlaceReason::Hot => {
                let holder = running.host_of(question.holder);
                let others = (0..self.nodes.len()).filter(|host| Some(*host) != holder);
                others.into_iter().any(|host| self.was_durable(host, key))
            }
        };
        let reason = question.reason;
        assert!(durable, "member {member} says of {key}, for {reason:?}, that it is durable where it is not");
    }

    /// Whether a node has a block durably, or the directory may not know yet that it has it no more.
    fn was_durable(&self, host: usize, key: &BlockKey) -> bool {
        let (node, stale) = (&self.nodes[host], if self.calm { STALE_IN_CALM_MAX } else { STALE_MAX });
        let settling = self.calm && self.now.since(self.setup.faults_until) < STALE_MAX;
        let stale = if settling { STALE_MAX } else { stale };
        node.promised.contains(key) || node.withdrawn.get(key).is_some_and(|at| self.now.since(*at) < stale)
    }

    /// The core hears where blocks go; of those that move, it drops what has another durable replica.
    pub(crate) fn placed(
        &mut self,
        node: usize,
        reason: PlaceReason,
        enough: &BTreeSet<BlockKey>,
        event: Event,
    ) {
        let PlaceReason::Move(to) = reason else { return self.apply(node, event) };
        let before: BTreeSet<BlockKey> = self.nodes[node].promised.intersection(enough).copied().collect();
        self.process(node).placed.may_drop = before.len() as u64;
        self.apply(node, event);
        self.process(node).placed.may_drop = 0;
        let dropped: Vec<BlockKey> = before.difference(&self.nodes[node].promised).copied().collect();
        if let Some(hosts) = self.process(node).placed.moves_to.get(&to).cloned() {
            let lost = dropped.iter().find(|key| !hosts.iter().any(|host| self.was_durable(*host, key)));
            assert!(lost.is_none(), "node {node} drops {lost:?}, which none of {hosts:?} has");
        }
        if !dropped.is_empty() {
            self.count("moves with a drop");
        }
    }

    // ---- offers ------------------------------------------------------------------------------------------------

    /// A node was refused something, in these words: what it is to give away may stay with it.
    pub(crate) fn note_refusal(&mut self, node: usize, words: &'static str) {
        let now = self.now;
        if self.calm {
            self.count(words);
        }
        self.process(node).placed.refused = Some(now);
    }

    /// A peer does not get a block. Of a tenant without memory on the node nothing can be read there, hence nothing given; what a lost
    /// device may still write to is nobody's memory.
    pub(crate) fn note_unreadable(&mut self, node: usize) {
        let core = &self.process(node).core;
        let lost = core.counters().arena_lost_bytes;
        let without_memory = |usage: TenantUsage| usage.dram.used <= lost && usage.nvme.used > 0;
        if core.tenant_usage().any(without_memory) {
            self.note_refusal(node, "refused in calm: unreadable");
        }
    }

    /// Peers have taken bytes of a node: no more than its bandwidth allows, and one block.
    pub(crate) fn note_given(&mut self, node: usize, bytes: u64) {
        let now = self.time(Host::Node(node));
        let rate = u128::from(self.setup.settings.placement_bandwidth);
        let placed = &mut self.process(node).placed;
        placed.given += bytes;
        let time_us = now.since(placed.since.unwrap_or(now)).as_micros() + 1_000_000;
        let allowed = rate * time_us / 1_000_000 + u128::from(large_layout().slot_bytes());
        assert!(
            u128::from(placed.given) <= allowed,
            "node {node} gives {} bytes, of {allowed} that its bandwidth allows",
            placed.given
        );
    }

    /// A node that is not active, as it was told, takes nothing.
    pub(crate) fn assert_may_take(&mut self, node: usize, taken: &[u32]) {
        let inactive = self.process(node).placed.inactive;
        assert!(taken.is_empty() || !inactive, "node {node} takes {} blocks and is not active", taken.len());
    }

    /// A flaw: room for what is offered is made by lowering the limit of its tenant.
    pub(crate) fn push_out(&mut self, node: usize, tenant: TenantId, bytes: u64) {
        if self.setup.variant != Variant::TakenPushesOut {
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

    // ---- directions --------------------------------------------------------------------------------------------

    /// A member has answered a report with what the node is to do; as `take` of `node-agent/src/directory/reporting.rs`.
    pub(crate) fn directed(&mut self, node: usize, (link, epoch): (LinkId, Epoch), direction: Direction) {
        let Direction { set, given } = direction;
        let placed = &mut self.process(node).placed;
        // Revisions of different stores say nothing of each other.
        let told = (epoch.0 >> 32, set.revision);
        if told.0 != placed.told.0 || told.1 >= placed.told.1 {
            (placed.told, placed.inactive) = (told, set.mode != NodeMode::Active);
        }
        let variant = self.setup.variant;
        let client = self.client(node);
        let decides = client.routes.as_ref().is_some_and(|routes| routes.owns(link, REBALANCER_SLOT));
        let number = client.directions.number_mode(epoch, set.revision);
        let is_news = decides && client.directions.is_news(given);
        let unheard = match variant {
            Variant::CordonsUnheard => set.mode == NodeMode::Cordoned,
            Variant::DrainsUnheard => set.mode == NodeMode::Draining,
            _ => false,
        };
        if let Some(revision) = number.filter(|_| !unheard) {
            self.apply(node, Event::Mode { mode: set.mode, revision });
        }
        if is_news && (given.is_some() || variant != Variant::MovesWithoutEnd) {
            self.note_move(given);
            self.apply(node, Event::Move(given));
        }
    }

    fn note_move(&mut self, given: Option<Move>) {
        self.count(if given.is_some() { "moves told" } else { "moves ended" });
    }
}
