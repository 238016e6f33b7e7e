//! Bit flips on disk and in shared memory: detected, counted, never served. The agent keeps running.

use std::collections::BTreeSet;

use rand::RngExt;
use rand::rngs::StdRng;
use reprise_client::{BlockStatus, CommitOptions, CopyError, LoadRequest, Scope, Ticket};
use reprise_e2e::content::{key, keys, small};
use reprise_e2e::disk::{BANK_HEADER, LOG_PAGE, PAGE, PoolFile, SUPERBLOCK};
use reprise_e2e::engine::object_bytes;
use reprise_e2e::seed::{print_line, seeded};
use reprise_e2e::{Agent, AgentConfig, Engine, LoadParams, Outcome, PATIENCE, TestEnv};
use reprise_policy::ByteSize;
use reprise_testkit::kv_function::fill;

/// Log message about a stored block that failed verification.
const DROPPED: &str = "dropped a stored block that failed verification";

/// Log message about a corrupt block in DRAM.
const DAMAGED: &str = "dropped a block in DRAM that does not match its checksums";

/// Log message about a damaged journal.
const JOURNAL: &str = "the journal was damaged";

/// Blocks that the tests save, in twelve commits, so that the journal has several pages.
const BLOCKS: u64 = 48;

fn numbers() -> Vec<u64> {
    (0..BLOCKS).collect()
}

/// Starts an agent, saves [`numbers`], and stops it.
fn saved_and_stopped(env: &TestEnv) -> Agent {
    let mut agent = env.agent(&AgentConfig { pool: Some(ByteSize(32 << 20)), ..AgentConfig::named("node") });
    let engine = agent.engine(small());
    numbers().chunks(4).for_each(|batch| engine.save_durably(batch));
    drop(engine);
    agent.stop();
    agent
}

/// Loads blocks and returns those that are missing. No block may be corrupt.
fn missing_blocks(engine: &Engine, numbers: &[u64]) -> BTreeSet<u64> {
    let outcomes = engine.load(numbers, &LoadParams::LOCAL).expect("the agent is running");
    let missing = |(number, outcome): (&u64, Outcome)| match outcome {
        Outcome::Verified(_) => None,
        Outcome::Missing(BlockStatus::Miss | BlockStatus::Failed) => Some(*number),
        other => panic!("block {number}: {other:?}"),
    };
    numbers.iter().zip(outcomes).filter_map(missing).collect()
}

/// Saves blocks; returns their ticket, and what overwrites bytes of a block from an offset on: the engine can
/// still write their memory.
fn commit_writable(engine: &Engine, numbers: &[u64]) -> (impl Fn(usize, usize, &[u8]), Ticket) {
    let mut reserved = engine.reserve(numbers.len()).expect("slots");
    let spans: Vec<_> = reserved.iter().map(|reservation| reservation.span().clone()).collect();
    for (reservation, number) in reserved.iter_mut().zip(numbers) {
        engine.fill(reservation, &key(*number)).expect("filled");
    }
    let items = reserved.into_iter().zip(keys(numbers)).collect();
    let committed = engine.client().commit(items, CommitOptions::default()).expect("committed");
    let overwrite = move |block: usize, at: usize, bytes: &[u8]| {
        let written = spans[block].slice(at, bytes.len()).and_then(|there| there.copy_in(bytes));
        written.expect("the mapping is writable");
    };
    (overwrite, committed.ticket)
}

/// Checks that exactly the damaged blocks are lost, and that they can be saved again.
fn assert_lost_and_saved_again(agent: &Agent, damaged: &[u64]) {
    let engine = agent.engine(small());
    let before = agent.admin().counters();
    let lost: BTreeSet<u64> = damaged.iter().copied().collect();
    assert_eq!(missing_blocks(&engine, &numbers()), lost);
    let counters = agent.admin().counters();
    let grown = |name: &str| counters.get(name) - before.get(name);
    let damage = damaged.len() as u64;
    assert_eq!(
        (grown("fill_corrupt"), grown("corrupt_blocks"), grown("failed_blocks")),
        (damage, damage, damage)
    );
    assert_eq!(counters.get("pool_quarantined_slots"), 0, "a wrong checksum quarantines no slot");
    // The lost blocks are misses, without another attempt to read them.
    assert_eq!(
        engine.load(damaged, &LoadParams::LOCAL).expect("a load"),
        vec![Outcome::Missing(BlockStatus::Miss); damaged.len()]
    );
    engine.save_durably(damaged);
    engine.trim();
    assert_eq!(missing_blocks(&engine, &numbers()), BTreeSet::new());
}

