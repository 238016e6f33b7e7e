//! The directory as agents use it: a control plane member in its own process, queried over gRPC on loopback.
//!
//! This process simulates nodes: they register, beat and announce inventories like agents, so the measurement
//! includes all work of the member for them. Client and member share the machine, so look-ups are reported
//! per second of the member's CPU time on all its threads, in addition to wall-clock time.

use std::fs;
use std::time::Instant;

use anyhow::Context;
use bytes::Bytes;
use reprise_policy::BlockKey;
use reprise_proto::controlplane::LookupRequest;
use reprise_proto::controlplane::directory_client::DirectoryClient;
use reprise_testkit::bench::Settings;
use reprise_testkit::bench::directory_service::{
    Inventories, LOOKUP_KEYS, SINGLE_CALLS, all_found, announce, directory, single_key,
};
use reprise_testkit::bench::report::{Figure, Target, median, paired};
use reprise_testkit::cluster::{Cluster, ControlPlanes};
use tokio::runtime::Runtime;
use tokio::task::JoinSet;
use tonic::transport::Channel;

use super::loopback;

/// Look-up calls per repetition.
const LOOKUP_CALLS: usize = 1000;

/// Concurrent look-up calls: enough to keep the member busy, few enough to avoid long queues.
const CALLS_AT_ONCE: usize = 8;

pub(super) fn run(entries: usize, settings: &Settings) -> anyhow::Result<Vec<Figure>> {
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
    let latency = latency(&cluster, &inventories, settings)?;

    drop(beating);
    let lost = Instant::now();
    cluster.kill_member(0);
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

/// Measures a single key, compared with the minimum time of an answer over TCP on this machine: a byte and
/// back.
fn latency(cluster: &Cluster, inventories: &Inventories, settings: &Settings) -> anyhow::Result<Vec<Figure>> {
    let mut repetitions = 0..;
    let single = paired(
        settings.rounds("directory.service_single_key"),
        || loopback::round_trip_us(SINGLE_CALLS),
        || single_key(cluster, inventories, repetitions.next().expect("endless")),
    )?;
    // The goal is in the comparison with Mooncake's master (`reprise-bench mooncake`).
    let against = ("a byte over loopback TCP and back", Target::None);
    Ok(vec![Figure::relative("directory.service_single_key_p50", single, "us", against)])
}

/// Runs concurrent look-ups of a thousand keys; returns seconds of wall-clock time and of the member's CPU
/// time.
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

/// Runs look-ups one after another; every key has a replica.
async fn look_up(mut client: DirectoryClient<Channel>, wanted: Vec<Bytes>) -> anyhow::Result<()> {
    for keys in wanted {
        let count = keys.len() / BlockKey::SIZE;
        let reply =
            client.lookup(LookupRequest { keys, asking_node: 0 }).await.context("look-up")?.into_inner();
        all_found(&reply, count)?;
    }
    Ok(())
}

/// Returns the CPU time of all threads of a process, from the scheduler's count in nanoseconds.
fn cpu_seconds(pid: u32) -> anyhow::Result<f64> {
    let tasks = format!("/proc/{pid}/task");
    let mut nanoseconds = 0;
    for task in fs::read_dir(&tasks).with_context(|| format!("reading {tasks}"))? {
        let path = task?.path().join("schedstat");
        // A thread that has ended in the meantime used little time: the member's threads live as long as the
        // process.
        let Ok(text) = fs::read_to_string(&path) else { continue };
        let first = text.split_whitespace().next().context("schedstat is empty")?;
        nanoseconds += first
            .parse::<u64>()
            .with_context(|| format!("{} does not start with a number", path.display()))?;
    }
    Ok(nanoseconds as f64 / 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_of_a_busy_process_grows() {
        let before = cpu_seconds(std::process::id()).expect("this process");
        let mut work = 0_u64;
        while cpu_seconds(std::process::id()).expect("this process") < before + 0.01 {
            work = std::hint::black_box(work.wrapping_add(1));
        }
    }
}
