//! Settings of the operator, parsed from the command line.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::str::FromStr;
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
    /// Whether metrics are served without TLS, on a loopback address.
    pub admin_plain: bool,
    /// Addresses of control planes that are not reached by their service, by `namespace/name` of the cluster.
    pub control_planes: BTreeMap<String, ControlPlaneAddress>,
    /// Time without reports of sessions after which a waiting deletion proceeds.
    pub unused_for: Duration,
}

/// Address of a control plane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControlPlaneAddress {
    /// `host:port` of members with certificates.
    Tls(String),
    /// Members without certificates on this machine, for development.
    Plain(SocketAddr),
}

/// Prefix of addresses of members without certificates.
const PLAIN: &str = "plain://";

impl FromStr for ControlPlaneAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<ControlPlaneAddress, String> {
        if let Some(plain) = text.strip_prefix(PLAIN) {
            let address = plain.parse::<SocketAddr>().ok().filter(|address| address.ip().is_loopback());
            let invalid = || {
                format!(
                    "invalid address \"{text}\": expected {PLAIN}127.0.0.1:PORT, since only loopback is plain"
                )
            };
            return address.map(ControlPlaneAddress::Plain).ok_or_else(invalid);
        }
        let parts = text.rsplit_once(':');
        let is_address = parts.is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok());
        if is_address {
            Ok(ControlPlaneAddress::Tls(text.to_owned()))
        } else {
            Err(format!(
                "invalid address \"{text}\": expected HOST:PORT, or {PLAIN}127.0.0.1:PORT without certificates"
            ))
        }
    }
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
