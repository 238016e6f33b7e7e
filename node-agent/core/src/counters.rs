//! Counters and gauges of the core, for the runtime's metrics and for `Stats`.
//!
//! Counters never decrease. Gauges (marked) are computed when the counters are read. The names are part of
//! the interface: the metrics are called `reprise_agent_<name>`.

use crate::effect::Source;

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// All numbers that the core knows; see the module.
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        pub struct Counters {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Counters {
            /// Names and values, in a fixed order.
            pub fn fields(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name),)*].into_iter()
            }
        }
    };
}

counters! {
    /// Gauge: open sessions.
    sessions,
    /// `Reserve` calls.
    reserves,
    /// Slots requested by `Reserve`.
    reserve_slots_wanted,
    /// Slots returned by `Reserve`.
    reserve_slots_given,
    /// `Commit` calls.
    commits,
    /// Blocks that became readable by a commit.
    committed_blocks,
    /// Payload bytes of blocks that became readable by a commit.
    committed_bytes,
    /// Committed items whose block existed already.
    duplicate_items,
    /// Reserved slots released because they were not committed in time.
    expired_reservations,
    /// Loads whose blocks were revoked because they were held too long.
    expired_loads,
    /// Committed items without a lease, or with an invalid key or checksums.
    refused_items,
    /// Committed items reported as durable in notices.
    durable_items,
    /// Committed items reported as lost in notices.
    lost_items,
    /// `Match` calls.
    matches,
    /// Keys of `Match` calls.
    match_keys,
    /// Leading blocks found in this node's DRAM.
    match_own_dram,
    /// Leading blocks found on this node's NVMe.
    match_own_nvme,
    /// Leading blocks found in a peer's DRAM.
    match_peer_dram,
    /// Leading blocks found on a peer's NVMe.
    match_peer_nvme,
    /// `Load` calls.
    loads,
    /// Blocks requested by loads.
    load_blocks,
    /// Blocks loaded from this node's DRAM.
    hit_blocks_own_dram,
    /// Blocks loaded from this node's NVMe.
    hit_blocks_own_nvme,
    /// Blocks loaded from a peer's DRAM.
    hit_blocks_peer_dram,
    /// Blocks loaded from a peer's NVMe.
    hit_blocks_peer_nvme,
    /// Payload bytes loaded from this node's DRAM.
    hit_bytes_own_dram,
    /// Payload bytes loaded from this node's NVMe.
    hit_bytes_own_nvme,
    /// Payload bytes loaded from a peer's DRAM.
    hit_bytes_peer_dram,
    /// Payload bytes loaded from a peer's NVMe.
    hit_bytes_peer_nvme,
    /// Blocks of loads that no reachable node had.
    miss_blocks,
    /// Blocks of loads that could not be read or verified.
    failed_blocks,
    /// Blocks of loads for which the arena had no room.
    no_space_blocks,
    /// Blocks of loads that missed the deadline.
    deadline_blocks,
    /// Blocks of loads that joined a fill already in progress.
    single_flight_joins,
    /// Gauge: loads held by sessions.
    loads_held,
    /// Lookups in the directory.
    lookups,
    /// Keys of lookups in the directory.
    lookup_keys,
    /// Lookups that failed or timed out.
    lookup_failures,
    /// Blocks read from devices.
    device_fills,
    /// Payload bytes of blocks read from devices.
    device_fill_bytes,
    /// Blocks fetched from peers.
    peer_fills,
    /// Payload bytes of blocks fetched from peers.
    peer_fill_bytes,
    /// Blocks copied from those of a public tenant, for other tenants.
    imported_blocks,
    /// Payload bytes of blocks copied from those of a public tenant.
    imported_bytes,
    /// Fills that failed with a device error.
    fill_device_errors,
    /// Fills that a device did not start.
    fill_refused,
    /// Fills that failed verification.
    fill_corrupt,
    /// Fetches of blocks that the peer no longer had.
    fill_absent,
    /// Fetches that failed because of the connection to the peer.
    fill_peer_lost,
    /// Gauge: fills in progress.
    fills_in_flight,
    /// Batches written to devices.
    writeback_batches,
    /// Blocks written in slack windows of prefill.
    writeback_slack_blocks,
    /// Blocks written in slack windows of decode.
    writeback_decode_blocks,
    /// Blocks of these that were due in an earlier window.
    writeback_carried_over_blocks,
    /// Blocks written at once because no engine with a slack profile has reported recently.
    writeback_no_report_blocks,
    /// Blocks written at once because the profile lets writes continue outside of its windows.
    writeback_fallback_blocks,
    /// Blocks written at once because the engines computed nothing.
    writeback_idle_blocks,
    /// Blocks written at once because they fit no window of a profile.
    writeback_nothing_fits_blocks,
    /// Blocks written at once because they were deferred for the maximum time.
    writeback_overdue_blocks,
    /// Blocks written at once because a client waited until a commit is durable.
    writeback_awaited_blocks,
    /// Blocks written at once because unsaved blocks took much of the arena.
    writeback_memory_blocks,
    /// Blocks written at once because the agent was about to stop.
    writeback_stopping_blocks,
    /// Blocks written at their delay bound, up to which they had waited for reads from devices.
    writeback_bound_blocks,
    /// Gauge: slot bytes of queued blocks while due writes wait for slack.
    writeback_deferred_bytes,
    /// Blocks that became durable.
    stored_blocks_total,
    /// Payload bytes of blocks that became durable.
    stored_bytes_total,
    /// Saved blocks that were admitted to NVMe.
    admission_admitted_blocks,
    /// Saved blocks that were not admitted before their second use.
    admission_first_use_blocks,
    /// Saved blocks that were not admitted, because their expected reuse was not worth the write.
    admission_low_value_blocks,
    /// Blocks that were not written, because no device had a write budget left.
    admission_budget_blocks,
    /// Blocks in DRAM only that a later use admitted to NVMe.
    admission_used_again_blocks,
    /// Gauge: bytes that the write budgets of all devices allow in a day; 0 without budgets.
    write_budget_bytes,
    /// Gauge: bytes that the write budgets of all devices allow now.
    write_budget_left_bytes,
    /// Bytes written to devices: blocks, headers, journals, and payloads of clients.
    pool_written_bytes,
    /// Bytes of these that were written to journals.
    journal_written_bytes,
    /// Gauge: device bytes for 1,000 payload bytes that became durable.
    write_amplification_permille,
    /// Cold blocks in DRAM only that were written ahead of their eviction.
    demoted_blocks,
    /// Warm blocks in DRAM only that were written, because their eviction was near.
    demoted_emergency_blocks,
    /// Blocks whose DRAM copy became the next victim when they were durable, because one request had used them.
    skipped_dram_blocks,
    /// Saved blocks evicted from DRAM that were not on NVMe.
    dram_dropped_blocks,
    /// Gauge: idle time in microseconds after which a block in DRAM is cold.
    idle_threshold_micros,
    /// Writes of blocks that failed.
    write_failures,
    /// Blocks dropped from DRAM to make room, or by `Trim`.
    dram_evictions,
    /// Slot bytes of blocks dropped from DRAM.
    dram_evicted_bytes,
    /// Regions of the arena that tenants gave up for other tenants.
    regions_retired,
    /// Regions of the arena that got new memory for another tenant.
    regions_renewed,
    /// Blocks dropped from NVMe to make room.
    nvme_evictions,
    /// Slot bytes of blocks dropped from NVMe to make room.
    nvme_evicted_bytes,
    /// Stored blocks dropped because they failed verification.
    corrupt_blocks,
    /// Blocks whose copy failed verification in an engine.
    suspect_blocks,
    /// Blocks in DRAM that no longer matched their checksums and were dropped.
    dram_corrupt_blocks,
    /// Devices that have failed.
    devices_lost,
    /// Requests of peers for blocks.
    serves,
    /// Blocks sent to peers from DRAM.
    serve_blocks_dram,
    /// Blocks sent to peers from NVMe.
    serve_blocks_nvme,
    /// Blocks that a peer requested and did not receive.
    serve_blocks_absent,
    /// Payload bytes sent to peers.
    serve_bytes,
    /// Gauge: requests of peers in progress.
    serves_in_flight,
    /// Blocks that became hot: peers read them often within a window.
    hot_blocks,
    /// Hot blocks that a peer accepted.
    hot_blocks_given,
    /// Placement queries to the control plane.
    places,
    /// Keys of placement queries.
    place_keys,
    /// Placement queries that failed or timed out.
    place_failures,
    /// Keys for which no node had capacity, or which no node accepted.
    place_keys_nowhere,
    /// Offers made to peers.
    offers,
    /// Keys offered to peers.
    offer_keys,
    /// Offered keys that a peer accepted.
    offer_keys_taken,
    /// Offers that failed or timed out.
    offer_failures,
    /// Blocks dropped from NVMe because they moved to another node.
    moved_blocks,
    /// Slot bytes of moved blocks, header pages included.
    moved_bytes,
    /// Offers received from peers.
    incoming_offers,
    /// Keys that peers offered.
    incoming_offer_keys,
    /// Offered keys that this node accepted.
    incoming_offer_keys_taken,
    /// Blocks fetched because a peer offered them.
    pulled_blocks,
    /// Payload bytes of blocks fetched because a peer offered them.
    pulled_bytes,
    /// Accepted blocks that were not fetched, because there was no room in time.
    pulls_dropped,
    /// Gauge: accepted blocks that wait to be fetched.
    pulls_waiting,
    /// Gauge: slot bytes of offered blocks that are being fetched or written.
    pulls_in_flight_bytes,
    /// Offered blocks that became durable.
    taken_blocks_stored,
    /// Gauge: mode of the node (0 active, 1 cordoned, 2 draining).
    node_mode,
    /// Gauge: 1 while all blocks of a draining node have replicas elsewhere.
    drained,
    /// Gauge: blocks that the walk of a draining node has processed.
    drain_walked_blocks,
    /// Gauge: blocks for which that walk found no node with capacity.
    drain_nowhere_blocks,
    /// Slot bytes that other nodes accepted, header pages included.
    given_bytes,
    /// Replica changes announced to the directory.
    announced_changes,
    /// Gauge: bytes of the arena's regions.
    arena_bytes,
    /// Gauge: bytes of arena slots in use.
    arena_used_bytes,
    /// Gauge: bytes of the arena not in use.
    arena_free_bytes,
    /// Bytes of slots that are never used again, because a lost device may still write to them.
    arena_lost_bytes,
    /// Gauge: bytes of slots reserved by sessions.
    reserved_bytes,
    /// Gauge: slot bytes of blocks that are not durable yet.
    unsaved_bytes,
    /// Gauge: blocks that are not durable yet.
    unsaved_blocks,
    /// Gauge: slot bytes of the unsaved blocks that are demoted: they were in DRAM only before.
    demoting_bytes,
    /// Gauge: read leases of loads, peers and checks on slots.
    read_leases,
    /// Gauge: blocks readable in DRAM.
    dram_blocks,
    /// Gauge: blocks on NVMe.
    nvme_blocks,
    /// Gauge: bytes of the devices that are available for slots.
    pool_capacity_bytes,
    /// Gauge: bytes of pool slots in use.
    pool_used_bytes,
    /// Gauge: bytes of the pool that can be allocated.
    pool_free_bytes,
    /// Gauge: bytes of freed slots whose free record is not durable yet.
    pool_pending_free_bytes,
    /// Gauge: pool slots that are never used again.
    pool_quarantined_slots,
    /// Extents that clients leased.
    extent_leases,
    /// Blocks that clients wrote to extents and that became durable.
    extent_commits,
    /// Pins of extents.
    extent_pins,
    /// Gauge: leased extents, those in quarantine included.
    extents_leased,
    /// Gauge: leased extents of ended sessions, also of an earlier agent, whose process may still write to them.
    extents_quarantined,
    /// Gauge: pins of extents, those of ended sessions included.
    extents_pinned,
    /// Gauge: running and preempted requests in the hints of engines.
    begun_requests,
    /// Gauge: blocks that these requests list.
    begun_blocks,
    /// Such requests that were ignored: without keys, with a gap in their keys, or beyond a limit.
    begun_ignored_requests,
    /// Such requests that ended because their engine was silent or listed them for too long.
    begun_expired_requests,
    /// Blocks whose eviction class changed because a request ran, was preempted or ended.
    begun_class_changes,
    /// Lookahead hints of engines.
    prefetch_hints,
    /// Hints that were rejected, because their version is unknown or a list is too long.
    prefetch_rejected_hints,
    /// Times of iterations that were ignored, because they are zero or too long.
    prefetch_ignored_times,
    /// Requests of hints that were ignored: without keys, with an invalid order, or beyond a limit.
    prefetch_ignored_requests,
    /// Keys of hints that are not on this node.
    prefetch_unknown_keys,
    /// Requests that were cancelled: preempted or finished.
    prefetch_cancelled_requests,
    /// Requests whose blocks were staged for too long.
    prefetch_expired_requests,
    /// Requests that began before all their blocks were read.
    prefetch_missed_windows,
    /// Blocks that a pass left for a later one, because their device was busy; each block once.
    prefetch_deferred_blocks,
    /// Blocks that a pass left, because they could not arrive in time; each block once.
    prefetch_late_blocks,
    /// Blocks that a pass left for a later one, because the reserve was full; each block once.
    prefetch_unstaged_blocks,
    /// Blocks read ahead.
    prefetch_blocks,
    /// Payload bytes read ahead.
    prefetch_bytes,
    /// Blocks read ahead that a load used.
    prefetch_used_blocks,
    /// Payload bytes read ahead that a load used.
    prefetch_used_bytes,
    /// Blocks read ahead that a load joined while they were being read.
    prefetch_joined_blocks,
    /// Payload bytes read ahead that no load used.
    prefetch_wasted_bytes,
    /// Blocks that could not be read ahead.
    prefetch_failed_blocks,
    /// Gauge: slot bytes of blocks that were read ahead and wait for their load.
    prefetch_staged_bytes,
    /// Blocks that commands read ahead.
    prefetch_requested_blocks,
    /// Gauge: blocks with a retention pin.
    retention_pinned_blocks,
    /// Gauge: bytes in DRAM that retention pins keep.
    retention_dram_bytes,
    /// Gauge: bytes on devices that retention pins keep.
    retention_nvme_bytes,
    /// Blocks that were pinned.
    retention_pinned_blocks_total,
    /// Blocks that were not pinned, because of a limit.
    retention_refused_blocks,
    /// Pins that ended at their time.
    retention_expired_blocks,
    /// Pins that ended because a quota or the capacity shrank.
    retention_revoked_blocks,
    /// Copies with a pin that were evicted, because no other region or segment could be emptied.
    retention_broken_blocks,
    /// Copies in DRAM that were dropped on request.
    demoted_on_request_blocks,
    /// Blocks that were removed on request.
    deleted_blocks,
    /// Blocks that were removed because the keys of their tenant are gone.
    erased_blocks,
    /// Gauge: bytes in use in the journals.
    journal_used_bytes,
    /// Gauge: total bytes of the journals.
    journal_capacity_bytes,
    /// Checkpoints written by the pools in use.
    journal_checkpoints,
    /// Records written to the journals of the pools in use.
    journal_records,
}

