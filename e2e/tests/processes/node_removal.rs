//! Nodes that have left permanently. As long as a node's record exists, every restarted member waits for the
//! node. After `reprise forget` none does, and the agent may still return.

use std::process::{Command, Output};
use std::time::{Duration, Instant};

use reprise_client::Scope;
use reprise_e2e::cluster::{SLOTS, load_from_peer, numbers, wait_for_sources};
use reprise_e2e::content::small;
use reprise_e2e::control_plane::Store;
use reprise_e2e::process::binary;
use reprise_e2e::{Agent, AgentConfig, ControlPlane, PATIENCE, TestEnv, wait_until};

/// Less than the 10 s for which a member waits for known nodes; nodes that are up need one or two.
const SOONER_THAN_GIVEN_UP: Duration = Duration::from_secs(7);

/// Maximum number of restarts: a busy machine can delay the nodes for longer.
const RESTARTS_MAX: usize = 5;

fn agent(env: &TestEnv, member: &ControlPlane, name: &str) -> Agent {
    let control_plane = vec![member.address().to_owned()];
    env.agent(&AgentConfig { control_plane, ..AgentConfig::named(name) })
}

fn forget(member: &ControlPlane, node: &str) -> Output {
    let mut command = Command::new(binary("reprise"));
    command.args(["--json", "forget", node, "--controlplane", member.address()]);
    command.output().expect("reprise can be run")
}

/// Returns the names of the peers that an agent knows.
fn peers(agent: &Agent) -> Vec<String> {
    let status = agent.admin().json("/status");
    let nodes = status["peers"]["nodes"].as_array().expect("a list");
    nodes.iter().map(|node| node["name"].as_str().expect("a name").to_owned()).collect()
}

fn number(member: &ControlPlane, name: &str) -> u64 {
    let nodes = member.admin().json("/nodes");
    let node = nodes.as_array().expect("a list").iter().find(|node| node["name"] == name);
    node.and_then(|node| node["node"].as_u64()).expect("the node is listed")
}

#[test]
fn members_do_not_wait_for_a_forgotten_node_and_its_agent_may_return() {
    let env = TestEnv::new();
    for words in [
        "node is silent",
        "peer connection lost",
        "the control plane is unreachable",
        "cannot register with the control plane",
    ] {
        env.allow(words);
    }
    let mut member = env.control_plane(Store::Embedded);
    let [first, second, mut third] = ["first", "second", "third"].map(|name| agent(&env, &member, name));
    let (saver, leaver) = (first.engine(small()), third.engine(small()));
    let reader = second.engine(small());
    saver.save_durably(&numbers(0..50));
    leaver.save_durably(&numbers(50..80));
    wait_for_sources(&reader, &numbers(0..80), PATIENCE);
    let refused = forget(&member, "third");
    let stderr = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && stderr.contains("stop its agent first"), "{stderr}");
    let before = number(&member, "third");

    third.kill();
    drop(leaver);
    wait_until("the member stops offering the node", PATIENCE, || {
        (member.offers("third") == Some(false)).then_some(())
    });
    let forgotten = forget(&member, "third");
    assert!(forgotten.status.success(), "{}", String::from_utf8_lossy(&forgotten.stderr));
    let stdout = String::from_utf8_lossy(&forgotten.stdout).into_owned();
    assert_eq!(stdout.trim(), format!(r#"{{"node":"third","number":{before}}}"#));
    assert_eq!(member.offers("third"), None, "the node is not listed");
    wait_until("the peers have dropped the node", PATIENCE, || {
        [&first, &second].iter().all(|agent| !peers(agent).contains(&"third".to_owned())).then_some(())
    });

    let mut completed_after = Vec::new();
    while completed_after.last().is_none_or(|time| *time >= SOONER_THAN_GIVEN_UP) {
        assert!(completed_after.len() < RESTARTS_MAX, "complete after {completed_after:?}");
        member.kill();
        member.restart();
        let started = Instant::now();
        wait_until("the directory is complete", PATIENCE, || {
            let part = member.admin().json("/directory");
            let is_complete = part["slots_owned"] == SLOTS && part["slots_partial"] == 0;
            (is_complete && part["replicas"] != 0).then_some(())
        });
        completed_after.push(started.elapsed());
    }
    wait_for_sources(&reader, &numbers(0..50), PATIENCE);
    assert_eq!(
        reader.matches(&numbers(50..80), Scope::Cluster).len(),
        0,
        "the replicas are removed with their node"
    );

    third.start();
    wait_for_sources(&reader, &numbers(50..80), PATIENCE);
    load_from_peer(&reader, &numbers(50..80));
    assert_eq!(number(&member, "third"), 4, "the former number is not reused");
}
