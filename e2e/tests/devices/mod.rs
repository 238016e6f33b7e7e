//! Devices that grow, fill up or are very large, and the reserve of file systems: a real agent on loop devices
//! and small file systems in memory. The tests need root.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use reprise_client::{Scope, Source};
use reprise_e2e::content::small;
use reprise_e2e::kubernetes::loop_device::LoopDevice;
use reprise_e2e::{Agent, AgentConfig, LoadParams, PATIENCE, TestEnv};

const MIB: u64 = 1 << 20;

/// Exit code of an agent whose device cannot be used.
const DEVICE: i32 = 2;

/// A file system in memory, unmounted when this is dropped.
struct MemoryFs {
    folder: PathBuf,
}

impl MemoryFs {
    fn new(folder: PathBuf, bytes: u64) -> MemoryFs {
        fs::create_dir_all(&folder).expect("a folder can be created");
        let path = folder.to_str().expect("folders of tests are UTF-8");
        run("mount", &["-t", "tmpfs", "-o", &format!("size={bytes},mode=755"), "reprise-test", path]);
        MemoryFs { folder }
    }
}

impl Drop for MemoryFs {
    fn drop(&mut self) {
        // Lazily: the agent of a failed test may still run.
        let _ = Command::new("umount").arg("--lazy").arg(&self.folder).status();
    }
}

fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().expect("util-linux is installed");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{program} {}: {text}: the test needs root", arguments.join(" "));
}

/// Returns the configuration of an agent that uses a whole block device.
fn on_device(path: &Path) -> AgentConfig {
    let device = format!("[[pool.devices]]\npath = \"{}\"", path.display());
    AgentConfig { pool: None, extra: device, ..AgentConfig::named("node") }
}

fn device(agent: &Agent) -> serde_json::Value {
    agent.admin().json("/status")["devices"][0].clone()
}

/// Replaces a part of an agent's configuration.
fn reconfigure(agent: &Agent, from: &str, to: &str) {
    let text = fs::read_to_string(&agent.files().config).expect("the agent has a configuration");
    assert!(text.contains(from), "'{from}' is not in:\n{text}");
    fs::write(&agent.files().config, text.replace(from, to)).expect("the folder is writable");
}

#[test]
fn a_file_grows_with_its_configured_size_and_does_not_shrink() {
    let (env, mut agent) = TestEnv::with_agent("node");
    let blocks: Vec<u64> = (0..40).collect();
    agent.engine(small()).save_durably(&blocks);
    let before = device(&agent)["slot_bytes"].as_u64().expect("a size");
    agent.stop();
    reconfigure(&agent, "bytes = \"64MiB\"", "bytes = \"128MiB\"");
    agent.start();
    let grown = device(&agent);
    assert_eq!(
        (&grown["bytes"], &grown["grown_bytes"]),
        (&(128 * MIB).into(), &(64 * MIB).into()),
        "{grown}"
    );
    assert_eq!(grown["slot_bytes"].as_u64().expect("a size"), before + 64 * MIB);
    assert_eq!(agent.engine(small()).load_all(&blocks, &LoadParams::LOCAL), vec![Source::OwnNvme; 40]);
    agent.stop();
    agent.start();
    assert_eq!(device(&agent)["grown_bytes"], 0, "it grows once");
    agent.stop();
    reconfigure(&agent, "bytes = \"128MiB\"", "bytes = \"64MiB\"");
    let refused = agent.try_start().expect_err("a pool does not shrink");
    env.allow("does not shrink");
    refused.assert_reports(DEVICE, &["does not shrink", "configure at least 134217728 bytes"]);
    reconfigure(&agent, "bytes = \"64MiB\"", "bytes = \"128MiB\"");
    agent.start();
    assert_eq!(agent.engine(small()).matches(&blocks, Scope::Local).len(), 40, "the refusal changed nothing");
}

#[test]
fn a_block_device_that_grew_has_more_space_at_the_next_start() {
    let env = TestEnv::new();
    let file = env.folder().join("device");
    let disk = LoopDevice::new(&file, 64 * MIB, "reprise-test-grows");
    let mut agent = env.agent(&on_device(disk.stable_name()));
    let blocks: Vec<u64> = (0..40).collect();
    agent.engine(small()).save_durably(&blocks);
    agent.stop();
    fs::OpenOptions::new().write(true).open(&file).and_then(|file| file.set_len(160 * MIB)).expect("space");
    run("losetup", &["--set-capacity", disk.stable_name().to_str().expect("UTF-8")]);
    agent.start();
    assert_eq!(device(&agent)["grown_bytes"], 96 * MIB);
    assert_eq!(agent.engine(small()).load_all(&blocks, &LoadParams::LOCAL), vec![Source::OwnNvme; 40]);
}

