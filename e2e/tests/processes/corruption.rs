//! Bits that flip on disk or in shared memory: detected, counted, never served; the agent stays up.

use std::collections::BTreeSet;

use rand::RngExt;
use rand::rngs::StdRng;
use reprise_client::{BlockStatus, CommitOptions, CopyError, LoadRequest, Scope};
use reprise_e2e::content::{key, keys, small, write_object};
use reprise_e2e::disk::{BANK_HEADER, LOG_PAGE, PAGE, PoolFile, SUPERBLOCK};
use reprise_e2e::engine::object_bytes;
use reprise_e2e::seed::{say, seeded};
use reprise_e2e::{Agent, AgentConfig, Engine, Loading, Outcome, PATIENCE, World};
use reprise_policy::ByteSize;

/// What the log says of a block that did not verify.
const DROPPED: &str = "a stored block did not verify";

/// What it says of a block in DRAM that did not match.
const DAMAGED: &str = "a block in DRAM no longer matched its checksums";

/// What it says of a journal that was damaged.
const JOURNAL: &str = "the journal was damaged";

/// Blocks that the tests save: twelve commits, so that the journal has several pages.
const BLOCKS: u64 = 48;

fn numbers() -> Vec<u64> {
    (0..BLOCKS).collect()
}

/// An agent that has saved [`numbers`], stopped.
fn saved_and_stopped(world: &World) -> Agent {
    let mut agent =
        world.agent(&AgentConfig { pool: Some(ByteSize(32 << 20)), ..AgentConfig::named("node") });
    let engine = agent.engine(small());
    numbers().chunks(4).for_each(|some| engine.save_durably(some));
    drop(engine);
    agent.stop();
    agent
}

/// Loads blocks and says which did not come; none of them may be wrong.
fn gone(engine: &Engine, numbers: &[u64]) -> BTreeSet<u64> {
    let outcomes = engine.load(numbers, &Loading::LOCAL).expect("a load of an agent that is up");
    let gone = |(number, outcome): (&u64, Outcome)| match outcome {
        Outcome::Right(_) => None,
        Outcome::Missing(BlockStatus::Miss | BlockStatus::Failed) => Some(*number),
        other => panic!("block {number}: {other:?}"),
    };
    numbers.iter().zip(outcomes).filter_map(gone).collect()
}

/// Blocks that are damaged on disk are lost, all others right; what is lost can be saved again.
fn assert_lost_and_saved_again(agent: &Agent, damaged: &[u64]) {
    let engine = agent.engine(small());
    let before = agent.admin().counters();
    let lost: BTreeSet<u64> = damaged.iter().copied().collect();
    assert_eq!(gone(&engine, &numbers()), lost);
    let counters = agent.admin().counters();
    let grown = |name: &str| counters.get(name) - before.get(name);
    let damage = damaged.len() as u64;
    assert_eq!(
        (grown("fill_corrupt"), grown("corrupt_blocks"), grown("failed_blocks")),
        (damage, damage, damage)
    );
    assert_eq!(counters.get("pool_quarantined_slots"), 0, "a checksum accuses no medium");
    // They are not even tried again.
    assert_eq!(
        engine.load(damaged, &Loading::LOCAL).expect("a load"),
        vec![Outcome::Missing(BlockStatus::Miss); damaged.len()]
    );
    engine.save_durably(damaged);
    engine.trim();
    assert_eq!(gone(&engine, &numbers()), BTreeSet::new());
}

#[test]
fn a_bit_flipped_in_the_payload_while_the_agent_is_down_costs_that_block() {
    let world = World::new();
    world.require(DROPPED);
    let mut agent = saved_and_stopped(&world);
    let pool = PoolFile::open(&agent.files().pool);
    pool.flip_object(&key(5), &small(), 0);
    pool.flip_object(&key(17), &small(), small().objects() - 1);
    agent.start();
    assert_lost_and_saved_again(&agent, &[5, 17]);
    agent.stop();
    // The places that were damaged are used again, and the blocks saved again are found.
    agent.start();
    assert_eq!(agent.admin().counter("pool_quarantined_slots"), 0);
    assert_eq!(gone(&agent.engine(small()), &numbers()), BTreeSet::new());
}

