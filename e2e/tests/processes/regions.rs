//! Regions of the arena change tenants: the next tenant gets new memory, and no tenant keeps all of it.

use std::collections::HashSet;
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use reprise_client::{ClientError, CommitOptions, LoadRequest, Scope, Source};
use reprise_e2e::content::{key, keys, large};
use reprise_e2e::{Agent, AgentConfig, Engine, LoadParams, PATIENCE, TestEnv, wait_until};
use reprise_policy::ByteSize;
use reprise_testkit::kv_function;

/// Blocks of 1 MiB in one region.
const BLOCKS_PER_REGION: u64 = 8;

/// Bytes of an object by which a scan recognises it.
const SAMPLE: usize = 64;

/// Four regions of 8 blocks, without quotas, and room for 140 blocks on NVMe.
fn config() -> AgentConfig {
    AgentConfig {
        arena: ByteSize(32 << 20),
        region: ByteSize(BLOCKS_PER_REGION << 20),
        pool: Some(ByteSize(160 << 20)),
        ..AgentConfig::named("node")
    }
}

/// The memory files of an agent's regions, as a process keeps them that received their descriptors once.
fn memory_files(agent: &mut Agent) -> Vec<File> {
    let folder = format!("/proc/{}/fd", agent.running().id());
    let entries =
        std::fs::read_dir(folder).expect("the agent runs").map(|entry| entry.expect("an entry").path());
    let is_region = |path: &PathBuf| {
        std::fs::read_link(path).is_ok_and(|to| to.to_string_lossy().starts_with("/memfd:reprise-region"))
    };
    let mut files: Vec<File> =
        entries.filter(is_region).map(|path| File::open(path).expect("a descriptor")).collect();
    // The agent has a writable and a read-only descriptor of each.
    files.sort_by_key(inode);
    files.dedup_by_key(|file| inode(file));
    files
}

fn inode(file: &File) -> u64 {
    file.metadata().expect("an open file").ino()
}

/// Those of the files that this process maps. Only sessions of this test have received their descriptors.
fn mapped(files: &[File]) -> Vec<&File> {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("the kernel has it");
    let inodes: HashSet<u64> =
        maps.lines().filter_map(|line| line.split_whitespace().nth(4)?.parse().ok()).collect();
    files.iter().filter(|file| inodes.contains(&inode(file))).collect()
}

fn contents(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; file.metadata().expect("an open file").len() as usize];
    file.read_exact_at(&mut bytes, 0).expect("readable");
    bytes
}

fn with_data(files: &[File]) -> usize {
    files.iter().filter(|file| contents(file).iter().any(|byte| *byte != 0)).count()
}

/// Number of places in the files at which an object of a block begins.
fn objects_in(files: &[&File], blocks: &[u64]) -> usize {
    let mut object = vec![0; large().object_bytes() as usize];
    let mut samples = HashSet::new();
    for number in blocks {
        for index in 0..large().objects() {
            kv_function::fill(&key(*number).0, index, &mut object);
            samples.insert(object[..SAMPLE].to_vec());
        }
    }
    let count = |file: &&File| contents(file).chunks(SAMPLE).filter(|part| samples.contains(*part)).count();
    files.iter().map(count).sum()
}

fn save_all(engine: &Engine, blocks: &[u64]) {
    blocks.chunks(4).for_each(|part| engine.save_durably(part));
}

