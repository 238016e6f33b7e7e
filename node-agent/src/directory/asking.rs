//! Lookups: each key's question goes to the member that owns its slot, and the answers come together again.
//!
//! A member that does not own a slot any more says so, with the epoch of its map. When that is newer than the one the
//! question was routed by, the map is fetched from there and those keys are asked for once more; else nobody is known
//! to have them, and they are misses like the keys of a member that does not answer in time.

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
use super::lookups::{Lookup, Next};
use super::members::{Routes, learn};
use super::{DirectoryEvent, Shared, wire};

/// Members asked for one key at the most: the one that the map names, and the one that a newer map names.
const ATTEMPTS: usize = 2;

/// Starts lookups as they come. Bounded by the queue, which counts those under way.
pub(super) async fn look_up(shared: &Arc<Shared>) {
    loop {
        let next = shared.lookups().next();
        match next {
            None => shared.lookups_changed.notified().await,
            Some(Next::Fail(id)) => fail(shared, id),
            Some(Next::Send(lookup)) if *shared.connected.borrow() => {
                tokio::spawn(look_up_one(shared.clone(), lookup));
            }
            Some(Next::Send(lookup)) => {
                shared.lookups().finished();
                fail(shared, lookup.id);
            }
        }
    }
}

async fn look_up_one(shared: Arc<Shared>, lookup: Lookup) {
    let found = ask(&shared, &lookup).await;
    shared.lookups().finished();
    match found {
        Some(mut found) => {
            leave_out_unreachable(&shared, &mut found);
            shared.counters.lookups_answered.fetch_add(1, Ordering::Relaxed);
            shared.emit(DirectoryEvent::Found { lookup: lookup.id, found });
        }
        None => fail(&shared, lookup.id),
    }
}

/// Takes out replicas on nodes whose address is not known (yet): after a restart of the control plane replicas may be
/// heard of before the node that has them. A block is found when it can be fetched.
fn leave_out_unreachable(shared: &Shared, found: &mut [Vec<Replica>]) {
    let nodes = shared.nodes.read().unwrap_or_else(std::sync::PoisonError::into_inner);
    for replicas in found {
        replicas.retain(|replica| nodes.has_address(replica.node));
    }
}

fn fail(shared: &Shared, lookup: LookupId) {
    shared.counters.lookups_failed.fetch_add(1, Ordering::Relaxed);
    shared.emit(DirectoryEvent::LookupFailed { lookup });
}

/// Asks the owners of all keys; `None` when none of them answered.
async fn ask(shared: &Arc<Shared>, lookup: &Lookup) -> Option<Vec<Vec<Replica>>> {
    let mut found = vec![Vec::new(); lookup.keys.len()];
    // Places of the keys that nobody has answered for.
    let mut open: Vec<u32> = (0..).take(lookup.keys.len()).collect();
    let mut answered = false;
    for _ in 0..ATTEMPTS {
        let routes = shared.routes.borrow().clone();
        let Some(routes) = routes else { break };
        let mut newer = None;
        let mut left = Vec::new();
        for answer in ask_owners(shared, &routes, lookup, open).await {
            let Ok(part) = answer.outcome else {
                count(&shared.counters.lookup_keys_unanswered, answer.places.len());
                continue;
            };
            answered = true;
            count(&shared.counters.lookup_keys_partial, part.partial);
            left.extend(part.elsewhere.iter().map(|at| answer.places[*at as usize]));
            if !part.elsewhere.is_empty() && part.map_epoch > routes.epoch() {
                newer = Some(answer.link);
            }
            for (place, replicas) in answer.places.iter().zip(part.found) {
                found[*place as usize] = replicas;
            }
        }
        count(&shared.counters.lookup_keys_redirected, left.len());
        open = left;
        let Some(link) = newer.filter(|_| !open.is_empty()) else { break };
        let home = format!("http://{}", link.address);
        let learned = timeout_at(lookup.deadline.into(), learn(shared, link.channel.clone(), &home)).await;
        if !matches!(learned, Ok(Ok(()))) {
            break;
        }
    }
    answered.then_some(found)
}

/// One member's part of a question.
struct Answer {
    link: Arc<Link>,
    /// Of its keys among those of the lookup.
    places: Vec<u32>,
    outcome: Result<Part, Status>,
}

/// What a member answered.
#[derive(Default)]
struct Part {
    found: Vec<Vec<Replica>>,
    /// Indices of keys that are not its own.
    elsewhere: Vec<u32>,
    partial: usize,
    map_epoch: Epoch,
}

/// Asks each owner of the keys at these places, all at once.
async fn ask_owners(shared: &Arc<Shared>, routes: &Routes, lookup: &Lookup, places: Vec<u32>) -> Vec<Answer> {
    let mut by_owner: Vec<Vec<u32>> = vec![Vec::new(); routes.links().len()];
    for place in places {
        match routes.owner(&lookup.keys[place as usize]) {
            Some(owner) => by_owner[owner].push(place),
            None => count(&shared.counters.lookup_keys_unanswered, 1),
        }
    }
    let mut parts: Vec<(Arc<Link>, Vec<u32>)> =
        routes.links().iter().cloned().zip(by_owner).filter(|(_, places)| !places.is_empty()).collect();
    // The most usual question, to one member, needs no task of its own.
    let last = parts.pop();
    let mut others = JoinSet::new();
    for (link, places) in parts {
        others.spawn(ask_one(link, keys_at(lookup, &places), places, lookup.deadline));
    }
    let mut answers = Vec::new();
    if let Some((link, places)) = last {
        answers.push(ask_one(link, keys_at(lookup, &places), places, lookup.deadline).await);
    }
    answers.extend(others.join_all().await);
    answers
}

fn keys_at(lookup: &Lookup, places: &[u32]) -> Vec<BlockKey> {
    places.iter().map(|place| lookup.keys[*place as usize]).collect()
}

async fn ask_one(link: Arc<Link>, keys: Vec<BlockKey>, places: Vec<u32>, deadline: Instant) -> Answer {
    let outcome = if link.is_up() {
        let late = |_| Err(Status::deadline_exceeded("no answer in time"));
        timeout_at(deadline.into(), ask_for(&link, &keys)).await.unwrap_or_else(late)
    } else {
        Err(Status::unavailable("the member does not answer beats"))
    };
    if let Err(status) = &outcome {
        let (code, reason) = (status.code(), status.message());
        tracing::debug!(member = %link.name, keys = keys.len(), ?code, reason, "a lookup got no answer");
    }
    Answer { link, places, outcome }
}

async fn ask_for(link: &Link, keys: &[BlockKey]) -> Result<Part, Status> {
    let mut part = Part { found: Vec::with_capacity(keys.len()), ..Part::default() };
    for chunk in keys.chunks(BATCH_CHANGES_MAX) {
        let first = u32::try_from(part.found.len()).expect("lookups have fewer keys");
        let request = LookupRequest { keys: wire::pack(chunk), asking_node: link.node() };
        let reply: LookupReply = link.lookups.call(LOOKUP, &request).await?;
        wire::unpack_found(&reply, chunk.len(), &mut part.found)
            .ok_or_else(|| Status::internal("the reply does not fit the keys asked"))?;
        part.elsewhere.extend(reply.elsewhere.iter().map(|at| first + at));
        part.partial += reply.partial as usize;
        part.map_epoch = part.map_epoch.max(Epoch(reply.map_epoch));
    }
    Ok(part)
}

fn count(counter: &AtomicU64, keys: usize) {
    counter.fetch_add(keys as u64, Ordering::Relaxed);
}