/// Declares the counters of one owner, with names of [`Counters`].
macro_rules! owner_counters {
    ($(#[$doc:meta])* $owner:ident: $($name:ident)*) => {
        $(#[$doc])*
        #[derive(Debug, Default)]
        pub(crate) struct $owner {
            $(pub(crate) $name: u64,)*
        }

        impl $owner {
            /// Sets the owner's part of all counters.
            pub(crate) fn copy_to(&self, all: &mut Counters) {
                $(all.$name = self.$name;)*
            }
        }
    };
}

owner_counters! {
    /// Counters of the cache.
    CacheCounters: dram_evictions dram_evicted_bytes nvme_evictions nvme_evicted_bytes corrupt_blocks
    dram_corrupt_blocks devices_lost announced_changes arena_lost_bytes stored_blocks_total
    stored_bytes_total admission_admitted_blocks admission_first_use_blocks admission_low_value_blocks
    admission_budget_blocks admission_used_again_blocks pool_written_bytes journal_written_bytes
    demoted_blocks demoted_emergency_blocks skipped_dram_blocks dram_dropped_blocks
    demoted_on_request_blocks deleted_blocks erased_blocks regions_retired regions_renewed
}

owner_counters! {
    /// Counters of loads, matches and lookups.
    LoadCounters: matches match_keys match_own_dram match_own_nvme match_peer_dram match_peer_nvme loads
    load_blocks hit_blocks_own_dram hit_blocks_own_nvme hit_blocks_peer_dram hit_blocks_peer_nvme
    hit_bytes_own_dram hit_bytes_own_nvme hit_bytes_peer_dram hit_bytes_peer_nvme miss_blocks failed_blocks
    no_space_blocks deadline_blocks single_flight_joins lookups lookup_keys lookup_failures suspect_blocks
    expired_loads
}

owner_counters! {
    /// Counters of extents.
    ExtentCounters: extent_leases extent_commits extent_pins
}

owner_counters! {
    /// Counters of prefetches.
    PrefetchCounters: prefetch_hints prefetch_rejected_hints prefetch_ignored_times prefetch_ignored_requests
    prefetch_unknown_keys prefetch_cancelled_requests prefetch_expired_requests prefetch_missed_windows
    prefetch_deferred_blocks prefetch_late_blocks prefetch_unstaged_blocks prefetch_blocks prefetch_bytes prefetch_used_blocks prefetch_used_bytes
    prefetch_joined_blocks prefetch_wasted_bytes prefetch_failed_blocks prefetch_requested_blocks
}

owner_counters! {
    /// Counters of requests that have begun.
    BegunCounters: begun_ignored_requests begun_expired_requests begun_class_changes
}

owner_counters! {
    /// Counters of retention pins.
    RetentionCounters: retention_pinned_blocks_total retention_refused_blocks retention_expired_blocks
    retention_revoked_blocks
}

owner_counters! {
    /// Counters of serves.
    ServeCounters: serves serve_blocks_dram serve_blocks_nvme serve_blocks_absent serve_bytes
}

owner_counters! {
    /// Counters of transfers.
    TransferCounters: device_fills device_fill_bytes peer_fills peer_fill_bytes imported_blocks imported_bytes fill_device_errors
    fill_refused fill_corrupt fill_absent fill_peer_lost pulled_blocks pulled_bytes
}

owner_counters! {
    /// Counters of replication.
    ReplicateCounters: hot_blocks hot_blocks_given places place_keys place_failures place_keys_nowhere offers
    offer_keys offer_keys_taken offer_failures moved_blocks moved_bytes incoming_offers incoming_offer_keys
    incoming_offer_keys_taken pulls_dropped
}

owner_counters! {
    /// Counters of saving.
    SaveCounters: reserves reserve_slots_wanted reserve_slots_given commits committed_blocks committed_bytes
    duplicate_items expired_reservations refused_items durable_items lost_items writeback_batches
    writeback_slack_blocks writeback_decode_blocks writeback_carried_over_blocks writeback_no_report_blocks
    writeback_fallback_blocks writeback_idle_blocks writeback_nothing_fits_blocks writeback_overdue_blocks
    writeback_awaited_blocks writeback_memory_blocks writeback_stopping_blocks writeback_bound_blocks write_failures taken_blocks_stored
}

impl LoadCounters {
    /// Counts blocks of a load that arrived.
    pub(crate) fn hit(&mut self, source: Source, count: u64, bytes: u64) {
        let (blocks, total) = match source {
            Source::OwnDram => (&mut self.hit_blocks_own_dram, &mut self.hit_bytes_own_dram),
            Source::OwnNvme => (&mut self.hit_blocks_own_nvme, &mut self.hit_bytes_own_nvme),
            Source::PeerDram => (&mut self.hit_blocks_peer_dram, &mut self.hit_bytes_peer_dram),
            Source::PeerNvme => (&mut self.hit_blocks_peer_nvme, &mut self.hit_bytes_peer_nvme),
        };
        *blocks += count;
        *total += bytes;
    }

    /// Counts the sources of a match's answer.
    pub(crate) fn matched(&mut self, sources: &[Source]) {
        for source in sources {
            match source {
                Source::OwnDram => self.match_own_dram += 1,
                Source::OwnNvme => self.match_own_nvme += 1,
                Source::PeerDram => self.match_peer_dram += 1,
                Source::PeerNvme => self.match_peer_nvme += 1,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_every_field_once_with_its_value() {
        let counters = Counters { loads: 3, ..Counters::default() };
        let names: Vec<&str> = counters.fields().map(|(name, _)| name).collect();
        let mut distinct = names.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), names.len());
        assert_eq!(counters.fields().find(|(name, _)| *name == "loads"), Some(("loads", 3)));
    }
}
