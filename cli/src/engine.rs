//! The reference engine: what an inference engine does with Reprise, with a keyed function for a model.
//!
//! A request is a chain of blocks. The engine asks how many leading blocks are available, loads them layer by
//! layer into its own paged memory, checks every byte against the keyed function, "prefills" the rest by
//! writing the function's bytes, and saves those blocks. Whatever cannot be loaded is recomputed: a cache can
//! only ever cost time.

use std::time::{Duration, Instant};

use anyhow::Context;
use reprise_client::{Client, ConnectOptions, LoadRequest, Priority, Scope, Source, Ticket};
use reprise_policy::key::KeyPart;
use reprise_policy::{BlockKey, Layout, NamespaceDigest, NamespaceSpec, prefix_hash};
use serde::{Deserialize, Serialize};

use crate::kv_function::{self, ObjectPlace};
use crate::paged_kv::{PagedKv, PhysicalBlock};
use crate::trace::{TOKENS_PER_HASH_ID, TraceRequest};

/// Seed of the prefix chain: vLLM's default for its SHA-256 algorithms.
const HASH_SEED: &str = "vllm-none-hash";

/// Blocks of one load call while durable blocks are checked: 256 × 64 KiB = 16 MiB of arena at a time.
const CHECK_WINDOW_BLOCKS: usize = 256;

/// How long one load may take before the rest is recomputed.
const LOAD_DEADLINE: Duration = Duration::from_secs(10);

/// How long a save waits for the arena to make room before the blocks are left unsaved.
const RESERVE_WAIT: Duration = Duration::from_secs(5);

/// How long to wait for the durable notices of all saves.
const DURABLE_WAIT: Duration = Duration::from_secs(30);

/// Cold blocks a first request may need; grows are not needed as the longest trace request has 247 blocks.
const PAGED_BLOCKS_MIN: usize = 512;

/// An engine connected to its node's agent.
pub(crate) struct Engine {
    client: Client,
    namespace: NamespaceDigest,
    layout: Layout,
    kv: PagedKv,
    none_hash: [u8; 32],
    tickets: Vec<(Ticket, Vec<ChainBlock>)>,
    durable: Vec<ChainBlock>,
}

/// How to reach an agent and what to keep there.
#[derive(Clone, Debug)]
pub(crate) struct EngineSettings {
    /// The agent's unix socket.
    pub(crate) socket: std::path::PathBuf,
    /// Geometry of the blocks.
    pub(crate) layout: Layout,
}

/// One block of a prompt: its prefix hash, which the bytes follow from, and its key.
#[derive(Clone, Copy, Debug)]
struct ChainBlock {
    prefix_hash: [u8; 32],
    key: BlockKey,
}

/// Blocks by where they were found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HitCounts {
    /// The node's own DRAM.
    pub(crate) own_dram: u64,
    /// The node's own NVMe.
    pub(crate) own_nvme: u64,
    /// A peer's DRAM.
    pub(crate) peer_dram: u64,
    /// A peer's NVMe.
    pub(crate) peer_nvme: u64,
}

/// What one request cost and gave. Times in microseconds.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct RequestOutcome {
    /// Full blocks of the prompt.
    pub(crate) blocks: u64,
    /// Blocks loaded and verified, by source.
    pub(crate) hits: HitCounts,
    /// Blocks that were matched and then could not be loaded (recomputed).
    pub(crate) lost: u64,
    /// Blocks saved by this request.
    pub(crate) saved: u64,
    /// Blocks that were there already when they were committed.
    pub(crate) duplicates: u64,
    /// Blocks not saved because the arena had no room.
    pub(crate) unsaved: u64,
    /// Bytes loaded into the engine's memory.
    pub(crate) bytes_loaded: u64,
    /// Bytes of those that were compared with the keyed function.
    pub(crate) bytes_verified: u64,
    /// 8-byte words that differed from the keyed function.
    pub(crate) mismatches: u64,
    /// Bytes saved.
    pub(crate) bytes_saved: u64,
    /// The match call.
    pub(crate) match_us: u64,
    /// From the load call until layer 0 of all blocks was in the engine's memory; 0 without a load.
    pub(crate) first_layer_us: u64,
    /// From the load call until all layers were in the engine's memory.
    pub(crate) load_us: u64,
    /// Reserve, fill and commit.
    pub(crate) save_us: u64,
}

/// What a check of all durable blocks found.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct DurableCheck {
    /// Blocks that were announced durable and not known to be evicted.
    pub(crate) asked: u64,
    /// Of those, blocks that the node still has and whose bytes are right.
    pub(crate) present: u64,
    /// Bytes compared.
    pub(crate) bytes_verified: u64,
    /// Words that differed.
    pub(crate) mismatches: u64,
}

impl HitCounts {
    pub(crate) fn add(&mut self, source: Source) {
        match source {
            Source::OwnDram => self.own_dram += 1,
            Source::OwnNvme => self.own_nvme += 1,
            Source::PeerDram => self.peer_dram += 1,
            Source::PeerNvme => self.peer_nvme += 1,
        }
    }

