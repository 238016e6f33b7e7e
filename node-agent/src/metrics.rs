//! Every metric of the agent: name, help, unit, labels.
//!
//! Names are `reprise_agent_<name>`; counters end in `_total`; times are seconds, sizes bytes. Labels are bounded:
//! `phase`, `kind` and `state` by their enums, `device` by the 32 devices that may be open, `tenant` by [`tenants`]. What the
//! core counts is listed in
//! [`CORE`], one line per counter (a test compares), and read from the core at each scrape.
//!
//! Latencies are taken where an effect meets its event (executor, device worker), not in handlers.

mod read_times;
mod tables;
mod tenants;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeLabelSet, EncodeLabelValue, EncodeMetric, LabelValueEncoder,
};
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use reprise_agent_core::effect::DeviceId;

use reprise_buffers::{PageCoverage, PageKind};
use reprise_daemon::rejected::{Listener, RejectedConnections};

use crate::device::DeviceInfo;
pub(crate) use read_times::{Between, ReadTimes, p99};
pub(crate) use tables::{CORE, PEER};
pub(crate) use tenants::TenantRows;

/// 10 µs to 10 s in steps of 1.78 (four a decade).
const LATENCY_BUCKETS: (f64, f64, u16) = (10e-6, 1.778_279, 25);

/// What a latency is the latency of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Phase {
    /// Received to answered.
    Match,
    /// Received to answered.
    Reserve,
    /// Received to readable on the node.
    Commit,
    /// Received to every block placed and its first layer verified.
    LoadFirstLayer,
    /// Received to every layer of every block verified.
    LoadTotal,
    /// Asked to the last layer of a block verified.
    PeerFetch,
    /// Other calls.
    Other,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PhaseLabels {
    phase: Phase,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PageLabels {
    kind: &'static str,
}

/// A [`PageKind`] in a label.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DeviceLabels {
    device: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DeviceInfoLabels {
    device: u8,
    io_engine: String,
    caching: String,
}

/// How a number is exported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Only grows.
    Counter,
    /// Goes up and down.
    Gauge,
}

/// A number that somebody else counts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Described {
    /// Its name there, and here.
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    pub(crate) help: &'static str,
}

/// All metrics.
pub(crate) struct Metrics {
    registry: Registry,
    phases: Family<PhaseLabels, Histogram, fn() -> Histogram>,
    devices: DeviceFamilies,
    /// For who judges devices by them.
    read_times: Mutex<BTreeMap<DeviceId, Arc<ReadTimes>>>,
    inbox_waiting: Gauge,
    rejected: RejectedConnections,
    snapshot: std::sync::Arc<Snapshot>,
}

#[derive(Clone)]
struct DeviceFamilies {
    read_seconds: Family<DeviceLabels, Histogram, fn() -> Histogram>,
    write_seconds: Family<DeviceLabels, Histogram, fn() -> Histogram>,
    sync_seconds: Family<DeviceLabels, Histogram, fn() -> Histogram>,
    read_bytes: Family<DeviceLabels, Counter>,
    written_bytes: Family<DeviceLabels, Counter>,
    reads_queued: Family<DeviceLabels, Gauge>,
    read_bytes_queued: Family<DeviceLabels, Gauge>,
    writes_queued: Family<DeviceLabels, Gauge>,
    write_bytes_queued: Family<DeviceLabels, Gauge>,
    in_flight: Family<DeviceLabels, Gauge>,
    lost: Family<DeviceLabels, Gauge>,
    recovery_seconds: Family<DeviceLabels, Gauge<f64, std::sync::atomic::AtomicU64>>,
    recovery_records: Family<DeviceLabels, Gauge>,
    info: Family<DeviceInfoLabels, Gauge>,
}

/// The metrics of one device, for its worker: no look-up per operation.
#[derive(Clone)]
pub(crate) struct DeviceMetrics {
    read_times: Arc<ReadTimes>,
    read_seconds: Histogram,
    write_seconds: Histogram,
    sync_seconds: Histogram,
    read_bytes: Counter,
    written_bytes: Counter,
    reads_queued: Gauge,
    read_bytes_queued: Gauge,
    writes_queued: Gauge,
    write_bytes_queued: Gauge,
    in_flight: Gauge,
}

/// What waits for a device, and what it has under way.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Queued {
    /// Reads of pieces of blocks.
    pub(crate) reads: u64,
    pub(crate) read_bytes: u64,
    /// Writes and syncs.
    pub(crate) writes: u64,
    pub(crate) write_bytes: u64,
    /// Operations that the device has.
    pub(crate) in_flight: u64,
}

/// Numbers that others own, as of the last scrape.
#[derive(Debug, Default)]
struct Snapshot {
    numbers: Mutex<Vec<Number>>,
    tenants: Mutex<TenantRows>,
}

