//! A node that has left for good: as long as its record is there, everybody waits for it after each start of a member; once it is
//! forgotten nobody does, and its agent may come back all the same.

use std::process::{Command, Output};
use std::time::{Duration, Instant};

use reprise_client::Scope;
use reprise_e2e::cluster::{SLOTS, load_from_peer, numbers, wait_for_sources};
use reprise_e2e::content::small;
use reprise_e2e::control_plane::Store;
use reprise_e2e::process::binary;
use reprise_e2e::{Agent, AgentConfig, ControlPlane, PATIENCE, World, wait_until};

/// A member waits 10 s for nodes that it expects; those that are there need one or two.
const SOONER_THAN_GIVEN_UP: Duration = Duration::from_secs(7);

fn agent(world: &World, member: &ControlPlane, name: &str) -> Agent {
    let control_plane = vec![member.address().to_owned()];
    world.agent(&AgentConfig { control_plane, ..AgentConfig::named(name) })
}

fn forget(member: &ControlPlane, node: &str) -> Output {
    let mut command = Command::new(binary("reprise"));
    command.args(["--json", "forget", node, "--controlplane", member.address()]);
    command.output().expect("reprise can be run")
}

/// The names that an agent knows its peers by.
fn peers(agent: &Agent) -> Vec<String> {
    let status = agent.admin().json("/status");
    let nodes = status["peers"]["nodes"].as_array().expect("it has peers");
    nodes.iter().map(|node| node["name"].as_str().expect("a name").to_owned()).collect()
}

fn number(member: &ControlPlane, name: &str) -> u64 {
    let nodes = member.admin().json("/nodes");
    let node = nodes.as_array().expect("a list").iter().find(|node| node["name"] == name);
    node.and_then(|node| node["node"].as_u64()).expect("it is listed")
}

#[test]
fn a_node_that_is_forgotten_is_waited_for_no_more_and_its_agent_may_come_back() {
    let world = World::new();
    for words in [
        "node is silent",
        "peer connection lost",
        "the control plane is gone",
        "cannot register with the control plane",
    ] {
        world.allow(words);
    }
    let mut member = world.control_plane(Store::Embedded);
    let [first, second, mut third] = ["first", "second", "third"].map(|name| agent(&world, &member, name));
    let (saver, leaver) = (first.engine(small()), third.engine(small()));
    let reader = second.engine(small());
    saver.save_durably(&numbers(0..50));
    leaver.save_durably(&numbers(50..80));
    wait_for_sources(&reader, &numbers(0..80), PATIENCE);
    let refused = forget(&member, "third");
    let words = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && words.contains("stop its agent first"), "{words}");
    let before = number(&member, "third");

    third.kill();
    drop(leaver);
    wait_until("its silence is noticed", PATIENCE, || (member.offers("third") == Some(false)).then_some(()));
    let forgotten = forget(&member, "third");
    assert!(forgotten.status.success(), "{}", String::from_utf8_lossy(&forgotten.stderr));
    let said = String::from_utf8_lossy(&forgotten.stdout).into_owned();
    assert_eq!(said.trim(), format!(r#"{{"node":"third","number":{before}}}"#));
    assert_eq!(member.offers("third"), None, "it is not listed");
    wait_until("its peers have dropped it", PATIENCE, || {
        [&first, &second].iter().all(|agent| !peers(agent).contains(&"third".to_owned())).then_some(())
    });

    member.kill();
    member.restart();
    let started = Instant::now();
    wait_until("the directory is whole", SOONER_THAN_GIVEN_UP, || {
        let part = member.admin().json("/directory");
        (part["slots_owned"] == SLOTS && part["slots_partial"] == 0 && part["replicas"] != 0).then_some(())
    });
    println!("whole {:?} after the start", started.elapsed());
    wait_for_sources(&reader, &numbers(0..50), PATIENCE);
    assert_eq!(reader.matches(&numbers(50..80), Scope::Cluster).len(), 0, "they went with their node");

    third.start();
    wait_for_sources(&reader, &numbers(50..80), PATIENCE);
    load_from_peer(&reader, &numbers(50..80));
    assert_eq!(number(&member, "third"), 4, "its former number is nobody's");
}
