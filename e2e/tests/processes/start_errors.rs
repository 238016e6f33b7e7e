//! Starts that must fail: every error names the cause and the remedy.
//!
//! Exit codes of the agent: 1 configuration, 2 pool device, 3 memory, sockets or ports.

use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use reprise_e2e::agent::command;
use reprise_e2e::config::AgentFiles;
use reprise_e2e::content::small;
use reprise_e2e::disk::{PoolFile, SUPERBLOCK};
use reprise_e2e::process::{binary, copy_binary};
use reprise_e2e::{AgentConfig, LoadParams, StartingProcess, TestEnv, control_plane, fast_call};
use reprise_policy::ByteSize;

const CONFIGURATION: i32 = 1;
const DEVICE: i32 = 2;
const RESOURCE: i32 = 3;

/// Id of a user and group without privileges on every Linux.
const UNPRIVILEGED: u32 = 65534;

fn default_config() -> AgentConfig {
    AgentConfig::named("node")
}

/// Returns a shell line as a command; it gets the agent's binary as `$1` and its configuration as `$2`.
fn in_shell(line: &str, files: &AgentFiles) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", line, "sh"]).arg(binary("reprise-agent")).arg(&files.config);
    command
}

fn is_root() -> bool {
    std::os::unix::fs::MetadataExt::uid(&fs::metadata("/proc/self").expect("/proc is mounted")) == 0
}

/// Returns a command that runs the agent unprivileged if the test runs as root, since permissions do not bind
/// root.
fn as_unprivileged(env: &TestEnv, files: &AgentFiles) -> Command {
    if !is_root() {
        return command(files);
    }
    let copy = env.folder().join("unprivileged-agent");
    copy_binary("reprise-agent", &copy);
    let mut command = Command::new(copy);
    command.arg("--config").arg(&files.config).uid(UNPRIVILEGED).gid(UNPRIVILEGED);
    command
}

#[test]
fn rejects_an_invalid_configuration_with_field_value_and_remedy() {
    let env = TestEnv::new();
    let text = default_config().text(&env.configure(&default_config()));
    for (from, to, words) in [
        ("[arena]", "[arena]\nbites = \"1GiB\"", ["unknown field", "bites", "node.toml"]),
        ("[arena]", "[arean]\n[arena]", ["unknown field", "arean", "expected one of"]),
        ("\"16MiB\"", "\"16 Megs\"", ["16 Megs", "MiB", "node.toml"]),
        ("\"10ms\"", "\"10\"", ["10", "50ms", "node.toml"]),
        ("region_bytes = \"8MiB\"", "region_bytes = \"3MiB\"", ["arena.region_bytes", "3MiB", "2MiB"]),
        (
            "listen = \"127.0.0.1:0\"\nstall",
            "listen = \"everywhere\"\nstall",
            ["peers.listen", "everywhere", ":"],
        ),
        ("address = []", "address = \"https://x:1\"", ["controlplane.address", "https://x:1", "host:port"]),
        ("segment_bytes = \"2MiB\"", "segment_bytes = \"1MiB\"", ["pool.segment_bytes", "1MiB", "2MiB"]),
        ("bytes = \"64MiB\"", "bytes = \"64\"", ["pool.devices.bytes", "64", "1MiB"]),
        ("[node]", "this is not toml [", ["node.toml", "configuration", "1"]),
        ("plain = true", "", ["neither tls.folder", "reprise certs issue agent/node", "tls.plain = true"]),
        (
            "[admin]\nlisten = \"127.0.0.1:0\"",
            "[admin]\nlisten = \"0.0.0.0:0\"",
            ["tls.plain = true serves 0.0.0.0:0", "loopback", "tls.folder"],
        ),
    ] {
        let files = AgentFiles::within(env.folder(), "node");
        assert!(text.contains(from), "the default configuration contains {from}");
        fs::write(&files.config, text.replacen(from, to, 1)).expect("the folder is writable");
        env.refusal_of(&files, command(&files)).assert_reports(CONFIGURATION, &words);
        assert!(!files.pool.exists(), "a rejected configuration creates no pool");
    }
}

