//! Clients that read and write extents of a pool file themselves, with direct I/O, and SIGKILL of clients and
//! agent at random moments.
//!
//! A client leases extents, writes other bytes and then the blocks, commits, and reads pinned blocks. After the
//! loss of its agent, it continues to write its extents for some time, while the next agent saves other blocks.
//! Then all blocks are compared with the ledger:
//! * a block that was reported durable is loaded byte-exact;
//! * any other block is byte-exact or a miss, and no block is damaged;
//! * when the clients have ended, the used bytes of the pool are those of the blocks: no slot is lost.

use std::collections::BTreeSet;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rand::RngExt;
use rand::rngs::StdRng;
use reprise_client::extents::PageBuffer;
use reprise_client::{
    BlockStatus, Client, ClientError, CommitOptions, ConnectOptions, ExtentStatus, LeasedExtent, PinOutcome,
    Source,
};
use reprise_e2e::content::{NAMESPACE, device_slot_bytes, key, keys, small};
use reprise_e2e::seed::{number, print_line, seeded};
use reprise_e2e::{Agent, AgentConfig, Engine, LoadParams, Outcome, PATIENCE, TestEnv, wait_until};
use reprise_policy::GpuPlace;
use reprise_testkit::kv_function;

use crate::processes::client_process::{ClientProcess, ClientTest};

/// Set in a child process of this executable that acts as a client: socket, seed and first block.
const CLIENT: ClientTest = ClientTest {
    name: "processes::extents::killed_clients_and_agents_damage_no_block",
    variable: "REPRISE_E2E_EXTENT_CLIENT",
};

/// Environment variable with the number of kills.
const KILLS_VARIABLE: &str = "REPRISE_E2E_EXTENT_KILLS";

/// Number of kills without the variable.
const KILLS: u64 = 12;

/// Blocks of each client, far fewer than the slots of the pool.
const CLIENT_BLOCKS: u64 = 300;

const CLIENTS: u64 = 2;

/// Microseconds from the start of the clients' I/O to a kill.
const KILL_AFTER_US: std::ops::Range<u64> = 500..120_000;

/// Milliseconds for which a client writes after the loss of its agent.
const LATE_MS: std::ops::Range<u64> = 0..300;

fn config() -> AgentConfig {
    AgentConfig { session: "extents = true".to_owned(), ..AgentConfig::named("lender") }
}

/// Payload of a block, with its padding.
fn payload(number: u64) -> PageBuffer {
    let layout = small();
    let mut bytes = PageBuffer::new(layout.slot_bytes() as usize).expect("memory");
    let objects = bytes.chunks_exact_mut(layout.object_bytes() as usize);
    (0..).zip(objects).for_each(|(object, into)| kv_function::fill(&key(number).0, object, into));
    bytes
}

/// Writes blocks to leased extents and commits them.
fn save(
    engine: &Engine,
    extents: Vec<LeasedExtent>,
    numbers: &[u64],
) -> Result<Vec<ExtentStatus>, ClientError> {
    let write = |(extent, number): (LeasedExtent, &u64)| {
        let checksums = extent.write(&payload(*number)).expect("the file can be written");
        (extent, key(*number), checksums)
    };
    let items = extents.into_iter().zip(numbers).map(write).collect();
    engine.client().commit_extents(items, CommitOptions::default())
}

/// Reads a pinned block and compares every byte.
fn read_pinned(pinned: &PinOutcome, number: u64) {
    let PinOutcome::Pinned(extent) = pinned else { panic!("block {number} is not pinned: {pinned:?}") };
    let slot = extent.read().unwrap_or_else(|error| panic!("pinned block {number}: {error}"));
    let objects = slot[4096..].chunks_exact(small().object_bytes() as usize);
    for (object, bytes) in (0..).zip(objects) {
        assert_eq!(kv_function::mismatches(&key(number).0, object, bytes), 0, "block {number}");
    }
}

