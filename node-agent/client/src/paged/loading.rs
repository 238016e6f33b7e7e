//! Loads of blocks to an engine's memory.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use reprise_policy::BlockKey;
use reprise_policy::session::{Scope, Source};

use super::{
    Pace, PagedMemory, PhysicalBlock, STALL_TIMEOUT_DEFAULT, Unpaced, cancelled, check, window_blocks,
};
use crate::client::Client;
use crate::deadline;
use crate::error::ClientError;
use crate::load::{BlockStatus, LOAD_DEADLINE_DEFAULT, Load, LoadRequest, LoadTimeouts, PendingLoad, Verify};

/// Time after the limit of a wait in which the agent can still answer: it does so within some milliseconds of its deadline,
/// but shares its cores with the engine.
const LIMIT_GRACE: Duration = Duration::from_millis(100);

/// Options of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadOptions {
    /// Deadline, from the call on; blocks that are missing then have failed. The agent rejects more than 600
    /// s (`BadRequest`).
    pub deadline: Duration,
    /// Limit without progress and without sign of life of the agent; then the load ends (`Timeout`). The limit of a wait
    /// can end it before that (`LimitReached`).
    pub stall_timeout: Duration,
    /// Limit without progress while the agent answers, because another node or a device hangs; then the load
    /// ends (`Stalled`). `None`: until the deadline.
    pub standstill_timeout: Option<Duration>,
    /// Where the agent searches for the blocks.
    pub scope: Scope,
    /// Whether copies are verified.
    pub verify: Verify,
}

/// Result of a load.
#[derive(Debug)]
pub struct LoadedBlocks {
    /// Status of each block, in the order of the call; blocks with `Ok` are complete in the memory.
    pub statuses: Vec<BlockStatus>,
    /// Source of each block; `None` if it was not found.
    pub sources: Vec<Option<Source>>,
    /// Error that ended the load early.
    pub stopped_by: Option<ClientError>,
    /// Time without a block before the agent ended the load at the limit of its wait; zero for other ends.
    pub standstill: Duration,
}

/// One requested part of a load.
struct Window {
    /// Indices into the blocks of the call.
    blocks: Vec<usize>,
    pending: PendingLoad,
}

/// State of a running load.
struct Loading<'a> {
    client: &'a Client,
    blocks: &'a [(BlockKey, PhysicalBlock)],
    /// `None`: the blocks are only loaded into the arena.
    memory: Option<&'a dyn PagedMemory>,
    options: LoadOptions,
    pace: &'a dyn Pace,
    /// End of the load: its deadline, or before that the limit of its pace.
    until: Instant,
    deadline: Instant,
    /// Whether the pace has a limit: the caller then needs leading blocks only.
    is_limited: bool,
    /// Begin of the load, or the end of the last window of which blocks came.
    progress_at: Instant,
    /// Blocks that are still to be requested, in order.
    rest: VecDeque<usize>,
    /// Number of blocks that were requested and not copied yet.
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
    /// Result of a load that loaded nothing.
    pub(crate) fn failed(blocks: usize, reason: ClientError) -> LoadedBlocks {
        LoadedBlocks { stopped_by: Some(reason), ..LoadedBlocks::none_yet(blocks) }
    }

    fn none_yet(blocks: usize) -> LoadedBlocks {
        LoadedBlocks {
            statuses: vec![BlockStatus::Failed; blocks],
            sources: vec![None; blocks],
            stopped_by: None,
            standstill: Duration::ZERO,
        }
    }

    /// Returns the number of leading blocks that were loaded: the usable part for an engine that needs a
    /// prefix.
    pub fn leading(&self) -> usize {
        self.statuses.iter().take_while(|status| **status == BlockStatus::Ok).count()
    }
}

impl Client {
    /// Loads any number of blocks, each to its place in the memory. Returns when every block has been loaded
    /// or has failed, or at the first error; the result has the status of each block.
    ///
    /// # Errors
    /// `BadRequest` (layout or block numbers do not fit); nothing was loaded.
    pub fn load_blocks(
        &self,
        blocks: &[(BlockKey, PhysicalBlock)],
        memory: &dyn PagedMemory,
        options: &LoadOptions,
    ) -> Result<LoadedBlocks, ClientError> {
        self.load_blocks_paced(blocks, memory, options, &Unpaced)
    }

    /// [`Client::load_blocks`] with the order and the cancellation of a [`Pace`].
    pub(crate) fn load_blocks_paced(
        &self,
        blocks: &[(BlockKey, PhysicalBlock)],
        memory: &dyn PagedMemory,
        options: &LoadOptions,
        pace: &dyn Pace,
    ) -> Result<LoadedBlocks, ClientError> {
        check(self, blocks, memory)?;
        let mut loading = Loading { pace, ..Loading::new(self, blocks, Some(memory), *options) };
        loading.update_limit();
        let stopped_by = loading.run().err();
        Ok(LoadedBlocks { stopped_by, ..loading.loaded })
    }