#[test]
fn names_a_missing_configuration_file() {
    let env = TestEnv::new();
    let mut files = env.configure(&default_config());
    files.config = env.folder().join("nowhere.toml");
    env.refusal_of(&files, command(&files)).assert_reports(CONFIGURATION, &["nowhere.toml", "No such file"]);
    files.config = env.folder().to_owned();
    env.refusal_of(&files, command(&files)).assert_reports(CONFIGURATION, &["regular file"]);
}

#[test]
fn the_control_plane_rejects_invalid_configurations_and_a_port_in_use() {
    let env = TestEnv::new();
    let config = env.folder().join("plane.toml");
    let log = env.folder().join("plane.log");
    let occupied = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let occupied = occupied.local_addr().expect("a bound port").to_string();
    let memory = "tls.plain = true\n[store]\nkind = \"memory\"\n";
    for (text, words) in [
        (format!("lisen = \"127.0.0.1:0\"\n{memory}"), ["lisen", "unknown field"]),
        (format!("{memory}[membership]\ndead_after = \"1500\"\n"), ["1500", "50ms"]),
        (
            format!("{memory}[membership]\ndead_after = \"300ms\"\n"),
            ["membership.dead_after", "heartbeat_every"],
        ),
        ("[store]\nkind = \"consul\"\n".to_owned(), ["etcd", "memory"]),
        ("[store]\nkind = \"etcd\"\n".to_owned(), ["endpoints", "missing"]),
        (
            "listen = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\n[store]\nkind = \"memory\"\n".to_owned(),
            ["neither tls.folder nor tls.plain", "reprise certs issue member"],
        ),
        (format!("listen = \"{occupied}\"\nadmin = \"127.0.0.1:0\"\n{memory}"), [&occupied, "in use"]),
    ] {
        fs::write(&config, text).expect("the folder is writable");
        let refused = StartingProcess::spawn(control_plane::command(&config), &log).ready();
        refused.expect_err("the configuration is invalid").assert_reports(1, &words);
    }
}

#[test]
fn rejects_and_preserves_a_device_with_foreign_data() {
    let env = TestEnv::new();
    let files = env.configure(&default_config());
    let mut foreign = b"SOMEFS01 and precious data ".repeat(4096);
    for bytes in [foreign.len(), 4096, 8 << 20, 64 << 20] {
        foreign.resize(bytes, b'x');
        fs::write(&files.pool, &foreign).expect("the folder is writable");
        let refused = env.refusal_of(&files, command(&files));
        refused.assert_reports(DEVICE, &["node.pool", "not Reprise's", "SOMEFS01", "check the path"]);
        assert!(fs::read(&files.pool).expect("the file exists") == foreign, "the file was changed");
    }
}

#[test]
fn rejects_a_pool_of_a_newer_format_with_both_versions() {
    let env = TestEnv::new();
    let mut agent = env.agent(&default_config());
    agent.stop();
    let pool = PoolFile::open(&agent.files().pool);
    let copies = pool.pages_beginning(SUPERBLOCK);
    assert_eq!(copies.len(), 2);
    copies.iter().for_each(|copy| pool.forge_version(*copy, 41));
    let before = pool.read(0, 4096);
    let refused = agent.try_start().expect_err("the format is newer");
    refused.assert_reports(DEVICE, &["format version 41", "up to 4", "newer agent"]);
    assert_eq!(pool.read(0, 4096), before, "the pool was changed");
}

#[test]
fn rejects_a_truncated_pool_with_both_sizes() {
    let env = TestEnv::new();
    let mut agent = env.agent(&default_config());
    agent.stop();
    let pool = File::options().write(true).open(&agent.files().pool).expect("the pool exists");
    pool.set_len(32 << 20).expect("a file can be truncated");
    let refused = agent.try_start().expect_err("the pool is truncated");
    refused.assert_reports(DEVICE, &["67108864", "33554432", "restore its size"]);
}

