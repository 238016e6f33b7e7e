//! A queue pair: a submission queue and its completion queue in memory of the controller.
//!
//! ```text
//!   submit ─▶ entry at tail ─▶ ring: one doorbell for all ─▶ controller
//!   poll   ◀─ entry at head with the expected phase ◀──────── controller
//! ```
//!
//! Each command has a slot. Its identifier is the slot and a generation of 4 bits, which the next command of the slot
//! increases. A slot is free again when its completion was taken. A command that was given up keeps its slot, because
//! the controller may still complete it. A completion with another identifier than that of the command in the slot is
//! a violation of the controller, after which the queue cannot be used. A completion of an earlier command therefore
//! ends another command only if 15 commands of the slot have ended between.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Instant;

use crate::backing::{Backing, DmaMemory};
use crate::error::NvmeError;
use crate::spec::{CQE_BYTES, Command, Completion, PAGE_BYTES, SQE_BYTES, Status, offset};

/// Number of bits of the slot in an identifier; the others are the generation.
const SLOT_BITS: u32 = 12;
/// Maximum number of entries of a queue: its slots fit the identifiers.
pub(crate) const ENTRIES_MAX: u32 = 1 << SLOT_BITS;

/// Identifier of a command in its queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CommandId(pub u16);

/// A command that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Number that the caller gave to the command.
    pub token: u64,
    /// Status from the controller.
    pub status: Status,
    /// Dword 0 of the completion.
    pub result: u32,
}

/// State of a slot.
#[derive(Clone, Copy, Debug)]
enum Slot {
    Free,
    /// A command in flight.
    Busy {
        token: u64,
        deadline: Instant,
    },
    /// The caller no longer waits for the command, but the controller may still complete it.
    GivenUp,
}

/// Place and size of a queue pair.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueueShape {
    /// Number of the queue; 0 is the admin queue.
    pub(crate) id: u16,
    /// Number of entries, 2 to [`ENTRIES_MAX`].
    pub(crate) entries: u32,
    /// Distance of doorbells in bytes.
    pub(crate) stride: usize,
}

/// Memory of a queue pair. Its parts may lie in different places: for example entries in a BAR, lists in host memory.
#[derive(Debug)]
pub struct QueueMemory<M> {
    /// Submission queue entries.
    pub submissions: M,
    /// Completion queue entries.
    pub completions: M,
    /// A page of each slot, for PRP lists or SGL segments.
    pub lists: M,
}

/// Sizes of the memory of a queue pair in bytes: whole pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueSizes {
    /// Submission queue entries.
    pub submissions: usize,
    /// Completion queue entries.
    pub completions: usize,
    /// A page of each slot. One entry has no slot.
    pub lists: usize,
}

impl QueueSizes {
    /// Returns the sizes of a queue pair with a number of entries.
    pub fn of(entries: u32) -> QueueSizes {
        let whole = |bytes: usize| bytes.next_multiple_of(PAGE_BYTES);
        QueueSizes {
            submissions: whole(entries as usize * SQE_BYTES),
            completions: whole(entries as usize * CQE_BYTES),
            lists: (entries as usize).saturating_sub(1) * PAGE_BYTES,
        }
    }

    /// Returns the size of all three.
    pub fn total(self) -> usize {
        self.submissions + self.completions + self.lists
    }
}

impl<M: DmaMemory> QueueMemory<M> {
    /// Allocates host memory for a queue pair with a number of entries.
    ///
    /// # Errors
    /// As [`Backing::allocate`].
    pub fn allocate<B: Backing<Memory = M>>(backing: &B, entries: u32) -> Result<QueueMemory<M>, NvmeError> {
        let sizes = QueueSizes::of(entries);
        Ok(QueueMemory {
            submissions: backing.allocate(sizes.submissions)?,
            completions: backing.allocate(sizes.completions)?,
            lists: backing.allocate(sizes.lists)?,
        })
    }

    /// Takes the memory of a queue pair from one piece, for example a BAR, from an offset on: submissions, completions,
    /// lists.
    ///
    /// # Errors
    /// `Invalid` if the piece is too small; [`QueueSizes`] has the required size.
    pub fn within(memory: &M, offset: usize, entries: u32) -> Result<QueueMemory<M>, NvmeError> {
        let sizes = QueueSizes::of(entries);
        let whole = memory.part(offset, sizes.total())?;
        Ok(QueueMemory {
            submissions: whole.part(0, sizes.submissions)?,
            completions: whole.part(sizes.submissions, sizes.completions)?,
            lists: whole.part(sizes.submissions + sizes.completions, sizes.lists)?,
        })
    }

    fn check(&self, entries: u32) -> Result<(), NvmeError> {
        let QueueSizes { submissions, completions, lists } = QueueSizes::of(entries);
        let parts =
            [(&self.submissions, submissions), (&self.completions, completions), (&self.lists, lists)];
        for (memory, needed) in parts {
            if memory.bytes() < needed {
                return Err(NvmeError::Invalid(format!(
                    "memory of {} bytes for a queue of {entries} entries: it needs {needed}",
                    memory.bytes()
                )));
            }
        }
        Ok(())
    }
}

