//! `reprise explain`: where a block is and why, which member's directory lists it, and how each node would
//! load it.
//!
//! The subject is a block key or a line of a trace, whose prompt is a chain of blocks. The command follows an
//! agent's look-up: it computes the key's hash slot and asks the member that owns the slot by the shard map.
//! It asks the node of each replica for the reason why the block is there. Incomplete answers are marked with
//! a doubt.

mod reasons;

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

use crate::config::Config;
use crate::members::{Members, MembersArgs, endpoint, runtime};
use crate::{salts, status};
use reasons::Reasons;
use reprise_testkit::engine;
use reprise_testkit::model::{self, SCALE_DEFAULT, hex};
use reprise_testkit::output::{Audience, Table};
use reprise_testkit::trace::Trace;

/// Timeout of one look-up at a member.
const ANSWERED_WITHIN: Duration = Duration::from_secs(5);

/// Bytes of a packed replica: u16 node, u8 tier, u8 load class.
const REPLICA_BYTES: usize = 4;

/// Failure domain of the loading node; all other domains compare as different.
const OWN_DOMAIN: Domain = Domain(1);

/// Arguments of `reprise explain`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ExplainArgs {
    /// Explain this block (32 hexadecimal digits) or line of the trace.
    ///
    /// Trace lines are numbered from 1; the command explains all blocks of the line's prompt.
    #[arg(value_name = "KEY|TRACE-LINE")]
    subject: Subject,
    /// Read this trace [default: that of `reprise replay`].
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Divide the bytes of Llama-3-8B's KV cache by SCALE [default: 1024].
    ///
    /// Must be a power of two.
    #[arg(long)]
    scale: Option<u32>,
    /// Explain blocks of this tenant.
    #[arg(long, value_name = "NAME", default_value = "default")]
    tenant: TenantName,
    /// Derive the keys of a tenant's blocks with the isolation salt in this file.
    ///
    /// Trace lines of a tenant other than 'default' need it: a file of the folder session.salts of an agent.
    #[arg(long, value_name = "FILE")]
    salt_file: Option<PathBuf>,
    #[command(flatten)]
    members: MembersArgs,
}

/// Argument of the command: one block, or all blocks of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Subject {
    Key(BlockKey),
    /// Line number, from 1.
    TraceLine(usize),
}

/// One line of `reprise explain --json`.
#[derive(Debug, Serialize)]
struct BlockExplanation {
    /// Index of the block in the chain, from 0.
    block: usize,
    key: String,
    slot: u16,
    /// Owner of the slot by the shard map; `null` if there are no members.
    member: Option<String>,
    /// Reasons why the explanation may be incomplete; `null` if it is complete.
    doubt: Option<String>,
    replicas: Vec<ReplicaEntry>,
    /// Source of a load on each node, by node name.
    loads: BTreeMap<String, String>,
}

/// One replica of a block.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct ReplicaEntry {
    node: String,
    tier: &'static str,
    /// Reason why the block is on the node; absent if the node did not report one.
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<&'static str>,
}

/// Replicas of a key that a member's directory lists.
#[derive(Clone, Debug, Default)]
struct KnownReplicas {
    /// Node number and tier.
    replicas: Vec<(u32, Tier)>,
    /// Reasons why the list may be incomplete.
    doubts: Vec<String>,
}

impl KnownReplicas {
    /// Whether more replicas may exist: a look-up returns at most [`REPLICAS_PER_KEY_MAX`].
    fn may_be_truncated(&self) -> bool {
        self.replicas.len() >= REPLICAS_PER_KEY_MAX
    }

    /// Returns the numbers of the nodes with a replica.
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
            _ => {
                Err("expected a key of 32 hexadecimal digits, or a line number of the trace, from 1"
                    .to_owned())
            }
        }
    }
}

pub(crate) fn command(args: &ExplainArgs, config: &Config, audience: Audience) -> anyhow::Result<()> {
    let keys = keys(args)?;
    let asked = args.members.find(config)?;
    let runtime = runtime()?;
    let explained = runtime.block_on(async {
        let (address, members, nodes) = status::members_and_nodes(&asked).await?;
        explain(&keys, (&asked, &address), &members, &nodes).await
    });
    // A request to a hanging node may still block a thread; it must not delay the exit.
    runtime.shutdown_background();
    let explained = explained?;
    for block in &explained {
        audience.emit(block);
    }
    audience.print_line(text(&explained));
    Ok(())
}