/// A number of somebody else.
#[derive(Clone, Debug)]
pub(crate) struct Number {
    pub(crate) name: String,
    pub(crate) help: &'static str,
    pub(crate) kind: Kind,
    pub(crate) value: u64,
}

/// Pairs values with their descriptions; a value that is not described is left out (tests see to it that none is).
pub(crate) fn describe(
    prefix: &str,
    table: &[Described],
    values: impl Iterator<Item = (&'static str, u64)>,
) -> Vec<Number> {
    let number = |(name, value): (&str, u64)| {
        let Described { kind, help, .. } = *table.iter().find(|described| described.name == name)?;
        Some(Number { name: format!("{prefix}{name}"), help, kind, value })
    };
    values.filter_map(number).collect()
}

impl EncodeLabelValue for Phase {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), std::fmt::Error> {
        let name = match self {
            Phase::Match => "match",
            Phase::Reserve => "reserve",
            Phase::Commit => "commit",
            Phase::LoadFirstLayer => "load_first_layer",
            Phase::LoadTotal => "load_total",
            Phase::PeerFetch => "peer_fetch",
            Phase::Other => "other",
        };
        name.encode(encoder)
    }
}

fn page_label(kind: PageKind) -> &'static str {
    match kind {
        PageKind::HugeTlb => "hugetlb",
        PageKind::TransparentHuge => "transparent",
        PageKind::Small => "small",
    }
}

fn latency() -> Histogram {
    let (start, factor, length) = LATENCY_BUCKETS;
    Histogram::new(exponential_buckets(start, factor, length))
}

impl Metrics {
    /// `pages` as the arena measured them.
    pub(crate) fn new(node: &str, pages: PageCoverage) -> Metrics {
        let mut registry = Registry::with_prefix("reprise_agent");
        let info = vec![("version", env!("CARGO_PKG_VERSION").to_owned()), ("node", node.to_owned())];
        registry.register("build", "Version and node name", Info::new(info));
        let page_bytes: Family<PageLabels, Gauge> = Family::default();
        registry.register("arena_page_bytes", "Bytes of the arena by kind of page", page_bytes.clone());
        for kind in [PageKind::HugeTlb, PageKind::TransparentHuge, PageKind::Small] {
            let bytes = i64::try_from(pages.bytes_of(kind)).unwrap_or(i64::MAX);
            page_bytes.get_or_create(&PageLabels { kind: page_label(kind) }).set(bytes);
        }
        let phases: Family<PhaseLabels, Histogram, fn() -> Histogram> = Family::new_with_constructor(latency);
        registry.register("phase_seconds", "Latency by phase, from receipt", phases.clone());
        let inbox_waiting = Gauge::default();
        registry.register("inbox_waiting", "Inputs waiting for the core", inbox_waiting.clone());
        let devices = DeviceFamilies::register(&mut registry);
        let rejected = RejectedConnections::register(&mut registry, &[Listener::Admin, Listener::Sessions]);
        let snapshot = std::sync::Arc::new(Snapshot::default());
        registry.register_collector(Box::new(snapshot.clone()));
        Metrics { registry, phases, devices, read_times: Mutex::default(), inbox_waiting, rejected, snapshot }
    }

    /// Counts of connections that were not served. Those of peers are the transport's.
    pub(crate) fn rejected(&self) -> &RejectedConnections {
        &self.rejected
    }

    /// Notes a latency.
    pub(crate) fn phase(&self, phase: Phase, latency: Duration) {
        self.phases.get_or_create(&PhaseLabels { phase }).observe(latency.as_secs_f64());
    }

    /// The metrics of one device.
    pub(crate) fn device(&self, device: DeviceId) -> DeviceMetrics {
        let labels = DeviceLabels { device: device.0 };
        // There from the start: an alert on it needs the zero.
        drop(self.devices.lost.get_or_create(&labels));
        let DeviceFamilies { read_seconds, write_seconds, sync_seconds, read_bytes, written_bytes, .. } =
            &self.devices;
        let mut read_times = self.read_times.lock().unwrap_or_else(PoisonError::into_inner);
        DeviceMetrics {
            read_times: Arc::clone(read_times.entry(device).or_default()),
            read_seconds: read_seconds.get_or_create(&labels).clone(),
            write_seconds: write_seconds.get_or_create(&labels).clone(),
            sync_seconds: sync_seconds.get_or_create(&labels).clone(),
            read_bytes: read_bytes.get_or_create(&labels).clone(),
            written_bytes: written_bytes.get_or_create(&labels).clone(),
            reads_queued: self.devices.reads_queued.get_or_create(&labels).clone(),
            read_bytes_queued: self.devices.read_bytes_queued.get_or_create(&labels).clone(),
            writes_queued: self.devices.writes_queued.get_or_create(&labels).clone(),
            write_bytes_queued: self.devices.write_bytes_queued.get_or_create(&labels).clone(),
            in_flight: self.devices.in_flight.get_or_create(&labels).clone(),
        }
    }

