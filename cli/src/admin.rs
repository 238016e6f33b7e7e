//! `reprise admin`: pins, prefetches, demotes and deletes blocks of nodes, and reports how many.
//!
//! The command opens a session with each agent, as an engine of the tenant does: it has the rights of a tenant, not more.
//! It selects blocks by the tokens of a prompt, whose keys it derives like an engine, by keys, by the hints of a session,
//! or by the namespace.
//!
//! An agent answers at once. A prefetch continues after the answer; pins end with their time.

mod selection;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, ensure};
use reprise_client::{
    BlockAction, BlockCommand, BlockCounts, BlockReport, BlockSelection, Client, ConnectOptions, LoadOptions,
    RetentionUsage,
};
use reprise_policy::session::Ranks;
use reprise_policy::{Interval, TenantName};
use reprise_testkit::cluster::ClusterFile;
use serde::Serialize;

use crate::config::Config;
use reprise_testkit::output::{Audience, Table, bytes_text};
use selection::{SelectArgs, Selected, SelectedBlocks};

/// Deadline of `prefetch --from-peers`.
const FETCH_DEADLINE: Duration = Duration::from_secs(30);

/// Arguments of `reprise admin`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct AdminArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Clone, Debug, clap::Subcommand)]
enum Action {
    /// Keep blocks from eviction for a limited time.
    ///
    /// A retention pin keeps the copies that a block has now, in DRAM and on NVMe. It counts against a share of the
    /// tenant's limits, and ends with its time, with `unpin`, or with the agent. Pinning again sets a new time.
    Pin {
        /// End the pins after this time.
        #[arg(long, value_name = "DURATION", default_value = "10m")]
        ttl: Interval,
        #[command(flatten)]
        target: TargetArgs,
    },
    /// End retention pins.
    Unpin(TargetArgs),
    /// Start to read blocks from NVMe into DRAM, behind all other reads.
    Prefetch {
        /// Also fetch blocks that only peers have.
        ///
        /// All blocks are then read with the rank of loads, and the command waits for them. Not with --session,
        /// --all-blocks or --all-ranks.
        #[arg(long)]
        from_peers: bool,
        #[command(flatten)]
        target: TargetArgs,
    },
    /// Drop copies in DRAM of blocks that are also on NVMe.
    Demote(TargetArgs),
    /// Remove blocks from nodes; copies of other nodes remain.
    Delete(TargetArgs),
}

/// Agents and blocks of a command.
#[derive(Clone, Debug, clap::Args)]
struct TargetArgs {
    /// Connect to the agent at this socket; repeat for several agents.
    ///
    /// By default the command uses all agents of the running cluster.
    #[arg(long, value_name = "PATH")]
    socket: Vec<PathBuf>,
    /// Read the agents' addresses from this directory.
    ///
    /// By default the command reads the directory of `reprise demo --hold`.
    #[arg(long, value_name = "DIR")]
    cluster: Option<PathBuf>,
    /// Change blocks of this tenant.
    #[arg(long, value_name = "NAME", default_value = "default")]
    tenant: TenantName,
    /// Authenticate with the service account token in this file.
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    #[command(flatten)]
    select: SelectArgs,
}

/// One line of `reprise admin --json`: the answer of one agent.
#[derive(Debug, Serialize)]
struct NodeReport {
    node: String,
    action: &'static str,
    #[serde(flatten)]
    counts: Counts,
    retention: Pins,
}

/// Numbers of blocks by outcome.
#[derive(Debug, Serialize)]
struct Counts {
    /// Blocks on the node: affected, unchanged and refused ones.
    found: u64,
    affected: u64,
    unchanged: u64,
    refused: u64,
    /// Refused because of a limit.
    over_limit: u64,
    /// Refused because they are in use, or their only copy is in DRAM.
    in_use: u64,
    /// Refused because of a retention pin.
    pinned: u64,
    absent: u64,
    /// Slot bytes of the changed copies.
    bytes: u64,
}

/// Retention pins of the tenant on the node.
#[derive(Debug, Serialize)]
struct Pins {
    blocks: u64,
    blocks_max: u64,
    dram_bytes: u64,
    dram_bytes_max: u64,
    nvme_bytes: u64,
    nvme_bytes_max: u64,
}