#[test]
fn a_bit_flip_in_a_payload_while_the_agent_is_down_costs_that_block() {
    let env = TestEnv::new();
    env.require(DROPPED);
    let mut agent = saved_and_stopped(&env);
    let pool = PoolFile::open(&agent.files().pool);
    pool.flip_object(&key(5), &small(), 0);
    pool.flip_object(&key(17), &small(), small().objects() - 1);
    agent.start();
    assert_lost_and_saved_again(&agent, &[5, 17]);
    agent.stop();
    // The damaged slots are used again, and the blocks that were saved again are found.
    agent.start();
    assert_eq!(agent.admin().counter("pool_quarantined_slots"), 0);
    assert_eq!(missing_blocks(&agent.engine(small()), &numbers()), BTreeSet::new());
}

#[test]
fn a_bit_flip_in_a_header_page_costs_that_block() {
    let env = TestEnv::new();
    env.require(DROPPED);
    let mut agent = saved_and_stopped(&env);
    let pool = PoolFile::open(&agent.files().pool);
    // In the magic number, the key, the first checksum, the unused rest, and the page's checksum.
    for (number, at) in (10..).zip([3, 40, 130, 2000, PAGE - 2]) {
        let headers = pool.headers_of(&key(number));
        headers.into_iter().for_each(|header| pool.flip(header + at, 6));
    }
    agent.start();
    assert_lost_and_saved_again(&agent, &[10, 11, 12, 13, 14]);
}

#[test]
fn a_slot_with_another_blocks_content_costs_that_block() {
    let env = TestEnv::new();
    env.require(DROPPED);
    let mut agent = saved_and_stopped(&env);
    let pool = PoolFile::open(&agent.files().pool);
    // A misdirected write: a whole slot, valid in itself, in the place of another one.
    let (from, to) = (pool.headers_of(&key(20))[0], pool.headers_of(&key(21))[0]);
    let slot = pool.read(from, usize::try_from(PAGE + small().slot_bytes()).expect("a small slot"));
    pool.write(to, &slot);
    agent.start();
    assert_lost_and_saved_again(&agent, &[21]);
}

#[test]
fn a_bit_flip_on_disk_while_the_agent_runs_costs_that_block() {
    let env = TestEnv::new();
    env.require(DROPPED);
    let mut agent = saved_and_stopped(&env);
    agent.start();
    let engine = agent.engine(small());
    assert_eq!(missing_blocks(&engine, &numbers()), BTreeSet::new());
    let pool = PoolFile::open(&agent.files().pool);
    pool.flip_object(&key(30), &small(), 3);
    // The copy in DRAM is right.
    assert_eq!(missing_blocks(&engine, &numbers()), BTreeSet::new());
    assert_eq!(engine.trim(), BLOCKS);
    drop(engine);
    assert_lost_and_saved_again(&agent, &[30]);
}

#[test]
fn a_damaged_journal_page_costs_its_blocks_and_is_reported() {
    let env = TestEnv::new();
    env.require(JOURNAL);
    let mut agent = saved_and_stopped(&env);
    let pool = PoolFile::open(&agent.files().pool);
    let pages = pool.pages_beginning(LOG_PAGE);
    assert!(pages.len() >= 4, "the journal has several pages: {pages:?}");
    pool.flip(pages[1] + 300, 1);
    agent.start();
    let engine = agent.engine(small());
    let matched = engine.matches(&numbers(), Scope::Local).len() as u64;
    let lost = missing_blocks(&engine, &numbers());
    assert!(!lost.is_empty() && lost.len() < numbers().len(), "one of several pages is lost: {lost:?}");
    assert_eq!(lost.first(), Some(&matched), "a match ends at the first lost block");
    assert_eq!(agent.admin().counter("corrupt_blocks"), 0, "a block that no journal entry names is a miss");
    engine.save_durably(&numbers());
    drop(engine);
    agent.kill();
    agent.start();
    assert_eq!(
        missing_blocks(&agent.engine(small()), &numbers()),
        BTreeSet::new(),
        "the journal was repaired"
    );
}

