//! The custom resources of Reprise: types, validation rules, and the definitions generated from them.
//!
//! | kind | short | scope | spec written by | status written by |
//! |---|---|---|---|---|
//! | [`KVCacheCluster`] | `kvcc` | namespace | user | operator |
//! | [`SSDPool`] | `ssdp` | cluster | user | operator |
//! | [`GPUQueueAllocation`] | `gqa` | namespace | user or operator | operator, and the node's agent |
//! | [`SlackProfile`] | `slack` | namespace | user | operator |
//! | [`CacheTenant`] | `ctenant` | cluster | user | operator |
//! | [`CacheNode`] | `cnode` | cluster | operator | the node's agent |
//!
//! What one object can tell by itself is checked by the API server: patterns and bounds in the schema, rules across fields and
//! across updates in CEL, each with a message that says what to do. What needs more than the object (references, capacity,
//! what this release can do) is the operator's, and ends in a condition. Defaults are in the schema.
//!
//! Invariants, each tested: every text, list and map has an upper bound; every CEL rule has an object that it refuses; files under
//! `crds/definitions` and `docs/RESOURCES.md` are what [`generated::files`] makes.
//!
//! Deliberately absent: a client, and any decision. Types are read tolerantly (unknown fields are ignored), because the
//! definitions in a cluster may be a version ahead of the program that reads them.

#![allow(
    unreachable_pub,
    reason = "KubeSchema repeats each public type within a function, where nobody reaches it"
)]

pub mod cluster;
pub mod definitions;
pub mod fields;
pub mod generated;
pub mod node;
pub mod pool;
pub mod queues;
mod reference;
pub mod slack;
pub mod status;
pub mod tenant;
mod values;

pub use cluster::{KVCacheCluster, KVCacheClusterSpec, KVCacheClusterStatus};
pub use definitions::definitions;
pub use node::{CacheNode, CacheNodeSpec, CacheNodeStatus};
pub use pool::{SSDPool, SSDPoolSpec, SSDPoolStatus};
pub use queues::{GPUQueueAllocation, GPUQueueAllocationSpec, GPUQueueAllocationStatus};
pub use slack::{SlackProfile, SlackProfileSpec, SlackProfileStatus};
pub use tenant::{CacheTenant, CacheTenantSpec, CacheTenantStatus};

/// The API group of all kinds.
pub const GROUP: &str = "reprise.dev";
/// The version of all kinds.
pub const VERSION: &str = "v1alpha1";
/// `kubectl get reprise` shows all kinds.
pub const CATEGORY: &str = "reprise";
/// The field manager of the operator's writes by server-side apply.
pub const OPERATOR_FIELD_MANAGER: &str = "reprise-operator";
/// The field manager of the agents' writes by server-side apply.
pub const AGENT_FIELD_MANAGER: &str = "reprise-agent";