/// Returns the key of the subject, or the keys of the trace line's prompt.
fn keys(args: &ExplainArgs) -> anyhow::Result<Vec<BlockKey>> {
    let line = match args.subject {
        Subject::Key(key) => return Ok(vec![key]),
        Subject::TraceLine(line) => line,
    };
    let trace = Trace::open(args.trace.as_deref())?;
    let Some(request) = trace.requests.get(line - 1) else {
        bail!("line {line} does not exist: {} has {} lines", trace.name, trace.requests.len());
    };
    let layout = model::llama_3_8b_scaled(args.scale.unwrap_or(SCALE_DEFAULT))?;
    let salt = match &args.salt_file {
        Some(path) => Some(salts::read(path)?),
        None => None,
    };
    ensure!(
        salt.is_some() != (args.tenant == TenantName::default_tenant()),
        "keys of tenant '{}' need --salt-file with its isolation salt, and those of tenant 'default' need none: pass \
         both --tenant and --salt-file, or neither",
        args.tenant
    );
    Ok(engine::chain_keys(&engine::namespace(&layout).of_tenant(salt.as_ref()), request.full_blocks()))
}

async fn explain(
    keys: &[BlockKey],
    (asked, answering): (&Members, &str),
    members: &MemberList,
    nodes: &[NodeInfo],
) -> anyhow::Result<Vec<BlockExplanation>> {
    let names = members.members.iter().map(|member| MemberName::new(&member.name));
    let map = ShardMap::new(Epoch(members.epoch), names.collect::<Result<Vec<_>, _>>()?)?;
    let mut known: Vec<KnownReplicas> = vec![KnownReplicas::default(); keys.len()];
    for (at, member) in members.members.iter().enumerate() {
        let owns = |key: &BlockKey| map.owner_of(key).is_some_and(|owner| usize::from(owner.0) == at);
        let places: Vec<usize> = (0..keys.len()).filter(|place| owns(&keys[*place])).collect();
        let of_member: Vec<BlockKey> = places.iter().map(|place| keys[*place]).collect();
        let address = if member.name == members.answering { answering } else { &member.address };
        for (place, known_there) in places.iter().zip(look_up(asked, address, &of_member).await) {
            known[*place] = known_there;
        }
    }
    let replicas = keys
        .iter()
        .zip(&known)
        .flat_map(|(key, known)| known.nodes().into_iter().map(move |node| (node, *key)));
    let reasons = reasons::ask(asked, nodes, replicas, reasons::ANSWERED_WITHIN).await;
    let blocks = keys.iter().zip(&known).enumerate().map(|(block, (key, known))| BlockExplanation {
        block,
        key: hex(&key.0),
        slot: key.hash_slot(),
        member: map.owner_of(key).map(|owner| map.members()[usize::from(owner.0)].to_string()),
        doubt: doubt(key, known, &reasons, nodes),
        replicas: known.replicas.iter().map(|replica| entry(key, *replica, &reasons, nodes)).collect(),
        loads: nodes.iter().map(|node| (node.name.clone(), load_on(node, key, known, nodes))).collect(),
    });
    Ok(blocks.collect())
}

/// Looks up keys at a member. If the member does not answer, each result has that error as a doubt.
async fn look_up(asked: &Members, address: &str, keys: &[BlockKey]) -> Vec<KnownReplicas> {
    if keys.is_empty() {
        return Vec::new();
    }
    let found = tokio::time::timeout(ANSWERED_WITHIN, try_look_up(asked, address, keys)).await;
    let late = |_| Err(anyhow::anyhow!("no answer within {ANSWERED_WITHIN:?}"));
    found.unwrap_or_else(late).unwrap_or_else(|error| {
        let doubts = vec![format!("the owner of the slot does not answer: {error:#}")];
        vec![KnownReplicas { replicas: Vec::new(), doubts }; keys.len()]
    })
}

async fn try_look_up(
    asked: &Members,
    address: &str,
    keys: &[BlockKey],
) -> anyhow::Result<Vec<KnownReplicas>> {
    let mut client = DirectoryClient::new(asked.connect(address, &endpoint(address)?).await?);
    let mut known = Vec::with_capacity(keys.len());
    // One key per call, because a reply reports partial slots for the whole call.
    for key in keys {
        let request = LookupRequest { keys: BlockKey::pack(&[*key]).into(), asking_node: 0 };
        known.push(parse_reply(&client.lookup(request).await.context("looking up")?.into_inner())?);
    }
    Ok(known)
}

