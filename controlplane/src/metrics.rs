//! All metrics of the control plane: names, help, units, labels. Labels are enums, so their number is
//! bounded.

mod labels;

use std::time::Duration;

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};
use reprise_controlplane_core::{DirectorySize, NodeLiveness};
use reprise_daemon::rejected_connections::{Listener, RejectedConnections};
use reprise_policy::{Amounts, NodeMode};

use crate::shards::Shards;
pub use labels::{
    Call, HeartbeatLabels, HeartbeatOutcome, PlaceResult, ReplayResult, UpdateLabels, UpdateResult,
    WatchLabels, WatchOf,
};
use labels::{
    CallLabels, ModeLabels, ModeValue, PlaceLabels, ReplayLabels, RoomLabels, RoomValue, StateLabels,
    StateValue,
};

/// Prefix of metric names.
const PREFIX: &str = "reprise_controlplane";
/// First bucket of the latency histograms, in seconds; 16 doublings reach 0.65 s.
const LATENCY_FIRST_SECONDS: f64 = 20e-6;
const LATENCY_BUCKETS: u16 = 16;

/// Handles of all metrics; clones share the same metrics.
#[derive(Clone, Debug)]
pub struct Metrics {
    /// Number of granted registrations.
    pub registrations: Counter,
    /// Heartbeats by outcome.
    pub heartbeats: Family<HeartbeatLabels, Counter>,
    /// Number of nodes declared dead.
    pub deaths: Counter,
    /// Number of nodes by state.
    nodes: Family<StateLabels, Gauge>,
    /// Update batches by outcome.
    pub updates: Family<UpdateLabels, Counter>,
    /// Number of applied changes.
    pub changes: Counter,
    /// Number of answered lookups.
    pub lookups: Counter,
    /// Number of keys looked up.
    pub lookup_keys: Counter,
    /// Number of keys looked up that have a replica.
    pub lookup_keys_found: Counter,
    /// Number of keys looked up that another member owns, or while this member's place was uncertain.
    pub lookup_keys_elsewhere: Counter,
    /// Number of keys looked up in slots with an incomplete inventory of some node.
    pub lookup_keys_partial: Counter,
    /// Keys in placement requests, by outcome.
    place_keys: Family<PlaceLabels, Counter>,
    /// Number of keys of prompts in routing requests.
    pub route_keys: Counter,
    /// Number of keys of prompts whose owner did not reply in time.
    pub route_keys_unanswered: Counter,
    /// Number of open watch streams.
    pub watchers: Family<WatchLabels, Gauge>,
    /// Times that a watch stream fell behind and missed changes.
    pub watch_missed: Family<WatchLabels, Counter>,
    /// Number of published batches of KV events.
    pub event_batches: Counter,
    /// Number of batches skipped for slow subscribers.
    pub event_batches_skipped: Counter,
    /// Connections closed without service.
    pub rejected: RejectedConnections,
    /// Replays of KV events, by outcome.
    event_replays: Family<ReplayLabels, Counter>,
    /// Duration of calls.
    call: Family<CallLabels, Histogram, fn() -> Histogram>,
    modes: Family<ModeLabels, Gauge>,
    members: Gauge,
    member_registered: Gauge,
    tenants_overcommitted: Family<RoomLabels, Gauge>,
    slots_owned: Gauge,
    slots_partial: Gauge,
    directory_keys: Gauge,
    directory_replicas: Gauge,
    directory_stale: Gauge,
    directory_bytes: Gauge,
}

impl Metrics {
    /// Creates and registers all metrics.
    pub fn new() -> (Metrics, Registry) {
        let mut registry = Registry::with_prefix(PREFIX);
        let listeners = [Listener::Admin, Listener::Grpc, Listener::Events, Listener::Replay];
        let rejected = RejectedConnections::register(&mut registry, &listeners);
        let metrics = Metrics {
            registrations: Counter::default(),
            heartbeats: Family::default(),
            deaths: Counter::default(),
            nodes: Family::default(),
            updates: Family::default(),
            changes: Counter::default(),
            lookups: Counter::default(),
            lookup_keys: Counter::default(),
            lookup_keys_found: Counter::default(),
            lookup_keys_elsewhere: Counter::default(),
            lookup_keys_partial: Counter::default(),
            place_keys: Family::default(),
            route_keys: Counter::default(),
            route_keys_unanswered: Counter::default(),
            watchers: Family::default(),
            watch_missed: Family::default(),
            event_batches: Counter::default(),
            event_batches_skipped: Counter::default(),
            rejected,
            event_replays: Family::default(),
            call: Family::new_with_constructor(latency as fn() -> Histogram),
            modes: Family::default(),
            members: Gauge::default(),
            tenants_overcommitted: Family::default(),
            member_registered: Gauge::default(),
            slots_owned: Gauge::default(),
            slots_partial: Gauge::default(),
            directory_keys: Gauge::default(),
            directory_replicas: Gauge::default(),
            directory_stale: Gauge::default(),
            directory_bytes: Gauge::default(),
        };
        metrics.start_at_zero();
        metrics.register_membership(&mut registry);
        metrics.register_directory(&mut registry);
        metrics.register_placement(&mut registry);
        metrics.register_events(&mut registry);
        (metrics, registry)
    }

