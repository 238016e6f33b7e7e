//! The directory as agents use it: a member in a process of its own, asked over gRPC on loopback.
//!
//! Nodes are played by this process: they register, beat, and announce inventories as agents do, so what is measured
//! of the member is all that it does for them. Client and member share the machine; therefore look-ups are given for each
//! second of CPU time that the member took, on all its threads, beside what the clock says.

use std::cell::RefCell;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use bytes::Bytes;
use reprise_policy::key::HASH_SLOTS;
use reprise_policy::{BlockKey, SlotSet, Tier};
use reprise_proto::connection::{Connection, LOOKUP};
use reprise_proto::controlplane::directory_client::DirectoryClient;
use reprise_proto::controlplane::membership_client::MembershipClient;
use reprise_proto::controlplane::{
    DescribeReply, DescribeRequest, HeartbeatRequest, LookupReply, LookupRequest, RegisterRequest,
    SlotsRequest, UpdateRequest,
};
use tokio::runtime::Runtime;
use tokio::task::JoinSet;
use tonic::transport::Channel;

use crate::cluster::{Cluster, ControlPlanes};

use super::fixture::keys;
use super::mooncake::Mooncake;
use super::report::{Figure, Target, median, paired};
use super::{Peer, Settings, loopback, mooncake};

/// Entries at the most: their keys are made beforehand and held (160 MB), so that they cost nothing while the member is
/// measured, and the rebuild that is promised is one of this many.
pub(super) const ENTRIES_MAX: usize = 10_000_000;

/// Nodes that hold the entries.
const NODES: usize = 10;

/// Changes of one update, as agents send them.
const UPDATE_CHANGES: usize = 8192;

/// Keys of one look-up call.
const LOOKUP_KEYS: usize = 1000;

/// Look-up calls of one repetition.
const LOOKUP_CALLS: usize = 1000;

/// Look-up calls under way at once: enough to keep the member busy, few enough not to queue for long.
const CALLS_AT_ONCE: usize = 8;

/// Calls of one repetition of the single-key measurement.
const SINGLE_CALLS: usize = 2000;

/// Calls of one repetition of the comparison of batches.
const BATCH_CALLS: usize = 200;

/// Time for a member that has started to be registered in its store.
const OWNED_WITHIN: Duration = Duration::from_secs(10);

/// Seed of the keys.
const SEED: u64 = 40_000;

/// The nodes' inventories, ready to be sent.
pub(super) struct Inventories {
    /// Of each node, packed keys by update.
    nodes: Vec<Vec<Bytes>>,
    entries: usize,
}

/// Nodes that are registered and beat until this is dropped.
pub(super) struct Beating {
    stop: Arc<AtomicBool>,
}

pub(super) fn run(entries: usize, peer: Option<Peer>, settings: &Settings) -> anyhow::Result<Vec<Figure>> {
    let mut cluster = Cluster::start_controlplane(&settings.directory, ControlPlanes::Embedded)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let inventories = Inventories::new(entries);
    let (beating, announced) = announce(&runtime, &cluster, &inventories)?;

    let (mut per_core, mut by_clock) = (Vec::new(), Vec::new());
    for repetition in settings.rounds("directory.service_lookups") {
        let (seconds, cpu_seconds) = lookups(&runtime, &cluster, &inventories, repetition)?;
        let found = (LOOKUP_CALLS * LOOKUP_KEYS) as f64;
        per_core.push(found / cpu_seconds / 1e6);
        by_clock.push(found / seconds / 1e6);
    }
    let mut latency = latency(&cluster, &inventories, settings)?;
    if peer == Some(Peer::Mooncake) {
        let mooncake = Mooncake::start(&mut cluster, settings.audience)?;
        latency.extend(beside_mooncake(mooncake, &cluster, &inventories, settings)?);
    }

    drop(beating);
    let lost = Instant::now();
    cluster.kill_member(0)?;
    cluster.restart_member(0)?;
    let (beating, _) = announce(&runtime, &cluster, &inventories)?;
    let rebuilt = lost.elapsed().as_secs_f64();
    drop(beating);
    let mut figures = vec![
        Figure::absolute(
            "directory.service_lookups_per_server_core",
            median(per_core),
            "million keys/s",
            Target::AtLeast(2.0),
        ),
        Figure::absolute("directory.service_lookups", median(by_clock), "million keys/s", Target::None),
    ];
    figures.extend(latency);
    figures.extend([
        Figure::absolute(
            "directory.service_announcements",
            entries as f64 / announced / 1e6,
            "million entries/s",
            Target::None,
        ),
        Figure::absolute(format!("directory.rebuild_{entries}_entries"), rebuilt, "s", Target::AtMost(10.0)),
    ]);
    Ok(figures)
}

