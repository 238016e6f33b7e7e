//! Loss of the whole control plane's memory: three members on a real etcd are killed at once and restarted,
//! and rebuild the directory from the nodes' inventories.
//!
//! The nodes' index is simulated by a list of keys. As in agents, a production outbox per member queries the
//! member's slots, selects their inventory and sends it in batches, with the same pauses after failures.
//!
//! ```text
//! kill all ─ start all ─ earlier leases expire ─ registered ─ nodes register ─ inventories ─ complete
//! ```

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use bytes::Bytes;
use reprise_agent_core::backoff::Backoff;
use reprise_agent_core::outbox::{Answer, Batch, Next, Opening, Outbox, Outcome};
use reprise_policy::key::HASH_SLOTS;
use reprise_policy::{BlockKey, Epoch, NodeId, SlotSet, Tier};
use reprise_proto::controlplane::directory_client::DirectoryClient;
use reprise_proto::controlplane::membership_client::MembershipClient;
use reprise_proto::controlplane::{
    DescribeRequest, HeartbeatRequest, PeerEndpoint, RegisterRequest, SlotsRequest, UpdateRequest,
};
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tonic::transport::{Channel, Endpoint};

use reprise_testkit::bench::Settings;
use reprise_testkit::bench::fixture::keys;
use reprise_testkit::bench::report::{Figure, Target, median};

use crate::etcd;
use reprise_testkit::cluster::{Cluster, ControlPlanes};

/// Members of the control plane.
const MEMBERS: usize = 3;

/// Nodes that have the entries.
const NODES: usize = 10;

/// Maximum repetitions: the first rebuild of ten million entries takes as long as the next.
const ROUNDS_MAX: usize = 5;

/// Seed of the keys.
const SEED: u64 = 90_000;

/// No changes are announced in addition to the inventories.
const CHANGES_MAX: usize = 1;

/// Time limit of one rebuild.
const PATIENCE: Duration = Duration::from_secs(120);

/// Interval between checks of the directory.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Timeout of a call, as for an agent (`controlplane.call_timeout`).
const CALL_WITHIN: Duration = Duration::from_secs(2);

/// Goal for the rebuild of ten million entries.
const REBUILT_SECONDS_MAX: f64 = 10.0;

/// State of a node that its links share.
struct Node {
    name: String,
    keys: Vec<BlockKey>,
}

/// Registration of a node with a member.
struct Link {
    node: Arc<Node>,
    id: (NodeId, Epoch),
    directory: DirectoryClient<Channel>,
    outbox: Outbox,
    /// Version of the member's slots, from beats; closed if the member does not know the registration.
    beats: watch::Receiver<u64>,
}

/// Result of a message.
enum SendOutcome {
    /// The member answered; continue immediately.
    Settled,
    /// Try again after a pause.
    Again,
}

pub(crate) fn run(entries: usize, settings: &Settings) -> anyhow::Result<Vec<Figure>> {
    let control = ControlPlanes::Etcd { members: MEMBERS };
    let mut cluster = Cluster::start_controlplane(&settings.directory, control)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let nodes: Vec<Arc<Node>> = (0..NODES).map(|number| Arc::new(Node::new(number, entries))).collect();
    let entries: usize = nodes.iter().map(|node| node.keys.len()).sum();
    let addresses = cluster.file().grpc_addresses();
    // The tasks run until the runtime ends.
    for (node, address) in nodes.iter().flat_map(|node| addresses.iter().map(move |address| (node, address)))
    {
        runtime.spawn(simulate_node(node.clone(), address.clone()));
    }
    wait_until_complete(&runtime, &addresses, entries)?;

    let mut seconds = Vec::new();
    for _ in settings.some_rounds("failover.rebuild", settings.repetitions.min(ROUNDS_MAX)) {
        let lost = Instant::now();
        (0..MEMBERS).for_each(|member| cluster.kill_member(member));
        (0..MEMBERS).try_for_each(|member| cluster.restart_member(member))?;
        wait_until_complete(&runtime, &addresses, entries)?;
        seconds.push(lost.elapsed().as_secs_f64());
    }
    let most = seconds.iter().copied().fold(0.0, f64::max);
    let target = Target::AtMost(REBUILT_SECONDS_MAX);
    let mut figures = vec![
        Figure::absolute(format!("failover.rebuild_{entries}_entries_median"), median(seconds), "s", target),
        Figure::absolute(format!("failover.rebuild_{entries}_entries_max"), most, "s", target),
    ];
    figures.extend(etcd::sizes(&cluster, entries)?);
    Ok(figures)
}