/// Parses the reply to a look-up of one key.
fn parse_reply(reply: &LookupReply) -> anyhow::Result<KnownReplicas> {
    let (packed, rest) = reply.replicas.as_chunks::<REPLICA_BYTES>();
    ensure!(rest.is_empty() && reply.offsets.len() == 2, "invalid look-up reply: expected one key");
    let replica = |[low, high, tier, _]: &[u8; REPLICA_BYTES]| {
        Some((u32::from(u16::from_le_bytes([*low, *high])), Tier::from_wire(*tier)?))
    };
    let mut known =
        KnownReplicas { replicas: packed.iter().filter_map(replica).collect(), doubts: Vec::new() };
    if !reply.elsewhere.is_empty() {
        known.doubts.push("the member does not own the slot now: the shard map is changing".to_owned());
    } else if reply.partial > 0 {
        known.doubts.push("a node has not announced its inventory of the slot yet".to_owned());
    }
    if known.may_be_truncated() {
        known
            .doubts
            .push(format!("the member lists at most {REPLICAS_PER_KEY_MAX} replicas: more may exist"));
    }
    Ok(known)
}

fn entry(key: &BlockKey, (node, tier): (u32, Tier), reasons: &Reasons, nodes: &[NodeInfo]) -> ReplicaEntry {
    let why = reasons.get(&(node, *key)).and_then(|why| why.as_ref().ok().copied());
    ReplicaEntry { node: name_of(node, nodes), tier: tier_name(tier), why }
}