#[test]
fn a_bit_flipped_in_a_header_page_costs_that_block() {
    let world = World::new();
    world.require(DROPPED);
    let mut agent = saved_and_stopped(&world);
    let pool = PoolFile::open(&agent.files().pool);
    // In the magic, the key, the first checksum, the empty rest and the page's own checksum.
    for (number, at) in (10..).zip([3, 40, 130, 2000, PAGE - 2]) {
        let headers = pool.headers_of(&key(number));
        headers.into_iter().for_each(|header| pool.flip(header + at, 6));
    }
    agent.start();
    assert_lost_and_saved_again(&agent, &[10, 11, 12, 13, 14]);
}

#[test]
fn a_header_page_of_another_block_is_no_substitute() {
    let world = World::new();
    world.require(DROPPED);
    let mut agent = saved_and_stopped(&world);
    let pool = PoolFile::open(&agent.files().pool);
    // A whole slot in the place of another, intact in itself: a misdirected write.
    let (from, to) = (pool.headers_of(&key(20))[0], pool.headers_of(&key(21))[0]);
    let slot = pool.read(from, usize::try_from(PAGE + small().slot_bytes()).expect("a small slot"));
    pool.write(to, &slot);
    agent.start();
    assert_lost_and_saved_again(&agent, &[21]);
}

#[test]
fn a_bit_flipped_on_disk_while_the_agent_runs_costs_that_block() {
    let world = World::new();
    world.require(DROPPED);
    let mut agent = saved_and_stopped(&world);
    agent.start();
    let engine = agent.engine(small());
    assert_eq!(gone(&engine, &numbers()), BTreeSet::new());
    let pool = PoolFile::open(&agent.files().pool);
    pool.flip_object(&key(30), &small(), 3);
    // The copy in DRAM is right.
    assert_eq!(gone(&engine, &numbers()), BTreeSet::new());
    assert_eq!(engine.trim(), BLOCKS);
    drop(engine);
    assert_lost_and_saved_again(&agent, &[30]);
}

#[test]
fn a_damaged_page_of_the_journal_costs_the_blocks_that_it_names_and_is_reported() {
    let world = World::new();
    world.require(JOURNAL);
    let mut agent = saved_and_stopped(&world);
    let pool = PoolFile::open(&agent.files().pool);
    let pages = pool.pages_beginning(LOG_PAGE);
    assert!(pages.len() >= 4, "several commits, several pages: {pages:?}");
    pool.flip(pages[1] + 300, 1);
    agent.start();
    let engine = agent.engine(small());
    let matched = engine.matches(&numbers(), Scope::Local).len() as u64;
    let lost = gone(&engine, &numbers());
    assert!(!lost.is_empty() && lost.len() < numbers().len(), "one page of several: {lost:?}");
    assert_eq!(lost.first(), Some(&matched), "a match ends where the first lost block is");
    assert_eq!(agent.admin().counter("corrupt_blocks"), 0, "what no journal names is not there");
    engine.save_durably(&numbers());
    drop(engine);
    agent.kill();
    agent.start();
    assert_eq!(gone(&agent.engine(small()), &numbers()), BTreeSet::new(), "the journal was repaired");
}

#[test]
fn one_damaged_copy_of_superblock_or_bank_header_is_survived_and_repaired() {
    let world = World::new();
    world.require(JOURNAL);
    let mut agent = saved_and_stopped(&world);
    let pool = agent.files().pool.clone();
    let whole = world.folder().join("whole.pool");
    std::fs::copy(&pool, &whole).expect("a pool can be copied");
    for beginning in [SUPERBLOCK, BANK_HEADER] {
        let copies = PoolFile::open(&whole).pages_beginning(beginning);
        assert!(copies.len() >= 2, "two copies of each: {copies:?}");
        for copy in copies {
            std::fs::copy(&whole, &pool).expect("a pool can be copied");
            PoolFile::open(&pool).flip(copy + 20, 0);
            agent.start();
            assert_eq!(gone(&agent.engine(small()), &numbers()), BTreeSet::new());
            if beginning == SUPERBLOCK {
                // The repair is a checkpoint: what it has not reached yet when the agent stops waits for the next start.
                agent.admin().wait_for("journal_checkpoints", PATIENCE, |written| written > 0);
            }
            agent.stop();
            if beginning == SUPERBLOCK {
                let repaired = PoolFile::open(&pool);
                let pages = repaired
                    .pages_beginning(SUPERBLOCK)
                    .into_iter()
                    .map(|page| repaired.read(page, PAGE as usize));
                let pages: BTreeSet<Vec<u8>> = pages.collect();
                assert_eq!(pages.len(), 1, "both copies are the same again");
            }
        }
    }
    agent.start();
    assert_eq!(gone(&agent.engine(small()), &numbers()), BTreeSet::new());
}

