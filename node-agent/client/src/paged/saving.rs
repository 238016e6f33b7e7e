//! Saves of blocks of an engine's memory.

use std::time::Duration;

use reprise_policy::BlockKey;
use reprise_policy::session::{CommitStatus, Priority, Ticket};

use super::{
    Pace, PagedMemory, PhysicalBlock, STALL_TIMEOUT_DEFAULT, Unpaced, cancelled, check, window_blocks,
};
use crate::client::Client;
use crate::commit::CommitOptions;
use crate::error::ClientError;
use crate::reservation::Reservation;

/// Default time that a save by layers waits for the next layer: a step of a large model on a CPU takes
/// seconds, one of its layers some hundred milliseconds.
pub const LAYER_WAIT_DEFAULT: Duration = Duration::from_secs(10);

/// Options of a save.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SaveOptions {
    /// Eviction priority of the blocks.
    pub priority: Priority,
    /// Key of the block before the first one in its chain; see [`CommitOptions::parent`].
    pub parent: Option<BlockKey>,
    /// Number of blocks before the first one in its chain; see [`CommitOptions::position`].
    pub position: Option<u32>,
    /// Time that a window waits for room in an arena that is full of leased blocks.
    pub room_wait: Duration,
    /// Time that an answer may take.
    pub stall_timeout: Duration,
    /// Time that a save by layers waits for the engine's next layer while it holds slots of the arena.
    pub layer_wait: Duration,
}

/// Result for a block of a save.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SaveStatus {
    /// Readable on the node from now on.
    Committed,
    /// The node had the block already.
    Duplicate,
    /// Not saved: no room, no agent, or no answer.
    Unsaved,
}

/// Result of a save.
#[derive(Debug)]
pub struct SavedBlocks {
    /// Status of each block, in the order of the call.
    pub statuses: Vec<SaveStatus>,
    /// Tickets of the commits, for [`Client::wait_durable`].
    pub tickets: Vec<Ticket>,
    /// Error that left blocks unsaved; `None` if there was no room for them.
    pub stopped_by: Option<ClientError>,
}

impl SaveOptions {
    /// Options of the commits of a save.
    pub fn commit(&self) -> CommitOptions {
        CommitOptions { priority: self.priority, parent: self.parent, position: self.position }
    }

    /// Options for the rest of the blocks after `before` of them, the last of which is `last`.
    pub(crate) fn after(self, before: usize, last: Option<BlockKey>) -> SaveOptions {
        let CommitOptions { parent, position, .. } = self.commit().after(before, last);
        SaveOptions { parent, position, ..self }
    }
}

impl Default for SaveOptions {
    fn default() -> SaveOptions {
        SaveOptions {
            priority: Priority::default(),
            parent: None,
            position: None,
            room_wait: STALL_TIMEOUT_DEFAULT,
            stall_timeout: STALL_TIMEOUT_DEFAULT,
            layer_wait: LAYER_WAIT_DEFAULT,
        }
    }
}

impl SavedBlocks {
    /// Result of a save that saved nothing.
    pub(crate) fn unsaved(blocks: usize, reason: ClientError) -> SavedBlocks {
        SavedBlocks {
            statuses: vec![SaveStatus::Unsaved; blocks],
            tickets: Vec::new(),
            stopped_by: Some(reason),
        }
    }

    /// Returns the number of blocks with this status.
    pub fn count(&self, status: SaveStatus) -> usize {
        self.statuses.iter().filter(|found| **found == status).count()
    }
}

impl From<CommitStatus> for SaveStatus {
    fn from(status: CommitStatus) -> SaveStatus {
        match status {
            CommitStatus::Committed => SaveStatus::Committed,
            CommitStatus::Duplicate => SaveStatus::Duplicate,
            CommitStatus::NoLease | CommitStatus::BadItem => SaveStatus::Unsaved,
            // Of extents only: slots of the arena do not get them.
            CommitStatus::Durable | CommitStatus::Failed => SaveStatus::Unsaved,
        }
    }
}

impl Client {
    /// Saves any number of consecutive blocks of one chain, in its order. Returns when all are saved, when
    /// the arena has no room, or at the first error; the result has the status of each block.
    ///
    /// # Errors
    /// `BadRequest` (layout or block numbers do not fit); nothing was saved.
    pub fn save_blocks(
        &self,
        blocks: &[(BlockKey, PhysicalBlock)],
        memory: &dyn PagedMemory,
        options: &SaveOptions,
    ) -> Result<SavedBlocks, ClientError> {
        self.save_blocks_paced(blocks, memory, options, &Unpaced)
    }

    /// [`Client::save_blocks`] with the order and the cancellation of a [`Pace`].
    pub(crate) fn save_blocks_paced(
        &self,
        blocks: &[(BlockKey, PhysicalBlock)],
        memory: &dyn PagedMemory,
        options: &SaveOptions,
        pace: &dyn Pace,
    ) -> Result<SavedBlocks, ClientError> {
        check(self, blocks, memory)?;
        let mut saved = SavedBlocks { statuses: Vec::new(), tickets: Vec::new(), stopped_by: None };
        while saved.statuses.len() < blocks.len() && saved.stopped_by.is_none() {
            if !pace.should_continue() {
                saved.stopped_by = Some(cancelled());
                break;
            }
            let (before, rest) = blocks.split_at(saved.statuses.len());
            let options = options.after(before.len(), before.last().map(|(key, _)| *key));
            match self.save_window(rest, memory, &options, pace) {
                Ok(None) => break,
                Ok(Some((ticket, statuses))) => {
                    saved.tickets.push(ticket);
                    saved.statuses.extend(statuses);
                }
                Err(error) => saved.stopped_by = Some(error),
            }
        }
        saved.statuses.resize(blocks.len(), SaveStatus::Unsaved);
        Ok(saved)
    }

    /// Saves as many leading blocks as the agent reserves slots for; `None` when it reserves none.
    fn save_window(
        &self,
        blocks: &[(BlockKey, PhysicalBlock)],
        memory: &dyn PagedMemory,
        options: &SaveOptions,
        pace: &dyn Pace,
    ) -> Result<Option<(Ticket, Vec<SaveStatus>)>, ClientError> {
        let wanted = blocks.len().min(window_blocks(self.layout(), pace.order()));
        let wanted = u32::try_from(wanted).expect("a window has at most 8,192 blocks");
        let reserved = self.reserve_within(wanted, options.room_wait, options.stall_timeout)?;
        if reserved.is_empty() {
            return Ok(None);
        }
        let mut slots: Vec<_> = reserved.into_iter().zip(blocks.iter().copied()).collect();
        for layer in 0..memory.layout().layers() {
            pace.wait_filled(layer)?;
            for (reservation, (_, block)) in &mut slots {
                fill_layer(reservation, memory, *block, layer)?;
            }
        }
        let items = slots.into_iter().map(|(reservation, (key, _))| (reservation, key)).collect();
        let outcome = self.commit_within(items, options.commit(), options.stall_timeout)?;
        Ok(Some((outcome.ticket, outcome.statuses.into_iter().map(SaveStatus::from).collect())))
    }
}

fn fill_layer(
    reservation: &mut Reservation,
    memory: &dyn PagedMemory,
    block: PhysicalBlock,
    layer: u32,
) -> Result<(), ClientError> {
    let parts = memory.layout().parts();
    (layer * parts..(layer + 1) * parts).try_for_each(|object| {
        let mut filled = Ok(());
        memory.read_object(block, object, &mut |bytes| filled = reservation.fill_object(object, bytes));
        filled
    })
}
