//! Which members the control plane has, and who of them owns which keys; the link thread.
//!
//! One member, called home here, tells of all members and of all nodes, in two streams. When it is silent, not sure of its
//! own place, or gone, another one becomes home: those of the last map, and those of the configuration. A thousand
//! agents begin at different ones.
//!
//! A link is kept for a while when its member has left the map: one that comes back soon (its lease was late, etcd was
//! away) still knows this node and its inventory.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::net::SocketAddr;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use reprise_agent_core::backoff::Backoff;
use reprise_policy::shards::{MemberName, ShardMap};
use reprise_policy::{BlockKey, Epoch};
use reprise_proto::connection::Connection;
use reprise_proto::controlplane::membership_client::MembershipClient;
use reprise_proto::controlplane::{
    ListMembersRequest, ListNodesRequest, MemberInfo, MemberList, NodeChange, WatchMembersRequest,
    WatchNodesRequest,
};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tokio::time::sleep;
use tonic::transport::{Channel, Endpoint};
use tonic::{Status, Streaming};

use super::link::{Beats, Link, connect, within};
use super::nodes::Presence;
use super::placing::{self, PlaceQuestion};
use super::{Shared, asking, parse_endpoint};

/// Time that a link is kept after its member has left the map.
const LINK_KEPT: Duration = Duration::from_secs(10);
/// Time that a home may be unsure of its own place in the map: a lease is lost and taken again in less.
const UNSURE_MAX: Duration = Duration::from_secs(3);

/// All links, shared by whoever looks at them.
#[derive(Clone, Debug, Default)]
pub(super) struct Links {
    by_name: Arc<BTreeMap<MemberName, Arc<Link>>>,
    /// Of links that are closed.
    superseded: u64,
}

/// A map of slots, and the link to each of its members.
#[derive(Debug)]
pub(super) struct Routes {
    map: ShardMap,
    /// In the order of the map.
    links: Vec<Arc<Link>>,
}

impl Links {
    pub(super) fn into_iter(self) -> impl Iterator<Item = Arc<Link>> {
        let links: Vec<Arc<Link>> = self.by_name.values().cloned().collect();
        links.into_iter()
    }

    /// Changes that links which are closed have superseded.
    pub(super) fn superseded(&self) -> u64 {
        self.superseded
    }
}

impl Routes {
    pub(super) fn epoch(&self) -> Epoch {
        self.map.epoch()
    }

    /// Of the members in the map.
    pub(super) fn digest(&self) -> u64 {
        self.map.digest()
    }

    pub(super) fn links(&self) -> &[Arc<Link>] {
        &self.links
    }

    /// Whether a link's member owns a hash slot.
    pub(super) fn owns(&self, link: &Link, slot: u16) -> bool {
        let owner = self.map.owner(slot).map(|owner| &self.links[usize::from(owner.0)]);
        owner.is_some_and(|owner| owner.name == link.name)
    }

    /// Position of the owner of a key among the links.
    pub(super) fn owner(&self, key: &BlockKey) -> Option<usize> {
        self.map.owner_of(key).map(|owner| usize::from(owner.0))
    }
}

/// A random number. The standard library seeds each `RandomState` differently: enough for delays and choices.
pub(super) fn jitter() -> u32 {
    (RandomState::new().hash_one(0) >> 32) as u32
}

/// Runs until shutdown. Without a control plane all lookups fail at once.
pub(super) fn run(runtime: &Runtime, shared: &Arc<Shared>, places: mpsc::Receiver<PlaceQuestion>) {
    runtime.block_on(async {
        let mut shutdown = shared.shutdown.subscribe();
        tokio::select! {
            _ = shutdown.wait_for(|shutdown| *shutdown) => {}
            () = asking::look_up(shared) => {}
            () = placing::place(shared, places) => {}
            () = follow(shared) => {}
            () = for_each_link(shared, |link| {
                let shared = shared.clone();
                async move { link.run(&shared).await }
            }) => {}
        }
    });
}

/// Spawns a task for each link, as they come; the tasks end with their links.
pub(super) async fn for_each_link<F>(shared: &Shared, task: impl Fn(Arc<Link>) -> F)
where
    F: Future<Output = ()> + Send + 'static,
{
    let mut links = shared.links.subscribe();
    let mut running: Vec<Arc<Link>> = Vec::new();
    loop {
        let now: Vec<Arc<Link>> = links.borrow_and_update().clone().into_iter().collect();
        for link in &now {
            if !running.iter().any(|known| Arc::ptr_eq(known, link)) {
                tokio::spawn(task(link.clone()));
            }
        }
        running = now;
        if links.changed().await.is_err() {
            return; // the client is gone
        }
    }
}