/// A single key beside the least that any answer over TCP takes on this machine at this time: a byte there and back.
fn latency(cluster: &Cluster, inventories: &Inventories, settings: &Settings) -> anyhow::Result<Vec<Figure>> {
    let mut repetitions = 0..;
    let single = paired(
        settings.rounds("directory.service_single_key"),
        || loopback::round_trip_us(SINGLE_CALLS),
        || single_key(cluster, inventories, repetitions.next().expect("endless")),
    )?;
    // What is enough is said beside another master, in the same run.
    let against = ("a byte over loopback TCP and back", Target::None);
    Ok(vec![Figure::relative("directory.service_single_key_p50", single, "us", against)])
}

/// Single keys and batches, one call after the other, by us and by Mooncake in turn.
fn beside_mooncake(
    mooncake: Mooncake,
    cluster: &Cluster,
    inventories: &Inventories,
    settings: &Settings,
) -> anyhow::Result<Vec<Figure>> {
    let (mut repetitions, mooncake) = (0.., RefCell::new(mooncake));
    let mut repetition = || repetitions.next().expect("endless");
    let single = paired(
        settings.rounds("directory.mooncake_single_key"),
        || mooncake.borrow_mut().exists(1, SINGLE_CALLS),
        || single_key(cluster, inventories, repetition()),
    )?;
    let rate = |microseconds: f64| LOOKUP_KEYS as f64 / microseconds;
    let batch = paired(
        settings.rounds("directory.mooncake_batches"),
        || mooncake.borrow_mut().exists(LOOKUP_KEYS, BATCH_CALLS).map(rate),
        || batches(cluster, inventories, repetition()).map(rate),
    )?;
    let name = format!("Mooncake {}", mooncake::VERSION);
    Ok(vec![
        Figure::relative(
            "directory.service_single_key_p50_beside_mooncake",
            single,
            "us",
            (name.clone(), Target::RatioAtMost(1.0)),
        ),
        Figure::relative(
            "directory.service_batch_lookups_beside_mooncake",
            batch,
            "million keys/s",
            (name, Target::RatioAtLeast(1.0)),
        ),
    ])
}

