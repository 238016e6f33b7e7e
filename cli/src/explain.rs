//! `reprise explain`: where a block is, why, who knows it, and what a load of it would do on each node.
//!
//! A block is named by its key, or by a line of a trace, whose prompt is a chain of blocks. The question goes the way of an
//! agent's look-up: the key's hash slot, the member that owns it by the map, its answer. Why a replica is where it is, its node
//! is asked.

mod why;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use reprise_controlplane_core::directory::REPLICAS_PER_KEY_MAX;
use reprise_policy::routing::{Arrival, Domain, LoadHint, Peer};
use reprise_policy::shards::{MemberName, ShardMap};
use reprise_policy::{BlockKey, Epoch, NodeId, TenantName, Tier};
use reprise_proto::controlplane::directory_client::DirectoryClient;
use reprise_proto::controlplane::{LookupReply, LookupRequest, MemberList, NodeInfo};
use serde::Serialize;

use crate::cluster::ClusterFile;
use crate::config::Config;
use crate::model::{self, SCALE_DEFAULT, hex};
use crate::output::{Audience, Table};
use crate::trace::Trace;
use crate::{engine, status};
use why::Whys;

/// Bound on one member's answer.
const ANSWERED_WITHIN: Duration = Duration::from_secs(5);

/// Packed replica: u16 node, u8 tier, u8 load class.
const REPLICA_BYTES: usize = 4;

/// Number of the failure domain of the node whose load it would be.
const OWN_DOMAIN: Domain = Domain(1);

/// Arguments of `reprise explain`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ExplainArgs {
    /// A block's key, 32 hexadecimal digits; or a line of the trace, from 1, for all blocks of its prompt.
    #[arg(value_name = "KEY|TRACE-LINE")]
    subject: Subject,
    /// The trace [default: as `reprise replay` takes it].
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Scale of the model whose blocks they are [default: 1024].
    #[arg(long)]
    scale: Option<u32>,
    /// Tenant whose blocks they are.
    #[arg(long, value_name = "NAME", default_value = "default")]
    tenant: TenantName,
    /// A member's gRPC address, `host:port` [default: those of the running cluster].
    #[arg(long, value_name = "ADDRESS")]
    controlplane: Option<String>,
    /// Directory of the running cluster [default: the demo's].
    #[arg(long, value_name = "DIR")]
    cluster: Option<PathBuf>,
}

/// What is to be explained.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Subject {
    Key(BlockKey),
    /// From 1.
    TraceLine(usize),
}

/// One block, as printed for programs.
#[derive(Debug, Serialize)]
struct Explained {
    /// Its place in the chain.
    block: usize,
    key: String,
    slot: u16,
    /// The member that owns the slot by the map; none when there are no members.
    member: Option<String>,
    /// Why this is not the whole truth, if it is not.
    doubt: Option<String>,
    replicas: Vec<Held>,
    /// Node name → where a load there would get the block from.
    loads: BTreeMap<String, String>,
}

/// A replica.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Held {
    node: String,
    tier: &'static str,
    /// Why it is there; absent when the node does not say.
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<&'static str>,
}

/// What a member knows of a key.
#[derive(Clone, Debug, Default)]
struct Known {
    /// Node number and tier.
    replicas: Vec<(u32, Tier)>,
    /// Why that is not the whole truth.
    doubts: Vec<String>,
}

impl Known {
    /// Whether there may be more replicas: a member names some of a block that many nodes have.
    fn may_lack_some(&self) -> bool {
        self.replicas.len() >= REPLICAS_PER_KEY_MAX
    }

    /// Who has the block.
    fn nodes(&self) -> BTreeSet<u32> {
        self.replicas.iter().map(|(node, _)| *node).collect()
    }
}

impl FromStr for Subject {
    type Err = String;

    fn from_str(text: &str) -> Result<Subject, String> {
        if let Some(key) = BlockKey::from_hex(text) {
            return Ok(Subject::Key(key));
        }
        match text.parse() {
            Ok(line) if line > 0 => Ok(Subject::TraceLine(line)),
            _ => Err("give a key of 32 hexadecimal digits, or the number of a line of the trace, from 1"
                .to_owned()),
        }
    }
}

/// `reprise explain`.
pub(crate) fn command(args: &ExplainArgs, config: &Config, audience: Audience) -> anyhow::Result<()> {
    let keys = keys(args)?;
    let addresses = ClusterFile::members_of(args.controlplane.as_ref(), args.cluster.as_deref(), config)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let explained = runtime.block_on(async {
        let (address, members, nodes) = status::members_and_nodes(&addresses).await?;
        explain(&keys, &address, &members, &nodes).await
    });
    // The question to a node that says nothing may have a thread for a while.
    runtime.shutdown_background();
    let explained = explained?;
    for block in &explained {
        audience.emit(block);
    }
    audience.say(text(&explained));
    Ok(())
}

