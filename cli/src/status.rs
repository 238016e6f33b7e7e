//! `reprise status`: members, nodes, tiers and health of a running cluster, as the processes themselves
//! report them.
//!
//! One hanging member or node does not block the report: each request has its own timeout, and a failure is
//! shown in place of the missing part.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use reprise_policy::Epoch;
use reprise_policy::shards::{MemberName, ShardMap};
use reprise_proto::controlplane::directory_client::DirectoryClient;
use reprise_proto::controlplane::membership_client::MembershipClient;
use reprise_proto::controlplane::{
    DescribeReply, DescribeRequest, ListMembersRequest, ListNodesRequest, MemberInfo, MemberList, NodeInfo,
    NodeMode, NodeReplicas, NodeUsage,
};
use serde::Serialize;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

use crate::config::Config;
use crate::members::{Members, MembersArgs, endpoint, first_answer, runtime};
use crate::node_mode::{Drain, drain_text, mode_name};
use reprise_testkit::cluster::ClusterFile;
use reprise_testkit::http::Client;
use reprise_testkit::output::{Audience, Table, bytes_text};

/// Timeout of connecting to the control plane and listing members and nodes.
const ANSWERED_WITHIN: Duration = Duration::from_secs(5);

/// Timeout of one member's `Describe` call; the other members are shown if one hangs.
const MEMBER_ANSWERS_WITHIN: Duration = Duration::from_secs(1);

/// Timeout of one agent's status page.
const NODE_ANSWERS_WITHIN: Duration = Duration::from_secs(2);

/// Number of agents that are read concurrently. With 1,000 hanging nodes the command takes half a minute, and
/// it stays below a shell's usual limit on open files.
const NODES_ASKED_AT_ONCE: usize = 64;

/// Status page of a node's agent, or the error of reading it.
type AgentStatus = Result<serde_json::Value, String>;

/// Arguments of `reprise status`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    members: MembersArgs,
}

/// Output of `reprise status --json`.
#[derive(Debug, Serialize)]
struct Status {
    controlplane: String,
    /// Whether the member that answered is certain of its registration.
    registered: bool,
    members_epoch: u64,
    members: Vec<MemberStatus>,
    directory_keys: u64,
    directory_replicas: u64,
    directory_bytes: u64,
    nodes: Vec<NodeStatus>,
}

/// A member of the control plane.
#[derive(Debug, Serialize)]
struct MemberStatus {
    name: String,
    address: String,
    incarnation: u64,
    /// Number of hash slots that the shard map assigns to the member.
    slots: usize,
    /// Whether this member answered the request.
    asked: bool,
    /// The member's part of the directory, or the error of reading it.
    directory: Result<DirectoryPart, String>,
}

/// A member's part of the directory.
#[derive(Clone, Copy, Debug, Serialize)]
struct DirectoryPart {
    replicas: u64,
    slots_owned: u32,
    /// Owned slots for which at least one node has not announced its whole inventory.
    slots_partial: u32,
}

/// Members, nodes and directory parts, read through one member.
struct ClusterView {
    /// Address of the member that answered.
    address: String,
    members: MemberList,
    nodes: Vec<NodeInfo>,
    /// Directory part of each member, in the order of `members`.
    directories: Vec<Result<DescribeReply, String>>,
}

/// One way to reach the peer transport of a node.
#[derive(Debug, Serialize)]
struct Endpoint {
    protocol: String,
    address: String,
}

#[derive(Debug, Serialize)]
struct NodeStatus {
    node: u32,
    name: String,
    alive: bool,
    epoch: u64,
    version: String,
    peer_endpoints: Vec<Endpoint>,
    mode: &'static str,
    /// Usage as the node last reported it; `null` before its first report.
    usage: Option<Usage>,
    /// Progress of the drain; `null` unless the node is draining.
    drain: Option<Drain>,
    replicas_dram: u64,
    replicas_nvme: u64,
    /// Capacities as the node last reported them; `null` before its first report.
    dram_bytes: Option<u64>,
    nvme_bytes: Option<u64>,
    agent: AgentStatus,
}

/// Used space of a node, and the bytes that wait to be written to NVMe.
#[derive(Clone, Copy, Debug, Serialize)]
struct Usage {
    dram_used_bytes: u64,
    nvme_used_bytes: u64,
    dram_used_percent: u64,
    nvme_used_percent: u64,
    queued_bytes: u64,
}