    /// How long reads of a device took, while it is open.
    pub(crate) fn read_times(&self, device: DeviceId) -> Option<Arc<ReadTimes>> {
        self.read_times.lock().unwrap_or_else(PoisonError::into_inner).get(&device).cloned()
    }

    /// Notes what opening a device took.
    pub(crate) fn device_opened(&self, device: DeviceId, info: &DeviceInfo) {
        let labels = DeviceLabels { device: device.0 };
        self.devices.recovery_seconds.get_or_create(&labels).set(info.recovery.took.as_secs_f64());
        let records = i64::try_from(info.recovery.records).unwrap_or(i64::MAX);
        self.devices.recovery_records.get_or_create(&labels).set(records);
        self.devices.info.get_or_create(&info_labels(device, info)).set(1);
    }

    /// Notes that a device is lost.
    pub(crate) fn device_lost(&self, device: DeviceId) {
        self.devices.lost.get_or_create(&DeviceLabels { device: device.0 }).set(1);
    }

    /// Forgets a device that was closed: its number may be given to another.
    pub(crate) fn device_closed(&self, device: DeviceId, info: &DeviceInfo) {
        let labels = DeviceLabels { device: device.0 };
        self.read_times.lock().unwrap_or_else(PoisonError::into_inner).remove(&device);
        let families = &self.devices;
        for latencies in [&families.read_seconds, &families.write_seconds, &families.sync_seconds] {
            latencies.remove(&labels);
        }
        families.read_bytes.remove(&labels);
        families.written_bytes.remove(&labels);
        let DeviceFamilies { reads_queued, read_bytes_queued, writes_queued, write_bytes_queued, .. } =
            families;
        let gauges = [reads_queued, read_bytes_queued, writes_queued, write_bytes_queued];
        for gauge in
            gauges.into_iter().chain([&families.in_flight, &families.lost, &families.recovery_records])
        {
            gauge.remove(&labels);
        }
        families.recovery_seconds.remove(&labels);
        families.info.remove(&info_labels(device, info));
    }

    /// Everything in the text format. `numbers` are those of the core, the transport and the directory client, now.
    pub(crate) fn render(
        &self,
        numbers: Vec<Number>,
        tenants: TenantRows,
        inbox_waiting: usize,
    ) -> Result<String, std::fmt::Error> {
        self.inbox_waiting.set(i64::try_from(inbox_waiting).unwrap_or(i64::MAX));
        *self.snapshot.numbers.lock().unwrap_or_else(PoisonError::into_inner) = numbers;
        *self.snapshot.tenants.lock().unwrap_or_else(PoisonError::into_inner) = tenants;
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.registry)?;
        Ok(text)
    }
}

fn info_labels(device: DeviceId, info: &DeviceInfo) -> DeviceInfoLabels {
    let (io_engine, caching) = (info.engine.to_string(), format!("{:?}", info.caching).to_lowercase());
    DeviceInfoLabels { device: device.0, io_engine, caching }
}

impl DeviceFamilies {
    fn register(registry: &mut Registry) -> DeviceFamilies {
        let histogram = || Family::new_with_constructor(latency as fn() -> Histogram);
        let families = DeviceFamilies {
            read_seconds: histogram(),
            write_seconds: histogram(),
            sync_seconds: histogram(),
            read_bytes: Family::default(),
            written_bytes: Family::default(),
            reads_queued: Family::default(),
            read_bytes_queued: Family::default(),
            writes_queued: Family::default(),
            write_bytes_queued: Family::default(),
            in_flight: Family::default(),
            lost: Family::default(),
            recovery_seconds: Family::default(),
            recovery_records: Family::default(),
            info: Family::default(),
        };
        let all = families.clone();
        registry.register("device_read_seconds", "One read, from submission to completion", all.read_seconds);
        registry.register(
            "device_write_seconds",
            "One write, from submission to completion",
            all.write_seconds,
        );
        registry.register("device_sync_seconds", "One sync of data or journal", all.sync_seconds);
        registry.register("device_read_bytes", "Bytes read, headers included", all.read_bytes);
        registry.register(
            "device_written_bytes",
            "Bytes written, headers and journal included",
            all.written_bytes,
        );
        registry.register(
            "device_reads_queued",
            "Reads (pieces of blocks) waiting for the device",
            all.reads_queued,
        );
        registry.register(
            "device_read_bytes_queued",
            "Bytes of reads waiting for the device, headers included",
            all.read_bytes_queued,
        );
        registry.register(
            "device_writes_queued",
            "Writes and syncs waiting for the device",
            all.writes_queued,
        );
        registry.register(
            "device_write_bytes_queued",
            "Bytes of writes waiting for the device, headers and journal included",
            all.write_bytes_queued,
        );
        registry.register("device_in_flight", "Operations under way at the device", all.in_flight);
        registry.register("device_lost", "1 when the device is lost", all.lost);
        registry.register("device_recovery_seconds", "Time to open the pool at start", all.recovery_seconds);
        registry.register("device_recovery_records", "Journal records read at start", all.recovery_records);
        registry.register("device_info", "I/O engine and caching of the device; always 1", all.info);
        families
    }
}

