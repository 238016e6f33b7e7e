//! `reprise check`: one verified block around the cluster, as `helm test` does.
//!
//! Participants are numbered, one on each node. Each saves one block through its node's agent and loads the block of every other,
//! which must come from another node; every byte is compared with the keyed function that it was made of.
//!
//! ```text
//! connect (until the agent listens) → save own → for each other: match until it is found → load → compare
//! ```
//!
//! With `--again-for` it goes on afterwards as an engine that only hits ([`again`]), with `--requests-for` as one that is at work ([`requests`]).
//!
//! Invariants: the check ends within `--within`, whatever agents do; a byte that differs, a block that comes from the own node and a
//! block that never appears are failures that say which. Blocks of different runs never meet: keys are made of `--run`.
//!
//! Deliberately absent: load. What a cluster carries is measured by `reprise bench`.

mod again;
mod requests;

use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use clap::builder::RangedU64ValueParser;
use reprise_client::{
    BlockStatus, Client, ClientError, CommitOptions, CommitOutcome, CommitStatus, ConnectOptions,
    LoadRequest, Scope, Source,
};
use reprise_policy::key::KeyPart;
use reprise_policy::{BlockKey, Interval, Layout, NamespaceDigest, NamespaceSpec, TenantName, prefix_hash};
use serde::Serialize;

use crate::kv_function::{self, ObjectPlace};
use crate::model;
use crate::output::{Audience, Table, bytes_text};

/// Participants at the most: each loads a block of every other.
const PARTICIPANTS_MAX: u64 = 64;

/// Between two looks for an agent or a block.
const PAUSE: Duration = Duration::from_millis(100);

/// How long one load may take: 64 KiB from a peer take milliseconds.
const LOAD_DEADLINE: Duration = Duration::from_secs(5);

/// How long a save waits for room in an arena that others fill.
const RESERVE_WAIT: Duration = Duration::from_secs(5);

/// How long a durable notice is waited for: agents write after 50 ms unless told otherwise.
const DURABLE_WAIT: Duration = Duration::from_secs(10);

/// Arguments of `reprise check`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct CheckArgs {
    /// The agent's socket on this node.
    #[arg(long, value_name = "PATH", default_value = "/run/reprise/agent.sock")]
    socket: PathBuf,
    /// How many take part, each on a node of its own; with 1 the block is loaded where it was saved.
    #[arg(long, value_name = "N", default_value = "1", value_parser = RangedU64ValueParser::<u32>::new().range(1..=PARTICIPANTS_MAX))]
    of: u32,
    /// Which of them this is, from 0.
    #[arg(long, value_name = "INDEX", default_value = "0")]
    index: u32,
    /// What all that take part in one run have in common, and no other run has.
    #[arg(long, value_name = "TEXT")]
    run: String,
    /// Whose blocks they are.
    #[arg(long, value_name = "TENANT", default_value = "default")]
    tenant: TenantName,
    /// File with a service account's token, which shows agents in Kubernetes whose pod this is.
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// How long to wait for the agent and the others, as in 60s.
    #[arg(long, value_name = "DURATION", default_value = "60s")]
    within: Interval,
    /// Afterwards: go on loading the same blocks for so long, and say once a second how many came from where. What an
    /// earlier process of the run has saved, or has brought to this node, will do then.
    #[arg(long, value_name = "DURATION")]
    again_for: Option<Interval>,
    /// Afterwards: serve requests for so long, 20 a second, as an engine does: load what is found, compute and save what is not; and say once
    /// a second what came of them.
    #[arg(long, value_name = "DURATION", conflicts_with = "again_for")]
    requests_for: Option<Interval>,
}

/// What became of the own block.
#[derive(Clone, Debug, Serialize)]
struct Saved {
    saved_by: u32,
    key: String,
    durable: bool,
}

/// What became of another's block.
#[derive(Clone, Debug, Serialize)]
struct Loaded {
    saved_by: u32,
    key: String,
    from: &'static str,
    bytes_verified: u64,
    after_ms: u64,
}

