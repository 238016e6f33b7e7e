//! A ring on an emulated controller, with memory for data.

use std::time::{Duration, Instant};

use reprise_cuda::ring::{
    BatchSettings, ContextStatus, Cqe, HostRunner, Operation, OwnedQueue, QueueShape, Reclaimed, Ring,
    RingError, RingMemory, RingSettings, Ticket, Transfer,
};
use reprise_nvme::emulated::{EmulatedController, Emulation, EmulationCounters, Storage};
use reprise_nvme::{Backing, Controller, DmaMapping, DriverSettings};

/// Limit of waits that end by an event.
pub(crate) const LONG: Duration = Duration::from_secs(60);
/// Size of the namespace, and of the memory for data.
pub(crate) const BYTES: usize = 4 << 20;
/// Size of a logical block.
pub(crate) const BLOCK: u64 = 512;

pub(crate) type Owned = OwnedQueue<EmulatedController>;

/// A ring whose queues run.
pub(crate) struct Rig {
    pub(crate) ring: Ring,
    pub(crate) controller: Controller<EmulatedController>,
    pub(crate) owned: Vec<Owned>,
    runner: HostRunner,
    data: RingMemory,
    mapping: DmaMapping,
}

/// Returns a controller with 4 MiB in memory.
pub(crate) fn emulation() -> Emulation {
    Emulation::of(Storage::memory(BYTES))
}

pub(crate) fn reads() -> BatchSettings {
    BatchSettings { operation: Operation::Read, namespace: 1, timeout: Some(LONG), token: 0 }
}

pub(crate) fn writes() -> BatchSettings {
    BatchSettings { operation: Operation::Write, ..reads() }
}

impl Rig {
    /// Starts a ring of 8 batches with some queues of `entries` entries.
    pub(crate) fn new(emulation: Emulation, queues: usize, entries: u32) -> Rig {
        let settings = DriverSettings { admin_timeout: LONG, ..DriverSettings::default() };
        let backing = EmulatedController::start(emulation).expect("it starts");
        let mut controller = Controller::start(backing, settings).expect("it starts");
        let data = RingMemory::allocate(BYTES).expect("4 MiB");
        let mapping = controller.backing().map(data.span()).expect("whole pages");
        let bytes = QueueShape::memory_bytes(entries, controller.data_format());
        let size = RingSettings { depth: 8, queues, entries_max: entries as usize };
        let mut ring = Ring::on_host(&size).expect("valid");
        let mut owned = Vec::new();
        for index in 0..queues {
            let memory = RingMemory::allocate(bytes).expect("a queue pair");
            let queue = Owned::create(&mut controller, memory, entries, BLOCK as u32).expect("granted");
            ring.init_queue(index, queue.for_host().expect("registers")).expect("a free queue");
            owned.push(queue);
        }
        let runner = HostRunner::start(&ring, 0..queues).expect("threads");
        Rig { ring, controller, owned, runner, data, mapping }
    }

    /// Returns a transfer between memory and a place, both in bytes.
    pub(crate) fn transfer(&self, memory: u64, place: u64, bytes: u64) -> Transfer {
        let (address, block) = (self.mapping.address() + memory, place / BLOCK);
        Transfer { address, block, bytes: bytes as u32, checksum: 0 }
    }

    pub(crate) fn issue(&mut self, queue: usize, settings: &BatchSettings, all: &[Transfer]) -> Ticket {
        let mut iocb = self.ring.get_iocb(settings).expect("a free batch");
        for one in all {
            assert!(iocb.push(one), "{} contexts fit", all.len());
        }
        iocb.issue_io(queue).expect("the queue exists")
    }

    /// Waits for any batch.
    pub(crate) fn wait(&mut self) -> Cqe {
        self.ring.wait_cqe(LONG).expect("the batch ends")
    }