impl Inventories {
    pub(super) fn new(entries: usize) -> Inventories {
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

    /// Packed keys of one look-up call, from all over the inventories.
    fn wanted(&self, call: usize, count: usize) -> Bytes {
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

/// Registers the nodes and announces their inventories, all at once; the seconds until the directory has them.
pub(super) fn announce(
    runtime: &Runtime,
    cluster: &Cluster,
    inventories: &Inventories,
) -> anyhow::Result<(Beating, f64)> {
    let started = Instant::now();
    let beating = Beating { stop: Arc::new(AtomicBool::new(false)) };
    runtime.block_on(async {
        let mut nodes = JoinSet::new();
        for (number, updates) in inventories.nodes.iter().enumerate() {
            let (address, updates) = (cluster.file().members[0].grpc.clone(), updates.clone());
            nodes.spawn(announce_one(address, number, updates, beating.stop.clone()));
        }
        while let Some(node) = nodes.join_next().await {
            node.context("a node of the benchmark")??;
        }
        let described = directory(cluster).await?.describe(DescribeRequest {}).await?.into_inner();
        demand_whole(&described, inventories.entries as u64)
    })?;
    Ok((beating, started.elapsed().as_secs_f64()))
}

/// Every replica is there, and the member answers for every slot without reserve.
fn demand_whole(described: &DescribeReply, expected: u64) -> anyhow::Result<()> {
    let DescribeReply { replicas, slots_owned, slots_partial, .. } = *described;
    ensure!(replicas == expected, "{replicas} of {expected} replicas are there");
    ensure!(
        slots_owned == u32::from(HASH_SLOTS) && slots_partial == 0,
        "{slots_owned} of {HASH_SLOTS} slots are the member's, and {slots_partial} of them are partial"
    );
    Ok(())
}

async fn announce_one(
    address: String,
    number: usize,
    updates: Vec<Bytes>,
    stop: Arc<AtomicBool>,
) -> anyhow::Result<()> {
    let mut membership = MembershipClient::connect(format!("http://{address}")).await?;
    let request = RegisterRequest {
        name: format!("bench-{number}"),
        peer_address: "127.0.0.1:1".to_owned(),
        ..RegisterRequest::default()
    };
    let granted = membership.register(request).await.context("registering")?.into_inner();
    let (node, epoch) = (granted.node, granted.epoch);
    let every = Duration::from_micros(granted.heartbeat_every_us);
    tokio::spawn(async move {
        while !stop.load(Ordering::Relaxed) {
            // The member may be gone already when the benchmark is.
            let _ = membership.heartbeat(HeartbeatRequest { node, epoch }).await;
            tokio::time::sleep(every).await;
        }
    });
    let mut directory = DirectoryClient::connect(format!("http://{address}")).await?;
    let all = owned(&mut directory, SlotsRequest { node, epoch }).await?;
    let mut sequence = 0;
    let last = updates.len().saturating_sub(1);
    for (number, keys) in updates.into_iter().enumerate() {
        let count = (keys.len() / BlockKey::SIZE) as u64;
        let operations = vec![Tier::Nvme as u8; keys.len() / BlockKey::SIZE].into();
        let begins = if number == 0 { all.clone() } else { Bytes::new() };
        let ends = if number == last { all.clone() } else { Bytes::new() };
        // To begin an inventory takes a number of its own.
        let numbers = count + u64::from(!begins.is_empty());
        let request = UpdateRequest { node, epoch, sequence, keys, operations, reset: false, begins, ends };
        let reply = directory.update(request).await.context("announcing")?.into_inner();
        sequence += numbers;
        ensure!(!reply.fenced && reply.expected_sequence == sequence, "an update was not taken: {reply:?}");
    }
    Ok(())
}

/// Waits until the member owns every slot, which it does as soon as it is registered; the set of them.
async fn owned(directory: &mut DirectoryClient<Channel>, request: SlotsRequest) -> anyhow::Result<Bytes> {
    let all = Bytes::copy_from_slice(&SlotSet::ALL.to_bytes());
    let give_up = Instant::now() + OWNED_WITHIN;
    while directory.slots(request).await.context("asking for slots")?.into_inner().owned != all {
        ensure!(Instant::now() < give_up, "the control plane does not own its slots: see its log");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    Ok(all)
}

/// Look-ups of a thousand keys, some at once; seconds by the clock, and of the member's CPU time.
fn lookups(
    runtime: &Runtime,
    cluster: &Cluster,
    inventories: &Inventories,
    repetition: usize,
) -> anyhow::Result<(f64, f64)> {
    let wanted: Vec<Bytes> = (0..LOOKUP_CALLS)
        .map(|call| inventories.wanted(repetition * LOOKUP_CALLS + call, LOOKUP_KEYS))
        .collect();
    let pid = cluster.member_pid(0);
    runtime.block_on(async {
        let client = directory(cluster).await?;
        let (began, cpu_began) = (Instant::now(), cpu_seconds(pid)?);
        let mut callers = JoinSet::new();
        for part in wanted.chunks(LOOKUP_CALLS.div_ceil(CALLS_AT_ONCE)) {
            callers.spawn(look_up(client.clone(), part.to_vec()));
        }
        while let Some(caller) = callers.join_next().await {
            caller.context("a caller of the benchmark")??;
        }
        Ok((began.elapsed().as_secs_f64(), cpu_seconds(pid)? - cpu_began))
    })
}

/// One call after the other; every key has a replica.
async fn look_up(mut client: DirectoryClient<Channel>, wanted: Vec<Bytes>) -> anyhow::Result<()> {
    for keys in wanted {
        let count = keys.len() / BlockKey::SIZE;
        let reply =
            client.lookup(LookupRequest { keys, asking_node: 0 }).await.context("look-up")?.into_inner();
        all_found(&reply, count)?;
    }
    Ok(())
}

fn all_found(reply: &LookupReply, count: usize) -> anyhow::Result<()> {
    let found = reply.offsets.windows(2).filter(|pair| pair[0] < pair[1]).count();
    ensure!(found == count, "{found} of {count} keys were found");
    Ok(())
}

/// Median of single-key calls in microseconds.
fn single_key(cluster: &Cluster, inventories: &Inventories, repetition: usize) -> anyhow::Result<f64> {
    let wanted = inventories.wanted(repetition, SINGLE_CALLS);
    let keys = (0..wanted.len()).step_by(BlockKey::SIZE).map(|at| wanted.slice(at..at + BlockKey::SIZE));
    one_after_the_other(cluster, keys.collect())
}

/// Median of calls of a thousand keys in microseconds.
fn batches(cluster: &Cluster, inventories: &Inventories, repetition: usize) -> anyhow::Result<f64> {
    let call = |call| inventories.wanted(repetition * BATCH_CALLS + call, LOOKUP_KEYS);
    one_after_the_other(cluster, (0..BATCH_CALLS).map(call).collect())
}

/// Median time of these calls in microseconds, over a connection as agents look up. On one thread: a caller that hands its
/// calls to another thread would measure how long that takes to wake.
fn one_after_the_other(cluster: &Cluster, calls: Vec<Bytes>) -> anyhow::Result<f64> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let connection = Connection::to(&cluster.file().members[0].grpc)?;
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

async fn directory(cluster: &Cluster) -> anyhow::Result<DirectoryClient<Channel>> {
    let address = &cluster.file().members[0].grpc;
    DirectoryClient::connect(format!("http://{address}")).await.context("connecting to the control plane")
}

/// CPU time that all threads of a process have had, from the scheduler's own count in nanoseconds.
fn cpu_seconds(pid: u32) -> anyhow::Result<f64> {
    let tasks = format!("/proc/{pid}/task");
    let mut nanoseconds = 0;
    for task in fs::read_dir(&tasks).with_context(|| format!("reading {tasks}"))? {
        let path = task?.path().join("schedstat");
        // A thread that has ended meanwhile has taken little: the member's threads live as long as it does.
        let Ok(text) = fs::read_to_string(&path) else { continue };
        let first = text.split_whitespace().next().context("an empty schedstat")?;
        nanoseconds += first.parse::<u64>().with_context(|| format!("{} is no number", path.display()))?;
    }
    Ok(nanoseconds as f64 / 1e9)
}

impl Drop for Beating {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn inventories_are_as_large_as_asked_and_no_key_is_twice_in_them() {
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
    fn a_directory_that_lacks_a_replica_or_has_a_partial_slot_is_not_rebuilt() {
        let whole =
            DescribeReply { replicas: 7, slots_owned: u32::from(HASH_SLOTS), ..DescribeReply::default() };
        assert!(demand_whole(&whole, 7).is_ok());
        let refused = |described| demand_whole(&described, 7).expect_err("not whole").to_string();
        assert!(refused(DescribeReply { replicas: 6, ..whole.clone() }).contains("6 of 7"));
        assert!(
            refused(DescribeReply { slots_partial: 1, ..whole.clone() }).contains("1 of them are partial")
        );
        assert!(refused(DescribeReply { slots_owned: 4095, ..whole }).contains("4095 of 4096"));
    }

    #[test]
    fn the_cpu_time_of_this_process_grows_while_it_works() {
        let before = cpu_seconds(std::process::id()).expect("this process");
        let mut work = 0_u64;
        while cpu_seconds(std::process::id()).expect("this process") < before + 0.01 {
            work = std::hint::black_box(work.wrapping_add(1));
        }
    }
}