/// The keys that are asked about.
fn keys(args: &ExplainArgs) -> anyhow::Result<Vec<BlockKey>> {
    let line = match args.subject {
        Subject::Key(key) => return Ok(vec![key]),
        Subject::TraceLine(line) => line,
    };
    let trace = Trace::open(args.trace.as_deref())?;
    let Some(request) = trace.requests.get(line - 1) else {
        bail!("{} has {} lines, not {line}", trace.name, trace.requests.len());
    };
    let layout = model::llama_3_8b_scaled(args.scale.unwrap_or(SCALE_DEFAULT))?;
    Ok(engine::chain_keys(&layout, &args.tenant, request.full_blocks()))
}

async fn explain(
    keys: &[BlockKey],
    answering: &str,
    members: &MemberList,
    nodes: &[NodeInfo],
) -> anyhow::Result<Vec<Explained>> {
    let names = members.members.iter().map(|member| MemberName::new(&member.name));
    let map = ShardMap::new(Epoch(members.epoch), names.collect::<Result<Vec<_>, _>>()?)?;
    let mut known: Vec<Known> = vec![Known::default(); keys.len()];
    for (at, member) in members.members.iter().enumerate() {
        let owns = |key: &BlockKey| map.owner_of(key).is_some_and(|owner| usize::from(owner.0) == at);
        let places: Vec<usize> = (0..keys.len()).filter(|place| owns(&keys[*place])).collect();
        let of_member: Vec<BlockKey> = places.iter().map(|place| keys[*place]).collect();
        let address = if member.name == members.answering { answering } else { &member.address };
        for (place, known_there) in places.iter().zip(ask(address, &of_member).await) {
            known[*place] = known_there;
        }
    }
    let replicas = keys
        .iter()
        .zip(&known)
        .flat_map(|(key, known)| known.nodes().into_iter().map(move |node| (node, *key)));
    let whys = why::ask(nodes, replicas, why::ANSWERED_WITHIN).await;
    let blocks = keys.iter().zip(&known).enumerate().map(|(block, (key, known))| Explained {
        block,
        key: hex(&key.0),
        slot: key.hash_slot(),
        member: map.owner_of(key).map(|owner| map.members()[usize::from(owner.0)].to_string()),
        doubt: doubt(key, known, &whys, nodes),
        replicas: known.replicas.iter().map(|replica| held(key, *replica, &whys, nodes)).collect(),
        loads: nodes.iter().map(|node| (node.name.clone(), load_on(node, key, known, nodes))).collect(),
    });
    Ok(blocks.collect())
}

/// What a member knows of keys; that it does not answer is known of all of them.
async fn ask(address: &str, keys: &[BlockKey]) -> Vec<Known> {
    if keys.is_empty() {
        return Vec::new();
    }
    let asked = tokio::time::timeout(ANSWERED_WITHIN, ask_for(address, keys)).await;
    let late = |_| Err(anyhow::anyhow!("no answer within {ANSWERED_WITHIN:?}"));
    asked.unwrap_or_else(late).unwrap_or_else(|error| {
        let doubts = vec![format!("its member does not answer: {error:#}")];
        vec![Known { replicas: Vec::new(), doubts }; keys.len()]
    })
}

async fn ask_for(address: &str, keys: &[BlockKey]) -> anyhow::Result<Vec<Known>> {
    let mut client = DirectoryClient::connect(format!("http://{address}")).await.context("connecting")?;
    let mut known = Vec::with_capacity(keys.len());
    // One key a call: whether an answer is partial is said of a call.
    for key in keys {
        let request = LookupRequest { keys: BlockKey::pack(&[*key]).into(), asking_node: 0 };
        known.push(of_reply(&client.lookup(request).await.context("looking up")?.into_inner())?);
    }
    Ok(known)
}

/// What the answer for one key says.
fn of_reply(reply: &LookupReply) -> anyhow::Result<Known> {
    let (packed, rest) = reply.replicas.as_chunks::<REPLICA_BYTES>();
    ensure!(rest.is_empty() && reply.offsets.len() == 2, "the answer does not fit the question");
    let replica = |[low, high, tier, _]: &[u8; REPLICA_BYTES]| {
        Some((u32::from(u16::from_le_bytes([*low, *high])), Tier::from_wire(*tier)?))
    };
    let mut known = Known { replicas: packed.iter().filter_map(replica).collect(), doubts: Vec::new() };
    if !reply.elsewhere.is_empty() {
        known.doubts.push("its member does not own the slot at this moment: the map is changing".to_owned());
    } else if reply.partial > 0 {
        known.doubts.push("some node has not announced its inventory of the slot yet".to_owned());
    }
    if known.may_lack_some() {
        known.doubts.push(format!("its member names {REPLICAS_PER_KEY_MAX} replicas: there may be more"));
    }
    Ok(known)
}