/// Follows members and nodes, at one home after the other.
async fn follow(shared: &Arc<Shared>) {
    let mut backoff = Backoff::default();
    let mut turn = jitter() as usize;
    loop {
        let homes = homes(shared);
        if homes.is_empty() {
            return std::future::pending().await;
        }
        let home = &homes[turn % homes.len()];
        let ended = follow_at(shared, home, &mut backoff).await;
        tracing::debug!(home, reason = ended.message(), "members are followed no more; trying another");
        turn = turn.wrapping_add(1);
        sleep(backoff.next(jitter())).await;
    }
}

/// Where members may be, `http://host:port`: those of the map first.
fn homes(shared: &Shared) -> Vec<String> {
    let routes = shared.routes.borrow().clone();
    let of_map =
        routes.iter().flat_map(|routes| &routes.links).map(|link| format!("http://{}", link.address));
    let mut homes: Vec<String> = of_map.collect();
    for endpoint in &shared.settings.endpoints {
        if !homes.contains(endpoint) {
            homes.push(endpoint.clone());
        }
    }
    homes
}

/// Follows members and nodes at a home, until it is one no more.
async fn follow_at(shared: &Arc<Shared>, home: &str, backoff: &mut Backoff) -> Status {
    let endpoint = match parse_endpoint(home, &shared.settings) {
        Ok(endpoint) => endpoint,
        Err(error) => return Status::internal(error.to_string()),
    };
    let followed = async {
        let mut client = MembershipClient::new(connect(&endpoint));
        let time = shared.settings.call_timeout;
        let members = within(time, client.watch_members(WatchMembersRequest {})).await?;
        // The watch first: what changes between the two calls is then in both, and changes carry their epoch.
        let changes = within(time, client.watch_nodes(WatchNodesRequest {})).await?;
        let list = within(time, client.list_nodes(ListNodesRequest {})).await?;
        write_nodes(shared, |nodes| nodes.replace(list.nodes));
        backoff.reset();
        tokio::select! {
            ended = follow_members(shared, home, members) => ended,
            ended = follow_nodes(shared, changes) => ended,
        }
    };
    let ended: Result<std::convert::Infallible, Status> = followed.await;
    let Err(status) = ended;
    status
}

async fn follow_members(
    shared: &Arc<Shared>,
    home: &str,
    mut lists: Streaming<MemberList>,
) -> Result<std::convert::Infallible, Status> {
    let mut unsure_since = None;
    let mut name = String::new();
    loop {
        let left = unsure_since.map(|since: Instant| UNSURE_MAX.saturating_sub(since.elapsed()));
        let list = tokio::select! {
            list = lists.message() => list?.ok_or_else(|| Status::unavailable("the stream of members ended"))?,
            () = sleep(left.unwrap_or_default()), if left.is_some() => {
                return Err(Status::unavailable("the member is not sure of its own place"));
            }
            () = silence(shared, &name) => return Err(Status::unavailable("the member does not answer beats")),
        };
        unsure_since = if list.registered { None } else { unsure_since.or_else(|| Some(Instant::now())) };
        name.clone_from(&list.answering);
        if list.registered || (shared.routes.borrow().is_none() && !list.members.is_empty()) {
            take(shared, list, home);
        }
    }
}

/// Waits until beats to the member that is home fail.
async fn silence(shared: &Shared, name: &str) {
    let is_home = |link: &Arc<Link>| link.name.as_str() == name;
    let Some(link) = shared.links().find(is_home) else { return std::future::pending().await };
    let mut beats = link.beats.subscribe();
    if beats.wait_for(|beats| *beats == Beats::Failing).await.is_err() {
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
        let presence = if change.removed { Presence::Removed } else { Presence::Here };
        if let Some(node) = change.node {
            write_nodes(shared, |nodes| nodes.change(node, presence));
        }
    }
}

fn write_nodes(shared: &Shared, write: impl FnOnce(&mut super::nodes::NodeMap)) {
    write(&mut shared.nodes.write().unwrap_or_else(PoisonError::into_inner));
}

