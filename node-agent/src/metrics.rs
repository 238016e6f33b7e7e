//! All metrics of the agent: name, help, unit, labels.
//!
//! Names are `reprise_agent_<name>`; counters end in `_total`; times are seconds, sizes bytes. Labels are
//! bounded: `phase`, `kind`, `state`, `backend` and `direction` by their enums, `device` by the maximum of 32 open devices,
//! `tenant` by [`tenants`]. [`CORE`] lists the core's counters, one line each (a test compares); they are
//! read from the core at each scrape.
//!
//! Latencies are measured where an effect meets its event (executor, device worker), not in handlers.

mod backends;
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
use reprise_daemon::certificates::Certificates;
use reprise_daemon::rejected_connections::{Listener, RejectedConnections};

use crate::device::DeviceInfo;
use backends::BackendMetrics;
pub(crate) use backends::{BlockCount, BlockPath, Direction};
pub(crate) use read_times::{ReadTimes, TimeRange, p99};
pub(crate) use tables::{CORE, PEER, QUEUE_GRANTS};
pub(crate) use tenants::TenantRows;

/// Histogram buckets from 10 µs to 10 s, a factor of 1.78 apart (four per decade).
const LATENCY_BUCKETS: (f64, f64, u16) = (10e-6, 1.778_279, 25);

/// Phases with a latency.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Phase {
    /// From receipt to reply.
    Match,
    /// From receipt to reply.
    Reserve,
    /// From receipt until the blocks are readable on the node.
    Commit,
    /// From receipt until every block is placed and its first layer verified.
    LoadFirstLayer,
    /// From receipt until every layer of every block is verified.
    LoadTotal,
    /// From the request until the last layer of a block is verified.
    PeerFetch,
    /// All other requests of sessions.
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

/// Label of per-device metrics.
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

/// Type of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A counter that only increases.
    Counter,
    /// Value that may decrease.
    Gauge,
}

/// Description of a value that another component counts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MetricInfo {
    /// Name of the counter and of the metric.
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    pub(crate) help: &'static str,
}

/// All metrics of the agent.
pub(crate) struct Metrics {
    registry: Registry,
    phases: Family<PhaseLabels, Histogram, fn() -> Histogram>,
    backends: BackendMetrics,
    devices: DeviceFamilies,
    drive_amplification: Gauge,
    /// Read latencies for the reconciler's latency monitor.
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
    drive_written_bytes: Family<DeviceLabels, Gauge>,
    lost: Family<DeviceLabels, Gauge>,
    read_only: Family<DeviceLabels, Gauge>,
    recovery_seconds: Family<DeviceLabels, Gauge<f64, std::sync::atomic::AtomicU64>>,
    recovery_records: Family<DeviceLabels, Gauge>,
    info: Family<DeviceInfoLabels, Gauge>,
}

/// The metrics of one device for its worker, resolved once instead of per operation.
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

/// Queued and in-flight operations of a device.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct QueueDepths {
    /// Reads of pieces of blocks.
    pub(crate) reads: u64,
    pub(crate) read_bytes: u64,
    pub(crate) writes: u64,
    pub(crate) write_bytes: u64,
    /// Operations submitted to the device.
    pub(crate) in_flight: u64,
}

/// Values of other components, as of the last scrape.
#[derive(Debug, Default)]
struct Snapshot {
    numbers: Mutex<Vec<MetricValue>>,
    tenants: Mutex<TenantRows>,
}

/// A value that another component counts.
#[derive(Clone, Debug)]
pub(crate) struct MetricValue {
    pub(crate) name: String,
    pub(crate) help: &'static str,
    pub(crate) kind: Kind,
    pub(crate) value: u64,
}

