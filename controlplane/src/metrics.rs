//! Every metric of the control plane: names, help, units, labels. Labels are enums, so their number is bounded.

mod labels;

use std::time::Duration;

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};
use reprise_controlplane_core::{Amounts, DirectorySize, MemberState};
use reprise_daemon::rejected::{Listener, RejectedConnections};
use reprise_policy::NodeMode;

use crate::shards::Shards;
pub use labels::{
    BeatLabels, BeatResult, Call, PlaceResult, ReplayResult, UpdateLabels, UpdateResult, WatchLabels, WatchOf,
};
use labels::{
    CallLabels, ModeLabels, ModeValue, PlaceLabels, ReplayLabels, RoomLabels, RoomValue, StateLabels,
    StateValue,
};

/// Prefix of every name.
const PREFIX: &str = "reprise_controlplane";
/// First bucket of the latency histograms; 16 doublings reach 0.65 s.
const LATENCY_FIRST_SECONDS: f64 = 20e-6;
const LATENCY_BUCKETS: u16 = 16;

/// Handles of all metrics; clones are the same metrics.
#[derive(Clone, Debug)]
pub struct Metrics {
    /// Registrations granted.
    pub registrations: Counter,
    /// Heartbeats.
    pub heartbeats: Family<BeatLabels, Counter>,
    /// Nodes declared dead.
    pub deaths: Counter,
    /// Nodes by state.
    nodes: Family<StateLabels, Gauge>,
    /// Update batches.
    pub updates: Family<UpdateLabels, Counter>,
    /// Changes applied.
    pub changes: Counter,
    /// Lookups answered.
    pub lookups: Counter,
    /// Keys looked up.
    pub lookup_keys: Counter,
    /// Keys looked up that had a replica.
    pub lookup_keys_found: Counter,
    /// Keys looked up whose slot was another member's, or this one's place not certain.
    pub lookup_keys_elsewhere: Counter,
    /// Keys looked up in slots of which some node has not announced its whole inventory.
    pub lookup_keys_partial: Counter,
    /// Keys placed.
    place_keys: Family<PlaceLabels, Counter>,
    /// Keys of chains that gateways asked for.
    pub route_keys: Counter,
    /// Of those, keys whose owner did not answer.
    pub route_keys_unanswered: Counter,
    /// Open watch streams.
    pub watchers: Family<WatchLabels, Gauge>,
    /// Times that a watch stream fell behind.
    pub watch_missed: Family<WatchLabels, Counter>,
    /// Batches of KV events published.
    pub event_batches: Counter,
    /// Batches that slow subscribers were not sent.
    pub event_batches_skipped: Counter,
    /// Connections that were not served.
    pub rejected: RejectedConnections,
    /// Answers to subscribers that had missed batches.
    event_replays: Family<ReplayLabels, Counter>,
    /// Time of calls.
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

