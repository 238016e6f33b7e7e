//! Memory of the accelerators of a node: tokens of running requests, and blocks of finished ones.
//!
//! Blocks of prompts are shared, as in engines with a prefix cache: a block in use has its place once. Blocks that
//! no request uses stay until their place is needed, and leave in the order of vLLM: least recently used, from the
//! last to the first of a chain. Without such a cache, each request has its own tokens.
//!
//! Invariant: blocks in use, and tokens outside of blocks, never exceed the capacity after a step's preemptions.

use reprise_policy::eviction::{Block, Chains, EntryIndex, EvictionKind, EvictionPolicy};

use crate::replay::{NO_BLOCK, Slot, TierSlots};

/// Share of the memory that stays free when a request is admitted, for the tokens of others: vLLM's watermark.
const WATERMARK_DIVISOR: u64 = 100;

/// Order of eviction of vLLM's prefix cache.
const POLICY: EvictionPolicy = EvictionPolicy { kind: EvictionKind::Lru, chains: Chains::DescendantsFirst };

#[derive(Debug)]
pub(super) struct Hbm {
    block_tokens: u64,
    capacity_tokens: u64,
    /// Tokens of running requests outside of shared blocks.
    own_tokens: u64,
    /// Blocks that running requests use.
    used_blocks: u64,
    cache: Option<TierSlots>,
}

/// Memory of one request.
#[derive(Debug, Default)]
pub(super) struct HbmUse {
    blocks: Vec<EntryIndex>,
    own_tokens: u64,
}

impl Hbm {
    pub(super) fn new(capacity_tokens: u64, block_tokens: u64, has_cache: bool) -> Hbm {
        let blocks = capacity_tokens / block_tokens;
        let cache = has_cache.then(|| TierSlots::new(POLICY, blocks, 1));
        Hbm { block_tokens, capacity_tokens, own_tokens: 0, used_blocks: 0, cache }
    }

    /// Whether a request alone fits.
    pub(super) fn can_hold(&self, blocks: usize, tokens: u64) -> bool {
        let in_blocks = if self.cache.is_some() { blocks as u64 * self.block_tokens } else { 0 };
        // The output may begin in the last block.
        in_blocks.max(tokens).saturating_add(self.block_tokens) <= self.capacity_tokens
    }

    /// Number of leading blocks that were computed and are present.
    pub(super) fn leading(&self, chain: &[u32]) -> usize {
        let Some(cache) = &self.cache else { return 0 };
        let is_ready = |block: &&u32| cache.find(**block).is_some_and(|entry| cache.slot(entry).is_saved);
        chain.iter().take_while(is_ready).count()
    }

    /// Takes memory for the prompt of a request; `None` without room. A request that is alone needs no free rest.
    pub(super) fn admit(&mut self, chain: &[u32], tokens: u64, is_alone: bool) -> Option<HbmUse> {
        let rest = if is_alone { 0 } else { self.capacity_tokens / WATERMARK_DIVISOR };
        let in_blocks = chain.len() as u64 * self.block_tokens;
        let own_tokens = if self.cache.is_some() { tokens.saturating_sub(in_blocks) } else { tokens };
        let is_unused = |block: &&u32| {
            let cache = self.cache.as_ref().expect("checked");
            cache.find(**block).is_none_or(|entry| cache.slot(entry).holders == 0)
        };
        let more = if self.cache.is_some() { chain.iter().filter(is_unused).count() as u64 } else { 0 };
        if self.used() + more * self.block_tokens + own_tokens + rest > self.capacity_tokens {
            return None;
        }
        self.own_tokens += own_tokens;
        self.used_blocks += more;
        Some(HbmUse { blocks: self.take_blocks(chain), own_tokens })
    }

    fn take_blocks(&mut self, chain: &[u32]) -> Vec<EntryIndex> {
        let capacity = self.capacity_tokens.saturating_sub(self.own_tokens) / self.block_tokens;
        let Some(cache) = &mut self.cache else { return Vec::new() };
        cache.set_capacity(capacity);
        let present: Vec<Option<EntryIndex>> = chain.iter().map(|block| cache.find(*block)).collect();
        present.iter().flatten().for_each(|entry| cache.hold(*entry));
        let mut parent = NO_BLOCK;
        let mut blocks = Vec::with_capacity(chain.len());
        for (depth, (block, present)) in (0..).zip(chain.iter().zip(present)) {
            let entry = present.unwrap_or_else(|| {
                while cache.len() >= capacity {
                    cache.make_room(0).expect("blocks in use leave room");
                }
                let (is_reused, is_saved) = (false, false);
                cache.place(Slot { block: *block, parent, depth, tenant: 0, holders: 1, is_reused, is_saved })
            });
            blocks.push(entry);
            parent = *block;
        }
        blocks
    }

    /// Marks the blocks of a request as computed: others may use them.
    pub(super) fn computed(&mut self, used: &HbmUse) {
        let Some(cache) = &mut self.cache else { return };
        used.blocks.iter().for_each(|entry| cache.slot_mut(*entry).is_saved = true);
    }

    /// Adds generated tokens of all requests.
    pub(super) fn grow(&mut self, tokens: u64) {
        self.own_tokens += tokens;
    }

    /// Ends the use of memory by a request that has generated some tokens.
    pub(super) fn release(&mut self, used: HbmUse, generated: u64) {
        self.own_tokens -= used.own_tokens + generated;
        let Some(cache) = &mut self.cache else { return };
        for entry in used.blocks.into_iter().rev() {
            if !cache.end_hold(entry) {
                continue;
            }
            self.used_blocks -= 1;
            if !cache.slot(entry).is_saved {
                cache.remove(entry);
                continue;
            }
            cache.link(entry);
            let slot = cache.slot(entry);
            let facts = Block {
                key_hash: slot.key_hash(),
                bytes: self.block_tokens,
                position: Some(slot.depth),
                ..Block::default()
            };
            cache.release(entry, &facts);
        }
    }

    /// Evicts blocks in favour of generated tokens; returns whether all that is in use fits.
    pub(super) fn shrink(&mut self) -> bool {
        if self.used() > self.capacity_tokens {
            return false;
        }
        let capacity = (self.capacity_tokens - self.own_tokens) / self.block_tokens;
        if let Some(cache) = &mut self.cache {
            cache.set_capacity(capacity);
            while cache.len() > capacity {
                cache.make_room(0).expect("blocks in use fit");
            }
        }
        true
    }

    /// Number of steps of some decoding requests that fit; at least 1, after which one is preempted.
    pub(super) fn steps_that_fit(&self, requests: u64) -> u64 {
        let free = self.capacity_tokens.saturating_sub(self.used());
        free.checked_div(requests).unwrap_or(u64::MAX).max(1)
    }

    fn used(&self) -> u64 {
        self.used_blocks * self.block_tokens + self.own_tokens
    }
}
