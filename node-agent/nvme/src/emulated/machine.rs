//! The controller's side: it follows registers, takes commands, and completes them.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use super::faults::{ActiveRule, Fault, Subject};
use super::memory::{Mapping, Mappings, read_words, resolve};
use super::storage::Storage;
use super::{Emulation, EmulationCounters, REGISTER_BYTES, Shared, transfer};
use crate::spec::{
    self, ABORT, ASYNC_EVENT_REQUEST, AdminQueueSizes, CQE_BYTES, CREATE_CQ, CREATE_SQ, Command, Completion,
    Configuration, ControllerIdentity, DELETE_CQ, DELETE_SQ, FEATURE_QUEUES, FLUSH, GET_LOG_PAGE,
    HEALTH_BYTES, HEALTH_LOG, IDENTIFY, LbaFormat, NamespaceIdentity, NamespaceList, READ, SET_FEATURES,
    SQE_BYTES, Status, WRITE, WRITE_ZEROES, cns, offset,
};

/// Doorbell stride in bytes: DSTRD 0.
const STRIDE: usize = 4;
/// Time without work after which the thread sleeps.
const IDLE: Duration = Duration::from_micros(50);
/// Length of a sleep at most: a write that was missed is seen then.
const SLEEP: Duration = Duration::from_millis(1);
/// `CSTS.RDY`, `CSTS.CFS` and `CSTS.SHST` "complete".
const READY: u32 = 1;
const FATAL: u32 = 2;
const SHUTDOWN_COMPLETE: u32 = 2 << 2;
/// Maximum number of event requests, as Identify states.
const EVENTS_MAX: usize = 4;
/// Version 2.0 of the specification.
const VERSION: u32 = 2 << 16;

/// A submission queue of the controller.
#[derive(Debug)]
struct Submissions {
    address: u64,
    entries: u32,
    head: u32,
    completions: u16,
    /// Value of the doorbell whose write was dropped.
    dropped: Option<u32>,
}

/// A completion queue of the controller.
#[derive(Debug)]
struct Completions {
    address: u64,
    entries: u32,
    tail: u32,
    phase: bool,
}

/// A completion that was not written yet.
#[derive(Clone, Copy, Debug)]
struct Pending {
    queue: u16,
    id: u16,
    status: Status,
    result: u32,
    /// It is written when this has passed.
    due: Option<Instant>,
    /// It is written after another one of the queue.
    after_next: bool,
}

/// The controller; see the module.
#[derive(Debug)]
pub(super) struct Machine {
    shared: Arc<Shared>,
    emulation: Emulation,
    rules: Vec<ActiveRule>,
    submissions: BTreeMap<u16, Submissions>,
    completions: BTreeMap<u16, Completions>,
    pending: VecDeque<Pending>,
    events: Vec<u16>,
    is_ready: bool,
    has_failed: bool,
    scratch: Vec<u8>,
    counters: EmulationCounters,
}

impl Machine {
    pub(super) fn new(shared: Arc<Shared>, mut emulation: Emulation) -> Machine {
        let rules = std::mem::take(&mut emulation.faults).into_iter().map(ActiveRule::new).collect();
        let machine = Machine {
            shared,
            emulation,
            rules,
            submissions: BTreeMap::new(),
            completions: BTreeMap::new(),
            pending: VecDeque::new(),
            events: Vec::new(),
            is_ready: false,
            has_failed: false,
            scratch: Vec::new(),
            counters: EmulationCounters::default(),
        };
        // MQES, CQR, TO of 5 s, NVM command set.
        let capabilities = u64::from(machine.emulation.entries_max - 1) | 1 << 16 | 10 << 24 | 1_u64 << 37;
        machine.set(offset::CAP, capabilities as u32);
        machine.set(offset::CAP + 4, (capabilities >> 32) as u32);
        machine.set(offset::VS, VERSION);
        machine
    }

