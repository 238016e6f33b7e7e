//! Settings of the operator: the options of `run`.

use std::net::SocketAddr;
use std::time::Duration;

use clap::Args;

/// Settings of a running operator.
#[derive(Clone, Debug, Args)]
pub struct Settings {
    /// Images of clusters that specify none.
    #[command(flatten)]
    pub images: DefaultImages,
    /// Listen address for metrics and health checks
    #[arg(long = "admin-listen", value_name = "ADMIN_LISTEN", default_value = "127.0.0.1:7421")]
    pub admin: SocketAddr,
    /// Serve metrics without TLS and credentials; on a loopback address only
    #[arg(long)]
    pub admin_plain: bool,
    /// Reach a KVCacheCluster's control plane at this address
    ///
    /// For an operator outside Kubernetes. Repeat for several clusters. plain://127.0.0.1:PORT reaches members without
    /// certificates on this machine.
    #[arg(long = "control-plane-address", value_name = "NAMESPACE/NAME=HOST:PORT", value_parser = control_plane)]
    pub control_planes: Vec<(String, ControlPlaneAddress)>,
    /// Continue a deletion after this many seconds without reported sessions
    ///
    /// Sessions of engines block a deletion. Agents report them at least every 25 s; allow 5 s for delivery.
    /// With less than 30, a deletion may continue while engines still run.
    #[arg(long = "unused-seconds", value_name = "UNUSED_SECONDS", default_value = "60", value_parser = seconds)]
    pub unused_for: Duration,
    /// Name of this replica, its identity in the lease
    #[arg(long = "pod-name", value_name = "POD_NAME", env = "POD_NAME")]
    pub identity: String,
    /// Namespace of the lease and of this replica
    #[arg(long = "pod-namespace", value_name = "POD_NAMESPACE", env = "POD_NAMESPACE")]
    pub namespace: String,
    /// Service account of this replica, set as owner of the lease
    #[arg(long = "pod-service-account", value_name = "POD_SERVICE_ACCOUNT", env = "POD_SERVICE_ACCOUNT")]
    pub service_account: Option<String>,
}

/// Default images of this release.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub struct DefaultImages {
    /// Agent image, for clusters that do not name one
    #[arg(long = "image-agent", value_name = "IMAGE_AGENT", default_value_t = image("agent"))]
    pub agent: String,
    /// Control plane image, for clusters that do not name one
    #[arg(long = "image-control-plane", value_name = "IMAGE_CONTROL_PLANE", default_value_t = image("controlplane"))]
    pub control_plane: String,
    /// etcd image, for clusters that do not name one
    #[arg(long = "image-etcd", value_name = "IMAGE_ETCD", default_value_t = image("etcd"))]
    pub etcd: String,
    /// Image of this program, for the pods' sidecars that keep certificates
    #[arg(long = "image-operator", value_name = "IMAGE_OPERATOR", default_value_t = image("operator"))]
    pub operator: String,
}

/// Returns the image of a component in this version.
fn image(component: &str) -> String {
    format!("reprise-{component}:{}", env!("CARGO_PKG_VERSION"))
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

fn seconds(text: &str) -> Result<Duration, std::num::ParseIntError> {
    text.parse().map(Duration::from_secs)
}

/// Parses a cluster and the address of its control plane.
fn control_plane(text: &str) -> Result<(String, ControlPlaneAddress), String> {
    let parse = || {
        let (cluster, address) = text.split_once('=')?;
        let (namespace, name) = cluster.split_once('/')?;
        let is_cluster = !namespace.is_empty() && !name.is_empty() && !name.contains('/');
        let address = match address.strip_prefix(PLAIN) {
            Some(plain) => ControlPlaneAddress::Plain(plain.parse().ok()?),
            None => ControlPlaneAddress::Tls(address.to_owned()),
        };
        let is_address = match &address {
            ControlPlaneAddress::Plain(address) => address.ip().is_loopback(),
            ControlPlaneAddress::Tls(address) => {
                let parts = address.rsplit_once(':');
                parts.is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok())
            }
        };
        (is_cluster && is_address).then(|| (cluster.to_owned(), address))
    };
    parse().ok_or_else(|| {
        format!(
            "invalid control plane address \"{text}\": expected NAMESPACE/NAME=HOST:PORT, like cache/main=127.0.0.1:7400, \
             or NAMESPACE/NAME={PLAIN}127.0.0.1:PORT without certificates, since only loopback is plain"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_control_plane_address_with_cluster_and_port() {
        let read = control_plane("cache/c=127.0.0.1:7400").expect("a valid address");
        let address = ControlPlaneAddress::Tls("127.0.0.1:7400".to_owned());
        assert_eq!(read, ("cache/c".to_owned(), address));
        let (_, plain) = control_plane("cache/c=plain://127.0.0.1:7400").expect("loopback");
        assert_eq!(plain, ControlPlaneAddress::Plain("127.0.0.1:7400".parse().expect("an address")));
        for wrong in [
            "cache/c",
            "c=127.0.0.1:7400",
            "a/b/c=h:1",
            "/c=h:1",
            "cache/c=h",
            "cache/c=:1",
            "cache/c=h:x",
            "cache/c=plain://10.0.0.1:7400",
            "cache/c=plain://localhost:7400",
        ] {
            assert!(control_plane(wrong).expect_err(wrong).contains("NAMESPACE/NAME"));
        }
    }
}
