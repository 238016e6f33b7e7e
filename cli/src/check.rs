//! `reprise check`: exchanges one verified block between each pair of nodes; `helm test` runs it.
//!
//! Participants are numbered, one per node. Each saves one block through its node's agent, and loads the
//! block of each other participant from another node. It compares every byte with the keyed function that
//! generated the block.
//!
//! ```text
//! connect (until the agent listens) → save own → for each other: match until found → load → compare
//! ```
//!
//! With `--again-for` the command then repeats the loads ([`repeated_loads`]); with `--requests-for` it
//! serves requests like an engine ([`requests`]).
//!
//! Invariants:
//! * The check ends within `--within`, regardless of the agents.
//! * It fails on a wrong byte, on a block that comes from the participant's own node, and on a block that
//!   never appears. The error names the block.
//! * Runs do not share blocks, because keys depend on `--run`.
//!
//! The check does not measure load: see `reprise bench`.

mod repeated_loads;
mod requests;

use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use clap::builder::RangedU64ValueParser;
use reprise_client::{
    Client, ClientError, CommitOptions, CommitOutcome, CommitStatus, ConnectOptions, LoadRequest, Scope,
    Source,
};
use reprise_policy::key::KeyPart;
use reprise_policy::{BlockKey, Interval, Layout, NamespaceDigest, NamespaceSpec, TenantName, prefix_hash};
use serde::Serialize;

use reprise_testkit::keyed_blocks::{self, Outcome};
use reprise_testkit::model;
use reprise_testkit::output::{Audience, Table, bytes_text};

/// Largest number of participants; each loads the blocks of all others.
const PARTICIPANTS_MAX: u64 = 64;

/// Pause between two attempts to connect to the agent or to find a block.
const PAUSE: Duration = Duration::from_millis(100);

/// Deadline of one load; loading 64 KiB from a peer takes milliseconds.
const LOAD_DEADLINE: Duration = Duration::from_secs(5);

/// Time limit for a reservation in an arena that other engines fill.
const RESERVE_WAIT: Duration = Duration::from_secs(5);

/// Time limit for the durability notice; agents write after 50 ms by default.
const DURABLE_WAIT: Duration = Duration::from_secs(10);

/// Arguments of `reprise check`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct CheckArgs {
    /// Connect to the agent of this node at this Unix socket.
    #[arg(long, value_name = "PATH", default_value = "/run/reprise/agent.sock")]
    socket: PathBuf,
    /// Expect this many participants, each on its own node.
    ///
    /// With 1, the block is loaded from the node that saved it.
    #[arg(long, value_name = "N", default_value = "1", value_parser = RangedU64ValueParser::<u32>::new().range(1..=PARTICIPANTS_MAX))]
    of: u32,
    /// Set the number of this participant, from 0 to N - 1.
    #[arg(long, value_name = "INDEX", default_value = "0")]
    index: u32,
    /// Identify this run.
    ///
    /// Use the same text for all participants, and a new text for each run.
    #[arg(long, value_name = "TEXT")]
    run: String,
    /// Save and load blocks of this tenant.
    #[arg(long, value_name = "TENANT", default_value = "default")]
    tenant: TenantName,
    /// Authenticate with the service account token in this file.
    ///
    /// Agents in Kubernetes derive the identity of the pod from it.
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Wait this long for the agent and the other participants.
    #[arg(long, value_name = "DURATION", default_value = "60s")]
    within: Interval,
    /// After the check, repeat the loads for DURATION.
    ///
    /// The command prints the number of hits by source once per second. A restarted participant then also
    /// accepts its own saved block, and blocks that this node already holds.
    #[arg(long, value_name = "DURATION")]
    again_for: Option<Interval>,
    /// After the check, serve 20 requests per second for DURATION.
    ///
    /// Each request loads its block if the cache has it; otherwise the command computes and saves it. The
    /// command prints counters once per second. Restarted participants are treated as with --again-for.
    #[arg(long, value_name = "DURATION", conflicts_with = "again_for")]
    requests_for: Option<Interval>,
}

