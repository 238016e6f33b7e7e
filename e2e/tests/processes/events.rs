//! `reprise events` against real processes: what there is, what changes, what was missed, an end on request.

use reprise_e2e::cli::Events;
use reprise_e2e::content::small;
use reprise_e2e::control_plane::Store;
use reprise_e2e::{AgentConfig, World};

#[test]
fn events_prints_what_there_is_and_what_changes_and_goes_on_where_it_was() {
    let world = World::new();
    for words in ["the control plane is gone", "cannot register with the control plane", "registration lost"]
    {
        world.allow(words);
    }
    let mut plane = world.control_plane(Store::Embedded);
    let config =
        AgentConfig { control_plane: vec![plane.address().to_owned()], ..AgentConfig::named("first") };
    let agent = world.agent(&config);
    let engine = agent.engine(small());
    let numbers = |range: std::ops::Range<u64>| range.collect::<Vec<u64>>();

    let following = Events::start(plane.address(), &["--follow"]);
    assert_eq!(following.until("current")[0]["event"], "snapshot");
    engine.save_durably(&numbers(0..20));
    let position = following.added(20)["position"].as_str().expect("a position").to_owned();

    let there = Events::start(plane.address(), &[]);
    let lines = there.until("current");
    there.end();
    let count =
        |tier: &str| lines.iter().filter(|line| line["event"] == "added" && line["tier"] == tier).count();
    assert_eq!((count("nvme"), count("dram")), (20, 20), "{lines:?}");
    assert!(lines.iter().filter(|line| line["event"] == "added").all(|line| line["position"].is_null()));

    engine.save_durably(&numbers(20..30));
    following.added(10);
    let since = Events::start(plane.address(), &["--from", &position]);
    let lines = since.until("current");
    since.end();
    let on_nvme = lines.iter().filter(|line| line["event"] == "added" && line["tier"] == "nvme").count();
    assert!(on_nvme == 10 && lines.iter().all(|line| line["event"] != "snapshot"), "{lines:?}");

    plane.kill();
    plane.restart();
    let again = following.until("snapshot");
    assert!(again.last().expect("a line")["reason"].as_str().expect("words").contains("restarted"));
    following.added(30);
    following.interrupt();
    following.end();
}