pub(crate) fn command(args: &StatusArgs, config: &Config, audience: Audience) -> anyhow::Result<()> {
    let asked = args.members.find(config)?;
    let runtime = runtime()?;
    let (ClusterView { address, members, nodes, directories }, agents) = runtime.block_on(async {
        let view = ask_any(&asked).await?;
        let agents = ask_agents(&asked, &view.nodes).await?;
        anyhow::Ok((view, agents))
    })?;
    // A pending name resolution blocks a runtime thread; it must not delay the exit.
    runtime.shutdown_background();
    let answered: Vec<&DescribeReply> = directories.iter().flatten().collect();
    let sum = |of: fn(&DescribeReply) -> u64| answered.iter().map(|directory| of(directory)).sum();
    let status = Status {
        controlplane: address,
        registered: members.registered,
        members_epoch: members.epoch,
        members: member_statuses(&members, &directories)?,
        directory_keys: sum(|directory| directory.keys),
        directory_replicas: sum(|directory| directory.replicas),
        directory_bytes: sum(|directory| directory.bytes),
        nodes: nodes
            .into_iter()
            .zip(agents)
            .map(|(node, agent)| node_status(node, agent, &answered))
            .collect(),
    };
    audience.emit(&status);
    audience.print_line(text(&status));
    Ok(())
}

/// Returns the address of the first member that answers, and the members and nodes that it lists.
pub(crate) async fn members_and_nodes(
    asked: &Members,
) -> anyhow::Result<(String, MemberList, Vec<NodeInfo>)> {
    let ClusterView { address, members, nodes, .. } = ask_any(asked).await?;
    Ok((address, members, nodes))
}

/// Returns the directory part of each member.
///
/// # Errors
/// No member answers, or a listed member does not.
pub(crate) fn whole_directory(cluster: &ClusterFile) -> anyhow::Result<Vec<DescribeReply>> {
    let runtime = runtime()?;
    let view = runtime.block_on(ask_any(&Members::of_cluster(cluster)?))?;
    view.directories.into_iter().map(|part| part.map_err(anyhow::Error::msg)).collect()
}

/// Returns the view of the first member that answers, or the error of the last one.
async fn ask_any(asked: &Members) -> anyhow::Result<ClusterView> {
    first_answer(asked, async |address| {
        tokio::time::timeout(ANSWERED_WITHIN, ask(asked, address)).await.with_context(|| {
            format!(
                "the control plane at {address} did not answer within {ANSWERED_WITHIN:?}: is it stopped or overloaded?"
            )
        })?
    })
    .await
}

async fn ask(asked: &Members, address: &str) -> anyhow::Result<ClusterView> {
    let mut membership = MembershipClient::new(asked.connect(address, &endpoint(address)?).await?);
    let members =
        membership.list_members(ListMembersRequest {}).await.context("listing members")?.into_inner();
    let nodes = membership.list_nodes(ListNodesRequest {}).await.context("listing nodes")?.into_inner().nodes;
    // The address that has just worked: the registered one may be unreachable from here.
    let at = |member: &MemberInfo| {
        let own = (member.name == members.answering).then(|| address.to_owned());
        own.unwrap_or_else(|| member.address.clone())
    };
    let described: Vec<JoinHandle<_>> = members
        .members
        .iter()
        .map(|member| tokio::spawn(describe_in_time(asked.clone(), at(member))))
        .collect();
    let mut directories = Vec::with_capacity(described.len());
    for directory in described {
        directories.push(directory.await?);
    }
    Ok(ClusterView { address: address.to_owned(), members, nodes, directories })
}

async fn describe_in_time(asked: Members, address: String) -> Result<DescribeReply, String> {
    let described = tokio::time::timeout(MEMBER_ANSWERS_WITHIN, describe(&asked, &address)).await;
    let late = |_| Err(anyhow::anyhow!("no answer within {MEMBER_ANSWERS_WITHIN:?}"));
    described.unwrap_or_else(late).map_err(|error| format!("{error:#}"))
}

async fn describe(asked: &Members, address: &str) -> anyhow::Result<DescribeReply> {
    let mut directory = DirectoryClient::new(asked.connect(address, &endpoint(address)?).await?);
    Ok(directory.describe(DescribeRequest {}).await.context("describing the directory")?.into_inner())
}

