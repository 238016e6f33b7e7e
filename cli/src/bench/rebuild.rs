//! The whole control plane loses its memory: three members on a real etcd are killed at once and started again, and know everything
//! again from the nodes' inventories.
//!
//! Played of the nodes is their index, a list of keys. What goes to which member, and when, is decided as in agents: by a production
//! outbox for each member, which asks for the member's slots, wants the inventory of those, sends it batch by batch, and by the
//! same pauses after failures.
//!
//! ```text
//! kill all ─ start all ─ leases of their former lives end ─ registered ─ nodes register ─ inventories ─ whole
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
    DescribeRequest, HeartbeatRequest, RegisterRequest, SlotsRequest, UpdateRequest,
};
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tonic::transport::{Channel, Endpoint};

use super::fixture::keys;
use super::report::{Figure, Target, median};
use super::{Settings, etcd};
use crate::cluster::{Cluster, ControlPlanes};

/// Members of the control plane.
const MEMBERS: usize = 3;

/// Nodes that hold the entries.
const NODES: usize = 10;

/// Repetitions at the most: the first rebuild of ten million entries takes what the next does.
const ROUNDS_MAX: usize = 5;

/// Seed of the keys.
const SEED: u64 = 90_000;

/// No changes are announced beside the inventories.
const CHANGES_MAX: usize = 1;

/// Bound on one rebuild.
const PATIENCE: Duration = Duration::from_secs(120);

/// Between two looks whether all is known.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// A call that takes so long has failed, as for an agent (`controlplane.call_timeout`).
const CALL_WITHIN: Duration = Duration::from_secs(2);

/// Ten million entries are promised to be known again within this.
const REBUILT_SECONDS_MAX: f64 = 10.0;

/// A node as its links see it.
struct Node {
    name: String,
    keys: Vec<BlockKey>,
}

/// One node's registration with one member.
struct Link {
    node: Arc<Node>,
    id: (NodeId, Epoch),
    directory: DirectoryClient<Channel>,
    outbox: Outbox,
    /// The version of the member's slots, from beats; closed when the member does not know the registration.
    beats: watch::Receiver<u64>,
}

/// What became of a message.
enum Sent {
    /// Answered; go on at once.
    Settled,
    /// Try again after a while.
    Again,
}