    /// Creates all label combinations at zero, so that the first increment of a counter is visible to
    /// scrapers.
    fn start_at_zero(&self) {
        for result in [HeartbeatOutcome::known, HeartbeatOutcome::returned, HeartbeatOutcome::unknown] {
            drop(self.heartbeats.get_or_create(&HeartbeatLabels { result }));
        }
        self.set_overcommitted(Amounts::default());
        for result in [UpdateResult::applied, UpdateResult::gap, UpdateResult::fenced, UpdateResult::invalid]
        {
            drop(self.updates.get_or_create(&UpdateLabels { result }));
        }
        for of in [WatchOf::nodes, WatchOf::directory, WatchOf::members] {
            drop(self.watchers.get_or_create(&WatchLabels { of }));
            drop(self.watch_missed.get_or_create(&WatchLabels { of }));
        }
        for result in [ReplayResult::kept, ReplayResult::snapshot, ReplayResult::incomplete] {
            drop(self.event_replays.get_or_create(&ReplayLabels { result }));
        }
        for result in [PlaceResult::enough, PlaceResult::target, PlaceResult::nowhere, PlaceResult::elsewhere]
        {
            drop(self.place_keys.get_or_create(&PlaceLabels { result }));
        }
        for call in [Call::register, Call::update, Call::lookup, Call::place, Call::route] {
            drop(self.call.get_or_create(&CallLabels { call }));
        }
    }

    fn register_membership(&self, registry: &mut Registry) {
        let version = Info::new([("version", env!("CARGO_PKG_VERSION"))]);
        registry.register("build", "Version of the control plane", version);
        registry.register("registrations", "Registrations granted", self.registrations.clone());
        registry.register("heartbeats", "Heartbeats by outcome", self.heartbeats.clone());
        registry.register("deaths", "Nodes declared dead after missing heartbeats", self.deaths.clone());
        registry.register("nodes", "Nodes by state", self.nodes.clone());
        registry.register("node_modes", "Nodes by mode", self.modes.clone());
        registry.register("members", "Control-plane members that this member knows", self.members.clone());
        registry.register(
            "member_registered",
            "1 while this member is certain to be registered, else 0",
            self.member_registered.clone(),
        );
        registry.register("slots_owned", "Hash slots owned by this member", self.slots_owned.clone());
        registry.register(
            "slots_partial",
            "Hash slots owned by this member with an incomplete inventory of some node",
            self.slots_partial.clone(),
        );
        registry.register_with_unit(
            "tenants_overcommitted",
            "Bytes by which tenant reservations exceed the capacity of live nodes",
            Unit::Bytes,
            self.tenants_overcommitted.clone(),
        );
        registry.register("watchers", "Open watch streams", self.watchers.clone());
        registry.register(
            "watch_missed",
            "Times that a watch stream fell behind and missed changes",
            self.watch_missed.clone(),
        );
        registry.register_with_unit("call", "Duration of calls", Unit::Seconds, self.call.clone());
    }

    fn register_directory(&self, registry: &mut Registry) {
        registry.register("updates", "Update batches by outcome", self.updates.clone());
        registry.register("changes", "Replica changes applied", self.changes.clone());
        registry.register("lookups", "Lookups answered", self.lookups.clone());
        registry.register("lookup_keys", "Keys looked up", self.lookup_keys.clone());
        registry.register(
            "lookup_keys_found",
            "Keys looked up that have a replica",
            self.lookup_keys_found.clone(),
        );
        registry.register(
            "lookup_keys_elsewhere",
            "Keys looked up that another member owns",
            self.lookup_keys_elsewhere.clone(),
        );
        registry.register(
            "lookup_keys_partial",
            "Keys looked up in slots with an incomplete inventory of some node",
            self.lookup_keys_partial.clone(),
        );
        registry.register("directory_keys", "Distinct keys in the directory", self.directory_keys.clone());
        registry.register("directory_replicas", "Replicas in the directory", self.directory_replicas.clone());
        registry.register(
            "directory_stale_entries",
            "Stale entries that a sweep has not removed yet",
            self.directory_stale.clone(),
        );
        registry.register_with_unit(
            "directory",
            "Memory of the directory",
            Unit::Bytes,
            self.directory_bytes.clone(),
        );
    }

    fn register_placement(&self, registry: &mut Registry) {
        registry.register("place_keys", "Keys in placement requests, by outcome", self.place_keys.clone());
        registry.register("route_keys", "Keys of prompts in routing requests", self.route_keys.clone());
        registry.register(
            "route_keys_unanswered",
            "Keys of prompts whose owner did not answer in time",
            self.route_keys_unanswered.clone(),
        );
    }

    fn register_events(&self, registry: &mut Registry) {
        registry.register("event_batches", "Batches of KV events published", self.event_batches.clone());
        registry.register(
            "event_batches_skipped",
            "Batches of KV events skipped for slow subscribers",
            self.event_batches_skipped.clone(),
        );
        registry.register("event_replays", "Replays of KV events by outcome", self.event_replays.clone());
    }

