//! Starts that must fail, and what they say: every text names the thing and what to do about it.
//!
//! Exit codes of the agent: 1 configuration, 2 pool device, 3 memory, sockets or ports.

use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use reprise_e2e::agent::command;
use reprise_e2e::config::AgentFiles;
use reprise_e2e::content::small;
use reprise_e2e::disk::{PoolFile, SUPERBLOCK};
use reprise_e2e::process::{binary, copy_binary};
use reprise_e2e::{AgentConfig, Loading, Starting, World, control_plane};
use reprise_policy::ByteSize;

const CONFIGURATION: i32 = 1;
const DEVICE: i32 = 2;
const RESOURCE: i32 = 3;

/// User and group `nobody` on every Linux.
const NOBODY: u32 = 65534;

fn usual() -> AgentConfig {
    AgentConfig::named("node")
}

/// A shell line that gets the agent's binary as `$1` and its configuration as `$2`.
fn in_shell(line: &str, files: &AgentFiles) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", line, "sh"]).arg(binary("reprise-agent")).arg(&files.config);
    command
}

fn is_root() -> bool {
    std::os::unix::fs::MetadataExt::uid(&fs::metadata("/proc/self").expect("/proc is mounted")) == 0
}

/// Permissions do not bind root: then the agent runs as nobody, from a copy that nobody can reach.
fn as_nobody(world: &World, files: &AgentFiles) -> Command {
    if !is_root() {
        return command(files);
    }
    let copy = world.folder().join("agent-of-nobody");
    copy_binary("reprise-agent", &copy);
    let mut command = Command::new(copy);
    command.arg("--config").arg(&files.config).uid(NOBODY).gid(NOBODY);
    command
}

#[test]
fn a_configuration_that_makes_no_sense_is_refused_by_field_value_and_remedy() {
    let world = World::new();
    let text = usual().text(&world.configure(&usual()));
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
    ] {
        let files = AgentFiles::within(world.folder(), "node");
        assert!(text.contains(from), "the usual configuration has {from}");
        fs::write(&files.config, text.replacen(from, to, 1)).expect("a configuration can be written");
        world.refusal_of(&files, command(&files)).assert_says(CONFIGURATION, &words);
        assert!(!files.pool.exists(), "a configuration that is refused leaves no pool behind");
    }
}

#[test]
fn a_configuration_that_is_not_there_is_named() {
    let world = World::new();
    let mut files = world.configure(&usual());
    files.config = world.folder().join("nowhere.toml");
    world.refusal_of(&files, command(&files)).assert_says(CONFIGURATION, &["nowhere.toml", "No such file"]);
    files.config = world.folder().to_owned();
    world.refusal_of(&files, command(&files)).assert_says(CONFIGURATION, &["regular file"]);
}

#[test]
fn the_control_plane_refuses_bad_configurations_and_a_port_that_is_taken() {
    let world = World::new();
    let config = world.folder().join("plane.toml");
    let log = world.folder().join("plane.log");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let taken = taken.local_addr().expect("a bound port").to_string();
    let memory = "[store]\nkind = \"memory\"\n";
    for (text, words) in [
        (format!("lisen = \"127.0.0.1:0\"\n{memory}"), ["lisen", "unknown field"]),
        (format!("{memory}[membership]\ndead_after = \"1500\"\n"), ["1500", "50ms"]),
        (
            format!("{memory}[membership]\ndead_after = \"300ms\"\n"),
            ["membership.dead_after", "heartbeat_every"],
        ),
        ("[store]\nkind = \"consul\"\n".to_owned(), ["etcd", "memory"]),
        ("[store]\nkind = \"etcd\"\n".to_owned(), ["endpoints", "missing"]),
        (format!("listen = \"{taken}\"\nadmin = \"127.0.0.1:0\"\n{memory}"), [&taken, "in use"]),
    ] {
        fs::write(&config, text).expect("a configuration can be written");
        let refused = Starting::spawn(control_plane::command(&config), &log).ready();
        refused.expect_err("the control plane starts").assert_says(1, &words);
    }
}

#[test]
fn a_device_with_something_else_on_it_is_left_alone() {
    let world = World::new();
    let files = world.configure(&usual());
    let mut foreign = b"SOMEFS01 and precious data ".repeat(4096);
    for bytes in [foreign.len(), 4096, 8 << 20, 64 << 20] {
        foreign.resize(bytes, b'x');
        fs::write(&files.pool, &foreign).expect("written");
        let refused = world.refusal_of(&files, command(&files));
        refused.assert_says(DEVICE, &["node.pool", "not Reprise's", "SOMEFS01", "check the path"]);
        assert!(fs::read(&files.pool).expect("still there") == foreign, "the file was changed");
    }
}