/// Result of saving this participant's block.
#[derive(Clone, Debug, Serialize)]
struct SaveResult {
    saved_by: u32,
    key: String,
    durable: bool,
}

/// Result of loading another participant's block.
#[derive(Clone, Debug, Serialize)]
struct LoadResult {
    saved_by: u32,
    key: String,
    from: &'static str,
    bytes_verified: u64,
    after_ms: u64,
}

/// Output of `reprise check --json`.
#[derive(Clone, Debug, Serialize)]
struct CheckReport {
    node: String,
    agent_version: String,
    saved: SaveResult,
    loaded: Vec<LoadResult>,
}

/// A participant's block: the prefix hash, which determines its bytes, and its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Block {
    prefix_hash: [u8; 32],
    key: BlockKey,
}

/// A session with the agent, and the deadline of the check.
struct Check {
    client: Client,
    layout: Layout,
    namespace: NamespaceDigest,
    deadline: Instant,
    within: Duration,
}

pub(crate) fn command(args: &CheckArgs, audience: Audience) -> anyhow::Result<()> {
    ensure!(args.index < args.of, "invalid --index {}: expected 0 to {}", args.index, args.of - 1);
    let check = Check::connect_within(args)?;
    let saved = check.save(args.index, OwnBlock::of(args))?;
    let others: Vec<u32> = match args.of {
        1 => vec![args.index],
        of => (0..of).filter(|other| *other != args.index).collect(),
    };
    let mut loaded = Vec::with_capacity(others.len());
    for other in &others {
        loaded.push(check.load(*other, ExpectedSource::of(args, *other))?);
    }
    let checked = CheckReport {
        node: check.client.node().to_owned(),
        agent_version: check.client.agent_version().to_owned(),
        saved,
        loaded,
    };
    audience.emit(&checked);
    audience.print_line(text(&checked));
    match (args.again_for, args.requests_for) {
        (Some(lasts), _) => repeated_loads::run(check, args, &others, lasts.0, audience),
        (None, Some(lasts)) => {
            requests::serve(check, args, lasts.0, audience);
            Ok(())
        }
        (None, None) => Ok(()),
    }
}

/// Whether an earlier process of the run may have saved this participant's block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OwnBlock {
    New,
    MayExist,
}

impl OwnBlock {
    /// A participant that keeps running after the check may be restarted, under the same run.
    fn of(args: &CheckArgs) -> OwnBlock {
        let continues = args.again_for.is_some() || args.requests_for.is_some();
        if continues { OwnBlock::MayExist } else { OwnBlock::New }
    }
}

/// Required source of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ExpectedSource {
    ThisNode,
    AnotherNode,
    /// Any node: an earlier process of the run may have loaded the block to this node.
    Any,
}

impl ExpectedSource {
    fn of(args: &CheckArgs, saved_by: u32) -> ExpectedSource {
        match OwnBlock::of(args) {
            OwnBlock::MayExist => ExpectedSource::Any,
            OwnBlock::New if args.index == saved_by => ExpectedSource::ThisNode,
            OwnBlock::New => ExpectedSource::AnotherNode,
        }
    }

    fn matches(self, source: Source) -> bool {
        let near = matches!(source, Source::OwnDram | Source::OwnNvme);
        match self {
            ExpectedSource::ThisNode => near,
            ExpectedSource::AnotherNode => !near,
            ExpectedSource::Any => true,
        }
    }
}

impl Check {
    /// Connects as soon as the agent listens; fails after `--within`.
    fn connect_within(args: &CheckArgs) -> anyhow::Result<Check> {
        let within = args.within.0;
        let deadline = Instant::now() + within;
        let layout = model::llama_3_8b_scaled(model::SCALE_DEFAULT)?;
        loop {
            match connect(args, layout) {
                Ok(client) => {
                    let namespace = *client.namespace();
                    return Ok(Check { client, layout, namespace, deadline, within });
                }
                Err(ClientError::AgentAbsent { .. } | ClientError::Busy(_)) if Instant::now() < deadline => {
                    thread::sleep(PAUSE);
                }
                Err(error) => return Err(error).context("connecting to the agent of this node"),
            }
        }
    }