    /// Counts a finished replay.
    pub fn count_replay(&self, result: ReplayResult) {
        self.event_replays.get_or_create(&ReplayLabels { result }).inc();
    }

    /// Counts keys of a placement request.
    pub fn count_placed(&self, result: PlaceResult, keys: u64) {
        self.place_keys.get_or_create(&PlaceLabels { result }).inc_by(keys);
    }

    /// Sets the number of nodes by mode; called on each scrape.
    pub fn set_modes(&self, modes: impl Iterator<Item = NodeMode>) {
        let mut counts = [(ModeValue::active, 0), (ModeValue::cordoned, 0), (ModeValue::draining, 0)];
        for mode in modes {
            counts[match mode {
                NodeMode::Active => 0,
                NodeMode::Cordoned => 1,
                NodeMode::Draining => 2,
            }]
            .1 += 1;
        }
        for (mode, count) in counts {
            self.modes.get_or_create(&ModeLabels { mode }).set(count);
        }
    }

    /// Records the duration of a call.
    pub fn observe_call(&self, call: Call, time: Duration) {
        self.call.get_or_create(&CallLabels { call }).observe(time.as_secs_f64());
    }

    /// Counts a heartbeat by its outcome.
    pub fn count_heartbeat(&self, result: HeartbeatOutcome) {
        self.heartbeats.get_or_create(&HeartbeatLabels { result }).inc();
    }

    /// Counts an update batch.
    pub fn count_update(&self, result: UpdateResult) {
        self.updates.get_or_create(&UpdateLabels { result }).inc();
    }

    /// Sets the bytes by which tenant reservations exceed the capacity.
    pub fn set_overcommitted(&self, bytes: Amounts) {
        for (room, bytes) in [(RoomValue::dram, bytes.dram), (RoomValue::nvme, bytes.nvme)] {
            let gauge = self.tenants_overcommitted.get_or_create(&RoomLabels { room });
            gauge.set(i64::try_from(bytes).unwrap_or(i64::MAX));
        }
    }

    /// Sets the gauges about control-plane members; called on each scrape.
    pub fn set_members(&self, shards: &Shards) {
        self.member_registered.set(i64::from(shards.is_registered()));
        let Some(view) = shards.view() else { return };
        self.members.set(i64::try_from(view.members.len()).unwrap_or(i64::MAX));
    }

    /// Sets the gauges of nodes and directory; called on each scrape.
    pub fn set_sizes(&self, states: impl Iterator<Item = NodeLiveness>, size: &DirectorySize) {
        let mut counts = [(StateValue::alive, 0), (StateValue::dead, 0), (StateValue::absent, 0)];
        for state in states {
            counts[match state {
                NodeLiveness::Alive => 0,
                NodeLiveness::Dead => 1,
                NodeLiveness::Absent => 2,
            }]
            .1 += 1;
        }
        for (state, count) in counts {
            self.nodes.get_or_create(&StateLabels { state }).set(count);
        }
        let set = |gauge: &Gauge, value: u64| gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
        set(&self.directory_keys, size.keys);
        set(&self.directory_replicas, size.replicas);
        set(&self.directory_stale, size.stale_entries);
        set(&self.directory_bytes, size.bytes);
        set(&self.slots_owned, size.slots_owned as u64);
        set(&self.slots_partial, size.slots_partial as u64);
    }
}

/// Encodes the registry in OpenMetrics text.
pub fn text(registry: &Registry) -> String {
    let mut text = String::new();
    encode(&mut text, registry).expect("writing to a string cannot fail");
    text
}

fn latency() -> Histogram {
    Histogram::new(exponential_buckets(LATENCY_FIRST_SECONDS, 2.0, LATENCY_BUCKETS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_metric_has_the_prefix_and_a_help_text() {
        let (metrics, registry) = Metrics::new();
        metrics.observe_call(Call::lookup, Duration::from_millis(1));
        metrics.count_heartbeat(HeartbeatOutcome::known);
        metrics.count_update(UpdateResult::applied);
        metrics.watchers.get_or_create(&WatchLabels { of: WatchOf::nodes }).inc();
        metrics.watch_missed.get_or_create(&WatchLabels { of: WatchOf::directory }).inc();
        metrics.set_sizes([NodeLiveness::Alive].into_iter(), &DirectorySize::default());
        metrics.set_modes([NodeMode::Active].into_iter());
        let text = text(&registry);
        let named: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        assert!(named.iter().all(|line| line.starts_with("reprise_controlplane_")), "{text}");
        assert!(text.contains("reprise_controlplane_nodes{state=\"alive\"} 1"), "{text}");
        assert!(text.contains("reprise_controlplane_call_seconds_bucket{le="), "{text}");
        assert!(text.contains("reprise_controlplane_directory_bytes 0"), "{text}");
        let helps = text.lines().filter(|line| line.starts_with("# HELP")).count();
        let types = text.lines().filter(|line| line.starts_with("# TYPE")).count();
        assert_eq!((helps, types), (32, 32));
    }
}
