//! Loading blocks to an engine's memory.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use reprise_policy::BlockKey;

use super::{
    Pace, PagedMemory, PhysicalBlock, STALL_TIMEOUT_DEFAULT, Unpaced, cancelled, check, window_blocks,
};
use crate::client::Client;
use crate::deadline;
use crate::error::ClientError;
use crate::load::{BlockStatus, LOAD_DEADLINE_DEFAULT, Load, LoadRequest, Patience, PendingLoad, Verify};
use crate::matching::{Scope, Source};

/// How to load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadOptions {
    /// What is not there by then is given up, from the call on. More than 600 s are refused (`BadRequest`).
    pub deadline: Duration,
    /// How long the agent may show no progress and no sign of life: it is given up then (`Timeout`).
    pub stall_timeout: Duration,
    /// How long nothing may come although the agent is there, because another node or a device hangs: what is missing then
    /// is given up (`Stalled`). `None`: until the deadline.
    pub standstill_timeout: Option<Duration>,
    /// Where to look.
    pub scope: Scope,
    /// Whether copies are checked.
    pub verify: Verify,
}

/// What became of a load.
#[derive(Debug)]
pub struct LoadedBlocks {
    /// Of each block, in the order of the call: `Ok` ones are whole in the memory.
    pub statuses: Vec<BlockStatus>,
    /// Where each was found; `None` when it was not.
    pub sources: Vec<Option<Source>>,
    /// Why the load ended before its end.
    pub stopped_by: Option<ClientError>,
}

/// A part of a load that was asked for.
struct Window {
    /// Which blocks of the call.
    blocks: Vec<usize>,
    pending: PendingLoad,
}

/// A load at work: where its blocks go, and what has become of them.
struct Loading<'a> {
    client: &'a Client,
    blocks: &'a [(BlockKey, PhysicalBlock)],
    /// `None`: blocks only have to be in the arena.
    memory: Option<&'a dyn PagedMemory>,
    options: LoadOptions,
    pace: &'a dyn Pace,
    until: Instant,
    /// Blocks that are to be asked for, in order.
    rest: VecDeque<usize>,
    /// Blocks that were asked for and are yet to be copied.
    asked: usize,
    loaded: LoadedBlocks,
}

impl Default for LoadOptions {
    fn default() -> LoadOptions {
        LoadOptions {
            deadline: LOAD_DEADLINE_DEFAULT,
            stall_timeout: STALL_TIMEOUT_DEFAULT,
            standstill_timeout: None,
            scope: Scope::default(),
            verify: Verify::default(),
        }
    }
}

impl LoadedBlocks {
    /// A load of which nothing came.
    pub(crate) fn failed(blocks: usize, reason: ClientError) -> LoadedBlocks {
        LoadedBlocks { stopped_by: Some(reason), ..LoadedBlocks::none_yet(blocks) }
    }

    fn none_yet(blocks: usize) -> LoadedBlocks {
        LoadedBlocks {
            statuses: vec![BlockStatus::Failed; blocks],
            sources: vec![None; blocks],
            stopped_by: None,
        }
    }

    /// Leading blocks that are there: what an engine that needs a prefix can use.
    pub fn leading(&self) -> usize {
        self.statuses.iter().take_while(|status| **status == BlockStatus::Ok).count()
    }
}

impl Client {
    /// Loads blocks, any number of them, each to its place in the memory, until all are there or have failed, or
    /// something goes wrong: the answer says it for each.
    ///
    /// # Errors
    /// `BadRequest` (layout or block numbers do not fit); nothing was loaded then.
    pub fn load_blocks(
        &self,
        blocks: &[(BlockKey, PhysicalBlock)],
        memory: &dyn PagedMemory,
        options: &LoadOptions,
    ) -> Result<LoadedBlocks, ClientError> {
        self.load_blocks_paced(blocks, memory, options, &Unpaced)
    }

    /// As [`Client::load_blocks`], in the order and as long as its pace says.
    pub(crate) fn load_blocks_paced(
        &self,
        blocks: &[(BlockKey, PhysicalBlock)],
        memory: &dyn PagedMemory,
        options: &LoadOptions,
        pace: &dyn Pace,
    ) -> Result<LoadedBlocks, ClientError> {
        check(self, blocks, memory)?;
        let mut loading = Loading { pace, ..Loading::new(self, blocks, Some(memory), *options) };
        let stopped_by = loading.run().err();
        Ok(LoadedBlocks { stopped_by, ..loading.loaded })
    }

