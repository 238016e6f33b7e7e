//! The agent of a Kubernetes node: its settings, and the threads that watch and reconcile the node's `CacheNode`.

#[cfg(feature = "kubernetes")]
mod supported;
#[cfg(not(feature = "kubernetes"))]
mod unsupported;

#[cfg(feature = "kubernetes")]
pub(crate) use supported::{ClusterNode, ClusterSettings};
#[cfg(not(feature = "kubernetes"))]
pub(crate) use unsupported::{ClusterNode, ClusterSettings};
