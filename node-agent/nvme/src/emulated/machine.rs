//! The controller's side: threads that follow registers, take commands, and complete them.
//!
//! The queues are divided among the threads. Thread 0 also follows the configuration and serves the admin queue. A thread
//! holds the lock of the queue that it serves. Order of locks: admin queue, another submission queue, a completion
//! queue, a namespace.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use super::burst::{Burst, Scratch};
use super::faults::{ActiveRule, Fault, Subject};
use super::memory::Mappings;
use super::queues::Queues;
use super::storage::Storage;
use super::{Emulation, EmulationCounters, REGISTER_BYTES, Shared};
use crate::spec::{AdminQueueSizes, Configuration, Status, offset};

/// Doorbell stride in bytes: DSTRD 0.
pub(super) const STRIDE: usize = 4;
/// Time without work after which a thread sleeps.
const IDLE: Duration = Duration::from_micros(50);
/// Length of a sleep at most: a write that was missed is seen then.
const SLEEP: Duration = Duration::from_millis(1);
/// Length of a sleep if registers are written directly, which wakes no thread.
const SHORT_SLEEP: Duration = Duration::from_micros(100);
/// `CSTS.RDY`, `CSTS.CFS` and `CSTS.SHST` "complete".
const READY: u32 = 1;
const FATAL: u32 = 2;
const SHUTDOWN_COMPLETE: u32 = 2 << 2;
/// Maximum number of event requests, as Identify states.
pub(super) const EVENTS_MAX: usize = 4;
/// Version 2.0 of the specification.
const VERSION: u32 = 2 << 16;

/// The controller; see the module.
#[derive(Debug)]
pub(super) struct Machine {
    pub(super) shared: Arc<Shared>,
    /// Without namespaces and faults, which are next to it.
    pub(super) emulation: Emulation,
    pub(super) namespaces: Vec<RwLock<Storage>>,
    /// Sizes of the namespaces.
    pub(super) namespace_bytes: Vec<u64>,
    pub(super) queues: Queues,
    has_rules: bool,
    rules: Mutex<Vec<ActiveRule>>,
    /// Identifiers of the requests for events.
    events: Mutex<Vec<u16>>,
    is_ready: AtomicBool,
    has_failed: AtomicBool,
    commands: AtomicU64,
    /// Bytes that write commands have stored.
    written_bytes: AtomicU64,
    bad_addresses: AtomicU64,
    shutdowns: AtomicU64,
}

impl Machine {
    pub(super) fn new(shared: Arc<Shared>, mut emulation: Emulation) -> Machine {
        let rules: Vec<_> = std::mem::take(&mut emulation.faults).into_iter().map(ActiveRule::new).collect();
        let namespaces = std::mem::take(&mut emulation.namespaces);
        let machine = Machine {
            shared,
            emulation,
            namespace_bytes: namespaces.iter().map(Storage::bytes).collect(),
            namespaces: namespaces.into_iter().map(RwLock::new).collect(),
            queues: Queues::new(),
            has_rules: !rules.is_empty(),
            rules: Mutex::new(rules),
            events: Mutex::default(),
            is_ready: AtomicBool::new(false),
            has_failed: AtomicBool::new(false),
            commands: AtomicU64::new(0),
            written_bytes: AtomicU64::new(0),
            bad_addresses: AtomicU64::new(0),
            shutdowns: AtomicU64::new(0),
        };
        // MQES, CQR, TO of 5 s, NVM command set.
        let capabilities = u64::from(machine.emulation.entries_max - 1) | 1 << 16 | 10 << 24 | 1_u64 << 37;
        machine.set(offset::CAP, capabilities as u32);
        machine.set(offset::CAP + 4, (capabilities >> 32) as u32);
        machine.set(offset::VS, VERSION);
        machine
    }