    /// Brings blocks into this node's DRAM, where they may be evicted again: what a request will soon load is there
    /// then. Returns how many are.
    ///
    /// # Errors
    /// As [`Client::load`].
    pub fn prefetch(&self, keys: &[BlockKey], options: &LoadOptions) -> Result<usize, ClientError> {
        let blocks: Vec<_> = keys.iter().map(|key| (*key, PhysicalBlock(0))).collect();
        let mut loading = Loading::new(self, &blocks, None, *options);
        loading.run()?;
        Ok(loading.loaded.statuses.iter().filter(|status| **status == BlockStatus::Ok).count())
    }
}

impl<'a> Loading<'a> {
    fn new(
        client: &'a Client,
        blocks: &'a [(BlockKey, PhysicalBlock)],
        memory: Option<&'a dyn PagedMemory>,
        options: LoadOptions,
    ) -> Loading<'a> {
        Loading {
            client,
            blocks,
            memory,
            options,
            pace: &Unpaced,
            until: deadline::after(options.deadline),
            rest: (0..blocks.len()).collect(),
            asked: 0,
            loaded: LoadedBlocks::none_yet(blocks.len()),
        }
    }

    /// Loads window after window, the next one on its way while one is used.
    fn run(&mut self) -> Result<(), ClientError> {
        let mut coming = self.start_window()?;
        while let Some(Window { blocks, pending }) = coming {
            let load = pending.wait_with(self.patience())?.with_verify(self.options.verify);
            coming = self.start_window()?;
            self.finish_window(&blocks, &load)?;
            drop(load);
            if coming.is_none() {
                coming = self.start_window()?;
            }
        }
        Ok(())
    }

    /// From the last progress on.
    fn patience(&self) -> Patience {
        let LoadOptions { stall_timeout: stall, standstill_timeout: standstill, .. } = self.options;
        Patience { stall, standstill, until: self.until }
    }

    /// Asks for the next blocks; `None` when all were asked for.
    fn start_window(&mut self) -> Result<Option<Window>, ClientError> {
        let count = self.rest.len().min(window_blocks(self.client.layout(), self.pace.order()));
        if count == 0 {
            return Ok(None);
        }
        let blocks: Vec<usize> = self.rest.drain(..count).collect();
        let request = LoadRequest {
            keys: blocks.iter().map(|block| self.blocks[*block].0).collect(),
            deadline: self.until.saturating_duration_since(Instant::now()).min(self.options.deadline),
            read_bytes: 0,
            scope: self.options.scope,
        };
        let pending = self.client.start_load(&request)?;
        self.asked += count;
        Ok(Some(Window { blocks, pending }))
    }

    /// Takes what a window brings, layer by layer; what found no room is asked for again if anything else came.
    fn finish_window(&mut self, blocks: &[usize], load: &Load) -> Result<(), ClientError> {
        let mut statuses: Vec<BlockStatus> = load.blocks().iter().map(|block| block.status()).collect();
        self.asked -= blocks.len();
        // What found no room may be asked for again, and its layers come after these.
        let is_last = self.asked == 0 && self.rest.is_empty() && !statuses.contains(&BlockStatus::NoSpace);
        for layer in 0..self.client.layout().layers() {
            if !self.pace.may_go_on() {
                return Err(cancelled());
            }
            load.wait_layer_with(layer, self.patience())?;
            self.copy_layer(layer, blocks, &mut statuses, load);
            if is_last {
                self.pace.note_copied(layer + 1);
            }
        }
        // Copies that were checked are whole, whatever became of the slot since.
        if self.memory.is_none() || self.options.verify == Verify::Off {
            (0..).zip(&mut statuses).for_each(|(index, status)| *status = load.status(index));
        }
        let any_came = statuses.contains(&BlockStatus::Ok);
        let mut without_room = Vec::new();
        for (index, block) in blocks.iter().enumerate() {
            self.loaded.statuses[*block] = statuses[index];
            self.loaded.sources[*block] = load.blocks()[index].source();
            if statuses[index] == BlockStatus::NoSpace && any_came {
                without_room.push(*block);
            }
        }
        without_room.into_iter().rev().for_each(|block| self.rest.push_front(block));
        Ok(())
    }

    fn copy_layer(&self, layer: u32, blocks: &[usize], statuses: &mut [BlockStatus], load: &Load) {
        let Some(memory) = self.memory else { return };
        let parts = self.client.layout().parts();
        let readable = statuses.iter_mut().enumerate().filter(|(_, status)| **status == BlockStatus::Ok);
        for (index, status) in readable {
            let physical = self.blocks[blocks[index]].1;
            let copied = (layer * parts..(layer + 1) * parts).all(|object| {
                let mut copied = false;
                memory.write_object(physical, object, &mut |bytes| {
                    copied = load.copy_object(index, object, bytes).is_ok();
                });
                copied
            });
            if !copied {
                *status = BlockStatus::Failed;
            }
        }
    }
}