/// A queue pair; see the module. One thread uses it.
pub struct QueuePair<B: Backing> {
    backing: Arc<B>,
    shape: QueueShape,
    submissions: B::Memory,
    completions: B::Memory,
    /// A page of each slot, for PRP lists or SGL segments.
    lists: B::Memory,
    slots: Vec<Slot>,
    /// The identifier of the current or next command of each slot.
    ids: Vec<u16>,
    /// Free slots; the one that was free for the longest time is used next.
    free: VecDeque<u16>,
    tail: u32,
    /// Tail as of the last doorbell.
    rung: u32,
    head: u32,
    /// Completions that were taken since the last doorbell of the completion queue.
    unacknowledged: usize,
    phase: bool,
    /// The controller has violated the specification.
    is_broken: bool,
}

impl<B: Backing> std::fmt::Debug for QueuePair<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("QueuePair")
            .field("id", &self.shape.id)
            .field("entries", &self.shape.entries)
            .field("free", &self.free.len())
            .finish_non_exhaustive()
    }
}

impl<B: Backing> QueuePair<B> {
    pub(crate) fn new(
        backing: Arc<B>,
        shape: QueueShape,
        memory: QueueMemory<B::Memory>,
    ) -> Result<QueuePair<B>, NvmeError> {
        // One entry stays empty: tail and head are equal only if the queue is empty (Base 2.0, 3.3.1.2).
        let slots = (shape.entries - 1) as u16;
        memory.check(shape.entries)?;
        let QueueMemory { submissions, completions, lists } = memory;
        // Memory in a BAR may hold completions of an earlier queue, with the expected phase.
        for at in (0..shape.entries as usize * CQE_BYTES).step_by(8) {
            completions.word(at).store(0, Ordering::Relaxed);
        }
        Ok(QueuePair {
            submissions,
            completions,
            lists,
            slots: vec![Slot::Free; usize::from(slots)],
            ids: (0..slots).collect(),
            free: (0..slots).collect(),
            backing,
            shape,
            tail: 0,
            rung: 0,
            head: 0,
            unacknowledged: 0,
            phase: true,
            is_broken: false,
        })
    }

    /// Returns the number of the queue.
    pub fn id(&self) -> u16 {
        self.shape.id
    }

    /// Returns the number of entries.
    pub fn entries(&self) -> u32 {
        self.shape.entries
    }

    /// Returns the number of commands that can be submitted now.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Returns the number of commands whose end the caller waits for.
    pub fn in_flight(&self) -> usize {
        self.slots.iter().filter(|slot| matches!(slot, Slot::Busy { .. })).count()
    }

    /// Returns the number of commands that were given up and have not ended.
    pub fn given_up(&self) -> usize {
        self.slots.iter().filter(|slot| matches!(slot, Slot::GivenUp)).count()
    }

    pub(crate) fn addresses(&self) -> (u64, u64) {
        (self.submissions.address(), self.completions.address())
    }

    /// Returns the identifier that the next command gets, and the address of its page for a list of addresses or
    /// descriptors; `None` while the queue is full.
    pub fn next_list(&self) -> Option<(CommandId, u64)> {
        let slot = *self.free.front()?;
        let list = self.lists.address() + u64::from(slot) * PAGE_BYTES as u64;
        Some((CommandId(self.ids[usize::from(slot)]), list))
    }

    /// Writes a word of the page of a command that was not submitted yet.
    pub fn set_list_word(&self, id: CommandId, index: usize, word: u64) {
        assert!(index < PAGE_BYTES / 8, "word {index} of a page");
        let at = slot_of(id.0) * PAGE_BYTES + 8 * index;
        self.lists.word(at).store(word, Ordering::Relaxed);
    }

    /// Queues a command. The controller gets it with the next [`ring`](Self::ring).
    ///
    /// # Errors
    /// `Violation` after one; `Invalid` while no slot is [`free`](Self::free).
    pub fn submit(
        &mut self,
        command: &Command,
        token: u64,
        deadline: Instant,
    ) -> Result<CommandId, NvmeError> {
        self.check()?;
        let Some(slot) = self.free.pop_front() else {
            return Err(NvmeError::Invalid(format!("queue {} is full", self.shape.id)));
        };
        let id = self.ids[usize::from(slot)];
        self.slots[usize::from(slot)] = Slot::Busy { token, deadline };
        let at = self.tail as usize * SQE_BYTES;
        for (index, word) in command.encode(id).into_iter().enumerate() {
            self.submissions.word(at + 8 * index).store(word.to_le(), Ordering::Relaxed);
        }
        self.tail = (self.tail + 1) % self.shape.entries;
        Ok(CommandId(id))
    }

