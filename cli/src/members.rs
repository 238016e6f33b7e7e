//! Members of the control plane that a command asks.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
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

impl MembersArgs {
    /// Returns the addresses from the arguments or the cluster directory.
    pub(crate) fn addresses(&self, config: &Config) -> anyhow::Result<Vec<String>> {
        config.cluster.members(self.controlplane.as_ref(), self.cluster.as_deref())
    }
}

/// Creates a single-threaded runtime.
pub(crate) fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?)
}

/// Returns the answer of the first member that gives one, or the error of the last member.
pub(crate) async fn first_answer<T>(
    addresses: &[String],
    ask: impl AsyncFn(&str) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let mut outcome = Err(anyhow::anyhow!("the cluster has no control-plane member"));
    for address in addresses {
        outcome = ask(address).await;
        if outcome.is_ok() {
            break;
        }
    }
    outcome
}

/// Connects to a member.
pub(crate) async fn channel(address: &str) -> anyhow::Result<Channel> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))
        .with_context(|| format!("invalid address \"{address}\": expected host:port"))?
        .connect_timeout(ANSWERED_WITHIN)
        .timeout(ANSWERED_WITHIN);
    endpoint.connect().await.with_context(|| format!("cannot reach the control plane at {address}"))
}
