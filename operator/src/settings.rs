//! Settings of the operator, parsed from the command line.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

/// Settings of a running operator.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Images of clusters that specify none.
    pub images: DefaultImages,
    /// Identity of this replica: the pod's name.
    pub identity: String,
    /// Namespace of the lease.
    pub namespace: String,
    /// The pod's service account, which is authorized to use the lease.
    pub service_account: Option<String>,
    /// Listen address for metrics and health checks.
    pub admin: SocketAddr,
    /// Addresses of control planes that are not reached by their service: `host:port` by `namespace/name` of
    /// the cluster.
    pub control_planes: BTreeMap<String, String>,
    /// Time without reports of sessions after which a waiting deletion proceeds.
    pub unused_for: Duration,
}

/// Default images of this release.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DefaultImages {
    /// Image of the node agents.
    pub agent: String,
    /// Image of control-plane members.
    pub control_plane: String,
    /// Image of managed etcd.
    pub etcd: String,
    /// Image of the operator, which keeps certificates in pods.
    pub operator: String,
}
