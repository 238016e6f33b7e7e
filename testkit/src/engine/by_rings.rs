//! Loads and saves of an engine with rings; without rings, they leave all blocks to the arena.

use anyhow::bail;
use reprise_client::{BlockStatus, ExtentStatus, Source};
use reprise_policy::BlockKey;

use super::outcome::RequestOutcome;
use super::{ChainBlock, Engine, LoadPlan, Loaded, commit_options};
use crate::paged_kv::PhysicalBlock;

/// Maximum blocks of one save: with the demo's blocks of 256 KiB, 16 MiB of extents.
const SAVE_BLOCKS_MAX: usize = 64;

impl Engine {
    /// Loads the blocks on devices of the node through rings, as far as possible.
    pub(super) fn load_by_rings(
        &mut self,
        plan: LoadPlan<'_>,
        loaded: &mut Loaded,
        outcome: &mut RequestOutcome,
    ) -> anyhow::Result<()> {
        let Some(kv) = self.kv.registered() else { return Ok(()) };
        let block = |position: &usize| (plan.table[*position], plan.chain[*position].key);
        let blocks: Vec<(PhysicalBlock, BlockKey)> = plan.on_devices.iter().map(block).collect();
        if blocks.is_empty() {
            return Ok(());
        }
        let verified = kv.load(&blocks, &mut outcome.rings)?;
        for (position, _) in plan.on_devices.iter().zip(verified).filter(|(_, verified)| *verified) {
            loaded.statuses[*position] = BlockStatus::Ok;
            loaded.sources[*position] = Some(Source::OwnNvme);
        }
        Ok(())
    }

    /// Saves blocks to extents; they are durable afterwards. Ends early when no extent is free.
    pub(super) fn save_by_rings(
        &mut self,
        chain: &[ChainBlock],
        table: &[PhysicalBlock],
        next_block: &mut usize,
        outcome: &mut RequestOutcome,
    ) -> anyhow::Result<()> {
        while let Some(kv) = self.kv.registered()
            && *next_block < chain.len()
        {
            let at = *next_block;
            let end = chain.len().min(at + SAVE_BLOCKS_MAX);
            let keys = chain[at..end].iter().map(|block| block.key);
            let blocks: Vec<_> = table[at..end].iter().copied().zip(keys).collect();
            let statuses = kv.save(&blocks, commit_options(chain, at), &mut outcome.rings)?;
            if statuses.is_empty() {
                break;
            }
            *next_block += statuses.len();
            for (block, status) in chain[at..].iter().zip(statuses) {
                match status {
                    ExtentStatus::Durable => {
                        outcome.saved += 1;
                        outcome.bytes_saved += self.layout.block_bytes();
                        self.durable.insert(block.key, *block);
                    }
                    ExtentStatus::Exists => outcome.duplicates += 1,
                    other => bail!("a block that rings have written is not durable: {other:?}"),
                }
            }
        }
        Ok(())
    }
}
