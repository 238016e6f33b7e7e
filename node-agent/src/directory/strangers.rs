//! Requests of nodes that do not act for the tenant of the blocks, as far as this node knows.
//!
//! A node reports the tenant of its first session at once, and its first request may overtake the news about that. So
//! these requests wait for a change of the nodes, for a short time.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use reprise_policy::TenantName;
use reprise_policy::peer::PeerRequest;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::{DirectoryEvent, Shared};

/// Maximum number of requests in the queue.
pub(super) const WAITING_MAX: usize = 256;

/// Maximum time that a request waits: a report is sent once a second, and the news about it at once.
const WAIT_MAX: Duration = Duration::from_secs(2);

/// A request for blocks of a tenant that the requesting node may not act for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StrangerRequest {
    /// Name of the node.
    pub(crate) from: String,
    pub(crate) request: PeerRequest<TenantName>,
}

/// Decides requests as they arrive, each within its time.
pub(super) async fn decide(shared: &Arc<Shared>, mut queue: mpsc::Receiver<StrangerRequest>) {
    let mut waiting = JoinSet::new();
    loop {
        tokio::select! {
            Some(request) = queue.recv(), if waiting.len() < WAITING_MAX => {
                waiting.spawn(wait(shared.clone(), request));
            }
            Some(_) = waiting.join_next() => {}
            // The client was dropped; shutdown ends this task.
            else => std::future::pending().await,
        }
    }
}

async fn wait(shared: Arc<Shared>, request: StrangerRequest) {
    let mut changes = shared.nodes_version.subscribe();
    let acts_for = || {
        let nodes = shared.nodes.read().unwrap_or_else(PoisonError::into_inner);
        nodes.acts_for(&request.from, &request.request.tenant)
    };
    let known = async {
        while !acts_for() {
            if changes.changed().await.is_err() {
                return;
            }
        }
    };
    // When the time is over, the last news count.
    let _ = timeout(request.request.deadline.min(WAIT_MAX), known).await;
    let acts_for = acts_for();
    shared.emit(DirectoryEvent::StrangerDecided { request, acts_for });
}
