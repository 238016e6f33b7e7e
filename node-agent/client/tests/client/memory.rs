//! Paged memory for tests, with a lock for each block.

use std::sync::{Mutex, MutexGuard, PoisonError};

use reprise_client::{PagedMemory, PhysicalBlock};
use reprise_policy::{BlockKey, Layout};

use crate::fake_agent::{block_bytes, key, layout};

/// Memory whose blocks are zero until they are written.
#[derive(Debug)]
pub(crate) struct Memory {
    layout: Layout,
    blocks: Vec<Mutex<Vec<u8>>>,
}

impl Memory {
    pub(crate) fn new(blocks: usize) -> Memory {
        let layout = layout();
        let empty = || Mutex::new(vec![0; layout.block_bytes() as usize]);
        Memory { layout, blocks: (0..blocks).map(|_| empty()).collect() }
    }

    /// Memory in which block `n` contains the test bytes of number `n`.
    pub(crate) fn filled(blocks: u8) -> Memory {
        let memory = Memory::new(usize::from(blocks));
        (0..blocks).for_each(|number| *memory.block(number.into()) = block_bytes(number));
        memory
    }

    pub(crate) fn block(&self, number: usize) -> MutexGuard<'_, Vec<u8>> {
        self.blocks[number].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PagedMemory for Memory {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn blocks(&self) -> usize {
        self.blocks.len()
    }

    fn read_object(&self, block: PhysicalBlock, object: u32, read: &mut dyn FnMut(&[u8])) {
        let bytes = self.layout.object_bytes() as usize;
        read(&self.block(block.0)[object as usize * bytes..][..bytes]);
    }

    fn write_object(&self, block: PhysicalBlock, object: u32, write: &mut dyn FnMut(&mut [u8])) {
        let bytes = self.layout.object_bytes() as usize;
        write(&mut self.block(block.0)[object as usize * bytes..][..bytes]);
    }
}

/// Pairs the key of each number with its physical block.
pub(crate) fn placed(blocks: impl IntoIterator<Item = (u8, usize)>) -> Vec<(BlockKey, PhysicalBlock)> {
    blocks.into_iter().map(|(number, block)| (key(number), PhysicalBlock(block))).collect()
}