impl DeviceMetrics {
    pub(crate) fn read(&self, bytes: u64, latency: Duration) {
        self.read_bytes.inc_by(bytes);
        self.read_seconds.observe(latency.as_secs_f64());
        self.read_times.note(latency);
    }

    pub(crate) fn write(&self, bytes: u64, latency: Duration) {
        self.written_bytes.inc_by(bytes);
        self.write_seconds.observe(latency.as_secs_f64());
    }

    pub(crate) fn sync(&self, latency: Duration) {
        self.sync_seconds.observe(latency.as_secs_f64());
    }

    pub(crate) fn queue(&self, queued: &Queued) {
        let Queued { reads, read_bytes, writes, write_bytes, in_flight } = *queued;
        for (gauge, value) in [
            (&self.reads_queued, reads),
            (&self.read_bytes_queued, read_bytes),
            (&self.writes_queued, writes),
            (&self.write_bytes_queued, write_bytes),
            (&self.in_flight, in_flight),
        ] {
            gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
        }
    }
}

impl Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let numbers = self.numbers.lock().unwrap_or_else(PoisonError::into_inner);
        for Number { name, help, kind, value } in numbers.iter() {
            match kind {
                Kind::Counter => {
                    // The encoder appends `_total` to counters itself.
                    let name = name.strip_suffix("_total").unwrap_or(name);
                    let metric = ConstCounter::new(*value);
                    let encoder = encoder.encode_descriptor(
                        name,
                        help,
                        None,
                        prometheus_client::metrics::MetricType::Counter,
                    )?;
                    metric.encode(encoder)?;
                }
                Kind::Gauge => {
                    let metric = ConstGauge::new(i64::try_from(*value).unwrap_or(i64::MAX));
                    let encoder = encoder.encode_descriptor(
                        name,
                        help,
                        None,
                        prometheus_client::metrics::MetricType::Gauge,
                    )?;
                    metric.encode(encoder)?;
                }
            }
        }
        self.tenants.lock().unwrap_or_else(PoisonError::into_inner).encode(&mut encoder)
    }
}

#[cfg(test)]
mod tests {
    use reprise_agent_core::agent::Counters;

    use super::*;

    #[test]
    fn every_counter_of_the_core_is_described_once_and_in_order() {
        let described: Vec<&str> = CORE.iter().map(|metric| metric.name).collect();
        let counted: Vec<&str> = Counters::default().fields().map(|(name, _)| name).collect();
        assert_eq!(described, counted);
    }

    #[test]
    fn every_total_of_the_transport_is_described_once_and_in_order() {
        let described: Vec<&str> = PEER.iter().map(|metric| metric.name).collect();
        let stats = reprise_transport::TransportStats::default();
        let counted: Vec<&str> = stats.fields().map(|(name, _)| name).collect();
        assert_eq!(described, counted);
    }

    #[test]
    fn a_scrape_has_names_help_and_values() {
        let pages = PageCoverage { bytes: 10 << 20, hugetlb_bytes: 0, transparent_bytes: 8 << 20 };
        let metrics = Metrics::new("n1", pages);
        metrics.phase(Phase::Match, Duration::from_micros(120));
        metrics.device(DeviceId(0)).read(4096, Duration::from_millis(1));
        let number = Number { name: "loads".to_owned(), help: "Loads", kind: Kind::Counter, value: 7 };
        let text = metrics.render(vec![number], TenantRows::default(), 3).expect("renders");
        for line in [
            "reprise_agent_loads_total 7",
            "reprise_agent_phase_seconds_count{phase=\"match\"} 1",
            "reprise_agent_device_read_bytes_total{device=\"0\"} 4096",
            "reprise_agent_inbox_waiting 3",
            "# HELP reprise_agent_device_lost",
            "reprise_agent_arena_page_bytes{kind=\"transparent\"} 8388608",
            "reprise_agent_arena_page_bytes{kind=\"small\"} 2097152",
            "reprise_agent_arena_page_bytes{kind=\"hugetlb\"} 0",
        ] {
            assert!(text.contains(line), "no '{line}' in:\n{text}");
        }
    }
}
