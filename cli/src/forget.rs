//! `reprise forget`: removes a node that has left permanently from the list of nodes.
//!
//! Any member can remove a node. It rejects the request while a member receives heartbeats from the node. A
//! node that registers under the same name later is a new node with another number, and announces its whole
//! inventory.

use anyhow::bail;
use reprise_proto::controlplane::ForgetNodeRequest;
use reprise_proto::controlplane::membership_client::MembershipClient;
use reprise_proto::dial::cause;
use serde::Serialize;
use tonic::Code;

use crate::config::Config;
use crate::members::{Members, first_answer, runtime};
use crate::node_mode::ModeArgs;
use reprise_testkit::output::Audience;

/// Output of `reprise forget --json`.
#[derive(Debug, Serialize)]
struct RemovedNode<'a> {
    node: &'a str,
    /// Number of the removed node; it is never reused.
    number: u32,
}

pub(crate) fn command(args: &ModeArgs, config: &Config, audience: Audience) -> anyhow::Result<()> {
    runtime()?.block_on(forget(&args.members.find(config)?, &args.node, audience))
}

/// Removes the node through the first member that can do so.
async fn forget(members: &Members, node: &str, audience: Audience) -> anyhow::Result<()> {
    let outcome = first_answer(members, async |address| forget_at(members, address, node).await).await;
    let number = outcome?.map_err(anyhow::Error::msg)?;
    audience.emit(&RemovedNode { node, number });
    audience.print_line(format!("removed {node} (node {number})"));
    Ok(())
}

/// Returns the number of the removed node, or the reason why every member would reject the request.
///
/// # Errors
/// This member cannot process the request, but another may.
async fn forget_at(members: &Members, address: &str, node: &str) -> anyhow::Result<Result<u32, String>> {
    let mut membership = MembershipClient::new(members.channel(address).await?);
    let status = match membership.forget_node(ForgetNodeRequest { name: node.to_owned() }).await {
        Ok(reply) => return Ok(Ok(reply.into_inner().node)),
        Err(status) => status,
    };
    match status.code() {
        Code::NotFound | Code::FailedPrecondition => Ok(Err(status.message().to_owned())),
        Code::Unimplemented => {
            bail!("{address} cannot remove nodes, its version is too old: upgrade it, or ask another member")
        }
        Code::PermissionDenied => Ok(Err(status.message().to_owned())),
        _ => bail!("{address} did not remove {node}: {}", cause(&status)),
    }
}