#[test]
fn repairs_one_damaged_copy_of_a_superblock_or_bank_header() {
    let env = TestEnv::new();
    env.require(JOURNAL);
    let mut agent = saved_and_stopped(&env);
    let pool = agent.files().pool.clone();
    let intact = env.folder().join("whole.pool");
    std::fs::copy(&pool, &intact).expect("a pool can be copied");
    for beginning in [SUPERBLOCK, BANK_HEADER] {
        let copies = PoolFile::open(&intact).pages_beginning(beginning);
        assert!(copies.len() >= 2, "expected two copies: {copies:?}");
        for copy in copies {
            std::fs::copy(&intact, &pool).expect("a pool can be copied");
            PoolFile::open(&pool).flip(copy + 20, 0);
            agent.start();
            assert_eq!(missing_blocks(&agent.engine(small()), &numbers()), BTreeSet::new());
            if beginning == SUPERBLOCK {
                // A checkpoint makes the repair. If the agent stops before it, the repair waits for the next
                // start.
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
                assert_eq!(pages.len(), 1, "both copies are equal again");
            }
        }
    }
    agent.start();
    assert_eq!(missing_blocks(&agent.engine(small()), &numbers()), BTreeSet::new());
}

#[test]
fn rejects_a_device_with_two_damaged_superblocks_with_the_remedy() {
    let env = TestEnv::new();
    let mut agent = saved_and_stopped(&env);
    let pool = PoolFile::open(&agent.files().pool);
    for copy in pool.pages_beginning(SUPERBLOCK) {
        pool.flip(copy + 70, 2);
    }
    let refused = agent.try_start().expect_err("the layout of the device is unknown");
    refused.assert_reports(2, &["node.pool", "damaged beyond repair", "superblock", "format it"]);
}

/// Damages random places of a pool: single bits, whole pages of noise, whole pages of zeros.
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
    // Further damage in the most sensitive places: journal pages, bank headers, superblocks.
    for beginning in [LOG_PAGE, BANK_HEADER, SUPERBLOCK] {
        let pages = pool.pages_beginning(beginning);
        if !pages.is_empty() && rng.random_bool(0.4) {
            let page = pages[rng.random_range(0..pages.len())];
            pool.flip(page + rng.random_range(0..PAGE), rng.random_range(0..8));
        }
    }
}

#[test]
fn after_any_damage_an_agent_serves_only_right_blocks_or_refuses_to_start() {
    const ROUNDS: usize = 24;
    let env = TestEnv::new();
    env.allow(DROPPED);
    env.allow(JOURNAL);
    let mut rng = seeded("damage");
    let mut agent = saved_and_stopped(&env);
    let intact = std::fs::read(&agent.files().pool).expect("a pool of 32 MiB");
    let (mut started, mut lost) = (0, 0);
    for _ in 0..ROUNDS {
        std::fs::write(&agent.files().pool, &intact).expect("the pool can be restored");
        damage(&PoolFile::open(&agent.files().pool), &mut rng);
        match agent.try_start() {
            Ok(()) => {
                started += 1;
                let engine = agent.engine(small());
                lost += missing_blocks(&engine, &numbers()).len();
                engine.save_durably(&(1000..1010).collect::<Vec<_>>());
                drop(engine);
                agent.stop();
            }
            Err(refused) => refused.assert_reports(2, &["node.pool", "damaged"]),
        }
    }
    print_line(&format!("{started} of {ROUNDS} damaged pools opened, {lost} blocks lost in them"));
    assert!(started > ROUNDS / 2, "most damage leaves a pool that can be used");
}