#[test]
fn rejects_a_second_agent_on_one_pool_and_the_first_continues() {
    let env = TestEnv::new();
    let first = env.agent(&default_config());
    let engine = first.engine(small());
    engine.save_durably(&[1, 2, 3]);
    let pool = format!("[[pool.devices]]\npath = \"{}\"\nbytes = \"64MiB\"", first.files().pool.display());
    let second = AgentConfig { pool: None, extra: pool, ..AgentConfig::named("second") };
    env.refusal(&second)
        .assert_reports(DEVICE, &["node.pool", "locked by another process", "stop the other"]);
    engine.trim();
    engine.load_all(&[1, 2, 3], &LoadParams::LOCAL);
}

#[test]
fn rejects_a_second_agent_on_one_socket_and_the_first_continues() {
    let env = TestEnv::new();
    let first = env.agent(&AgentConfig { pool: None, ..default_config() });
    let mut files = env.configure(&AgentConfig { pool: None, ..AgentConfig::named("second") });
    let text = fs::read_to_string(&files.config).expect("just written");
    fs::write(&files.config, text.replace("second.sock", "node.sock")).expect("the folder is writable");
    files.socket = first.files().socket.clone();
    let refused = env.refusal_of(&files, command(&files));
    refused.assert_reports(RESOURCE, &["session.socket", "node.sock", "another process listens"]);
    first.engine(small()).save(&[1]).expect("the first agent serves");
}

#[test]
fn names_a_socket_that_cannot_be_created_with_the_remedy() {
    let env = TestEnv::new();
    let config = AgentConfig { pool: None, ..default_config() };
    let mut files = env.configure(&config);
    let text = fs::read_to_string(&files.config).expect("just written");
    let default_socket = files.socket.display().to_string();
    fs::write(env.folder().join("a-file"), b"precious").expect("the folder is writable");
    let long = format!("{}/s", "x".repeat(110));
    for (socket, code, words) in [
        ("missing/agent.sock", RESOURCE, ["session.socket", "missing", "create it"]),
        ("a-file", RESOURCE, ["session.socket", "a-file", "not a socket has this name"]),
        ("a-file/agent.sock", RESOURCE, ["session.socket", "a-file", "directory"]),
        (long.as_str(), CONFIGURATION, ["session.socket", "103 bytes", "unix sockets"]),
    ] {
        files.socket = env.folder().join(socket);
        fs::write(&files.config, text.replace(&default_socket, &files.socket.display().to_string()))
            .expect("the folder is writable");
        env.refusal_of(&files, command(&files)).assert_reports(code, &words);
    }
    assert_eq!(fs::read(env.folder().join("a-file")).expect("the file exists"), b"precious");
}

#[test]
fn names_directories_without_write_permission() {
    let env = TestEnv::for_every_user();
    let locked = env.folder().join("locked");
    fs::create_dir(&locked).expect("a folder");
    fs::set_permissions(&locked, std::os::unix::fs::PermissionsExt::from_mode(0o555))
        .expect("the permissions can be changed");
    let mut with_pool = env.configure(&default_config());
    let text = fs::read_to_string(&with_pool.config).expect("just written");
    let pool = with_pool.pool.display().to_string();
    with_pool.pool = locked.join("node.pool");
    fs::write(&with_pool.config, text.replace(&pool, &with_pool.pool.display().to_string()))
        .expect("the folder is writable");
    let refused = env.refusal_of(&with_pool, as_unprivileged(&env, &with_pool));
    refused.assert_reports(DEVICE, &["locked/node.pool", "cannot be opened", "denied"]);

    let mut with_socket = env.configure(&AgentConfig { pool: None, ..default_config() });
    let text = fs::read_to_string(&with_socket.config).expect("just written");
    let socket = with_socket.socket.display().to_string();
    with_socket.socket = locked.join("node.sock");
    fs::write(&with_socket.config, text.replace(&socket, &with_socket.socket.display().to_string()))
        .expect("the folder is writable");
    let refused = env.refusal_of(&with_socket, as_unprivileged(&env, &with_socket));
    refused.assert_reports(RESOURCE, &["session.socket", "writable by the agent's user", "denied"]);
}

