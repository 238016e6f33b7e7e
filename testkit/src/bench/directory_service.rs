//! The replica directory as agents use it: nodes that announce inventories to a member over gRPC, and look-ups over a
//! connection like that of agents.
//!
//! The nodes are simulated: they register, beat and announce like agents, so a measurement includes all work of the
//! member for them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use bytes::Bytes;
use reprise_identity::Role;
use reprise_policy::key::HASH_SLOTS;
use reprise_policy::{BlockKey, SlotSet, Tier};
use reprise_proto::connection::{Connection, LOOKUP};
use reprise_proto::controlplane::directory_client::DirectoryClient;
use reprise_proto::controlplane::membership_client::MembershipClient;
use reprise_proto::controlplane::{
    DescribeReply, DescribeRequest, HeartbeatRequest, LookupReply, LookupRequest, PeerEndpoint,
    RegisterRequest, SlotsRequest, UpdateRequest,
};
use reprise_proto::dial;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;
use tonic::transport::{Channel, Endpoint};

use super::fixture::keys;
use super::report::median;
use crate::cluster::Cluster;

/// Maximum entries: their keys are computed in advance (160 MB), so that they cost no time in the
/// measurement. The goal of the rebuild refers to this number.
pub const ENTRIES_MAX: usize = 10_000_000;

/// Nodes that have the entries.
const NODES: usize = 10;

/// Changes per update, as for agents.
const UPDATE_CHANGES: usize = 8192;

/// Keys per look-up call.
pub const LOOKUP_KEYS: usize = 1000;

/// Calls per repetition of the single-key measurement.
pub const SINGLE_CALLS: usize = 2000;

/// Calls per repetition of the comparison of batches.
pub const BATCH_CALLS: usize = 200;

/// Time limit for the registration of a started member in its store.
const OWNED_WITHIN: Duration = Duration::from_secs(10);

/// Seed of the keys.
const SEED: u64 = 40_000;

/// Inventories of the nodes, ready to be sent.
pub struct Inventories {
    /// Packed keys of each node, by update.
    nodes: Vec<Vec<Bytes>>,
    entries: usize,
}

/// Registered nodes, which beat until this is dropped.
pub struct Heartbeats {
    stop: Arc<AtomicBool>,
}

impl Inventories {
    /// Derives the keys of this many entries, evenly distributed over the nodes.
    pub fn new(entries: usize) -> Inventories {
        let of_node = |node: usize| {
            let count = entries / NODES + usize::from(node < entries % NODES);
            let update = |first: usize| {
                let seed = SEED + (node * entries + first) as u64;
                Bytes::from(BlockKey::pack(&keys(seed, UPDATE_CHANGES.min(count - first))))
            };
            (0..count).step_by(UPDATE_CHANGES).map(update).collect()
        };
        Inventories { nodes: (0..NODES).map(of_node).collect(), entries }
    }

    /// Returns packed keys of one look-up call, from all inventories.
    pub fn wanted(&self, call: usize, count: usize) -> Bytes {
        let mut packed = Vec::with_capacity(count * BlockKey::SIZE);
        for at in 0..count {
            let number = call.wrapping_mul(7919) + at.wrapping_mul(104_729);
            let updates = &self.nodes[number % NODES];
            let update = &updates[(number / NODES) % updates.len()];
            let key = (number / 31) % (update.len() / BlockKey::SIZE) * BlockKey::SIZE;
            packed.extend_from_slice(&update[key..key + BlockKey::SIZE]);
        }
        packed.into()
    }
}