/// Waits until the members own all slots completely and have this number of replicas in total.
fn wait_until_complete(runtime: &Runtime, addresses: &[String], entries: usize) -> anyhow::Result<()> {
    let whole = async {
        let mut members: Vec<DirectoryClient<Channel>> = Vec::new();
        for address in addresses {
            let endpoint = Endpoint::from_shared(format!("http://{address}"))?.timeout(CALL_WITHIN);
            members.push(DirectoryClient::new(endpoint.connect_lazy()));
        }
        loop {
            let (mut owned, mut partial, mut replicas) = (0, 0, 0);
            for member in &mut members {
                // A member that has not started yet owns nothing.
                if let Ok(described) = member.describe(DescribeRequest {}).await {
                    let described = described.into_inner();
                    owned += described.slots_owned;
                    partial += described.slots_partial;
                    replicas += described.replicas;
                }
            }
            ensure!(replicas <= entries as u64, "the members have {replicas} of {entries} replicas");
            if (owned, partial, replicas) == (u32::from(HASH_SLOTS), 0, entries as u64) {
                return Ok(());
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    };
    let in_time = async { tokio::time::timeout(PATIENCE, whole).await };
    runtime
        .block_on(in_time)
        .with_context(|| format!("the directory was not complete within {PATIENCE:?}"))?
}

impl Node {
    fn new(number: usize, entries: usize) -> Node {
        let count = entries / NODES + usize::from(number < entries % NODES);
        Node { name: format!("bench-{number}"), keys: keys(SEED + number as u64, count) }
    }

    /// Returns its entries in some slots, like the index of an agent's core.
    fn inventory(&self, slots: &SlotSet) -> Vec<(BlockKey, Tier)> {
        self.keys.iter().filter(|key| slots.has_key(key)).map(|key| (*key, Tier::Nvme)).collect()
    }
}

/// Simulates a node for one member: registers and announces, and registers again if the member does not know
/// it.
async fn simulate_node(node: Arc<Node>, address: String) -> anyhow::Result<()> {
    let channel = Endpoint::from_shared(format!("http://{address}"))?.timeout(CALL_WITHIN).connect_lazy();
    let mut pauses = RetryBackoff::new(&node);
    loop {
        match Link::register(node.clone(), channel.clone()).await {
            Ok(mut link) => {
                pauses.backoff.reset();
                link.announce(&mut pauses).await?;
            }
            Err(_) => pauses.next().await,
        }
    }
}

/// An agent's pauses after failures, different for every node.
struct RetryBackoff {
    backoff: Backoff,
    drawn: u32,
}

impl RetryBackoff {
    fn new(node: &Node) -> RetryBackoff {
        let drawn = node.name.bytes().fold(1, |seed: u32, byte| seed.wrapping_mul(31) + u32::from(byte));
        RetryBackoff { backoff: Backoff::default(), drawn }
    }

    async fn next(&mut self) {
        self.drawn = self.drawn.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        tokio::time::sleep(self.backoff.next(self.drawn)).await;
    }
}

impl Link {
    async fn register(node: Arc<Node>, channel: Channel) -> anyhow::Result<Link> {
        let mut membership = MembershipClient::new(channel.clone());
        let request = RegisterRequest {
            name: node.name.clone(),
            peer_endpoints: vec![PeerEndpoint::tcp("127.0.0.1:1")],
            ..RegisterRequest::default()
        };
        let granted = membership.register(request).await.context("registering")?.into_inner();
        let id = (NodeId(u16::try_from(granted.node)?), Epoch(granted.epoch));
        let (version, beats) = watch::channel(0);
        tokio::spawn(async move {
            let request = HeartbeatRequest { node: granted.node, epoch: granted.epoch };
            let every = Duration::from_micros(granted.heartbeat_every_us);
            loop {
                // A member without an answer may answer later; a restarted member does not know the
                // registration.
                if let Ok(reply) = membership.heartbeat(request).await {
                    let reply = reply.into_inner();
                    if !reply.known || version.send(reply.slots_version).is_err() {
                        return;
                    }
                }
                tokio::time::sleep(every).await;
            }
        });
        let mut outbox = Outbox::new(CHANGES_MAX);
        outbox.register(id.0, id.1);
        Ok(Link { node, id, directory: DirectoryClient::new(channel), outbox, beats })
    }

    /// Announces requested inventories until the member does not know the registration.
    ///
    /// # Errors
    /// The member sends an invalid set of slots.
    async fn announce(&mut self, pauses: &mut RetryBackoff) -> anyhow::Result<()> {
        while self.beats.has_changed().is_ok() {
            let version = *self.beats.borrow_and_update();
            self.outbox.note_version(self.id.1, version);
            let answered = match self.outbox.next_step() {
                Next::Wait => {
                    // Closed: handled above.
                    let _ = self.beats.changed().await;
                    continue;
                }
                Next::Inventory(slots) => {
                    self.outbox.inventory(&slots, &self.node.inventory(&slots));
                    continue;
                }
                Next::QuerySlots(node, epoch) => self.ask_standing(node, epoch).await?,
                Next::Send(batch) => self.send(&batch).await,
            };
            match answered {
                SendOutcome::Settled => pauses.backoff.reset(),
                SendOutcome::Again => pauses.next().await,
            }
        }
        Ok(())
    }

    async fn ask_standing(&mut self, node: NodeId, epoch: Epoch) -> anyhow::Result<SendOutcome> {
        let request = SlotsRequest { node: u32::from(node.0), epoch: epoch.0 };
        let Ok(reply) = self.directory.slots(request).await else { return Ok(SendOutcome::Again) };
        let reply = reply.into_inner();
        // The next beat is not known yet.
        if reply.fenced {
            return Ok(SendOutcome::Again);
        }
        let set = |bytes: &[u8]| SlotSet::from_bytes(bytes).context("the member's set of slots is invalid");
        let (owned, wanted) = (set(&reply.owned)?, set(&reply.wanted)?);
        self.outbox.set_slots(epoch, reply.slots_version, &owned, &wanted);
        Ok(SendOutcome::Settled)
    }

    async fn send(&mut self, batch: &Batch) -> SendOutcome {
        let Ok(reply) = self.directory.update(request(batch)).await else { return SendOutcome::Again };
        let reply = reply.into_inner();
        let answer = if reply.fenced { Answer::Fenced } else { Answer::Expecting(reply.expected_sequence) };
        self.outbox.note_version(batch.epoch, reply.slots_version);
        match self.outbox.process_answer(batch.epoch, batch.sequence, answer) {
            Outcome::Fenced => SendOutcome::Again,
            Outcome::Applied(_) | Outcome::Gap | Outcome::Stale => SendOutcome::Settled,
        }
    }
}

/// Returns a batch as the directory's request.
fn request(batch: &Batch) -> UpdateRequest {
    let set = |slots: &SlotSet| Bytes::copy_from_slice(&slots.to_bytes());
    UpdateRequest {
        node: u32::from(batch.node.0),
        epoch: batch.epoch.0,
        sequence: batch.sequence,
        keys: Bytes::copy_from_slice(&batch.keys),
        operations: Bytes::copy_from_slice(&batch.operations),
        reset: matches!(batch.opening, Opening::Reset(_)),
        begins: match &batch.opening {
            Opening::Nothing => Bytes::new(),
            Opening::Slots(slots) | Opening::Reset(slots) => set(slots),
        },
        ends: if batch.ends.is_empty() { Bytes::new() } else { set(&batch.ends) },
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn nodes_have_the_requested_entries_and_each_belongs_to_one_member() {
        let nodes: Vec<Node> = (0..NODES).map(|number| Node::new(number, 10_007)).collect();
        let all: BTreeSet<BlockKey> = nodes.iter().flat_map(|node| node.keys.iter().copied()).collect();
        assert_eq!(all.len(), 10_007);
        let mut third = SlotSet::EMPTY;
        (0..HASH_SLOTS).step_by(3).for_each(|slot| third.insert(slot));
        let rest = SlotSet::ALL.without(&third);
        for node in &nodes {
            let parts = [&third, &rest].map(|slots| node.inventory(slots).len());
            assert!(parts.iter().all(|part| *part > 0) && parts.iter().sum::<usize>() == node.keys.len());
        }
    }
}
