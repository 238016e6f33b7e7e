//! What a failing test prints: its own error last, behind the ends of the logs, and where the whole logs are.

use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};

use reprise_e2e::control_plane::Store;
use reprise_e2e::{World, logs};

/// What the test that fails says.
const ERROR: &str = "the block is not the one that was saved";

/// Runs only by its name, in the test below.
#[test]
#[ignore = "fails on purpose: the test next to it runs it"]
fn fails_on_purpose() {
    let world = World::new();
    let _plane = world.control_plane(Store::Embedded);
    panic!("{ERROR}");
}

#[test]
fn a_failing_test_prints_its_own_error_last() {
    let world = World::new();
    let file = world.folder().join("output");
    let output = File::create(&file).expect("a test's own folder takes files");
    let name = "failures::fails_on_purpose";
    let mut command = Command::new(std::env::current_exe().expect("a process knows its executable"));
    command.args([name, "--exact", "--ignored", "--nocapture"]);
    command.stdout(Stdio::null()).stderr(output).env("REPRISE_CACHE", world.folder());
    let status = command.status().expect("a test program runs");
    assert_eq!(status.code(), Some(101), "it fails");
    let text = logs::read(&file);
    let last = text.trim_end().lines().last().unwrap_or_default();
    assert_eq!(last, ERROR, "{text}");
    let tail = text.find("---- end of ").expect("the end of a log is printed");
    assert!(tail < text.rfind(ERROR).expect("it is the last line"));
    assert!(text.lines().count() < 40, "a screen of text at most: {text}");
    let kept = text.split("the whole logs are in ").nth(1).and_then(|rest| rest.lines().next());
    let kept = Path::new(kept.expect("it says where the logs are"));
    let log = std::fs::read_dir(kept).expect("the folder is there").flatten().next().expect("one log");
    assert!(!logs::read(&log.path()).is_empty(), "the control plane has logged");
}
