//! Admin commands of the controller. The thread that serves the admin queue holds its lock, and takes those of others.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;

use super::QUEUES_MAX;
use super::burst::{Burst, Scratch};
use super::machine::{EVENTS_MAX, Machine, STRIDE};
use super::memory::{Mappings, resolve};
use super::queues::{Completions, Pending, Submissions};
use super::transfer;
use crate::spec::{
    self, ABORT, ASYNC_EVENT_REQUEST, CQE_BYTES, CREATE_CQ, CREATE_SQ, Command, ControllerIdentity,
    DELETE_CQ, DELETE_SQ, FEATURE_QUEUES, GET_LOG_PAGE, HEALTH_BYTES, HEALTH_LOG, IDENTIFY, LbaFormat,
    NamespaceIdentity, NamespaceList, SET_FEATURES, SQE_BYTES, Status, cns, offset,
};

impl Burst<'_> {
    /// Runs an admin command; `None` if it does not end now.
    pub(super) fn admin(&mut self, id: u16, command: &Command) -> Option<(Status, u32)> {
        let machine = self.machine;
        let [d10, d11, ..] = command.dwords;
        let (queue, entries) = (d10 as u16, (d10 >> 16) + 1);
        let address = match command.data {
            spec::DataPointer::Prp { first, .. } => first,
            spec::DataPointer::Sgl(_) => return Some((Status::INVALID_FIELD, 0)),
        };
        let pairs = machine.emulation.queue_pairs;
        let status = match command.opcode {
            IDENTIFY => self.identify(command, address),
            GET_LOG_PAGE => self.log_page(command, address),
            SET_FEATURES if d10 & 0xff == FEATURE_QUEUES => {
                let granted = |wanted: u32| wanted.min(u32::from(pairs) - 1);
                return Some((Status::SUCCESS, granted(d11 >> 16) << 16 | granted(d11 & 0xffff)));
            }
            CREATE_CQ | CREATE_SQ if queue == 0 || queue > pairs => Status::INVALID_QUEUE,
            CREATE_CQ => machine.add_completions(self.mappings, queue, entries, address),
            CREATE_SQ => {
                machine.add_submissions(self.mappings, queue, entries, (address, (d11 >> 16) as u16))
            }
            DELETE_SQ if queue == 0 || usize::from(queue) >= QUEUES_MAX => Status::INVALID_QUEUE,
            DELETE_SQ if machine.queues.remove(queue) => Status::SUCCESS,
            DELETE_SQ => Status::INVALID_QUEUE,
            DELETE_CQ => machine.delete_completions(queue),
            ABORT => return Some((Status::SUCCESS, self.abort(d10 as u16, (d10 >> 16) as u16))),
            ASYNC_EVENT_REQUEST if machine.add_event_request(id) => return None,
            ASYNC_EVENT_REQUEST => Status::EVENT_LIMIT,
            SET_FEATURES => Status::INVALID_FIELD,
            _ => Status::INVALID_OPCODE,
        };
        Some((status, 0))
    }

    fn identify(&mut self, command: &Command, address: u64) -> Status {
        let machine = self.machine;
        let settings = &machine.emulation;
        let count = machine.namespace_bytes.len() as u32;
        let data = match (command.dwords[0] & 0xff) as u8 {
            cns::CONTROLLER => ControllerIdentity {
                serial: settings.serial.clone(),
                model: "Reprise emulated controller".into(),
                firmware: "1".into(),
                transfer_max: settings.transfer_max,
                aborts_max: 4,
                events_max: EVENTS_MAX as u16,
                namespaces: count,
                write_zeroes: settings.write_zeroes,
                write_cache: true,
                sgl: settings.sgl,
            }
            .encode(),
            cns::NAMESPACES => {
                NamespaceList((1..=count).filter(|id| *id > command.namespace).collect()).encode()
            }
            cns::NAMESPACE => {
                let index = (command.namespace as usize).wrapping_sub(1);
                let Some(bytes) = machine.namespace_bytes.get(index) else {
                    return Status::INVALID_NAMESPACE;
                };
                let power = settings.block_power;
                let format = LbaFormat { data_power: power, metadata_bytes: 0 };
                NamespaceIdentity { blocks: bytes >> power, format, write_protected: false }.encode()
            }
            _ => return Status::INVALID_FIELD,
        };
        self.answer(address, &data[..])
    }

    fn log_page(&mut self, command: &Command, address: u64) -> Status {
        let wanted = ((command.dwords[0] >> 16) as usize + 1) * 4;
        if command.dwords[0] & 0xff != HEALTH_LOG || wanted > HEALTH_BYTES {
            return Status::INVALID_FIELD;
        }
        let mut page = [0; HEALTH_BYTES];
        page[3] = 100; // available spare in percent
        // Data units written, in thousands of 512 bytes, rounded up.
        let units = self.machine.written_bytes().div_ceil(512_000);
        page[48..64].copy_from_slice(&u128::from(units).to_le_bytes());
        self.answer(address, &page[..wanted])
    }

    fn answer(&mut self, address: u64, data: &[u8]) -> Status {
        if transfer::copy_in(self.mappings, address, data) {
            return Status::SUCCESS;
        }
        self.machine.count_bad_addresses(1);
        Status::DATA_TRANSFER
    }

    /// Aborts a command that waits for its end. Returns bit 0 of the result: 1 if it was not aborted.
    fn abort(&mut self, queue: u16, id: u16) -> u32 {
        if queue == self.id {
            return u32::from(!self.abort_own(id));
        }
        if usize::from(queue) >= QUEUES_MAX {
            return 1;
        }
        let mut place = self.machine.queues.lock(queue);
        let Some(submissions) = place.as_mut() else { return 1 };
        let mut scratch = Scratch::default();
        let mut burst = Burst::new(self.machine, self.mappings, (queue, submissions), &mut scratch);
        u32::from(!burst.abort_own(id))
    }

    fn abort_own(&mut self, id: u16) -> bool {
        let Some(at) = self.queue.pending.iter().position(|one| one.id == id) else { return false };
        let pending = self.queue.pending.remove(at).expect("it was found");
        self.complete(Pending { status: Status::ABORTED, ..pending });
        true
    }
}

