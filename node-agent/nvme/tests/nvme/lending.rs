//! Queue pairs that another process drives: here, this test through separate mappings.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::time::{Duration, Instant};

use reprise_buffers::{Access, MappedRegion, Span};
use reprise_io::{BlockDevice, EngineChoice, EngineSettings, Wait};
use reprise_nvme::emulated::{EmulatedController, Emulation, Fault, FaultRule, Selection, Storage};
use reprise_nvme::spec::{Command, Completion, DataPointer, READ, SglDescriptor, Status, WRITE};
use reprise_nvme::{Backing, DeviceSettings, LentDoorbells, LentQueue, NvmeDevice, NvmeError, QueueLender};

pub(crate) const BLOCK: usize = 4096;
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// An engine in a thread, as the agent runs it.
pub(crate) struct Running {
    pub(crate) lender: Arc<dyn QueueLender>,
    ending: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Running {
    fn start(emulation: Emulation) -> Running {
        Running::on(EmulatedController::start(emulation).expect("a controller"), &DeviceSettings::default())
    }

    pub(crate) fn on(backing: impl Backing, settings: &DeviceSettings) -> Running {
        let device = NvmeDevice::open(backing, settings).expect("a device");
        let lender: Arc<dyn QueueLender> = device.controller().clone();
        let settings = EngineSettings { queue_depth: 8, engine: EngineChoice::Auto, regions: Vec::new() };
        let mut engine = Box::new(device).start_engine(&settings).expect("an engine");
        let ending = Arc::new(AtomicBool::new(false));
        let stop = Arc::clone(&ending);
        let thread = std::thread::spawn(move || {
            while !stop.load(Ordering::SeqCst) {
                if engine.reap(Wait::Until(Duration::from_millis(20)), &mut Vec::new()).is_err() {
                    std::thread::yield_now();
                }
            }
        });
        Running { lender, ending, thread: Some(thread) }
    }

    pub(crate) fn stop(&mut self) {
        self.ending.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            thread.join().expect("the engine ends well");
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The other process's side of a queue pair.
pub(crate) struct Driven {
    memory: Span,
    pub(crate) doorbells: Span,
    pub(crate) queue: LentQueue,
    tail: u32,
    head: u32,
    phase: bool,
}

impl Driven {
    pub(crate) fn of(lender: &dyn QueueLender, entries: u32) -> Driven {
        let mut doorbells = lender.lend_doorbells().expect("doorbells");
        let queue = lender.lend(entries, &mut doorbells).expect("a queue pair");
        let all = |region: MappedRegion| region.span(0, region.bytes()).expect("all");
        let copy = queue.file.try_clone().expect("a descriptor");
        let memory = all(MappedRegion::map_sealed(copy, queue.bytes).expect("mapped"));
        let bytes = doorbells.bytes();
        let mapped = MappedRegion::map(doorbells.into_file(), bytes, Access::ReadWrite);
        let doorbells = all(mapped.expect("mapped"));
        Driven { memory, doorbells, queue, tail: 0, head: 0, phase: true }
    }

    pub(crate) fn submit(&mut self, command: &Command, id: u16) {
        for (index, word) in command.encode(id).into_iter().enumerate() {
            let at = self.tail as usize * 64 + 8 * index;
            self.memory.atomic_u64(at).store(word.to_le(), Ordering::Relaxed);
        }
        self.tail = (self.tail + 1) % self.queue.entries;
        let doorbell = self.queue.submission_doorbell as usize;
        self.doorbells.atomic_u32(doorbell).store(self.tail, Ordering::SeqCst);
    }

    /// Takes a completion; `None` if the time passes without one.
    pub(crate) fn complete(&mut self, within: Duration) -> Option<Completion> {
        let until = Instant::now() + within;
        let at = self.queue.completions_at as usize + self.head as usize * 16;
        while Instant::now() < until {
            let last = u32::from_le(self.memory.atomic_u32(at + 12).load(Ordering::Relaxed));
            if Completion::decode([0, 0, 0, last]).phase == self.phase {
                fence(Ordering::Acquire);
                let dword = |index: usize| {
                    u32::from_le(self.memory.atomic_u32(at + 4 * index).load(Ordering::Relaxed))
                };
                let completion = Completion::decode([dword(0), dword(1), dword(2), last]);
                self.head += 1;
                if self.head == self.queue.entries {
                    (self.head, self.phase) = (0, !self.phase);
                }
                let doorbell = self.queue.completion_doorbell as usize;
                self.doorbells.atomic_u32(doorbell).store(self.head, Ordering::SeqCst);
                return Some(completion);
            }
            std::thread::yield_now();
        }
        None
    }

    pub(crate) fn run(&mut self, opcode: u8, lba: u64, address: u64) -> Status {
        let data = DataPointer::Sgl(SglDescriptor::data(address, BLOCK as u32));
        self.submit(&Command::transfer(opcode, 1, lba, (BLOCK / 512) as u32).with_data(data), lba as u16);
        let completion = self.complete(PATIENCE).expect("the command ends");
        assert_eq!(completion.id, lba as u16);
        completion.status
    }
}

fn lend(lender: &dyn QueueLender, entries: u32) -> Result<LentQueue, NvmeError> {
    let mut doorbells: LentDoorbells = lender.lend_doorbells()?;
    lender.lend(entries, &mut doorbells)
}

#[test]
fn another_process_writes_and_reads_through_a_lent_queue_pair() {
    let running = Running::start(Emulation::of(Storage::memory(4 << 20)));
    let lender = &*running.lender;
    let (own, descriptor) = MappedRegion::allocate(4 * BLOCK as u64).expect("memory");
    // The lender maps the memory by the descriptor that it received.
    let theirs = MappedRegion::map_sealed(descriptor, own.bytes()).expect("sealed");
    let mapping = lender.map_lent(&theirs.span(0, theirs.bytes()).expect("all")).expect("mapped");
    let mut driven = Driven::of(lender, 8);
    let content: Vec<u8> = (0..BLOCK).map(|at| at as u8).collect();
    own.span(0, BLOCK as u64).expect("inside").copy_in(&content).expect("writable");
    // More commands than entries: the queues wrap around.
    for lba in 0..20 {
        assert!(driven.run(WRITE, 8 * lba, mapping.address()).is_success());
    }
    assert!(driven.run(READ, 8 * 3, mapping.address() + 2 * BLOCK as u64).is_success());
    let mut read = vec![0; BLOCK];
    own.span(2 * BLOCK as u64, BLOCK as u64).expect("inside").copy_out(&mut read);
    assert_eq!(read, content);

    let (address, id) = (mapping.address(), driven.queue.id);
    drop(mapping);
    let status = driven.run(READ, 0, address);
    assert_eq!(status, Status::DATA_TRANSFER, "an address whose mapping has ended");
    lender.delete(id).expect("deleted");
    driven.submit(&Command::flush(1), 1);
    assert!(driven.complete(Duration::from_millis(50)).is_none(), "a deleted queue pair runs nothing");
    assert!(lender.delete(id).is_err(), "it is lent no longer");
}

#[test]
fn queue_pairs_are_lent_until_all_of_the_controller_are_in_use() {
    let emulation = Emulation { queue_pairs: 4, ..Emulation::of(Storage::memory(1 << 20)) };
    let running = Running::start(emulation);
    let lender = &*running.lender;
    // One of the four belongs to the engine.
    let lent: Vec<LentQueue> = (0..3).map(|_| lend(lender, 16).expect("a queue pair")).collect();
    let refused = lend(lender, 16).expect_err("none is left");
    assert!(refused.to_string().contains("granted 4"), "{refused}");
    let most = lender.lent_device(1).expect("the only namespace").entries_max;
    assert_eq!(lender.lent_device(2), None);
    for entries in [0, 1, most + 1] {
        assert!(matches!(lend(lender, entries), Err(NvmeError::Invalid(_))));
    }
    lender.delete(lent[1].id).expect("deleted");
    assert_eq!(lend(lender, 16).expect("the returned one").id, lent[1].id);
}

#[test]
fn a_closed_device_lends_nothing_and_has_no_queues_to_delete() {
    let mut running = Running::start(Emulation::of(Storage::memory(1 << 20)));
    let queue = lend(&*running.lender, 16).expect("a queue pair");
    running.stop();
    assert!(matches!(lend(&*running.lender, 16), Err(NvmeError::Closed)));
    running.lender.delete(queue.id).expect("the controller was reset");
}

#[test]
fn memory_that_could_shrink_is_not_mapped() {
    let file = tempfile::tempfile().expect("a file");
    file.set_len(1 << 16).expect("enlarged");
    let refused = MappedRegion::map_sealed(file.into(), 1 << 16).expect_err("not sealed");
    assert!(refused.to_string().contains("F_SEAL_SHRINK"), "{refused}");
    let (_, descriptor) = MappedRegion::allocate(4096).expect("memory");
    let refused = MappedRegion::map_sealed(descriptor, 8192).expect_err("too short");
    assert!(refused.to_string().contains("it has 4KiB"), "{refused}");
}

#[test]
fn queue_pair_that_is_deleted_under_io_completes_nothing_and_its_number_serves_another_process() {
    let late = Fault::Late(Duration::from_millis(60));
    let on = Selection { queue: Some(2), times: Some(3), ..Selection::default() };
    let faults = vec![FaultRule { on, fault: late }];
    let running = Running::start(Emulation { faults, ..Emulation::of(Storage::memory(1 << 20)) });
    let lender = &*running.lender;
    let mut driven = Driven::of(lender, 8);
    assert_eq!(driven.queue.id, 2);
    (1..=3).for_each(|id| driven.submit(&Command::flush(1), id));
    lender.delete(2).expect("deleted with its commands in flight");
    assert!(driven.complete(Duration::from_millis(200)).is_none(), "late completions do not appear");

    let mut next = Driven::of(lender, 8);
    assert_eq!(next.queue.id, 2, "the number is free again");
    next.submit(&Command::flush(1), 9);
    assert_eq!(next.complete(PATIENCE).expect("it ends").id, 9, "and no command of the earlier queue pair");
}
