//! Identifiers of nodes, sessions and tenants, and fencing counters.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Number of a node. The control plane assigns it at the first registration of the agent; it never changes.
///
/// 16 bits keep replica entries of the directory small; a cluster is designed for 1,000 nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct NodeId(pub u16);

/// Number of an engine's connection to an agent, unique during the lifetime of the agent process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(pub u64);

/// Number of a tenant, as stored with blocks on devices; a journal record has 16 bits for it. It follows from
/// the tenant's name unless the configuration sets it
/// ([`TenantName::number`](crate::tenant::TenantName::number)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct TenantId(pub u16);

impl TenantId {
    /// Tenant of sessions without a tenant name, and of blocks from before the introduction of tenants.
    pub const DEFAULT: TenantId = TenantId(0);
}

/// Fencing counter: a message with a lower epoch than the receiver's is outdated and rejected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Epoch(pub u64);

/// Counts the writes to a pool slot: a header whose generation differs from the journal's is stale.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Generation(pub u32);

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}
