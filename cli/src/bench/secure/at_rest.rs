//! Loads from a device and durable saves to it, of a tenant whose blocks are encrypted there and of one whose blocks are
//! not: two sessions with one agent, in turn.
//!
//! The thread of the device encrypts and decrypts, and also verifies every object in both cases.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::time::Instant;

use anyhow::{Context, ensure};
use reprise_client::{Client, learned_salt};
use reprise_testkit::bench::fixture::{
    PATIENCE, commit, connect_as, fill, keys, payload, save_durable, sizes,
};
use reprise_testkit::bench::report::{Figure, Target, paired};
use reprise_testkit::bench::{Settings, llama_3_8b};
use reprise_testkit::cluster::{Cluster, ControlPlanes};

use crate::bench::store::cold_load;

/// Blocks of a load, and of a save: 256 MiB.
const BLOCKS: usize = 128;

/// Blocks of 2 MiB in one commit.
const SAVE_BLOCKS: usize = 32;

/// Rounds of saves at most: each needs 512 MiB of the pool.
const SAVE_ROUNDS_MAX: usize = 10;

/// Arena of the agent: the blocks of both tenants twice.
pub(in crate::bench) const ARENA_MIB: u64 = 1024;

/// MiB of the pool for the blocks that both tenants save in one round.
const ROUND_MIB: u64 = 2 * (BLOCKS as u64) * 2;

/// MiB of the pool besides blocks: headers, ends of segments, superblocks and journal.
const POOL_EXTRA_MIB: u64 = 768;

/// Loads and saves with encryption, relative to those without it.
const RATIO_MIN: f64 = 0.8;

/// Returns the size of a pool in which no save reuses a slot: the loaded blocks, and those of all rounds and an uncounted
/// one.
pub(in crate::bench) fn pool_mib(settings: &Settings) -> u64 {
    (save_rounds(settings) as u64 + 2) * ROUND_MIB + POOL_EXTRA_MIB
}

fn save_rounds(settings: &Settings) -> usize {
    settings.repetitions.min(SAVE_ROUNDS_MAX)
}

pub(super) fn run(settings: &Settings) -> anyhow::Result<Vec<Figure>> {
    let layout = llama_3_8b();
    let mut cluster = Cluster::start_controlplane(&settings.directory, ControlPlanes::Embedded)?;
    let folder = cluster.path().join("keys");
    std::fs::create_dir_all(&folder).context("the folder of keys")?;
    let key = learned_salt::random().context("a random key")?.to_hex();
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(folder.join("encrypted"))
        .context("the file of a key")?;
    file.write_all(key.as_bytes()).context("the file of a key")?;
    cluster.configure_agents(&format!("encryption.keys = \"{}\"", folder.display()));
    cluster.start_agents(1, sizes(ARENA_MIB, pool_mib(settings)))?;
    let socket = cluster.file().agents[0].socket.clone();
    let session = |tenant: &str| connect_as(&socket, &layout, &tenant.parse()?);
    let (plain, encrypted) = (session("plain")?, session("encrypted")?);
    let payload = payload(&layout);
    let (of_plain, of_encrypted) = (keys(1, BLOCKS), keys(2, BLOCKS));
    save_durable(&plain, &of_plain, SAVE_BLOCKS, &payload)?;
    save_durable(&encrypted, &of_encrypted, SAVE_BLOCKS, &payload)?;
    let read_bytes = layout.block_bytes();
    let loads = paired(
        settings.rounds("secure.cold_load_at_rest"),
        || cold_load(&plain, &of_plain, read_bytes),
        || cold_load(&encrypted, &of_encrypted, read_bytes),
    )?;
    let mut rounds = 1000..;
    let mut other_rounds = 2000..;
    let saves = paired(
        settings.some_rounds("secure.durable_save_at_rest", save_rounds(settings)),
        || save(&plain, rounds.next().expect("endless"), &payload),
        || save(&encrypted, other_rounds.next().expect("endless"), &payload),
    )?;
    let target = || Target::RatioAtLeast(RATIO_MIN);
    Ok(vec![
        Figure::relative("secure.cold_load_at_rest", loads, "GB/s", ("the same loads unencrypted", target())),
        Figure::relative(
            "secure.durable_save_at_rest",
            saves,
            "GB/s",
            ("the same saves unencrypted", target()),
        ),
    ])
}

/// Saves new blocks, and returns the rate from commit to durable notice in GB/s.
fn save(client: &Client, seed: u64, payload: &[u8]) -> anyhow::Result<f64> {
    client.trim().context("trim")?;
    let filled = fill(client, &keys(seed, BLOCKS), payload)?;
    let started = Instant::now();
    let ticket = commit(client, filled)?;
    let outcome = client.wait_durable(ticket, PATIENCE).context("waiting until durable")?;
    ensure!(outcome.lost_keys.is_empty(), "{} blocks did not become durable", outcome.lost_keys.len());
    Ok((BLOCKS * payload.len()) as f64 / started.elapsed().as_secs_f64() / 1e9)
}
