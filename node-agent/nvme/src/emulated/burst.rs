//! Commands of one queue that were announced together: they are taken, run and completed with its locks held once.

use std::sync::atomic::{Ordering, fence};
use std::sync::{MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Instant;

use super::faults::{Fault, Subject};
use super::machine::{Machine, STRIDE};
use super::memory::{Mapping, Mappings, resolve};
use super::queues::{Completions, Pending, Posted, Submissions};
use super::storage::Storage;
use super::transfer;
use crate::data::Piece;
use crate::spec::{self, Command, FLUSH, READ, SQE_BYTES, Status, WRITE, WRITE_ZEROES, offset};

/// Buffers of a thread.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    data: Vec<u8>,
    pieces: Vec<Piece>,
}

/// Namespaces as one thread uses them: it keeps its last lock for reading until the end of the burst.
struct Namespaces<'a> {
    all: &'a [RwLock<Storage>],
    reading: Option<(usize, RwLockReadGuard<'a, Storage>)>,
}

impl<'a> Namespaces<'a> {
    fn read(&mut self, index: usize) -> &Storage {
        if self.reading.as_ref().is_none_or(|(held, _)| *held != index) {
            self.reading = None;
            let guard = self.all[index].read().unwrap_or_else(PoisonError::into_inner);
            self.reading = Some((index, guard));
        }
        &self.reading.as_ref().expect("locked above").1
    }

    fn write(&mut self, index: usize) -> RwLockWriteGuard<'a, Storage> {
        self.reading = None;
        self.all[index].write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A queue that is being served.
pub(super) struct Burst<'a> {
    pub(super) machine: &'a Machine,
    pub(super) mappings: &'a Mappings,
    pub(super) id: u16,
    pub(super) queue: &'a mut Submissions,
    completions: MutexGuard<'a, Option<Completions>>,
    /// Memory of the completion queue, if it is mapped.
    memory: Option<(&'a Mapping, usize)>,
    namespaces: Namespaces<'a>,
    scratch: &'a mut Scratch,
}

impl<'a> Burst<'a> {
    pub(super) fn new(
        machine: &'a Machine,
        mappings: &'a Mappings,
        (id, queue): (u16, &'a mut Submissions),
        scratch: &'a mut Scratch,
    ) -> Burst<'a> {
        let completions = machine.queues.lock_completions(queue.completions);
        let memory = completions.as_ref().and_then(|one| one.memory(mappings));
        let namespaces = Namespaces { all: &machine.namespaces, reading: None };
        Burst { machine, mappings, id, queue, completions, memory, namespaces, scratch }
    }

    /// Takes the commands up to a value of the doorbell.
    pub(super) fn take_commands(&mut self, rung: u32) -> bool {
        // The entries are read after the doorbell.
        fence(Ordering::Acquire);
        let queue = &mut *self.queue;
        if rung >= queue.entries || queue.head == rung || queue.dropped == Some(rung) {
            return false;
        }
        let subject = Subject { queue: self.id, opcode: None, blocks: None };
        let drops = self.machine.any_rule_harms(subject);
        queue.dropped = drops.then_some(rung);
        if drops {
            return false;
        }
        let entries = queue.entries;
        let Some((memory, base)) =
            resolve(self.mappings, queue.address, u64::from(entries) * SQE_BYTES as u64)
        else {
            self.machine.fail();
            return true;
        };
        let mut count = 0;
        // A client that takes no completions gets no further commands run.
        while self.queue.head != rung
            && self.queue.pending.len() < entries as usize
            && !self.machine.has_failed()
        {
            let head = self.queue.head;
            let at = base + head as usize * SQE_BYTES;
            let load = |index: usize| u64::from_le(memory.word(at + 8 * index).load(Ordering::Relaxed));
            let words: [u64; SQE_BYTES / 8] = std::array::from_fn(load);
            self.queue.head = if head + 1 == entries { 0 } else { head + 1 };
            let (id, command) = Command::decode(words);
            self.serve(id, &command);
            count += 1;
        }
        self.machine.count_commands(self.id, count);
        count > 0
    }

    /// Runs a command, with the fault that harms it.
    fn serve(&mut self, id: u16, command: &Command) {
        let is_transfer = self.id != 0 && matches!(command.opcode, READ | WRITE | WRITE_ZEROES);
        let subject = Subject {
            queue: self.id,
            opcode: Some(command.opcode),
            blocks: is_transfer.then(|| (command.lba(), command.blocks())),
        };
        let fault = self.machine.harm(subject);
        match fault {
            Some(Fault::Fail) => return self.machine.fail(),
            Some(Fault::Vanish) => return self.machine.vanish(),
            _ => {}
        }
        let end = |status: Status, result: u32| Pending { id, status, result, due: None, after_next: false };
        if let Some(Fault::Status(status)) = fault {
            return self.complete(end(status, 0));
        }
        let corrupt = fault == Some(Fault::CorruptList);
        let Some((status, result)) = (match self.id {
            0 => self.admin(id, command),
            _ => Some((self.transfer(command, corrupt), 0)),
        }) else {
            return;
        };
        let pending = end(status, result);
        self.report_event();
        let later = |delay| Pending { due: Some(Instant::now() + delay), ..pending };
        match fault {
            Some(Fault::Lost) => {}
            Some(Fault::Twice) => {
                self.complete(pending);
                self.complete(pending);
            }
            Some(Fault::TwiceLate(delay)) => {
                self.complete(pending);
                self.queue.pending.push_back(later(delay));
            }
            Some(Fault::Late(delay)) => self.queue.pending.push_back(later(delay)),
            Some(Fault::Reorder) => self.queue.pending.push_back(Pending { after_next: true, ..pending }),
            _ => self.complete(pending),
        }
    }

