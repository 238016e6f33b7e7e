//! The replica directory in this process: resident memory per replica entry, and look-ups on one core.
//!
//! Keys are derived from a seed, one update at a time, and derived again for the look-ups. So besides the
//! directory, at most [`LOOKUPS`] keys are in memory (32 MB, twice while they are shuffled), and the resident
//! memory is that of the directory. 10⁸ entries need about 4 GB.

use std::time::Instant;

use anyhow::{Context, ensure};
use reprise_controlplane_core::{
    Changes, Directory, LiveNodes, LookupResult, Opening, Update, UpdateOutcome,
};
use reprise_policy::{BlockKey, Epoch, NodeId, SlotSet, Tier};

use reprise_testkit::bench::Settings;
use reprise_testkit::bench::fixture::keys;
use reprise_testkit::bench::process_memory;
use reprise_testkit::bench::report::{Figure, Target, median};

/// Number of nodes that hold the entries.
const NODES: u16 = 100;

/// Changes of one update, as agents send them.
const UPDATE_CHANGES: usize = 8192;

/// Keys of one look-up call.
const LOOKUP_KEYS: usize = 1000;

/// Number of keys looked up in one repetition.
const LOOKUPS: usize = 2_000_000;

/// Seed of the keys.
const SEED: u64 = 4;

/// Number of entries from which the targets of a large directory apply.
const LARGE: usize = 100_000_000;

/// Targets for memory and speed of a directory.
struct Limits {
    bytes_max: f64,
    million_lookups_min: f64,
}

impl Limits {
    fn of(entries: usize) -> Limits {
        match entries {
            LARGE.. => Limits { bytes_max: 80.0, million_lookups_min: 2.0 },
            _ => Limits { bytes_max: 64.0, million_lookups_min: 3.0 },
        }
    }
}

pub(super) fn run(entries: usize, settings: &Settings) -> anyhow::Result<Vec<Figure>> {
    process_memory::reset_peak()?;
    let before = process_memory::peak_bytes()?;
    let mut live = LiveNodes::default();
    let mut directory = Directory::new();
    directory.set_owned_slots(&SlotSet::ALL);
    for node in (0..NODES).map(NodeId) {
        directory.register(node, Epoch(1));
        live.insert(node);
    }
    let started = Instant::now();
    let mut sequences = vec![0; usize::from(NODES)];
    for batch in 0..entries.div_ceil(UPDATE_CHANGES) {
        let count = UPDATE_CHANGES.min(entries - batch * UPDATE_CHANGES);
        let packed = BlockKey::pack(&keys(SEED + batch as u64, count));
        let node = batch % usize::from(NODES);
        announce(&mut directory, node, &mut sequences[node], &packed)?;
    }
    let insert_seconds = started.elapsed().as_secs_f64();
    let peak = process_memory::peak_bytes()?.saturating_sub(before);
    let size = directory.size();
    ensure!(size.replicas == entries as u64, "the directory has {} of {entries} replicas", size.replicas);

    let rates = settings
        .rounds("directory.lookups")
        .map(|repetition| look_up(&directory, &live, entries, repetition))
        .collect::<anyhow::Result<Vec<f64>>>()?;
    let limits = Limits::of(entries);
    Ok(vec![
        // The peak, because a growing table briefly holds both its old and new storage.
        Figure::absolute(
            format!("directory.resident_bytes_per_replica_at_{entries}"),
            peak as f64 / entries as f64,
            "bytes",
            Target::AtMost(limits.bytes_max),
        ),
        Figure::absolute(
            format!("directory.table_bytes_per_replica_at_{entries}"),
            size.bytes as f64 / entries as f64,
            "bytes",
            Target::AtMost(limits.bytes_max),
        ),
        Figure::absolute(
            format!("directory.lookups_per_core_at_{entries}"),
            median(rates) / 1e6,
            "million keys/s",
            Target::AtLeast(limits.million_lookups_min),
        ),
        Figure::absolute(
            format!("directory.inserts_per_core_at_{entries}"),
            entries as f64 / insert_seconds / 1e6,
            "million entries/s",
            Target::None,
        ),
    ])
}

fn announce(directory: &mut Directory, node: usize, sequence: &mut u64, packed: &[u8]) -> anyhow::Result<()> {
    let count = packed.len() / BlockKey::SIZE;
    let operations = vec![Tier::Nvme as u8; count];
    let changes = Changes::parse(packed, &operations).context("changes of the benchmark")?;
    // The first update of a registration begins its inventory, which takes one sequence number.
    let opening = if *sequence == 0 { Opening::Slots(&SlotSet::ALL) } else { Opening::Nothing };
    let node = NodeId(u16::try_from(node).context("too many nodes")?);
    let ends = &SlotSet::EMPTY;
    let update = Update { node, epoch: Epoch(1), sequence: *sequence, opening, changes, ends };
    let updated = directory.update(&update);
    *sequence += u64::from(opening != Opening::Nothing) + count as u64;
    ensure!(
        matches!(&updated, UpdateOutcome::Expecting { expected, .. } if *expected == *sequence),
        "the directory rejected an update: {updated:?}"
    );
    Ok(())
}

/// Looks up existing keys in an order unlike that of their insertion; returns keys per second.
fn look_up(
    directory: &Directory,
    live: &LiveNodes,
    entries: usize,
    repetition: usize,
) -> anyhow::Result<f64> {
    let batches = entries.div_ceil(UPDATE_CHANGES);
    let mut wanted = Vec::with_capacity(LOOKUPS);
    let mut batch = repetition;
    while wanted.len() < LOOKUPS.min(entries) {
        // The stride is prime, so it visits every batch if there are fewer batches than the stride.
        batch = (batch + 7919) % batches;
        let count = UPDATE_CHANGES.min(entries - batch * UPDATE_CHANGES);
        wanted.extend(keys(SEED + batch as u64, count));
    }
    interleave(&mut wanted);
    let mut found = LookupResult::default();
    let mut replicas = 0;
    let started = Instant::now();
    for part in wanted.chunks(LOOKUP_KEYS) {
        directory.lookup(part, live, None, &mut found);
        replicas += found.replicas().len();
    }
    let seconds = started.elapsed().as_secs_f64();
    ensure!(replicas >= wanted.len(), "found {replicas} replicas for {} keys", wanted.len());
    Ok(wanted.len() as f64 / seconds)
}

/// Moves keys that were announced together far apart.
fn interleave(keys: &mut Vec<BlockKey>) {
    let stride = 4099;
    let spread = (0..stride).flat_map(|first| keys.iter().skip(first).step_by(stride).copied());
    *keys = spread.collect();
}
