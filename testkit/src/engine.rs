//! The reference engine: uses Reprise like an inference engine, with a keyed function instead of a model.
//!
//! A request is a chain of blocks. The engine queries the number of available leading blocks, loads them
//! layer by layer into its own paged memory, checks every byte against the keyed function, "prefills" the
//! rest by writing the function's bytes, and saves these blocks. Blocks that cannot be loaded are recomputed,
//! failed calls are counted and lost sessions reopened: failures of the cache only cost time.

mod outcome;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::Context;
use reprise_client::{
    BlockStatus, Client, ClientError, CommitOptions, ConnectOptions, LoadRequest, Scope, Source, Ticket,
};
use reprise_policy::key::KeyPart;
use reprise_policy::{BlockKey, Layout, NamespaceDigest, NamespaceSpec, TenantName, prefix_hash};

pub use outcome::{DurableCheck, HitCounts, RequestOutcome};

use crate::kv_function;
use crate::paged_kv::{PagedKv, PhysicalBlock};
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
    kv: PagedKv,
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
}

/// One block of a prompt: its prefix hash, which determines its bytes, and its key.
#[derive(Clone, Copy, Debug)]
struct ChainBlock {
    prefix_hash: [u8; 32],
    key: BlockKey,
}

/// Blocks that a load call copied into paged memory.
struct Loaded {
    /// Result of each block, including the copy.
    statuses: Vec<BlockStatus>,
    /// Source of each block.
    sources: Vec<Option<Source>>,
}

impl Loaded {
    /// Returns the number of leading blocks that are loaded.
    fn leading(&self) -> usize {
        self.statuses.iter().take_while(|status| **status == BlockStatus::Ok).count()
    }
}

/// Returns the namespace of the reference engine's blocks of a tenant.
pub fn namespace(layout: &Layout, tenant: &TenantName) -> NamespaceDigest {
    let salt = if *tenant == TenantName::default_tenant() { "" } else { tenant.as_str() };
    NamespaceSpec {
        model: "reference/keyed-function".into(),
        revision: "1".into(),
        layout: *layout,
        hash_algorithm: "sha256_cbor".into(),
        hash_seed: HASH_SEED.into(),
        engine_format: "reference:LBHNC".into(),
        tenant_salt: salt.to_owned(),
    }
    .digest()
}

/// Returns the keys of a prompt's blocks.
pub fn chain_keys(layout: &Layout, tenant: &TenantName, hash_ids: &[u64]) -> Vec<BlockKey> {
    let none_hash = prefix_hash::none_hash(HASH_SEED);
    chain(&namespace(layout, tenant), none_hash, hash_ids).into_iter().map(|block| block.key).collect()
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
        let namespace = namespace(&settings.layout, &settings.tenant);
        Ok(Engine {
            settings: settings.clone(),
            client: connect(settings, namespace)?,
            namespace,
            layout: settings.layout,
            kv: PagedKv::new(&settings.layout, PAGED_BLOCKS_MIN)?,
            none_hash: prefix_hash::none_hash(HASH_SEED),
            tickets: Vec::new(),
            durable: BTreeMap::new(),
        })
    }

    /// Opens a new session after the agent's restart; pending saves are dropped, durable blocks stay
    /// recorded.
    pub fn reconnect(&mut self) -> anyhow::Result<()> {
        self.client = connect(&self.settings, self.namespace)?;
        self.tickets.clear();
        Ok(())
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
    ) -> Result<(), ClientError> {
        let mut outcome = RequestOutcome::default();
        let loaded = self.load(window, table, Scope::Local, &mut outcome)?;
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
    fn check_call<T>(&mut self, result: Result<T, ClientError>, outcome: &mut RequestOutcome) -> Option<T> {
        let error = match result {
            Ok(value) => return Some(value),
            Err(error) => error,
        };
        outcome.errors += 1;
        tracing::warn!(%error, "a call to the agent failed; its blocks are computed");
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
    ) -> Result<usize, ClientError> {
        let keys: Vec<BlockKey> = chain.iter().map(|block| block.key).collect();
        let started = Instant::now();
        let matched = self.client.match_keys(&keys, Scope::Cluster)?.len();
        outcome.match_us = micros(started);
        if matched == 0 {
            return Ok(0);
        }
        outcome.lost = matched as u64;
        let loaded = self.load(&chain[..matched], &table[..matched], Scope::Cluster, outcome)?;
        let usable = loaded.leading();
        outcome.lost -= usable as u64;
        outcome.bytes_loaded += usable as u64 * self.layout.block_bytes();
        for source in loaded.sources[..usable].iter().flatten() {
            outcome.hits.add(*source);
        }
        Ok(usable)
    }

    /// Loads blocks layer by layer into paged memory.
    fn load(
        &mut self,
        chain: &[ChainBlock],
        table: &[PhysicalBlock],
        scope: Scope,
        outcome: &mut RequestOutcome,
    ) -> Result<Loaded, ClientError> {
        let started = Instant::now();
        let request = LoadRequest {
            keys: chain.iter().map(|block| block.key).collect(),
            deadline: LOAD_DEADLINE,
            read_bytes: 0,
            scope,
        };
        let load = self.client.load(&request)?;
        let mut statuses: Vec<BlockStatus> = load.blocks().iter().map(|block| block.status()).collect();
        let parts = self.layout.parts();
        for layer in 0..self.layout.layers() {
            load.wait_layer(layer, LOAD_DEADLINE)?;
            let readable = statuses.iter_mut().enumerate().filter(|(_, status)| **status == BlockStatus::Ok);
            for (block, status) in readable {
                let copied = (layer * parts..(layer + 1) * parts).all(|object| {
                    let target = self.kv.object_mut(table[block], object as usize);
                    load.copy_object(block, object, target).is_ok()
                });
                if !copied {
                    *status = BlockStatus::Failed;
                }
            }
            if layer == 0 {
                outcome.first_layer_us = micros(started);
            }
        }
        outcome.load_us = micros(started);
        Ok(Loaded { statuses, sources: load.blocks().iter().map(|block| block.source()).collect() })
    }

    /// Compares a block in paged memory with the keyed function; returns the words that differ.
    fn verify(&self, block: &ChainBlock, physical: PhysicalBlock, outcome: &mut RequestOutcome) -> u64 {
        let wrong = (0..self.layout.objects())
            .map(|object| {
                let bytes = self.kv.object(physical, object as usize);
                kv_function::mismatches(&block.prefix_hash, object, bytes)
            })
            .sum();
        outcome.bytes_verified += self.layout.block_bytes();
        outcome.mismatches += wrong;
        wrong
    }

    fn prefill(&mut self, block: &ChainBlock, physical: PhysicalBlock) {
        for object in 0..self.layout.objects() {
            kv_function::fill(&block.prefix_hash, object, self.kv.object_mut(physical, object as usize));
        }
    }

    /// Saves the blocks of a chain from `next_block` on until the arena is full; advances `next_block`.
    fn save(
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
                    reservation.fill_object(object, self.kv.object(*physical, object as usize))?;
                }
                items.push((reservation, block.key));
            }
            let parent = at.checked_sub(1).map(|last| chain[last].key);
            let committed =
                self.client.commit(items, CommitOptions { parent, ..CommitOptions::default() })?;
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

fn connect(settings: &EngineSettings, namespace: NamespaceDigest) -> anyhow::Result<Client> {
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

fn micros(started: Instant) -> u64 {
    u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX)
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
