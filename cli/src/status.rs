//! `reprise status`: members, nodes, tiers and health of a running cluster, asked from the processes themselves.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use reprise_policy::Epoch;
use reprise_policy::shards::{MemberName, ShardMap};
use reprise_proto::controlplane::directory_client::DirectoryClient;
use reprise_proto::controlplane::membership_client::MembershipClient;
use reprise_proto::controlplane::{
    DescribeReply, DescribeRequest, ListMembersRequest, ListNodesRequest, MemberInfo, MemberList, NodeInfo,
};
use serde::Serialize;

use crate::cluster::ClusterFile;
use crate::config::Config;
use crate::http;
use crate::output::{Audience, Table, bytes_text};

/// Bound on connecting to one member, and all that it and the others are asked.
const ANSWERED_WITHIN: Duration = Duration::from_secs(5);

/// Bound on what another member is asked: a dead one is listed until its lease has ended.
const DESCRIBED_WITHIN: Duration = Duration::from_secs(1);

/// Arguments of `reprise status`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct StatusArgs {
    /// The control plane's gRPC address, `host:port` [default: that of the running cluster].
    #[arg(long, value_name = "ADDRESS")]
    controlplane: Option<String>,
    /// Directory of the running cluster [default: the demo's].
    #[arg(long, value_name = "DIR")]
    cluster: Option<PathBuf>,
}

/// The whole status, as printed for programs.
#[derive(Debug, Serialize)]
struct Status {
    /// The member that was asked.
    controlplane: String,
    /// The registration of the member that was asked is certain.
    registered: bool,
    members_epoch: u64,
    members: Vec<MemberStatus>,
    /// The members' parts together.
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
    /// Hash slots of the directory that are its own by the map.
    slots: usize,
    /// Replicas in its part of the directory, or why it could not be asked.
    replicas: Result<u64, String>,
    /// It is the one that was asked.
    asked: bool,
}

/// What a member answers for all.
struct Answers {
    /// Who was asked.
    address: String,
    members: MemberList,
    nodes: Vec<NodeInfo>,
    /// Of each member, its part of the directory, or why it could not be asked.
    parts: Vec<Result<DescribeReply, String>>,
}

#[derive(Debug, Serialize)]
struct NodeStatus {
    node: u32,
    name: String,
    alive: bool,
    epoch: u64,
    version: String,
    peer_address: String,
    replicas_dram: u64,
    replicas_nvme: u64,
    dram_bytes: u64,
    nvme_bytes: u64,
    /// The agent's own words, or why it could not be asked.
    agent: Result<serde_json::Value, String>,
}