    /// Acts until the driver's side is dropped.
    pub(super) fn run(mut self) -> Machine {
        let mut worked_at = Instant::now();
        while !self.shared.ending.load(Ordering::SeqCst) {
            if self.turn() {
                worked_at = Instant::now();
            } else if worked_at.elapsed() < IDLE {
                std::thread::yield_now();
            } else {
                self.shared.asleep.store(true, Ordering::SeqCst);
                if !self.turn() {
                    std::thread::park_timeout(SLEEP);
                }
                self.shared.asleep.store(false, Ordering::SeqCst);
            }
        }
        self
    }

    pub(super) fn into_parts(self) -> (EmulationCounters, Vec<Storage>) {
        let faults = self.rules.iter().map(|rule| rule.made).collect();
        (EmulationCounters { faults, ..self.counters }, self.emulation.namespaces)
    }

    fn get(&self, offset: usize) -> u32 {
        self.shared.registers.atomic_u32(offset).load(Ordering::SeqCst)
    }

    fn set(&self, offset: usize, value: u32) {
        self.shared.registers.atomic_u32(offset).store(value, Ordering::SeqCst);
    }

    /// Handles everything that is due; reports whether there was work.
    fn turn(&mut self) -> bool {
        if self.has_failed && self.get(offset::CSTS) == u32::MAX {
            return false;
        }
        let mut worked = self.follow_configuration();
        if self.is_ready && !self.has_failed {
            let shared = Arc::clone(&self.shared);
            let mappings = shared.space.read();
            let queues: Vec<u16> = self.submissions.keys().copied().collect();
            for queue in queues {
                worked |= self.take_commands(&mappings, queue);
            }
            worked |= self.complete_due(&mappings);
        }
        worked
    }

    /// Enables, resets or shuts down, as `CC` requests.
    fn follow_configuration(&mut self) -> bool {
        let configuration = self.get(offset::CC);
        let enabled = Configuration::is_enabled(configuration);
        if enabled && !self.is_ready && !self.has_failed {
            let sizes = AdminQueueSizes::decode(self.get(offset::AQA));
            let address = |at: usize| u64::from(self.get(at)) | u64::from(self.get(at + 4)) << 32;
            let (submissions, completions) = (address(offset::ASQ), address(offset::ACQ));
            let shared = Arc::clone(&self.shared);
            let mappings = shared.space.read();
            let created = self.add_completions(&mappings, 0, sizes.completion.into(), completions)
                == Status::SUCCESS
                && self.add_submissions(&mappings, 0, sizes.submission.into(), (submissions, 0))
                    == Status::SUCCESS;
            if created {
                self.is_ready = true;
                self.set(offset::CSTS, READY);
            } else {
                self.fail();
            }
            return true;
        }
        if !enabled && (self.is_ready || self.has_failed) {
            self.reset();
            return true;
        }
        if self.is_ready
            && Configuration::wants_shutdown(configuration)
            && self.get(offset::CSTS) & SHUTDOWN_COMPLETE == 0
        {
            // A failed write of the cache is not reported by a shutdown.
            self.emulation.namespaces.iter_mut().for_each(|storage| drop(storage.flush()));
            self.counters.shutdowns += 1;
            self.set(offset::CSTS, READY | SHUTDOWN_COMPLETE);
            return true;
        }
        false
    }

    /// Controller reset (Base 2.0, 3.7.2): all queues and commands are forgotten.
    fn reset(&mut self) {
        self.submissions.clear();
        self.completions.clear();
        self.pending.clear();
        self.events.clear();
        (self.is_ready, self.has_failed) = (false, false);
        for at in (offset::DOORBELLS..REGISTER_BYTES).step_by(4) {
            self.set(at, 0);
        }
        self.set(offset::CSTS, 0);
    }

    fn fail(&mut self) {
        self.has_failed = true;
        self.set(offset::CSTS, self.get(offset::CSTS) | FATAL);
    }

    fn vanish(&mut self) {
        self.has_failed = true;
        for at in (0..offset::DOORBELLS).step_by(4) {
            self.set(at, u32::MAX);
        }
    }