#[test]
fn rejects_a_pool_larger_than_the_disk_and_leaves_no_new_file_behind() {
    let env = TestEnv::new();
    // The maximum size of a pool, which exceeds the free space of any test machine.
    let config = AgentConfig { pool: Some(ByteSize(16 << 40)), ..default_config() };
    let files = env.configure(&config);
    let words = ["node.pool", "no space", "has only", "configure a smaller pool"];
    env.refusal(&config).assert_reports(DEVICE, &words);
    assert!(!files.pool.exists(), "an empty pool file is left behind");
    File::create(&files.pool).expect("a file");
    env.refusal(&config).assert_reports(DEVICE, &words);
    assert_eq!(fs::metadata(&files.pool).expect("an existing file is kept").len(), 0);
}

/// Runs the agent in its own mount namespace, with an empty read-only file system on a folder.
fn on_read_only_disk(folder: &Path, files: &AgentFiles) -> Command {
    let mode = if is_root() { "-m" } else { "-rm" };
    let line = "mount -t tmpfs -o ro tmpfs \"$3\" && exec \"$1\" --config \"$2\"";
    let mut command = Command::new("unshare");
    command.args([mode, "sh", "-c", line, "sh"]).arg(binary("reprise-agent")).arg(&files.config).arg(folder);
    command
}

#[test]
#[ignore = "needs to mount a file system: run with --ignored where `unshare -rm` may"]
fn reports_a_read_only_disk() {
    let env = TestEnv::new();
    let folder = env.folder().join("disk");
    fs::create_dir(&folder).expect("a folder");
    let mut files = env.configure(&default_config());
    let text = fs::read_to_string(&files.config).expect("just written");
    let pool = files.pool.display().to_string();
    files.pool = folder.join("node.pool");
    fs::write(&files.config, text.replace(&pool, &files.pool.display().to_string()))
        .expect("the folder is writable");
    let refused = env.refusal_of(&files, on_read_only_disk(&folder, &files));
    refused.assert_reports(DEVICE, &["node.pool", "cannot be opened", "Read-only file system"]);
}

#[test]
fn reports_a_limit_on_the_size_of_files_and_leaves_no_file_behind() {
    let env = TestEnv::new();
    let files = env.configure(&default_config());
    // 8 MiB in units of 512 bytes.
    let line = "ulimit -f 16384; exec \"$1\" --config \"$2\"";
    let refused = env.refusal_of(&files, in_shell(line, &files));
    refused.assert_reports(DEVICE, &["node.pool", "no space", "File too large"]);
    assert!(!files.pool.exists(), "an empty pool file is left behind");
}

#[test]
fn rejects_a_pool_that_is_too_small_with_the_required_size() {
    let env = TestEnv::new();
    let config = AgentConfig { pool: Some(ByteSize(1 << 20)), ..default_config() };
    env.refusal(&config).assert_reports(DEVICE, &["too small", "bytes are needed"]);
}

#[test]
fn rejects_an_arena_larger_than_memory_without_allocating_it() {
    let env = TestEnv::new();
    let config =
        AgentConfig { arena: ByteSize(16 << 40), region: ByteSize(1 << 30), pool: None, ..default_config() };
    // The check must not touch the memory.
    fast_call("a start with a large arena", Duration::from_secs(5), || {
        env.refusal(&config).assert_reports(RESOURCE, &["arena.bytes", "do not fit", "lower the arena"]);
    });
}

#[test]
fn names_ports_that_are_in_use() {
    let env = TestEnv::new();
    let occupied = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = occupied.local_addr().expect("a bound port").to_string();
    let config = AgentConfig { pool: None, ..default_config() };
    let text = config.text(&env.configure(&config));
    for (section, words) in [
        ("[admin]\nlisten = \"", ["admin.listen", "or 0"]),
        ("[peers]\nlisten = \"", ["peers.listen", "or 0"]),
    ] {
        let files = AgentFiles::within(env.folder(), "node");
        let from = format!("{section}127.0.0.1:0\"");
        assert!(text.contains(&from), "the default configuration contains {from}");
        fs::write(&files.config, text.replacen(&from, &format!("{section}{port}\""), 1))
            .expect("the folder is writable");
        let refused = env.refusal_of(&files, command(&files));
        refused.assert_reports(RESOURCE, &words);
        assert!(refused.text.contains(&port), "{}", refused.text);
    }
}
