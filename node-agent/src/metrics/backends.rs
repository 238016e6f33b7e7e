//! Metrics of the backends that move the blocks of sessions. All their values exist from the start.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use reprise_policy::session::TransferBackend;

/// What moves a block between an engine and its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlockPath {
    /// The client copies it out of or into the arena.
    Arena,
    /// A client moves it from or to an extent, and has not stated a backend.
    Unstated,
    Backend(TransferBackend),
}

/// Direction of a block, as the engine sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Save,
    Load,
    /// To an extent that is pinned for the client, which may read it. The agent does not see whether it does.
    Pin,
}

/// Blocks and their payload bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockCount {
    pub(crate) blocks: u64,
    pub(crate) bytes: u64,
}

const PATHS: usize = TransferBackend::ALL.len() + 2;

impl BlockPath {
    /// Returns all paths, each at its index.
    fn all() -> impl Iterator<Item = BlockPath> {
        let backends = TransferBackend::ALL.into_iter().map(BlockPath::Backend);
        [BlockPath::Arena, BlockPath::Unstated].into_iter().chain(backends)
    }

    fn index(self) -> usize {
        match self {
            BlockPath::Arena => 0,
            BlockPath::Unstated => 1,
            BlockPath::Backend(backend) => usize::from(backend.number()) + 1,
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            BlockPath::Arena => "arena",
            BlockPath::Unstated => "unstated",
            BlockPath::Backend(backend) => backend.name(),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct BackendLabels {
    backend: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TrafficLabels {
    backend: &'static str,
    direction: &'static str,
}

/// Sessions and blocks by backend.
pub(super) struct BackendMetrics {
    /// By index of the path. No session has an unstated path.
    sessions: [Gauge; PATHS],
    /// Blocks and bytes by index of the path, then of the direction.
    traffic: [[(Counter, Counter); 3]; PATHS],
}

impl BackendMetrics {
    pub(super) fn register(registry: &mut Registry) -> BackendMetrics {
        let sessions: Family<BackendLabels, Gauge> = Family::default();
        let blocks: Family<TrafficLabels, Counter> = Family::default();
        let bytes: Family<TrafficLabels, Counter> = Family::default();
        registry.register(
            "sessions_by_backend",
            "Open sessions by the backend that they state; without one, blocks take the arena",
            sessions.clone(),
        );
        registry.register(
            "session_blocks",
            "Blocks that sessions have committed or loaded, or pinned to read them themselves, by the backend that moves them",
            blocks.clone(),
        );
        registry.register("session_bytes", "Payload bytes of these blocks", bytes.clone());
        let mut paths = BlockPath::all();
        let traffic = std::array::from_fn(|_| {
            let backend = paths.next().expect("a path for each index").name();
            ["save", "load", "pin"].map(|direction| {
                let labels = TrafficLabels { backend, direction };
                (blocks.get_or_create(&labels).clone(), bytes.get_or_create(&labels).clone())
            })
        });
        let mut paths = BlockPath::all();
        let sessions = std::array::from_fn(|_| match paths.next().expect("a path for each index") {
            BlockPath::Unstated => Gauge::default(),
            path => sessions.get_or_create(&BackendLabels { backend: path.name() }).clone(),
        });
        BackendMetrics { sessions, traffic }
    }

    /// Replaces the numbers of sessions.
    pub(super) fn set_sessions(&self, stated: impl Iterator<Item = BlockPath>) {
        let mut counts = [0_i64; PATHS];
        for backend in stated {
            counts[backend.index()] += 1;
        }
        for (gauge, count) in self.sessions.iter().zip(counts) {
            gauge.set(count);
        }
    }

    /// Counts blocks of a session.
    pub(super) fn moved(&self, path: BlockPath, direction: Direction, moved: BlockCount) {
        let (counted_blocks, counted_bytes) = &self.traffic[path.index()][direction as usize];
        counted_blocks.inc_by(moved.blocks);
        counted_bytes.inc_by(moved.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_have_their_index_and_distinct_names() {
        let names: std::collections::BTreeSet<&str> = BlockPath::all().map(BlockPath::name).collect();
        assert_eq!(names.len(), PATHS);
        for (index, path) in BlockPath::all().enumerate() {
            assert_eq!(path.index(), index, "{path:?}");
        }
    }

    #[test]
    fn sessions_and_traffic_have_the_label_of_their_backend() {
        let mut registry = Registry::default();
        let metrics = BackendMetrics::register(&mut registry);
        let gds = BlockPath::Backend(TransferBackend::Gds);
        metrics.set_sessions([gds, BlockPath::Arena, gds].into_iter());
        metrics.moved(gds, Direction::Load, BlockCount { blocks: 3, bytes: 12_288 });
        metrics.moved(gds, Direction::Pin, BlockCount { blocks: 2, bytes: 8192 });
        metrics.moved(BlockPath::Arena, Direction::Save, BlockCount { blocks: 1, bytes: 4096 });
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).expect("renders");
        for line in [
            "sessions_by_backend{backend=\"gds\"} 2",
            "sessions_by_backend{backend=\"arena\"} 1",
            "sessions_by_backend{backend=\"gpu-queue\"} 0",
            "session_blocks_total{backend=\"gds\",direction=\"load\"} 3",
            "session_bytes_total{backend=\"gds\",direction=\"load\"} 12288",
            "session_blocks_total{backend=\"gds\",direction=\"pin\"} 2",
            "session_bytes_total{backend=\"arena\",direction=\"save\"} 4096",
            "session_blocks_total{backend=\"gpu-queue-emulated\",direction=\"save\"} 0",
        ] {
            assert!(text.contains(line), "missing '{line}' in:\n{text}");
        }
    }
}