    fn save(&self, index: u32, own_block: OwnBlock) -> anyhow::Result<SaveResult> {
        let block = block(&self.namespace, index);
        let Some(committed) = self.put(&block).context("saving a block")? else {
            bail!(
                "the agent's arena had no space for a block of 64 KiB within {RESERVE_WAIT:?}: is its cache.dram too small?"
            )
        };
        let status =
            committed.statuses.first().copied().context("the agent returned no status for the block")?;
        let exists = own_block == OwnBlock::MayExist && status == CommitStatus::Duplicate;
        ensure!(
            status.is_committed() || exists,
            "the agent did not commit the block ({status:?}): was --run used before?"
        );
        let outcome =
            self.client.wait_durable(committed.ticket, DURABLE_WAIT).context("waiting for the device")?;
        Ok(SaveResult { saved_by: index, key: model::hex(&block.key.0), durable: outcome.durable == 1 })
    }

    /// Saves a block; returns `None` if the agent's arena had no space within [`RESERVE_WAIT`].
    fn put(&self, block: &Block) -> Result<Option<CommitOutcome>, ClientError> {
        let reserved = self.client.reserve(1, RESERVE_WAIT)?;
        let Some(mut reservation) = reserved.into_iter().next() else { return Ok(None) };
        keyed_blocks::write(&mut reservation, &self.layout, &block.prefix_hash)?;
        self.client.commit(vec![(reservation, block.key)], CommitOptions::default()).map(Some)
    }

    /// Waits for a participant's block, and loads and verifies it.
    fn load(&self, saved_by: u32, expected: ExpectedSource) -> anyhow::Result<LoadResult> {
        let block = block(&self.namespace, saved_by);
        let key = model::hex(&block.key.0);
        let began = Instant::now();
        loop {
            let attempt = self.attempt(&block, expected);
            match attempt.with_context(|| format!("block {key} of participant {saved_by}"))? {
                Some(source) => {
                    let after_ms = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
                    let bytes_verified = self.layout.block_bytes();
                    return Ok(LoadResult { saved_by, key, from: name_of(source), bytes_verified, after_ms });
                }
                None if Instant::now() < self.deadline => thread::sleep(PAUSE),
                None => bail!(
                    "block {key} of participant {saved_by} was not found within {:?}: check that both agents run and reach \
                     each other and the control plane",
                    self.within
                ),
            }
        }
    }

    /// Tries once to load a block; returns `None` if it is not available yet.
    fn attempt(&self, block: &Block, expected: ExpectedSource) -> anyhow::Result<Option<Source>> {
        let source = self.load_verified(block, Scope::Cluster)?;
        if let Some(source) = source {
            ensure!(
                expected.matches(source),
                "loaded from {} of this node: each participant must run on its own node",
                name_of(source)
            );
        }
        Ok(source)
    }

    /// Loads a block and verifies every byte; returns its source, or `None` if it is not available.
    ///
    /// # Errors
    /// A failed call, as a [`ClientError`], or wrong bytes, as another error.
    fn load_verified(&self, block: &Block, scope: Scope) -> anyhow::Result<Option<Source>> {
        match self.fetch(block, scope)? {
            Some(Outcome::Verified(source)) => Ok(Some(source)),
            Some(Outcome::Wrong { words }) => bail!("{words} 8-byte words differ from the saved ones"),
            // A checksum mismatch on copying counts as a failed load: the engine recomputes the block.
            Some(Outcome::Missing(_) | Outcome::Corrupt) | None => Ok(None),
        }
    }

    /// Loads a block if a match finds it, and compares every byte; returns `None` if no node has the block.
    fn fetch(&self, block: &Block, scope: Scope) -> Result<Option<Outcome>, ClientError> {
        if self.client.match_keys(&[block.key], scope)?.is_empty() {
            return Ok(None);
        }
        let request = LoadRequest { deadline: LOAD_DEADLINE, scope, ..LoadRequest::new(vec![block.key]) };
        let load = self.client.load(&request)?;
        let outcomes = keyed_blocks::compare(&load, &self.layout, &[block.prefix_hash], LOAD_DEADLINE)?;
        Ok(outcomes.first().copied())
    }
}

