//! Encryption at rest: plaintext of a tenant with a key never reaches a device, and without the key its blocks are
//! misses on all nodes.

use std::collections::HashSet;
use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use reprise_client::{BlockStatus, Scope, Source};
use reprise_e2e::cluster::{numbers, wait_for_sources};
use reprise_e2e::content::{self, key, layout_of, small};
use reprise_e2e::control_plane::Store;
use reprise_e2e::disk::{PAGE, PoolFile};
use reprise_e2e::engine::object_bytes;
use reprise_e2e::{Agent, AgentConfig, Engine, LoadParams, Outcome, PATIENCE, TestEnv, wait_until};
use reprise_policy::TenantName;
use reprise_testkit::{configuration, kv_function};

/// Bytes of an object by which a scan recognises it.
const SAMPLE: usize = 64;

/// More than the failed reads after which a device counts as lost.
const BLOCKS: u64 = 24;

/// Fields of an encrypted header page, as in docs/FORMAT.md.
const SALT_AT: u64 = 100;
const KEY_ID_AT: u64 = 116;
const KIND_AT: u64 = 124;
const CHECKSUMS_AT: u64 = 128;
const TAG_BYTES: u64 = 16;

/// Keys of an agent's tenants: a folder with a file for each.
struct Keys(PathBuf);

impl Keys {
    fn of(env: &TestEnv, node: &str) -> Keys {
        let folder = env.folder().join(format!("{node}.keys"));
        fs::create_dir_all(&folder).expect("the folder is the test's");
        Keys(folder)
    }

    /// Replaces the keys of a tenant. Each key consists of one digit.
    fn write(&self, tenant: &str, digits: &[char]) {
        let fresh = self.0.join(".fresh");
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&fresh);
        let file = file.as_mut().expect("the folder is the test's");
        for digit in digits {
            writeln!(file, "{}", digit.to_string().repeat(64)).expect("writable");
        }
        fs::rename(fresh, self.0.join(tenant)).expect("the folder is the test's");
    }

    fn remove(&self, tenant: &str) {
        fs::remove_file(self.0.join(tenant)).expect("the file exists");
    }

    /// Section of an agent's configuration: `team-a` must be encrypted.
    fn section(&self) -> String {
        format!(
            "[encryption]\nkeys = \"{}\"\n[[tenants]]\nname = \"team-a\"\nencrypted = true\n",
            self.0.display()
        )
    }

    fn config(&self, node: &str) -> AgentConfig {
        AgentConfig { extra: self.section(), ..AgentConfig::named(node) }
    }
}

/// Number of places of the pool at which an object of a block begins.
fn objects_in(pool: &Path, blocks: &[u64]) -> usize {
    let mut object = vec![0; object_bytes(&small())];
    let mut samples = HashSet::new();
    for number in blocks {
        for index in 0..small().objects() {
            kv_function::fill(&key(*number).0, index, &mut object);
            samples.insert(object[..SAMPLE].to_vec());
        }
    }
    let pool = fs::read(pool).expect("the pool can be read");
    pool.chunks(SAMPLE).filter(|part| samples.contains(*part)).count()
}

/// Loads blocks from the device of the agent and returns those that are missing. No byte may be wrong.
fn missing(engine: &Engine, blocks: &[u64]) -> Vec<u64> {
    let outcomes = engine.load(blocks, &LoadParams::LOCAL).expect("the agent responds");
    let missing = |(number, outcome): (&u64, Outcome)| match outcome {
        Outcome::Verified(source) => {
            assert_eq!(source, Source::OwnNvme);
            None
        }
        Outcome::Missing(BlockStatus::Miss | BlockStatus::Failed) => Some(*number),
        other => panic!("block {number}: {other:?}"),
    };
    blocks.iter().zip(outcomes).filter_map(missing).collect()
}

/// Checks that misses were neither taken for errors of the device nor for damage.
fn assert_healthy(agent: &Agent) {
    let counters = agent.admin().counters();
    for name in
        ["corrupt_blocks", "fill_corrupt", "fill_device_errors", "pool_quarantined_slots", "devices_lost"]
    {
        assert_eq!(counters.get(name), 0, "{name}");
    }
}

/// Id of the key in the header page of a block, of its last write.
fn key_ids(agent: &Agent, number: u64) -> Vec<Vec<u8>> {
    let pool = PoolFile::open(&agent.files().pool);
    pool.headers_of(&key(number)).into_iter().map(|header| pool.read(header + KEY_ID_AT, 8)).collect()
}

