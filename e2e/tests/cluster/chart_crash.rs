//! An agent that is killed like in a crash, while engines on its node load and save. The load in flight ends
//! at once, the engines' requests are served or computed, and the same pod has its blocks again.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use reprise_client::{ClientError, Scope};
use reprise_e2e::kubernetes::Cluster;
use reprise_e2e::kubernetes::release::{Component, PODS_WITHIN};
use reprise_e2e::seed::print_line;
use reprise_e2e::{Engine, LoadParams, Outcome, wait_until};

use crate::chart::{WORKERS, running};
use crate::chart_faults::agent_of;
use crate::chart_uninstall::OUTAGE_MAX;

/// Blocks that are loaded from the device in a loop.
const LOADED: std::ops::Range<u64> = 320_000..321_000;

/// Number of loads that must succeed before the kill.
const LOADS_BEFORE: u32 = 3;

/// Bound from the kill to the end of the load in flight.
const ENDS_WITHIN: Duration = Duration::from_secs(5);

/// Time in which a worker prints at least one complete line.
const AFTERWARDS: Duration = Duration::from_millis(2_500);

pub(crate) fn under_load(cluster: &mut Cluster) {
    let release = running(cluster);
    let node = cluster.nodes()[0].name().to_owned();
    let before = release.pods(Component::Agents);
    let agent = before.iter().find(|pod| pod.node == node).expect("an agent on each node").clone();
    let engine = agent_of(cluster, 0).expect("the agent responds");
    let blocks: Vec<u64> = LOADED.collect();
    engine.save_durably(&blocks);
    WORKERS.start(cluster);
    let baseline = WORKERS.now(cluster);

    let loads = AtomicU32::new(0);
    let (killed, ended) = std::thread::scope(|scope| {
        let loading = scope.spawn(|| load_until_it_fails(&engine, &blocks, &loads));
        wait_until("loads in progress", PODS_WITHIN, || {
            (loads.load(Ordering::SeqCst) >= LOADS_BEFORE || loading.is_finished()).then_some(())
        });
        assert!(!loading.is_finished(), "loads continue until the agent is killed");
        release.crash(std::slice::from_ref(&agent));
        let killed = Instant::now();
        let (error, ended) = loading.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        print_line(&format!("the load in flight: {error}"));
        (killed, ended)
    });
    let took = ended.saturating_duration_since(killed);
    assert!(took <= ENDS_WITHIN, "the load ended {took:?} after the kill");
    let engine = wait_until("an agent that has its blocks", PODS_WITHIN, || {
        let engine = agent_of(cluster, 0).ok()?;
        let found = engine.client().match_keys(&reprise_e2e::content::keys(&blocks), Scope::Local).ok()?;
        (found.len() == blocks.len()).then_some(engine)
    });
    let outage = killed.elapsed();
    print_line(&format!(
        "the load ended {took:.1?} after the kill of its agent, and the node served again after {outage:.1?}"
    ));
    engine.load_all(&blocks, &LoadParams::LOCAL);
    assert!(outage <= OUTAGE_MAX, "the node was without an agent for {outage:?}");

    let after = wait_until("the pod to be ready", PODS_WITHIN, || {
        let after = release.pods(Component::Agents);
        after.iter().all(|pod| pod.is_ready && pod.container != agent.container).then_some(after)
    });
    let restarted = after.iter().find(|pod| pod.node == node).expect("an agent on each node");
    assert_eq!(restarted.uid, agent.uid, "the kubelet restarts the container in the same pod");
    std::thread::sleep(AFTERWARDS);
    let mut sessions = 0;
    for (index, served) in WORKERS.since(cluster, &baseline).into_iter().enumerate() {
        let served = served.expect("no worker restarted");
        print_line(&format!("an agent was killed: worker {index} {served:?}"));
        assert_eq!((served.wrong_words, served.failed), (0, 0), "{served:?}");
        assert!(served.saved > 0 && served.hits_from("own ") > 0, "{served:?}");
        sessions += served.sessions;
    }
    assert!(sessions >= 1, "the node's worker opened another session");
    WORKERS.stop(cluster);
    release.wait_until_ready();
}

/// Loads cold blocks until the agent is gone, and compares every byte. Returns the error and its time. The
/// last load may miss blocks, but none may be corrupt.
fn load_until_it_fails(engine: &Engine, blocks: &[u64], loads: &AtomicU32) -> (ClientError, Instant) {
    loop {
        let loaded = engine.client().trim().and_then(|_| engine.load(blocks, &LoadParams::LOCAL));
        match loaded {
            Ok(outcomes) if outcomes.iter().all(|outcome| outcome.is_verified()) => {
                loads.fetch_add(1, Ordering::SeqCst);
            }
            Ok(outcomes) => {
                assert!(!outcomes.contains(&Outcome::Corrupt), "a kill corrupts no block: {outcomes:?}");
            }
            Err(error) => return (error, Instant::now()),
        }
    }
}