#[test]
fn a_verified_copy_detects_memory_corruption_and_the_agent_drops_the_block() {
    let env = TestEnv::new();
    env.require(DAMAGED);
    let agent = env.agent(&AgentConfig::named("node"));
    let scribbler = agent.engine(small());
    // The spans remain writable after the commit, since the process keeps the writable mapping of the region.
    let (overwrite, ticket) = commit_writable(&scribbler, &[0, 1, 2]);
    scribbler.client().wait_durable(ticket, PATIENCE).expect("a durability notice");
    let middle = object_bytes(&small()) * 3 + 100;
    overwrite(1, middle, &[0xa5]);

    let reader = agent.engine(small());
    let load = reader.client().load(&LoadRequest::new(keys(&[0, 1, 2]))).expect("a load");
    load.wait_layer(small().layers() - 1, PATIENCE).expect("all layers");
    let mut object = vec![0; object_bytes(&small())];
    let corrupt = CopyError::Corrupt { block: 1, object: 3 };
    assert_eq!(load.copy_object(1, 3, &mut object), Err(corrupt));
    let outcomes = reader.compare(&load, &[0, 1, 2]).expect("compared");
    assert!(outcomes[0].is_verified() && outcomes[2].is_verified(), "{outcomes:?}");
    assert_eq!(outcomes[1], Outcome::Corrupt);
    // Corruption while the load is held is detected as well.
    overwrite(2, 7, &[0xa5]);
    assert_eq!(reader.compare(&load, &[0, 1, 2]).expect("compared")[2], Outcome::Corrupt);
    drop(load);
    // The client reports the blocks, and the agent verifies and drops both. The copies on disk were written
    // before.
    agent.admin().wait_for("dram_corrupt_blocks", PATIENCE, |dropped| dropped == 2);
    let counters = agent.admin().counters();
    assert_eq!((counters.get("suspect_blocks"), counters.get("dram_blocks")), (2, 1));
    reader.load_all(&[0, 1, 2], &LoadParams::LOCAL);
    assert_eq!(agent.admin().counter("device_fills"), 2);
}

#[test]
fn a_corrupt_block_without_another_copy_is_dropped_and_can_be_saved_again() {
    let env = TestEnv::new();
    env.require(DAMAGED);
    let agent = env.agent(&AgentConfig { pool: None, ..AgentConfig::named("node") });
    let scribbler = agent.engine(small());
    let (overwrite, _) = commit_writable(&scribbler, &[0]);
    overwrite(0, 5, &[0xa5]);

    let reader = agent.engine(small());
    let outcome = reader.load(&[0], &LoadParams::LOCAL).expect("a load");
    assert_eq!(outcome, [Outcome::Corrupt]);
    agent.admin().wait_for("dram_corrupt_blocks", PATIENCE, |dropped| dropped == 1);
    assert_eq!(reader.matches(&[0], Scope::Local).len(), 0);
    assert_eq!(agent.admin().counter("arena_used_bytes"), 0, "the end of the last load frees the slot");
    reader.save(&[0]).expect("saved again");
    reader.load_all(&[0], &LoadParams::LOCAL);
}

#[test]
fn memory_corruption_before_the_write_back_is_detected_by_the_next_read() {
    let env = TestEnv::new();
    env.require(DROPPED);
    let slow = std::time::Duration::from_secs(1);
    let agent = env.agent(&AgentConfig { writeback_delay: slow, ..AgentConfig::named("node") });
    let scribbler = agent.engine(small());
    let (overwrite, ticket) = commit_writable(&scribbler, &[0, 1]);
    let mut other = vec![0; object_bytes(&small())];
    fill(&key(77).0, 0, &mut other);
    overwrite(0, 0, &other);
    scribbler.client().wait_durable(ticket, PATIENCE).expect("a durability notice");
    scribbler.trim();
    let outcomes = agent.engine(small()).load(&[0, 1], &LoadParams::LOCAL).expect("a load");
    assert_eq!(outcomes[0], Outcome::Missing(BlockStatus::Failed));
    assert!(outcomes[1].is_verified());
    assert_eq!(agent.admin().counter("corrupt_blocks"), 1);
}
