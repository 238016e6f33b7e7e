//! Starts that must fail, and what they say: every text names the thing and what to do about it.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::process::Command;

use crate::blocks::{connect, load_all, save_durably};
use crate::process::{Config, Home, Refused};

/// Exit codes of the agent.
const CONFIGURATION: i32 = 1;
const DEVICE: i32 = 2;
const RESOURCE: i32 = 3;

/// User `nobody` on every Linux.
const NOBODY: u32 = 65534;

fn refused(home: &Home, config: &Config) -> Refused {
    match home.try_start(config) {
        Ok(_) => panic!("the agent started"),
        Err(refused) => refused,
    }
}

fn assert_says(refused: &Refused, code: i32, words: &[&str]) {
    assert_eq!(refused.code, Some(code), "{}", refused.text);
    for word in words {
        assert!(refused.text.contains(word), "no '{word}' in: {}", refused.text);
    }
}

fn run_as_root() -> bool {
    use std::os::unix::fs::MetadataExt;
    fs::metadata("/proc/self").expect("/proc").uid() == 0
}

#[test]
fn the_default_configuration_is_printed_and_nothing_else() {
    let output = Command::new(env!("CARGO_BIN_EXE_reprise-agent"))
        .arg("--print-default-config")
        .output()
        .expect("runs");
    assert!(output.status.success() && output.stderr.is_empty());
    let text = String::from_utf8(output.stdout).expect("text");
    assert!(text.contains("[arena]") && text.contains("segment_bytes"), "{text}");
}

#[test]
fn an_unknown_field_ends_the_start_with_its_name_and_line() {
    let home = Home::new();
    let config = Config { extra: "[limits]\nlimitz = 3".to_owned(), ..Config::default() };
    assert_says(&refused(&home, &config), CONFIGURATION, &["limitz", "agent.toml", "unknown field"]);
}

#[test]
fn two_agents_on_one_pool_are_told_so_and_the_first_goes_on() {
    let home = Home::new();
    let agent = home.start(&Config::default());
    let client = connect(&agent.socket);
    save_durably(&client, 0..5);
    let second = Home::new();
    let device = format!("[[pool.devices]]\npath = \"{}\"\nbytes = \"64MiB\"", home.pool().display());
    let config = Config { pool: None, extra: device, ..Config::default() };
    assert_says(&refused(&second, &config), DEVICE, &["locked by another process", "stop the other"]);
    load_all(&client, 0..5);
}

#[test]
fn a_second_agent_on_one_socket_is_told_so() {
    let home = Home::new();
    let agent = home.start(&Config { pool: None, ..Config::default() });
    assert_says(
        &refused(&home, &Config { pool: None, ..Config::default() }),
        RESOURCE,
        &["another process listens"],
    );
    assert_eq!(agent.get("/healthz").0, 200);
}

#[test]
fn something_else_on_the_device_is_left_alone() {
    let home = Home::new();
    let precious = b"precious data ".repeat(8 << 10);
    let mut large = precious.clone();
    large.resize(8 << 20, b'x');
    for content in [precious, large] {
        fs::write(home.pool(), &content).expect("written");
        let refused = refused(&home, &Config::default());
        assert_eq!(refused.code, Some(DEVICE), "{}", refused.text);
        assert!(refused.text.contains(&home.pool().display().to_string()), "{}", refused.text);
        assert!(fs::read(home.pool()).expect("still there") == content, "the file was changed");
    }
}

#[test]
fn a_foreign_superblock_is_named_and_the_way_out_too() {
    let home = Home::new();
    let mut content = vec![0; 64 << 20];
    content[..8].copy_from_slice(b"SOMEFS01");
    fs::write(home.pool(), &content).expect("written");
    assert_says(
        &refused(&home, &Config::default()),
        DEVICE,
        &["not Reprise's", "SOMEFS01", "check the path"],
    );
}

#[test]
fn a_pool_of_a_newer_version_is_refused_with_both_versions() {
    let home = Home::new();
    home.start(&Config::default()).terminate();
    // docs/FORMAT.md: magic at 0, version at 8 of every copy of the superblock, page checksum in its last 4 bytes.
    let pool = File::options().read(true).write(true).open(home.pool()).expect("the pool");
    let size = pool.metadata().expect("a size").len();
    let mut page = vec![0; 4096];
    let mut copies = 0;
    for offset in (0..size).step_by(4096) {
        pool.read_exact_at(&mut page, offset).expect("read");
        if page.starts_with(b"REPRISE\0") {
            page[8..12].copy_from_slice(&7u32.to_le_bytes());
            let checksum = reprise_buffers::crc32c(&page[..4092]);
            page[4092..].copy_from_slice(&checksum.to_le_bytes());
            pool.write_all_at(&page, offset).expect("written");
            copies += 1;
        }
    }
    assert_eq!(copies, 2);
    assert_says(&refused(&home, &Config::default()), DEVICE, &["format version 7", "up to 1", "newer agent"]);
}