#[test]
fn a_pool_of_a_newer_format_is_refused_with_both_versions() {
    let world = World::new();
    let mut agent = world.agent(&usual());
    agent.stop();
    let pool = PoolFile::open(&agent.files().pool);
    let copies = pool.pages_beginning(SUPERBLOCK);
    assert_eq!(copies.len(), 2);
    copies.iter().for_each(|copy| pool.forge_version(*copy, 41));
    let before = pool.read(0, 4096);
    let refused = agent.try_start().expect_err("a pool of the future");
    refused.assert_says(DEVICE, &["format version 41", "up to 2", "newer agent"]);
    assert_eq!(pool.read(0, 4096), before, "the pool was changed");
}

#[test]
fn a_pool_that_was_cut_short_is_refused_with_both_sizes() {
    let world = World::new();
    let mut agent = world.agent(&usual());
    agent.stop();
    let pool = File::options().write(true).open(&agent.files().pool).expect("the pool is there");
    pool.set_len(32 << 20).expect("a file can be cut");
    let refused = agent.try_start().expect_err("half a pool");
    refused.assert_says(DEVICE, &["67108864", "33554432", "restore its size"]);
}

#[test]
fn two_agents_on_one_pool_are_told_so_and_the_first_goes_on() {
    let world = World::new();
    let first = world.agent(&usual());
    let engine = first.engine(small());
    engine.save_durably(&[1, 2, 3]);
    let pool = format!("[[pool.devices]]\npath = \"{}\"\nbytes = \"64MiB\"", first.files().pool.display());
    let second = AgentConfig { pool: None, extra: pool, ..AgentConfig::named("second") };
    world.refusal(&second).assert_says(DEVICE, &["node.pool", "locked by another process", "stop the other"]);
    engine.trim();
    engine.load_all(&[1, 2, 3], &Loading::LOCAL);
}

#[test]
fn a_second_agent_on_one_socket_is_told_so_and_the_first_goes_on() {
    let world = World::new();
    let first = world.agent(&AgentConfig { pool: None, ..usual() });
    let mut files = world.configure(&AgentConfig { pool: None, ..AgentConfig::named("second") });
    let text = fs::read_to_string(&files.config).expect("just written");
    fs::write(&files.config, text.replace("second.sock", "node.sock")).expect("written");
    files.socket = first.files().socket.clone();
    let refused = world.refusal_of(&files, command(&files));
    refused.assert_says(RESOURCE, &["session.socket", "node.sock", "another process listens"]);
    first.engine(small()).save(&[1]).expect("the first agent serves");
}

#[test]
fn a_socket_that_cannot_be_made_is_named_with_the_remedy() {
    let world = World::new();
    let config = AgentConfig { pool: None, ..usual() };
    let mut files = world.configure(&config);
    let text = fs::read_to_string(&files.config).expect("just written");
    let usual_socket = files.socket.display().to_string();
    fs::write(world.folder().join("a-file"), b"precious").expect("written");
    let long = format!("{}/s", "x".repeat(110));
    for (socket, code, words) in [
        ("missing/agent.sock", RESOURCE, ["session.socket", "missing", "create it"]),
        ("a-file", RESOURCE, ["session.socket", "a-file", "no socket has this name"]),
        ("a-file/agent.sock", RESOURCE, ["session.socket", "a-file", "directory"]),
        (long.as_str(), CONFIGURATION, ["session.socket", "103 bytes", "unix sockets"]),
    ] {
        files.socket = world.folder().join(socket);
        fs::write(&files.config, text.replace(&usual_socket, &files.socket.display().to_string()))
            .expect("written");
        world.refusal_of(&files, command(&files)).assert_says(code, &words);
    }
    assert_eq!(fs::read(world.folder().join("a-file")).expect("still there"), b"precious");
}

#[test]
fn directories_without_write_permission_are_named() {
    let world = World::for_every_user();
    let locked = world.folder().join("locked");
    fs::create_dir(&locked).expect("a folder");
    fs::set_permissions(&locked, std::os::unix::fs::PermissionsExt::from_mode(0o555))
        .expect("one's own folder");
    let mut with_pool = world.configure(&usual());
    let text = fs::read_to_string(&with_pool.config).expect("just written");
    let pool = with_pool.pool.display().to_string();
    with_pool.pool = locked.join("node.pool");
    fs::write(&with_pool.config, text.replace(&pool, &with_pool.pool.display().to_string()))
        .expect("written");
    let refused = world.refusal_of(&with_pool, as_nobody(&world, &with_pool));
    refused.assert_says(DEVICE, &["locked/node.pool", "cannot be opened", "denied"]);

    let mut with_socket = world.configure(&AgentConfig { pool: None, ..usual() });
    let text = fs::read_to_string(&with_socket.config).expect("just written");
    let socket = with_socket.socket.display().to_string();
    with_socket.socket = locked.join("node.sock");
    fs::write(&with_socket.config, text.replace(&socket, &with_socket.socket.display().to_string()))
        .expect("written");
    let refused = world.refusal_of(&with_socket, as_nobody(&world, &with_socket));
    refused.assert_says(RESOURCE, &["session.socket", "writable by the agent's user", "denied"]);
}