/// Reads the status pages of the agents, in the order of the nodes.
async fn ask_agents(asked: &Members, nodes: &[NodeInfo]) -> anyhow::Result<Vec<AgentStatus>> {
    let permits = Arc::new(Semaphore::new(NODES_ASKED_AT_ONCE));
    let answers: Vec<JoinHandle<AgentStatus>> = nodes
        .iter()
        .map(|node| {
            let (permits, address) = (permits.clone(), node.admin_address.clone());
            let client = asked.agent_client(&node.name);
            tokio::spawn(async move {
                let _permit = permits.acquire().await.expect("the semaphore is never closed");
                ask_agent(&client, &address).await.map_err(|error| format!("{error:#}"))
            })
        })
        .collect();
    let mut agents = Vec::with_capacity(answers.len());
    for agent in answers {
        agents.push(agent.await?);
    }
    Ok(agents)
}

async fn ask_agent(client: &Client, address: &str) -> anyhow::Result<serde_json::Value> {
    let body = tokio::time::timeout(NODE_ANSWERS_WITHIN, client.get_async(address, "/status"));
    let body = body
        .await
        .with_context(|| format!("{address} has not answered within {NODE_ANSWERS_WITHIN:?}"))??;
    serde_json::from_str(&body).context("not JSON")
}

fn member_statuses(
    list: &MemberList,
    directories: &[Result<DescribeReply, String>],
) -> anyhow::Result<Vec<MemberStatus>> {
    let names =
        list.members.iter().map(|member| MemberName::new(&member.name)).collect::<Result<Vec<_>, _>>()?;
    let map = ShardMap::new(Epoch(list.epoch), names.iter().cloned())?;
    let mut statuses = Vec::with_capacity(names.len());
    for ((member, name), directory) in list.members.iter().zip(&names).zip(directories) {
        statuses.push(MemberStatus {
            name: member.name.clone(),
            address: member.address.clone(),
            incarnation: member.incarnation,
            slots: map.owned_by(name).len(),
            asked: member.name == list.answering,
            directory: directory.as_ref().map_err(Clone::clone).map(|directory| DirectoryPart {
                replicas: directory.replicas,
                slots_owned: directory.slots_owned,
                slots_partial: directory.slots_partial,
            }),
        });
    }
    Ok(statuses)
}

fn usage_of(usage: &NodeUsage) -> Usage {
    let (used, capacity) = (usage.used.unwrap_or_default(), usage.capacity.unwrap_or_default());
    let percent = |used: u64, of: u64| used.saturating_mul(100).checked_div(of).unwrap_or(0);
    Usage {
        dram_used_bytes: used.dram,
        nvme_used_bytes: used.nvme,
        dram_used_percent: percent(used.dram, capacity.dram),
        nvme_used_percent: percent(used.nvme, capacity.nvme),
        queued_bytes: usage.queued_bytes,
    }
}

fn node_status(node: NodeInfo, agent: AgentStatus, directories: &[&DescribeReply]) -> NodeStatus {
    let mode = NodeMode::try_from(node.mode).unwrap_or_default();
    let capacity = node.usage.as_ref().and_then(|usage| usage.capacity);
    let of_node = directories.iter().flat_map(|directory| &directory.nodes);
    let replicas: Vec<&NodeReplicas> = of_node.filter(|replicas| replicas.node == node.node).collect();
    let endpoints = node.peer_endpoints.into_iter();
    NodeStatus {
        node: node.node,
        name: node.name,
        alive: node.alive,
        epoch: node.epoch,
        version: node.version,
        peer_endpoints: endpoints.map(|of| Endpoint { protocol: of.protocol, address: of.address }).collect(),
        mode: mode_name(mode),
        usage: node.usage.map(|usage| usage_of(&usage)),
        drain: node.drain.filter(|_| mode == NodeMode::Draining).map(|drain| Drain::from(&drain)),
        replicas_dram: replicas.iter().map(|replicas| replicas.dram).sum(),
        replicas_nvme: replicas.iter().map(|replicas| replicas.nvme).sum(),
        dram_bytes: capacity.map(|capacity| capacity.dram),
        nvme_bytes: capacity.map(|capacity| capacity.nvme),
        agent,
    }
}