fn held(key: &BlockKey, (node, tier): (u32, Tier), whys: &Whys, nodes: &[NodeInfo]) -> Held {
    let why = whys.get(&(node, *key)).and_then(|why| why.as_ref().ok().copied());
    Held { node: name_of(node, nodes), tier: tier_name(tier), why }
}

/// Why what is known of a block is not the whole truth, if it is not.
fn doubt(key: &BlockKey, known: &Known, whys: &Whys, nodes: &[NodeInfo]) -> Option<String> {
    let unknown = |node: u32| {
        let error = whys.get(&(node, *key))?.as_ref().err()?;
        Some(format!("why it is on {} is not known: {error}", name_of(node, nodes)))
    };
    let doubts: Vec<String> =
        known.doubts.iter().cloned().chain(known.nodes().into_iter().filter_map(unknown)).collect();
    (!doubts.is_empty()).then(|| doubts.join("; "))
}

fn name_of(number: u32, nodes: &[NodeInfo]) -> String {
    let named = nodes.iter().find(|node| node.node == number);
    named.map_or_else(|| format!("node {number}"), |node| node.name.clone())
}

fn tier_name(tier: Tier) -> &'static str {
    match tier {
        Tier::Dram => "DRAM",
        Tier::Nvme => "NVMe",
    }
}

/// Where a load on a node would get the block from: its own tiers, then the peer that an agent takes that wants nothing of
/// any now. Its own tiers may be among those that are not named.
fn load_on(node: &NodeInfo, key: &BlockKey, known: &Known, nodes: &[NodeInfo]) -> String {
    let Known { replicas, .. } = known;
    let own = |tier| replicas.contains(&(node.node, tier));
    if own(Tier::Dram) {
        return "own DRAM".to_owned();
    }
    if own(Tier::Nvme) {
        return "own NVMe".to_owned();
    }
    let reachable = |number: u32| {
        nodes.iter().any(|peer| peer.node == number && peer.alive && !peer.peer_address.is_empty())
    };
    let arrival = |(peer, tier): &(u32, Tier)| {
        let number = NodeId(u16::try_from(*peer).ok()?);
        let named = nodes.iter().find(|named| named.node == *peer)?;
        let near = !node.failure_domain.is_empty() && named.failure_domain == node.failure_domain;
        let load = LoadHint(named.usage.as_ref().map_or(0, |usage| usage.queued_bytes)).class();
        let seen = Peer { domain: if near { OWN_DOMAIN } else { Domain::default() }, load };
        reachable(*peer).then(|| Arrival::of(key, (number, *tier), seen, OWN_DOMAIN))
    };
    let elsewhere = match replicas.iter().filter_map(arrival).min() {
        Some(best) => format!("{} of {}", tier_name(best.tier()), name_of(u32::from(best.node().0), nodes)),
        None => "recompute".to_owned(),
    };
    if known.may_lack_some() { format!("{elsewhere}, unless it has the block itself") } else { elsewhere }
}

fn text(blocks: &[Explained]) -> String {
    let mut table = Table::new(&["block", "key", "slot", "member", "replicas", "why", "a load", ""]);
    for block in blocks {
        let list = |items: Vec<String>| if items.is_empty() { "none".to_owned() } else { items.join(", ") };
        table.row(vec![
            block.block.to_string(),
            block.key.clone(),
            block.slot.to_string(),
            block.member.clone().unwrap_or_else(|| "nobody".to_owned()),
            list(block.replicas.iter().map(|held| format!("{} {}", held.node, held.tier)).collect()),
            list(reasons(&block.replicas)),
            list(block.loads.iter().map(|(node, from)| format!("{node}: {from}")).collect()),
            block.doubt.clone().unwrap_or_default(),
        ]);
    }
    table.render()
}

