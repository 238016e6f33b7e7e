//! Sends the parts of an [`OwnerQuery`] to the owners of its keys, and fetches newer maps.

use std::sync::Arc;
use std::time::Instant;

use reprise_agent_core::owner_query::{Next, OwnerQuery, Part, PartAnswer};
use reprise_policy::BlockKey;
use tokio::task::JoinSet;
use tokio::time::timeout_at;
use tonic::Status;

use super::Shared;
use super::link::Link;
use super::members::{Routes, fetch_members};

/// Sends a query until it is finished or its deadline has passed. `send` sends keys to a member; `failure`
/// is logged if it fails.
pub(super) async fn run<A, S>(
    shared: &Arc<Shared>,
    query: &mut OwnerQuery<Arc<Link>, A>,
    (deadline, failure): (Instant, &'static str),
    send: impl Fn(Arc<Link>, Vec<BlockKey>) -> S,
) where
    A: Clone + Send + 'static,
    S: Future<Output = Result<PartAnswer<A>, Status>> + Send + 'static,
{
    loop {
        let routes = shared.routes();
        let parts = query.ask(routes.as_deref().map(Routes::map));
        let mut calls = Vec::with_capacity(parts.len());
        for part in parts {
            let link = routes.as_ref().expect("only a map has owners").link(part.owner).clone();
            let sent = send(link.clone(), query.keys_of(&part));
            calls.push(send_part((link, part), sent, (deadline, failure)));
        }
        for (link, part, outcome) in send_all(calls).await {
            match outcome {
                Ok(answer) => query.answer(link, &part, answer),
                Err(_) => query.fail(&part),
            }
        }
        let Next::FetchMap(link) = query.next() else { return };
        let home = format!("http://{}", link.address);
        let fetched = timeout_at(deadline.into(), fetch_members(shared, link.channel.clone(), &home)).await;
        if !matches!(fetched, Ok(Ok(()))) {
            return;
        }
    }
}

/// A part that has ended.
type Ended<A> = (Arc<Link>, Part, Result<PartAnswer<A>, Status>);

/// Runs the calls concurrently. The most frequent case, a query to one member, needs no task.
async fn send_all<A, S>(mut calls: Vec<S>) -> Vec<Ended<A>>
where
    A: Send + 'static,
    S: Future<Output = Ended<A>> + Send + 'static,
{
    let last = calls.pop();
    let mut others = JoinSet::new();
    for call in calls {
        others.spawn(call);
    }
    let mut ended = Vec::new();
    if let Some(last) = last {
        ended.push(last.await);
    }
    ended.extend(others.join_all().await);
    ended
}

async fn send_part<A>(
    (link, part): (Arc<Link>, Part),
    sent: impl Future<Output = Result<PartAnswer<A>, Status>>,
    (deadline, failure): (Instant, &'static str),
) -> Ended<A> {
    let late = |_| Err(Status::deadline_exceeded("timed out"));
    let outcome = timeout_at(deadline.into(), sent).await.unwrap_or_else(late);
    if let Err(status) = &outcome {
        let (code, reason, keys) = (status.code(), status.message(), part.indices.len());
        tracing::debug!(member = %link.name, keys, ?code, reason, "{failure}");
    }
    (link, part, outcome)
}