/// The whole outcome, as programs get it.
#[derive(Clone, Debug, Serialize)]
struct Checked {
    node: String,
    agent_version: String,
    saved: Saved,
    loaded: Vec<Loaded>,
}

/// A block of one participant: what its bytes follow from, and its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Block {
    prefix_hash: [u8; 32],
    key: BlockKey,
}

/// What became of a look for a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    /// It came, and every byte is right.
    Right(Source),
    /// Nobody has it.
    Nothing,
    /// Somebody had it, and it did not come.
    NotBrought,
    /// It came with checksums that fit, and so many words of 8 bytes are not what was saved.
    Wrong { words: u64 },
}

/// A session, and by when the check must be over.
struct Check {
    client: Client,
    layout: Layout,
    namespace: NamespaceDigest,
    give_up: Instant,
    within: Duration,
}

/// `reprise check`.
pub(crate) fn command(args: &CheckArgs, audience: Audience) -> anyhow::Result<()> {
    ensure!(args.index < args.of, "--index is below --of: {} takes part in 0 to {}", args.index, args.of - 1);
    let check = Check::begin(args)?;
    let saved = check.save(args.index, Before::of(args))?;
    let others: Vec<u32> = match args.of {
        1 => vec![args.index],
        of => (0..of).filter(|other| *other != args.index).collect(),
    };
    let mut loaded = Vec::with_capacity(others.len());
    for other in &others {
        loaded.push(check.load(*other, Wanted::of(args, *other))?);
    }
    let checked = Checked {
        node: check.client.node().to_owned(),
        agent_version: check.client.agent_version().to_owned(),
        saved,
        loaded,
    };
    audience.emit(&checked);
    audience.say(text(&checked));
    match (args.again_for, args.requests_for) {
        (Some(lasts), _) => again::go_on(check, args, &others, lasts.0, audience),
        (None, Some(lasts)) => {
            requests::serve(check, args, lasts.0, audience);
            Ok(())
        }
        (None, None) => Ok(()),
    }
}

/// Whether the own block may have been there before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Before {
    Never,
    Perhaps,
}

impl Before {
    /// Who goes on for long may be started again.
    fn of(args: &CheckArgs) -> Before {
        let goes_on = args.again_for.is_some() || args.requests_for.is_some();
        if goes_on { Before::Perhaps } else { Before::Never }
    }
}

/// Where a block must come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    ThisNode,
    AnotherNode,
    /// An earlier process of the run may have brought it here.
    Anywhere,
}

impl Wanted {
    fn of(args: &CheckArgs, saved_by: u32) -> Wanted {
        match Before::of(args) {
            Before::Perhaps => Wanted::Anywhere,
            Before::Never if args.index == saved_by => Wanted::ThisNode,
            Before::Never => Wanted::AnotherNode,
        }
    }

    fn is(self, source: Source) -> bool {
        let near = matches!(source, Source::OwnDram | Source::OwnNvme);
        match self {
            Wanted::ThisNode => near,
            Wanted::AnotherNode => !near,
            Wanted::Anywhere => true,
        }
    }
}

impl Check {
    /// Connects, as soon as the agent listens.
    fn begin(args: &CheckArgs) -> anyhow::Result<Check> {
        let within = args.within.0;
        let give_up = Instant::now() + within;
        let layout = model::llama_3_8b_scaled(model::SCALE_DEFAULT)?;
        let namespace = namespace(&layout, &args.tenant, &args.run);
        loop {
            match connect(args, namespace, layout) {
                Ok(client) => return Ok(Check { client, layout, namespace, give_up, within }),
                Err(ClientError::AgentAbsent { .. } | ClientError::Busy(_)) if Instant::now() < give_up => {
                    thread::sleep(PAUSE);
                }
                Err(error) => return Err(error).context("connecting to the agent of this node"),
            }
        }
    }

