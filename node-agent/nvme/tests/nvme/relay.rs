//! Doorbells in memory, which a thread forwards: the controller's registers stay in this process, as those behind VFIO do.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use reprise_buffers::{Access, MappedRegion, Region, Span};
use reprise_nvme::emulated::{
    EmulatedController, EmulatedMemory, Emulation, Fault, FaultRule, Selection, Storage,
};
use reprise_nvme::spec::{Command, DELETE_SQ, READ, WRITE, offset};
use reprise_nvme::{Backing, DeviceSettings, DmaMapping, DoorbellKind, DriverSettings, NvmeError};

use crate::lending::{BLOCK, Driven, PATIENCE, Running};

/// Time in which nothing happens.
const QUIET: Duration = Duration::from_millis(50);

/// Writes of doorbells of I/O queues: offset and value.
type Rung = Arc<Mutex<Vec<(usize, u32)>>>;

/// An emulated controller whose registers no other process can map.
struct Private {
    controller: EmulatedController,
    rung: Rung,
    mapped: Arc<AtomicUsize>,
}

/// Counts down when a mapping ends, which it keeps.
struct Counted(Arc<AtomicUsize>, DmaMapping);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Backing for Private {
    type Memory = EmulatedMemory;

    fn register_bytes(&self) -> usize {
        self.controller.register_bytes()
    }

    fn read(&self, offset: usize) -> u32 {
        self.controller.read(offset)
    }

    fn write(&self, offset: usize, value: u32) {
        // Those of the admin queue and of the engine's queue pair come first.
        if offset >= offset::DOORBELLS + 16 {
            self.rung.lock().expect("no panic").push((offset, value));
        }
        self.controller.write(offset, value);
    }

    fn allocate(&self, bytes: usize) -> Result<EmulatedMemory, NvmeError> {
        self.controller.allocate(bytes)
    }

    fn map_region(&self, region: &Region) -> Result<DmaMapping, NvmeError> {
        self.controller.map_region(region)
    }

    fn map_own_bar(&self, bar: u8, offset: u64, bytes: u64) -> Result<EmulatedMemory, NvmeError> {
        self.controller.map_own_bar(bar, offset, bytes)
    }

    fn map(&self, span: &Span) -> Result<DmaMapping, NvmeError> {
        let mapping = self.controller.map(span)?;
        self.mapped.fetch_add(1, Ordering::SeqCst);
        let counted = Counted(Arc::clone(&self.mapped), mapping);
        Ok(DmaMapping::new(counted.1.address(), counted.1.bytes(), Box::new(counted)))
    }

    fn register_address(&self, _: usize) -> Option<NonNull<u32>> {
        None
    }
}

struct Fixture {
    running: Running,
    rung: Rung,
    mapped: Arc<AtomicUsize>,
}

impl Fixture {
    fn start(emulation: Emulation) -> Fixture {
        let (rung, mapped) = (Rung::default(), Arc::<AtomicUsize>::default());
        let controller = EmulatedController::start(emulation).expect("a controller");
        let backing = Private { controller, rung: Arc::clone(&rung), mapped: Arc::clone(&mapped) };
        let driver =
            DriverSettings { admin_timeout: Duration::from_millis(200), ..DriverSettings::default() };
        let settings = DeviceSettings { driver, ..DeviceSettings::default() };
        Fixture { running: Running::on(backing, &settings), rung, mapped }
    }

    fn rung(&self) -> Vec<(usize, u32)> {
        std::mem::take(&mut self.rung.lock().expect("no panic"))
    }

    fn mapped(&self) -> usize {
        self.mapped.load(Ordering::SeqCst)
    }

    /// Waits until doorbells are forwarded, and takes them.
    fn wait_for_rung(&self) -> Vec<(usize, u32)> {
        let until = Instant::now() + PATIENCE;
        while Instant::now() < until {
            let rung = self.rung();
            if !rung.is_empty() {
                return rung;
            }
            std::thread::yield_now();
        }
        panic!("no doorbell was forwarded");
    }
}

#[test]
fn commands_run_through_forwarded_doorbells_and_queues_wrap_around() {
    let fixture = Fixture::start(Emulation::of(Storage::memory(4 << 20)));
    let lender = &*fixture.running.lender;
    assert_eq!(lender.lend_doorbells().expect("doorbells").kind(), DoorbellKind::Relayed);
    let (own, descriptor) = MappedRegion::allocate(2 * BLOCK as u64).expect("memory");
    let theirs = MappedRegion::map_sealed(descriptor, own.bytes()).expect("sealed");
    let mapping = lender.map_lent(&theirs.span(0, theirs.bytes()).expect("all")).expect("mapped");
    let mut driven = Driven::of(lender, 8);
    assert_eq!(driven.doorbells.len(), 4096, "a page, and none of the registers");
    for lba in 0..40_u64 {
        let content: Vec<u8> = (0..BLOCK as u64).map(|at| (at ^ lba) as u8).collect();
        own.span(0, BLOCK as u64).expect("inside").copy_in(&content).expect("writable");
        assert!(driven.run(WRITE, 8 * lba, mapping.address()).is_success());
        assert!(driven.run(READ, 8 * lba, mapping.address() + BLOCK as u64).is_success());
        let mut read = vec![0; BLOCK];
        own.span(BLOCK as u64, BLOCK as u64).expect("inside").copy_out(&mut read);
        assert_eq!(read, content);
    }
    lender.delete(driven.queue.id).expect("deleted");
}