pub(super) fn run(entries: usize, settings: &Settings) -> anyhow::Result<Vec<Figure>> {
    let control = ControlPlanes::Etcd { members: MEMBERS };
    let mut cluster = Cluster::start_controlplane(&settings.directory, control)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let nodes: Vec<Arc<Node>> = (0..NODES).map(|number| Arc::new(Node::new(number, entries))).collect();
    let entries: usize = nodes.iter().map(|node| node.keys.len()).sum();
    let addresses = cluster.file().grpc_addresses();
    // They go on until the runtime ends.
    for (node, address) in nodes.iter().flat_map(|node| addresses.iter().map(move |address| (node, address)))
    {
        runtime.spawn(play(node.clone(), address.clone()));
    }
    wait_until_whole(&runtime, &addresses, entries)?;

    let mut seconds = Vec::new();
    for _ in settings.some_rounds("failover.rebuild", settings.repetitions.min(ROUNDS_MAX)) {
        let lost = Instant::now();
        (0..MEMBERS).try_for_each(|member| cluster.kill_member(member))?;
        (0..MEMBERS).try_for_each(|member| cluster.restart_member(member))?;
        wait_until_whole(&runtime, &addresses, entries)?;
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

/// Waits until the members own all slots, lack nothing of any, and have so many replicas together.
fn wait_until_whole(runtime: &Runtime, addresses: &[String], entries: usize) -> anyhow::Result<()> {
    let whole = async {
        let mut members: Vec<DirectoryClient<Channel>> = Vec::new();
        for address in addresses {
            let endpoint = Endpoint::from_shared(format!("http://{address}"))?.timeout(CALL_WITHIN);
            members.push(DirectoryClient::new(endpoint.connect_lazy()));
        }
        loop {
            let (mut owned, mut partial, mut replicas) = (0, 0, 0);
            for member in &mut members {
                // One that is not there yet owns nothing.
                if let Ok(described) = member.describe(DescribeRequest {}).await {
                    let described = described.into_inner();
                    owned += described.slots_owned;
                    partial += described.slots_partial;
                    replicas += described.replicas;
                }
            }
            ensure!(replicas <= entries as u64, "{replicas} replicas are known of {entries}");
            if (owned, partial, replicas) == (u32::from(HASH_SLOTS), 0, entries as u64) {
                return Ok(());
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    };
    let in_time = async { tokio::time::timeout(PATIENCE, whole).await };
    runtime.block_on(in_time).with_context(|| format!("the directory is not whole within {PATIENCE:?}"))?
}

impl Node {
    fn new(number: usize, entries: usize) -> Node {
        let count = entries / NODES + usize::from(number < entries % NODES);
        Node { name: format!("bench-{number}"), keys: keys(SEED + number as u64, count) }
    }

    /// What it has in some slots, as an agent's core walks its index for it.
    fn inventory(&self, slots: &SlotSet) -> Vec<(BlockKey, Tier)> {
        self.keys.iter().filter(|key| slots.has_key(key)).map(|key| (*key, Tier::Nvme)).collect()
    }
}

/// A node's side towards one member: registers, announces, and registers again when it is not known any more.
async fn play(node: Arc<Node>, address: String) -> anyhow::Result<()> {
    let channel = Endpoint::from_shared(format!("http://{address}"))?.timeout(CALL_WITHIN).connect_lazy();
    let mut pauses = Pauses::new(&node);
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

/// An agent's pauses after failures, other ones for every node.
struct Pauses {
    backoff: Backoff,
    drawn: u32,
}

impl Pauses {
    fn new(node: &Node) -> Pauses {
        let drawn = node.name.bytes().fold(1, |seed: u32, byte| seed.wrapping_mul(31) + u32::from(byte));
        Pauses { backoff: Backoff::default(), drawn }
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
            peer_address: "127.0.0.1:1".to_owned(),
            ..RegisterRequest::default()
        };
        let granted = membership.register(request).await.context("registering")?.into_inner();
        let id = (NodeId(u16::try_from(granted.node)?), Epoch(granted.epoch));
        let (version, beats) = watch::channel(0);
        tokio::spawn(async move {
            let request = HeartbeatRequest { node: granted.node, epoch: granted.epoch };
            let every = Duration::from_micros(granted.heartbeat_every_us);
            loop {
                // A member that does not answer may do so later, one that was started again does not know the registration.
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
        outbox.grant(id.0, id.1);
        Ok(Link { node, id, directory: DirectoryClient::new(channel), outbox, beats })
    }

    /// Announces what the member wants, until it does not know the registration any more.
    ///
    /// # Errors
    /// The member sends what is no set of slots.
    async fn announce(&mut self, pauses: &mut Pauses) -> anyhow::Result<()> {
        while self.beats.has_changed().is_ok() {
            let version = *self.beats.borrow_and_update();
            self.outbox.heard(self.id.1, version);
            let answered = match self.outbox.next_step() {
                Next::Wait => {
                    // Closed: looked at above.
                    let _ = self.beats.changed().await;
                    continue;
                }
                Next::Inventory(slots) => {
                    self.outbox.inventory(&slots, &self.node.inventory(&slots));
                    continue;
                }
                Next::Standing(node, epoch) => self.ask_standing(node, epoch).await?,
                Next::Send(batch) => self.send(&batch).await,
            };
            match answered {
                Sent::Settled => pauses.backoff.reset(),
                Sent::Again => pauses.next().await,
            }
        }
        Ok(())
    }

    async fn ask_standing(&mut self, node: NodeId, epoch: Epoch) -> anyhow::Result<Sent> {
        let request = SlotsRequest { node: u32::from(node.0), epoch: epoch.0 };
        let Ok(reply) = self.directory.slots(request).await else { return Ok(Sent::Again) };
        let reply = reply.into_inner();
        // The next beat is not known.
        if reply.fenced {
            return Ok(Sent::Again);
        }
        let set = |bytes: &[u8]| SlotSet::from_bytes(bytes).context("the member's slots are no set");
        let (owned, wanted) = (set(&reply.owned)?, set(&reply.wanted)?);
        self.outbox.follow(epoch, reply.slots_version, &owned, &wanted);
        Ok(Sent::Settled)
    }

    async fn send(&mut self, batch: &Batch) -> Sent {
        let Ok(reply) = self.directory.update(request(batch)).await else { return Sent::Again };
        let reply = reply.into_inner();
        let answer = if reply.fenced { Answer::Fenced } else { Answer::Expecting(reply.expected_sequence) };
        self.outbox.heard(batch.epoch, reply.slots_version);
        match self.outbox.answered(batch.epoch, batch.sequence, answer) {
            Outcome::Fenced => Sent::Again,
            Outcome::Applied(_) | Outcome::Gap | Outcome::Stale => Sent::Settled,
        }
    }
}

/// A batch as the directory's request.
fn request(batch: &Batch) -> UpdateRequest {
    let set = |slots: &SlotSet| Bytes::copy_from_slice(&slots.to_bytes());
    UpdateRequest {
        node: u32::from(batch.node.0),
        epoch: batch.epoch.0,
        sequence: batch.sequence,
        keys: Bytes::copy_from_slice(&batch.keys),
        operations: Bytes::copy_from_slice(&batch.operations),
        reset: matches!(batch.opening, Opening::Anew(_)),
        begins: match &batch.opening {
            Opening::Nothing => Bytes::new(),
            Opening::Slots(slots) | Opening::Anew(slots) => set(slots),
        },
        ends: if batch.ends.is_empty() { Bytes::new() } else { set(&batch.ends) },
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_nodes_have_as_many_entries_as_asked_and_each_is_in_one_members_part() {
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