#[test]
fn memory_passes_to_another_tenant_out_of_reach_of_old_descriptors_and_blocks_stay_on_nvme() {
    let env = TestEnv::new();
    let mut agent = env.agent(&config());
    let (of_a, of_b): (Vec<u64>, Vec<u64>) = ((0..28).collect(), (1000..1024).collect());
    let a = agent.engine_of(large(), "team-a");
    save_all(&a, &of_a);
    let old = memory_files(&mut agent);
    assert_eq!((old.len(), with_data(&old)), (4, 4), "the tenant fills the memory");
    let seen = objects_in(&mapped(&old), &of_a);
    assert_eq!(seen, of_a.len() * large().objects() as usize, "the scan finds every object");
    drop(a);
    wait_until("the session has ended", PATIENCE, || {
        let has_ended = agent.admin().json("/status")["sessions"].as_array().is_some_and(Vec::is_empty);
        (has_ended && mapped(&old).is_empty()).then_some(())
    });

    let b = agent.engine_of(large(), "team-b");
    for part in of_b.chunks(4) {
        b.save_durably(part);
        b.load_all(part, &LoadParams::LOCAL);
    }
    b.load_all(&of_b, &LoadParams::LOCAL);
    let renewed = agent.admin().counter("regions_renewed") as usize;
    assert!(renewed >= 2, "{:?}", agent.admin().counters());
    let current = memory_files(&mut agent);
    assert_eq!(current.len(), old.len(), "the agent closes old memory");
    let of_tenant = mapped(&current);
    assert!(objects_in(&of_tenant, &of_b) > 0, "the scan finds objects of the tenant");
    assert_eq!(objects_in(&of_tenant, &of_a), 0, "bytes of the former tenant in the memory of the next");
    assert_eq!(with_data(&old), old.len() - renewed, "the pages of the old memory are freed");
    let all: Vec<&File> = old.iter().collect();
    assert_eq!(objects_in(&all, &of_b), 0, "bytes of the next tenant behind old descriptors");

    let a = agent.engine_of(large(), "team-a");
    assert_eq!(a.matches(&of_a, Scope::Local).len(), of_a.len(), "no durable block is lost");
    for part in of_a.chunks(4) {
        let sources = a.load_all(part, &LoadParams::LOCAL);
        assert!(sources.iter().all(|source| matches!(source, Source::OwnNvme | Source::OwnDram)));
    }
    b.load_all(&of_b[..4], &LoadParams::LOCAL);
    assert_eq!(agent.admin().counter("corrupt_blocks"), 0);
}

/// Saves new blocks and loads old ones until it is stopped. The next load begins before the previous one is released,
/// so that the blocks are always in use. Without a free slot, it saves nothing, since it would hold the load meanwhile.
fn flood(engine: &Engine, first: u64, is_over: &AtomicBool, rounds: &AtomicU64) {
    let hot = [first, first + 1];
    save_all(engine, &hot);
    let mut held = None;
    for number in (first + 2..first + 42).cycle() {
        if is_over.load(Ordering::Relaxed) {
            break;
        }
        let request = LoadRequest { deadline: PATIENCE, scope: Scope::Local, ..LoadRequest::new(keys(&hot)) };
        let load = engine.client().load(&request).expect("the agent responds");
        engine.compare(&load, &hot).expect("the agent responds");
        drop(held.replace(load));
        let reserved = engine.client().reserve(1, Duration::from_millis(20)).expect("the agent responds");
        for mut reservation in reserved {
            engine.fill(&mut reservation, &key(number)).expect("a writable slot");
            let items = vec![(reservation, key(number))];
            engine.client().commit(items, CommitOptions::default()).expect("the agent responds");
        }
        rounds.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn every_tenant_with_a_session_gets_a_region_while_another_one_floods_the_arena() {
    let env = TestEnv::new();
    let agent = env.agent(&config());
    let (is_over, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    let flooding = [agent.engine_of(large(), "team-a"), agent.engine_of(large(), "team-a")];
    thread::scope(|scope| {
        for (engine, first) in flooding.iter().zip([0, 500]) {
            let (is_over, rounds) = (&is_over, &rounds);
            scope.spawn(move || flood(engine, first, is_over, rounds));
        }
        let _over = Over(&is_over);
        wait_until("the tenant maps all memory", PATIENCE, || {
            let is_full = agent.admin().counter("arena_used_bytes") > 3 * (BLOCKS_PER_REGION << 20);
            (is_full && rounds.load(Ordering::Relaxed) > 20).then_some(())
        });
        let others = ["team-b", "team-c", "team-d"].map(|tenant| agent.engine_of(large(), tenant));
        for (engine, first) in others.iter().zip([1000, 2000, 3000]) {
            let blocks: Vec<u64> = (first..first + 4).collect();
            engine.save_durably(&blocks);
            engine.load_all(&blocks, &LoadParams::LOCAL);
        }
        let before = rounds.load(Ordering::Relaxed);
        wait_until("the flood continues", PATIENCE, || {
            (rounds.load(Ordering::Relaxed) > before + 4).then_some(())
        });
        assert_eq!(agent.admin().counter("regions_renewed"), 3);
        let fifth = agent.engine_of(large(), "team-e");
        let error =
            fifth.client().reserve(1, Duration::ZERO).expect_err("each region is another tenant's only one");
        assert!(
            matches!(&error, ClientError::BadRequest(text) if text.contains("all 4 regions") && text.contains("arena.bytes")),
            "{error}"
        );
    });
    assert_eq!(agent.admin().counter("corrupt_blocks"), 0);
}

/// Ends the flood, also if the test fails.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
