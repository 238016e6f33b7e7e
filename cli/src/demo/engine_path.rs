//! The path of blocks in the demo: the sizes that rings need, and the report of what passed through them.

use anyhow::ensure;
use reprise_policy::{ByteSize, Layout};
use reprise_testkit::cluster::PoolDevice;
use reprise_testkit::engine::{EnginePath, HitCounts, RingTraffic};
use reprise_testkit::output::bytes_text;
use serde::Serialize;

use crate::config::DemoConfig;

/// Size of a page: rings transfer objects of whole pages.
const PAGE_BYTES: u64 = 4096;

/// What passed through rings, and what did not.
#[derive(Clone, Debug, Serialize)]
pub(super) struct RingReport {
    /// Backend that ran; its name states an emulation.
    pub(super) backend: String,
    #[serde(flatten)]
    pub(super) traffic: RingTraffic,
    /// Blocks that the arena loaded during the replays, because they were in DRAM of the node or on another node.
    pub(super) arena: ArenaLoads,
}

/// Loads of blocks that rings cannot reach.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct ArenaLoads {
    own_dram: u64,
    peer_dram: u64,
    peer_nvme: u64,
}

/// Returns the default sizes for a path.
pub(super) fn defaults(path: EnginePath) -> DemoConfig {
    match path {
        EnginePath::Arena => DemoConfig::default(),
        // Objects of a page need blocks of 256 KiB, four times those of the default. Half of the requests are enough for
        // hits in every tier: 375 had one hit in DRAM of peers, 750 have more than 100.
        EnginePath::Rings => DemoConfig { requests: 750, scale: 256, ..DemoConfig::default() },
    }
}

/// Replaces the default sizes of a configuration by those for a path.
pub(super) fn over(path: EnginePath, file: &DemoConfig) -> DemoConfig {
    let (usual, own) = (DemoConfig::default(), defaults(path));
    let bytes = |set: ByteSize, usual: ByteSize, own: ByteSize| if set == usual { own } else { set };
    DemoConfig {
        requests: if file.requests == usual.requests { own.requests } else { file.requests },
        scale: if file.scale == usual.scale { own.scale } else { file.scale },
        arena: bytes(file.arena, usual.arena, own.arena),
        pool: bytes(file.pool, usual.pool, own.pool),
    }
}

/// Checks that a path can move objects of the layout.
pub(super) fn check_objects(path: EnginePath, scale: u32, layout: &Layout) -> anyhow::Result<()> {
    let object_bytes = layout.object_bytes();
    ensure!(
        path == EnginePath::Arena || object_bytes.is_multiple_of(PAGE_BYTES),
        "invalid --scale {scale} with --engine-path rings: objects have {}, and rings transfer whole pages of {}: use \
         --scale {} or less",
        bytes_text(object_bytes),
        bytes_text(PAGE_BYTES),
        defaults(EnginePath::Rings).scale
    );
    Ok(())
}

/// Returns the kind of device that a path needs.
pub(super) fn device(path: EnginePath) -> PoolDevice {
    match path {
        EnginePath::Arena => PoolDevice::File,
        EnginePath::Rings => PoolDevice::EmulatedController,
    }
}

impl RingReport {
    /// Creates the report of a backend: all its traffic, and the hits of the replays.
    pub(super) fn new(backend: &str, traffic: RingTraffic, hits: &HitCounts) -> RingReport {
        let HitCounts { own_dram, peer_dram, peer_nvme, .. } = *hits;
        RingReport {
            backend: backend.to_owned(),
            traffic,
            arena: ArenaLoads { own_dram, peer_dram, peer_nvme },
        }
    }

    /// Returns the report as text.
    pub(super) fn text(&self) -> String {
        let RingReport { backend, traffic, arena } = self;
        format!(
            "Backend: {backend}. Blocks through rings: {} loaded from own NVMe and {} saved, by {} batches with {} \
             contexts; {} read and {} written.\n\
             Blocks through the arena, which rings cannot reach: {} in own DRAM, {} in peer DRAM, {} on peer NVMe; {} on \
             own NVMe that rings could not read; {} saved without a free extent.",
            traffic.blocks_loaded,
            traffic.blocks_saved,
            traffic.batches,
            traffic.contexts,
            bytes_text(traffic.bytes_read),
            bytes_text(traffic.bytes_written),
            arena.own_dram,
            arena.peer_dram,
            arena.peer_nvme,
            traffic.loads_by_arena,
            traffic.saves_by_arena,
        )
    }

    /// Returns an error if rings have moved nothing: the demo would not have shown them.
    pub(super) fn demand_traffic(&self) -> anyhow::Result<()> {
        let RingTraffic { blocks_loaded, blocks_saved, .. } = self.traffic;
        ensure!(
            blocks_loaded > 0 && blocks_saved > 0,
            "rings have loaded {blocks_loaded} and saved {blocks_saved} blocks: use more --requests or a larger --pool"
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use reprise_testkit::model::llama_3_8b_scaled;

    use super::*;

    #[test]
    fn rings_replace_default_sizes_and_keep_those_of_the_file() {
        let file = DemoConfig { requests: 7, ..DemoConfig::default() };
        assert_eq!(over(EnginePath::Arena, &file), file);
        let rings = over(EnginePath::Rings, &file);
        assert_eq!((rings.requests, rings.scale), (7, 256));
    }

    #[test]
    fn rings_reject_a_scale_with_objects_of_partial_pages() {
        let layout = |scale| llama_3_8b_scaled(scale).expect("a valid scale");
        check_objects(EnginePath::Arena, 1024, &layout(1024)).expect("copies have any size");
        check_objects(EnginePath::Rings, 256, &layout(256)).expect("objects of one page");
        let error = check_objects(EnginePath::Rings, 512, &layout(512)).expect_err("half pages").to_string();
        assert!(error.contains("use --scale 256 or less") && error.contains("2.0 KiB"), "{error}");
    }

    #[test]
    fn report_separates_rings_from_the_arena() {
        let traffic = RingTraffic { blocks_loaded: 5, batches: 3, contexts: 70, ..RingTraffic::default() };
        let hits = HitCounts { own_dram: 1, own_nvme: 5, peer_dram: 2, peer_nvme: 4 };
        let report = RingReport::new("gpu-queue-emulated", traffic, &hits);
        let text = report.text();
        assert!(text.contains("gpu-queue-emulated") && text.contains("3 batches with 70 contexts"), "{text}");
        assert!(text.contains("1 in own DRAM, 2 in peer DRAM, 4 on peer NVMe"), "{text}");
        let error = report.demand_traffic().expect_err("nothing was saved").to_string();
        assert!(error.contains("saved 0 blocks"), "{error}");
        let json = serde_json::to_value(&report).expect("encodes");
        assert_eq!((&json["contexts"], &json["arena"]["peer_nvme"]), (&70.into(), &4.into()));
    }
}
