//! The reference engine: uses Reprise like an inference engine, with a keyed function instead of a model.
//!
//! A request is a chain of blocks. The engine queries the number of available leading blocks, loads them
//! layer by layer into its own paged memory, checks every byte against the keyed function, "prefills" the
//! rest by writing the function's bytes, and saves these blocks. Blocks that cannot be loaded are recomputed,
//! failed calls are counted and lost sessions reopened: failures of the cache only cost time.
//!
//! An engine with rings ([`EnginePath::Rings`]) saves blocks to extents of its node's devices and loads them from there,
//! without the arena. The blocks that rings cannot reach take the arena.

mod by_rings;
mod memory;
#[cfg(not(feature = "rings"))]
mod no_rings;
mod outcome;
mod path;
#[cfg(feature = "rings")]
mod registered_kv;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::Context;
use reprise_client::{
    BlockStatus, Client, ClientError, CommitOptions, ConnectOptions, LoadRequest, MatchOptions, Scope,
    Source, Ticket,
};
use reprise_policy::key::KeyPart;
use reprise_policy::{BlockKey, KeyInputs, Layout, NamespaceDigest, NamespaceSpec, TenantName, prefix_hash};

use memory::KvMemory;
#[cfg(not(feature = "rings"))]
use no_rings as registered_kv;
pub use outcome::{DurableCheck, HitCounts, RequestOutcome, RingTraffic};
pub use path::EnginePath;

use crate::kv_function;
use crate::paged_kv::PhysicalBlock;
use crate::trace::{TOKENS_PER_HASH_ID, TraceRequest};

/// Seed of the prefix chain: vLLM's default for its SHA-256 algorithms.
const HASH_SEED: &str = "vllm-none-hash";

/// Arena of one load call of a check of durable blocks: a quarter of the smallest arena of the demo.
const CHECK_WINDOW_BYTES: u64 = 16 << 20;

/// Maximum blocks of one load call of a check of durable blocks: half of the paged memory.
const CHECK_WINDOW_BLOCKS_MAX: u64 = 256;

/// Maximum keys of one match call.
const MATCH_KEYS_MAX: usize = 8192;

/// Time limit of one load; the rest is then recomputed.
const LOAD_DEADLINE: Duration = Duration::from_secs(10);

/// Time limit for free memory in the arena; blocks without it are not saved.
const RESERVE_WAIT: Duration = Duration::from_secs(5);

/// Time limit for the durable notices of all saves.
const DURABLE_WAIT: Duration = Duration::from_secs(30);

/// Blocks of the paged memory; the longest request of the trace has 247 blocks.
const PAGED_BLOCKS_MIN: usize = 512;

/// Engine connected to its node's agent.
pub struct Engine {
    settings: EngineSettings,
    client: Client,
    namespace: NamespaceDigest,
    layout: Layout,
    kv: KvMemory,
    none_hash: [u8; 32],
    tickets: Vec<(Ticket, Vec<ChainBlock>)>,
    durable: BTreeMap<BlockKey, ChainBlock>,
}

/// Address of an agent, and the kind of blocks to save.
#[derive(Clone, Debug)]
pub struct EngineSettings {
    /// The agent's Unix socket.
    pub socket: std::path::PathBuf,
    /// Geometry of the blocks.
    pub layout: Layout,
    /// Tenant of the blocks.
    pub tenant: TenantName,
    /// Path of blocks between KV memory and node.
    pub path: EnginePath,
}

/// One block of a prompt: its prefix hash, which determines its bytes, and its key.
#[derive(Clone, Copy, Debug)]
struct ChainBlock {
    prefix_hash: [u8; 32],
    key: BlockKey,
}

/// Blocks to load, and where they are.
#[derive(Clone, Copy)]
struct LoadPlan<'a> {
    chain: &'a [ChainBlock],
    table: &'a [PhysicalBlock],
    scope: Scope,
    /// Positions of the blocks on devices of the node, which rings load if the engine has them.
    on_devices: &'a [usize],
}

/// Blocks that were loaded into paged memory.
struct Loaded {
    /// Result of each block, including the copy.
    statuses: Vec<BlockStatus>,
    /// Source of each block.
    sources: Vec<Option<Source>>,
}

impl Loaded {
    /// Returns the state before a load of `count` blocks.
    fn none(count: usize) -> Loaded {
        Loaded { statuses: vec![BlockStatus::Miss; count], sources: vec![None; count] }
    }

    /// Returns the number of leading blocks that are loaded.
    fn leading(&self) -> usize {
        self.statuses.iter().take_while(|status| **status == BlockStatus::Ok).count()
    }
}