#[test]
fn both_copies_of_the_superblock_damaged_make_a_device_that_is_refused_with_the_remedy() {
    let world = World::new();
    let mut agent = saved_and_stopped(&world);
    let pool = PoolFile::open(&agent.files().pool);
    for copy in pool.pages_beginning(SUPERBLOCK) {
        pool.flip(copy + 70, 2);
    }
    let refused = agent.try_start().expect_err("nothing says where anything is");
    refused.assert_says(2, &["node.pool", "damaged beyond repair", "superblock", "format it"]);
}

/// Damages some places of a pool: single bits, whole pages of noise, runs of zeros.
fn damage(pool: &PoolFile, rng: &mut StdRng) {
    for _ in 0..rng.random_range(1..40) {
        let page = rng.random_range(0..pool.bytes() / PAGE) * PAGE;
        match rng.random_range(0..4) {
            0 | 1 => pool.flip(page + rng.random_range(0..PAGE), rng.random_range(0..8)),
            2 => {
                let mut noise = vec![0; PAGE as usize];
                rng.fill(noise.as_mut_slice());
                pool.write(page, &noise);
            }
            _ => pool.write(page, &[0; PAGE as usize]),
        }
    }
    // And some where it hurts most: in what is neither payload nor unused.
    for beginning in [LOG_PAGE, BANK_HEADER, SUPERBLOCK] {
        let pages = pool.pages_beginning(beginning);
        if !pages.is_empty() && rng.random_bool(0.4) {
            let page = pages[rng.random_range(0..pages.len())];
            pool.flip(page + rng.random_range(0..PAGE), rng.random_range(0..8));
        }
    }
}

#[test]
fn whatever_is_damaged_an_agent_serves_right_blocks_or_none_or_refuses_with_words() {
    const ROUNDS: usize = 24;
    let world = World::new();
    world.allow(DROPPED);
    world.allow(JOURNAL);
    let mut rng = seeded("damage");
    let mut agent = saved_and_stopped(&world);
    let intact = std::fs::read(&agent.files().pool).expect("a pool of 32 MiB");
    let (mut started, mut lost) = (0, 0);
    for _ in 0..ROUNDS {
        std::fs::write(&agent.files().pool, &intact).expect("the pool can be restored");
        damage(&PoolFile::open(&agent.files().pool), &mut rng);
        match agent.try_start() {
            Ok(()) => {
                started += 1;
                let engine = agent.engine(small());
                lost += gone(&engine, &numbers()).len();
                engine.save_durably(&(1000..1010).collect::<Vec<_>>());
                drop(engine);
                agent.stop();
            }
            Err(refused) => refused.assert_says(2, &["node.pool", "damaged"]),
        }
    }
    say(&format!("{started} of {ROUNDS} damaged pools opened, {lost} blocks lost in them"));
    assert!(started > ROUNDS / 2, "most damage leaves a pool that can be used");
}