    /// Notifies the controller of all commands that were queued since.
    pub fn ring(&mut self) {
        if self.rung != self.tail {
            self.rung = self.tail;
            self.backing.write(offset::sq_tail(self.shape.id, self.shape.stride), self.tail);
        }
    }

    /// Appends the commands that have ended. Completions of commands that were given up only free their slots.
    ///
    /// # Errors
    /// `Violation` if the controller completes a command that it does not have. Commands in flight do not end then.
    pub fn poll(&mut self, ended: &mut Vec<Ended>) -> Result<(), NvmeError> {
        self.check()?;
        let result = loop {
            let Some(completion) = self.next_completion() else { break Ok(()) };
            self.unacknowledged += 1;
            match self.end(completion) {
                Ok(one) => ended.extend(one),
                Err(error) => {
                    self.is_broken = true;
                    break Err(error);
                }
            }
        };
        // A doorbell costs more than all else here. The controller needs it only when the entries that it regards as used,
        // and one for each command in flight, fill the queue.
        if self.unacknowledged > 0 && self.unacknowledged >= self.free.len() {
            self.unacknowledged = 0;
            self.backing.write(offset::cq_head(self.shape.id, self.shape.stride), self.head);
        }
        result
    }

    /// Takes the entry at the head if the controller has written it.
    fn next_completion(&mut self) -> Option<Completion> {
        let at = self.head as usize * CQE_BYTES;
        let last = u32::from_le(self.completions.half_word(at + 12).load(Ordering::Relaxed));
        if Completion::decode([0, 0, 0, last]).phase != self.phase {
            return None;
        }
        // The other dwords, and the data of the command, are read after the phase bit.
        fence(Ordering::Acquire);
        let dword =
            |index: usize| u32::from_le(self.completions.half_word(at + 4 * index).load(Ordering::Relaxed));
        let completion = Completion::decode([dword(0), dword(1), dword(2), last]);
        self.head += 1;
        if self.head == self.shape.entries {
            (self.head, self.phase) = (0, !self.phase);
        }
        Some(completion)
    }

    fn end(&mut self, completion: Completion) -> Result<Option<Ended>, NvmeError> {
        let queue = self.shape.id;
        let violation = |what: String| Err(NvmeError::Violation(format!("queue {queue}: {what}")));
        if completion.sq_id != queue {
            return violation(format!("a completion of queue {}", completion.sq_id));
        }
        let index = slot_of(completion.id);
        let Some(slot) = self.slots.get_mut(index) else {
            return violation(format!("a completion of command {}, which it never had", completion.id));
        };
        let id = &mut self.ids[index];
        let ended = match *slot {
            _ if *id != completion.id => {
                return violation(format!(
                    "a completion of command {}, which is not in flight",
                    completion.id
                ));
            }
            Slot::Free => return violation(format!("command {} is complete twice", completion.id)),
            Slot::Busy { token, .. } => {
                Some(Ended { token, status: completion.status, result: completion.result })
            }
            Slot::GivenUp => None,
        };
        *slot = Slot::Free;
        *id = id.wrapping_add(1 << SLOT_BITS);
        self.free.push_back(index as u16);
        Ok(ended)
    }

    /// Returns the commands whose deadline has passed.
    pub fn overdue(&self, now: Instant) -> Vec<CommandId> {
        let late = |slot: &Slot| matches!(slot, Slot::Busy { deadline, .. } if *deadline <= now);
        self.ids
            .iter()
            .zip(&self.slots)
            .filter(|(_, slot)| late(slot))
            .map(|(id, _)| CommandId(*id))
            .collect()
    }

    /// Gives up a command: returns its token. Its memory must not be used again until the controller was reset, or
    /// [`given_up`](Self::given_up) is 0.
    pub fn give_up(&mut self, id: CommandId) -> Option<u64> {
        let index = slot_of(id.0);
        let slot = self.slots.get_mut(index).filter(|_| self.ids[index] == id.0)?;
        let Slot::Busy { token, .. } = *slot else { return None };
        *slot = Slot::GivenUp;
        Some(token)
    }

    /// Returns the tokens of all commands in flight, for a queue that the controller no longer knows: after a reset,
    /// or the deletion of the queue. The queue must not be used again.
    pub(crate) fn into_tokens(self) -> Vec<u64> {
        let busy = self.slots.iter().filter_map(|slot| match slot {
            Slot::Busy { token, .. } => Some(*token),
            Slot::Free | Slot::GivenUp => None,
        });
        busy.collect()
    }

    fn check(&self) -> Result<(), NvmeError> {
        match self.is_broken {
            true => Err(NvmeError::Violation(format!("queue {} has seen one before", self.shape.id))),
            false => Ok(()),
        }
    }
}

/// Returns the slot of an identifier.
fn slot_of(id: u16) -> usize {
    usize::from(id) & (ENTRIES_MAX as usize - 1)
}