#[test]
fn blocks_of_a_tenant_with_a_key_are_never_on_the_device_in_plaintext_and_survive_restarts() {
    let env = TestEnv::new();
    let keys = Keys::of(&env, "node");
    keys.write("team-a", &['1']);
    let mut agent = env.agent(&keys.config("node"));
    let (of_a, of_b) = (numbers(0..BLOCKS), numbers(1000..1000 + BLOCKS));
    let a = agent.engine_of(small(), "team-a");
    let b = agent.engine_of(small(), "team-b");
    of_a.chunks(4).for_each(|part| a.save_durably(part));
    of_b.chunks(4).for_each(|part| b.save_durably(part));
    a.trim();
    a.load_all(&of_a, &LoadParams::LOCAL);
    drop((a, b));
    agent.stop();
    let all = of_b.len() * small().objects() as usize;
    assert_eq!(
        objects_in(&agent.files().pool, &of_b),
        all,
        "the scan finds every object of the other tenant"
    );
    assert_eq!(objects_in(&agent.files().pool, &of_a), 0, "plaintext of an encrypted tenant");
    for _ in 0..2 {
        agent.start();
        let (a, b) = (agent.engine_of(small(), "team-a"), agent.engine_of(small(), "team-b"));
        assert_eq!((missing(&a, &of_a), missing(&b, &of_b)), (vec![], vec![]));
        // Small reads: each piece is verified on its own.
        a.trim();
        a.load_all(&of_a, &LoadParams { read_bytes: 4096, ..LoadParams::LOCAL });
        assert!(b.matches(&of_a, Scope::Local).is_empty());
        assert_healthy(&agent);
        agent.kill();
    }
}

#[test]
fn default_tenant_is_encrypted_if_it_has_a_key() {
    let env = TestEnv::new();
    let keys = Keys::of(&env, "node");
    keys.write("default", &['1']);
    let extra = format!("[encryption]\nkeys = \"{}\"\n", keys.0.display());
    let mut agent = env.agent(&AgentConfig { extra, ..AgentConfig::named("node") });
    let blocks = numbers(0..4);
    agent.engine(small()).save_durably(&blocks);
    agent.stop();
    assert_eq!(objects_in(&agent.files().pool, &blocks), 0);
    agent.start();
    assert_eq!(missing(&agent.engine(small()), &blocks), Vec::<u64>::new());
}

#[test]
fn new_blocks_have_the_first_key_and_blocks_of_a_removed_key_are_misses() {
    let env = TestEnv::new();
    let keys = Keys::of(&env, "node");
    keys.write("team-a", &['1']);
    let mut agent = env.agent(&keys.config("node"));
    let old = numbers(0..BLOCKS);
    let a = agent.engine_of(small(), "team-a");
    a.save_durably(&old);
    let before = key_ids(&agent, 0);
    keys.write("team-a", &['2', '1']);
    let mut next = 100..;
    let new = wait_until("a block with the new key", PATIENCE, || {
        let number = next.next().expect("numbers do not end");
        a.save_durably(&[number]);
        (key_ids(&agent, number) != before).then_some(number)
    });
    a.trim();
    assert_eq!(missing(&a, &old), Vec::<u64>::new());
    drop(a);
    agent.stop();
    agent.start();
    let a = agent.engine_of(small(), "team-a");
    assert_eq!((missing(&a, &old), missing(&a, &[new])), (vec![], vec![]));
    assert_healthy(&agent);

    drop(a);
    agent.stop();
    keys.write("team-a", &['2']);
    agent.start();
    let a = agent.engine_of(small(), "team-a");
    assert_eq!(missing(&a, &old), old, "blocks of the removed key");
    assert_eq!(missing(&a, &[new]), Vec::<u64>::new());
    assert!(a.matches(&old, Scope::Local).is_empty(), "they are dropped when they are read");
    assert_healthy(&agent);
    a.save_durably(&old);
    a.trim();
    assert_eq!(missing(&a, &old), Vec::<u64>::new());
}

#[test]
fn with_a_wrong_key_all_blocks_are_misses() {
    let env = TestEnv::new();
    let keys = Keys::of(&env, "node");
    keys.write("team-a", &['1']);
    let mut agent = env.agent(&keys.config("node"));
    let blocks = numbers(0..BLOCKS);
    agent.engine_of(small(), "team-a").save_durably(&blocks);
    agent.stop();
    keys.write("team-a", &['3']);
    agent.start();
    let a = agent.engine_of(small(), "team-a");
    assert_eq!(missing(&a, &blocks), blocks);
    assert_healthy(&agent);
}