/// Opens a session with the agent of this node.
fn connect(args: &CheckArgs, layout: Layout) -> Result<Client, ClientError> {
    let options = ConnectOptions::new(args.socket.clone(), namespace(&layout, &args.run), layout)
        .tenant(args.tenant.clone())
        .client_name("check");
    Client::connect(match &args.token_file {
        Some(path) => options.token_file(path),
        None => options,
    })
}

/// Returns the namespace of a run, without the salt of its tenant.
fn namespace(layout: &Layout, run: &str) -> NamespaceDigest {
    NamespaceSpec {
        model: "reprise/check".into(),
        revision: run.to_owned(),
        layout: *layout,
        hash_algorithm: "sha256_cbor".into(),
        hash_seed: "reprise-check".into(),
        engine_format: "reference:LBHNC".into(),
    }
    .digest()
}

fn block(namespace: &NamespaceDigest, saved_by: u32) -> Block {
    block_of(namespace, &[saved_by])
}

/// Returns the block of a prompt.
fn block_of(namespace: &NamespaceDigest, tokens: &[u32]) -> Block {
    let prefix_hash = prefix_hash::block_hash(&prefix_hash::none_hash("reprise-check"), tokens, &[]);
    Block { prefix_hash, key: BlockKey::derive(namespace, &prefix_hash, KeyPart::default()) }
}

fn name_of(source: Source) -> &'static str {
    match source {
        Source::OwnDram => "own DRAM",
        Source::OwnNvme => "own NVMe",
        Source::PeerDram => "peer DRAM",
        Source::PeerNvme => "peer NVMe",
    }
}

fn text(checked: &CheckReport) -> String {
    let CheckReport { node, agent_version, saved, loaded } = checked;
    let durable = if saved.durable { "durable" } else { "in DRAM only: the node has no open pool" };
    let mut table = Table::new(&["saved by", "key", "from", "verified", "after"]);
    for one in loaded {
        table.row(vec![
            one.saved_by.to_string(),
            one.key.clone(),
            one.from.to_owned(),
            bytes_text(one.bytes_verified),
            format!("{} ms", one.after_ms),
        ]);
    }
    format!(
        "agent {agent_version} on node {node}: saved {}, {durable}\n{}",
        saved.key,
        table.render().trim_end()
    )
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: CheckArgs,
    }

    fn of(line: &[&str]) -> CheckArgs {
        Line::parse_from(line).args
    }

    #[test]
    fn participants_and_runs_have_different_blocks() {
        let layout = model::llama_3_8b_scaled(model::SCALE_DEFAULT).expect("valid");
        let of = |run: &str, index| block(&namespace(&layout, run), index).key;
        let all = [of("a", 0), of("a", 1), of("b", 0)];
        for (index, key) in all.iter().enumerate() {
            assert!(!all[..index].contains(key), "{index}");
        }
        assert_eq!(of("a", 0), all[0], "each participant can derive the keys of all others");
    }

    #[test]
    fn block_of_another_participant_must_come_from_another_node_on_the_first_load() {
        let alone = of(&["check", "--run", "a", "--of", "2"]);
        let again = of(&["check", "--run", "a", "--of", "2", "--again-for", "1s"]);
        let (own, other) = (ExpectedSource::of(&alone, 0), ExpectedSource::of(&alone, 1));
        assert!(
            own.matches(Source::OwnDram) && own.matches(Source::OwnNvme) && !own.matches(Source::PeerDram)
        );
        assert!(
            other.matches(Source::PeerDram)
                && other.matches(Source::PeerNvme)
                && !other.matches(Source::OwnNvme)
        );
        for source in [Source::OwnDram, Source::OwnNvme, Source::PeerDram, Source::PeerNvme] {
            assert!(ExpectedSource::of(&again, 1).matches(source), "{source:?}");
        }
    }
}
