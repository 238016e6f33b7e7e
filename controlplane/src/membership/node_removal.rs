//! `ForgetNode`: removes a node that has left permanently from all members.
//!
//! ```text
//! its record is in the store? ──no──► NOT_FOUND
//!        │ alive for some member, or not known yet? ──yes──► FAILED_PRECONDITION, or UNAVAILABLE: retry
//!        │ its record is unchanged? ──no──► FAILED_PRECONDITION: it has registered meanwhile
//!        ▼
//! its record is deleted; every member learns that from the store
//! ```
//!
//! Each member judges liveness by the heartbeats that it receives, so all members are queried. A node that is
//! alive for one of them is not removed. A wrong removal loses nothing: the agent's next heartbeat is
//! rejected, and it registers as a new node with its whole inventory.

use std::time::Duration;

use reprise_controlplane_core::Member;
use reprise_controlplane_core::{ModeRecord, NodeLiveness, NodeRecord};
use reprise_identity::Security;
use reprise_policy::NodeMode;
use reprise_proto::connection::{Connection, LIST_NODES};
use reprise_proto::controlplane::{ForgetNodeReply, ListNodesReply, ListNodesRequest};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tonic::Status;

use super::{MembershipService, shutting_down};
use crate::placement::unknown_node;
use crate::registry::ModeReset;

/// Time limit for the node list of another member: 250 KB for 1,000 nodes. A member that exits leaves the map
/// within two seconds.
const ANSWERED_WITHIN: Duration = Duration::from_secs(1);

/// Removes the node of a name.
pub(super) async fn forget(service: &MembershipService, name: &str) -> Result<ForgetNodeReply, Status> {
    let found = service.registry.find(name).await.map_err(|error| service.status_of(&error))?;
    let Some(found) = found else { return Err(unknown_node(name, service.cluster.names())) };
    check_silent_here(service, &found)?;
    check_silent_elsewhere(service, &found).await?;
    let forgotten = service.registry.forget(&found).await.map_err(|error| {
        let refused = service.status_of(&error);
        Status::new(refused.code(), format!("cannot forget node '{name}': {}", refused.message()))
    })?;
    tracing::info!(node = found.node.0, name, "removing a node on request");
    service.cluster.node_deleted(name, forgotten.revision);
    if forgotten.mode == ModeReset::Reset {
        service.cluster.set_mode(name, ModeRecord { mode: NodeMode::Active, revision: forgotten.revision.0 });
    }
    Ok(ForgetNodeReply { node: u32::from(found.node.0) })
}

/// Checks that the node is not alive here. A member that has just started may not have received a heartbeat
/// yet.
fn check_silent_here(service: &MembershipService, found: &NodeRecord) -> Result<(), Status> {
    let wait = service.cluster.time_to_settle();
    match service.cluster.liveness_of(found.node) {
        Some(NodeLiveness::Alive) => Err(still_alive(&found.name)),
        Some(NodeLiveness::Absent) | None if !wait.is_zero() => Err(Status::unavailable(format!(
            "this member has just started and may not have received a heartbeat of '{}' yet: retry in {} s",
            found.name,
            wait.as_secs() + 1
        ))),
        Some(NodeLiveness::Dead | NodeLiveness::Absent) | None => Ok(()),
    }
}

async fn check_silent_elsewhere(service: &MembershipService, found: &NodeRecord) -> Result<(), Status> {
    let Some(view) = service.shards.view() else { return Err(shutting_down()) };
    let mut asked = JoinSet::new();
    for member in view.members.iter().filter(|member| member.name != *service.shards.name()) {
        asked.spawn(check_silent_at(member.clone(), found.clone(), service.security.clone()));
    }
    while let Some(answered) = asked.join_next().await {
        answered.map_err(|error| Status::internal(error.to_string()))??;
    }
    Ok(())
}

async fn check_silent_at(member: Member, found: NodeRecord, security: Security) -> Result<(), Status> {
    let unknown_liveness = |reason: &str| {
        Status::unavailable(format!(
            "member '{}' did not report whether '{}' is alive ({reason}): retry, or stop that member if it hangs",
            member.name, found.name
        ))
    };
    let connection =
        Connection::new(&member.address, &security).map_err(|error| unknown_liveness(&error.to_string()))?;
    let call = connection.call::<ListNodesReply>(LIST_NODES, &ListNodesRequest {});
    let listed = timeout(ANSWERED_WITHIN, call).await.map_err(|_| unknown_liveness("timeout"))?;
    let nodes = listed.map_err(|status| unknown_liveness(status.message()))?.nodes;
    let is_alive = nodes.iter().any(|node| node.alive && node.node == u32::from(found.node.0));
    if is_alive { Err(still_alive(&found.name)) } else { Ok(()) }
}

fn still_alive(name: &str) -> Status {
    Status::failed_precondition(format!(
        "node '{name}' is alive: stop its agent first; `reprise drain {name} --wait` moves blocks that only this node has"
    ))
}