#[test]
fn every_changed_bit_of_an_encrypted_block_is_found() {
    let env = TestEnv::new();
    env.require("dropped a stored block that failed verification");
    let keys = Keys::of(&env, "node");
    keys.write("team-a", &['1']);
    let mut agent = env.agent(&keys.config("node"));
    let blocks = numbers(0..BLOCKS);
    agent.engine_of(small(), "team-a").save_durably(&blocks);
    agent.stop();
    let pool = PoolFile::open(&agent.files().pool);
    let objects = u64::from(small().objects());
    let tags = CHECKSUMS_AT + 4 * objects;
    let header = |number: u64| pool.headers_of(&key(number))[0];
    // Bits of the payload, without a change of the header page.
    pool.flip_object(&key(0), &small(), 0);
    pool.flip_object(&key(1), &small(), small().objects() - 1);
    // Bits of the header page, whose checksum is made right again.
    let changed =
        [SALT_AT, KIND_AT, 40, 48, CHECKSUMS_AT + 5, tags + 1, tags + TAG_BYTES, tags + objects * TAG_BYTES];
    for (number, at) in (2..).zip(changed) {
        let page = header(number);
        pool.flip(page + at, 0);
        pool.seal(page);
    }
    // Bits of the header page only.
    let last = 2 + changed.len() as u64;
    pool.flip(header(last) + KEY_ID_AT, 4);
    pool.flip(header(last + 1) + PAGE - 2, 4);
    // Block and tags of another block.
    let swapped =
        pool.read(header(last + 2) + tags, usize::try_from(TAG_BYTES * (objects + 1)).expect("few"));
    pool.write(header(last + 3) + tags, &swapped);
    pool.seal(header(last + 3));
    let mut damaged = numbers(0..last + 2);
    damaged.push(last + 3);
    agent.start();
    let a = agent.engine_of(small(), "team-a");
    assert_eq!(missing(&a, &blocks), damaged);
    let counters = agent.admin().counters();
    assert_eq!(
        (counters.get("corrupt_blocks"), counters.get("pool_quarantined_slots")),
        (damaged.len() as u64, 0)
    );
    a.save_durably(&damaged);
    a.trim();
    assert_eq!(missing(&a, &blocks), Vec::<u64>::new());
}

#[test]
fn sessions_that_cannot_be_encrypted_are_refused_with_the_remedy() {
    let env = TestEnv::new();
    env.allow("session rejected");
    env.require("a tenant that must be encrypted has no key");
    let keys = Keys::of(&env, "node");
    let agent = env.agent(&keys.config("node"));
    let refused = |objects: u16, tenant: &str| {
        let name: TenantName = tenant.parse().expect("a name");
        configuration::provide_salt(&agent.files().socket, &name).expect("the folder is the test's");
        let layout = layout_of(objects / 2, 1);
        Engine::connect_with_salt(&agent.files().socket, layout, &name).err().map(|error| error.to_string())
    };
    let error = refused(8, "team-a").expect("the tenant has no key");
    assert!(
        error.contains("no key") && error.contains("encryption.keys") && error.contains("'team-a'"),
        "{error}"
    );
    assert_eq!(refused(8, "team-b"), None);
    keys.write("team-a", &['1']);
    wait_until("the agent reads the key", PATIENCE, || refused(8, "team-a").is_none().then_some(()));
    let error = refused(954, "team-a").expect("too many objects");
    assert!(error.contains("954 objects") && error.contains("fewer layers"), "{error}");
    assert_eq!((refused(952, "team-a"), refused(954, "team-b")), (None, None));
}

#[test]
fn configurations_that_would_write_plaintext_are_refused() {
    let env = TestEnv::new();
    let keys = Keys::of(&env, "node");
    let without_keys = "[[tenants]]\nname = \"team-a\"\nencrypted = true\n".to_owned();
    let config = AgentConfig { extra: without_keys, ..AgentConfig::named("node") };
    let refusal = env.refusal(&config);
    assert!(refusal.text.contains("set encryption.keys"), "{}", refusal.text);
    let config = AgentConfig { session: "extents = true".to_owned(), ..keys.config("node") };
    let refusal = env.refusal(&config);
    assert!(refusal.text.contains("session.extents"), "{}", refusal.text);
    keys.write("team-a", &['x']);
    let refusal = env.refusal(&keys.config("node"));
    assert!(refusal.text.contains("64 hexadecimal digits"), "{}", refusal.text);
    keys.write("team-a", &['1']);
    let mode: fs::Permissions = std::os::unix::fs::PermissionsExt::from_mode(0o644);
    fs::set_permissions(keys.0.join("team-a"), mode).expect("the file is the test's");
    let refusal = env.refusal(&keys.config("node"));
    assert!(refusal.text.contains("chmod 600"), "{}", refusal.text);
}