    pub(crate) fn merge(&mut self, other: &HitCounts) {
        self.own_dram += other.own_dram;
        self.own_nvme += other.own_nvme;
        self.peer_dram += other.peer_dram;
        self.peer_nvme += other.peer_nvme;
    }

    pub(crate) fn total(&self) -> u64 {
        self.own_dram + self.own_nvme + self.peer_dram + self.peer_nvme
    }
}

/// The namespace of the reference engine's blocks.
pub(crate) fn namespace(layout: &Layout) -> NamespaceDigest {
    NamespaceSpec {
        model: "reference/keyed-function".into(),
        revision: "1".into(),
        layout: *layout,
        hash_algorithm: "sha256_cbor".into(),
        hash_seed: HASH_SEED.into(),
        engine_format: "reference:LBHNC".into(),
        tenant_salt: String::new(),
    }
    .digest()
}

impl Engine {
    /// Connects to the agent.
    pub(crate) fn connect(settings: &EngineSettings) -> anyhow::Result<Engine> {
        let namespace = namespace(&settings.layout);
        Ok(Engine {
            client: connect(settings, namespace)?,
            namespace,
            layout: settings.layout,
            kv: PagedKv::new(&settings.layout, PAGED_BLOCKS_MIN),
            none_hash: prefix_hash::none_hash(HASH_SEED),
            tickets: Vec::new(),
            durable: Vec::new(),
        })
    }

    /// Opens a new session after the agent's death; what was durable is remembered, what was not is forgotten.
    pub(crate) fn reconnect(&mut self, settings: &EngineSettings) -> anyhow::Result<()> {
        self.client = connect(settings, self.namespace)?;
        self.tickets.clear();
        Ok(())
    }

    /// Serves one request.
    pub(crate) fn run(&mut self, hash_ids: &[u64]) -> anyhow::Result<RequestOutcome> {
        let chain = self.chain(hash_ids);
        let mut outcome = RequestOutcome { blocks: chain.len() as u64, ..RequestOutcome::default() };
        if chain.is_empty() {
            return Ok(outcome);
        }
        let table = self
            .kv
            .allocate(chain.len())
            .context("the prompt has more blocks than the engine's KV memory")?;
        let served = self.serve(&chain, &table, &mut outcome);
        self.kv.release(table);
        served.map(|()| outcome)
    }

    /// Waits for the durable notices of everything saved; returns how many blocks are durable in all.
    pub(crate) fn settle(&mut self) -> anyhow::Result<u64> {
        let give_up = Instant::now() + DURABLE_WAIT;
        for (ticket, blocks) in self.tickets.drain(..) {
            let left = give_up.saturating_duration_since(Instant::now());
            let outcome = self.client.wait_durable(ticket, left).context("waiting for durable notices")?;
            self.durable.extend(blocks.into_iter().filter(|block| !outcome.lost_keys.contains(&block.key)));
        }
        Ok(self.durable.len() as u64)
    }

    /// Loads every durable block from this node alone and compares every byte. Blocks that are gone (evicted
    /// from the pool since) are not asked for again.
    pub(crate) fn check_durable(&mut self) -> anyhow::Result<DurableCheck> {
        let durable = std::mem::take(&mut self.durable);
        let mut check = DurableCheck { asked: durable.len() as u64, ..DurableCheck::default() };
        for window in durable.chunks(CHECK_WINDOW_BLOCKS) {
            let mut outcome = RequestOutcome::default();
            let table = self.kv.allocate(window.len()).context("the engine's KV memory is too small")?;
            let loaded = self.load(window, &table, Scope::Local, &mut outcome);
            let present = loaded.map(|flags| {
                for (index, block) in window.iter().enumerate().filter(|(index, _)| flags[*index]) {
                    let wrong = self.verify(block, table[index], &mut outcome);
                    if wrong == 0 {
                        self.durable.push(*block);
                    }
                }
            });
            self.kv.release(table);
            present?;
            check.bytes_verified += outcome.bytes_verified;
            check.mismatches += outcome.mismatches;
        }
        check.present = self.durable.len() as u64;
        Ok(check)
    }

    fn serve(
        &mut self,
        chain: &[ChainBlock],
        table: &[PhysicalBlock],
        outcome: &mut RequestOutcome,
    ) -> anyhow::Result<()> {
        let keys: Vec<BlockKey> = chain.iter().map(|block| block.key).collect();
        let started = Instant::now();
        let matched = self.client.match_keys(&keys, Scope::Cluster).context("match")?.len();
        outcome.match_us = micros(started);
        let mut usable = 0;
        if matched > 0 {
            let loaded = self.load(&chain[..matched], &table[..matched], Scope::Cluster, outcome)?;
            usable = loaded.iter().take_while(|ok| **ok).count();
            outcome.lost = (matched - loaded.iter().filter(|ok| **ok).count()) as u64;
            for (index, _) in loaded.iter().enumerate().filter(|(_, ok)| **ok) {
                self.verify(&chain[index], table[index], outcome);
            }
        }
        for (block, physical) in chain[usable..].iter().zip(&table[usable..]) {
            self.prefill(block, *physical);
        }
        self.save(&chain[usable..], &table[usable..], outcome)
    }

