//! Certificates of the cluster's processes.

use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use super::default_from_schema;
use crate::fields::choice;

/// Certificates of agents, control plane members and the operator, with which they connect to each other.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClusterTls {
    /// Issuer of the certificates. A change restarts all agents and members.
    #[serde(default)]
    pub mode: TlsMode,
}

choice! {
    /// Issuer of the certificates.
    TlsMode {
        /// The operator. Each pod creates its key and requests a certificate through the API server.
        Managed,
        /// No certificates: connections are plain, and all hosts that reach a port may do all.
        None,
    }
    default None
}

default_from_schema!(ClusterTls);
