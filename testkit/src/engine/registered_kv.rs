//! KV memory that is registered with the agent: rings move its blocks from and to extents, and the engine copies all
//! other blocks through a buffer of one object, because controllers may access the memory at any time.

use std::time::Duration;

use anyhow::Context;
use reprise_client::{Client, ClientError, CommitOptions, ExtentStatus};
use reprise_policy::BlockKey;

use super::outcome::RingTraffic;
use crate::paged_kv::{FreeBlocks, PhysicalBlock};
use crate::rings::{Backend, RingCounters, RingLoad, RingPath, RingPathSettings};

/// Time limit for free extents; blocks without one are saved through the arena.
const LEASE_WAIT: Duration = Duration::from_secs(1);

/// Memory that rings reach; see the module.
pub(super) struct RegisteredKv {
    path: RingPath,
    blocks: usize,
    free: FreeBlocks,
    /// Copy of the object that is read or written.
    object: Vec<u8>,
}

impl RegisteredKv {
    /// Allocates memory for `blocks` blocks and registers it.
    pub(super) fn open(client: &Client, blocks: usize) -> anyhow::Result<RegisteredKv> {
        let bytes = usize::try_from(client.layout().object_bytes()).context("object size")?;
        let path = open(client, blocks)?;
        Ok(RegisteredKv { path, blocks, free: FreeBlocks::new(blocks), object: vec![0; bytes] })
    }

    /// Replaces the memory by that of a new session.
    pub(super) fn reopen(&mut self, client: &Client) -> anyhow::Result<()> {
        self.path = open(client, self.blocks)?;
        Ok(())
    }

    pub(super) fn backend(&self) -> String {
        self.path.name().to_owned()
    }

    pub(super) fn allocate(&mut self, count: usize) -> Option<Vec<PhysicalBlock>> {
        self.free.allocate(count)
    }

    pub(super) fn release(&mut self, blocks: Vec<PhysicalBlock>) {
        self.free.release(blocks);
    }

    pub(super) fn read<R>(&mut self, block: PhysicalBlock, object: u32, read: impl FnOnce(&[u8]) -> R) -> R {
        self.path.object(block.index(), object as usize).copy_out(&mut self.object);
        read(&self.object)
    }

    pub(super) fn write<R>(
        &mut self,
        block: PhysicalBlock,
        object: u32,
        write: impl FnOnce(&mut [u8]) -> R,
    ) -> R {
        let result = write(&mut self.object);
        let span = self.path.object(block.index(), object as usize);
        span.copy_in(&self.object).expect("KV memory is writable and has whole objects");
        result
    }

    /// Loads blocks from extents of this node; returns which of them are in memory and match their checksums.
    pub(super) fn load(
        &mut self,
        blocks: &[(PhysicalBlock, BlockKey)],
        traffic: &mut RingTraffic,
    ) -> anyhow::Result<Vec<bool>> {
        let before = self.path.ring_counters();
        let results = self.path.load(&placed(blocks)).context("loading through rings")?;
        traffic.count(before, self.path.ring_counters());
        let loaded: Vec<bool> = results.iter().map(|result| *result == RingLoad::Verified).collect();
        traffic.blocks_loaded += loaded.iter().filter(|loaded| **loaded).count() as u64;
        Ok(loaded)
    }

    /// Saves consecutive blocks of a chain to extents. Returns the statuses of as many leading blocks as got an
    /// extent.
    pub(super) fn save(
        &mut self,
        blocks: &[(PhysicalBlock, BlockKey)],
        options: CommitOptions,
        traffic: &mut RingTraffic,
    ) -> anyhow::Result<Vec<ExtentStatus>> {
        let before = self.path.ring_counters();
        let saved = self.path.save(&placed(blocks), options, LEASE_WAIT);
        traffic.count(before, self.path.ring_counters());
        let statuses = match saved {
            // Sessions hold their share of the devices.
            Err(error) if matches!(error.downcast_ref::<ClientError>(), Some(ClientError::Busy(_))) => {
                Vec::new()
            }
            saved => saved.context("saving through rings")?,
        };
        let durable = statuses.iter().filter(|status| **status == ExtentStatus::Durable);
        traffic.blocks_saved += durable.count() as u64;
        Ok(statuses)
    }
}

impl RingTraffic {
    /// Adds the work of rings between two readings of their counters.
    fn count(&mut self, before: RingCounters, after: RingCounters) {
        self.batches += after.batches - before.batches;
        self.contexts += after.contexts - before.contexts;
        self.bytes_read += after.bytes_read - before.bytes_read;
        self.bytes_written += after.bytes_written - before.bytes_written;
    }
}

fn open(client: &Client, blocks: usize) -> anyhow::Result<RingPath> {
    RingPath::open(client, blocks, RingPathSettings::default()).context("registering KV memory for rings")
}

fn placed(blocks: &[(PhysicalBlock, BlockKey)]) -> Vec<(usize, BlockKey)> {
    blocks.iter().map(|(block, key)| (block.index(), *key)).collect()
}
