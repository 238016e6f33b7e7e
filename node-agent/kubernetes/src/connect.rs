//! How the API server is reached: as a pod with its service account, or by a file.

use std::path::PathBuf;
use std::time::Duration;

use kube::config::{InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Client, Config};

/// A server that does not take a connection for so long is away.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Silence after which a connection is given up. A watch without news is ended by the server after at most 295 s and begun again.
const READ_TIMEOUT: Duration = Duration::from_secs(300);

/// Where the API server is, and who asks.
#[derive(Clone, Debug)]
pub enum Access {
    /// What every pod has: the server's address in the environment, token and authority in files.
    ServiceAccount,
    /// A file as kubectl reads it.
    Kubeconfig(PathBuf),
}

/// Why there is no way to the API server. None of it goes away by waiting.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The process is in no pod, or has no service account.
    #[error("this is no pod with a service account: {0}. Outside a cluster, name a file with --kubeconfig")]
    NotInCluster(#[from] InClusterError),
    /// The file.
    #[error("the kubeconfig cannot be used: {0}")]
    Kubeconfig(#[from] KubeconfigError),
    /// What is in it.
    #[error("the API server cannot be asked: {0}")]
    Client(#[from] kube::Error),
}

impl Access {
    /// A client. Nothing is sent yet.
    pub(crate) async fn client(&self) -> Result<Client, ConnectError> {
        let mut config = match self {
            Access::ServiceAccount => Config::incluster()?,
            Access::Kubeconfig(path) => {
                let file = Kubeconfig::read_from(path)?;
                Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?
            }
        };
        // One provider of cryptography for all programs of Reprise. Somebody else may have named one before: as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
        config.connect_timeout = Some(CONNECT_TIMEOUT);
        config.read_timeout = Some(READ_TIMEOUT);
        Ok(Client::try_from(config)?)
    }
}