    /// Takes the commands that a doorbell announces.
    fn take_commands(&mut self, mappings: &Mappings, queue: u16) -> bool {
        let rung = self.get(offset::sq_tail(queue, STRIDE));
        // The entries are read after the doorbell.
        fence(Ordering::Acquire);
        let Some(state) = self.submissions.get_mut(&queue) else { return false };
        if rung >= state.entries || state.head == rung || state.dropped == Some(rung) {
            return false;
        }
        let (address, entries) = (state.address, state.entries);
        let subject = Subject { queue, opcode: None, blocks: None };
        let drops = self.rules.iter_mut().any(|rule| rule.harm(subject).is_some());
        let state = self.submissions.get_mut(&queue).expect("it was there");
        state.dropped = drops.then_some(rung);
        if drops {
            return false;
        }
        let mut head = state.head;
        while head != rung && !self.has_failed {
            let mut words = [0; SQE_BYTES / 8];
            if !read_words(mappings, address + u64::from(head) * SQE_BYTES as u64, &mut words) {
                self.fail();
                break;
            }
            let mut entry = [0; SQE_BYTES];
            for (place, word) in entry.chunks_exact_mut(8).zip(words) {
                place.copy_from_slice(&word.to_le_bytes());
            }
            head = (head + 1) % entries;
            // A command may delete its own queue's peer, but not the queue that is being served: 0.
            if let Some(state) = self.submissions.get_mut(&queue) {
                state.head = head;
            }
            let (id, command) = Command::decode(&entry);
            self.serve(mappings, (queue, id), &command);
        }
        true
    }

    /// Runs a command, with the fault that harms it.
    fn serve(&mut self, mappings: &Mappings, (queue, id): (u16, u16), command: &Command) {
        let is_transfer = queue != 0 && matches!(command.opcode, READ | WRITE | WRITE_ZEROES);
        let subject = Subject {
            queue,
            opcode: Some(command.opcode),
            blocks: is_transfer.then(|| (command.lba(), command.blocks())),
        };
        let fault = self.rules.iter_mut().find_map(|rule| rule.harm(subject));
        self.counters.commands += u64::from(queue != 0);
        match fault {
            Some(Fault::Fail) => return self.fail(),
            Some(Fault::Vanish) => return self.vanish(),
            _ => {}
        }
        let end =
            |status: Status, result: u32| Pending { queue, id, status, result, due: None, after_next: false };
        if let Some(Fault::Status(status)) = fault {
            return self.complete(mappings, end(status, 0));
        }
        let corrupt = fault == Some(Fault::CorruptList);
        let Some((status, result)) = (match queue {
            0 => self.admin(mappings, id, command),
            _ => Some((self.transfer(mappings, command, corrupt), 0)),
        }) else {
            return;
        };
        let pending = end(status, result);
        self.report_event(mappings);
        match fault {
            Some(Fault::Lost) => {}
            Some(Fault::Twice) => {
                self.complete(mappings, pending);
                self.complete(mappings, pending);
            }
            Some(Fault::TwiceLate(delay)) => {
                self.complete(mappings, pending);
                self.pending.push_back(Pending { due: Some(Instant::now() + delay), ..pending });
            }
            Some(Fault::Late(delay)) => {
                self.pending.push_back(Pending { due: Some(Instant::now() + delay), ..pending });
            }
            Some(Fault::Reorder) => self.pending.push_back(Pending { after_next: true, ..pending }),
            _ => self.complete(mappings, pending),
        }
    }

    /// Ends a request for an event if there is one to report.
    fn report_event(&mut self, mappings: &Mappings) {
        if self.shared.event.load(Ordering::SeqCst) == 0 {
            return;
        }
        let Some(id) = self.events.pop() else { return };
        let result = self.shared.event.swap(0, Ordering::SeqCst);
        let (status, due) = (Status::SUCCESS, None);
        self.post(mappings, &Pending { queue: 0, id, status, result, due, after_next: false });
    }

