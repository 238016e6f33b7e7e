//! Transfers of which a path moves the blocks that it reaches, and the arena the others.

use reprise_policy::session::Source;

use super::Job;
use crate::client::Client;
use crate::error::ClientError;
use crate::load::BlockStatus;
use crate::paged::{LoadOptions, LoadedBlocks, Pace, SaveOptions, SavedBlocks, cancelled};
use crate::path::BlockPath;

/// Blocks that a path gets in one call; between calls, transfers can be cancelled.
const PATH_BLOCKS: usize = 64;

impl Job {
    /// Saves leading blocks by the path, and the others by the arena.
    pub(super) fn save(
        &self,
        client: &Client,
        path: Option<&dyn BlockPath>,
    ) -> Result<(SavedBlocks, usize), ClientError> {
        let memory = &*self.shared.memory;
        let options = SaveOptions { parent: self.parent, ..self.shared.options.save };
        let mut statuses = Vec::new();
        while let Some(path) = path
            && statuses.len() < self.blocks.len()
            && self.should_continue()
        {
            let at = statuses.len();
            let part = &self.blocks[at..self.blocks.len().min(at + PATH_BLOCKS)];
            let saved = path.save(client, part, memory, &self.after(at, options))?;
            statuses.extend_from_slice(&saved);
            if saved.len() < part.len() {
                break;
            }
        }
        let by_path = statuses.len();
        if by_path > 0 && by_path == self.blocks.len() {
            return Ok((SavedBlocks { statuses, tickets: Vec::new(), stopped_by: None }, by_path));
        }
        let options = self.after(by_path, options);
        let saved = client.save_blocks_paced(&self.blocks[by_path..], memory, &options, self)?;
        statuses.extend_from_slice(&saved.statuses);
        Ok((SavedBlocks { statuses, ..saved }, by_path))
    }

    /// Returns the options of a save that begins at a block.
    fn after(&self, at: usize, options: SaveOptions) -> SaveOptions {
        let parent = at.checked_sub(1).map(|before| self.blocks[before].0).or(options.parent);
        SaveOptions { parent, ..options }
    }

    /// Loads blocks by the path, and those that it does not reach by the arena.
    pub(super) fn load(
        &self,
        client: &Client,
        path: Option<&dyn BlockPath>,
    ) -> Result<(LoadedBlocks, usize), ClientError> {
        let memory = &*self.shared.memory;
        let mut loaded = Vec::with_capacity(self.blocks.len());
        if let Some(path) = path {
            for part in self.blocks.chunks(PATH_BLOCKS) {
                if !self.should_continue() {
                    return Err(cancelled());
                }
                let options = LoadOptions { deadline: self.load_deadline()?, ..self.shared.load_options() };
                loaded.extend(path.load(client, part, memory, &options)?);
            }
        }
        loaded.resize(self.blocks.len(), false);
        let rest: Vec<usize> = (0..loaded.len()).filter(|index| !loaded[*index]).collect();
        let by_path = loaded.len() - rest.len();
        let mut all = LoadedBlocks {
            statuses: vec![BlockStatus::Ok; loaded.len()],
            sources: vec![Some(Source::OwnNvme); loaded.len()],
            stopped_by: None,
        };
        if by_path == 0 || !rest.is_empty() {
            let blocks: Vec<_> = rest.iter().map(|index| self.blocks[*index]).collect();
            let options = LoadOptions { deadline: self.load_deadline()?, ..self.shared.load_options() };
            let by_arena = client.load_blocks_paced(&blocks, memory, &options, self)?;
            for (index, (status, source)) in
                rest.into_iter().zip(by_arena.statuses.into_iter().zip(by_arena.sources))
            {
                (all.statuses[index], all.sources[index]) = (status, source);
            }
            all.stopped_by = by_arena.stopped_by;
        }
        Ok((all, by_path))
    }
}
