//! What the operator was started with: parsed once, by the command line.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

/// Settings of a running operator.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Images of clusters that name none.
    pub images: DefaultImages,
    /// Who this process is among the replicas: the pod's name.
    pub identity: String,
    /// Namespace of the lease.
    pub namespace: String,
    /// The pod's service account, to which the lease belongs.
    pub service_account: Option<String>,
    /// Where metrics and health are served.
    pub admin: SocketAddr,
    /// Control planes that are not reached by their services, `host:port` by `namespace/name` of the cluster.
    pub control_planes: BTreeMap<String, String>,
    /// When nothing was heard of sessions for so long, a deletion that waited for them goes on.
    pub unused_for: Duration,
}

/// Images that the operator was released with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DefaultImages {
    /// Of agents.
    pub agent: String,
    /// Of members.
    pub control_plane: String,
    /// Of etcd, where the operator runs it.
    pub etcd: String,
}
