//! The replica directory in this process: resident memory of a replica entry, and look-ups on one core.
//!
//! Keys come from a seed, an update's worth at a time, and are made again to be asked for: besides the directory there are
//! never more than [`LOOKUPS`] of them in memory (32 MB, and once more while they are put in order), so that what is
//! resident is the directory. 10⁸ entries need about 4 GB.

use std::time::Instant;

use anyhow::{Context, ensure};
use reprise_controlplane_core::{Changes, Directory, Found, LiveNodes, Opening, Update, Updated};
use reprise_policy::{BlockKey, Epoch, NodeId, SlotSet, Tier};

use super::Settings;
use super::fixture::keys;
use super::report::{Figure, Target, median};
use super::resident;

/// Nodes that the entries are spread over.
const NODES: u16 = 100;

/// Changes of one update, as agents send them.
const UPDATE_CHANGES: usize = 8192;

/// Keys of one look-up call.
const LOOKUP_KEYS: usize = 1000;

/// Keys looked up in one repetition.
const LOOKUPS: usize = 2_000_000;

/// Repetition number that the keys come from.
const SEED: u64 = 4;

/// Entries from which on the limits of a large directory hold.
const LARGE: usize = 100_000_000;

/// What a directory of some size may take, and must do.
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
    resident::forget_peak()?;
    let before = resident::peak_bytes()?;
    let mut live = LiveNodes::default();
    let mut directory = Directory::new();
    directory.own(&SlotSet::ALL);
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
    let peak = resident::peak_bytes()?.saturating_sub(before);
    let size = directory.size();
    ensure!(size.replicas == entries as u64, "{} of {entries} replicas are in the directory", size.replicas);

    let rates = settings
        .rounds("directory.lookups")
        .map(|repetition| look_up(&directory, &live, entries, repetition))
        .collect::<anyhow::Result<Vec<f64>>>()?;
    let limits = Limits::of(entries);
    Ok(vec![
        // At its peak: tables that grow hold their old places for a moment.
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
    // The first update of a registration begins its inventory, and takes a number for that.
    let opening = if *sequence == 0 { Opening::Slots(&SlotSet::ALL) } else { Opening::Nothing };
    let node = NodeId(u16::try_from(node).context("too many nodes")?);
    let ends = &SlotSet::EMPTY;
    let update = Update { node, epoch: Epoch(1), sequence: *sequence, opening, changes, ends };
    let updated = directory.update(&update);
    *sequence += u64::from(opening != Opening::Nothing) + count as u64;
    ensure!(
        matches!(&updated, Updated::Expecting { expected, .. } if *expected == *sequence),
        "the directory did not take an update: {updated:?}"
    );
    Ok(())
}

/// Looks up keys that are there, in an order unlike that of their insertion; keys a second.
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
        // A stride that is prime to any number of batches below it visits them all.
        batch = (batch + 7919) % batches;
        let count = UPDATE_CHANGES.min(entries - batch * UPDATE_CHANGES);
        wanted.extend(keys(SEED + batch as u64, count));
    }
    interleave(&mut wanted);
    let mut found = Found::default();
    let mut replicas = 0;
    let started = Instant::now();
    for part in wanted.chunks(LOOKUP_KEYS) {
        directory.lookup(part, live, None, &mut found);
        replicas += found.replicas().len();
    }
    let seconds = started.elapsed().as_secs_f64();
    ensure!(replicas >= wanted.len(), "{replicas} replicas found for {} keys", wanted.len());
    Ok(wanted.len() as f64 / seconds)
}

/// Puts keys that were announced together far apart.
fn interleave(keys: &mut Vec<BlockKey>) {
    let stride = 4099;
    let spread = (0..stride).flat_map(|first| keys.iter().skip(first).step_by(stride).copied());
    *keys = spread.collect();
}