/// `reprise status`.
pub(crate) fn command(args: &StatusArgs, config: &Config, audience: Audience) -> anyhow::Result<()> {
    let addresses = match &args.controlplane {
        Some(address) => vec![address.clone()],
        None => {
            let directory = config.cluster.directory(args.cluster.as_deref());
            ClusterFile::read(&directory)?.members.into_iter().map(|member| member.grpc).collect()
        }
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let answers = runtime.block_on(ask_any(&addresses))?;
    let directory = answers.parts.iter().flatten().fold(DescribeReply::default(), with_part);
    let status = Status {
        registered: answers.members.registered,
        members_epoch: answers.members.epoch,
        members: member_statuses(&answers)?,
        controlplane: answers.address,
        directory_keys: directory.keys,
        directory_replicas: directory.replicas,
        directory_bytes: directory.bytes,
        nodes: answers.nodes.into_iter().map(|node| node_status(node, &directory)).collect(),
    };
    audience.emit(&status);
    audience.say(text(&status));
    Ok(())
}

/// The members' parts of the directory together; an error when a listed member does not answer.
pub(crate) fn whole_directory(cluster: &ClusterFile) -> anyhow::Result<DescribeReply> {
    let addresses: Vec<String> = cluster.members.iter().map(|member| member.grpc.clone()).collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let answers = runtime.block_on(ask_any(&addresses))?;
    let mut sum = DescribeReply::default();
    for part in answers.parts {
        sum = with_part(sum, &part.map_err(anyhow::Error::msg)?);
    }
    Ok(sum)
}

/// What the first member that answers says; the error is the last one's.
async fn ask_any(addresses: &[String]) -> anyhow::Result<Answers> {
    let mut outcome = Err(anyhow::anyhow!("the cluster has no member of the control plane"));
    for address in addresses {
        outcome = tokio::time::timeout(ANSWERED_WITHIN, ask(address))
            .await
            .with_context(|| {
                format!("the control plane at {address} did not answer within {ANSWERED_WITHIN:?}: is it stopped or overloaded?")
            })
            .flatten();
        if outcome.is_ok() {
            break;
        }
    }
    outcome
}

async fn ask(address: &str) -> anyhow::Result<Answers> {
    let endpoint = format!("http://{address}");
    let unreachable = || format!("cannot reach the control plane at {address}");
    let mut membership = MembershipClient::connect(endpoint).await.with_context(unreachable)?;
    let members =
        membership.list_members(ListMembersRequest {}).await.context("listing members")?.into_inner();
    let nodes = membership.list_nodes(ListNodesRequest {}).await.context("listing nodes")?.into_inner().nodes;
    let mut parts = Vec::with_capacity(members.members.len());
    for member in &members.members {
        let own = member.name == members.answering;
        let part = describe(if own { address } else { &member.address }).await;
        parts.push(part.map_err(|error| format!("{error:#}")));
    }
    Ok(Answers { address: address.to_owned(), members, nodes, parts })
}

/// A member's part of the directory.
async fn describe(address: &str) -> anyhow::Result<DescribeReply> {
    let asked = async {
        let mut directory = DirectoryClient::connect(format!("http://{address}")).await?;
        anyhow::Ok(directory.describe(DescribeRequest {}).await?.into_inner())
    };
    tokio::time::timeout(DESCRIBED_WITHIN, asked)
        .await
        .with_context(|| format!("no answer within {DESCRIBED_WITHIN:?}"))
        .flatten()
        .context("describing the directory")
}

/// The parts of two members as one.
fn with_part(mut sum: DescribeReply, part: &DescribeReply) -> DescribeReply {
    sum.keys += part.keys;
    sum.replicas += part.replicas;
    sum.bytes += part.bytes;
    for replicas in &part.nodes {
        match sum.nodes.iter_mut().find(|known| known.node == replicas.node) {
            Some(known) => {
                known.dram += replicas.dram;
                known.nvme += replicas.nvme;
            }
            None => sum.nodes.push(*replicas),
        }
    }
    sum
}

fn member_statuses(answers: &Answers) -> anyhow::Result<Vec<MemberStatus>> {
    let list = &answers.members;
    let names =
        list.members.iter().map(|member| MemberName::new(&member.name)).collect::<Result<Vec<_>, _>>()?;
    let map = ShardMap::new(Epoch(list.epoch), names.iter().cloned())?;
    let status =
        |((member, name), part): ((&MemberInfo, &MemberName), &Result<DescribeReply, String>)| MemberStatus {
            name: member.name.clone(),
            address: member.address.clone(),
            incarnation: member.incarnation,
            slots: map.position(name).map_or(0, |at| map.slots_of(at).count()),
            replicas: part.as_ref().map(|part| part.replicas).map_err(Clone::clone),
            asked: member.name == list.answering,
        };
    Ok(list.members.iter().zip(&names).zip(&answers.parts).map(status).collect())
}

fn node_status(node: NodeInfo, directory: &DescribeReply) -> NodeStatus {
    let replicas = directory.nodes.iter().find(|replicas| replicas.node == node.node);
    let agent = http::get(&node.admin_address, "/status")
        .and_then(|body| serde_json::from_str(&body).context("not JSON"))
        .map_err(|error| format!("{error:#}"));
    NodeStatus {
        node: node.node,
        name: node.name,
        alive: node.alive,
        epoch: node.epoch,
        version: node.version,
        peer_address: node.peer_address,
        replicas_dram: replicas.map_or(0, |replicas| replicas.dram),
        replicas_nvme: replicas.map_or(0, |replicas| replicas.nvme),
        dram_bytes: node.dram_bytes,
        nvme_bytes: node.nvme_bytes,
        agent,
    }
}

fn text(status: &Status) -> String {
    let mut table =
        Table::new(&["node", "alive", "epoch", "DRAM", "NVMe", "DRAM blocks", "NVMe blocks", "agent"]);
    for node in &status.nodes {
        table.row(vec![
            node.name.clone(),
            if node.alive { "yes" } else { "NO" }.to_owned(),
            node.epoch.to_string(),
            bytes_text(node.dram_bytes),
            bytes_text(node.nvme_bytes),
            node.replicas_dram.to_string(),
            node.replicas_nvme.to_string(),
            match &node.agent {
                Ok(_) => "answers".to_owned(),
                Err(error) => error.clone(),
            },
        ]);
    }
    let mut members = Table::new(&["member", "address", "slots", "replicas", "incarnation"]);
    for member in &status.members {
        members.row(vec![
            if member.asked { format!("{} (asked)", member.name) } else { member.name.clone() },
            member.address.clone(),
            member.slots.to_string(),
            member.replicas.as_ref().map_or_else(Clone::clone, u64::to_string),
            member.incarnation.to_string(),
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
