//! Checks of placed replicas: no block is evicted for them, a moved block is dropped only if its other
//! replica was durable, a node that must not accept blocks accepts none, and moves stay within the bandwidth.
//!
//! Deadlines of placement requests and offers are checked here too. `audit.rs` checks that none is left over,
//! and `operators.rs` that a drain completes.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use reprise_agent_core::effect::PlaceKind;
use reprise_agent_core::event::{Event, Grant, Request};
use reprise_agent_core::{AgentCore, TenantUsage};
use reprise_policy::{Epoch, NodeId, NodeMode, Quota, TenantId, Tick};

use crate::environment::Environment;
use crate::messages::Direction;
use crate::network::Host;
use crate::setup::Variant;

/// Time within which the directory knows of a removed replica, during faults and without them. A lost
/// announcement is sent again after the timeout of a call, or with a new registration.
pub(crate) const STALE_MAX: Duration = Duration::from_secs(30);
pub(crate) const STALE_IN_CALM_MAX: Duration = Duration::from_secs(5);

/// State of the placement checks of a process.
#[derive(Debug, Default)]
pub(crate) struct PlacementAudit {
    /// Time at which an offer was last refused for lack of room, not answered, or not allowed.
    pub(crate) refused: Option<Tick>,
    /// A grant is about to be applied.
    granted: bool,
    /// Blocks that engines have saved, or that leave DRAM, are not durable yet.
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

impl PlacementAudit {
    // ---- events of a core ---------------------------------------------------------------------------------

    /// Records the permitted consequences of an event.
    pub(crate) fn before_event(&mut self, env: &Environment, now: Tick, core: &AgentCore, event: &Event) {
        let kept_free = u64::from(env.setup.settings.pool_free_permille);
        let counters = core.counters();
        if self.since.is_none() {
            // Blocks that a core drops before its first event exceeded the limits of its tenants.
            (self.since, self.evictions) = (Some(now), counters.nvme_evictions);
        }
        self.saving |= matches!(event, Event::Request { body: Request::Commit(_), .. });
        let leases =
            matches!(event, Event::Request { body: Request::Reserve { kind: PlaceKind::Extent, .. }, .. });
        let free = counters.pool_free_bytes + counters.pool_pending_free_bytes;
        let short = free < counters.pool_capacity_bytes * kept_free / 1000;
        let over = core.tenant_usage().any(|usage| usage.nvme.used > usage.nvme.quota.limit());
        let granted = std::mem::take(&mut self.granted);
        self.may_evict =
            self.saving || leases || short || over || granted || matches!(event, Event::DeviceLost { .. });
    }

    /// Records that a grant is about to be applied.
    pub(crate) fn note_grant(&mut self) {
        self.granted = true;
    }

    /// Checks the consequences of an event.
    pub(crate) fn after_event(&mut self, node: usize, core: &AgentCore) {
        let counters = core.counters();
        let evicted =
            counters.nvme_evictions - std::mem::replace(&mut self.evictions, counters.nvme_evictions);
        // A lost device also reduces the memory of its tenants.
        self.may_evict |= counters.devices_lost > self.devices_lost;
        self.devices_lost = counters.devices_lost;
        // Blocks in DRAM only are saved when their region passes to another tenant.
        self.saving |= counters.demoting_bytes > 0;
        assert!(
            evicted == 0 || self.may_evict || self.saving,
            "node {node} evicts {evicted} blocks although only offered blocks need room"
        );
        let moved = counters.moved_blocks - std::mem::replace(&mut self.moved, counters.moved_blocks);
        assert!(moved <= self.may_drop, "node {node} drops {moved} moved blocks without an answer");
        // A block that is committed during its fetch is saved when the fetch has ended.
        self.saving &= counters.unsaved_blocks + counters.fills_in_flight > 0;
    }

    // ---- moves --------------------------------------------------------------------------------------------

    /// Sets the number of blocks that may be dropped because they have moved.
    pub(crate) fn allow_drops(&mut self, blocks: usize) {
        self.may_drop = blocks as u64;
    }

    // ---- offers -------------------------------------------------------------------------------------------

    /// Records, under the name `words`, that an offer or move of a node was refused: its blocks may stay
    /// there.
    pub(crate) fn note_refusal(&mut self, env: &mut Environment, words: &'static str) {
        if env.calm {
            env.count(words);
        }
        self.refused = Some(env.now);
    }

    /// Records a block that a peer cannot read. Blocks of a tenant without memory on the node cannot be read
    /// there, and hence not served; memory that a lost device may still write to has no owner.
    pub(crate) fn note_unreadable(&mut self, env: &mut Environment, core: &AgentCore) {
        let lost = core.counters().arena_lost_bytes;
        let without_memory = |usage: TenantUsage| usage.dram.used <= lost && usage.nvme.used > 0;
        if core.tenant_usage().any(without_memory) {
            self.note_refusal(env, "refused in calm: unreadable");
        }
    }

    /// Checks that peers have fetched at most the bytes that a node's bandwidth allows, plus one block.
    pub(crate) fn note_given(&mut self, env: &Environment, node: usize, bytes: u64) {
        let now = env.time(Host::Node(node));
        let rate = u128::from(env.setup.settings.placement_bandwidth);
        self.given += bytes;
        let time_us = now.since(self.since.unwrap_or(now)).as_micros() + 1_000_000;
        let allowed = rate * time_us / 1_000_000 + u128::from(env.setup.slot_bytes_max());
        assert!(
            u128::from(self.given) <= allowed,
            "node {node} served {} bytes, more than the {allowed} that its bandwidth allows",
            self.given
        );
    }

    /// Checks that a node that knows that it is not active accepts no blocks.
    pub(crate) fn assert_may_take(&self, node: usize, taken: &[u32]) {
        let takes = !taken.is_empty() && self.inactive;
        assert!(!takes, "node {node} takes {} blocks and is not active", taken.len());
    }

    // ---- instructions -------------------------------------------------------------------------------------

    /// Records the mode in a member's answer to a registration.
    pub(crate) fn note_mode(&mut self, epoch: Epoch, direction: &Direction) {
        // Revisions of different stores are not comparable.
        let mode_revision = (epoch.0 >> 32, direction.set.revision);
        if mode_revision.0 != self.mode_revision.0 || mode_revision.1 >= self.mode_revision.1 {
            (self.mode_revision, self.inactive) = (mode_revision, direction.set.mode != NodeMode::Active);
        }
    }
}

/// An injected flaw: the grant that makes room for offered blocks by lowering the limit of their tenant.
pub(crate) fn grant_for_offer(
    env: &Environment,
    core: &AgentCore,
    tenant: TenantId,
    bytes: u64,
) -> Option<Grant> {
    if env.setup.variant != Variant::OffersEvictBlocks {
        return None;
    }
    let usage = core.tenant_usage().find(|usage| usage.tenant == tenant)?;
    let limit = usage.nvme.used.saturating_sub(bytes);
    let nvme = Quota::new(0, limit).expect("nothing is reserved");
    let dram = Quota::new(0, u64::MAX).expect("nothing is reserved");
    let version = usage.grant.map_or(0, |grant| grant.version) + 1;
    Some(Grant { tenant, version, dram, nvme })
}
