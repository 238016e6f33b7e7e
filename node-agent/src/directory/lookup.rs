//! Lookups: each key is sent to the owner of its slot, and the responses are merged ([`OwnerQuery`]). Keys
//! without a response in time count as misses.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use reprise_agent_core::effect::LookupId;
use reprise_agent_core::event::Replica;
use reprise_agent_core::outbox::BATCH_CHANGES_MAX;
use reprise_agent_core::owner_query::{OwnerQuery, PartAnswer, QueryCounts};
use reprise_policy::{BlockKey, Epoch};
use reprise_proto::connection::LOOKUP;
use reprise_proto::controlplane::{LookupReply, LookupRequest};
use tonic::Status;

use super::link::Link;
use super::lookup_queue::{Lookup, QueueStep};
use super::owner_query::Sending;
use super::{DirectoryEvent, Shared, owner_query, wire};

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
    let id = lookup.id;
    let found = query(&shared, lookup).await;
    shared.lookups().finished();
    match found {
        Some(found) => {
            shared.counters.lookups_answered.fetch_add(1, Ordering::Relaxed);
            shared.emit(DirectoryEvent::LookupCompleted { lookup: id, found });
        }
        None => fail(&shared, id),
    }
}

fn fail(shared: &Shared, lookup: LookupId) {
    shared.counters.lookups_failed.fetch_add(1, Ordering::Relaxed);
    shared.emit(DirectoryEvent::LookupFailed { lookup });
}

/// Queries the owners of all keys; `None` if none of them responded.
async fn query(shared: &Arc<Shared>, lookup: Lookup) -> Option<Vec<Vec<Replica>>> {
    let mut query = OwnerQuery::new(lookup.keys, Vec::new());
    let sending = Sending {
        deadline: lookup.deadline,
        can_ask: |link: &Arc<Link>| link.is_up(),
        send: |link, keys| send_query(shared.clone(), link, keys),
        failure: "a lookup failed",
    };
    owner_query::run(shared, &mut query, sending).await;
    let QueryCounts { unanswered, redirected } = query.counts();
    count(&shared.counters.lookup_keys_unanswered, unanswered);
    count(&shared.counters.lookup_keys_redirected, redirected);
    let nodes = shared.nodes.read().unwrap_or_else(std::sync::PoisonError::into_inner);
    query.finish(|node| nodes.is_reachable(node))
}

async fn send_query(
    shared: Arc<Shared>,
    link: Arc<Link>,
    keys: Vec<BlockKey>,
) -> Result<PartAnswer<Vec<Replica>>, Status> {
    let mut part = PartAnswer { answers: Vec::with_capacity(keys.len()), ..PartAnswer::default() };
    let mut partial = 0;
    for chunk in keys.chunks(BATCH_CHANGES_MAX) {
        let first = u32::try_from(part.answers.len()).expect("lookups have fewer keys");
        let request = LookupRequest { keys: wire::pack(chunk), asking_node: link.node() };
        let reply: LookupReply = link.lookups.call(LOOKUP, &request).await?;
        wire::unpack_found(&reply, chunk.len(), &mut part.answers)
            .ok_or_else(|| Status::internal("the reply does not match the requested keys"))?;
        part.elsewhere.extend(reply.elsewhere.iter().map(|at| first + at));
        partial += reply.partial as usize;
        part.map_epoch = part.map_epoch.max(Epoch(reply.map_epoch));
    }
    count(&shared.counters.lookup_keys_partial, partial);
    Ok(part)
}

fn count(counter: &AtomicU64, keys: usize) {
    counter.fetch_add(keys as u64, Ordering::Relaxed);
}
