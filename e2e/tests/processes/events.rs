//! `reprise events` against real processes: the snapshot, changes, missed changes, and an end on request.

use reprise_e2e::cli::Events;
use reprise_e2e::content::small;
use reprise_e2e::control_plane::Store;
use reprise_e2e::{AgentConfig, TestEnv};

#[test]
fn events_prints_a_snapshot_and_changes_and_resumes_at_a_position() {
    let env = TestEnv::new();
    env.allow("the control plane is unreachable");
    env.allow("cannot register with the control plane");
    let mut plane = env.control_plane(Store::Embedded);
    let config =
        AgentConfig { control_plane: vec![plane.address().to_owned()], ..AgentConfig::named("first") };
    let agent = env.agent(&config);
    let engine = agent.engine(small());
    let numbers = |range: std::ops::Range<u64>| range.collect::<Vec<u64>>();

    let following = Events::start(plane.address(), &["--follow"]);
    assert_eq!(following.read_until("current")[0]["event"], "snapshot");
    engine.save_durably(&numbers(0..20));
    let position = following.read_until_added(20)["position"].as_str().expect("a position").to_owned();

    let snapshot = Events::start(plane.address(), &[]);
    let lines = snapshot.read_until("current");
    snapshot.end();
    let count =
        |tier: &str| lines.iter().filter(|line| line["event"] == "added" && line["tier"] == tier).count();
    assert_eq!((count("nvme"), count("dram")), (20, 20), "{lines:?}");
    assert!(lines.iter().filter(|line| line["event"] == "added").all(|line| line["position"].is_null()));

    engine.save_durably(&numbers(20..30));
    following.read_until_added(10);
    let since = Events::start(plane.address(), &["--from", &position]);
    let lines = since.read_until("current");
    since.end();
    let on_nvme = lines.iter().filter(|line| line["event"] == "added" && line["tier"] == "nvme").count();
    assert!(on_nvme == 10 && lines.iter().all(|line| line["event"] != "snapshot"), "{lines:?}");

    plane.kill();
    plane.restart();
    let again = following.read_until("snapshot");
    assert!(again.last().expect("a line")["reason"].as_str().expect("words").contains("restarted"));
    following.read_until_added(30);
    following.interrupt();
    following.end();
}