/// Why each node has a block, one line for its tiers together.
fn reasons(replicas: &[Held]) -> Vec<String> {
    let of_nodes: BTreeMap<&str, &str> =
        replicas.iter().filter_map(|held| Some((held.node.as_str(), held.why?))).collect();
    of_nodes.into_iter().map(|(node, why)| format!("{node}: {why}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: BlockKey = BlockKey([7; 16]);

    fn node(number: u32, alive: bool) -> NodeInfo {
        NodeInfo {
            node: number,
            name: format!("n{number}"),
            peer_address: "host:1".to_owned(),
            alive,
            ..NodeInfo::default()
        }
    }

    #[test]
    fn a_subject_is_a_key_or_a_line_and_anything_else_is_refused_with_words() {
        let key = "00112233445566778899aabbccddeeFF";
        let Ok(Subject::Key(parsed)) = key.parse() else { panic!("a key") };
        assert_eq!(hex(&parsed.0), key.to_lowercase());
        assert_eq!("17".parse(), Ok(Subject::TraceLine(17)));
        for text in ["", "0", "-1", "00112233445566778899aabbccddee", "00112233445566778899aabbccddeegg"] {
            let refused = text.parse::<Subject>().expect_err(text);
            assert!(refused.contains("32 hexadecimal digits"), "{refused}");
        }
    }

    #[test]
    fn a_load_takes_what_is_nearest_and_never_a_dead_node() {
        let nodes = [node(1, true), node(2, true), node(3, false)];
        let on = |replicas: &[(u32, Tier)]| {
            let known = Known { replicas: replicas.to_vec(), doubts: Vec::new() };
            load_on(&nodes[0], &KEY, &known, &nodes)
        };
        assert_eq!(on(&[(2, Tier::Dram), (1, Tier::Nvme), (1, Tier::Dram)]), "own DRAM");
        assert_eq!(on(&[(2, Tier::Dram), (1, Tier::Nvme)]), "own NVMe");
        assert_eq!(on(&[(3, Tier::Dram), (2, Tier::Nvme)]), "NVMe of n2");
        assert_eq!(on(&[(3, Tier::Dram)]), "recompute");
        assert_eq!(on(&[]), "recompute");
    }

    #[test]
    fn an_answer_says_what_it_does_not_know() {
        let reply = |elsewhere: Vec<u32>, partial| LookupReply {
            offsets: vec![0, 1],
            replicas: vec![2, 1, 2, 0].into(),
            elsewhere,
            partial,
            ..LookupReply::default()
        };
        let whole = of_reply(&reply(Vec::new(), 0)).expect("fits");
        assert_eq!(
            (whole.replicas.as_slice(), whole.doubts.is_empty()),
            ([(258, Tier::Nvme)].as_slice(), true)
        );
        let doubts = |reply| of_reply(&reply).expect("fits").doubts.join("; ");
        assert!(doubts(reply(Vec::new(), 1)).contains("announced"));
        assert!(doubts(reply(vec![0], 0)).contains("own"));
        assert!(of_reply(&LookupReply::default()).is_err());
    }

    #[test]
    fn of_a_block_that_many_nodes_have_not_all_need_be_named() {
        let held = |nodes: std::ops::RangeInclusive<u8>| LookupReply {
            offsets: vec![0, u32::from(nodes.end() - nodes.start()) + 1],
            replicas: nodes.flat_map(|node| [node, 0, 1, 0]).collect::<Vec<u8>>().into(),
            ..LookupReply::default()
        };
        let nodes: Vec<NodeInfo> = (1..=20).map(|number| node(number, true)).collect();
        let (some, most) = (of_reply(&held(1..=15)).expect("fits"), of_reply(&held(1..=16)).expect("fits"));
        assert_eq!(doubt(&KEY, &some, &Whys::new(), &nodes), None);
        assert!(doubt(&KEY, &most, &Whys::new(), &nodes).is_some_and(|doubt| doubt.contains("more")));
        let on = |number: usize, known| load_on(&nodes[number - 1], &KEY, known, &nodes);
        assert_eq!((on(16, &most), on(1, &some)), ("own DRAM".to_owned(), "own DRAM".to_owned()));
        assert!(on(17, &most).ends_with("unless it has the block itself"), "{}", on(17, &most));
        assert!(!on(17, &some).contains("unless"));
    }

    #[test]
    fn a_replica_has_its_reason_and_one_without_has_a_doubt() {
        let nodes = [node(1, true), node(2, true)];
        let replicas = vec![(1, Tier::Dram), (1, Tier::Nvme), (2, Tier::Nvme)];
        let known = Known { replicas, doubts: vec!["not all is known".to_owned()] };
        let whys = Whys::from([((1, KEY), Ok("saved here")), ((2, KEY), Err("no answer".to_owned()))]);
        let held: Vec<Held> =
            known.replicas.iter().map(|replica| held(&KEY, *replica, &whys, &nodes)).collect();
        assert_eq!(
            held.iter().map(|held| held.why).collect::<Vec<_>>(),
            [Some("saved here"), Some("saved here"), None]
        );
        let printed = serde_json::to_value(&held[2]).expect("JSON");
        assert_eq!(printed, serde_json::json!({ "node": "n2", "tier": "NVMe" }));
        assert_eq!(reasons(&held), ["n1: saved here"]);
        assert_eq!(
            doubt(&KEY, &known, &whys, &nodes).as_deref(),
            Some("not all is known; why it is on n2 is not known: no answer")
        );
    }
}
