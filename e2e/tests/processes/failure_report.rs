//! The output of a failing test: its own error last, after the ends of the logs, and the location of the
//! whole logs.

use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};

use reprise_e2e::control_plane::Store;
use reprise_e2e::{TestEnv, logs};

/// Error of the test that fails.
const ERROR: &str = "the block is not the one that was saved";

/// Fails; only the test below runs it, by name.
#[test]
#[ignore = "fails on purpose: the test next to it runs it"]
fn fails_on_purpose() {
    let env = TestEnv::new();
    let _plane = env.control_plane(Store::Embedded);
    panic!("{ERROR}");
}

#[test]
fn a_failing_test_prints_its_own_error_last() {
    let env = TestEnv::new();
    let file = env.folder().join("output");
    let output = File::create(&file).expect("the test's folder is writable");
    let name = "processes::failure_report::fails_on_purpose";
    let mut command = Command::new(std::env::current_exe().expect("a process knows its executable"));
    command.args([name, "--exact", "--ignored", "--nocapture"]);
    command.stdout(Stdio::null()).stderr(output).env("REPRISE_CACHE", env.folder());
    let status = command.status().expect("the test can be run");
    assert_eq!(status.code(), Some(101), "the test fails");
    let text = logs::read(&file);
    let last = text.trim_end().lines().last().unwrap_or_default();
    assert_eq!(last, ERROR, "{text}");
    let tail = text.find("---- end of ").expect("the output has the end of a log");
    assert!(tail < text.rfind(ERROR).expect("the output has the error"));
    assert!(text.lines().count() < 40, "the output is at most one screen: {text}");
    let kept = text.split("the whole logs are in ").nth(1).and_then(|rest| rest.lines().next());
    let kept = Path::new(kept.expect("the output has the folder of the logs"));
    let log = std::fs::read_dir(kept).expect("the folder exists").flatten().next().expect("one log");
    assert!(!logs::read(&log.path()).is_empty(), "the log is not empty");
}