/// Returns the namespace of the reference engine's blocks, without the salt of their tenant.
pub fn namespace(layout: &Layout) -> NamespaceDigest {
    NamespaceSpec {
        model: "reference/keyed-function".into(),
        revision: "1".into(),
        layout: *layout,
        hash_algorithm: "sha256_cbor".into(),
        hash_seed: HASH_SEED.into(),
        engine_format: "reference:LBHNC".into(),
    }
    .digest()
}

/// Returns the keys of a prompt's blocks in the namespace of a tenant.
pub fn chain_keys(namespace: &NamespaceDigest, hash_ids: &[u64]) -> Vec<BlockKey> {
    let none_hash = prefix_hash::none_hash(HASH_SEED);
    chain(namespace, none_hash, hash_ids).into_iter().map(|block| block.key).collect()
}

/// Returns the inputs of the keys of a prompt's blocks, from which an agent derives the keys of a public tenant.
pub fn chain_inputs(hash_ids: &[u64]) -> Option<KeyInputs> {
    KeyInputs::of(chain_hashes(hash_ids).iter().map(|hash| &hash[..]), KeyPart::default())
}

/// Returns the inputs of the keys of blocks.
fn inputs<'a>(chain: impl IntoIterator<Item = &'a ChainBlock>) -> Option<KeyInputs> {
    KeyInputs::of(chain.into_iter().map(|block| &block.prefix_hash[..]), KeyPart::default())
}

/// Returns the prefix hashes of a prompt's blocks, from which their keys derive.
pub fn chain_hashes(hash_ids: &[u64]) -> Vec<[u8; 32]> {
    let none_hash = prefix_hash::none_hash(HASH_SEED);
    // The namespace does not matter for the hashes.
    let blocks = chain(&NamespaceDigest([0; 32]), none_hash, hash_ids);
    blocks.into_iter().map(|block| block.prefix_hash).collect()
}

/// Returns the chain of a prompt's blocks.
fn chain(namespace: &NamespaceDigest, none_hash: [u8; 32], hash_ids: &[u64]) -> Vec<ChainBlock> {
    let mut parent = none_hash;
    let mut tokens = [0; TOKENS_PER_HASH_ID];
    let block = |hash_id: &u64| {
        TraceRequest::block_tokens(*hash_id, &mut tokens);
        parent = prefix_hash::block_hash(&parent, &tokens, &[]);
        ChainBlock { prefix_hash: parent, key: BlockKey::derive(namespace, &parent, KeyPart::default()) }
    };
    hash_ids.iter().map(block).collect()
}

impl Engine {
    /// Connects to the agent.
    pub fn connect(settings: &EngineSettings) -> anyhow::Result<Engine> {
        let client = connect(settings)?;
        let kv = KvMemory::open(settings.path, &client, PAGED_BLOCKS_MIN)?;
        Ok(Engine {
            settings: settings.clone(),
            namespace: *client.namespace(),
            client,
            layout: settings.layout,
            kv,
            none_hash: prefix_hash::none_hash(HASH_SEED),
            tickets: Vec::new(),
            durable: BTreeMap::new(),
        })
    }

    /// Opens a new session after the agent's restart; pending saves are dropped, durable blocks stay
    /// recorded.
    pub fn reconnect(&mut self) -> anyhow::Result<()> {
        let client = connect(&self.settings)?;
        self.kv.reopen(&client)?;
        self.namespace = *client.namespace();
        self.client = client;
        self.tickets.clear();
        Ok(())
    }

    /// Returns the name of the backend that moves blocks without the arena; `None` if all take the arena.
    pub fn backend(&self) -> Option<String> {
        self.kv.backend()
    }

    /// Serves a request: loads the available leading blocks, and computes and saves the rest.
    pub fn run(&mut self, hash_ids: &[u64]) -> anyhow::Result<RequestOutcome> {
        let chain = self.chain(hash_ids);
        let mut outcome = RequestOutcome { blocks: chain.len() as u64, ..RequestOutcome::default() };
        if chain.is_empty() {
            return Ok(outcome);
        }
        let table = self
            .kv
            .allocate(chain.len())
            .context("the prompt has more blocks than the engine's KV memory")?;
        self.serve(&chain, &table, &mut outcome);
        self.kv.release(table);
        Ok(outcome)
    }

