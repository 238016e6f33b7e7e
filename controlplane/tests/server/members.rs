//! Members as processes over one etcd: the member list, and a member that dies or pauses.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use reprise_policy::Epoch;
use reprise_policy::shards::{MemberName, ShardMap};
use reprise_proto::connection::is_absence;
use reprise_proto::controlplane::{ListMembersRequest, MemberList, RegisterRequest, WatchMembersRequest};
use reprise_testkit::etcd::Etcd;
use reprise_testkit::process::Signal;

use crate::process::{PATIENCE, Process, write_config};

/// Shortest lease that etcd grants.
const SHORT: &str = "2s";

/// A lease that does not expire while a test waits.
const LONG: &str = "600s";

fn config(directory: &Path, endpoint: &str, (name, time_to_live): (&str, &str)) -> PathBuf {
    let directory = directory.join(name);
    std::fs::create_dir_all(&directory).expect("a directory");
    let member = format!("[member]\nname = '{name}'\ntime_to_live = '{time_to_live}'");
    write_config(&directory, &format!("kind = 'etcd'\nendpoints = ['{endpoint}']\n{member}"))
}

async fn members(process: &Process) -> MemberList {
    process.client().await.list_members(ListMembersRequest {}).await.expect("a list").into_inner()
}

fn names(list: &MemberList) -> Vec<&str> {
    list.members.iter().map(|member| member.name.as_str()).collect()
}

fn incarnation(list: &MemberList, name: &str) -> u64 {
    list.members.iter().find(|member| member.name == name).expect("a member").incarnation
}

/// Waits until a process lists exactly these members and is registered itself.
async fn listed(process: &Process, expected: &[&str]) -> MemberList {
    let give_up = Instant::now() + PATIENCE;
    loop {
        let list = members(process).await;
        if names(&list) == expected && list.registered {
            return list;
        }
        assert!(Instant::now() < give_up, "{list:?}, expected {expected:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Starts an etcd; returns what starts a member with such a lease over it, and the etcd.
fn etcd_for_members(time_to_live: &'static str) -> (impl Fn(&str) -> Process, Etcd) {
    let directory = tempfile::tempdir().expect("a directory");
    let server = Etcd::start_in(directory.path());
    let endpoint = server.endpoint();
    let start = move |name: &str| Process::start(&config(directory.path(), &endpoint, (name, time_to_live)));
    (start, server)
}

fn map(list: &MemberList) -> ShardMap {
    let names = list.members.iter().map(|member| MemberName::new(&member.name).expect("a name"));
    ShardMap::new(Epoch(list.epoch), names).expect("a map")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_find_each_other_and_remove_a_killed_one() {
    let (start, _server) = etcd_for_members(SHORT);
    let (a, b, mut c) = (start("a"), start("b"), start("c"));
    let all = ["a", "b", "c"];
    let (of_a, of_b) = (listed(&a, &all).await, listed(&b, &all).await);
    assert_eq!((of_a.answering.as_str(), of_b.answering.as_str()), ("a", "b"));
    assert_eq!(of_a.members, of_b.members);
    assert_eq!(of_a.members[2].address, c.grpc);
    assert!(of_a.members.iter().all(|member| member.version == env!("CARGO_PKG_VERSION")), "{of_a:?}");

    c.child.kill();
    let two = listed(&a, &["a", "b"]).await;
    assert!(two.epoch > of_a.epoch);
    // Only the slots of the dead member move.
    let (before, after) = (map(&of_a), map(&two));
    for slot in 0..reprise_policy::key::HASH_SLOTS {
        let owner = |map: &ShardMap| map.owner(slot).map(|at| map.members()[usize::from(at.0)].clone());
        assert!(owner(&before) == owner(&after) || owner(&before).is_some_and(|name| name.as_str() == "c"));
    }
    drop(c);
    let again = start("c");
    let three = listed(&again, &all).await;
    assert!(incarnation(&three, "c") > incarnation(&of_a, "c"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_paused_member_is_removed_and_returns_with_a_higher_incarnation() {
    let (start, _server) = etcd_for_members(SHORT);
    let (a, b) = (start("a"), start("b"));
    let before = listed(&a, &["a", "b"]).await;
    listed(&b, &["a", "b"]).await;
    b.child.pause();
    listed(&a, &["a"]).await;
    b.child.signal(Signal::CONT);
    let after = listed(&a, &["a", "b"]).await;
    assert!(incarnation(&after, "b") > incarnation(&before, "b"));
    assert_eq!(incarnation(&after, "a"), incarnation(&before, "a"));
    listed(&b, &["a", "b"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watch_sends_current_members_then_changes_and_ends_at_shutdown() {
    let (start, _server) = etcd_for_members(LONG);
    let mut a = start("a");
    listed(&a, &["a"]).await;
    let watch = a.client().await.watch_members(WatchMembersRequest {}).await;
    let mut lists = watch.expect("a stream").into_inner();
    let first = lists.message().await.expect("a list").expect("the stream continues");
    assert_eq!(names(&first), ["a"]);
    let b = start("b");
    let second = lists.message().await.expect("a list").expect("the stream continues");
    assert_eq!(names(&second), ["a", "b"]);
    assert!(second.epoch > first.epoch);
    // A clean shutdown removes the entry at once; its lease would last longer.
    b.child.signal(Signal::TERM);
    let removed = tokio::time::timeout(PATIENCE, lists.message()).await.expect("removed at once");
    let third = removed.expect("a list").expect("the stream continues");
    assert_eq!(names(&third), ["a"]);
    a.child.signal(Signal::TERM);
    let ended = lists.message().await.expect_err("the member shuts down");
    // `UNAVAILABLE`, unless the connection ends before the client has read the status.
    assert!(is_absence(&ended), "{ended:?}");
    assert!(a.end().success());
}

/// Numbers assigned after the backup are assigned again, so a member with the earlier state must not
/// continue.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_exit_after_etcd_was_restored_and_restart_with_new_epochs() {
    let (start, mut server) = etcd_for_members(SHORT);
    let (mut a, mut b) = (start("a"), start("b"));
    listed(&a, &["a", "b"]).await;
    server.kill();
    server.back_up();
    server.restart();
    listed(&a, &["a", "b"]).await;
    listed(&b, &["a", "b"]).await;
    let registration = || RegisterRequest { name: "n".to_owned(), ..RegisterRequest::default() };
    let before = a.client().await.register(registration()).await.expect("granted").into_inner();
    server.kill();
    server.restore();
    server.restart();
    assert!(!a.end().success() && !b.end().success());
    let again = start("a");
    let after = again.client().await.register(registration()).await.expect("granted").into_inner();
    assert_eq!((before.node, after.node), (1, 1), "not in the backup");
    assert_ne!(before.epoch >> 32, after.epoch >> 32, "epochs have a new base");
}
