//! What somebody at a terminal sees of several members, of which one is lost and comes back: `status`, `explain`, `events --follow`.

use std::time::Duration;

use reprise_e2e::cli::{Events, Replay, reprise};
use reprise_e2e::cluster::SLOTS;
use reprise_e2e::content::key;
use reprise_e2e::{Cluster, ControlPlane, PATIENCE, wait_until};
use serde_json::Value;

/// The members, in the order of a map.
const NAMES: [&str; 3] = ["a", "b", "c"];

/// Blocks of the first node.
const BLOCKS: u64 = 100;

/// When no line comes for so long, then all have come that were on their way: a change is told within milliseconds.
const NO_LINES: Duration = Duration::from_secs(2);

fn status(asked: &ControlPlane) -> Value {
    reprise(asked, &["status"]).remove(0)
}

fn members(status: &Value) -> &Vec<Value> {
    status["members"].as_array().expect("a list")
}

/// All slots have an owner by the map, and each owner says that it owns them and lacks nothing.
fn is_whole(status: &Value, count: usize) -> bool {
    let slots = |member: &Value| member["slots"].as_u64().expect("a number");
    let owns = |member: &Value| {
        let part = &member["directory"]["Ok"];
        part["slots_owned"] == member["slots"] && part["slots_partial"] == 0
    };
    let members = members(status);
    status["registered"] == true
        && members.len() == count
        && members.iter().map(slots).sum::<u64>() == SLOTS
        && members.iter().all(owns)
}

/// Waits until it is.
fn wait_until_whole(asked: &ControlPlane, count: usize) {
    wait_until("status shows a whole cluster", PATIENCE, || is_whole(&status(asked), count).then_some(()));
}

/// A block, as it is explained.
fn explained(asked: &ControlPlane, number: u64) -> Value {
    reprise(asked, &["explain", &key(number).to_string()]).remove(0)
}

/// Nodes, each with a tier or with where a load there gets the block from.
type Places = Vec<(String, String)>;

/// Where it is, and where loads get it from, whoever says so.
fn places(explained: &Value) -> (Places, Places) {
    let text = |value: &Value| value.as_str().expect("text").to_owned();
    let replicas = explained["replicas"].as_array().expect("a list").iter();
    let mut replicas: Vec<_> =
        replicas.map(|replica| (text(&replica["node"]), text(&replica["tier"]))).collect();
    replicas.sort();
    let loads = explained["loads"].as_object().expect("an object").iter();
    (replicas, loads.map(|(node, from)| (node.clone(), text(from))).collect())
}

/// What is followed is what there is.
fn assert_followed(following: &Events, known: &mut Replay, asked: &ControlPlane) {
    known.take(&following.quiet_for(NO_LINES));
    let mut there = Replay::default();
    there.take(&reprise(asked, &["events"]));
    assert_eq!(known.replicas(), there.replicas());
    assert_eq!(there.replicas().len() as u64, 2 * BLOCKS, "in both tiers of the first node");
}

#[test]
fn a_member_that_is_lost_is_seen_and_so_is_what_becomes_of_its_part() {
    let (mut cluster, ..) = Cluster::holding(BLOCKS);
    // The one that is lost owns the first block; another one is asked.
    cluster.wait_until_whole(3);
    let whole = explained(&cluster.members[0], 0);
    let lost = NAMES.iter().position(|name| whole["member"] == *name).expect("a member owns its slot");
    let asked = (lost + 1) % 3;
    wait_until_whole(&cluster.members[asked], 3);
    let of_first = |tier: &str| ("first".to_owned(), tier.to_owned());
    let expected = (
        vec![of_first("DRAM"), of_first("NVMe")],
        vec![of_first("own DRAM"), ("second".to_owned(), "DRAM of first".to_owned())],
    );
    assert_eq!((places(&whole), &whole["doubt"]), (expected.clone(), &Value::Null), "{whole}");
    let following = Events::start(cluster.members[asked].address(), &["--follow"]);
    let mut known = Replay::default();
    assert_followed(&following, &mut known, &cluster.members[asked]);

    // It hangs: it is still a member, and the others are shown.
    cluster.members[lost].pause();
    let shown = status(&cluster.members[asked]);
    let row = members(&shown).iter().find(|member| member["name"] == NAMES[lost]);
    let row = row.unwrap_or_else(|| panic!("a member until its lease is over: {shown}"));
    let said = row["directory"]["Err"].as_str().unwrap_or_else(|| panic!("it hangs: {row}"));
    assert!(said.contains("no answer within"), "{said}");
    assert_eq!(members(&shown).iter().filter(|member| member["directory"]["Ok"].is_object()).count(), 2);

    // It is killed, and gone with its lease; its block is another's then, and no less is known of it.
    cluster.members[lost].kill();
    wait_until_whole(&cluster.members[asked], 2);
    let now = explained(&cluster.members[asked], 0);
    assert!(now["member"] != NAMES[lost] && now["doubt"].is_null(), "{now}");
    assert_eq!(places(&now), expected);
    let mut lines = following.until("gone");
    assert_eq!(lines.last().expect("a line")["member"], NAMES[lost]);
    lines.extend(following.quiet_for(NO_LINES));
    known.take(&lines);
    assert_followed(&following, &mut known, &cluster.members[asked]);

    cluster.members[lost].restart();
    wait_until_whole(&cluster.members[asked], 3);
    let again = explained(&cluster.members[asked], 0);
    assert_eq!((places(&again), &again["member"]), (expected, &whole["member"]));
    assert_followed(&following, &mut known, &cluster.members[asked]);
    following.interrupt();
    following.end();
}

#[test]
fn a_member_that_is_asked_right_after_the_owner_was_killed_says_that_it_does_not_know() {
    let (mut cluster, ..) = Cluster::holding(BLOCKS);
    cluster.wait_until_whole(3);
    let owner = explained(&cluster.members[0], 0)["member"].clone();
    let lost = NAMES.iter().position(|name| owner == *name).expect("a member");
    cluster.members[lost].kill();
    let asked = &cluster.members[(lost + 1) % 3];
    let unknown = explained(asked, 0);
    let doubt = unknown["doubt"].as_str().unwrap_or_else(|| panic!("its owner is dead: {unknown}"));
    assert!(doubt.contains("its member does not answer"), "{doubt}");
    assert!(places(&unknown).0.is_empty(), "{unknown}");

    // Without the store nobody is certain to be a member.
    cluster.etcd.kill();
    let asked = &cluster.members[(lost + 1) % 3];
    wait_until("status says that the registration is not certain", PATIENCE, || {
        (status(asked)["registered"] == false).then_some(())
    });
    cluster.etcd.restart();
    wait_until_whole(&cluster.members[(lost + 1) % 3], 2);
}
