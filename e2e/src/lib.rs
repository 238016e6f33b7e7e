//! Harness of the end-to-end tests: real processes of Reprise in a temporary directory.
//!
//! A test makes a [`World`], starts agents and perhaps a control plane in it, and talks to them as engines do
//! ([`Engine`]), as a scraper does ([`Admin`]), or as something broken does ([`raw`], [`disk`]). What runs in Kubernetes is
//! tested against its API server ([`ApiServer`]). The binaries are those
//! beside the test's own executable: `cargo build --workspace --bins --tests` first.
//!
//! Invariants:
//! * every byte that is loaded is compared with the function that it was made of ([`content`]); a wrong one fails the
//!   test, whatever the test is about;
//! * every wait has a bound;
//! * at the end of a test the logs of all processes hold no warning, error or panic that the test did not name
//!   ([`logs`]);
//! * no process outlives its handle.
//!
//! Deliberately absent: fakes. What only simulation shows (power loss, reordering, millions of schedules) is tested
//! beside the cores.

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
pub mod etcd;
mod failure;
pub mod flood;
pub mod host;
pub mod interposer;
pub mod kubernetes;
pub mod logs;
pub mod operator;
pub mod process;
pub mod raw;
pub mod relay;
pub mod seed;
pub mod sysfs;
pub mod wait;
pub mod world;

pub use admin::Admin;
pub use agent::Agent;
pub use cluster::Cluster;
pub use config::AgentConfig;
pub use control_plane::ControlPlane;
pub use engine::{Engine, Loading, Outcome};
pub use etcd::{Etcd, ServerTls};
pub use host::Host;
pub use interposer::{Fault, Interposer, Moment};
pub use kubernetes::ApiServer;
pub use operator::{Operator, OperatorFiles};
pub use process::{Refused, Running, Starting};
pub use relay::Relay;
pub use sysfs::NvmeController;
pub use wait::{PATIENCE, wait_until};
pub use world::World;

/// Prometheus' promtool, fetched when it is not there yet.
///
/// # Panics
/// When it is neither here nor can be fetched.
pub fn promtool() -> PathBuf {
    let script = tree().join("e2e/prometheus/promtool.sh");
    let output = Command::new(script).stderr(Stdio::inherit()).output().expect("bash starts");
    assert!(output.status.success(), "promtool cannot be fetched");
    PathBuf::from(String::from_utf8(output.stdout).expect("a path").trim())
}

/// The source tree that the tests belong to. One folder of build results may serve several, so it is asked for when the tests
/// run: cargo says where.
///
/// # Panics
/// When this package lies at the root of the file system.
pub fn tree() -> PathBuf {
    let package = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    Path::new(&package).parent().expect("this package lies in the workspace").to_owned()
}