    /// Acts as one of the threads until the driver's side is dropped.
    pub(super) fn run(&self, thread: usize) {
        let asleep = &self.shared.asleep[thread];
        let mut scratch = Scratch::default();
        let mut worked_at = Instant::now();
        while !self.shared.ending.load(Ordering::SeqCst) {
            if self.turn(thread, &mut scratch) {
                worked_at = Instant::now();
            } else if worked_at.elapsed() < IDLE {
                std::thread::yield_now();
            } else {
                asleep.store(true, Ordering::SeqCst);
                if !self.turn(thread, &mut scratch) {
                    let direct = self.shared.direct.load(Ordering::SeqCst);
                    std::thread::park_timeout(if direct { SHORT_SLEEP } else { SLEEP });
                }
                asleep.store(false, Ordering::SeqCst);
            }
        }
    }

    pub(super) fn into_parts(self) -> (EmulationCounters, Vec<Storage>) {
        let rules = self.rules.into_inner().unwrap_or_else(PoisonError::into_inner);
        let counters = EmulationCounters {
            commands: self.commands.into_inner(),
            faults: rules.iter().map(|rule| rule.made).collect(),
            bad_addresses: self.bad_addresses.into_inner(),
            shutdowns: self.shutdowns.into_inner(),
        };
        let contents = |one: RwLock<Storage>| one.into_inner().unwrap_or_else(PoisonError::into_inner);
        (counters, self.namespaces.into_iter().map(contents).collect())
    }

    pub(super) fn get(&self, offset: usize) -> u32 {
        self.shared.registers.atomic_u32(offset).load(Ordering::SeqCst)
    }

    pub(super) fn set(&self, offset: usize, value: u32) {
        self.shared.registers.atomic_u32(offset).store(value, Ordering::SeqCst);
    }