#[test]
fn stated_place_of_a_gpu_is_checked_and_reported() {
    let env = TestEnv::new();
    env.allow("session rejected");
    let agent = env.agent(&config());
    let connect = |gpu: GpuPlace| {
        let options = ConnectOptions::new(&agent.files().socket, NAMESPACE, small()).call_timeout(PATIENCE);
        Client::connect(options.gpu(gpu))
    };
    let sessions = || agent.admin().json("/status")["sessions"].as_array().cloned().expect("sessions");
    let missing = GpuPlace::Pci("ffff:ff:1f.7".parse().expect("an address"));
    for (gpu, words) in [(missing, "ffff:ff:1f.7"), (GpuPlace::NumaNode(4_000_000), "NUMA node 4000000")] {
        let error = connect(gpu).expect_err("this machine has no such place");
        assert!(matches!(&error, ClientError::BadRequest(text) if text.contains(words)), "{error}");
    }
    let engine = agent.engine(small());
    assert!(sessions()[0]["gpu"].is_null(), "no place is guessed");
    drop(engine);
    wait_until("the session to end", PATIENCE, || sessions().is_empty().then_some(()));
    // Any function of this machine: the agent does not require that it is a GPU.
    let functions = std::fs::read_dir("/sys/bus/pci/devices").into_iter().flatten().flatten();
    let mut functions = functions.filter_map(|entry| {
        let address = entry.file_name().to_str()?.parse().ok()?;
        Some((address, root_complex(&entry.path())?))
    });
    let Some((address, complex)) = functions.next() else { return };
    let client = connect(GpuPlace::Pci(address)).expect("a session");
    assert_eq!(sessions()[0]["gpu"]["pci_root"].as_str(), Some(complex.as_str()));
    assert_eq!(client.lease_extents(4, PATIENCE).expect("leases").len(), 4);
    let device = std::fs::metadata(&agent.files().pool).expect("a file").dev();
    // The low bits of both parts suffice for disks.
    let disk = format!("/sys/dev/block/{}:{}", (device >> 8) & 0xfff, device & 0xff);
    if let Some(complex) = root_complex(Path::new(&disk)) {
        let shown = &agent.admin().json("/status")["devices"][0]["place"];
        assert_eq!(shown["pci_root"].as_str(), Some(complex.as_str()), "the disk of the pool's file");
    }
}

/// Root complex above an entry of sysfs.
fn root_complex(entry: &Path) -> Option<String> {
    let path = std::fs::canonicalize(entry).ok()?;
    let names = path.iter().filter_map(|part| part.to_str());
    names.into_iter().find(|name| name.starts_with("pci") && name.contains(':')).map(str::to_owned)
}

#[test]
fn client_writes_and_reads_extents_of_a_pool_file() {
    let env = TestEnv::new();
    env.allow("dropped a stored block that failed verification");
    let mut agent = env.agent(&config());
    let engine = agent.engine(small());
    let numbers: Vec<u64> = (0..20).collect();
    let extents = engine.client().lease_extents(20, PATIENCE).expect("leases");
    assert_eq!(extents.len(), 20);
    assert!(engine.matches(&numbers, reprise_client::Scope::Local).is_empty());
    assert_eq!(save(&engine, extents, &numbers).expect("answered"), [ExtentStatus::Durable; 20]);
    let loaded = engine.load(&numbers, &LoadParams::LOCAL).expect("answered");
    assert_eq!(loaded, [Outcome::Verified(Source::OwnNvme); 20]);
    let pinned = engine.client().pin_extents(&keys(&numbers)).expect("answered");
    numbers.iter().zip(&pinned).for_each(|(number, pinned)| read_pinned(pinned, *number));
    assert_eq!(agent.admin().counter("extents_pinned"), 20);
    drop(pinned);
    wait_until("the pins to end", PATIENCE, || (agent.admin().counter("extents_pinned") == 0).then_some(()));

    let again = engine.client().lease_extents(1, PATIENCE).expect("a lease");
    assert_eq!(save(&engine, again, &[3]).expect("answered"), [ExtentStatus::Exists]);
    drop(engine.client().lease_extents(5, PATIENCE).expect("leases"));
    assert_no_leak(&agent, 20);

    let wrong = engine.client().lease_extents(1, PATIENCE).expect("a lease");
    let items = wrong.into_iter().map(|extent| {
        let mut checksums = extent.write(&payload(77)).expect("written");
        checksums[2] ^= 1;
        (extent, key(77), checksums)
    });
    let statuses = engine.client().commit_extents(items.collect(), CommitOptions::default());
    assert_eq!(statuses.expect("answered"), [ExtentStatus::Durable]);
    let found = engine.load(&[77], &LoadParams::LOCAL).expect("answered");
    assert_eq!(found, [Outcome::Missing(BlockStatus::Failed)], "readers verify checksums");

    drop(engine);
    agent.kill();
    agent.start();
    let found = agent.engine(small()).load(&numbers, &LoadParams::LOCAL).expect("answered");
    assert_eq!(found, [Outcome::Verified(Source::OwnNvme); 20]);
}