    /// Every outcome is there from the first scrape: the first increase of a counter is seen as one.
    fn start_at_zero(&self) {
        for result in [BeatResult::known, BeatResult::returned, BeatResult::unknown] {
            drop(self.heartbeats.get_or_create(&BeatLabels { result }));
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
        registry.register("deaths", "Nodes declared dead after their silence", self.deaths.clone());
        registry.register("nodes", "Nodes by state", self.nodes.clone());
        registry.register("node_modes", "Nodes by what they are for", self.modes.clone());
        registry.register(
            "members",
            "Members of the control plane, as this one sees them",
            self.members.clone(),
        );
        registry.register(
            "member_registered",
            "1 while the registration of this member is certain",
            self.member_registered.clone(),
        );
        registry.register("slots_owned", "Hash slots of this member", self.slots_owned.clone());
        registry.register(
            "slots_partial",
            "Hash slots of this member of which some node has not announced its whole inventory",
            self.slots_partial.clone(),
        );
        registry.register_with_unit(
            "tenants_overcommitted",
            "Bytes reserved by all tenants beyond what the living nodes have",
            Unit::Bytes,
            self.tenants_overcommitted.clone(),
        );
        registry.register("watchers", "Open watch streams", self.watchers.clone());
        registry.register(
            "watch_missed",
            "Times a watch stream fell behind and was told so",
            self.watch_missed.clone(),
        );
        registry.register_with_unit(
            "call",
            "Time of calls until their answer",
            Unit::Seconds,
            self.call.clone(),
        );
    }

    fn register_directory(&self, registry: &mut Registry) {
        registry.register("updates", "Update batches by outcome", self.updates.clone());
        registry.register("changes", "Replica changes applied", self.changes.clone());
        registry.register("lookups", "Lookups answered", self.lookups.clone());
        registry.register("lookup_keys", "Keys looked up", self.lookup_keys.clone());
        registry.register(
            "lookup_keys_found",
            "Keys looked up with a replica",
            self.lookup_keys_found.clone(),
        );
        registry.register(
            "lookup_keys_elsewhere",
            "Keys looked up that another member has to answer",
            self.lookup_keys_elsewhere.clone(),
        );
        registry.register(
            "lookup_keys_partial",
            "Keys looked up in slots of which some node has not announced its whole inventory",
            self.lookup_keys_partial.clone(),
        );
        registry.register("directory_keys", "Distinct keys in the directory", self.directory_keys.clone());
        registry.register("directory_replicas", "Replicas in the directory", self.directory_replicas.clone());
        registry.register(
            "directory_stale_entries",
            "Entries a sweep has yet to remove",
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
        registry.register(
            "place_keys",
            "Keys for which a place was asked, by outcome",
            self.place_keys.clone(),
        );
        registry.register("route_keys", "Keys of prompts that gateways asked for", self.route_keys.clone());
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
            "Batches of KV events that a slow subscriber was not sent",
            self.event_batches_skipped.clone(),
        );
        registry.register("event_replays", "Replays of KV events by outcome", self.event_replays.clone());
    }

    /// A replay ended so.
    pub fn replayed(&self, result: ReplayResult) {
        self.event_replays.get_or_create(&ReplayLabels { result }).inc();
    }

    /// So many keys were placed so.
    pub fn placed(&self, result: PlaceResult, keys: u64) {
        self.place_keys.get_or_create(&PlaceLabels { result }).inc_by(keys);
    }

    /// Sets how many nodes are for what, when somebody asks.
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

    /// A call took this long.
    pub fn took(&self, call: Call, time: Duration) {
        self.call.get_or_create(&CallLabels { call }).observe(time.as_secs_f64());
    }

    /// A heartbeat ended so.
    pub fn beat(&self, result: BeatResult) {
        self.heartbeats.get_or_create(&BeatLabels { result }).inc();
    }

    /// An update batch ended so.
    pub fn updated(&self, result: UpdateResult) {
        self.updates.get_or_create(&UpdateLabels { result }).inc();
    }

    /// By how much tenants are promised more than there is.
    pub fn set_overcommitted(&self, bytes: Amounts) {
        for (room, bytes) in [(RoomValue::dram, bytes.dram), (RoomValue::nvme, bytes.nvme)] {
            let gauge = self.tenants_overcommitted.get_or_create(&RoomLabels { room });
            gauge.set(i64::try_from(bytes).unwrap_or(i64::MAX));
        }
    }

    /// Sets what this member knows of the members, when somebody asks.
    pub fn set_members(&self, shards: &Shards) {
        self.member_registered.set(i64::from(shards.is_registered()));
        let Some(view) = shards.view() else { return };
        self.members.set(i64::try_from(view.members.len()).unwrap_or(i64::MAX));
    }

    /// Sets what is counted only when somebody asks.
    pub fn set_sizes(&self, states: impl Iterator<Item = MemberState>, size: &DirectorySize) {
        let mut counts = [(StateValue::alive, 0), (StateValue::dead, 0), (StateValue::absent, 0)];
        for state in states {
            counts[match state {
                MemberState::Alive => 0,
                MemberState::Dead => 1,
                MemberState::Absent => 2,
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

/// The registry in OpenMetrics text.
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
        metrics.took(Call::lookup, Duration::from_millis(1));
        metrics.beat(BeatResult::known);
        metrics.updated(UpdateResult::applied);
        metrics.watchers.get_or_create(&WatchLabels { of: WatchOf::nodes }).inc();
        metrics.watch_missed.get_or_create(&WatchLabels { of: WatchOf::directory }).inc();
        metrics.set_sizes([MemberState::Alive].into_iter(), &DirectorySize::default());
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