    fn save(&self, index: u32, before: Before) -> anyhow::Result<Saved> {
        let block = block(&self.namespace, index);
        let Some(committed) = self.put(&block).context("saving a block")? else {
            bail!(
                "the agent's arena had no room for a block of 64 KiB within {RESERVE_WAIT:?}: is its cache.dram too small?"
            )
        };
        let status = committed.statuses.first().copied().context("the agent told nothing of the block")?;
        let is_there = before == Before::Perhaps && status == CommitStatus::Duplicate;
        ensure!(
            status.is_committed() || is_there,
            "the agent did not take the block ({status:?}): was --run used before?"
        );
        let outcome =
            self.client.wait_durable(committed.ticket, DURABLE_WAIT).context("waiting for the device")?;
        Ok(Saved { saved_by: index, key: model::hex(&block.key.0), durable: outcome.durable == 1 })
    }

    /// Saves a block: what the agent says of it. `None` when its arena had no room in time.
    fn put(&self, block: &Block) -> Result<Option<CommitOutcome>, ClientError> {
        let reserved = self.client.reserve(1, RESERVE_WAIT)?;
        let Some(mut reservation) = reserved.into_iter().next() else { return Ok(None) };
        let mut bytes = self.object();
        for object in 0..self.layout.objects() {
            kv_function::fill(&block.prefix_hash, self.place(object), &mut bytes);
            reservation.fill_object(object, &bytes)?;
        }
        self.client.commit(vec![(reservation, block.key)], CommitOptions::default()).map(Some)
    }

    /// Waits for another's block, and loads it where it is right.
    fn load(&self, saved_by: u32, wanted: Wanted) -> anyhow::Result<Loaded> {
        let block = block(&self.namespace, saved_by);
        let key = model::hex(&block.key.0);
        let began = Instant::now();
        loop {
            let attempt = self.attempt(&block, wanted);
            match attempt.with_context(|| format!("block {key}, saved by number {saved_by}"))? {
                Some(source) => {
                    let after_ms = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
                    let bytes_verified = self.layout.block_bytes();
                    return Ok(Loaded { saved_by, key, from: name_of(source), bytes_verified, after_ms });
                }
                None if Instant::now() < self.give_up => thread::sleep(PAUSE),
                None => bail!(
                    "block {key}, saved by number {saved_by}, was not found within {:?}: does its agent run, and do both reach the \
                     control plane and each other?",
                    self.within
                ),
            }
        }
    }

    /// One look for a block: `None` when it cannot be had yet.
    fn attempt(&self, block: &Block, wanted: Wanted) -> anyhow::Result<Option<Source>> {
        let source = self.look(block, Scope::Cluster)?;
        if let Some(source) = source {
            ensure!(
                wanted.is(source),
                "it came from this node's {}: all that take part must run on nodes of their own",
                name_of(source)
            );
        }
        Ok(source)
    }

    /// Loads a block if it is there, and compares every byte: where it came from. `None` when it cannot be had; calls that fail are
    /// [`ClientError`]s.
    fn look(&self, block: &Block, scope: Scope) -> anyhow::Result<Option<Source>> {
        match self.fetch(block, scope)? {
            Found::Right(source) => Ok(Some(source)),
            Found::Nothing | Found::NotBrought => Ok(None),
            Found::Wrong { words } => bail!("{words} words of 8 bytes are not what was saved"),
        }
    }