#[test]
fn extents_are_refused_unless_they_are_configured() {
    let env = TestEnv::new();
    let agent = env.agent(&AgentConfig::named("node"));
    let engine = agent.engine(small());
    let error = engine.client().lease_extents(1, PATIENCE).expect_err("not configured");
    assert!(matches!(&error, ClientError::BadRequest(text) if text.contains("session.extents")), "{error}");
    engine.save_durably(&[1]);
    let pinned = engine.client().pin_extents(&keys(&[1, 2])).expect("answered");
    assert!(matches!(pinned[..], [PinOutcome::NotDurable, PinOutcome::Miss]), "{pinned:?}");
}

/// Checks that every used slot holds one of `blocks` blocks, once no client holds an extent.
fn assert_no_leak(agent: &Agent, blocks: u64) {
    let counters = wait_until("extents to be returned", PATIENCE, || {
        let counters = agent.admin().wait_quiet(PATIENCE);
        (counters.get("extents_leased") + counters.get("extents_pinned") == 0).then_some(counters)
    });
    assert_eq!(counters.get("nvme_blocks"), blocks, "blocks on the device");
    assert_eq!(counters.get("pool_used_bytes"), blocks * device_slot_bytes(&small()), "bytes of their slots");
    assert_eq!(counters.get("pool_quarantined_slots"), 0, "a kill damages no slot");
    assert_eq!(counters.get("corrupt_blocks"), 0, "a kill corrupts no block");
}

#[test]
fn killed_clients_and_agents_damage_no_block() {
    if let Some(parameters) = CLIENT.parameters() {
        return be_client(&parameters.socket, parameters.first, parameters.rng);
    }
    let env = TestEnv::new();
    let mut rng = seeded("kill with extents");
    let mut agent = env.agent(&config());
    let (mut durable, mut agents, mut others) = (BTreeSet::new(), 0, 1_000_000);
    let kills = number(KILLS_VARIABLE, KILLS);
    for kill in 0..kills {
        let clients: Vec<ClientProcess> =
            (0..CLIENTS).map(|client| CLIENT.start(&agent, rng.random(), client * CLIENT_BLOCKS)).collect();
        let before = agent.admin().counter("extent_leases");
        agent.admin().wait_for("extent_leases", PATIENCE, |leases| leases > before);
        // Not a synchronisation: the sleep selects the random moment of the kill.
        std::thread::sleep(Duration::from_micros(rng.random_range(KILL_AFTER_US)));
        let mut clients = clients.into_iter();
        if kill % 2 == 0 {
            agents += 1;
        } else {
            let mut victim = clients.next().expect("two clients");
            victim.kill();
            durable.extend(victim.finish());
            save_others(&agent, &mut others, &mut durable);
            agent.admin().wait_for("extents_quarantined", PATIENCE, |extents| extents == 0);
        }
        agent.kill();
        agent.start();
        // The next agent saves blocks while clients of the killed one write their extents.
        save_others(&agent, &mut others, &mut durable);
        durable.extend(clients.flat_map(ClientProcess::finish));
        check(&agent, &durable, others);
    }
    print_line(&format!("{kills} kills, {agents} of the agent alone; {} durable blocks", durable.len()));
    assert!(durable.len() > 20, "only {} blocks became durable", durable.len());
}