    pub(super) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Acquire)
    }

    pub(super) fn count_commands(&self, queue: u16, count: u64) {
        self.commands.fetch_add(if queue == 0 { 0 } else { count }, Ordering::Relaxed);
    }

    pub(super) fn count_written(&self, bytes: u64) {
        self.written_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn written_bytes(&self) -> u64 {
        self.written_bytes.load(Ordering::Relaxed)
    }

    pub(super) fn count_bad_addresses(&self, count: u64) {
        self.bad_addresses.fetch_add(count, Ordering::Relaxed);
    }

    /// Returns the fault of the first rule that harms a command.
    pub(super) fn harm(&self, subject: Subject) -> Option<Fault> {
        if !self.has_rules {
            return None;
        }
        let mut rules = self.rules.lock().unwrap_or_else(PoisonError::into_inner);
        rules.iter_mut().find_map(|rule| rule.harm(subject))
    }

    /// Reports whether a rule harms a doorbell.
    pub(super) fn any_rule_harms(&self, subject: Subject) -> bool {
        self.harm(subject).is_some()
    }

    /// Keeps the identifier of a request for an event; false if there are as many as allowed.
    pub(super) fn add_event_request(&self, id: u16) -> bool {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let accepts = events.len() < EVENTS_MAX;
        if accepts {
            events.push(id);
        }
        accepts
    }

    pub(super) fn take_event_request(&self) -> Option<u16> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }

    /// Handles everything that is due for a thread; reports whether there was work.
    fn turn(&self, thread: usize, scratch: &mut Scratch) -> bool {
        if self.has_failed() && self.get(offset::CSTS) == u32::MAX {
            return false;
        }
        let mut worked = thread == 0 && self.follow_configuration();
        if !self.is_ready.load(Ordering::Acquire) || self.has_failed() {
            return worked;
        }
        let shared = Arc::clone(&self.shared);
        let mut mappings = None;
        for id in self.queues.of_thread(thread, shared.asleep.len()) {
            let place = self.queues.place(id);
            let rung = self.get(offset::sq_tail(id, STRIDE));
            let reports_event = id == 0 && shared.event_is_due.swap(false, Ordering::SeqCst);
            let has_work = reports_event
                || rung != place.idle_at.load(Ordering::Acquire)
                || place.has_pending.load(Ordering::Acquire);
            if has_work && place.exists.load(Ordering::Acquire) {
                let mappings = &**mappings.get_or_insert_with(|| shared.space.read());
                worked |= self.serve(mappings, id, scratch);
            }
        }
        worked
    }

    /// Serves one queue with its lock held.
    fn serve(&self, mappings: &Mappings, id: u16, scratch: &mut Scratch) -> bool {
        let mut place = self.queues.lock(id);
        let Some(queue) = place.as_mut() else { return false };
        // Behind the lock: the queue may have been created again since its doorbell was read.
        let rung = self.get(offset::sq_tail(id, STRIDE));
        let mut burst = Burst::new(self, mappings, (id, queue), scratch);
        let mut worked = burst.take_commands(rung);
        if id == 0 {
            burst.report_event();
        }
        worked |= burst.complete_due();
        drop(burst);
        let of = self.queues.place(id);
        of.has_pending.store(!queue.pending.is_empty(), Ordering::Release);
        let is_idle = queue.head == rung || queue.dropped == Some(rung) || rung >= queue.entries;
        of.idle_at.store(if is_idle { rung } else { queue.head }, Ordering::Release);
        worked
    }

    /// Enables, resets or shuts down, as `CC` requests.
    fn follow_configuration(&self) -> bool {
        let configuration = self.get(offset::CC);
        let enabled = Configuration::is_enabled(configuration);
        let (is_ready, has_failed) = (self.is_ready.load(Ordering::Acquire), self.has_failed());
        if enabled && !is_ready && !has_failed {
            self.enable();
            return true;
        }
        if !enabled && (is_ready || has_failed) {
            self.reset();
            return true;
        }
        if is_ready
            && Configuration::wants_shutdown(configuration)
            && self.get(offset::CSTS) & SHUTDOWN_COMPLETE == 0
        {
            for storage in &self.namespaces {
                // A failed write of the cache is not reported by a shutdown.
                let _ = storage.write().unwrap_or_else(PoisonError::into_inner).flush();
            }
            self.shutdowns.fetch_add(1, Ordering::Relaxed);
            self.set(offset::CSTS, READY | SHUTDOWN_COMPLETE);
            return true;
        }
        false
    }

    fn enable(&self) {
        let sizes = AdminQueueSizes::decode(self.get(offset::AQA));
        let address = |at: usize| u64::from(self.get(at)) | u64::from(self.get(at + 4)) << 32;
        let (submissions, completions) = (address(offset::ASQ), address(offset::ACQ));
        let mappings = self.shared.space.read();
        let created = self.add_completions(&mappings, 0, sizes.completion.into(), completions)
            == Status::SUCCESS
            && self.add_submissions(&mappings, 0, sizes.submission.into(), (submissions, 0))
                == Status::SUCCESS;
        if created {
            self.is_ready.store(true, Ordering::Release);
            self.set(offset::CSTS, READY);
        } else {
            self.fail();
        }
    }

    /// Controller reset (Base 2.0, 3.7.2): all queues and commands are forgotten.
    fn reset(&self) {
        self.is_ready.store(false, Ordering::Release);
        self.queues.clear();
        self.events.lock().unwrap_or_else(PoisonError::into_inner).clear();
        self.has_failed.store(false, Ordering::Release);
        for at in (offset::DOORBELLS..REGISTER_BYTES).step_by(4) {
            self.set(at, 0);
        }
        self.set(offset::CSTS, 0);
    }

    pub(super) fn fail(&self) {
        self.has_failed.store(true, Ordering::Release);
        self.shared.registers.atomic_u32(offset::CSTS).fetch_or(FATAL, Ordering::SeqCst);
    }

    pub(super) fn vanish(&self) {
        self.has_failed.store(true, Ordering::Release);
        for at in (0..offset::DOORBELLS).step_by(4) {
            self.set(at, u32::MAX);
        }
    }
}