/// Registers the nodes and announces their inventories concurrently; returns the seconds until the directory
/// has them.
///
/// # Errors
/// The member rejects an update, or its directory is incomplete.
pub fn announce(
    runtime: &Runtime,
    cluster: &Cluster,
    inventories: &Inventories,
) -> anyhow::Result<(Heartbeats, f64)> {
    let started = Instant::now();
    let beating = Heartbeats { stop: Arc::new(AtomicBool::new(false)) };
    runtime.block_on(async {
        let mut nodes = JoinSet::new();
        for (number, updates) in inventories.nodes.iter().enumerate() {
            let (channel, updates) = (node_channel(cluster, number)?, updates.clone());
            nodes.spawn(announce_one(channel, number, updates, beating.stop.clone()));
        }
        while let Some(node) = nodes.join_next().await {
            node.context("a node of the benchmark")??;
        }
        let described = directory(cluster).await?.describe(DescribeRequest {}).await?.into_inner();
        require_complete(&described, inventories.entries as u64)
    })?;
    Ok((beating, started.elapsed().as_secs_f64()))
}

/// Checks that the directory has every replica and the member owns every slot completely.
fn require_complete(described: &DescribeReply, expected: u64) -> anyhow::Result<()> {
    let DescribeReply { replicas, slots_owned, slots_partial, .. } = *described;
    ensure!(replicas == expected, "the directory has {replicas} of {expected} replicas");
    ensure!(
        slots_owned == u32::from(HASH_SLOTS) && slots_partial == 0,
        "the member owns {slots_owned} of {HASH_SLOTS} slots, {slots_partial} of them are partial"
    );
    Ok(())
}

/// Connects to the first member as the agent of a simulated node.
fn node_channel(cluster: &Cluster, number: usize) -> anyhow::Result<Channel> {
    let endpoint = Endpoint::from_shared(format!("http://{}", cluster.file().members[0].grpc))?;
    Ok(dial::connect_lazy(&endpoint, &cluster.security_of(&Role::Agent(node_name(number)))?))
}

fn node_name(number: usize) -> String {
    format!("bench-{number}")
}

async fn announce_one(
    channel: Channel,
    number: usize,
    updates: Vec<Bytes>,
    stop: Arc<AtomicBool>,
) -> anyhow::Result<()> {
    let mut membership = MembershipClient::new(channel.clone());
    let request = RegisterRequest {
        name: node_name(number),
        peer_endpoints: vec![PeerEndpoint::tcp("127.0.0.1:1")],
        ..RegisterRequest::default()
    };
    let granted = membership.register(request).await.context("registering")?.into_inner();
    let (node, epoch) = (granted.node, granted.epoch);
    let every = Duration::from_micros(granted.heartbeat_every_us);
    tokio::spawn(async move {
        while !stop.load(Ordering::Relaxed) {
            // The member may have ended before the benchmark.
            let _ = membership.heartbeat(HeartbeatRequest { node, epoch }).await;
            tokio::time::sleep(every).await;
        }
    });
    let mut directory = DirectoryClient::new(channel);
    let all = owned(&mut directory, SlotsRequest { node, epoch }).await?;
    let mut sequence = 0;
    let last = updates.len().saturating_sub(1);
    for (number, keys) in updates.into_iter().enumerate() {
        let count = (keys.len() / BlockKey::SIZE) as u64;
        let operations = vec![Tier::Nvme as u8; keys.len() / BlockKey::SIZE].into();
        let begins = if number == 0 { all.clone() } else { Bytes::new() };
        let ends = if number == last { all.clone() } else { Bytes::new() };
        // The start of an inventory has its own sequence number.
        let numbers = count + u64::from(!begins.is_empty());
        let request = UpdateRequest { node, epoch, sequence, keys, operations, reset: false, begins, ends };
        let reply = directory.update(request).await.context("announcing")?.into_inner();
        sequence += numbers;
        ensure!(!reply.fenced && reply.expected_sequence == sequence, "an update was rejected: {reply:?}");
    }
    Ok(())
}