/// Saves further blocks through the arena.
fn save_others(agent: &Agent, others: &mut u64, durable: &mut BTreeSet<u64>) {
    let numbers: Vec<u64> = (*others..*others + 4).collect();
    agent.engine(small()).save_durably(&numbers);
    *others += 4;
    durable.extend(numbers);
}

/// Compares all blocks with the ledger.
fn check(agent: &Agent, durable: &BTreeSet<u64>, others: u64) {
    let engine = agent.engine(small());
    let all: Vec<u64> = (0..CLIENTS * CLIENT_BLOCKS).chain(1_000_000..others).collect();
    let mut found = 0;
    for numbers in all.chunks(128) {
        let outcomes = engine.load(numbers, &LoadParams::LOCAL).expect("the agent is running");
        for (number, outcome) in numbers.iter().zip(outcomes) {
            match outcome {
                Outcome::Verified(_) => found += 1,
                Outcome::Missing(BlockStatus::Miss) => {
                    assert!(!durable.contains(number), "block {number} was durable and is missing");
                }
                other => panic!("block {number} is neither right nor a miss: {other:?}"),
            }
        }
    }
    drop(engine);
    assert_no_leak(agent, found);
}

/// Saves and reads blocks until the agent is lost or this process is killed.
fn be_client(socket: &Path, first: u64, mut rng: StdRng) {
    let engine = match Engine::connect(socket, small()) {
        Ok(engine) => engine,
        Err(error) => return assert_lost(&error),
    };
    let (mut saved, mut next) = (Vec::new(), first);
    let mut output = std::io::stdout();
    // Ends the line that the test harness has begun.
    writeln!(output).expect("the pipe is open");
    loop {
        let count = rng.random_range(1..8);
        let extents = match engine.client().lease_extents(count, PATIENCE) {
            Ok(extents) => extents,
            Err(error) => return assert_lost(&error),
        };
        // Other bytes first: they must never be found under a key.
        let other = payload(rng.random());
        let late: Vec<_> = extents.iter().map(|extent| (file_of(extent), extent.payload_offset())).collect();
        write_late(&late, &other, rng.random_range(0..20));
        let numbers: Vec<u64> = (next..next + extents.len() as u64).collect();
        next = if next + 8 > first + CLIENT_BLOCKS { first } else { next + extents.len() as u64 };
        if rng.random_bool(0.1) {
            drop(late);
            drop(extents);
            continue;
        }
        if !engine.client().is_alive() {
            // The leases were neither returned nor committed.
            return write_late(&late, &other, rng.random_range(LATE_MS));
        }
        drop(late);
        match save(&engine, extents, &numbers) {
            Ok(statuses) => {
                let kept = [ExtentStatus::Durable, ExtentStatus::Exists];
                assert!(statuses.iter().all(|status| kept.contains(status)), "{statuses:?}");
                for number in &numbers {
                    writeln!(output, "durable {number}").expect("the pipe is open");
                }
                output.flush().expect("the pipe is open");
                saved.extend(numbers);
            }
            Err(error) => return assert_lost(&error),
        }
        let number = saved[rng.random_range(0..saved.len())];
        match engine.client().pin_extents(&keys(&[number])) {
            Ok(pinned) => read_pinned(&pinned[0], number),
            Err(error) => return assert_lost(&error),
        }
    }
}

/// Writes leased extents for some time, also after the end of their session.
fn write_late(extents: &[(std::sync::Arc<std::fs::File>, u64)], bytes: &PageBuffer, milliseconds: u64) {
    use std::os::unix::fs::FileExt;
    let until = Instant::now() + Duration::from_millis(milliseconds);
    while Instant::now() < until {
        for (file, offset) in extents {
            file.write_all_at(bytes, *offset).expect("the file can be written");
        }
    }
}

fn file_of(extent: &LeasedExtent) -> std::sync::Arc<std::fs::File> {
    extent.file().cloned().expect("a pool in a file")
}

fn assert_lost(error: &ClientError) {
    let is_lost = matches!(error, ClientError::AgentLost { .. } | ClientError::AgentAbsent { .. });
    assert!(is_lost, "unexpected error after a kill: {error}");
}
