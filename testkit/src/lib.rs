//! Shared by the command line, the benchmarks and the end-to-end tests: the launcher of processes and of local
//! clusters, the reference engine, the HTTP client, and the parts that benchmarks have in common.
//!
//! * [`process`] starts a process and waits until it is ready; [`cluster`] starts a cluster on this machine, whose
//!   processes end with the command ([`interrupt`]).
//! * [`engine`] is the reference engine: its blocks are a keyed function of their tokens ([`kv_function`]), so every
//!   loaded byte can be checked.
//! * [`bench`] has the report format of benchmarks, their fixture, and references that several of them use.
//!
//! Deliberately absent: assertions about behaviour (tests have them) and anything that needs Kubernetes.

#![forbid(unsafe_code)]

pub mod bench;
pub mod certificates;
pub mod cluster;
pub mod configuration;
pub mod engine;
pub mod etcd;
pub mod http;
pub mod interrupt;
pub mod keyed_blocks;
pub mod kv_function;
pub mod metrics;
pub mod model;
pub mod output;
pub mod paged_kv;
pub mod process;
pub mod trace;
pub mod wait;

#[cfg(feature = "rings")]
pub use reprise_extents as rings;
