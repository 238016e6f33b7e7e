//! Lookups: each key is sent to the owner of its slot, and the responses are merged.
//!
//! A member that no longer owns a slot reports that, with the epoch of its map. If its map is newer than
//! ours, the map is fetched and these keys are sent once more. Otherwise they count as misses, like the
//! keys of a member that does not respond in time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use reprise_agent_core::effect::LookupId;
use reprise_agent_core::event::Replica;
use reprise_agent_core::outbox::BATCH_CHANGES_MAX;
use reprise_policy::{BlockKey, Epoch};
use reprise_proto::connection::LOOKUP;
use reprise_proto::controlplane::{LookupReply, LookupRequest};
use tokio::task::JoinSet;
use tokio::time::timeout_at;
use tonic::Status;

use super::link::Link;
use super::lookup_queue::{Lookup, QueueStep};
use super::members::{Routes, fetch_members};
use super::{DirectoryEvent, Shared, wire};

/// Maximum number of members asked for a key: the owner in our map, and the owner in a newer map.
const ATTEMPTS: usize = 2;

/// Starts queued lookups. The queue bounds the number in flight.
pub(super) async fn run_lookups(shared: &Arc<Shared>) {
    loop {
        let next = shared.lookups().next();
        match next {
            None => shared.lookups_changed.notified().await,
            Some(QueueStep::Fail(id)) => fail(shared, id),
            Some(QueueStep::Send(lookup)) if *shared.connected.borrow() => {
                tokio::spawn(run_lookup(shared.clone(), lookup));
            }
            Some(QueueStep::Send(lookup)) => {
                shared.lookups().finished();
                fail(shared, lookup.id);
            }
        }
    }
}

async fn run_lookup(shared: Arc<Shared>, lookup: Lookup) {
    let found = query(&shared, &lookup).await;
    shared.lookups().finished();
    match found {
        Some(mut found) => {
            remove_unreachable(&shared, &mut found);
            shared.counters.lookups_answered.fetch_add(1, Ordering::Relaxed);
            shared.emit(DirectoryEvent::LookupCompleted { lookup: lookup.id, found });
        }
        None => fail(&shared, lookup.id),
    }
}

/// Removes replicas on nodes whose address is unknown. After a restart of the control plane, replicas may
/// be known before their node. A block counts as found only if it can be fetched.
fn remove_unreachable(shared: &Shared, found: &mut [Vec<Replica>]) {
    let nodes = shared.nodes.read().unwrap_or_else(std::sync::PoisonError::into_inner);
    for replicas in found {
        replicas.retain(|replica| nodes.has_address(replica.node));
    }
}

fn fail(shared: &Shared, lookup: LookupId) {
    shared.counters.lookups_failed.fetch_add(1, Ordering::Relaxed);
    shared.emit(DirectoryEvent::LookupFailed { lookup });
}

/// Queries the owners of all keys; `None` if none of them responded.
async fn query(shared: &Arc<Shared>, lookup: &Lookup) -> Option<Vec<Vec<Replica>>> {
    let mut found = vec![Vec::new(); lookup.keys.len()];
    // Indices of the keys without a response.
    let mut open_indices: Vec<u32> = (0..).take(lookup.keys.len()).collect();
    let mut answered = false;
    for _ in 0..ATTEMPTS {
        let routes = shared.routes.borrow().clone();
        let Some(routes) = routes else { break };
        let mut newer = None;
        let mut remaining = Vec::new();
        for answer in query_owners(shared, &routes, lookup, open_indices).await {
            let Ok(part) = answer.outcome else {
                count(&shared.counters.lookup_keys_unanswered, answer.indices.len());
                continue;
            };
            answered = true;
            count(&shared.counters.lookup_keys_partial, part.partial);
            remaining.extend(part.elsewhere.iter().map(|at| answer.indices[*at as usize]));
            if !part.elsewhere.is_empty() && part.map_epoch > routes.epoch() {
                newer = Some(answer.link);
            }
            for (index, replicas) in answer.indices.iter().zip(part.found) {
                found[*index as usize] = replicas;
            }
        }
        count(&shared.counters.lookup_keys_redirected, remaining.len());
        open_indices = remaining;
        let Some(link) = newer.filter(|_| !open_indices.is_empty()) else { break };
        let home = format!("http://{}", link.address);
        let learned =
            timeout_at(lookup.deadline.into(), fetch_members(shared, link.channel.clone(), &home)).await;
        if !matches!(learned, Ok(Ok(()))) {
            break;
        }
    }
    answered.then_some(found)
}