    /// Loads blocks layer by layer into paged memory; says for each whether it is there.
    fn load(
        &mut self,
        chain: &[ChainBlock],
        table: &[PhysicalBlock],
        scope: Scope,
        outcome: &mut RequestOutcome,
    ) -> anyhow::Result<Vec<bool>> {
        let started = Instant::now();
        let request = LoadRequest {
            keys: chain.iter().map(|block| block.key).collect(),
            deadline: LOAD_DEADLINE,
            read_bytes: 0,
            scope,
        };
        let load = self.client.load(&request).context("load")?;
        let mut usable: Vec<bool> = load.blocks().iter().map(|block| block.is_ok()).collect();
        let parts = self.layout.parts();
        for layer in 0..self.layout.layers() {
            load.wait_layer(layer, LOAD_DEADLINE).with_context(|| format!("waiting for layer {layer}"))?;
            for (block, ok) in usable.iter_mut().enumerate().filter(|(_, ok)| **ok) {
                *ok = (layer * parts..(layer + 1) * parts).all(|object| {
                    let target = self.kv.object_mut(table[block], object as usize);
                    load.copy_object(block, object, target).is_ok()
                });
            }
            if layer == 0 {
                outcome.first_layer_us = micros(started);
            }
        }
        outcome.load_us = micros(started);
        for (block, _) in load.blocks().iter().zip(&usable).filter(|(_, ok)| **ok) {
            if let Some(source) = block.source() {
                outcome.hits.add(source);
            }
            outcome.bytes_loaded += self.layout.block_bytes();
        }
        Ok(usable)
    }

    /// Compares a block in paged memory with the keyed function; returns the words that differ.
    fn verify(&self, block: &ChainBlock, physical: PhysicalBlock, outcome: &mut RequestOutcome) -> u64 {
        let wrong = (0..self.layout.objects())
            .map(|object| {
                let bytes = self.kv.object(physical, object as usize);
                kv_function::mismatches(&block.prefix_hash, self.place(object), bytes)
            })
            .sum();
        outcome.bytes_verified += self.layout.block_bytes();
        outcome.mismatches += wrong;
        wrong
    }

    fn prefill(&mut self, block: &ChainBlock, physical: PhysicalBlock) {
        for object in 0..self.layout.objects() {
            let place = self.place(object);
            kv_function::fill(&block.prefix_hash, place, self.kv.object_mut(physical, object as usize));
        }
    }

    fn save(
        &mut self,
        chain: &[ChainBlock],
        table: &[PhysicalBlock],
        outcome: &mut RequestOutcome,
    ) -> anyhow::Result<()> {
        let started = Instant::now();
        let mut at = 0;
        while at < chain.len() {
            let wanted = u32::try_from(chain.len() - at).expect("a chain has at most 8,192 blocks");
            let reservations = self.client.reserve(wanted, RESERVE_WAIT).context("reserve")?;
            if reservations.is_empty() {
                outcome.unsaved += (chain.len() - at) as u64;
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
            let committed = self.client.commit(items, Priority::Normal).context("commit")?;
            for status in &committed.statuses {
                if status.is_committed() {
                    outcome.saved += 1;
                    outcome.bytes_saved += self.layout.block_bytes();
                } else {
                    outcome.duplicates += 1;
                }
            }
            self.tickets.push((committed.ticket, chain[at..end].to_vec()));
            at = end;
        }
        outcome.save_us = micros(started);
        Ok(())
    }

    fn chain(&self, hash_ids: &[u64]) -> Vec<ChainBlock> {
        let mut parent = self.none_hash;
        let mut tokens = [0; TOKENS_PER_HASH_ID];
        hash_ids
            .iter()
            .map(|hash_id| {
                TraceRequest::block_tokens(*hash_id, &mut tokens);
                parent = prefix_hash::block_hash(&parent, &tokens, &[]);
                ChainBlock {
                    prefix_hash: parent,
                    key: BlockKey::derive(&self.namespace, &parent, KeyPart::default()),
                }
            })
            .collect()
    }

    fn place(&self, object: u32) -> ObjectPlace {
        ObjectPlace { layer: object / self.layout.parts(), part: object % self.layout.parts() }
    }
}

fn connect(settings: &EngineSettings, namespace: NamespaceDigest) -> anyhow::Result<Client> {
    let options = ConnectOptions::new(settings.socket.clone(), namespace, settings.layout)
        .client_name("reference-engine");
    Client::connect(options)
        .with_context(|| format!("connecting to the agent at {}", settings.socket.display()))
}

fn micros(started: Instant) -> u64 {
    u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX)
}