    /// Runs one batch on queue 0, and returns the statuses of its contexts.
    pub(crate) fn run(&mut self, settings: &BatchSettings, all: &[Transfer]) -> Vec<ContextStatus> {
        let ticket = self.issue(0, settings, all);
        let cqe = self.wait();
        assert_eq!((cqe.ticket, cqe.contexts), (ticket, all.len()));
        let statuses: Vec<_> = self.ring.statuses(ticket).collect();
        let failed = statuses.iter().filter(|one| **one != ContextStatus::Done).count();
        assert_eq!((statuses.len(), failed), (all.len(), cqe.failed));
        statuses
    }

    /// Runs one batch, all of whose contexts succeed.
    pub(crate) fn succeed(&mut self, settings: &BatchSettings, all: &[Transfer]) {
        let statuses = self.run(settings, all);
        assert!(statuses.iter().all(|one| *one == ContextStatus::Done), "{statuses:?}");
    }

    /// Fills data memory with bytes that depend on their place and a seed; returns them.
    pub(crate) fn fill(&self, at: usize, bytes: usize, seed: u64) -> Vec<u8> {
        let all = pattern(bytes, seed);
        self.data.span().write_at(at, &all).expect("inside");
        all
    }

    pub(crate) fn contents(&self, at: usize, bytes: usize) -> Vec<u8> {
        let mut copy = vec![0; bytes];
        self.data.span().read_at(at, &mut copy).expect("inside");
        copy
    }

    /// Waits until no command of a queue is given up.
    pub(crate) fn await_given_up(&self, queue: usize, count: u32) {
        let start = Instant::now();
        while self.ring.given_up(queue) != count {
            assert!(start.elapsed() < LONG, "{} commands are given up", self.ring.given_up(queue));
            std::thread::yield_now();
        }
    }

    /// Reclaims a queue after commands were given up or a violation.
    pub(crate) fn reclaim(&mut self, queue: usize, grace: Duration) -> Reclaimed {
        let owned = &mut self.owned[queue];
        self.ring.reclaim(queue, owned, &mut self.controller, grace).expect("the controller works")
    }

    /// Fails to reclaim a queue, since its controller has failed.
    pub(crate) fn fail_to_reclaim(&mut self, queue: usize) {
        let owned = &mut self.owned[queue];
        let failed = self.ring.reclaim(queue, owned, &mut self.controller, Duration::ZERO);
        assert!(matches!(failed, Err(RingError::Nvme(_))), "{failed:?}");
        // The queue pair stays with its owner. No other call can end it.
        let again = self.ring.reclaim(queue, owned, &mut self.controller, Duration::ZERO);
        let again = again.expect_err("the queue pair may live").to_string();
        assert!(again.contains("reset the controller first"), "{again}");
    }

    /// Creates the queue pair of a parked queue again, and resumes the queue.
    pub(crate) fn recreate(&mut self, queue: usize) {
        let owned = &mut self.owned[queue];
        owned.recreate(&mut self.controller).expect("confirmed");
        self.ring.resume(queue, owned.for_host().expect("registers")).expect("it is parked");
    }

    /// Drops everything but the threads of the ring.
    pub(crate) fn into_runner(self) -> HostRunner {
        self.runner
    }

    /// Ends everything; returns the counters of the controller and the contents of the namespace.
    pub(crate) fn stop(self) -> (EmulationCounters, Vec<u8>) {
        let Rig { ring, mut controller, owned, runner, data, mapping } = self;
        drop(runner);
        for mut queue in owned {
            queue.delete(&mut controller).expect("confirmed");
        }
        let backing = std::sync::Arc::clone(controller.backing());
        drop((ring, controller, mapping, data));
        let (counters, mut namespaces) = std::sync::Arc::into_inner(backing).expect("the only owner").stop();
        match namespaces.pop() {
            Some(Storage::Memory(contents)) => (counters, contents),
            other => panic!("one namespace in memory: {other:?}"),
        }
    }
}

/// Bytes that depend on their place and a seed.
pub(crate) fn pattern(bytes: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut all = Vec::with_capacity(bytes + 8);
    while all.len() < bytes {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        all.extend_from_slice(&state.to_le_bytes());
    }
    all.truncate(bytes);
    all
}
