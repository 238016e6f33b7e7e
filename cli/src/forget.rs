//! `reprise forget`: a node that has left for good is waited for and listed no more.
//!
//! Any member does it, and refuses while a member hears the node. Whoever comes back under the name is a new node, with another
//! number, and announces all it has.

use anyhow::bail;
use reprise_proto::controlplane::ForgetNodeRequest;
use reprise_proto::controlplane::membership_client::MembershipClient;
use serde::Serialize;
use tonic::Code;

use crate::config::Config;
use crate::modes::{ModeArgs, addresses, channel, runtime};
use crate::output::Audience;

/// What was forgotten, for programs.
#[derive(Debug, Serialize)]
struct Forgotten<'a> {
    node: &'a str,
    /// That it had; nobody else gets it.
    number: u32,
}

/// `reprise forget`.
pub(crate) fn command(args: &ModeArgs, config: &Config, audience: Audience) -> anyhow::Result<()> {
    runtime()?.block_on(forget(&addresses(args, config)?, &args.node, audience))
}

/// Has the first member that can forget it.
async fn forget(addresses: &[String], node: &str, audience: Audience) -> anyhow::Result<()> {
    let mut outcome = Err(anyhow::anyhow!("the cluster has no member of the control plane"));
    for address in addresses {
        outcome = forget_at(address, node).await;
        if outcome.is_ok() {
            break;
        }
    }
    let number = outcome?.map_err(anyhow::Error::msg)?;
    audience.emit(&Forgotten { node, number });
    audience.say(format!("{node}, which was node {number}, is forgotten"));
    Ok(())
}

/// The number that it had, or why no member will do it; an error when this one cannot.
async fn forget_at(address: &str, node: &str) -> anyhow::Result<Result<u32, String>> {
    let mut membership = MembershipClient::new(channel(address).await?);
    let refused = match membership.forget_node(ForgetNodeRequest { name: node.to_owned() }).await {
        Ok(reply) => return Ok(Ok(reply.into_inner().node)),
        Err(refused) => refused,
    };
    match refused.code() {
        Code::NotFound | Code::FailedPrecondition => Ok(Err(refused.message().to_owned())),
        Code::Unimplemented => {
            bail!(
                "{address} cannot forget nodes: it is of an older version; upgrade it, or ask another member"
            )
        }
        _ => bail!("{address} has not forgotten {node}: {}", refused.message()),
    }
}
