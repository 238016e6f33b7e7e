//! Size and speed of the directory: bytes per entry, lookups per second, O(1) replacement of an inventory.

use std::time::Instant;

use reprise_controlplane_core::{
    Changes, Directory, LiveNodes, LookupResult, Opening, Update, UpdateOutcome,
};
use reprise_policy::{BlockKey, Epoch, NodeId, SlotSet};

const NODES: u16 = 100;
/// Maximum bytes of a replica entry, including slack.
const ENTRY_BYTES_MAX: f64 = 64.0;
/// Minimum rate of random key lookups on one core, at ten million entries, in a release build.
const LOOKUPS_PER_SECOND_MIN: f64 = 3.0e6;

/// Uniformly distributed keys, like SHA-256: SplitMix64 of the number, twice.
fn key(number: u64) -> BlockKey {
    let mix = |seed: u64| {
        let mut value = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        value ^ (value >> 31)
    };
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&mix(number * 2 + 1).to_le_bytes());
    bytes[8..].copy_from_slice(&mix(number * 2 + 2).to_le_bytes());
    BlockKey(bytes)
}

/// A directory of all slots, in which every node has begun its inventory of all slots.
fn directory() -> (Directory, LiveNodes, Vec<u64>) {
    let mut directory = Directory::new();
    directory.set_owned_slots(&SlotSet::ALL);
    for node in (1..=NODES).map(NodeId) {
        directory.register(node, Epoch(1));
        let updated = directory.update(&Update {
            node,
            epoch: Epoch(1),
            sequence: 0,
            opening: Opening::Slots(&SlotSet::ALL),
            changes: Changes::parse(&[], &[]).expect("no changes"),
            ends: &SlotSet::ALL,
        });
        assert!(matches!(updated, UpdateOutcome::Expecting { expected: 1, .. }));
    }
    (directory, (1..=NODES).map(NodeId).collect(), vec![1; usize::from(NODES) + 1])
}

/// Announces keys `first..first + count`, spread over the nodes, on NVMe.
fn announce(directory: &mut Directory, sequences: &mut [u64], keys: std::ops::Range<u64>) {
    const BATCH: u64 = 8192;
    let mut first = keys.start;
    while first < keys.end {
        let count = BATCH.min(keys.end - first);
        let node = u16::try_from(first / BATCH % u64::from(NODES)).expect("small") + 1;
        let packed: Vec<u8> = (first..first + count).flat_map(|number| key(number).0).collect();
        let operations = vec![2; packed.len() / BlockKey::SIZE];
        let sequence = &mut sequences[usize::from(node)];
        let updated = directory.update(&Update {
            node: NodeId(node),
            epoch: Epoch(1),
            sequence: *sequence,
            opening: Opening::Nothing,
            changes: Changes::parse(&packed, &operations).expect("well formed"),
            ends: &SlotSet::EMPTY,
        });
        *sequence += count;
        assert!(matches!(updated, UpdateOutcome::Expecting { expected, .. } if expected == *sequence));
        first += count;
    }
}

/// Resident memory of this process, in bytes.
fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    let pages: u64 = statm.split(' ').nth(1).expect("second field").parse().expect("a number");
    pages * 4096
}

#[test]
fn entries_take_at_most_64_bytes_at_every_size() {
    let (mut directory, _, mut sequences) = directory();
    let mut size = 0;
    // Below 100,000 entries the 4,096 nearly empty tables dominate: 16 bytes × 8 places each.
    for next in [150_000, 200_000, 300_000, 500_000, 600_000, 700_000, 800_000, 1_000_000] {
        announce(&mut directory, &mut sequences, size..next);
        size = next;
        let each = directory.size().bytes as f64 / size as f64;
        assert!(each <= ENTRY_BYTES_MAX, "{each} bytes per entry at {size}");
    }
}