    /// Brings blocks into this node's DRAM, where they may be evicted again, so that a later load finds them
    /// there. Returns the number of blocks in DRAM.
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
        let deadline = deadline::after(options.deadline);
        Loading {
            client,
            blocks,
            memory,
            options,
            pace: &Unpaced,
            until: deadline,
            deadline,
            is_limited: false,
            progress_at: Instant::now(),
            rest: (0..blocks.len()).collect(),
            asked: 0,
            loaded: LoadedBlocks::none_yet(blocks.len()),
        }
    }

    /// Loads window after window; the next window is loading while the current one is used. Blocks for which no time is
    /// left have missed the deadline.
    fn run(&mut self) -> Result<(), ClientError> {
        let mut coming = self.start_window(None)?;
        while let Some(Window { blocks, pending }) = coming {
            let load = pending.wait_with(self.patience())?.with_verify(self.options.verify);
            coming = self.start_window(Some((&blocks, &load)))?;
            self.finish_window(&blocks, &load)?;
            drop(load);
            let in_flight = coming.as_ref().map_or(&[][..], |window| &window.blocks);
            if self.has_hole(self.loaded.leading(), in_flight) {
                self.rest.extend(coming.map(|window| window.blocks).unwrap_or_default());
                break;
            }
            if coming.is_none() {
                coming = self.start_window(None)?;
            }
        }
        for block in self.rest.drain(..) {
            self.loaded.statuses[block] = BlockStatus::Deadline;
        }
        if self.is_limited && self.loaded.statuses.contains(&BlockStatus::Deadline) {
            self.loaded.standstill = self.progress_at.elapsed();
        }
        Ok(())
    }

    /// Updates the end of the load for the blocks that have arrived.
    fn update_limit(&mut self) {
        self.until = self.limit(self.loaded.leading());
        self.is_limited = self.pace.limit(0).is_some();
    }

    /// End of the load if some leading blocks have arrived.
    fn limit(&self, leading: usize) -> Instant {
        self.pace.limit(leading).map_or(self.deadline, |limit| limit.min(self.deadline))
    }

    /// Number of leading blocks if those of an answered window arrive.
    fn leading_with(&self, (blocks, load): (&[usize], &Load)) -> usize {
        let mut leading = self.loaded.leading();
        for (block, answer) in blocks.iter().zip(load.blocks()) {
            if *block == leading && answer.is_ok() {
                let behind = &self.loaded.statuses[leading + 1..];
                leading += 1 + behind.iter().take_while(|status| **status == BlockStatus::Ok).count();
            }
        }
        leading
    }

    /// Reports whether the first block that is missing behind leading ones has failed: those behind it are useless then.
    fn has_hole(&self, leading: usize, in_flight: &[usize]) -> bool {
        let comes = in_flight.contains(&leading) || self.rest.contains(&leading);
        self.is_limited && leading < self.blocks.len() && !comes
    }

    /// Timeouts of a wait that starts at the last progress.
    fn patience(&self) -> LoadTimeouts {
        let LoadOptions { stall_timeout: stall, standstill_timeout: standstill, .. } = self.options;
        // An agent that hangs does not extend a wait with a limit.
        let limit = self.is_limited.then(|| deadline::from(self.until, LIMIT_GRACE));
        LoadTimeouts { stall, standstill, until: self.until, limit }
    }

    /// Requests the next window; `None` when all blocks were requested, or no time is left: the agent would begin to read
    /// blocks that it cannot deliver.
    ///
    /// The answer to an earlier window shows which of its blocks arrive, and these extend the limit. If they do not, the
    /// client does not wait until the deadline that the agent has.
    fn start_window(&mut self, answered: Option<(&[usize], &Load)>) -> Result<Option<Window>, ClientError> {
        let count = self.rest.len().min(window_blocks(self.client.layout(), self.pace.order()));
        let leading = answered.map_or_else(|| self.loaded.leading(), |window| self.leading_with(window));
        let left = self.limit(leading).saturating_duration_since(Instant::now());
        // Blocks without room may be requested again.
        let without_room = answered.into_iter().flat_map(|(blocks, load)| blocks.iter().zip(load.blocks()));
        let without_room = without_room.filter(|(_, answer)| answer.status() == BlockStatus::NoSpace);
        let without_room: Vec<usize> = without_room.map(|(block, _)| *block).collect();
        if count == 0 || left.is_zero() || self.has_hole(leading, &without_room) {
            return Ok(None);
        }
        let blocks: Vec<usize> = self.rest.drain(..count).collect();
        let request = LoadRequest {
            keys: blocks.iter().map(|block| self.blocks[*block].0).collect(),
            deadline: left.min(self.options.deadline),
            read_bytes: 0,
            scope: self.options.scope,
            inputs: None,
        };
        let pending = self.client.start_load(&request)?;
        self.asked += count;
        Ok(Some(Window { blocks, pending }))
    }

    /// Copies a window layer by layer. Blocks without room are requested again if other blocks of the window
    /// came.
    fn finish_window(&mut self, blocks: &[usize], load: &Load) -> Result<(), ClientError> {
        let mut statuses: Vec<BlockStatus> = load.blocks().iter().map(|block| block.status()).collect();
        self.asked -= blocks.len();
        // Blocks without room may be requested again; their layers are then copied after these.
        let is_last = self.asked == 0 && self.rest.is_empty() && !statuses.contains(&BlockStatus::NoSpace);
        for layer in 0..self.client.layout().layers() {
            if !self.pace.should_continue() {
                return Err(cancelled());
            }
            load.wait_layer_with(layer, self.patience())?;
            self.copy_layer(layer, blocks, &mut statuses, load);
            if is_last {
                self.pace.note_copied(layer + 1);
            }
        }
        // Verified copies are complete, even if the slot has changed since.
        if self.memory.is_none() || self.options.verify == Verify::Off {
            (0..).zip(&mut statuses).for_each(|(index, status)| *status = load.status(index));
        }
        let any_came = statuses.contains(&BlockStatus::Ok);
        if any_came {
            self.progress_at = Instant::now();
        }
        let mut without_room = Vec::new();
        for (index, block) in blocks.iter().enumerate() {
            self.loaded.statuses[*block] = statuses[index];
            self.loaded.sources[*block] = load.blocks()[index].source();
            if statuses[index] == BlockStatus::NoSpace && any_came {
                without_room.push(*block);
            }
        }
        without_room.into_iter().rev().for_each(|block| self.rest.push_front(block));
        self.update_limit();
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