#[test]
fn memory_scribbled_on_between_commit_and_load_is_detected_by_the_verified_copy_and_dropped() {
    let world = World::new();
    world.require(DAMAGED);
    let agent = world.agent(&AgentConfig::named("node"));
    let scribbler = agent.engine(small());
    // Spans of the slots outlive the commit: a mapping of the region for writing stays with the process.
    let mut reserved = scribbler.reserve(3).expect("slots");
    let spans: Vec<_> = reserved.iter().map(|reservation| reservation.span().clone()).collect();
    for (reservation, number) in reserved.iter_mut().zip(0..) {
        scribbler.fill(reservation, &key(number)).expect("filled");
    }
    let items = reserved.into_iter().zip(keys(&[0, 1, 2])).collect();
    let committed = scribbler.client().commit(items, CommitOptions::default()).expect("committed");
    scribbler.client().wait_durable(committed.ticket, PATIENCE).expect("a notice");
    let middle = object_bytes(&small()) * 3 + 100;
    spans[1].slice(middle, 1).and_then(|byte| byte.copy_in(&[0xa5])).expect("the mapping is writable");

    let reader = agent.engine(small());
    let load = reader.client().load(&LoadRequest::new(keys(&[0, 1, 2]))).expect("a load");
    load.wait_layer(small().layers() - 1, PATIENCE).expect("all layers");
    let mut object = vec![0; object_bytes(&small())];
    let corrupt = CopyError::Corrupt { block: 1, object: 3 };
    assert_eq!(load.copy_object(1, 3, &mut object), Err(corrupt));
    let outcomes = reader.compare(&load, &[0, 1, 2]).expect("compared");
    assert!(outcomes[0].is_right() && outcomes[2].is_right(), "{outcomes:?}");
    assert_eq!(outcomes[1], Outcome::Detected);
    // Also what is scribbled while the load is held.
    spans[2].slice(7, 1).and_then(|byte| byte.copy_in(&[0xa5])).expect("the mapping is writable");
    assert_eq!(reader.compare(&load, &[0, 1, 2]).expect("compared")[2], Outcome::Detected);
    drop(load);
    // The agent was told, looked for itself, and dropped both. What is on disk was written before, and is right.
    agent.admin().wait_for("dram_corrupt_blocks", PATIENCE, |dropped| dropped == 2);
    let counters = agent.admin().counters();
    assert_eq!((counters.get("suspect_blocks"), counters.get("dram_blocks")), (2, 1));
    reader.load_all(&[0, 1, 2], &Loading::LOCAL);
    assert_eq!(agent.admin().counter("device_fills"), 2);
}

#[test]
fn a_block_that_is_only_in_damaged_memory_is_forgotten_and_saved_again() {
    let world = World::new();
    world.require(DAMAGED);
    let agent = world.agent(&AgentConfig { pool: None, ..AgentConfig::named("node") });
    let scribbler = agent.engine(small());
    let mut reserved = scribbler.reserve(1).expect("a slot");
    let span = reserved[0].span().clone();
    scribbler.fill(&mut reserved[0], &key(0)).expect("filled");
    let items = reserved.into_iter().zip(keys(&[0])).collect();
    scribbler.client().commit(items, CommitOptions::default()).expect("committed");
    span.slice(5, 1).and_then(|byte| byte.copy_in(&[0xa5])).expect("the mapping is writable");

    let reader = agent.engine(small());
    let outcome = reader.load(&[0], &Loading::LOCAL).expect("a load");
    assert_eq!(outcome, [Outcome::Detected]);
    agent.admin().wait_for("dram_corrupt_blocks", PATIENCE, |dropped| dropped == 1);
    assert_eq!(reader.matches(&[0], Scope::Local).len(), 0);
    assert_eq!(agent.admin().counter("arena_used_bytes"), 0, "with the last load the slot is free");
    reader.save(&[0]).expect("saved anew");
    reader.load_all(&[0], &Loading::LOCAL);
}

#[test]
fn memory_scribbled_on_before_it_is_written_back_is_detected_when_it_is_read() {
    let world = World::new();
    world.require(DROPPED);
    let slow = std::time::Duration::from_secs(1);
    let agent = world.agent(&AgentConfig { writeback_delay: slow, ..AgentConfig::named("node") });
    let scribbler = agent.engine(small());
    let mut reserved = scribbler.reserve(2).expect("slots");
    let spans: Vec<_> = reserved.iter().map(|reservation| reservation.span().clone()).collect();
    for (reservation, number) in reserved.iter_mut().zip(0..) {
        scribbler.fill(reservation, &key(number)).expect("filled");
    }
    let items = reserved.into_iter().zip(keys(&[0, 1])).collect();
    let committed = scribbler.client().commit(items, CommitOptions::default()).expect("committed");
    let mut other = vec![0; object_bytes(&small())];
    write_object(&key(77), 0, &mut other);
    spans[0].slice(0, other.len()).and_then(|first| first.copy_in(&other)).expect("the mapping is writable");
    scribbler.client().wait_durable(committed.ticket, PATIENCE).expect("a notice");
    scribbler.trim();
    let outcomes = agent.engine(small()).load(&[0, 1], &Loading::LOCAL).expect("a load");
    assert_eq!(outcomes[0], Outcome::Missing(BlockStatus::Failed));
    assert!(outcomes[1].is_right());
    assert_eq!(agent.admin().counter("corrupt_blocks"), 1);
}
