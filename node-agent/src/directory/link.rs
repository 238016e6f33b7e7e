//! The link thread: registration, announcements, lookups and the node list, as four loops on one runtime.
//!
//! The registrar owns the state of the link and is the only one to say `Registered`, `Connected` and `Disconnected`:
//!
//! ```text
//!   register (backoff) ──► granted ──► beats answered ⇄ beats failing      Connected ⇄ Disconnected
//!        ▲                                   │
//!        └──── beats unknown, fenced ────────┘                              Disconnected
//! ```
//!
//! While beats fail the registration is kept, with what is queued: a control plane that comes back within its
//! memory of this node needs no new inventory.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use reprise_agent_core::backoff::Backoff;
use reprise_agent_core::effect::LookupId;
use reprise_agent_core::event::Replica;
use reprise_agent_core::outbox::{BATCH_CHANGES_MAX, Batch, Outcome};
use reprise_policy::{Epoch, NodeId};
use reprise_proto::controlplane::directory_client::DirectoryClient as DirectoryService;
use reprise_proto::controlplane::membership_client::MembershipClient;
use reprise_proto::controlplane::{
    ListNodesRequest, LookupRequest, RegisterReply, RegisterRequest, WatchNodesRequest,
};
use tokio::runtime::Runtime;
use tokio::time::{sleep, timeout};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

use super::lookups::{Lookup, Next};
use super::nodes::Presence;
use super::{Beats, DirectoryEvent, Granted, Shared, wire};

/// Pings on the idle connection, and the time for their answer: a half-open connection is noticed within both.
const KEEP_ALIVE_EVERY: Duration = Duration::from_secs(2);
const KEEP_ALIVE_ANSWER: Duration = Duration::from_secs(2);
/// A registration that is lost sooner is renewed with growing delays: two agents of one name would otherwise take it
/// from each other as fast as they can.
const SETTLED_AFTER: Duration = Duration::from_secs(5);
/// HTTP/2 windows: the answer to 8,192 keys (up to 545 KiB) arrives without a wait for our acknowledgement.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 4 << 20;
/// Bounds of the heartbeat period that a control plane may ask for.
const HEARTBEAT_MIN: Duration = Duration::from_millis(10);
const HEARTBEAT_MAX: Duration = Duration::from_secs(60);

/// Runs until shutdown. Without an endpoint all lookups fail at once.
pub(super) fn run(runtime: &Runtime, shared: &Arc<Shared>, endpoint: Option<Endpoint>) {
    runtime.block_on(async {
        let mut shutdown = shared.shutdown.subscribe();
        let stop = shutdown.wait_for(|shutdown| *shutdown);
        match endpoint {
            None => tokio::select! {
                _ = stop => {}
                () = look_up(shared, None) => {}
            },
            Some(endpoint) => {
                let channel = endpoint
                    .http2_keep_alive_interval(KEEP_ALIVE_EVERY)
                    .keep_alive_timeout(KEEP_ALIVE_ANSWER)
                    .keep_alive_while_idle(true)
                    .initial_stream_window_size(STREAM_WINDOW_BYTES)
                    .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
                    .connect_lazy();
                tokio::select! {
                    _ = stop => {}
                    () = register(shared, MembershipClient::new(channel.clone())) => {}
                    () = announce(shared, DirectoryService::new(channel.clone())) => {}
                    () = look_up(shared, Some(DirectoryService::new(channel.clone()))) => {}
                    () = follow_nodes(shared, MembershipClient::new(channel)) => {}
                }
            }
        }
    });
}