/// Pairs values with their descriptions. Values without one are omitted; tests ensure that every value has
/// one.
pub(crate) fn describe(
    prefix: &str,
    table: &[MetricInfo],
    values: impl Iterator<Item = (&'static str, u64)>,
) -> Vec<MetricValue> {
    let number = |(name, value): (&str, u64)| {
        let MetricInfo { kind, help, .. } = *table.iter().find(|described| described.name == name)?;
        Some(MetricValue { name: format!("{prefix}{name}"), help, kind, value })
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
    /// Creates the metrics. `pages` is the measured page coverage of the arena.
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
        let backends = BackendMetrics::register(&mut registry);
        let devices = DeviceFamilies::register(&mut registry);
        let drive_amplification = Gauge::default();
        registry.register(
            "drive_amplification_permille",
            "Bytes that the drives count as written, for 1,000 payload bytes that became durable; 0 if not all of them count",
            drive_amplification.clone(),
        );
        let rejected = RejectedConnections::register(&mut registry, &[Listener::Admin, Listener::Sessions]);
        let snapshot = std::sync::Arc::new(Snapshot::default());
        registry.register_collector(Box::new(snapshot.clone()));
        let read_times = Mutex::default();
        Metrics {
            registry,
            phases,
            backends,
            devices,
            drive_amplification,
            read_times,
            inbox_waiting,
            rejected,
            snapshot,
        }
    }

    /// Adds the metrics of certificates.
    pub(crate) fn register_certificates(&mut self, certificates: &Certificates) {
        certificates.register(&mut self.registry);
    }

    /// Returns the counters of rejected connections; the transport counts those of peers.
    pub(crate) fn rejected(&self) -> &RejectedConnections {
        &self.rejected
    }

    /// Records the latency of a phase.
    pub(crate) fn phase(&self, phase: Phase, latency: Duration) {
        self.phases.get_or_create(&PhaseLabels { phase }).observe(latency.as_secs_f64());
    }

    /// Counts blocks that a session has saved or loads.
    pub(crate) fn blocks_moved(&self, path: BlockPath, direction: Direction, moved: BlockCount) {
        self.backends.moved(path, direction, moved);
    }

    /// Records the backends that the open sessions state.
    pub(crate) fn session_backends(&self, stated: impl Iterator<Item = BlockPath>) {
        self.backends.set_sessions(stated);
    }

    /// Returns the metrics of one device.
    pub(crate) fn device(&self, device: DeviceId) -> DeviceMetrics {
        let labels = DeviceLabels { device: device.0 };
        // Created immediately, since an alert on this metric needs the value 0.
        drop(self.devices.lost.get_or_create(&labels));
        drop(self.devices.read_only.get_or_create(&labels));
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

    /// Returns the read latencies of an open device.
    pub(crate) fn read_times(&self, device: DeviceId) -> Option<Arc<ReadTimes>> {
        self.read_times.lock().unwrap_or_else(PoisonError::into_inner).get(&device).cloned()
    }

    /// Records the recovery of a device.
    pub(crate) fn device_opened(&self, device: DeviceId, info: &DeviceInfo) {
        let labels = DeviceLabels { device: device.0 };
        self.devices.recovery_seconds.get_or_create(&labels).set(info.recovery.took.as_secs_f64());
        let records = i64::try_from(info.recovery.records).unwrap_or(i64::MAX);
        self.devices.recovery_records.get_or_create(&labels).set(records);
        self.devices.info.get_or_create(&info_labels(device, info)).set(1);
    }

    /// Records the bytes that a drive counts as written since it was opened.
    pub(crate) fn drive_written(&self, device: DeviceId, bytes: u64) {
        let gauge =
            self.devices.drive_written_bytes.get_or_create(&DeviceLabels { device: device.0 }).clone();
        gauge.set(i64::try_from(bytes).unwrap_or(i64::MAX));
    }

    /// Records the bytes that all drives count as written for 1,000 payload bytes.
    pub(crate) fn drive_amplification(&self, permille: u64) {
        self.drive_amplification.set(i64::try_from(permille).unwrap_or(i64::MAX));
    }

    /// Records the loss of a device.
    pub(crate) fn device_lost(&self, device: DeviceId) {
        self.devices.lost.get_or_create(&DeviceLabels { device: device.0 }).set(1);
    }

    /// Records that a device rejects writes.
    pub(crate) fn device_read_only(&self, device: DeviceId) {
        self.devices.read_only.get_or_create(&DeviceLabels { device: device.0 }).set(1);
    }

    /// Removes the metrics of a closed device, whose number may be reused.
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
        for gauge in gauges.into_iter().chain([
            &families.in_flight,
            &families.drive_written_bytes,
            &families.lost,
            &families.read_only,
            &families.recovery_records,
        ]) {
            gauge.remove(&labels);
        }
        families.recovery_seconds.remove(&labels);
        families.info.remove(&info_labels(device, info));
    }

    /// Renders all metrics in the text format. `numbers` are the current values of core, transport and
    /// directory client.
    pub(crate) fn render(
        &self,
        numbers: Vec<MetricValue>,
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
    let (io_engine, caching) = (info.engine_name(), format!("{:?}", info.caching).to_lowercase());
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
            drive_written_bytes: Family::default(),
            lost: Family::default(),
            read_only: Family::default(),
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
        registry.register("device_read_bytes", "Bytes read, including headers", all.read_bytes);
        registry.register(
            "device_written_bytes",
            "Bytes written, including headers and journal",
            all.written_bytes,
        );
        registry.register(
            "device_reads_queued",
            "Reads (pieces of blocks) waiting for the device",
            all.reads_queued,
        );
        registry.register(
            "device_read_bytes_queued",
            "Bytes of reads waiting for the device, including headers",
            all.read_bytes_queued,
        );
        let help = "Writes and syncs waiting for the device";
        registry.register("device_writes_queued", help, all.writes_queued);
        registry.register(
            "device_write_bytes_queued",
            "Bytes of writes waiting for the device, including headers and journal",
            all.write_bytes_queued,
        );
        registry.register("device_in_flight", "Operations in flight at the device", all.in_flight);
        registry.register(
            "device_drive_written_bytes",
            "Bytes that the drive counts as written since it was opened (SMART)",
            all.drive_written_bytes,
        );
        registry.register("device_lost", "1 if the device is lost", all.lost);
        registry.register(
            "device_read_only",
            "1 if the device rejects writes; its blocks are still read",
            all.read_only,
        );
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
        self.read_times.record(latency);
    }

    pub(crate) fn write(&self, bytes: u64, latency: Duration) {
        self.written_bytes.inc_by(bytes);
        self.write_seconds.observe(latency.as_secs_f64());
    }

    pub(crate) fn sync(&self, latency: Duration) {
        self.sync_seconds.observe(latency.as_secs_f64());
    }

    pub(crate) fn queue(&self, queued: &QueueDepths) {
        let QueueDepths { reads, read_bytes, writes, write_bytes, in_flight } = *queued;
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
        for MetricValue { name, help, kind, value } in numbers.iter() {
            match kind {
                Kind::Counter => {
                    // The encoder appends `_total` to counters.
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
    use reprise_agent_core::Counters;

    use super::*;

    #[test]
    fn core_counters_are_described_once_and_in_order() {
        let described: Vec<&str> = CORE.iter().map(|metric| metric.name).collect();
        let counted: Vec<&str> = Counters::default().fields().map(|(name, _)| name).collect();
        assert_eq!(described, counted);
    }

    #[test]
    fn transport_totals_are_described_once_and_in_order() {
        let described: Vec<&str> = PEER.iter().map(|metric| metric.name).collect();
        let stats = reprise_transport::TransportStats::default();
        let counted: Vec<&str> = stats.fields().map(|(name, _)| name).collect();
        assert_eq!(described, counted);
    }

    #[test]
    fn scrape_contains_names_help_and_values() {
        let pages = PageCoverage { bytes: 10 << 20, hugetlb_bytes: 0, transparent_bytes: 8 << 20 };
        let metrics = Metrics::new("n1", pages);
        metrics.phase(Phase::Match, Duration::from_micros(120));
        metrics.device(DeviceId(0)).read(4096, Duration::from_millis(1));
        let number = MetricValue { name: "loads".to_owned(), help: "Loads", kind: Kind::Counter, value: 7 };
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
            assert!(text.contains(line), "missing '{line}' in:\n{text}");
        }
    }
}