/// Asks a member whose map is newer for it. What it lists may be older all the same than what has come meanwhile: that is not taken, since home, which
/// has told the newer one, does not say it again. A store that begins anew, and its epochs with it, is heard of from a new home.
pub(super) async fn learn(shared: &Arc<Shared>, channel: Channel, home: &str) -> Result<(), Status> {
    let mut client = MembershipClient::new(channel);
    let list = within(shared.settings.call_timeout, client.list_members(ListMembersRequest {})).await?;
    let is_newer =
        |known: Option<&Arc<Routes>>| known.is_none_or(|known| Epoch(list.epoch) > known.map.epoch());
    let is_newer = is_newer(shared.routes.borrow().as_ref());
    if list.registered && is_newer {
        take(shared, list, home);
    }
    Ok(())
}

/// Takes over a list of members that came from `home`.
fn take(shared: &Arc<Shared>, list: MemberList, home: &str) {
    let known = shared.links.borrow().by_name.clone();
    let answering = list.answering;
    let mut in_map = BTreeMap::new();
    for member in list.members {
        let address = reachable(&member, &answering, home);
        let Ok(name) = MemberName::new(&member.name) else {
            tracing::error!(name = member.name, "a member's name is none; it is left out");
            continue;
        };
        let link = match known.get(&name).filter(|link| link.address == address) {
            Some(link) => link.clone(),
            None => match connections(shared, &address) {
                Some(connections) => {
                    let queued_max = shared.settings.changes_queued_max;
                    Arc::new(Link::new(name.clone(), address, connections, queued_max))
                }
                None => {
                    tracing::error!(%name, address, "a member's address is none; it is left out");
                    continue;
                }
            },
        };
        in_map.insert(name, link);
    }
    let map = match ShardMap::new(Epoch(list.epoch), in_map.keys().cloned()) {
        Ok(map) => map,
        Err(error) => return tracing::error!(%error, "the list of members is no map"),
    };
    let same = |routes: &Arc<Routes>| {
        routes.map == map && routes.links.iter().zip(in_map.values()).all(|(old, new)| Arc::ptr_eq(old, new))
    };
    if shared.routes.borrow().as_ref().is_some_and(same) {
        return;
    }
    tracing::info!(epoch = list.epoch, members = in_map.len(), "members of the control plane");
    let mut all = in_map.clone();
    for (name, link) in known.iter() {
        match all.get(name) {
            Some(new) if Arc::ptr_eq(new, link) => {}
            // The member is elsewhere now.
            Some(_) => link.close(),
            None => {
                all.insert(name.clone(), link.clone());
                tokio::spawn(close_if_gone(shared.clone(), link.clone()));
            }
        }
    }
    let superseded = |link: &Arc<Link>| !all.values().any(|kept| Arc::ptr_eq(kept, link));
    let gone: u64 = known.values().filter(|link| superseded(link)).map(|link| link.superseded()).sum();
    let links: Vec<Arc<Link>> = in_map.into_values().collect();
    shared.routes.send_replace(Some(Arc::new(Routes { map, links: links.clone() })));
    shared.links.send_modify(|links| {
        links.by_name = Arc::new(all);
        links.superseded += gone;
    });
    // Whose slots are others now would say so with its next beat; asking is sooner.
    links.iter().for_each(|link| link.tell(reprise_agent_core::outbox::Outbox::doubt));
    shared.links_changed();
}

/// How a member is reached; `None` when its address is none.
fn connections(shared: &Shared, address: &str) -> Option<(Endpoint, Connection)> {
    let endpoint = parse_endpoint(&format!("http://{address}"), &shared.settings).ok()?;
    Some((endpoint, Connection::to(address).ok()?))
}

/// Closes a link whose member has not come back.
async fn close_if_gone(shared: Arc<Shared>, link: Arc<Link>) {
    sleep(LINK_KEPT).await;
    let back = |routes: &Arc<Routes>| routes.links.iter().any(|known| Arc::ptr_eq(known, &link));
    if shared.routes.borrow().as_ref().is_some_and(back) {
        return;
    }
    link.close();
    shared.links.send_if_modified(|links| {
        let mut kept = BTreeMap::clone(&links.by_name);
        let gone = kept.get(&link.name).is_some_and(|known| Arc::ptr_eq(known, &link));
        if gone {
            kept.remove(&link.name);
            links.by_name = Arc::new(kept);
            links.superseded += link.superseded();
        }
        gone
    });
    shared.links_changed();
}

/// Where a member is reached: at its own address, or, when that names every interface, where it has answered.
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
    fn a_member_that_listens_on_every_interface_is_reached_where_it_answered() {
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