    /// Waits for the durable notices of all saves; returns the total number of durable blocks.
    pub fn await_durable(&mut self) -> anyhow::Result<u64> {
        let give_up = Instant::now() + DURABLE_WAIT;
        for (ticket, blocks) in self.tickets.drain(..) {
            let left = give_up.saturating_duration_since(Instant::now());
            let outcome = self.client.wait_durable(ticket, left).context("waiting for durable notices")?;
            let kept = blocks.into_iter().filter(|block| !outcome.lost_keys.contains(&block.key));
            self.durable.extend(kept.map(|block| (block.key, block)));
        }
        Ok(self.durable.len() as u64)
    }

    /// Counts these blocks on this node by their fastest tier; missing blocks are not counted.
    pub fn own(&self, keys: &[BlockKey]) -> anyhow::Result<HitCounts> {
        let (mut counts, mut left) = (HitCounts::default(), keys);
        while !left.is_empty() {
            let asked = &left[..left.len().min(MATCH_KEYS_MAX)];
            let found = self.client.match_keys(asked, Scope::Local).context("match")?;
            found.iter().for_each(|source| counts.add(*source));
            // The answer ends before the first missing block.
            left = &left[asked.len().min(found.len() + 1)..];
        }
        Ok(counts)
    }

    /// Loads every durable block from this node alone and compares every byte. The next check only covers
    /// blocks that are present in this one.
    pub fn check_durable(&mut self) -> anyhow::Result<DurableCheck> {
        let durable: Vec<ChainBlock> = std::mem::take(&mut self.durable).into_values().collect();
        let mut check = DurableCheck { announced: durable.len() as u64, ..DurableCheck::default() };
        for window in durable.chunks(check_window_blocks(&self.layout)) {
            let table = self.kv.allocate(window.len()).context("the engine's KV memory is too small")?;
            let checked = self.check_window(window, &table, &mut check);
            self.kv.release(table);
            checked.context("loading durable blocks")?;
        }
        Ok(check)
    }

    fn check_window(
        &mut self,
        window: &[ChainBlock],
        table: &[PhysicalBlock],
        check: &mut DurableCheck,
    ) -> anyhow::Result<()> {
        let mut outcome = RequestOutcome::default();
        let all: Vec<usize> = (0..window.len()).collect();
        let plan = LoadPlan { chain: window, table, scope: Scope::Local, on_devices: &all };
        let loaded = self.load(plan, &mut outcome)?;
        for (index, block) in window.iter().enumerate() {
            match loaded.statuses[index] {
                BlockStatus::Ok if self.verify(block, table[index], &mut outcome) == 0 => {
                    check.present += 1;
                    self.durable.insert(block.key, *block);
                }
                BlockStatus::Miss => check.missed += 1,
                _ => check.failed += 1,
            }
        }
        check.bytes_verified += outcome.bytes_verified;
        check.mismatches += outcome.mismatches;
        check.rings.merge(&outcome.rings);
        Ok(())
    }

    fn serve(&mut self, chain: &[ChainBlock], table: &[PhysicalBlock], outcome: &mut RequestOutcome) {
        let fetched = self.fetch(chain, table, outcome);
        let usable = self.check_call(fetched, outcome).unwrap_or(0);
        for (block, physical) in chain[..usable].iter().zip(table) {
            self.verify(block, *physical, outcome);
        }
        for (block, physical) in chain[usable..].iter().zip(&table[usable..]) {
            self.prefill(block, *physical);
        }
        let started = Instant::now();
        let mut next_block = usable;
        let saved = self.save(chain, table, &mut next_block, outcome);
        outcome.unsaved += (chain.len() - next_block) as u64;
        outcome.save_us = micros(started);
        self.check_call(saved, outcome);
    }

    /// Counts a failed call, and opens a new session if the old one has ended.
    fn check_call<T>(&mut self, result: anyhow::Result<T>, outcome: &mut RequestOutcome) -> Option<T> {
        let error = match result {
            Ok(value) => return Some(value),
            Err(error) => error,
        };
        outcome.errors += 1;
        tracing::warn!(error = format!("{error:#}"), "a call to the agent failed; its blocks are computed");
        if !self.client.is_alive()
            && let Err(error) = self.reconnect()
        {
            tracing::warn!(
                error = format!("{error:#}"),
                "cannot reconnect to the agent; the next request tries again"
            );
        }
        None
    }