    /// Loads a block if it is there, and compares every byte.
    fn fetch(&self, block: &Block, scope: Scope) -> Result<Found, ClientError> {
        if self.client.match_keys(&[block.key], scope)?.is_empty() {
            return Ok(Found::Nothing);
        }
        let request = LoadRequest { deadline: LOAD_DEADLINE, scope, ..LoadRequest::new(vec![block.key]) };
        let load = self.client.load(&request)?;
        for layer in 0..self.layout.layers() {
            load.wait_layer(layer, LOAD_DEADLINE)?;
        }
        let loaded = load.blocks().first().expect("the client takes answers with a block for each key only");
        let (BlockStatus::Ok, Some(source)) = (loaded.status(), loaded.source()) else {
            return Ok(Found::NotBrought);
        };
        let mut bytes = self.object();
        let mut words = 0;
        for object in 0..self.layout.objects() {
            // A copy that does not match its checksum is a block that failed, which is a miss.
            if load.copy_object(0, object, &mut bytes).is_err() {
                return Ok(Found::NotBrought);
            }
            words += kv_function::mismatches(&block.prefix_hash, self.place(object), &bytes);
        }
        Ok(if words == 0 { Found::Right(source) } else { Found::Wrong { words } })
    }

    fn object(&self) -> Vec<u8> {
        vec![0; usize::try_from(self.layout.object_bytes()).expect("objects fit in memory")]
    }

    fn place(&self, object: u32) -> ObjectPlace {
        ObjectPlace { layer: object / self.layout.parts(), part: object % self.layout.parts() }
    }
}

/// A session with the agent of this node.
fn connect(args: &CheckArgs, namespace: NamespaceDigest, layout: Layout) -> Result<Client, ClientError> {
    let options = ConnectOptions::new(args.socket.clone(), namespace, layout)
        .tenant(args.tenant.clone())
        .client_name("check");
    Client::connect(match &args.token_file {
        Some(path) => options.token_file(path),
        None => options,
    })
}

/// A namespace is one tenant's for the life of an agent, so the tenant is in it.
fn namespace(layout: &Layout, tenant: &TenantName, run: &str) -> NamespaceDigest {
    NamespaceSpec {
        model: "reprise/check".into(),
        revision: run.to_owned(),
        layout: *layout,
        hash_algorithm: "sha256_cbor".into(),
        hash_seed: "reprise-check".into(),
        engine_format: "reference:LBHNC".into(),
        tenant_salt: tenant.as_str().to_owned(),
    }
    .digest()
}

fn block(namespace: &NamespaceDigest, saved_by: u32) -> Block {
    block_of(namespace, &[saved_by])
}

/// The block of a prompt.
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

fn text(checked: &Checked) -> String {
    let Checked { node, agent_version, saved, loaded } = checked;
    let durable = if saved.durable { "durable" } else { "in memory only: the node has no open pool" };
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
        "agent {agent_version} of node {node}: saved {}, {durable}\n{}",
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
    fn every_participant_of_every_run_and_tenant_has_a_block_of_its_own() {
        let layout = model::llama_3_8b_scaled(model::SCALE_DEFAULT).expect("valid");
        let of = |run: &str, tenant: &str, index| {
            let tenant = tenant.parse().expect("a name");
            block(&namespace(&layout, &tenant, run), index).key
        };
        let all = [of("a", "default", 0), of("a", "default", 1), of("b", "default", 0), of("a", "x", 0)];
        for (index, key) in all.iter().enumerate() {
            assert!(!all[..index].contains(key), "{index}");
        }
        assert_eq!(of("a", "default", 0), all[0], "all participants know the keys of all");
    }

    #[test]
    fn a_block_of_another_must_come_from_another_node_unless_it_was_loaded_before() {
        let alone = of(&["check", "--run", "a", "--of", "2"]);
        let again = of(&["check", "--run", "a", "--of", "2", "--again-for", "1s"]);
        let (own, other) = (Wanted::of(&alone, 0), Wanted::of(&alone, 1));
        assert!(own.is(Source::OwnDram) && own.is(Source::OwnNvme) && !own.is(Source::PeerDram));
        assert!(other.is(Source::PeerDram) && other.is(Source::PeerNvme) && !other.is(Source::OwnNvme));
        for source in [Source::OwnDram, Source::OwnNvme, Source::PeerDram, Source::PeerNvme] {
            assert!(Wanted::of(&again, 1).is(source), "{source:?}");
        }
    }
}