/// Waits until the member owns every slot, which starts with its registration; returns the set of slots.
async fn owned(directory: &mut DirectoryClient<Channel>, request: SlotsRequest) -> anyhow::Result<Bytes> {
    let all = Bytes::copy_from_slice(&SlotSet::ALL.to_bytes());
    let deadline = Instant::now() + OWNED_WITHIN;
    while directory.slots(request).await.context("asking for slots")?.into_inner().owned != all {
        ensure!(Instant::now() < deadline, "the control plane does not own all slots: see its log");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    Ok(all)
}

/// Checks that a look-up found every key.
///
/// # Errors
/// A key without a replica.
pub fn all_found(reply: &LookupReply, count: usize) -> anyhow::Result<()> {
    let found = reply.offsets.windows(2).filter(|pair| pair[0] < pair[1]).count();
    ensure!(found == count, "the directory found {found} of {count} keys");
    Ok(())
}

/// Returns the median of single-key calls in microseconds.
///
/// # Errors
/// A failed call, or a key that is not found.
pub fn single_key(cluster: &Cluster, inventories: &Inventories, repetition: usize) -> anyhow::Result<f64> {
    let wanted = inventories.wanted(repetition, SINGLE_CALLS);
    let keys = (0..wanted.len()).step_by(BlockKey::SIZE).map(|at| wanted.slice(at..at + BlockKey::SIZE));
    sequential_look_ups(cluster, keys.collect())
}

/// Returns the median of calls of a thousand keys in microseconds.
///
/// # Errors
/// A failed call, or a key that is not found.
pub fn batches(cluster: &Cluster, inventories: &Inventories, repetition: usize) -> anyhow::Result<f64> {
    let call = |call| inventories.wanted(repetition * BATCH_CALLS + call, LOOKUP_KEYS);
    sequential_look_ups(cluster, (0..BATCH_CALLS).map(call).collect())
}

/// Returns the median time of these calls in microseconds, over a connection like that of agents. On one
/// thread, because passing calls to another thread would include the time of its wake-up.
fn sequential_look_ups(cluster: &Cluster, calls: Vec<Bytes>) -> anyhow::Result<f64> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let connection = Connection::new(&cluster.file().members[0].grpc, &cluster.security()?)?;
        let mut microseconds = Vec::with_capacity(calls.len());
        for keys in calls {
            let count = keys.len() / BlockKey::SIZE;
            let began = Instant::now();
            let request = LookupRequest { keys, asking_node: 0 };
            let reply = connection.call(LOOKUP, &request).await.context("look-up")?;
            microseconds.push(began.elapsed().as_secs_f64() * 1e6);
            all_found(&reply, count)?;
        }
        Ok(median(microseconds))
    })
}

/// Connects to the directory of the first member.
///
/// # Errors
/// The member does not listen.
pub async fn directory(cluster: &Cluster) -> anyhow::Result<DirectoryClient<Channel>> {
    let endpoint = Endpoint::from_shared(format!("http://{}", cluster.file().members[0].grpc))?;
    let channel = dial::connect(&endpoint, &cluster.security()?).await;
    Ok(DirectoryClient::new(channel.context("connecting to the control plane")?))
}

impl Drop for Heartbeats {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn inventories_have_the_requested_size_and_unique_keys() {
        for entries in [NODES, 100_001] {
            let inventories = Inventories::new(entries);
            let all: BTreeSet<&[u8]> =
                inventories.nodes.iter().flatten().flat_map(|update| update.chunks(BlockKey::SIZE)).collect();
            assert_eq!(all.len(), entries);
            let wanted = inventories.wanted(3, 50);
            assert!(wanted.chunks(BlockKey::SIZE).all(|key| all.contains(key)));
        }
    }

    #[test]
    fn directory_without_a_replica_or_with_a_partial_slot_is_incomplete() {
        let whole =
            DescribeReply { replicas: 7, slots_owned: u32::from(HASH_SLOTS), ..DescribeReply::default() };
        assert!(require_complete(&whole, 7).is_ok());
        let refused = |described| require_complete(&described, 7).expect_err("incomplete").to_string();
        assert!(refused(DescribeReply { replicas: 6, ..whole.clone() }).contains("6 of 7"));
        assert!(
            refused(DescribeReply { slots_partial: 1, ..whole.clone() }).contains("1 of them are partial")
        );
        assert!(refused(DescribeReply { slots_owned: 4095, ..whole }).contains("4095 of 4096"));
    }
}