/// A change, with the options that only one of them has.
#[derive(Clone, Copy, Debug)]
struct Change {
    action: BlockAction,
    from_peers: bool,
}

pub(crate) fn command(args: &AdminArgs, config: &Config, audience: Audience) -> anyhow::Result<()> {
    let change = |action| Change { action, from_peers: false };
    let (change, target) = match &args.action {
        Action::Pin { ttl, target } => (change(BlockAction::Pin { ttl: ttl.0 }), target),
        Action::Unpin(target) => (change(BlockAction::Unpin), target),
        Action::Prefetch { from_peers, target } => {
            (Change { action: BlockAction::Prefetch, from_peers: *from_peers }, target)
        }
        Action::Demote(target) => (change(BlockAction::Demote), target),
        Action::Delete(target) => (change(BlockAction::Delete), target),
    };
    let sockets = target.sockets(config)?;
    let selected = target.select.resolve()?;
    let is_of_session = matches!(selected.blocks, SelectedBlocks::Fixed(BlockSelection::Listed(_)));
    ensure!(
        !is_of_session || sockets.len() == 1,
        "--session selects blocks of one agent, but the command has {}: name it with --socket",
        sockets.len()
    );
    ensure!(
        !change.from_peers || (selected.has_keys() && selected.ranks == Ranks::Own),
        "--from-peers needs keys of one rank, because a node knows only its own blocks: select them by --tokens, \
         --tokens-file, --trace-line or --key, and without --all-ranks"
    );
    let mut reports = Vec::with_capacity(sockets.len());
    for socket in &sockets {
        let report = change.apply(target, &selected, socket);
        let report = report.with_context(|| format!("the agent at {}", socket.display()))?;
        audience.emit(&report);
        reports.push(report);
    }
    audience.print_line(text(&reports));
    Ok(())
}

impl TargetArgs {
    /// Returns the agents' sockets from the arguments or the cluster directory.
    fn sockets(&self, config: &Config) -> anyhow::Result<Vec<PathBuf>> {
        if !self.socket.is_empty() {
            return Ok(self.socket.clone());
        }
        let directory = config.cluster.directory(self.cluster.as_deref());
        Ok(ClusterFile::read(&directory)?.agents.into_iter().map(|agent| agent.socket).collect())
    }
}

impl Change {
    fn apply(self, target: &TargetArgs, selected: &Selected, socket: &PathBuf) -> anyhow::Result<NodeReport> {
        let options = ConnectOptions::new(socket, selected.namespace, selected.layout)
            .client_name("reprise-admin")
            .tenant(target.tenant.clone());
        let options = match &target.token_file {
            Some(path) => options.token_file(path),
            None => options,
        };
        let client = Client::connect(options)?;
        let (action, ranks) = (self.action, selected.ranks);
        let selection = selected.selection(client.namespace());
        let command = BlockCommand { action, selection, ranks };
        let BlockReport { mut counts, retention, .. } = client.manage_all(&command)?;
        if let (true, BlockSelection::Keys(keys)) = (self.from_peers, &command.selection) {
            let options = LoadOptions { deadline: FETCH_DEADLINE, ..LoadOptions::default() };
            let there = client.prefetch(keys, &options)? as u64;
            let (all, affected) = (keys.len() as u64, there.saturating_sub(counts.unchanged));
            let bytes = affected * selected.layout.slot_bytes();
            let (unchanged, absent) = (counts.unchanged.min(there), all.saturating_sub(there));
            counts = BlockCounts { affected, unchanged, absent, bytes, ..BlockCounts::default() };
        }
        let node = client.node().to_owned();
        Ok(NodeReport { node, action: name(action), counts: counts.into(), retention: retention.into() })
    }
}

fn name(action: BlockAction) -> &'static str {
    match action {
        BlockAction::Pin { .. } => "pin",
        BlockAction::Unpin => "unpin",
        BlockAction::Prefetch => "prefetch",
        BlockAction::Demote => "demote",
        BlockAction::Delete => "delete",
    }
}

impl From<BlockCounts> for Counts {
    fn from(counts: BlockCounts) -> Counts {
        let (found, refused) = (counts.found(), counts.refused());
        let BlockCounts { affected, unchanged, absent, over_limit, in_use, pinned, bytes } = counts;
        Counts { found, affected, unchanged, refused, over_limit, in_use, pinned, absent, bytes }
    }
}