/// The result of a query to one member.
struct Answer {
    link: Arc<Link>,
    /// Indices of its keys within the lookup.
    indices: Vec<u32>,
    outcome: Result<Part, Status>,
}

/// The content of a member's response.
#[derive(Default)]
struct Part {
    found: Vec<Vec<Replica>>,
    /// Indices of keys that the member does not own.
    elsewhere: Vec<u32>,
    partial: usize,
    map_epoch: Epoch,
}

/// Queries the owners of the keys at these indices concurrently.
async fn query_owners(
    shared: &Arc<Shared>,
    routes: &Routes,
    lookup: &Lookup,
    indices: Vec<u32>,
) -> Vec<Answer> {
    let mut by_owner: Vec<Vec<u32>> = vec![Vec::new(); routes.links().len()];
    for index in indices {
        match routes.owner(&lookup.keys[index as usize]) {
            Some(owner) => by_owner[owner].push(index),
            None => count(&shared.counters.lookup_keys_unanswered, 1),
        }
    }
    let mut parts: Vec<(Arc<Link>, Vec<u32>)> =
        routes.links().iter().cloned().zip(by_owner).filter(|(_, indices)| !indices.is_empty()).collect();
    // The most frequent case, a query to one member, needs no task.
    let last = parts.pop();
    let mut others = JoinSet::new();
    for (link, indices) in parts {
        others.spawn(query_member(link, keys_at(lookup, &indices), indices, lookup.deadline));
    }
    let mut answers = Vec::new();
    if let Some((link, indices)) = last {
        answers.push(query_member(link, keys_at(lookup, &indices), indices, lookup.deadline).await);
    }
    answers.extend(others.join_all().await);
    answers
}

fn keys_at(lookup: &Lookup, indices: &[u32]) -> Vec<BlockKey> {
    indices.iter().map(|index| lookup.keys[*index as usize]).collect()
}

async fn query_member(link: Arc<Link>, keys: Vec<BlockKey>, indices: Vec<u32>, deadline: Instant) -> Answer {
    let outcome = if link.is_up() {
        let late = |_| Err(Status::deadline_exceeded("timed out"));
        timeout_at(deadline.into(), send_query(&link, &keys)).await.unwrap_or_else(late)
    } else {
        Err(Status::unavailable("the member does not respond to heartbeats"))
    };
    if let Err(status) = &outcome {
        let (code, reason) = (status.code(), status.message());
        tracing::debug!(member = %link.name, keys = keys.len(), ?code, reason, "a lookup failed");
    }
    Answer { link, indices, outcome }
}

async fn send_query(link: &Link, keys: &[BlockKey]) -> Result<Part, Status> {
    let mut part = Part { found: Vec::with_capacity(keys.len()), ..Part::default() };
    for chunk in keys.chunks(BATCH_CHANGES_MAX) {
        let first = u32::try_from(part.found.len()).expect("lookups have fewer keys");
        let request = LookupRequest { keys: wire::pack(chunk), asking_node: link.node() };
        let reply: LookupReply = link.lookups.call(LOOKUP, &request).await?;
        wire::unpack_found(&reply, chunk.len(), &mut part.found)
            .ok_or_else(|| Status::internal("the reply does not match the requested keys"))?;
        part.elsewhere.extend(reply.elsewhere.iter().map(|at| first + at));
        part.partial += reply.partial as usize;
        part.map_epoch = part.map_epoch.max(Epoch(reply.map_epoch));
    }
    Ok(part)
}

fn count(counter: &AtomicU64, keys: usize) {
    counter.fetch_add(keys as u64, Ordering::Relaxed);
}