/// Returns the reasons why the explanation of a block may be incomplete, or `None` if it is complete.
fn doubt(key: &BlockKey, known: &KnownReplicas, reasons: &Reasons, nodes: &[NodeInfo]) -> Option<String> {
    let unknown = |node: u32| {
        let error = reasons.get(&(node, *key))?.as_ref().err()?;
        Some(format!("unknown why the block is on {}: {error}", name_of(node, nodes)))
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

/// Returns the source of a load on a node: its own tiers, else the peer that an agent without pending
/// requests selects.
///
/// If the list of replicas is truncated, the node itself may have a replica that is not listed.
fn load_on(node: &NodeInfo, key: &BlockKey, known: &KnownReplicas, nodes: &[NodeInfo]) -> String {
    let KnownReplicas { replicas, .. } = known;
    let own = |tier| replicas.contains(&(node.node, tier));
    if own(Tier::Dram) {
        return "own DRAM".to_owned();
    }
    if own(Tier::Nvme) {
        return "own NVMe".to_owned();
    }
    let reachable = |number: u32| {
        nodes.iter().any(|peer| peer.node == number && peer.alive && !peer.peer_endpoints.is_empty())
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
    if known.may_be_truncated() { format!("{elsewhere}, unless the node has the block") } else { elsewhere }
}

fn text(blocks: &[BlockExplanation]) -> String {
    let mut table = Table::new(&["block", "key", "slot", "member", "replicas", "why", "loads from", "doubt"]);
    for block in blocks {
        let list = |items: Vec<String>| if items.is_empty() { "none".to_owned() } else { items.join(", ") };
        table.row(vec![
            block.block.to_string(),
            block.key.clone(),
            block.slot.to_string(),
            block.member.clone().unwrap_or_else(|| "none".to_owned()),
            list(block.replicas.iter().map(|entry| format!("{} {}", entry.node, entry.tier)).collect()),
            list(reason_texts(&block.replicas)),
            list(block.loads.iter().map(|(node, from)| format!("{node}: {from}")).collect()),
            block.doubt.clone().unwrap_or_default(),
        ]);
    }
    table.render()
}

/// Returns one line per node with the reason why it has the block; the reason covers all its tiers.
fn reason_texts(replicas: &[ReplicaEntry]) -> Vec<String> {
    let of_nodes: BTreeMap<&str, &str> =
        replicas.iter().filter_map(|entry| Some((entry.node.as_str(), entry.why?))).collect();
    of_nodes.into_iter().map(|(node, why)| format!("{node}: {why}")).collect()
}

#[cfg(test)]
mod tests {
    use reprise_proto::controlplane::PeerEndpoint;

    use super::*;

    const KEY: BlockKey = BlockKey([7; 16]);

    fn node(number: u32, alive: bool) -> NodeInfo {
        NodeInfo {
            node: number,
            name: format!("n{number}"),
            peer_endpoints: vec![PeerEndpoint::tcp("host:1")],
            alive,
            ..NodeInfo::default()
        }
    }

    #[test]
    fn subject_is_a_key_or_a_line_number() {
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
    fn load_prefers_the_nearest_replica_and_skips_dead_nodes() {
        let nodes = [node(1, true), node(2, true), node(3, false)];
        let on = |replicas: &[(u32, Tier)]| {
            let known = KnownReplicas { replicas: replicas.to_vec(), doubts: Vec::new() };
            load_on(&nodes[0], &KEY, &known, &nodes)
        };
        assert_eq!(on(&[(2, Tier::Dram), (1, Tier::Nvme), (1, Tier::Dram)]), "own DRAM");
        assert_eq!(on(&[(2, Tier::Dram), (1, Tier::Nvme)]), "own NVMe");
        assert_eq!(on(&[(3, Tier::Dram), (2, Tier::Nvme)]), "NVMe of n2");
        assert_eq!(on(&[(3, Tier::Dram)]), "recompute");
        assert_eq!(on(&[]), "recompute");
    }

    #[test]
    fn reply_with_partial_or_foreign_slots_has_doubts() {
        let reply = |elsewhere: Vec<u32>, partial| LookupReply {
            offsets: vec![0, 1],
            replicas: vec![2, 1, 2, 0].into(),
            elsewhere,
            partial,
            ..LookupReply::default()
        };
        let whole = parse_reply(&reply(Vec::new(), 0)).expect("valid");
        assert_eq!(
            (whole.replicas.as_slice(), whole.doubts.is_empty()),
            ([(258, Tier::Nvme)].as_slice(), true)
        );
        let doubts = |reply| parse_reply(&reply).expect("valid").doubts.join("; ");
        assert!(doubts(reply(Vec::new(), 1)).contains("announced"));
        assert!(doubts(reply(vec![0], 0)).contains("own"));
        assert!(parse_reply(&LookupReply::default()).is_err());
    }

    #[test]
    fn truncated_list_of_replicas_is_reported() {
        let listed = |nodes: std::ops::RangeInclusive<u8>| LookupReply {
            offsets: vec![0, u32::from(nodes.end() - nodes.start()) + 1],
            replicas: nodes.flat_map(|node| [node, 0, 1, 0]).collect::<Vec<u8>>().into(),
            ..LookupReply::default()
        };
        let nodes: Vec<NodeInfo> = (1..=20).map(|number| node(number, true)).collect();
        let (some, most) =
            (parse_reply(&listed(1..=15)).expect("valid"), parse_reply(&listed(1..=16)).expect("valid"));
        assert_eq!(doubt(&KEY, &some, &Reasons::new(), &nodes), None);
        assert!(doubt(&KEY, &most, &Reasons::new(), &nodes).is_some_and(|doubt| doubt.contains("more")));
        let on = |number: usize, known| load_on(&nodes[number - 1], &KEY, known, &nodes);
        assert_eq!((on(16, &most), on(1, &some)), ("own DRAM".to_owned(), "own DRAM".to_owned()));
        assert!(on(17, &most).ends_with("unless the node has the block"), "{}", on(17, &most));
        assert!(!on(17, &some).contains("unless"));
    }

    #[test]
    fn replica_without_a_reason_causes_a_doubt() {
        let nodes = [node(1, true), node(2, true)];
        let replicas = vec![(1, Tier::Dram), (1, Tier::Nvme), (2, Tier::Nvme)];
        let known = KnownReplicas { replicas, doubts: vec!["the list is incomplete".to_owned()] };
        let reasons = Reasons::from([((1, KEY), Ok("saved here")), ((2, KEY), Err("no answer".to_owned()))]);
        let entries: Vec<ReplicaEntry> =
            known.replicas.iter().map(|replica| entry(&KEY, *replica, &reasons, &nodes)).collect();
        assert_eq!(
            entries.iter().map(|entry| entry.why).collect::<Vec<_>>(),
            [Some("saved here"), Some("saved here"), None]
        );
        let printed = serde_json::to_value(&entries[2]).expect("JSON");
        assert_eq!(printed, serde_json::json!({ "node": "n2", "tier": "NVMe" }));
        assert_eq!(reason_texts(&entries), ["n1: saved here"]);
        assert_eq!(
            doubt(&KEY, &known, &reasons, &nodes).as_deref(),
            Some("the list is incomplete; unknown why the block is on n2: no answer")
        );
    }
}