impl Machine {
    pub(super) fn add_completions(&self, mappings: &Mappings, id: u16, entries: u32, address: u64) -> Status {
        let mut place = self.queues.lock_completions(id);
        if place.is_some() {
            return Status::INVALID_QUEUE;
        }
        if !self.accepts_entries(entries) {
            return Status::INVALID_QUEUE_SIZE;
        }
        match resolve(mappings, address, u64::from(entries) * CQE_BYTES as u64) {
            Some((memory, at)) if at.is_multiple_of(spec::PAGE_BYTES) && memory.is_writable() => {
                *place = Some(Completions { address, entries, tail: 0, phase: true });
                Status::SUCCESS
            }
            _ => Status::INVALID_FIELD,
        }
    }

    pub(super) fn add_submissions(
        &self,
        mappings: &Mappings,
        id: u16,
        entries: u32,
        (address, completions): (u64, u16),
    ) -> Status {
        let known =
            usize::from(completions) < QUEUES_MAX && self.queues.lock_completions(completions).is_some();
        if self.queues.place(id).exists.load(Ordering::Acquire) || !known {
            return Status::INVALID_QUEUE;
        }
        if !self.accepts_entries(entries) {
            return Status::INVALID_QUEUE_SIZE;
        }
        match resolve(mappings, address, u64::from(entries) * SQE_BYTES as u64) {
            Some((memory, at)) if at.is_multiple_of(spec::PAGE_BYTES) && memory.is_writable() => {}
            _ => return Status::INVALID_FIELD,
        }
        // A queue starts empty: an earlier queue may have left another value in the doorbell.
        self.set(offset::sq_tail(id, STRIDE), 0);
        self.set(offset::cq_head(id, STRIDE), 0);
        let pending = VecDeque::new();
        let queue = Submissions { address, entries, head: 0, completions, dropped: None, pending };
        self.queues.insert(id, queue);
        Status::SUCCESS
    }

    fn accepts_entries(&self, entries: u32) -> bool {
        (2..=self.emulation.entries_max.max(4096)).contains(&entries)
    }

    /// The admin queue's own lock is held: it completes to queue 0, which is never deleted.
    fn delete_completions(&self, id: u16) -> Status {
        if id == 0 || usize::from(id) >= QUEUES_MAX {
            return Status::INVALID_QUEUE;
        }
        let uses = |queue: u16| self.queues.lock(queue).as_ref().is_some_and(|one| one.completions == id);
        if (1..QUEUES_MAX as u16).any(uses) {
            return Status::INVALID_QUEUE;
        }
        match self.queues.lock_completions(id).take() {
            Some(_) => Status::SUCCESS,
            None => Status::INVALID_QUEUE,
        }
    }
}
