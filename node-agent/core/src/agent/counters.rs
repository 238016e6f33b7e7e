//! Counters and gauges of the core: plain numbers, read by the runtime's metrics and by `Stats`.
//!
//! Counters only grow; gauges (marked) are brought up to date at the end of every `apply`. Names are part of the
//! interface: metrics are called `reprise_agent_<name>`.

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
    /// Slots asked for.
    reserve_slots_wanted,
    /// Slots given.
    reserve_slots_given,
    /// `Commit` calls.
    commits,
    /// Blocks that became readable by a commit.
    committed_blocks,
    /// Their payload bytes.
    committed_bytes,
    /// Items whose block was there already.
    duplicate_items,
    /// Reserved slots taken back because they were not committed in time.
    expired_reservations,
    /// Loads whose blocks were taken back because they were held too long.
    expired_loads,
    /// Items without a lease, or with a wrong key or checksums.
    refused_items,
    /// Items given as durable in notices.
    durable_items,
    /// Items given as lost in notices.
    lost_items,
    /// `Match` calls.
    matches,
    /// Keys asked for.
    match_keys,
    /// Leading blocks found in own DRAM.
    match_own_dram,
    /// Leading blocks found on own NVMe.
    match_own_nvme,
    /// Leading blocks found in a peer's DRAM.
    match_peer_dram,
    /// Leading blocks found on a peer's NVMe.
    match_peer_nvme,
    /// `Load` calls.
    loads,
    /// Blocks asked for.
    load_blocks,
    /// Blocks loaded from own DRAM.
    hit_blocks_own_dram,
    /// Blocks loaded from own NVMe.
    hit_blocks_own_nvme,
    /// Blocks loaded from a peer's DRAM.
    hit_blocks_peer_dram,
    /// Blocks loaded from a peer's NVMe.
    hit_blocks_peer_nvme,
    /// Payload bytes loaded from own DRAM.
    hit_bytes_own_dram,
    /// Payload bytes loaded from own NVMe.
    hit_bytes_own_nvme,
    /// Payload bytes loaded from a peer's DRAM.
    hit_bytes_peer_dram,
    /// Payload bytes loaded from a peer's NVMe.
    hit_bytes_peer_nvme,
    /// Blocks of loads that nobody had.
    miss_blocks,
    /// Blocks of loads that could not be read or verified.
    failed_blocks,
    /// Blocks of loads for which the arena had no room.
    no_space_blocks,
    /// Blocks of loads that were late.
    deadline_blocks,
    /// Blocks of loads that joined a fill already under way.
    single_flight_joins,
    /// Gauge: loads held by sessions.
    loads_held,
    /// Questions to the directory.
    lookups,
    /// Keys in them.
    lookup_keys,
    /// Questions without an answer.
    lookup_failures,
    /// Blocks read from devices.
    device_fills,
    /// Their payload bytes.
    device_fill_bytes,
    /// Blocks fetched from peers.
    peer_fills,
    /// Their payload bytes.
    peer_fill_bytes,
    /// Fills that failed with a device error.
    fill_device_errors,
    /// Fills that a device did not take.
    fill_refused,
    /// Fills that did not verify.
    fill_corrupt,
    /// Fetches of blocks that the peer no longer had.
    fill_absent,
    /// Fetches from peers that were lost.
    fill_peer_lost,
    /// Gauge: fills under way.
    fills_in_flight,
    /// Batches written to devices.
    writeback_batches,
    /// Blocks that became durable.
    stored_blocks_total,
    /// Their payload bytes.
    stored_bytes_total,
    /// Writes of blocks that failed.
    write_failures,
    /// Blocks dropped from DRAM to make room, or by `Trim`.
    dram_evictions,
    /// Their slot bytes.
    dram_evicted_bytes,
    /// Blocks dropped from NVMe to make room.
    nvme_evictions,
    /// Their slot bytes.
    nvme_evicted_bytes,
    /// Stored blocks dropped because they did not verify.
    corrupt_blocks,
    /// Blocks whose verified copy out of DRAM did not match, as engines said.
    suspect_blocks,
    /// Blocks in DRAM that no longer matched their checksums, and were dropped.
    dram_corrupt_blocks,
    /// Devices lost.
    devices_lost,
    /// Requests of peers.
    serves,
    /// Blocks given to peers from DRAM.
    serve_blocks_dram,
    /// Blocks given to peers from NVMe.
    serve_blocks_nvme,
    /// Blocks that a peer wanted and did not get.
    serve_blocks_absent,
    /// Payload bytes given to peers.
    serve_bytes,
    /// Gauge: requests of peers under way.
    serves_in_flight,
    /// Blocks that became hot: peers read them often within a window.
    hot_blocks,
    /// Of these, blocks that a peer has taken.
    hot_blocks_given,
    /// Questions to the control plane where blocks go.
    places,
    /// Keys in them.
    place_keys,
    /// Questions without an answer.
    place_failures,
    /// Keys for which no node had room, or which none took.
    place_keys_nowhere,
    /// Offers made to peers.
    offers,
    /// Keys in them.
    offer_keys,
    /// Keys that a peer has taken.
    offer_keys_taken,
    /// Offers without an answer.
    offer_failures,
    /// Blocks dropped from NVMe because they have moved to another node.
    moved_blocks,
    /// Their slot bytes, header pages included.
    moved_bytes,
    /// Offers of peers.
    incoming_offers,
    /// Keys in them.
    incoming_offer_keys,
    /// Keys that were taken.
    incoming_offer_keys_taken,
    /// Blocks fetched because a peer has offered them.
    pulled_blocks,
    /// Their payload bytes.
    pulled_bytes,
    /// Blocks that were taken and not fetched, because there was no room in time.
    pulls_dropped,
    /// Gauge: blocks that were taken and wait to be fetched.
    pulls_waiting,
    /// Gauge: slot bytes of blocks that are being fetched or written because a peer has offered them.
    pulls_in_flight_bytes,
    /// Blocks that became durable because a peer has offered them.
    taken_blocks_stored,
    /// Gauge: 0 active, 1 cordoned, 2 draining.
    node_mode,
    /// Gauge: 1 while all that a draining node has is elsewhere as well.
    drained,
    /// Gauge: blocks that the walk of a draining node is through with.
    drain_walked_blocks,
    /// Gauge: blocks for which that walk found no node with room.
    drain_nowhere_blocks,
    /// Slot bytes given to other nodes, header pages included.
    given_bytes,
    /// Changes told to the directory.
    announced_changes,
    /// Gauge: bytes of the arena's regions.
    arena_bytes,
    /// Gauge: bytes of its slots in use.
    arena_used_bytes,
    /// Gauge: bytes not in use.
    arena_free_bytes,
    /// Bytes of slots that are never used again, because a lost device may still write to them.
    arena_lost_bytes,
    /// Gauge: bytes of slots reserved by sessions.
    reserved_bytes,
    /// Gauge: slot bytes of blocks that are not durable yet.
    unsaved_bytes,
    /// Gauge: such blocks.
    unsaved_blocks,
    /// Gauge: leases of readers (loads and peers) on slots.
    read_leases,
    /// Gauge: blocks readable in DRAM.
    dram_blocks,
    /// Gauge: blocks on NVMe.
    nvme_blocks,
    /// Gauge: bytes of the pool's devices for slots.
    pool_capacity_bytes,
    /// Gauge: bytes of slots in use.
    pool_used_bytes,
    /// Gauge: bytes that can be allocated.
    pool_free_bytes,
    /// Gauge: bytes of freed slots whose free record is not durable yet.
    pool_pending_free_bytes,
    /// Gauge: slots never used again.
    pool_quarantined_slots,
    /// Gauge: bytes of the journals in use.
    journal_used_bytes,
    /// Gauge: bytes of the journals.
    journal_capacity_bytes,
    /// Checkpoints written by the pools that are in use.
    journal_checkpoints,
    /// Records written to the journals of the pools that are in use.
    journal_records,
}

impl Counters {
    /// Notes a block of a load that arrived.
    pub(super) fn hit(&mut self, source: Source, bytes: u64) {
        let (blocks, total) = match source {
            Source::OwnDram => (&mut self.hit_blocks_own_dram, &mut self.hit_bytes_own_dram),
            Source::OwnNvme => (&mut self.hit_blocks_own_nvme, &mut self.hit_bytes_own_nvme),
            Source::PeerDram => (&mut self.hit_blocks_peer_dram, &mut self.hit_bytes_peer_dram),
            Source::PeerNvme => (&mut self.hit_blocks_peer_nvme, &mut self.hit_bytes_peer_nvme),
        };
        *blocks += 1;
        *total += bytes;
    }

    /// Notes the answer of a match.
    pub(super) fn matched(&mut self, sources: &[Source]) {
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
    fn every_field_appears_once_with_its_value() {
        let counters = Counters { loads: 3, ..Counters::default() };
        let names: Vec<&str> = counters.fields().map(|(name, _)| name).collect();
        let mut distinct = names.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), names.len());
        assert_eq!(counters.fields().find(|(name, _)| *name == "loads"), Some(("loads", 3)));
    }
}
