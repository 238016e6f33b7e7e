//! Transfers of which a path moves the blocks that it reaches, and the arena the others.

use std::time::{Duration, Instant};

use reprise_policy::session::Source;

use super::Job;
use crate::client::Client;
use crate::commit::ChainPlace;
use crate::error::ClientError;
use crate::load::BlockStatus;
use crate::paged::{LoadOptions, LoadedBlocks, Order, Pace, SaveOptions, SavedBlocks, cancelled};
use crate::path::{BlockPath, LOAD_TIME_MIN};

/// Blocks that a path gets in one call; between calls, transfers can be cancelled.
const PATH_BLOCKS: usize = 64;

/// Pace of a job's blocks that a path has not moved.
struct RestOfJob<'a> {
    job: &'a Job,
    /// Indices of these blocks; those between them are loaded.
    rest: &'a [usize],
}

impl Pace for RestOfJob<'_> {
    fn order(&self) -> Order {
        self.job.order()
    }

    fn should_continue(&self) -> bool {
        self.job.should_continue()
    }

    fn wait_filled(&self, layer: u32) -> Result<(), ClientError> {
        self.job.wait_filled(layer)
    }

    fn note_copied(&self, layers: u32) {
        self.job.note_copied(layers);
    }

    fn limit(&self, leading: usize) -> Option<Instant> {
        self.job.limit(self.rest.get(leading).copied().unwrap_or(self.job.blocks.len()))
    }
}

impl Job {
    /// Saves leading blocks by the path, and the others by the arena.
    pub(super) fn save(
        &self,
        client: &Client,
        path: Option<&dyn BlockPath>,
    ) -> Result<(SavedBlocks, usize), ClientError> {
        let memory = &*self.shared.memory;
        let options = self.shared.options.save;
        let priority = self.chain.priority.unwrap_or(options.priority);
        let ChainPlace { parent, position } = self.chain.place;
        let options = SaveOptions { parent, position, priority, ..options };
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
        options.after(at, at.checked_sub(1).map(|before| self.blocks[before].0))
    }

    /// Loads blocks by the path, and those that it does not reach by the arena. After an error, the blocks that are in the
    /// memory stay loaded.
    pub(super) fn load(
        &self,
        client: &Client,
        path: Option<&dyn BlockPath>,
    ) -> Result<(LoadedBlocks, usize), ClientError> {
        let mut loaded = Vec::with_capacity(self.blocks.len());
        let mut stopped_by = path.and_then(|path| self.load_parts(client, path, &mut loaded).err());
        loaded.resize(self.blocks.len(), false);
        let rest: Vec<usize> = (0..loaded.len()).filter(|index| !loaded[*index]).collect();
        let by_path = loaded.len() - rest.len();
        let status = |is_loaded: &bool| if *is_loaded { BlockStatus::Ok } else { BlockStatus::Failed };
        let mut all = LoadedBlocks {
            statuses: loaded.iter().map(status).collect(),
            sources: loaded.iter().map(|is_loaded| is_loaded.then_some(Source::OwnNvme)).collect(),
            stopped_by: None,
            standstill: Duration::ZERO,
        };
        if stopped_by.is_none() && (by_path == 0 || !rest.is_empty()) {
            match self.check_limit(rest.first().copied().unwrap_or(0)).and_then(|_| self.load_deadline()) {
                Ok(deadline) => self.load_by_arena(client, (&rest, deadline), &mut all)?,
                Err(error) => stopped_by = Some(error),
            }
        }
        all.stopped_by = stopped_by.or(all.stopped_by);
        Ok((all, by_path))
    }

    /// Loads blocks by the path while its least time is left; notes which of them are in the memory.
    ///
    /// # Errors
    /// The transfer was cancelled, its deadline has passed, or the path has failed.
    fn load_parts(
        &self,
        client: &Client,
        path: &dyn BlockPath,
        loaded: &mut Vec<bool>,
    ) -> Result<(), ClientError> {
        for part in self.blocks.chunks(PATH_BLOCKS) {
            if !self.should_continue() {
                return Err(cancelled());
            }
            let leading = loaded.iter().take_while(|is_loaded| **is_loaded).count();
            let deadline = self.check_limit(leading)?.min(self.load_deadline()?);
            if deadline < LOAD_TIME_MIN {
                break;
            }
            let options = LoadOptions { deadline, ..self.shared.load_options() };
            loaded.extend(path.load(client, part, &*self.shared.memory, &options)?);
        }
        Ok(())
    }

    /// Loads the blocks with these indices by the arena.
    fn load_by_arena(
        &self,
        client: &Client,
        (rest, deadline): (&[usize], Duration),
        all: &mut LoadedBlocks,
    ) -> Result<(), ClientError> {
        let blocks: Vec<_> = rest.iter().map(|index| self.blocks[*index]).collect();
        let options = LoadOptions { deadline, ..self.shared.load_options() };
        let pace = RestOfJob { job: self, rest };
        let by_arena = client.load_blocks_paced(&blocks, &*self.shared.memory, &options, &pace)?;
        for (index, (status, source)) in rest.iter().zip(by_arena.statuses.into_iter().zip(by_arena.sources))
        {
            (all.statuses[*index], all.sources[*index]) = (status, source);
        }
        (all.stopped_by, all.standstill) = (by_arena.stopped_by, by_arena.standstill);
        Ok(())
    }

    /// Returns the rest of the deadline.
    fn load_deadline(&self) -> Result<Duration, ClientError> {
        let deadline = self.shared.options.load.deadline;
        match deadline.saturating_sub(self.submitted.elapsed()) {
            Duration::ZERO => {
                Err(ClientError::Busy(format!("earlier loads used up the deadline of {deadline:?}")))
            }
            left => Ok(left),
        }
    }

    /// Returns the rest of the wait's limit if some leading blocks have arrived.
    fn check_limit(&self, leading: usize) -> Result<Duration, ClientError> {
        let Some(limit) = self.limit.map(|limit| limit.after(leading)) else { return Ok(Duration::MAX) };
        match limit.saturating_sub(self.submitted.elapsed()) {
            Duration::ZERO => {
                let reason = format!("{leading} of {} blocks within {limit:?}", self.blocks.len());
                Err(ClientError::LimitReached { reason, unanswered: Duration::ZERO })
            }
            left => Ok(left),
        }
    }
}