impl From<RetentionUsage> for Pins {
    fn from(usage: RetentionUsage) -> Pins {
        let RetentionUsage { blocks, blocks_max, dram_bytes, dram_bytes_max, nvme_bytes, nvme_bytes_max } =
            usage;
        Pins { blocks, blocks_max, dram_bytes, dram_bytes_max, nvme_bytes, nvme_bytes_max }
    }
}

fn text(reports: &[NodeReport]) -> String {
    let mut table =
        Table::new(&["node", "action", "found", "affected", "unchanged", "refused", "absent", "bytes"]);
    for NodeReport { node, action, counts, .. } in reports {
        table.row(vec![
            node.clone(),
            (*action).to_owned(),
            counts.found.to_string(),
            counts.affected.to_string(),
            counts.unchanged.to_string(),
            counts.refused.to_string(),
            counts.absent.to_string(),
            bytes_text(counts.bytes),
        ]);
    }
    let refusals: Vec<String> = reports.iter().filter_map(refusal).collect();
    format!("{}{}", table.render(), refusals.concat())
}

/// Explains why a node has refused blocks, with the remedy.
fn refusal(report: &NodeReport) -> Option<String> {
    let NodeReport { node, action, counts, retention } = report;
    let mut text = String::new();
    if counts.over_limit > 0 && *action == "pin" {
        text += &format!(
            "\n{node} refused {} blocks: the tenant pins {} of at most {} blocks, {} of {} in DRAM and {} of {} on NVMe. \
             Unpin some, or raise [retention] in the agent's configuration, in Kubernetes spec.cache.retention of the \
             KVCacheCluster.\n",
            counts.over_limit,
            retention.blocks,
            retention.blocks_max,
            bytes_text(retention.dram_bytes),
            bytes_text(retention.dram_bytes_max),
            bytes_text(retention.nvme_bytes),
            bytes_text(retention.nvme_bytes_max),
        );
    } else if counts.over_limit > 0 {
        text += &format!(
            "\n{node} did not start {} reads: the reserve of [prefetch] is full. Repeat the command when loads have used \
             the blocks.\n",
            counts.over_limit
        );
    }
    if counts.in_use > 0 {
        text += &format!(
            "\n{node} refused {} blocks: loads, saves or transfers use them, or their only copy is in DRAM. Repeat the \
             command later.\n",
            counts.in_use
        );
    }
    if counts.pinned > 0 {
        text +=
            &format!("\n{node} refused {} blocks with a retention pin: unpin them first.\n", counts.pinned);
    }
    (!text.is_empty()).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(action: &'static str, counts: BlockCounts) -> NodeReport {
        let retention = RetentionUsage { blocks: 3, blocks_max: 4, ..RetentionUsage::default() };
        NodeReport { node: "a".to_owned(), action, counts: counts.into(), retention: retention.into() }
    }

    #[test]
    fn refusals_are_explained_with_the_remedy() {
        let counts = BlockCounts {
            affected: 1,
            over_limit: 2,
            in_use: 3,
            pinned: 4,
            absent: 5,
            ..BlockCounts::default()
        };
        let pin = report("pin", counts);
        assert_eq!((pin.counts.found, pin.counts.refused), (10, 9));
        let words = text(&[pin]);
        for part in [
            "2 blocks: the tenant pins 3 of at most 4",
            "[retention]",
            "spec.cache.retention",
            "3 blocks: loads",
            "unpin them first",
        ] {
            assert!(words.contains(part), "{words}");
        }
        assert!(text(&[report("prefetch", counts)]).contains("[prefetch]"));
        assert_eq!(refusal(&report("demote", BlockCounts { affected: 1, ..BlockCounts::default() })), None);
    }

    #[test]
    fn json_is_one_flat_object_with_the_pins_of_the_tenant() {
        let object =
            serde_json::to_value(report("pin", BlockCounts { affected: 7, ..BlockCounts::default() }));
        let object = object.expect("JSON");
        assert_eq!((object["found"].as_u64(), object["affected"].as_u64()), (Some(7), Some(7)));
        assert_eq!(object["retention"]["blocks_max"].as_u64(), Some(4));
    }
}