#[test]
fn a_full_device_stops_writes_and_serves_reads_until_a_restart_with_space() {
    let env = TestEnv::new();
    env.require("rejects writes");
    env.allow("device error");
    // The device has 256 MiB, and its file has space for 24.
    let memory = MemoryFs::new(env.folder().join("memory"), 24 * MIB);
    let disk = LoopDevice::new(&memory.folder.join("device"), 256 * MIB, "reprise-test-full");
    let mut agent = env.agent(&on_device(disk.stable_name()));
    let engine = agent.engine(small());
    let mut saved = Vec::new();
    for first in (0..2000).step_by(20) {
        let batch: Vec<u64> = (first..first + 20).collect();
        let committed = engine.save(&batch).expect("there is room in memory");
        let outcome = engine.client().wait_durable(committed.ticket, PATIENCE).expect("a durability notice");
        if outcome.durable < 20 {
            break;
        }
        saved.extend(batch);
    }
    assert!(!saved.is_empty() && saved.len() < 2000, "{} blocks were saved", saved.len());
    let full = device(&agent);
    assert!(full["read_only"].is_string() && full["lost"].is_null(), "{full}");
    let (_, _, metrics) = agent.admin().get_as("/metrics", "text/plain").expect("metrics are served");
    assert!(metrics.contains("reprise_agent_device_read_only{device=\"0\"} 1"), "{metrics}");
    engine.trim();
    assert_eq!(engine.load_all(&saved[..20], &LoadParams::LOCAL), vec![Source::OwnNvme; 20]);
    let committed = engine.save(&[9000]).expect("there is room in memory");
    let outcome = engine.client().wait_durable(committed.ticket, PATIENCE).expect("a durability notice");
    assert_eq!(outcome.durable, 0, "nothing is written");
    drop(engine);
    agent.stop();
    let path = memory.folder.to_str().expect("UTF-8");
    run("mount", &["-o", "remount,size=300m", path]);
    agent.start();
    assert!(device(&agent)["read_only"].is_null());
    let engine = agent.engine(small());
    for batch in saved.chunks(100) {
        assert_eq!(engine.load_all(batch, &LoadParams::LOCAL), vec![Source::OwnNvme; batch.len()]);
    }
    engine.save_durably(&(3000..3040).collect::<Vec<_>>());
    drop(engine);
    agent.stop();
    drop(disk);
}

#[test]
fn a_device_of_20_tb_stores_blocks_and_finds_them_again() {
    let env = TestEnv::new();
    // The file has holes; a file of 20 TB is too large for ext4.
    let memory = MemoryFs::new(env.folder().join("memory"), 256 * MIB);
    let disk = LoopDevice::new(&memory.folder.join("device"), 20_000_000_000_000, "reprise-test-20tb");
    let config = on_device(disk.stable_name());
    let mut agent = env.agent(&config);
    let blocks: Vec<u64> = (0..40).collect();
    agent.engine(small()).save_durably(&blocks);
    assert!(device(&agent)["slot_bytes"].as_u64().expect("a size") > 19_900_000_000_000);
    agent.kill();
    agent.start();
    assert_eq!(agent.engine(small()).load_all(&blocks, &LoadParams::LOCAL), vec![Source::OwnNvme; 40]);
    agent.stop();
    drop(disk);
}

#[test]
fn a_pool_file_leaves_the_reserve_or_is_refused_with_the_possible_size() {
    let env = TestEnv::new();
    env.allow("reserved for others");
    let memory = MemoryFs::new(env.folder().join("memory"), 256 * MIB);
    let config = AgentConfig { pool_folder: Some(memory.folder.clone()), ..AgentConfig::named("node") };
    let files = env.configure(&config);
    let refuse = |reserve: &str, words: &[&str]| {
        let text = fs::read_to_string(&files.config).expect("just written");
        fs::write(&files.config, text.replace("reserve_bytes = \"1MiB\"\n", reserve)).expect("writable");
        env.refusal_of(&files, reprise_e2e::agent::command(&files)).assert_reports(DEVICE, words);
        fs::write(&files.config, text).expect("writable");
    };
    // The default is at least 1 GiB.
    refuse("", &["1073741824 of them stay reserved", "at most 0 bytes", "pool.reserve_bytes"]);
    refuse("reserve_bytes = \"200MiB\"\n", &["209715200 of them stay reserved", "at most 58720256 bytes"]);
    assert!(!files.pool.exists(), "a refused file is removed");
    let mut agent = env.agent(&config);
    agent.engine(small()).save_durably(&[1, 2, 3]);
    agent.stop();
    reconfigure(&agent, "bytes = \"64MiB\"", "bytes = \"256MiB\"");
    let refused = agent.try_start().expect_err("growth leaves the reserve, too");
    refused.assert_reports(DEVICE, &["at most 267386880 bytes"]);
    reconfigure(&agent, "bytes = \"256MiB\"", "bytes = \"255MiB\"");
    agent.start();
    assert_eq!(agent.engine(small()).matches(&[1, 2, 3], Scope::Local).len(), 3);
    agent.stop();
}