#[test]
fn a_pool_larger_than_the_disk_is_told_so_and_no_file_is_left_behind_that_was_not_there() {
    let world = World::new();
    // The largest there is: more than the file system of a test has left.
    let config = AgentConfig { pool: Some(ByteSize(16 << 40)), ..usual() };
    let files = world.configure(&config);
    let words = ["node.pool", "no space", "has left", "configure a smaller pool"];
    world.refusal(&config).assert_says(DEVICE, &words);
    assert!(!files.pool.exists(), "an empty pool file is left behind");
    File::create(&files.pool).expect("a file");
    world.refusal(&config).assert_says(DEVICE, &words);
    assert_eq!(fs::metadata(&files.pool).expect("a file that was there stays").len(), 0);
}

/// Runs the agent in a mount namespace of its own, with an empty read-only file system over a folder.
fn on_read_only_disk(folder: &Path, files: &AgentFiles) -> Command {
    let mode = if is_root() { "-m" } else { "-rm" };
    let line = "mount -t tmpfs -o ro tmpfs \"$3\" && exec \"$1\" --config \"$2\"";
    let mut command = Command::new("unshare");
    command.args([mode, "sh", "-c", line, "sh"]).arg(binary("reprise-agent")).arg(&files.config).arg(folder);
    command
}

#[test]
#[ignore = "needs to mount a file system: run with --ignored where `unshare -rm` may"]
fn a_read_only_disk_is_told_so() {
    let world = World::new();
    let folder = world.folder().join("disk");
    fs::create_dir(&folder).expect("a folder");
    let mut files = world.configure(&usual());
    let text = fs::read_to_string(&files.config).expect("just written");
    let pool = files.pool.display().to_string();
    files.pool = folder.join("node.pool");
    fs::write(&files.config, text.replace(&pool, &files.pool.display().to_string())).expect("written");
    let refused = world.refusal_of(&files, on_read_only_disk(&folder, &files));
    refused.assert_says(DEVICE, &["node.pool", "cannot be opened", "Read-only file system"]);
}

#[test]
fn a_limit_on_the_size_of_files_is_told_so_and_no_file_is_left_behind() {
    let world = World::new();
    let files = world.configure(&usual());
    // 8 MiB in units of 512 bytes.
    let line = "ulimit -f 16384; exec \"$1\" --config \"$2\"";
    let refused = world.refusal_of(&files, in_shell(line, &files));
    refused.assert_says(DEVICE, &["node.pool", "no space", "File too large"]);
    assert!(!files.pool.exists(), "an empty pool file is left behind");
}

#[test]
fn a_pool_too_small_for_anything_is_told_what_it_needs() {
    let world = World::new();
    let config = AgentConfig { pool: Some(ByteSize(1 << 20)), ..usual() };
    world.refusal(&config).assert_says(DEVICE, &["too small", "bytes are needed"]);
}

#[test]
fn an_arena_larger_than_memory_is_refused_before_memory_is_taken() {
    let world = World::new();
    let config = AgentConfig { arena: ByteSize(16 << 40), region: ByteSize(1 << 30), pool: None, ..usual() };
    let started = std::time::Instant::now();
    world.refusal(&config).assert_says(RESOURCE, &["arena.bytes", "do not fit", "lower the arena"]);
    assert!(started.elapsed().as_secs() < 5, "memory is not touched before it is found missing");
}

#[test]
fn ports_that_are_taken_are_named() {
    let world = World::new();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("a bound port").to_string();
    let config = AgentConfig { pool: None, ..usual() };
    let text = config.text(&world.configure(&config));
    for (section, words) in [
        ("[admin]\nlisten = \"", ["admin.listen", "or 0"]),
        ("[peers]\nlisten = \"", ["peers.listen", "or 0"]),
    ] {
        let files = AgentFiles::within(world.folder(), "node");
        let from = format!("{section}127.0.0.1:0\"");
        assert!(text.contains(&from), "the usual configuration has {from}");
        fs::write(&files.config, text.replacen(&from, &format!("{section}{port}\""), 1)).expect("written");
        let refused = world.refusal_of(&files, command(&files));
        refused.assert_says(RESOURCE, &words);
        assert!(refused.text.contains(&port), "{}", refused.text);
    }
}
