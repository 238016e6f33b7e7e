//! Counters of cores that runs report.

use std::collections::BTreeMap;

use reprise_agent_core::AgentCore;

/// Counters of the core that show which code paths the runs have reached.
const COUNTED: [&str; 39] = [
    "duplicate_items",
    "durable_items",
    "lost_items",
    "hit_blocks_own_dram",
    "hit_blocks_own_nvme",
    "hit_blocks_peer_dram",
    "hit_blocks_peer_nvme",
    "miss_blocks",
    "failed_blocks",
    "no_space_blocks",
    "deadline_blocks",
    "single_flight_joins",
    "lookup_failures",
    "fill_device_errors",
    "fill_corrupt",
    "fill_absent",
    "fill_peer_lost",
    "write_failures",
    "dram_corrupt_blocks",
    "dram_evictions",
    "nvme_evictions",
    "serve_blocks_dram",
    "serve_blocks_nvme",
    "serve_blocks_absent",
    "hot_blocks_given",
    "moved_blocks",
    "pulled_blocks",
    "pulls_dropped",
    "offer_keys_taken",
    "offer_failures",
    "place_failures",
    "extent_commits",
    "writeback_slack_blocks",
    "writeback_decode_blocks",
    "writeback_carried_over_blocks",
    "writeback_nothing_fits_blocks",
    "writeback_overdue_blocks",
    "writeback_awaited_blocks",
    "writeback_memory_blocks",
];

/// Adds the counters of a core to `seen`, by their names.
pub(crate) fn count_all(seen: &mut BTreeMap<&'static str, u64>, core: &AgentCore) {
    let counters = core.counters();
    for name in COUNTED {
        let fields = counters.fields();
        let counted = fields.filter(|(other, _)| *other == name).map(|(_, value)| value).sum::<u64>();
        *seen.entry(name).or_default() += counted;
    }
}
