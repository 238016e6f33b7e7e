//! Members of the control plane and the owners of keys; the link thread.
//!
//! One member, called the home, provides the lists of all members and all nodes as streams. If it becomes
//! silent, is unsure of its registration, or disappears, another member becomes the home ([`Home`]).
//!
//! [`reprise_agent_core::members`] decides which links are opened and closed.

use std::hash::{BuildHasher, RandomState};
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use reprise_agent_core::home::{Home, Input, MemberListSource, Output};
use reprise_agent_core::members::LINK_GRACE;
use reprise_agent_core::outbox::Outbox;
use reprise_policy::Epoch;
use reprise_policy::shards::{MemberName, ShardMap};
use reprise_proto::connection::Connection;
use reprise_proto::controlplane::membership_client::MembershipClient;
use reprise_proto::controlplane::{
    ListMembersRequest, ListNodesRequest, MemberInfo, MemberList, NodeChange, PACKAGE, WatchMembersRequest,
    WatchNodesRequest,
};
use tokio::runtime::Runtime;
use tokio::time::sleep;
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};

use super::link::{HeartbeatState, Link, connect, within};
use super::nodes::NodeChangeKind;
use super::{Queues, Shared, lookup, parse_endpoint, placement, strangers};

/// Log condition for a member of another version of the protocol.
const OTHER_PROTOCOL: &str = "other_protocol";

/// The members of the control plane with their links, and the owners of hash slots.
pub(super) type Members = reprise_agent_core::members::Members<Arc<Link>>;

/// A shard map with the link of each member.
pub(super) type Routes = reprise_agent_core::members::Routes<Arc<Link>>;

/// Returns a random number. `RandomState` is seeded randomly, which suffices for delays and choices.
pub(super) fn jitter() -> u32 {
    (RandomState::new().hash_one(0) >> 32) as u32
}

/// Runs until shutdown. Without a control plane, all lookups fail immediately.
pub(super) fn run(runtime: &Runtime, shared: &Arc<Shared>, queues: Queues) {
    let Queues { placements, strangers } = queues;
    runtime.block_on(async {
        let mut shutdown = shared.shutdown.subscribe();
        tokio::select! {
            _ = shutdown.wait_for(|shutdown| *shutdown) => {}
            () = lookup::run_lookups(shared) => {}
            () = placement::place(shared, placements) => {}
            () = strangers::decide(shared, strangers) => {}
            () = follow(shared) => {}
            () = for_each_link(shared, |link| {
                let shared = shared.clone();
                async move { link.run(&shared).await }
            }) => {}
        }
    });
}

/// Spawns a task for each link when it is added; a task ends with its link.
pub(super) async fn for_each_link<F>(shared: &Shared, task: impl Fn(Arc<Link>) -> F)
where
    F: Future<Output = ()> + Send + 'static,
{
    let mut members = shared.members.subscribe();
    let mut running: Vec<Arc<Link>> = Vec::new();
    loop {
        let now: Vec<Arc<Link>> = members.borrow_and_update().links().cloned().collect();
        for link in &now {
            if !running.contains(link) {
                tokio::spawn(task(link.clone()));
            }
        }
        running = now;
        if members.changed().await.is_err() {
            return; // the client is gone
        }
    }
}

/// Watches members and nodes at one home after the other.
async fn follow(shared: &Arc<Shared>) {
    let mut choice = Home::new(jitter() as usize);
    loop {
        let Some(home) = choose(shared, &mut choice) else { return std::future::pending().await };
        let closed = match follow_at(shared, &home, &mut choice).await {
            End::Closed(closed) => Some(closed),
            End::Failed(status) => {
                if status.code() == Code::Unimplemented {
                    tracing::warn!(
                        condition = OTHER_PROTOCOL,
                        member = home,
                        protocol = PACKAGE,
                        "the member does not have this version of the protocol: use agents and members of the same release"
                    );
                }
                tracing::debug!(home, error = status.message(), "a stream of the member has ended");
                choice.on(shared.now(), Input::Ended)
            }
        };
        if let Some(Output::Close(pause, reason)) = closed {
            let reason = reason.reason();
            tracing::debug!(home, reason, "the watch of members ended; trying another member");
            sleep(pause.draw(jitter())).await;
        }
    }
}

