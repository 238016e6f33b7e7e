//! Output of `status`, `explain` and `events --follow` for several members, of which one is lost and returns.

use std::time::Duration;

use reprise_e2e::cli::{Events, Replay, reprise};
use reprise_e2e::cluster::SLOTS;
use reprise_e2e::content::key;
use reprise_e2e::{Cluster, ControlPlane, PATIENCE, wait_until};
use serde_json::Value;

/// Names of the members, in the order of the shard map.
const NAMES: [&str; 3] = ["a", "b", "c"];

/// Number of blocks on the first node.
const BLOCKS: u64 = 100;

/// Silence after which the followed events are compared with the directory.
const NO_LINES: Duration = Duration::from_millis(200);

/// A dead member stays listed for the 2 s of its lease. On a busy machine, a command may take longer.
const ATTEMPTS_MAX: usize = 5;

fn status(member: &ControlPlane) -> Value {
    reprise(member, &["status"]).remove(0)
}

fn members(status: &Value) -> &Vec<Value> {
    status["members"].as_array().expect("a list")
}

/// Returns whether all slots have an owner in the map, and each owner reports that it owns them completely.
fn is_complete(status: &Value, count: usize) -> bool {
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

/// Waits until the status shows a complete cluster.
fn wait_until_complete(member: &ControlPlane, count: usize) {
    wait_until("status shows a complete cluster", PATIENCE, || {
        is_complete(&status(member), count).then_some(())
    });
}

/// Returns the output of `reprise explain` for a block.
fn explained(member: &ControlPlane, number: u64) -> Value {
    reprise(member, &["explain", &key(number).to_string()]).remove(0)
}

/// Nodes with a tier, or nodes with the source of a load there.
type Places = Vec<(String, String)>;

/// Returns the replicas and the sources of loads of an explained block.
fn places(explained: &Value) -> (Places, Places) {
    let text = |value: &Value| value.as_str().expect("text").to_owned();
    let replicas = explained["replicas"].as_array().expect("a list").iter();
    let mut replicas: Vec<_> =
        replicas.map(|replica| (text(&replica["node"]), text(&replica["tier"]))).collect();
    replicas.sort();
    let loads = explained["loads"].as_object().expect("an object").iter();
    (replicas, loads.map(|(node, from)| (node.clone(), text(from))).collect())
}

/// Waits until the followed events add up to the current, complete directory.
fn assert_followed(following: &Events, known: &mut Replay, member: &ControlPlane) {
    wait_until("the followed events add up to the directory", PATIENCE, || {
        known.apply(&following.drain(NO_LINES));
        let mut current = Replay::default();
        current.apply(&reprise(member, &["events"]));
        // Replicas in both tiers of the first node.
        let is_complete = current.replicas().len() as u64 == 2 * BLOCKS;
        (is_complete && known.replicas() == current.replicas()).then_some(())
    });
}

#[test]
fn commands_show_a_lost_member_and_the_new_owner_of_its_slots() {
    let (mut cluster, ..) = Cluster::with_blocks(BLOCKS);
    // The member that will be lost owns the first block. Another member is queried.
    cluster.wait_until_complete(3);
    let before = explained(&cluster.members[0], 0);
    let lost = NAMES.iter().position(|name| before["member"] == *name).expect("a member owns its slot");
    let queried = (lost + 1) % 3;
    wait_until_complete(&cluster.members[queried], 3);
    let of_first = |tier: &str| ("first".to_owned(), tier.to_owned());
    let expected = (
        vec![of_first("DRAM"), of_first("NVMe")],
        vec![of_first("own DRAM"), ("second".to_owned(), "DRAM of first".to_owned())],
    );
    assert_eq!((places(&before), &before["doubt"]), (expected.clone(), &Value::Null), "{before}");
    let following = Events::start(cluster.members[queried].address(), &["--follow"]);
    let mut known = Replay::default();
    assert_followed(&following, &mut known, &cluster.members[queried]);

    // A paused member is still listed, and the others are shown as usual.
    let mut attempts = 0;
    let shown = loop {
        cluster.members[lost].pause();
        let shown = status(&cluster.members[queried]);
        if members(&shown).len() == 3 {
            break shown;
        }
        attempts += 1;
        assert!(attempts < ATTEMPTS_MAX, "the member is listed until its lease expires: {shown}");
        cluster.members[lost].resume();
        wait_until_complete(&cluster.members[queried], 3);
    };
    let row = members(&shown).iter().find(|member| member["name"] == NAMES[lost]).expect("three members");
    let error =
        row["directory"]["Err"].as_str().unwrap_or_else(|| panic!("the member does not respond: {row}"));
    assert!(error.contains("no answer within"), "{error}");
    assert_eq!(members(&shown).iter().filter(|member| member["directory"]["Ok"].is_object()).count(), 2);

    // A killed member disappears with its lease. Its block has another owner then, with the same replicas.
    cluster.members[lost].kill();
    wait_until_complete(&cluster.members[queried], 2);
    let now = explained(&cluster.members[queried], 0);
    assert!(now["member"] != NAMES[lost] && now["doubt"].is_null(), "{now}");
    assert_eq!(places(&now), expected);
    let lines = following.read_until("gone");
    assert_eq!(lines.last().expect("a line")["member"], NAMES[lost]);
    known.apply(&lines);
    assert_followed(&following, &mut known, &cluster.members[queried]);

    cluster.members[lost].restart();
    wait_until_complete(&cluster.members[queried], 3);
    let again = explained(&cluster.members[queried], 0);
    assert_eq!((places(&again), &again["member"]), (expected, &before["member"]));
    assert_followed(&following, &mut known, &cluster.members[queried]);
    following.interrupt();
    following.end();
}

#[test]
fn explain_reports_uncertainty_right_after_the_owner_was_killed() {
    let (mut cluster, ..) = Cluster::with_blocks(BLOCKS);
    cluster.wait_until_complete(3);
    let owner = explained(&cluster.members[0], 0)["member"].clone();
    let lost = NAMES.iter().position(|name| owner == *name).expect("a member");
    let mut attempts = 0;
    let unknown = loop {
        cluster.members[lost].kill();
        let unknown = explained(&cluster.members[(lost + 1) % 3], 0);
        if !unknown["doubt"].is_null() {
            break unknown;
        }
        attempts += 1;
        assert!(attempts < ATTEMPTS_MAX, "the owner is dead until its lease expires: {unknown}");
        cluster.members[lost].restart();
        cluster.wait_until_complete(3);
    };
    let doubt = unknown["doubt"].as_str().unwrap_or_else(|| panic!("doubt is text: {unknown}"));
    assert!(doubt.contains("the owner of the slot does not answer"), "{doubt}");
    assert!(places(&unknown).0.is_empty(), "{unknown}");

    // Without the store, no member is certain of its registration.
    cluster.etcd.kill();
    let queried = &cluster.members[(lost + 1) % 3];
    wait_until("status reports an uncertain registration", PATIENCE, || {
        (status(queried)["registered"] == false).then_some(())
    });
    cluster.etcd.restart();
    wait_until_complete(&cluster.members[(lost + 1) % 3], 2);
}
