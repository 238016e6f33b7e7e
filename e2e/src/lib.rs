//! Harness of the end-to-end tests: real processes of Reprise in a temporary directory.
//!
//! A test creates a [`TestEnv`] and starts agents and often a control plane in it. It connects like an engine
//! ([`Engine`]), like a scraper ([`Admin`]), or like a faulty client ([`raw`], [`disk`]). The parts that run
//! in Kubernetes are tested against its API server ([`ApiServer`]). The binaries are those next to the test's
//! own executable: run `cargo build --workspace --bins --test e2e` first.
//!
//! Invariants:
//! * every loaded byte is compared with its expected value ([`content`]); a wrong byte fails any test;
//! * every wait has a bound;
//! * at the end of a test, the logs of all processes contain no warning, error or panic that the test has not
//!   allowed ([`logs`]);
//! * no process outlives its handle.
//!
//! Deliberately absent: fakes. Power loss, reordering and millions of schedules are simulated in the tests of
//! the cores.

#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

pub mod admin;
pub mod agent;
pub mod cli;
pub mod clock;
pub mod cluster;
pub mod config;
pub mod content;
pub mod control_plane;
pub mod directory;
pub mod disk;
pub mod engine;
mod failure_report;
pub mod fault_proxy;
pub mod flood;
pub mod host;
pub mod kubernetes;
pub mod logs;
pub mod operator;
pub mod rank_sum;
pub mod raw;
pub mod relay;
pub mod ring_blocks;
pub mod seed;
pub mod sysfs;
pub mod test_env;

pub use admin::Admin;
pub use agent::Agent;
pub use cluster::Cluster;
pub use config::AgentConfig;
pub use control_plane::ControlPlane;
pub use engine::{Engine, LoadParams, Outcome};
pub use fault_proxy::{CrashPoint, Fault, FaultProxy};
pub use host::Host;
pub use kubernetes::ApiServer;
pub use operator::{Operator, OperatorFiles};
pub use process::{ChildProcess, StartError, StartingProcess};
pub use relay::Relay;
pub use reprise_testkit::etcd::{Etcd, ServerTls};
pub use reprise_testkit::{process, wait};
pub use sysfs::NvmeController;
pub use test_env::TestEnv;
pub use wait::{PATIENCE, fast_call, wait_until};

/// Returns the path of Prometheus' promtool, which is fetched if it does not exist.
///
/// # Panics
/// If it cannot be fetched.
pub fn promtool() -> PathBuf {
    let script = tree().join("e2e/prometheus/promtool.sh");
    let output = Command::new(script).stderr(Stdio::inherit()).output().expect("bash can be run");
    assert!(output.status.success(), "cannot fetch promtool");
    PathBuf::from(String::from_utf8(output.stdout).expect("a path").trim())
}

/// Returns the source tree of the tests. Several trees may share one target folder, so the path comes from
/// cargo's environment when the tests run.
///
/// # Panics
/// If this package is at the root of the file system.
pub fn tree() -> PathBuf {
    let package = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    Path::new(&package).parent().expect("this package is in the workspace").to_owned()
}
