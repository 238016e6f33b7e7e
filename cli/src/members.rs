//! Members of the control plane that a command asks, and the certificate that it shows them.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use reprise_identity::{Expected, Role, Security};
use reprise_proto::dial;
use reprise_testkit::cluster::ClusterFile;
use reprise_testkit::http::Client;
use tonic::transport::{Channel, Endpoint};

use crate::config::Config;

/// Timeout of one call to a member.
const ANSWERED_WITHIN: Duration = Duration::from_secs(5);

/// Arguments that select the members.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct MembersArgs {
    /// Find the members through this gRPC address, `host:port`.
    ///
    /// Overrides --cluster.
    #[arg(long, value_name = "ADDRESS", global = true)]
    controlplane: Option<String>,
    /// Read the members' addresses from this directory.
    ///
    /// By default the command reads the directory of `reprise demo --hold`.
    #[arg(long, value_name = "DIR", global = true)]
    cluster: Option<PathBuf>,
}

/// Members that a command asks.
#[derive(Clone, Debug)]
pub(crate) struct Members {
    /// Their gRPC addresses, `host:port`.
    pub(crate) addresses: Vec<String>,
    /// Certificates of the command, also for agents.
    pub(crate) security: Security,
}

impl MembersArgs {
    /// Finds the members from the arguments or the cluster directory. `--tls` overrides the certificates of the
    /// cluster directory.
    pub(crate) fn find(&self, config: &Config) -> anyhow::Result<Members> {
        if let Some(address) = &self.controlplane {
            let security = config.tls.security_or(Security::Plain)?;
            return Ok(Members { addresses: vec![address.clone()], security });
        }
        let cluster = ClusterFile::read(&config.cluster.directory(self.cluster.as_deref()))?;
        Ok(Members { addresses: cluster.grpc_addresses(), security: config.tls.security_for(&cluster)? })
    }
}

impl Members {
    /// Returns the members of a local cluster, with its administrator's certificates.
    pub(crate) fn of_cluster(cluster: &ClusterFile) -> anyhow::Result<Members> {
        Ok(Members { addresses: cluster.grpc_addresses(), security: cluster.security()? })
    }

    /// Returns a client of the admin port of a node's agent.
    pub(crate) fn agent_client(&self, node: &str) -> Client {
        Client::new(self.security.clone(), Expected::Role(Role::Agent(node.to_owned())))
    }

    /// Connects to a member.
    pub(crate) async fn channel(&self, address: &str) -> anyhow::Result<Channel> {
        let endpoint = endpoint(address)?.connect_timeout(ANSWERED_WITHIN).timeout(ANSWERED_WITHIN);
        self.connect(address, &endpoint).await
    }

    /// Connects to a member with the settings of an endpoint.
    pub(crate) async fn connect(&self, address: &str, endpoint: &Endpoint) -> anyhow::Result<Channel> {
        dial::connect(endpoint, &self.security)
            .await
            .with_context(|| format!("cannot reach the control plane at {address}"))
    }
}

/// Creates the endpoint of a member.
pub(crate) fn endpoint(address: &str) -> anyhow::Result<Endpoint> {
    Endpoint::from_shared(format!("http://{address}"))
        .with_context(|| format!("invalid address \"{address}\": expected host:port"))
}

/// Creates a single-threaded runtime.
pub(crate) fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?)
}

/// Returns the answer of the first member that gives one, or the error of the last member.
pub(crate) async fn first_answer<T>(
    members: &Members,
    ask: impl AsyncFn(&str) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let mut outcome = Err(anyhow::anyhow!("the cluster has no control-plane member"));
    for address in &members.addresses {
        outcome = ask(address).await;
        if outcome.is_ok() {
            break;
        }
    }
    outcome
}
