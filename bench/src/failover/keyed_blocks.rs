//! Blocks whose bytes derive from their keys, so that a load of the wrong block is detected.

use anyhow::Context;
use reprise_client::{BlockStatus, Client, LoadRequest, Scope};
use reprise_policy::{BlockKey, Layout};

use reprise_testkit::bench::fixture::{self, PATIENCE};
use reprise_testkit::kv_function::{self, ObjectPlace};

/// Number of blocks reserved and committed at a time.
const BATCH: usize = 200;

/// Result of a verified load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LoadResult {
    /// Every byte is right.
    Right,
    /// A byte differs from the saved one.
    Wrong,
    /// The block is not available, or its checksum does not match.
    Missing,
}

/// Saves blocks and waits until they are durable.
pub(super) fn save(client: &Client, keys: &[BlockKey]) -> anyhow::Result<()> {
    let layout = *client.layout();
    for part in keys.chunks(BATCH) {
        let filled = fixture::fill_each(client, part, |reservation, key| {
            let mut object = vec![0; object_bytes(&layout)];
            (0..layout.objects()).try_for_each(|index| {
                kv_function::fill(&key.0, ObjectPlace::of(&layout, index), &mut object);
                reservation.fill_object(index, &object)
            })
        })?;
        fixture::commit_durable(client, filled)?;
    }
    Ok(())
}

/// Loads a block from any node and compares every byte.
pub(super) fn load(client: &Client, key: &BlockKey) -> anyhow::Result<LoadResult> {
    let layout = *client.layout();
    let request = LoadRequest { keys: vec![*key], deadline: PATIENCE, read_bytes: 0, scope: Scope::Cluster };
    let load = client.load(&request).context("load")?;
    let mut object = vec![0; object_bytes(&layout)];
    for layer in 0..layout.layers() {
        load.wait_layer(layer, PATIENCE).context("waiting for a layer")?;
        for index in layer * layout.parts()..(layer + 1) * layout.parts() {
            let is_there = load.blocks()[0].status() == BlockStatus::Ok;
            if !is_there || load.copy_object(0, index, &mut object).is_err() {
                return Ok(LoadResult::Missing);
            }
            if kv_function::mismatches(&key.0, ObjectPlace::of(&layout, index), &object) > 0 {
                return Ok(LoadResult::Wrong);
            }
        }
    }
    Ok(LoadResult::Right)
}

fn object_bytes(layout: &Layout) -> usize {
    usize::try_from(layout.object_bytes()).expect("objects fit in memory")
}
