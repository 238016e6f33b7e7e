//! An agent that is killed as a crash kills it, while engines on its node load and save: the load that is under way ends at once, what engines
//! at work ask for is served or computed, and the same pod has its blocks again.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use reprise_client::{ClientError, Scope};
use reprise_e2e::kubernetes::Cluster;
use reprise_e2e::kubernetes::release::{PODS_WITHIN, Part};
use reprise_e2e::seed::say;
use reprise_e2e::{Engine, Loading, Outcome, wait_until};

use crate::chart::{WORKERS, running};
use crate::chart_faults::agent_of;
use crate::chart_life::OUTAGE_MAX;

/// Blocks that are loaded from the device again and again.
const LOADED: std::ops::Range<u64> = 320_000..321_000;

/// Loads that have ended well before the agent is killed.
const LOADS_BEFORE: u32 = 3;

/// From the kill to the end of the load that was under way.
const ENDS_WITHIN: Duration = Duration::from_secs(5);

/// A whole line of afterwards.
const AFTERWARDS: Duration = Duration::from_millis(2_500);

pub(crate) fn under_load(cluster: &mut Cluster) {
    let release = running(cluster);
    let node = cluster.nodes()[0].name().to_owned();
    let before = release.pods(Part::Agents);
    let agent = before.iter().find(|pod| pod.node == node).expect("one on each node").clone();
    let engine = agent_of(cluster, 0).expect("it serves");
    let blocks: Vec<u64> = LOADED.collect();
    engine.save_durably(&blocks);
    WORKERS.start(cluster);
    let working = WORKERS.now(cluster);

    let loads = AtomicU32::new(0);
    let (killed, ended) = std::thread::scope(|scope| {
        let loading = scope.spawn(|| load_until_it_fails(&engine, &blocks, &loads));
        wait_until("loads that go on", PODS_WITHIN, || {
            (loads.load(Ordering::SeqCst) >= LOADS_BEFORE || loading.is_finished()).then_some(())
        });
        assert!(!loading.is_finished(), "loads go on until the agent ends");
        release.crash(std::slice::from_ref(&agent));
        let killed = Instant::now();
        let (error, ended) = loading.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        say(&format!("the load that was under way: {error}"));
        (killed, ended)
    });
    let took = ended.saturating_duration_since(killed);
    assert!(took <= ENDS_WITHIN, "it ended {took:?} after the agent");
    let engine = wait_until("an agent that has its blocks", PODS_WITHIN, || {
        let engine = agent_of(cluster, 0).ok()?;
        let found = engine.client().match_keys(&reprise_e2e::content::keys(&blocks), Scope::Local).ok()?;
        (found.len() == blocks.len()).then_some(engine)
    });
    let outage = killed.elapsed();
    say(&format!(
        "a load ended {took:.1?} after its agent was killed, and the node served again after {outage:.1?}"
    ));
    engine.load_all(&blocks, &Loading::LOCAL);
    assert!(outage <= OUTAGE_MAX, "the node was without an agent for {outage:?}");

    let after = wait_until("the pod to be ready", PODS_WITHIN, || {
        let after = release.pods(Part::Agents);
        after.iter().all(|pod| pod.is_ready && pod.container != agent.container).then_some(after)
    });
    let again = after.iter().find(|pod| pod.node == node).expect("one on each node");
    assert_eq!(again.uid, agent.uid, "its kubelet has started it again, and nobody replaced the pod");
    std::thread::sleep(AFTERWARDS);
    let mut sessions = 0;
    for (index, served) in WORKERS.since(cluster, &working).into_iter().enumerate() {
        let served = served.expect("no worker has ended");
        say(&format!("an agent was killed: worker {index} {served:?}"));
        assert_eq!((served.wrong_words, served.failed), (0, 0), "{served:?}");
        assert!(served.saved > 0 && served.hits_from("own ") > 0, "{served:?}");
        sessions += served.sessions;
    }
    assert!(sessions >= 1, "the worker of the node has opened another session");
    WORKERS.stop(cluster);
    release.wait_until_ready();
}

/// Loads cold blocks, every byte compared, until the agent is gone: what it says, and when. A block may be missing from the last load; none is wrong.
fn load_until_it_fails(engine: &Engine, blocks: &[u64], loads: &AtomicU32) -> (ClientError, Instant) {
    loop {
        let loaded = engine.client().trim().and_then(|_| engine.load(blocks, &Loading::LOCAL));
        match loaded {
            Ok(outcomes) if outcomes.iter().all(|outcome| outcome.is_right()) => {
                loads.fetch_add(1, Ordering::SeqCst);
            }
            Ok(outcomes) => {
                assert!(!outcomes.contains(&Outcome::Detected), "nothing was damaged: {outcomes:?}");
            }
            Err(error) => return (error, Instant::now()),
        }
    }
}
