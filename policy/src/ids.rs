//! Identities of nodes, sessions and tenants, and the counters that fence them.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A node's number, assigned by the control plane when its agent first registers and stable from then on.
///
/// 16 bits keep a replica entry of the directory small; a cluster is designed for 1,000 nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct NodeId(pub u16);

/// One engine connection to an agent; unique within the life of the agent process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(pub u64);

/// A tenant's number: what blocks on devices carry. 16 bits, because that is what a journal record has room for. It follows
/// from the tenant's name unless a configuration sets it ([`TenantName::number`](crate::tenant::TenantName::number)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct TenantId(pub u16);

impl TenantId {
    /// The tenant of sessions that name none, and of blocks that were stored before blocks had tenants.
    pub const DEFAULT: TenantId = TenantId(0);
}

/// Fencing counter: what carries a smaller epoch than its receiver knows is from the past and is refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Epoch(pub u64);

/// Counts the uses of a pool slot: a header whose generation differs from the journal's is stale.
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