#[test]
fn value_outside_of_the_queue_is_not_forwarded() {
    let fixture = Fixture::start(Emulation::of(Storage::memory(1 << 20)));
    let mut driven = Driven::of(&*fixture.running.lender, 8);
    let [tail, head] = [driven.queue.submission_doorbell, driven.queue.completion_doorbell];
    for value in [8, 1000, u32::MAX] {
        driven.doorbells.atomic_u32(tail as usize).store(value, Ordering::SeqCst);
        driven.doorbells.atomic_u32(head as usize).store(value, Ordering::SeqCst);
        std::thread::sleep(QUIET / 5);
    }
    // The words around belong to no queue pair.
    for at in (8..4096).step_by(4) {
        driven.doorbells.atomic_u32(at).store(1, Ordering::SeqCst);
    }
    std::thread::sleep(QUIET);
    assert_eq!(fixture.rung(), []);
    driven.submit(&Command::flush(1), 3);
    assert_eq!(driven.complete(PATIENCE).expect("it ends").id, 3, "later values are forwarded");
}

#[test]
fn queue_pairs_of_one_grant_have_a_line_each_up_to_a_page() {
    let fixture = Fixture::start(Emulation { queue_pairs: 66, ..Emulation::of(Storage::memory(1 << 20)) });
    let lender = &*fixture.running.lender;
    let mut doorbells = lender.lend_doorbells().expect("doorbells");
    let lent: Vec<_> = (0..63).map(|_| lender.lend(2, &mut doorbells).expect("a queue pair")).collect();
    for (index, queue) in (0..).zip(&lent) {
        assert_eq!((queue.submission_doorbell, queue.completion_doorbell), (64 * index, 64 * index + 4));
    }
    let page = MappedRegion::map(doorbells.into_file(), 4096, Access::ReadWrite).expect("mapped");
    let words = page.span(0, 4096).expect("all");
    for queue in &lent {
        words.atomic_u32(queue.submission_doorbell as usize).store(1, Ordering::SeqCst);
        let register = offset::sq_tail(queue.id, 4);
        assert_eq!(fixture.wait_for_rung(), [(register, 1)], "exactly the doorbell of queue {}", queue.id);
    }
}

#[test]
fn deleted_queue_pair_forwards_nothing_when_its_number_serves_another_process() {
    let fixture = Fixture::start(Emulation::of(Storage::memory(1 << 20)));
    let lender = &*fixture.running.lender;
    let driven = Driven::of(lender, 8);
    let id = driven.queue.id;
    // The earlier process still rings its doorbell while the queue pair is deleted.
    let ending = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (words, at) = (driven.doorbells.clone(), driven.queue.submission_doorbell as usize);
        let ending = &ending;
        scope.spawn(move || {
            let mut value = 0;
            while !ending.load(Ordering::SeqCst) {
                value = (value + 1) % 8;
                words.atomic_u32(at).store(value, Ordering::SeqCst);
            }
        });
        fixture.wait_for_rung();
        lender.delete(id).expect("deleted");
        fixture.rung();
        let mut next = Driven::of(lender, 8);
        assert_eq!(next.queue.id, id, "the number is free again");
        std::thread::sleep(QUIET);
        assert_eq!(fixture.rung(), [], "doorbells of the earlier process");
        next.submit(&Command::flush(1), 9);
        assert_eq!(next.complete(PATIENCE).expect("it ends").id, 9);
        ending.store(true, Ordering::SeqCst);
    });
}

#[test]
fn memory_of_a_deletion_that_is_not_confirmed_stays_mapped_until_the_controller_is_disabled() {
    let on = Selection { queue: Some(0), opcode: Some(DELETE_SQ), ..Selection::default() };
    let faults = vec![FaultRule { on, fault: Fault::Lost }];
    let mut fixture = Fixture::start(Emulation { faults, ..Emulation::of(Storage::memory(1 << 20)) });
    let lender = Arc::clone(&fixture.running.lender);
    let driven = Driven::of(&*lender, 8);
    let Driven { queue, .. } = driven;
    assert!(matches!(lender.delete(queue.id), Err(NvmeError::Timeout { .. })), "it is not confirmed");
    lender.keep(Box::new(queue));
    assert_eq!(fixture.mapped(), 1, "the controller may still write completions");
    fixture.running.stop();
    assert_eq!(fixture.mapped(), 0, "it was disabled");
    let (_, late) = MappedRegion::allocate(4096).expect("memory");
    let late = Arc::new(late);
    lender.keep(Box::new(Arc::clone(&late)));
    assert_eq!(Arc::strong_count(&late), 1, "a disabled controller accesses nothing");
}
