//! The replica directory in this process: resident memory of a replica entry, and look-ups on one core.

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

pub(super) fn run(entries: usize, settings: &Settings) -> anyhow::Result<Vec<Figure>> {
    let before = resident::anonymous_bytes(std::process::id())?;
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
    let grown = resident::anonymous_bytes(std::process::id())?.saturating_sub(before);
    let replicas = directory.size().replicas;
    ensure!(replicas == entries as u64, "{replicas} of {entries} replicas are in the directory");

    let rates = settings
        .rounds("directory.lookups")
        .map(|repetition| look_up(&directory, &live, entries, repetition))
        .collect::<anyhow::Result<Vec<f64>>>()?;
    let size = format!("{entries}");
    Ok(vec![
        Figure::absolute(
            format!("directory.bytes_per_replica_at_{size}"),
            grown as f64 / entries as f64,
            "bytes",
            Target::AtMost(64.0),
        ),
        Figure::absolute(
            format!("directory.lookups_per_core_at_{size}"),
            median(rates) / 1e6,
            "million keys/s",
            Target::AtLeast(3.0),
        ),
        Figure::absolute(
            format!("directory.inserts_per_core_at_{size}"),
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