#[test]
fn blocks_of_a_tenant_vanish_from_the_cluster_when_its_key_is_removed() {
    let env = TestEnv::new();
    env.allow("session rejected");
    env.allow("node is silent");
    env.allow("peer connection lost");
    env.allow("live node registered from another address");
    env.allow("did not write a block, because it cannot be encrypted");
    env.require("a tenant that must be encrypted has no key");
    let member = env.control_plane(Store::Memory);
    let keys = ["first", "second"].map(|node| Keys::of(&env, node));
    let mut agents = Vec::new();
    for (keys, node) in keys.iter().zip(["first", "second"]) {
        keys.write("team-a", &['1']);
        let control_plane = vec![member.address().to_owned()];
        agents.push(env.agent(&AgentConfig { control_plane, ..keys.config(node) }));
    }
    let (of_a, of_b) = (numbers(0..BLOCKS), numbers(1000..1000 + BLOCKS));
    let a = agents[0].engine_of(small(), "team-a");
    let b = agents[0].engine_of(small(), "team-b");
    a.save_durably(&of_a);
    b.save_durably(&of_b);
    let reader = agents[1].engine_of(small(), "team-a");
    let other = agents[1].engine_of(small(), "team-b");
    wait_for_sources(&reader, &of_a, PATIENCE);
    wait_for_sources(&other, &of_b, PATIENCE);
    let pins = a.client().pin_blocks(&content::keys(&of_a[..4]), PATIENCE).expect("pinned");
    assert_eq!(pins.counts.affected, 4);
    keys[0].remove("team-a");
    wait_until("the session ends", PATIENCE, || a.client().trim().is_err().then_some(()));
    wait_until("the directory has no block of the tenant", PATIENCE, || {
        reader.matches(&of_a, Scope::Cluster).is_empty().then_some(())
    });
    assert_eq!(agents[0].admin().counter("erased_blocks"), BLOCKS);
    let used = |agent: &Agent| agent.admin().json("/status")["tenants"].clone();
    let page = used(&agents[0]);
    let of_tenant =
        page.as_array().expect("a list").iter().find(|one| one["name"] == "team-a").expect("configured");
    assert_eq!((&of_tenant["dram"]["used"], &of_tenant["nvme"]["used"]), (&0.into(), &0.into()));
    let refused =
        Engine::connect_as(&agents[0].files().socket, small(), "team-a").expect_err("no key").to_string();
    assert!(refused.contains("no key"), "{refused}");
    assert_eq!(b.matches(&of_b, Scope::Local).len(), of_b.len(), "blocks of another tenant");
    b.load_all(&of_b, &LoadParams::LOCAL);
    drop((a, b));

    agents[0].kill();
    agents[0].start();
    assert_eq!(agents[0].admin().counter("nvme_blocks"), BLOCKS, "only blocks of the other tenant");
    assert!(reader.matches(&of_a, Scope::Cluster).is_empty());
    assert_healthy(&agents[0]);
    keys[0].write("team-a", &['2']);
    let a = wait_until("the tenant has a key again", PATIENCE, || {
        Engine::connect_as(&agents[0].files().socket, small(), "team-a").ok()
    });
    wait_until("the tenant's blocks are saved again", PATIENCE, || {
        a.save_durably(&of_a[..4]);
        (a.matches(&of_a[..4], Scope::Local).len() == 4).then_some(())
    });
    wait_for_sources(&reader, &of_a[..4], PATIENCE);
}

#[test]
fn blocks_are_dropped_at_start_if_the_key_was_removed_meanwhile() {
    let env = TestEnv::new();
    env.require("a tenant that must be encrypted has no key");
    let keys = Keys::of(&env, "node");
    keys.write("team-a", &['1']);
    let mut agent = env.agent(&keys.config("node"));
    agent.engine_of(small(), "team-a").save_durably(&numbers(0..BLOCKS));
    agent.engine_of(small(), "team-b").save_durably(&numbers(1000..1004));
    agent.stop();
    keys.remove("team-a");
    agent.start();
    wait_until("the blocks are dropped", PATIENCE, || {
        (agent.admin().counter("nvme_blocks") == 4).then_some(())
    });
    assert_eq!(agent.admin().counter("erased_blocks"), BLOCKS);
    assert_eq!(missing(&agent.engine_of(small(), "team-b"), &numbers(1000..1004)), Vec::<u64>::new());
}
