//! Connection to the API server, with the pod's service account or a kubeconfig file.

use std::path::PathBuf;
use std::time::Duration;

use kube::config::{InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Client, Config};

/// Connections that take longer fail; the server counts as unreachable.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum silence of a connection. The server ends a watch without events after at most 295 s, and the
/// client restarts it.
const READ_TIMEOUT: Duration = Duration::from_secs(300);

/// Address of the API server and credentials.
#[derive(Clone, Debug)]
pub enum Access {
    /// The pod's service account: the server's address in the environment, token and CA certificate in
    /// files.
    ServiceAccount,
    /// A kubeconfig file, as for kubectl.
    Kubeconfig(PathBuf),
}

/// Permanent errors: retrying does not help.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The process does not run in a pod, or the pod has no service account token.
    #[error("not running in a pod with a service account: {0}. Outside a cluster, use --kubeconfig")]
    NotInCluster(#[from] InClusterError),
    /// The kubeconfig file cannot be read.
    #[error("cannot use the kubeconfig: {0}")]
    Kubeconfig(#[from] KubeconfigError),
    /// Its content is invalid.
    #[error("cannot create a client for the API server: {0}")]
    Client(#[from] kube::Error),
}

impl Access {
    /// Creates a client without sending a request.
    pub(crate) async fn client(&self) -> Result<Client, ConnectError> {
        let mut config = match self {
            Access::ServiceAccount => Config::incluster()?,
            Access::Kubeconfig(path) => {
                let file = Kubeconfig::read_from(path)?;
                Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?
            }
        };
        // All programs of Reprise use this crypto provider. The call fails only if a provider is already
        // installed.
        let _ = rustls::crypto::ring::default_provider().install_default();
        config.connect_timeout = Some(CONNECT_TIMEOUT);
        config.read_timeout = Some(READ_TIMEOUT);
        Ok(Client::try_from(config)?)
    }
}