#[test]
fn one_damaged_superblock_is_survived_and_two_are_not() {
    let home = Home::new();
    let agent = home.start(&Config::default());
    save_durably(&connect(&agent.socket), 0..5);
    agent.terminate();
    let pool = File::options().read(true).write(true).open(home.pool()).expect("the pool");
    pool.write_all_at(&[0xff; 16], 2048).expect("written");
    let agent = home.start(&Config::default());
    load_all(&connect(&agent.socket), 0..5);
    agent.terminate();
    assert!(home.log_text().contains("journal was damaged"), "the operator learns of it");
    let mut page = vec![0; 4096];
    for offset in (0..pool.metadata().expect("a size").len()).step_by(4096) {
        pool.read_exact_at(&mut page, offset).expect("read");
        if page.starts_with(b"REPRISE\0") {
            pool.write_all_at(&[0xff; 16], offset + 2048).expect("written");
        }
    }
    assert_says(&refused(&home, &Config::default()), DEVICE, &["damaged", "format it"]);
}

#[test]
fn a_truncated_pool_is_refused_with_its_sizes() {
    let home = Home::new();
    home.start(&Config::default()).terminate();
    File::options().write(true).open(home.pool()).and_then(|pool| pool.set_len(32 << 20)).expect("truncated");
    assert_says(&refused(&home, &Config::default()), DEVICE, &["formatted with 67108864", "33554432"]);
}

#[test]
fn an_arena_larger_than_memory_is_refused_before_memory_is_taken() {
    let home = Home::new();
    let config = Config { arena: "16TiB", pool: None, extra: String::new(), session: String::new() };
    let path = home.write_config(&config);
    let text = fs::read_to_string(&path).expect("written").replace("\"16MiB\"", "\"1GiB\"");
    fs::write(&path, text).expect("written");
    let launched = home.launch(Command::new(env!("CARGO_BIN_EXE_reprise-agent")).arg("--config").arg(path));
    let refused = launched.err().expect("refused");
    assert_says(&refused, RESOURCE, &["arena.bytes", "do not fit", "lower the arena"]);
}

#[test]
fn a_device_too_small_for_a_pool_is_told_what_it_needs() {
    let home = Home::new();
    let refused = refused(&home, &Config { pool: Some("1MiB"), ..Config::default() });
    assert_says(&refused, DEVICE, &["too small", "bytes are needed"]);
}

#[test]
fn a_full_disk_is_told_so_and_no_file_is_left_behind_that_was_not_there() {
    let home = Home::new();
    let pool = home.path().join("pool");
    // The largest there is: more than the file system of a test has left.
    let device = format!("[[pool.devices]]\npath = \"{}\"\nbytes = \"16TiB\"", pool.display());
    let config = Config { pool: None, extra: device, ..Config::default() };
    assert_says(&refused(&home, &config), DEVICE, &["no space", "configure a smaller pool"]);
    assert!(!pool.exists(), "an empty pool file is left behind");
    File::create(&pool).expect("a file");
    assert_says(&refused(&home, &config), DEVICE, &["no space"]);
    assert!(pool.exists(), "a file that was there is removed");
}

#[test]
fn a_read_only_directory_is_told_so() {
    let home = Home::new();
    let locked = home.path().join("locked");
    fs::create_dir(&locked).expect("a directory");
    fs::set_permissions(&locked, Permissions::from_mode(0o555)).expect("set");
    let device = format!("[[pool.devices]]\npath = \"{}/pool\"\nbytes = \"64MiB\"", locked.display());
    let config = home.write_config(&Config { pool: None, extra: device, ..Config::default() });
    let text = fs::read_to_string(&config).expect("written");
    let socket = home.path().join("agent.sock").display().to_string();
    let in_locked = text.replace(&socket, &locked.join("agent.sock").display().to_string());
    let without_device = in_locked.split("[[pool.devices]]").next().expect("a head").to_owned()
        + "[peers]\nlisten = \"\"\n[admin]\nlisten = \"127.0.0.1:0\"\n";
    for (text, code, words) in [
        (text, DEVICE, ["locked/pool", "cannot be opened", "denied"]),
        (
            without_device
                .replace("[peers]\nlisten = \"127.0.0.1:0\"\n[admin]\nlisten = \"127.0.0.1:0\"\n", ""),
            RESOURCE,
            ["session.socket", "writable by the agent's user", "denied"],
        ),
    ] {
        fs::write(&config, text).expect("written");
        let refused = launch_unprivileged(&home, &config).err().expect("refused");
        assert_says(&refused, code, &words);
    }
}

/// Permissions do not bind root: then the agent runs as nobody, from a copy of its binary that nobody can reach.
fn launch_unprivileged(home: &Home, config: &std::path::Path) -> Result<crate::process::Agent, Refused> {
    if !run_as_root() {
        return home.launch(Command::new(env!("CARGO_BIN_EXE_reprise-agent")).arg("--config").arg(config));
    }
    let binary = home.path().join("reprise-agent");
    fs::copy(env!("CARGO_BIN_EXE_reprise-agent"), &binary).expect("copied");
    fs::set_permissions(home.path(), Permissions::from_mode(0o755)).expect("set");
    fs::set_permissions(config, Permissions::from_mode(0o644)).expect("set");
    home.launch(Command::new(binary).arg("--config").arg(config).uid(NOBODY).gid(NOBODY))
}