/// Chooses the next home, `http://host:port`.
fn choose(shared: &Shared, choice: &mut Home) -> Option<String> {
    let routes = shared.routes();
    let of_map =
        routes.iter().flat_map(|routes| routes.links()).map(|link| format!("http://{}", link.address));
    choice.choose(of_map, shared.settings.endpoints.iter().cloned())
}

/// End of the streams of a home.
enum End {
    /// The home was closed with this output.
    Closed(Output),
    /// A stream has ended, or was not opened.
    Failed(Status),
}

impl From<Status> for End {
    fn from(status: Status) -> End {
        End::Failed(status)
    }
}

/// Watches members and nodes at a home until it fails as home.
async fn follow_at(shared: &Arc<Shared>, home: &str, choice: &mut Home) -> End {
    let endpoint = match parse_endpoint(home, &shared.settings) {
        Ok(endpoint) => endpoint,
        Err(error) => return Status::internal(error.to_string()).into(),
    };
    let followed = async {
        let mut client = MembershipClient::new(connect(&endpoint, &shared.settings.security));
        let time = shared.settings.call_timeout;
        let members = within(time, client.watch_members(WatchMembersRequest {})).await?;
        // The watch starts first: a change between the two calls is then in both, and changes carry their
        // epoch.
        let changes = within(time, client.watch_nodes(WatchNodesRequest {})).await?;
        let list = within(time, client.list_nodes(ListNodesRequest {})).await?;
        write_nodes(shared, |nodes| nodes.replace(list.nodes));
        choice.on(shared.now(), Input::Opened);
        tracing::info!(
            recovered = OTHER_PROTOCOL,
            member = home,
            "the member has this version of the protocol"
        );
        tokio::select! {
            ended = follow_members(shared, (home, choice), members) => ended,
            ended = follow_nodes(shared, changes) => ended.map_err(End::Failed),
        }
    };
    let ended: Result<std::convert::Infallible, End> = followed.await;
    let Err(end) = ended;
    end
}

async fn follow_members(
    shared: &Arc<Shared>,
    (home, choice): (&str, &mut Home),
    mut lists: Streaming<MemberList>,
) -> Result<std::convert::Infallible, End> {
    let mut name = String::new();
    loop {
        let left = choice.doubt(shared.now());
        let (input, list) = tokio::select! {
            list = lists.message() => {
                let list = list?.ok_or_else(|| Status::unavailable("the stream of members ended"))?;
                name.clone_from(&list.answering);
                let known = shared.members.borrow().epoch();
                (Input::List { list: source(&list), known }, Some(list))
            }
            () = sleep(left.unwrap_or_default()), if left.is_some() => (Input::Overdue, None),
            () = wait_for_silence(shared, &name) => (Input::Silent, None),
        };
        match (choice.on(shared.now(), input), list) {
            (Some(Output::Apply), Some(list)) => apply_list(shared, list, home),
            (Some(closed @ Output::Close(..)), _) => return Err(End::Closed(closed)),
            _ => {}
        }
    }
}

/// Waits until heartbeats to the home fail.
async fn wait_for_silence(shared: &Shared, name: &str) {
    let is_home = |link: &Arc<Link>| link.name.as_str() == name;
    let Some(link) = shared.links().find(is_home) else { return std::future::pending().await };
    let mut beats = link.beats.subscribe();
    if beats.wait_for(|beats| *beats == HeartbeatState::Failing).await.is_err() {
        std::future::pending::<()>().await;
    }
}

async fn follow_nodes(
    shared: &Shared,
    mut changes: Streaming<NodeChange>,
) -> Result<std::convert::Infallible, Status> {
    loop {
        let change = changes.message().await?;
        let change = change.ok_or_else(|| Status::unavailable("the stream of nodes ended"))?;
        let presence = if change.removed { NodeChangeKind::Removed } else { NodeChangeKind::Updated };
        if let Some(node) = change.node {
            write_nodes(shared, |nodes| nodes.change(node, presence));
        }
    }
}

fn write_nodes(shared: &Shared, write: impl FnOnce(&mut super::nodes::NodeMap)) {
    write(&mut shared.nodes.write().unwrap_or_else(PoisonError::into_inner));
    shared.nodes_version.send_modify(|version| *version += 1);
}

fn source(list: &MemberList) -> MemberListSource {
    let MemberList { epoch, members, registered, .. } = list;
    MemberListSource { epoch: Epoch(*epoch), members: members.len(), registered: *registered }
}