    /// Ends a request for an event if there is one to report. Only the admin queue has such requests: a command of
    /// another queue leaves the report to the thread of the admin queue.
    pub(super) fn report_event(&mut self) {
        let shared = &self.machine.shared;
        if shared.event.load(Ordering::SeqCst) == 0 {
            return;
        }
        if self.id != 0 {
            shared.event_is_due.store(true, Ordering::SeqCst);
            return;
        }
        let Some(id) = self.machine.take_event_request() else { return };
        let result = shared.event.swap(0, Ordering::SeqCst);
        self.post(&Pending { id, status: Status::SUCCESS, result, due: None, after_next: false });
    }

    /// Runs an I/O command.
    fn transfer(&mut self, command: &Command, corrupt: bool) -> Status {
        let settings = &self.machine.emulation;
        let index = (command.namespace as usize).wrapping_sub(1);
        let Some(size) = self.machine.namespace_bytes.get(index).copied() else {
            return Status::INVALID_NAMESPACE;
        };
        if command.opcode == FLUSH {
            let flushed = self.namespaces.write(index).flush();
            return if flushed.is_ok() { Status::SUCCESS } else { Status::WRITE_FAULT };
        }
        if !matches!(command.opcode, READ | WRITE | WRITE_ZEROES) {
            return Status::INVALID_OPCODE;
        }
        let power = settings.block_power;
        let (lba, bytes) = (command.lba(), u64::from(command.blocks()) << power);
        if lba.checked_add(command.blocks().into()).is_none_or(|end| end > size >> power) {
            return Status::OUT_OF_RANGE;
        }
        if command.opcode == WRITE_ZEROES {
            return self.write_zeroes(index, lba << power, bytes as usize);
        }
        if settings.transfer_max.is_some_and(|max| bytes > max) {
            return Status::INVALID_FIELD;
        }
        if matches!(command.data, spec::DataPointer::Sgl(_)) && !settings.sgl {
            return Status::INVALID_FIELD;
        }
        let pieces = &mut self.scratch.pieces;
        if let Err(status) = transfer::pieces(self.mappings, command.data, bytes, corrupt, pieces) {
            self.machine.count_bad_addresses(u64::from(status == Status::DATA_TRANSFER));
            return status;
        }
        let moved = self.move_data(command.opcode, index, lba << power);
        if command.opcode == WRITE && moved.is_success() {
            self.machine.count_written(bytes);
        }
        moved
    }

    fn write_zeroes(&mut self, index: usize, at: u64, bytes: usize) -> Status {
        if !self.machine.emulation.write_zeroes {
            return Status::INVALID_OPCODE;
        }
        let zero = |data: &mut [u8]| {
            data.fill(0);
            true
        };
        let zeroed = self.namespaces.write(index).write(at, bytes, &mut self.scratch.data, zero);
        if zeroed.is_ok() { Status::SUCCESS } else { Status::WRITE_FAULT }
    }

    /// Moves the data of a read or a write between a place and the pieces of the command.
    fn move_data(&mut self, opcode: u8, index: usize, mut at: u64) -> Status {
        let (mappings, Scratch { data, pieces }) = (self.mappings, &mut *self.scratch);
        for piece in &*pieces {
            let (address, bytes) = (piece.address, piece.bytes as usize);
            let (moved, failure) = if opcode == READ {
                let take = |data: &[u8]| transfer::copy_in(mappings, address, data);
                (self.namespaces.read(index).read(at, bytes, data, take), Status::READ_ERROR)
            } else {
                let fill = |data: &mut [u8]| transfer::copy_out(mappings, address, data);
                (self.namespaces.write(index).write(at, bytes, data, fill), Status::WRITE_FAULT)
            };
            match moved {
                Ok(true) => at += piece.bytes,
                Ok(false) => {
                    self.machine.count_bad_addresses(1);
                    return Status::DATA_TRANSFER;
                }
                // A file that was cut is a namespace that has shrunk.
                Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
                    return Status::OUT_OF_RANGE;
                }
                Err(_) => return failure,
            }
        }
        Status::SUCCESS
    }

    /// Writes the completions whose time has come; reports whether there were any.
    pub(super) fn complete_due(&mut self) -> bool {
        if self.queue.pending.is_empty() {
            return false;
        }
        let now = Instant::now();
        let is_due = |one: &Pending| one.due.is_some_and(|due| due <= now) || one.after_next;
        self.post_those(is_due)
    }

    /// Posts those of the pending completions that a function selects.
    fn post_those(&mut self, selects: impl Fn(&Pending) -> bool) -> bool {
        let chosen: Vec<Pending> = self.queue.pending.iter().copied().filter(|one| selects(one)).collect();
        self.queue.pending.retain(|one| !selects(one));
        chosen.iter().for_each(|one| self.post(one));
        !chosen.is_empty()
    }

    /// Writes a completion, and those that wait for the next one.
    pub(super) fn complete(&mut self, pending: Pending) {
        self.post(&pending);
        if !self.queue.pending.is_empty() {
            self.post_those(|one| one.after_next);
        }
    }

    /// Writes a completion, or keeps it while the completion queue is full.
    fn post(&mut self, pending: &Pending) {
        let head = self.machine.get(offset::cq_head(self.queue.completions, STRIDE));
        let Some(completions) = self.completions.as_mut() else { return };
        match completions.post(self.memory, head, (self.id, self.queue.head), pending) {
            Posted::Written => {}
            Posted::Full => {
                let due = Some(Instant::now());
                self.queue.pending.push_back(Pending { due, after_next: false, ..*pending });
            }
            Posted::InvalidDoorbell => self.machine.fail(),
            Posted::Unmapped => self.machine.count_bad_addresses(1),
        }
    }
}
