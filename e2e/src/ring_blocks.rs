//! Blocks of tests in registered KV memory, which rings save and load.

use std::io::Write;
use std::time::Duration;

use rand::RngExt;
use rand::rngs::StdRng;
use reprise_client::{Client, CommitOptions, ExtentStatus};
use reprise_policy::BlockKey;
use reprise_testkit::kv_function;
use reprise_testkit::rings::{KvOrder, RingLoad, RingPath, RingPathSettings};

use crate::content::keys;
use crate::wait::PATIENCE;

/// Blocks of the KV memory of an engine: the first half is saved, the second half is loaded.
pub const SLOTS: usize = 64;

/// Returns the settings of rings with this order of KV memory.
pub fn settings(order: KvOrder) -> RingPathSettings {
    RingPathSettings { order, timeout: Duration::from_secs(5), ..RingPathSettings::default() }
}

/// Computes the blocks into KV memory.
///
/// # Panics
/// If KV memory has no such slot.
pub fn prefill(path: &RingPath, blocks: &[(usize, BlockKey)]) {
    let layout = *path.layout();
    let mut bytes = vec![0; layout.object_bytes() as usize];
    for (slot, key) in blocks {
        for object in 0..layout.objects() {
            kv_function::fill(&key.0, object, &mut bytes);
            path.object(*slot, object as usize).copy_in(&bytes).expect("KV memory is writable");
        }
    }
}

/// Compares every byte of blocks in KV memory; returns the words that differ.
pub fn mismatches(path: &RingPath, blocks: &[(usize, BlockKey)]) -> u64 {
    let layout = *path.layout();
    let mut bytes = vec![0; layout.object_bytes() as usize];
    let mut wrong = 0;
    for (slot, key) in blocks {
        for object in 0..layout.objects() {
            path.object(*slot, object as usize).copy_out(&mut bytes);
            wrong += kv_function::mismatches(&key.0, object, &bytes);
        }
    }
    wrong
}

/// Returns numbers of blocks and their places in KV memory.
pub fn at(first_slot: usize, numbers: &[u64]) -> Vec<(usize, BlockKey)> {
    (first_slot..).zip(keys(numbers)).collect()
}

/// Saves and loads `blocks` blocks, from the first one on, until the agent is lost. Writes a line `durable N` for each
/// block that is durable.
///
/// # Errors
/// The session has ended, or the rings fail.
///
/// # Panics
/// If a byte is wrong, or a block is not durable after its save.
pub fn save_and_load(
    client: &Client,
    (first, blocks): (u64, u64),
    mut rng: StdRng,
    output: &mut impl Write,
) -> anyhow::Result<()> {
    let mut path = RingPath::open(client, SLOTS, settings(KvOrder::LayerPartBlock))?;
    let (mut saved, mut next) = (Vec::new(), first);
    loop {
        let count = rng.random_range(1..SLOTS as u64 / 2);
        let numbers: Vec<u64> = (next..(next + count).min(first + blocks)).collect();
        next = if next + count >= first + blocks { first } else { next + count };
        let placed = at(0, &numbers);
        prefill(&path, &placed);
        let statuses = path.save(&placed, CommitOptions::default(), PATIENCE)?;
        let kept = [ExtentStatus::Durable, ExtentStatus::Exists];
        assert!(statuses.iter().all(|status| kept.contains(status)), "{statuses:?}");
        for number in &numbers[..statuses.len()] {
            writeln!(output, "durable {number}")?;
        }
        output.flush()?;
        saved.extend_from_slice(&numbers[..statuses.len()]);
        let wanted: Vec<u64> = (0..8).map(|_| saved[rng.random_range(0..saved.len())]).collect();
        let loaded = at(SLOTS / 2, &wanted);
        assert_eq!(path.load(&loaded)?, [RingLoad::Verified; 8]);
        assert_eq!(mismatches(&path, &loaded), 0);
    }
}