/// Returns a tier's used share and capacity; `?` before the node's first report.
fn usage_text(bytes: Option<u64>, used_percent: Option<u64>) -> String {
    match (bytes.map(bytes_text), used_percent) {
        (Some(bytes), Some(percent)) => format!("{percent} % of {bytes}"),
        (Some(bytes), None) => bytes,
        (None, _) => "?".to_owned(),
    }
}

fn text(status: &Status) -> String {
    let mut table =
        Table::new(&["node", "alive", "mode", "DRAM", "NVMe", "DRAM blocks", "NVMe blocks", "agent"]);
    for node in &status.nodes {
        table.row(vec![
            node.name.clone(),
            if node.alive { "yes" } else { "NO" }.to_owned(),
            node.mode.to_owned(),
            usage_text(node.dram_bytes, node.usage.map(|usage| usage.dram_used_percent)),
            usage_text(node.nvme_bytes, node.usage.map(|usage| usage.nvme_used_percent)),
            node.replicas_dram.to_string(),
            node.replicas_nvme.to_string(),
            match &node.agent {
                Ok(_) => node.drain.as_ref().map_or_else(|| "answers".to_owned(), drain_text),
                Err(error) => error.clone(),
            },
        ]);
    }
    let mut members = Table::new(&["member", "address", "slots", "incarnation", "replicas", "directory"]);
    for member in &status.members {
        members.row(vec![
            if member.asked { format!("{} (asked)", member.name) } else { member.name.clone() },
            member.address.clone(),
            member.slots.to_string(),
            member.incarnation.to_string(),
            member.directory.as_ref().map_or_else(|_| "?".to_owned(), |part| part.replicas.to_string()),
            match &member.directory {
                Ok(part) if part.slots_partial > 0 => format!("{} slots partial", part.slots_partial),
                Ok(_) => "whole".to_owned(),
                Err(error) => error.clone(),
            },
        ]);
    }
    let registered = if status.registered { "" } else { " (NOT REGISTERED among the members)" };
    format!(
        "control plane {}{registered}: {} keys, {} replicas in {}\n\n{}\n{}",
        status.controlplane,
        status.directory_keys,
        status.directory_replicas,
        bytes_text(status.directory_bytes),
        members.render(),
        table.render()
    )
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use reprise_identity::Security;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    fn node_at(address: String) -> NodeInfo {
        NodeInfo { admin_address: address, ..NodeInfo::default() }
    }

    async fn listener() -> (TcpListener, String) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound").to_string();
        (listener, address)
    }

    #[tokio::test]
    async fn waits_for_hanging_nodes_concurrently_and_shows_those_that_answer() {
        // Accepts connections and never answers.
        let (silent, hanging) = listener().await;
        let (listening, answering) = listener().await;
        let answer = tokio::spawn(async move {
            let (mut stream, _) = listening.accept().await.expect("a connection");
            let mut asked = [0; 256];
            let count = stream.read(&mut asked).await.expect("a request");
            assert!(asked[..count].starts_with(b"GET /status HTTP/1.1\r\n"));
            stream.write_all(b"HTTP/1.0 200 OK\r\n\r\n{\"a\":1}").await.expect("the response is sent");
        });
        let mut nodes = vec![node_at(hanging); NODES_ASKED_AT_ONCE - 2];
        nodes.extend([node_at(answering), node_at(String::new())]);
        let members = Members { addresses: Vec::new(), security: Security::Plain };
        let asked = Instant::now();
        let agents = ask_agents(&members, &nodes).await.expect("every task ends");
        // One after another, they would take twice as long.
        let concurrently = NODE_ANSWERS_WITHIN * (NODES_ASKED_AT_ONCE as u32 - 2) / 2;
        assert!(asked.elapsed() < concurrently, "{:?}", asked.elapsed());
        let hung = |agent: &&AgentStatus| agent.as_ref().is_err_and(|error| error.contains("not answered"));
        assert_eq!(agents.iter().filter(hung).count(), NODES_ASKED_AT_ONCE - 2);
        let [.., answered, unreachable] = agents.as_slice() else { panic!("one result per node") };
        assert_eq!(answered.as_ref().expect("an answer")["a"], 1);
        assert!(unreachable.is_err(), "the node has no address");
        answer.await.expect("the server task does not panic");
        drop(silent);
    }
}