    /// Runs an I/O command.
    fn transfer(&mut self, mappings: &Mappings, command: &Command, corrupt: bool) -> Status {
        let index = (command.namespace as usize).wrapping_sub(1);
        let Some(storage) = self.emulation.namespaces.get_mut(index) else {
            return Status::INVALID_NAMESPACE;
        };
        if command.opcode == FLUSH {
            return if storage.flush().is_ok() { Status::SUCCESS } else { Status::WRITE_FAULT };
        }
        if !matches!(command.opcode, READ | WRITE | WRITE_ZEROES) {
            return Status::INVALID_OPCODE;
        }
        let power = self.emulation.block_power;
        let bytes = u64::from(command.blocks()) << power;
        let blocks = storage.bytes() >> power;
        if command.lba().checked_add(command.blocks().into()).is_none_or(|end| end > blocks) {
            return Status::OUT_OF_RANGE;
        }
        if command.opcode == WRITE_ZEROES && !self.emulation.write_zeroes {
            return Status::INVALID_OPCODE;
        }
        if command.opcode == WRITE_ZEROES {
            let zero = |data: &mut [u8]| {
                data.fill(0);
                true
            };
            let zeroed = storage.write(command.lba() << power, bytes as usize, &mut self.scratch, zero);
            return if zeroed.is_ok() { Status::SUCCESS } else { Status::WRITE_FAULT };
        }
        if self.emulation.transfer_max.is_some_and(|max| bytes > max) {
            return Status::INVALID_FIELD;
        }
        if matches!(command.data, spec::DataPointer::Sgl(_)) && !self.emulation.sgl {
            return Status::INVALID_FIELD;
        }
        let pieces = match transfer::pieces(mappings, command.data, bytes, corrupt) {
            Ok(pieces) => pieces,
            Err(status) => {
                self.counters.bad_addresses += u64::from(status == Status::DATA_TRANSFER);
                return status;
            }
        };
        let mut at = command.lba() << power;
        for piece in pieces {
            let (address, bytes) = (piece.address, piece.bytes as usize);
            let scratch = &mut self.scratch;
            let (moved, failure) = if command.opcode == READ {
                let take = |data: &[u8]| transfer::copy_in(mappings, address, data);
                (storage.read(at, bytes, scratch, take), Status::READ_ERROR)
            } else {
                let fill = |data: &mut [u8]| transfer::copy_out(mappings, address, data);
                (storage.write(at, bytes, scratch, fill), Status::WRITE_FAULT)
            };
            match moved {
                Ok(true) => at += piece.bytes,
                Ok(false) => {
                    self.counters.bad_addresses += 1;
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

    /// Runs an admin command; `None` if it does not end now.
    fn admin(&mut self, mappings: &Mappings, id: u16, command: &Command) -> Option<(Status, u32)> {
        let [d10, d11, ..] = command.dwords;
        let (queue, entries) = (d10 as u16, (d10 >> 16) + 1);
        let address = match command.data {
            spec::DataPointer::Prp { first, .. } => first,
            spec::DataPointer::Sgl(_) => return Some((Status::INVALID_FIELD, 0)),
        };
        let status = match command.opcode {
            IDENTIFY => self.identify(mappings, command, address),
            GET_LOG_PAGE => self.log_page(mappings, command, address),
            SET_FEATURES if d10 & 0xff == FEATURE_QUEUES => {
                let granted = |wanted: u32| wanted.min(u32::from(self.emulation.queue_pairs) - 1);
                return Some((Status::SUCCESS, granted(d11 >> 16) << 16 | granted(d11 & 0xffff)));
            }
            CREATE_CQ if queue == 0 || queue > self.emulation.queue_pairs => Status::INVALID_QUEUE,
            CREATE_SQ if queue == 0 || queue > self.emulation.queue_pairs => Status::INVALID_QUEUE,
            CREATE_CQ => self.add_completions(mappings, queue, entries, address),
            CREATE_SQ => self.add_submissions(mappings, queue, entries, (address, (d11 >> 16) as u16)),
            DELETE_SQ => self.delete_submissions(queue),
            DELETE_CQ => self.delete_completions(queue),
            ABORT => return Some((Status::SUCCESS, self.abort(mappings, d10 as u16, (d10 >> 16) as u16))),
            ASYNC_EVENT_REQUEST if self.events.len() < EVENTS_MAX => {
                self.events.push(id);
                return None;
            }
            ASYNC_EVENT_REQUEST => Status::EVENT_LIMIT,
            SET_FEATURES => Status::INVALID_FIELD,
            _ => Status::INVALID_OPCODE,
        };
        Some((status, 0))
    }

    fn identify(&mut self, mappings: &Mappings, command: &Command, address: u64) -> Status {
        let count = self.emulation.namespaces.len() as u32;
        let data = match (command.dwords[0] & 0xff) as u8 {
            cns::CONTROLLER => ControllerIdentity {
                serial: self.emulation.serial.clone(),
                model: "Reprise emulated controller".into(),
                firmware: "1".into(),
                transfer_max: self.emulation.transfer_max,
                aborts_max: 4,
                events_max: EVENTS_MAX as u16,
                namespaces: count,
                write_zeroes: self.emulation.write_zeroes,
                write_cache: true,
                sgl: self.emulation.sgl,
            }
            .encode(),
            cns::NAMESPACES => {
                NamespaceList((1..=count).filter(|id| *id > command.namespace).collect()).encode()
            }
            cns::NAMESPACE => {
                let index = (command.namespace as usize).wrapping_sub(1);
                let Some(storage) = self.emulation.namespaces.get(index) else {
                    return Status::INVALID_NAMESPACE;
                };
                let power = self.emulation.block_power;
                let format = LbaFormat { data_power: power, metadata_bytes: 0 };
                let blocks = storage.bytes() >> power;
                NamespaceIdentity { blocks, format, write_protected: false }.encode()
            }
            _ => return Status::INVALID_FIELD,
        };
        self.answer(mappings, address, &data[..])
    }

    fn log_page(&mut self, mappings: &Mappings, command: &Command, address: u64) -> Status {
        let wanted = ((command.dwords[0] >> 16) as usize + 1) * 4;
        if command.dwords[0] & 0xff != HEALTH_LOG || wanted > HEALTH_BYTES {
            return Status::INVALID_FIELD;
        }
        let mut page = [0; HEALTH_BYTES];
        page[3] = 100; // available spare in percent
        self.answer(mappings, address, &page[..wanted])
    }

    fn answer(&mut self, mappings: &Mappings, address: u64, data: &[u8]) -> Status {
        if transfer::copy_in(mappings, address, data) {
            return Status::SUCCESS;
        }
        self.counters.bad_addresses += 1;
        Status::DATA_TRANSFER
    }

    fn add_completions(&mut self, mappings: &Mappings, id: u16, entries: u32, address: u64) -> Status {
        if self.completions.contains_key(&id) {
            return Status::INVALID_QUEUE;
        }
        if !(2..=self.emulation.entries_max.max(4096)).contains(&entries) {
            return Status::INVALID_QUEUE_SIZE;
        }
        match resolve(mappings, address, u64::from(entries) * CQE_BYTES as u64) {
            Some((Mapping::Words(_), at)) if at.is_multiple_of(spec::PAGE_BYTES) => {
                self.completions.insert(id, Completions { address, entries, tail: 0, phase: true });
                Status::SUCCESS
            }
            _ => Status::INVALID_FIELD,
        }
    }

    fn add_submissions(
        &mut self,
        mappings: &Mappings,
        id: u16,
        entries: u32,
        (address, completions): (u64, u16),
    ) -> Status {
        if self.submissions.contains_key(&id) || !self.completions.contains_key(&completions) {
            return Status::INVALID_QUEUE;
        }
        if !(2..=self.emulation.entries_max.max(4096)).contains(&entries) {
            return Status::INVALID_QUEUE_SIZE;
        }
        if resolve(mappings, address, u64::from(entries) * SQE_BYTES as u64).is_none() {
            return Status::INVALID_FIELD;
        }
        // A queue starts empty: an earlier queue may have left another value in the doorbell.
        self.set(offset::sq_tail(id, STRIDE), 0);
        self.set(offset::cq_head(id, STRIDE), 0);
        self.submissions.insert(id, Submissions { address, entries, head: 0, completions, dropped: None });
        Status::SUCCESS
    }

    fn delete_submissions(&mut self, id: u16) -> Status {
        if id == 0 || self.submissions.remove(&id).is_none() {
            return Status::INVALID_QUEUE;
        }
        self.pending.retain(|pending| pending.queue != id);
        Status::SUCCESS
    }

    fn delete_completions(&mut self, id: u16) -> Status {
        if id == 0 || self.submissions.values().any(|queue| queue.completions == id) {
            return Status::INVALID_QUEUE;
        }
        if self.completions.remove(&id).is_none() { Status::INVALID_QUEUE } else { Status::SUCCESS }
    }

    /// Aborts a command that waits for its end. Returns bit 0 of the result: 1 if it was not aborted.
    fn abort(&mut self, mappings: &Mappings, queue: u16, id: u16) -> u32 {
        let Some(at) = self.pending.iter().position(|one| one.queue == queue && one.id == id) else {
            return 1;
        };
        let pending = self.pending.remove(at).expect("it was found");
        self.complete(mappings, Pending { status: Status::ABORTED, ..pending });
        0
    }

    /// Writes the completions whose time has come.
    fn complete_due(&mut self, mappings: &Mappings) -> bool {
        let now = Instant::now();
        let due: Vec<Pending> = {
            let is_due = |one: &Pending| one.due.is_some_and(|due| due <= now) || one.after_next;
            let all = self.pending.iter().copied();
            all.filter(|one| is_due(one)).collect()
        };
        self.pending.retain(|one| !(one.due.is_some_and(|due| due <= now) || one.after_next));
        due.iter().for_each(|one| self.post(mappings, one));
        !due.is_empty()
    }

    /// Writes a completion, and those that wait for the next one.
    fn complete(&mut self, mappings: &Mappings, pending: Pending) {
        self.post(mappings, &pending);
        let waits = |one: &Pending| one.after_next && one.queue == pending.queue;
        let waiting: Vec<Pending> = self.pending.iter().copied().filter(waits).collect();
        self.pending.retain(|one| !waits(one));
        waiting.iter().for_each(|one| self.post(mappings, one));
    }

    /// Writes a completion, or keeps it while the completion queue is full.
    fn post(&mut self, mappings: &Mappings, pending: &Pending) {
        let Some(submissions) = self.submissions.get(&pending.queue) else { return };
        let head = self.get(offset::cq_head(submissions.completions, STRIDE));
        let Some(queue) = self.completions.get_mut(&submissions.completions) else { return };
        if head >= queue.entries {
            return self.fail();
        }
        if (queue.tail + 1) % queue.entries == head {
            self.pending.push_back(Pending { due: Some(Instant::now()), after_next: false, ..*pending });
            return;
        }
        let entry = Completion {
            result: pending.result,
            sq_head: submissions.head as u16,
            sq_id: pending.queue,
            id: pending.id,
            status: pending.status,
            phase: queue.phase,
        };
        let address = queue.address + u64::from(queue.tail) * CQE_BYTES as u64;
        let Some((Mapping::Words(memory), at)) = resolve(mappings, address, CQE_BYTES as u64) else {
            self.counters.bad_addresses += 1;
            return;
        };
        let [first, second, third, last] = entry.encode();
        for (index, dword) in [first, second, third].into_iter().enumerate() {
            memory.atomic_u32(at + 4 * index).store(dword.to_le(), Ordering::Relaxed);
        }
        // Data and the other dwords are visible before the phase bit.
        memory.atomic_u32(at + 12).store(last.to_le(), Ordering::Release);
        queue.tail += 1;
        if queue.tail == queue.entries {
            (queue.tail, queue.phase) = (0, !queue.phase);
        }
    }
}
