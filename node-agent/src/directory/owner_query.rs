//! Carries out the actions of an [`OwnerQuery`]: sends parts to the owners of keys, and fetches newer maps.

use std::sync::Arc;
use std::time::Instant;

use reprise_agent_core::owner_query::{Next, NodeAnswer, OwnerQuery, Part, PartAnswer};
use reprise_policy::BlockKey;
use tokio::task::JoinSet;
use tokio::time::timeout_at;
use tonic::Status;

use super::Shared;
use super::link::Link;
use super::members::fetch_members;

/// How a query is sent.
pub(super) struct Sending<C, F> {
    pub(super) deadline: Instant,
    /// Whether a member can be asked now.
    pub(super) can_ask: C,
    /// Sends keys to a member.
    pub(super) send: F,
    /// Log message for a failed call.
    pub(super) failure: &'static str,
}

/// Runs a query until it is finished. Calls fail at the deadline.
pub(super) async fn run<A, S>(
    shared: &Arc<Shared>,
    query: &mut OwnerQuery<Arc<Link>, A>,
    sending: Sending<impl Fn(&Arc<Link>) -> bool, impl Fn(Arc<Link>, Vec<BlockKey>) -> S>,
) where
    A: Clone + NodeAnswer + Send + 'static,
    S: Future<Output = Result<PartAnswer<A>, Status>> + Send + 'static,
{
    let Sending { deadline, can_ask, send, failure } = sending;
    let mut next = query.ask(shared.routes().as_deref(), &can_ask);
    loop {
        next = match next {
            Next::Send(parts) => {
                let part = |(link, part): (Arc<Link>, Part)| {
                    let sent = send(link.clone(), query.keys_of(&part));
                    send_part((link, part), sent, (deadline, failure))
                };
                let calls = parts.into_iter().map(part).collect();
                let mut next = Next::Wait;
                for (link, part, outcome) in send_all(calls).await {
                    next = match outcome {
                        Ok(answer) => query.answer(link, &part, answer),
                        Err(_) => query.fail(&part),
                    };
                }
                next
            }
            Next::FetchMap(link) => {
                let home = format!("http://{}", link.address);
                let fetched = fetch_members(shared, link.channel.clone(), &home);
                match timeout_at(deadline.into(), fetched).await {
                    Ok(Ok(())) => query.ask(shared.routes().as_deref(), &can_ask),
                    _ => Next::Finish,
                }
            }
            Next::Wait | Next::Finish => return,
        };
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
