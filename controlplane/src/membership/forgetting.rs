//! `ForgetNode`: a node that has left for good goes off the list of nodes, with all members.
//!
//! ```text
//! the store has it? ──no──► NOT_FOUND
//!        │ a member hears it, or cannot know yet? ──yes──► FAILED_PRECONDITION, or UNAVAILABLE: ask again
//!        │ its record is as it was found? ──no──► FAILED_PRECONDITION: it has registered meanwhile
//!        ▼
//! its record is deleted; every member hears that from the store
//! ```
//!
//! Each member judges life by its own beats, so all are asked: a node that one of them hears is not gone. Nothing is lost when one
//! is mistaken, or the node comes back in the same moment: it is told that it is not registered, and registers as a
//! new one with its whole inventory.

use std::time::Duration;

use reprise_controlplane_core::{MemberState, NodeRecord, SetMode};
use reprise_policy::NodeMode;
use reprise_proto::connection::{Connection, LIST_NODES};
use reprise_proto::controlplane::{ForgetNodeReply, ListNodesReply, ListNodesRequest};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tonic::Status;

use super::{MembershipService, shutting_down};
use crate::placement::unknown;
use crate::registry::ModeThen;
use crate::shards::Member;

/// For the other members' lists: one of 1,000 nodes is 250 KB. Who is gone is no member two seconds later.
const ANSWERED_WITHIN: Duration = Duration::from_secs(1);

/// Forgets the node of a name.
pub(super) async fn forget(service: &MembershipService, name: &str) -> Result<ForgetNodeReply, Status> {
    let found = service.registry.find(name).await.map_err(|error| service.refuse(&error))?;
    let Some(found) = found else { return Err(unknown(name, service.cluster.names())) };
    check_silence_here(service, &found)?;
    check_silence_elsewhere(service, &found).await?;
    let forgotten = service.registry.forget(&found).await.map_err(|error| {
        let refused = service.refuse(&error);
        Status::new(refused.code(), format!("'{name}' is not forgotten: {}", refused.message()))
    })?;
    tracing::info!(node = found.node.0, name, "an operator has a node forgotten");
    service.cluster.deleted(name, forgotten.revision);
    if forgotten.mode == ModeThen::TakenBack {
        service.cluster.set_mode(name, SetMode { mode: NodeMode::Active, revision: forgotten.revision.0 });
    }
    Ok(ForgetNodeReply { node: u32::from(found.node.0) })
}

/// A member that has just started may not have heard from a node that lives.
fn check_silence_here(service: &MembershipService, found: &NodeRecord) -> Result<(), Status> {
    let settles_in = service.cluster.settles_in();
    match service.cluster.state_of(found.node) {
        Some(MemberState::Alive) => Err(alive(&found.name)),
        Some(MemberState::Absent) | None if !settles_in.is_zero() => Err(Status::unavailable(format!(
            "this member has started just now, and may not have heard from '{}' yet: ask again in {} s",
            found.name,
            settles_in.as_secs() + 1
        ))),
        Some(MemberState::Dead | MemberState::Absent) | None => Ok(()),
    }
}

async fn check_silence_elsewhere(service: &MembershipService, found: &NodeRecord) -> Result<(), Status> {
    let Some(view) = service.shards.view() else { return Err(shutting_down()) };
    let mut asked = JoinSet::new();
    for member in view.members.iter().filter(|member| member.name != *service.shards.name()) {
        asked.spawn(check_silence_at(member.clone(), found.clone()));
    }
    while let Some(answered) = asked.join_next().await {
        answered.map_err(|error| Status::internal(error.to_string()))??;
    }
    Ok(())
}

async fn check_silence_at(member: Member, found: NodeRecord) -> Result<(), Status> {
    let unanswered = |reason: &str| {
        Status::unavailable(format!(
            "the member '{}' has not said whether it hears '{}' ({reason}): ask again; stop that member if it hangs",
            member.name, found.name
        ))
    };
    let connection = Connection::to(&member.address).map_err(|error| unanswered(&error.to_string()))?;
    let call = connection.call::<ListNodesReply>(LIST_NODES, &ListNodesRequest {});
    let listed = timeout(ANSWERED_WITHIN, call).await.map_err(|_| unanswered("no answer in time"))?;
    let nodes = listed.map_err(|status| unanswered(status.message()))?.nodes;
    let is_heard = nodes.iter().any(|node| node.alive && node.node == u32::from(found.node.0));
    if is_heard { Err(alive(&found.name)) } else { Ok(()) }
}

fn alive(name: &str) -> Status {
    Status::failed_precondition(format!(
        "'{name}' is alive: stop its agent first; `reprise drain {name} --wait` moves what only it has"
    ))
}