/// One call with its time; running out of it reads like any other transient failure.
async fn within<T>(
    time: Duration,
    call: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<T, Status> {
    match timeout(time, call).await {
        Ok(answer) => answer.map(tonic::Response::into_inner),
        Err(_) => Err(Status::deadline_exceeded("no answer in time")),
    }
}

/// A random number for a delay. The standard library seeds each `RandomState` differently: enough for this.
fn jitter() -> u32 {
    (RandomState::new().hash_one(0) >> 32) as u32
}

// ---- registration ----------------------------------------------------------------------------------------------

async fn register(shared: &Shared, mut client: MembershipClient<Channel>) {
    let mut quarrel = Backoff::default();
    loop {
        let granted = register_once(shared, &mut client).await;
        shared.counters.registrations.fetch_add(1, Ordering::Relaxed);
        shared.outbox().grant(granted.node, granted.epoch);
        shared.beats.send_replace(Beats::Answered);
        shared.granted.send_replace(Some(granted));
        shared.emit(DirectoryEvent::Registered { node: granted.node, epoch: granted.epoch });
        set_connected(shared, Link::Up);
        shared.outbox_changed.notify_one();
        let since = Instant::now();
        let reason = keep(shared, granted).await;
        tracing::info!(node = granted.node.0, epoch = granted.epoch.0, reason, "registering again");
        shared.granted.send_replace(None);
        shared.outbox().lose();
        set_connected(shared, Link::Down);
        if since.elapsed() >= SETTLED_AFTER {
            quarrel.reset();
        } else {
            sleep(quarrel.next(jitter())).await;
        }
    }
}

/// Tries until the control plane answers.
async fn register_once(shared: &Shared, client: &mut MembershipClient<Channel>) -> Granted {
    let mut backoff = Backoff::default();
    let mut reported = None;
    loop {
        let status = match within(shared.settings.call_timeout, client.register(request(shared))).await {
            Ok(reply) => match granted(&reply) {
                Some(granted) => return granted,
                None => Status::internal(format!("node number {} does not fit 16 bits", reply.node)),
            },
            Err(status) => status,
        };
        // Once per kind of failure, not once per attempt.
        if reported != Some(status.code()) {
            tracing::warn!(code = ?status.code(), reason = status.message(), "cannot register with the control plane");
            reported = Some(status.code());
        }
        sleep(backoff.next(jitter())).await;
    }
}

fn request(shared: &Shared) -> RegisterRequest {
    let own = shared.settings.registration.clone();
    RegisterRequest {
        name: own.name,
        peer_address: own.peer_address,
        admin_address: own.admin_address,
        dram_bytes: own.dram_bytes,
        nvme_bytes: own.nvme_bytes,
        failure_domain: own.failure_domain,
        version: own.version,
    }
}

fn granted(reply: &RegisterReply) -> Option<Granted> {
    Some(Granted {
        node: NodeId(u16::try_from(reply.node).ok()?),
        epoch: Epoch(reply.epoch),
        heartbeat_every: Duration::from_micros(reply.heartbeat_every_us).clamp(HEARTBEAT_MIN, HEARTBEAT_MAX),
    })
}

/// Follows the beats until the registration is lost; says why.
async fn keep(shared: &Shared, granted: Granted) -> &'static str {
    let mut beats = shared.beats.subscribe();
    let mut fenced = shared.fenced.subscribe();
    loop {
        let now = *beats.borrow_and_update();
        match now {
            Beats::Answered => set_connected(shared, Link::Up),
            Beats::Failing => set_connected(shared, Link::Down),
            Beats::Unknown(epoch) if epoch == granted.epoch => return "the control plane does not know it",
            Beats::Unknown(_) => {}
        }
        if *fenced.borrow_and_update() == Some(granted.epoch) {
            return "a newer registration has taken its place";
        }
        tokio::select! {
            // The senders live in `shared`, so neither can be closed.
            _ = beats.changed() => {}
            _ = fenced.changed() => {}
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Link {
    Up,
    Down,
}

/// Says so when the link has changed.
fn set_connected(shared: &Shared, link: Link) {
    let up = link == Link::Up;
    if shared.connected.send_if_modified(|connected| std::mem::replace(connected, up) != up) {
        shared.emit(match link {
            Link::Up => DirectoryEvent::Connected,
            Link::Down => DirectoryEvent::Disconnected,
        });
    }
}

// ---- announcements ---------------------------------------------------------------------------------------------

/// Sends batches one after the other: order is worth more than a second batch in flight.
async fn announce(shared: &Shared, mut client: DirectoryService<Channel>) {
    let mut backoff = Backoff::default();
    loop {
        let (wanted, batch) = {
            let mut outbox = shared.outbox();
            (outbox.take_inventory_notice(), outbox.batch())
        };
        if wanted {
            shared.counters.inventories_wanted.fetch_add(1, Ordering::Relaxed);
            shared.emit(DirectoryEvent::InventoryWanted);
            continue; // the sink may have taken a while: look again
        }
        match batch {
            None => shared.outbox_changed.notified().await,
            Some(batch) => match send(shared, &mut client, &batch).await {
                Sent::Settled => backoff.reset(),
                Sent::Again => sleep(backoff.next(jitter())).await,
            },
        }
    }
}

/// What became of a batch.
enum Sent {
    /// Answered; go on at once.
    Settled,
    /// Try again after a while.
    Again,
}

async fn send(shared: &Shared, client: &mut DirectoryService<Channel>, batch: &Batch) -> Sent {
    let (epoch, sequence) = (batch.epoch, batch.sequence);
    match within(shared.settings.call_timeout, client.update(wire::update_request(batch))).await {
        Ok(reply) => {
            let outcome = shared.outbox().answered(epoch, sequence, wire::answer(&reply));
            match outcome {
                Outcome::Applied(changes) => {
                    shared.counters.changes_announced.fetch_add(changes as u64, Ordering::Relaxed);
                }
                Outcome::Gap => tracing::info!(
                    sequence,
                    expected = reply.expected_sequence,
                    "the directory has missed changes; announcing the whole inventory"
                ),
                Outcome::Fenced => {
                    shared.fenced.send_replace(Some(epoch));
                    return Sent::Again; // the registrar takes the registration away meanwhile
                }
                Outcome::Stale => {}
            }
            Sent::Settled
        }
        Err(status) if status.code() == Code::InvalidArgument => {
            tracing::error!(sequence, reason = status.message(), "the directory refused an announcement");
            shared.outbox().refused();
            Sent::Again
        }
        // The registrar reports an absent control plane; the batch stays and goes out again.
        Err(_) => Sent::Again,
    }
}

// ---- lookups ---------------------------------------------------------------------------------------------------

/// Starts lookups as they come. Bounded by the queue, which counts those under way.
async fn look_up(shared: &Arc<Shared>, client: Option<DirectoryService<Channel>>) {
    loop {
        let next = shared.lookups().next();
        match (next, &client) {
            (None, _) => shared.lookups_changed.notified().await,
            (Some(Next::Fail(id)), _) => fail(shared, id),
            (Some(Next::Send(lookup)), Some(client)) if *shared.connected.borrow() => {
                tokio::spawn(look_up_one(shared.clone(), client.clone(), lookup));
            }
            (Some(Next::Send(lookup)), _) => {
                shared.lookups().finished();
                fail(shared, lookup.id);
            }
        }
    }
}

async fn look_up_one(shared: Arc<Shared>, mut client: DirectoryService<Channel>, lookup: Lookup) {
    let left = lookup.deadline.saturating_duration_since(Instant::now());
    let found = match timeout(left, ask(&shared, &mut client, &lookup)).await {
        Ok(answer) => answer.inspect_err(|status| {
            tracing::debug!(lookup = lookup.id.0, code = ?status.code(), reason = status.message(), "lookup failed");
        }),
        Err(_) => Err(Status::deadline_exceeded("no answer in time")),
    };
    shared.lookups().finished();
    match found {
        Ok(mut found) => {
            leave_out_unreachable(&shared, &mut found);
            shared.counters.lookups_answered.fetch_add(1, Ordering::Relaxed);
            shared.emit(DirectoryEvent::Found { lookup: lookup.id, found });
        }
        Err(_) => fail(&shared, lookup.id),
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

async fn ask(
    shared: &Shared,
    client: &mut DirectoryService<Channel>,
    lookup: &Lookup,
) -> Result<Vec<Vec<Replica>>, Status> {
    let asking_node = shared.granted.borrow().map_or(0, |granted| u32::from(granted.node.0));
    let mut found = Vec::with_capacity(lookup.keys.len());
    for keys in lookup.keys.chunks(BATCH_CHANGES_MAX) {
        let request = LookupRequest { keys: wire::pack(keys), asking_node };
        let reply = client.lookup(request).await?.into_inner();
        wire::unpack_found(&reply, keys.len(), &mut found)
            .ok_or_else(|| Status::internal("the reply does not fit the keys asked"))?;
    }
    Ok(found)
}

fn fail(shared: &Shared, lookup: LookupId) {
    shared.counters.lookups_failed.fetch_add(1, Ordering::Relaxed);
    shared.emit(DirectoryEvent::LookupFailed { lookup });
}

// ---- node list -------------------------------------------------------------------------------------------------

/// Keeps the node list; when the watch ends it is opened again, and the list fetched whole.
async fn follow_nodes(shared: &Shared, mut client: MembershipClient<Channel>) {
    let mut backoff = Backoff::default();
    loop {
        let ended = follow_nodes_once(shared, &mut client, &mut backoff).await;
        tracing::debug!(reason = ?ended.err(), "node watch ended; opening it again");
        sleep(backoff.next(jitter())).await;
    }
}

async fn follow_nodes_once(
    shared: &Shared,
    client: &mut MembershipClient<Channel>,
    backoff: &mut Backoff,
) -> Result<(), Status> {
    let time = shared.settings.call_timeout;
    // The watch first: what changes between the two calls is then in both, and changes carry their epoch.
    let mut changes = within(time, client.watch_nodes(WatchNodesRequest {})).await?;
    let list = within(time, client.list_nodes(ListNodesRequest {})).await?;
    write_nodes(shared, |nodes| nodes.replace(list.nodes));
    backoff.reset();
    while let Some(change) = changes.message().await? {
        let presence = if change.removed { Presence::Removed } else { Presence::Here };
        if let Some(node) = change.node {
            write_nodes(shared, |nodes| nodes.change(node, presence));
        }
    }
    Ok(())
}

fn write_nodes(shared: &Shared, write: impl FnOnce(&mut super::nodes::NodeMap)) {
    write(&mut shared.nodes.write().unwrap_or_else(std::sync::PoisonError::into_inner));
}