#[test]
fn further_replicas_of_a_key_cost_as_much_as_first_ones() {
    let (mut directory, live, _) = directory();
    let packed: Vec<u8> = (0..5000).flat_map(|number| key(number).0).collect();
    let operations = vec![2; 5000];
    for node in 1..=NODES {
        directory.update(&Update {
            node: NodeId(node),
            epoch: Epoch(1),
            sequence: 1,
            opening: Opening::Nothing,
            changes: Changes::parse(&packed, &operations).expect("well formed"),
            ends: &SlotSet::EMPTY,
        });
    }
    let size = directory.size();
    assert_eq!((size.keys, size.replicas), (5000, 5000 * u64::from(NODES)));
    let each = size.bytes as f64 / size.replicas as f64;
    assert!(each <= ENTRY_BYTES_MAX, "{each} bytes per replica");
    let mut found = LookupResult::default();
    directory.lookup(&[key(17)], &live, Some(NodeId(3)), &mut found);
    assert_eq!(found.of(0).len(), 16, "bounded");
    assert!(found.of(0).iter().all(|replica| replica.node != NodeId(3)));
}

#[test]
fn replacing_an_inventory_takes_effect_at_once_and_sweeps_are_bounded() {
    let (mut directory, live, mut sequences) = directory();
    announce(&mut directory, &mut sequences, 0..300_000);
    for node in 1..=NODES {
        directory.forget(NodeId(node), Epoch(1));
    }
    let mut found = LookupResult::default();
    directory.lookup(&(0..1000).map(key).collect::<Vec<_>>(), &live, None, &mut found);
    assert!(found.replicas().is_empty(), "invisible before any sweep");
    let before = directory.size();
    assert_eq!((before.replicas, before.stale_entries), (0, 300_000));
    assert!(directory.sweep(3000), "a bounded sweep is incomplete");
    let after = directory.size();
    let swept = before.stale_entries - after.stale_entries;
    assert!((1000..10_000).contains(&swept), "{swept} entries in one bounded sweep");
    while directory.sweep(3000) {}
    let empty = directory.size();
    assert_eq!((empty.keys, empty.stale_entries), (0, 0));
    assert!(empty.bytes < before.bytes / 20, "memory is freed: {} of {}", empty.bytes, before.bytes);
}

#[test]
#[expect(clippy::disallowed_methods, reason = "a measurement, not the core")]
#[ignore = "measures: cargo test --release -p reprise-controlplane-core --test directory -- --ignored --nocapture"]
fn ten_million_entries_take_64_bytes_each_and_serve_three_million_lookups_a_second() {
    const ENTRIES: u64 = 10_000_000;
    const ROUNDS: u64 = 9;
    const ROUND_KEYS: u64 = 128 * 8192;
    let before = resident_bytes();
    let (mut directory, live, mut sequences) = directory();
    let start = Instant::now();
    announce(&mut directory, &mut sequences, 0..ENTRIES);
    let announced = start.elapsed();
    let resident = (resident_bytes() - before) as f64 / ENTRIES as f64;
    let estimated = directory.size().bytes as f64 / ENTRIES as f64;

    // Keys of a round were not looked up before, so their places are not in any cache.
    let mut found = LookupResult::default();
    let mut rates: Vec<f64> = (0..ROUNDS)
        .map(|round| {
            let number = |asked: u64| (round * ROUND_KEYS + asked) * 7_919 % ENTRIES;
            let keys: Vec<BlockKey> = (0..ROUND_KEYS).map(|asked| key(number(asked))).collect();
            let start = Instant::now();
            for batch in keys.chunks(8192) {
                directory.lookup(batch, &live, Some(NodeId(1)), &mut found);
                assert!(found.replicas().len() > 8000);
            }
            ROUND_KEYS as f64 / start.elapsed().as_secs_f64()
        })
        .collect();
    rates.sort_by(f64::total_cmp);
    let rate = rates[rates.len() / 2];
    println!(
        "{ENTRIES} entries: {estimated:.1} bytes each estimated, {resident:.1} resident, announced at {:.2} M/s, \
         {:.2} M lookups/s (median of {})",
        ENTRIES as f64 / announced.as_secs_f64() / 1e6,
        rate / 1e6,
        rates.len()
    );
    assert!(estimated <= ENTRY_BYTES_MAX && resident <= ENTRY_BYTES_MAX);
    assert!(rate >= LOOKUPS_PER_SECOND_MIN, "{rate} lookups per second");
}