    /// Matches and loads; returns the number of usable leading blocks.
    fn fetch(
        &mut self,
        chain: &[ChainBlock],
        table: &[PhysicalBlock],
        outcome: &mut RequestOutcome,
    ) -> anyhow::Result<usize> {
        let keys: Vec<BlockKey> = chain.iter().map(|block| block.key).collect();
        let started = Instant::now();
        let options = MatchOptions { scope: Scope::Cluster, position: Some(0), inputs: inputs(chain) };
        let sources = self.client.match_keys(&keys, options)?;
        outcome.match_us = micros(started);
        let matched = sources.len();
        if matched == 0 {
            return Ok(0);
        }
        outcome.lost = matched as u64;
        let on_device = |(position, source)| (source == Source::OwnNvme).then_some(position);
        let on_devices: Vec<usize> = sources.into_iter().enumerate().filter_map(on_device).collect();
        let (chain, table) = (&chain[..matched], &table[..matched]);
        let plan = LoadPlan { chain, table, scope: Scope::Cluster, on_devices: &on_devices };
        let loaded = self.load(plan, outcome)?;
        let usable = loaded.leading();
        outcome.lost -= usable as u64;
        outcome.bytes_loaded += usable as u64 * self.layout.block_bytes();
        for source in loaded.sources[..usable].iter().flatten() {
            outcome.hits.add(*source);
        }
        Ok(usable)
    }

    /// Loads blocks into paged memory: through rings if the engine has them, and the rest through the arena.
    fn load(&mut self, plan: LoadPlan<'_>, outcome: &mut RequestOutcome) -> anyhow::Result<Loaded> {
        let started = Instant::now();
        let mut loaded = Loaded::none(plan.chain.len());
        self.load_by_rings(plan, &mut loaded, outcome)?;
        let is_left = |position: &usize| loaded.statuses[*position] != BlockStatus::Ok;
        let rest: Vec<usize> = (0..plan.chain.len()).filter(is_left).collect();
        // Rings report the end of blocks, not of layers.
        let first_layer = match rest.is_empty() {
            true => Instant::now(),
            false => self.load_by_arena(plan, &rest, &mut loaded)?,
        };
        if self.kv.registered().is_some() {
            let by_arena = rest.iter().filter(|position| plan.on_devices.binary_search(position).is_ok());
            let by_arena = by_arena.filter(|position| loaded.statuses[**position] == BlockStatus::Ok);
            outcome.rings.loads_by_arena += by_arena.count() as u64;
        }
        outcome.first_layer_us = micros_between(started, first_layer);
        outcome.load_us = micros(started);
        Ok(loaded)
    }

    /// Loads blocks layer by layer through the arena; returns when layer 0 of all of them was in paged memory.
    fn load_by_arena(
        &mut self,
        plan: LoadPlan<'_>,
        positions: &[usize],
        loaded: &mut Loaded,
    ) -> Result<Instant, ClientError> {
        let request = LoadRequest {
            keys: positions.iter().map(|position| plan.chain[*position].key).collect(),
            deadline: LOAD_DEADLINE,
            read_bytes: 0,
            scope: plan.scope,
            inputs: inputs(positions.iter().map(|position| &plan.chain[*position])),
        };
        let load = self.client.load(&request)?;
        for (position, block) in positions.iter().zip(load.blocks()) {
            (loaded.statuses[*position], loaded.sources[*position]) = (block.status(), block.source());
        }
        let parts = self.layout.parts();
        let mut first_layer = Instant::now();
        for layer in 0..self.layout.layers() {
            load.wait_layer(layer, LOAD_DEADLINE)?;
            for (block, position) in positions.iter().enumerate() {
                let status = &mut loaded.statuses[*position];
                if *status != BlockStatus::Ok {
                    continue;
                }
                let copied = (layer * parts..(layer + 1) * parts).all(|object| {
                    let copy = |target: &mut [u8]| load.copy_object(block, object, target).is_ok();
                    self.kv.write(plan.table[*position], object, copy)
                });
                if !copied {
                    *status = BlockStatus::Failed;
                }
            }
            if layer == 0 {
                first_layer = Instant::now();
            }
        }
        Ok(first_layer)
    }

    /// Compares a block in paged memory with the keyed function; returns the words that differ.
    fn verify(&mut self, block: &ChainBlock, physical: PhysicalBlock, outcome: &mut RequestOutcome) -> u64 {
        let wrong = (0..self.layout.objects())
            .map(|object| {
                let compare = |bytes: &[u8]| kv_function::mismatches(&block.prefix_hash, object, bytes);
                self.kv.read(physical, object, compare)
            })
            .sum();
        outcome.bytes_verified += self.layout.block_bytes();
        outcome.mismatches += wrong;
        wrong
    }