/// Fetches the map of a member whose map is newer.
pub(super) async fn fetch_members(shared: &Arc<Shared>, channel: Channel, home: &str) -> Result<(), Status> {
    let mut client = MembershipClient::new(channel);
    let list = within(shared.settings.call_timeout, client.list_members(ListMembersRequest {})).await?;
    let known = shared.members.borrow().epoch();
    if source(&list).applies_if_fetched(known) {
        apply_list(shared, list, home);
    }
    Ok(())
}

/// Applies a member list from `home`.
fn apply_list(shared: &Arc<Shared>, list: MemberList, home: &str) {
    let (epoch, answering) = (Epoch(list.epoch), list.answering);
    let members = list.members.into_iter().filter_map(|member| {
        let address = reachable(&member, &answering, home);
        let name = MemberName::new(&member.name)
            .inspect_err(|_| tracing::error!(name = member.name, "ignoring member with an invalid name"));
        Some((name.ok()?, address))
    });
    let open = |name: &MemberName, address: &str| open_link(shared, name, address);
    let map = |names| ShardMap::new(epoch, names).map(Arc::new);
    let mut applied = Ok(None);
    shared.members.send_if_modified(|known| {
        applied = known.apply(members, open, map);
        matches!(applied, Ok(Some(_)))
    });
    let unused = match applied {
        Ok(Some(unused)) => unused,
        Ok(None) => return,
        Err(error) => return tracing::error!(%error, "the member list is not a valid shard map"),
    };
    unused.replaced.iter().for_each(|link| close(shared, link));
    for link in unused.left {
        tokio::spawn(close_after_grace(shared.clone(), link));
    }
    let routes = shared.routes().expect("just applied");
    tracing::info!(
        epoch = epoch.0,
        members = routes.links().len(),
        "members of the control plane have changed"
    );
    // The next heartbeat would report changed slots, but requesting them now is faster.
    routes.links().iter().for_each(|link| link.update_outbox(Outbox::invalidate_slots));
    shared.links_changed();
}

/// Creates the link to a member; `None` if its address is invalid.
fn open_link(shared: &Shared, name: &MemberName, address: &str) -> Option<Arc<Link>> {
    let endpoint = parse_endpoint(&format!("http://{address}"), &shared.settings).ok();
    let connections = endpoint
        .and_then(|endpoint| Some((endpoint, Connection::new(address, &shared.settings.security).ok()?)));
    let Some(connections) = connections else {
        tracing::error!(%name, address, "ignoring member with an invalid address");
        return None;
    };
    Some(Arc::new(Link::new(name.clone(), address.to_owned(), connections, &shared.settings)))
}

/// Closes a link, whose superseded changes still count.
fn close(shared: &Shared, link: &Link) {
    link.close();
    shared.counters.changes_superseded_before.fetch_add(link.superseded(), Ordering::Relaxed);
}

/// Closes a link if its member has not returned.
async fn close_after_grace(shared: Arc<Shared>, link: Arc<Link>) {
    sleep(LINK_GRACE).await;
    if shared.members.send_if_modified(|members| members.end_grace(&link)) {
        close(&shared, &link);
        shared.links_changed();
    }
}

/// Returns the address of a member: its own, or, if that is a wildcard, the one at which it responded.
fn reachable(member: &MemberInfo, answering: &str, home: &str) -> String {
    let everywhere = member.address.parse::<SocketAddr>().is_ok_and(|address| address.ip().is_unspecified());
    if everywhere && member.name == answering {
        home.strip_prefix("http://").unwrap_or(home).to_owned()
    } else {
        member.address.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn member_with_a_wildcard_address_is_reached_where_it_responded() {
        let member = |address: &str| MemberInfo {
            name: "a".to_owned(),
            address: address.to_owned(),
            ..MemberInfo::default()
        };
        let home = "http://controlplane:7400";
        assert_eq!(reachable(&member("0.0.0.0:7400"), "a", home), "controlplane:7400");
        assert_eq!(reachable(&member("[::]:7400"), "a", home), "controlplane:7400");
        assert_eq!(reachable(&member("0.0.0.0:7400"), "b", home), "0.0.0.0:7400");
        assert_eq!(reachable(&member("10.0.0.1:7400"), "a", home), "10.0.0.1:7400");
        assert_eq!(reachable(&member("a.example:7400"), "a", home), "a.example:7400");
    }
}
