//! KV memory of the reference engine, by its path of blocks.

use reprise_client::Client;

use super::path::EnginePath;
use super::registered_kv::RegisteredKv;
use crate::paged_kv::{PagedKv, PhysicalBlock};

/// KV memory in which rings and copies place blocks.
pub(super) enum KvMemory {
    /// Own memory: blocks are copied from and to the arena.
    Paged(PagedKv),
    /// Memory that is registered for devices: rings reach it too.
    Registered(Box<RegisteredKv>),
}

impl KvMemory {
    /// Allocates memory for `blocks` blocks; for rings, registers it with the agent.
    pub(super) fn open(path: EnginePath, client: &Client, blocks: usize) -> anyhow::Result<KvMemory> {
        Ok(match path {
            EnginePath::Arena => KvMemory::Paged(PagedKv::new(client.layout(), blocks)?),
            EnginePath::Rings => KvMemory::Registered(Box::new(RegisteredKv::open(client, blocks)?)),
        })
    }

    /// Registers the memory with a new session. Its contents are lost; its blocks stay allocated.
    pub(super) fn reopen(&mut self, client: &Client) -> anyhow::Result<()> {
        match self {
            KvMemory::Paged(_) => Ok(()),
            KvMemory::Registered(kv) => kv.reopen(client),
        }
    }

    pub(super) fn allocate(&mut self, count: usize) -> Option<Vec<PhysicalBlock>> {
        match self {
            KvMemory::Paged(kv) => kv.allocate(count),
            KvMemory::Registered(kv) => kv.allocate(count),
        }
    }

    pub(super) fn release(&mut self, blocks: Vec<PhysicalBlock>) {
        match self {
            KvMemory::Paged(kv) => kv.release(blocks),
            KvMemory::Registered(kv) => kv.release(blocks),
        }
    }

    /// Passes the bytes of an object to a function.
    pub(super) fn read<R>(&mut self, block: PhysicalBlock, object: u32, read: impl FnOnce(&[u8]) -> R) -> R {
        match self {
            KvMemory::Paged(kv) => read(kv.object(block, object as usize)),
            KvMemory::Registered(kv) => kv.read(block, object, read),
        }
    }

    /// Lets a function write all bytes of an object.
    pub(super) fn write<R>(
        &mut self,
        block: PhysicalBlock,
        object: u32,
        write: impl FnOnce(&mut [u8]) -> R,
    ) -> R {
        match self {
            KvMemory::Paged(kv) => write(kv.object_mut(block, object as usize)),
            KvMemory::Registered(kv) => kv.write(block, object, write),
        }
    }

    /// Returns the memory that rings reach, if the engine has rings.
    pub(super) fn registered(&mut self) -> Option<&mut RegisteredKv> {
        match self {
            KvMemory::Paged(_) => None,
            KvMemory::Registered(kv) => Some(kv),
        }
    }

    /// Returns the name of the backend that moves blocks without the arena, if the engine has one.
    pub(super) fn backend(&self) -> Option<String> {
        match self {
            KvMemory::Paged(_) => None,
            KvMemory::Registered(kv) => Some(kv.backend()),
        }
    }
}