    fn prefill(&mut self, block: &ChainBlock, physical: PhysicalBlock) {
        for object in 0..self.layout.objects() {
            let fill = |bytes: &mut [u8]| kv_function::fill(&block.prefix_hash, object, bytes);
            self.kv.write(physical, object, fill);
        }
    }

    /// Saves the blocks of a chain from `next_block` on: through rings if the engine has them and extents are free,
    /// else through the arena until it is full. Advances `next_block`.
    fn save(
        &mut self,
        chain: &[ChainBlock],
        table: &[PhysicalBlock],
        next_block: &mut usize,
        outcome: &mut RequestOutcome,
    ) -> anyhow::Result<()> {
        self.save_by_rings(chain, table, next_block, outcome)?;
        let (by_rings, saved_before) = (self.kv.registered().is_some(), outcome.saved);
        let saved = self.save_by_arena(chain, table, next_block, outcome);
        if by_rings {
            outcome.rings.saves_by_arena += outcome.saved - saved_before;
        }
        Ok(saved?)
    }

    fn save_by_arena(
        &mut self,
        chain: &[ChainBlock],
        table: &[PhysicalBlock],
        next_block: &mut usize,
        outcome: &mut RequestOutcome,
    ) -> Result<(), ClientError> {
        while *next_block < chain.len() {
            let at = *next_block;
            let wanted = u32::try_from(chain.len() - at).expect("a chain has at most 8,192 blocks");
            let reservations = self.client.reserve(wanted, RESERVE_WAIT)?;
            if reservations.is_empty() {
                break;
            }
            let end = at + reservations.len();
            let mut items = Vec::with_capacity(reservations.len());
            for (mut reservation, (block, physical)) in
                reservations.into_iter().zip(chain[at..end].iter().zip(&table[at..end]))
            {
                for object in 0..self.layout.objects() {
                    self.kv.read(*physical, object, |bytes| reservation.fill_object(object, bytes))?;
                }
                items.push((reservation, block.key));
            }
            let committed = self.client.commit(items, commit_options(chain, at))?;
            for status in &committed.statuses {
                if status.is_committed() {
                    outcome.saved += 1;
                    outcome.bytes_saved += self.layout.block_bytes();
                } else {
                    outcome.duplicates += 1;
                }
            }
            self.tickets.push((committed.ticket, chain[at..end].to_vec()));
            *next_block = end;
        }
        Ok(())
    }

    fn chain(&self, hash_ids: &[u64]) -> Vec<ChainBlock> {
        chain(&self.namespace, self.none_hash, hash_ids)
    }
}

fn connect(settings: &EngineSettings) -> anyhow::Result<Client> {
    let namespace = namespace(&settings.layout);
    let options = ConnectOptions::new(settings.socket.clone(), namespace, settings.layout)
        .tenant(settings.tenant.clone())
        .client_name("reference-engine");
    Client::connect(options)
        .with_context(|| format!("connecting to the agent at {}", settings.socket.display()))
}

/// Returns the blocks of one load call of a check of durable blocks.
fn check_window_blocks(layout: &Layout) -> usize {
    let blocks = (CHECK_WINDOW_BYTES / layout.slot_bytes().max(1)).clamp(1, CHECK_WINDOW_BLOCKS_MAX);
    usize::try_from(blocks).expect("at most 256")
}

/// Returns the key of the block before position `at` of a chain.
/// Options of a commit that begins with this block of a chain.
fn commit_options(chain: &[ChainBlock], at: usize) -> CommitOptions {
    let parent = at.checked_sub(1).map(|last| chain[last].key);
    CommitOptions { parent, position: u32::try_from(at).ok(), ..CommitOptions::default() }
}

fn micros(started: Instant) -> u64 {
    micros_between(started, Instant::now())
}

fn micros_between(started: Instant, ended: Instant) -> u64 {
    u64::try_from(ended.duration_since(started).as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::llama_3_8b_scaled;

    #[test]
    fn check_of_durable_blocks_uses_a_bounded_part_of_the_arena_at_any_scale() {
        for (scale, blocks) in [(4096, 256), (1024, 256), (64, 16), (16, 4)] {
            let layout = llama_3_8b_scaled(scale).expect("a valid scale");
            assert_eq!(check_window_blocks(&layout), blocks, "scale {scale}");
        }
    }

    #[test]
    fn block_after_a_gap_is_not_usable() {
        let statuses = vec![BlockStatus::Ok, BlockStatus::Deadline, BlockStatus::Ok];
        let loaded = Loaded { statuses, sources: vec![Some(Source::OwnDram); 3] };
        assert_eq!(loaded.leading(), 1);
    }
}
