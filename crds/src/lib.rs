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
//! The API server validates everything that depends on one object only: patterns and bounds in the schema,
//! and CEL rules across fields and updates. Each rule has a message with a remedy. The operator validates
//! the rest (references, capacity, features of this release) and sets a condition. Defaults are in the
//! schema.
//!
//! Invariants, each tested: every text, list and map has an upper bound; the tests contain an object that
//! each CEL rule rejects; the files of [`generated::files`] are up to date.
//!
//! Not here: a client, and decisions. Types ignore unknown fields, because the definitions in a cluster may
//! be newer than the program that reads the objects.

#![allow(
    unreachable_pub,
    reason = "KubeSchema copies each public type into a function, where it is unreachable"
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

/// API group of all kinds.
pub const GROUP: &str = "reprise.dev";
/// API version of all kinds.
pub const VERSION: &str = "v1alpha1";
/// Category of all kinds, for `kubectl get reprise`.
pub const CATEGORY: &str = "reprise";
/// Field manager of the operator for server-side apply.
pub const OPERATOR_FIELD_MANAGER: &str = "reprise-operator";
/// Field manager of the agents for server-side apply.
pub const AGENT_FIELD_MANAGER: &str = "reprise-agent";
