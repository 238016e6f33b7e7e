//! Queue pairs in memory of the caller: the driver creates and deletes them, the test drives them.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use reprise_buffers::{Access, Arena, ArenaConfig, HugePolicy, MappedRegion, Region, Span};
use reprise_nvme::spec::{CQE_BYTES, Command, Completion, SQE_BYTES};
use reprise_nvme::{Backing, DmaMapping, NvmeError, QueueAddresses, RawQueuePair};

use crate::bench_rig::{LONG, Rig, emulation};

const PAGE: u64 = 4096;
const ENTRIES: u32 = 8;

/// Memory of one queue pair: a page for each queue.
struct QueueMemory {
    region: Arc<Region>,
    span: Span,
    mapping: DmaMapping,
}

impl QueueMemory {
    fn new(rig: &Rig) -> QueueMemory {
        let bytes = 2 * PAGE;
        let config = ArenaConfig { bytes, region_bytes: bytes, huge: HugePolicy::Never };
        let region = Arc::clone(&Arena::new(&config).expect("two pages").regions()[0]);
        let span = region.span(0, bytes).expect("all of it");
        let mapping = rig.controller.backing().map(&span).expect("whole pages");
        QueueMemory { region, span, mapping }
    }

    fn addresses(&self) -> QueueAddresses {
        let submissions = self.mapping.address();
        QueueAddresses { submissions, completions: submissions + PAGE }
    }

    fn write_entry(&self, index: u32, command: &Command, id: u16) {
        for (word, value) in command.encode(id).into_iter().enumerate() {
            let at = index as usize * SQE_BYTES + 8 * word;
            self.span.atomic_u64(at).store(value.to_le(), Ordering::Relaxed);
        }
    }

    /// Waits until an entry has the phase bit of the first pass.
    fn await_entry(&self, index: u32) -> Completion {
        let at = PAGE as usize + index as usize * CQE_BYTES;
        let start = Instant::now();
        loop {
            let load = |dword: usize| self.span.atomic_u32(at + 4 * dword).load(Ordering::Acquire);
            let last = load(3);
            let entry = Completion::decode([load(0), load(1), load(2), last]);
            if entry.phase {
                return entry;
            }
            assert!(start.elapsed() < LONG, "the command ends");
            std::thread::yield_now();
        }
    }
}

fn create(rig: &mut Rig, memory: &QueueMemory) -> RawQueuePair {
    rig.controller.create_raw_queue_pair(ENTRIES, memory.addresses()).expect("granted")
}

#[test]
fn a_queue_pair_in_mapped_memory_runs_commands_until_it_is_deleted() {
    let mut rig = Rig::new(emulation());
    let memory = QueueMemory::new(&rig);
    let free = rig.controller.free_queue_pairs();
    let queue = create(&mut rig, &memory);
    assert_eq!(rig.controller.free_queue_pairs(), free - 1);
    for index in 0..3 {
        memory.write_entry(index, &Command::flush(1), 7 + index as u16);
    }
    rig.controller.backing().write(queue.submission_doorbell(), 3);
    for index in 0..3 {
        let entry = memory.await_entry(index);
        assert_eq!((u32::from(entry.id), entry.sq_id), (7 + index, queue.id()));
        assert!(entry.status.is_success());
    }
    let doorbell = queue.submission_doorbell();
    rig.controller.delete_raw_queue_pair(queue).expect("confirmed");
    assert_eq!(rig.controller.free_queue_pairs(), free);
    // The deleted queue takes no commands.
    memory.write_entry(3, &Command::flush(1), 99);
    rig.controller.backing().write(doorbell, 4);
    rig.controller.health().expect("the controller works");
    let at = PAGE as usize + 3 * CQE_BYTES + 12;
    assert_eq!(memory.span.atomic_u32(at).load(Ordering::Acquire), 0);
}

#[test]
fn another_mapping_of_the_registers_rings_doorbells() {
    let mut rig = Rig::new(emulation());
    let memory = QueueMemory::new(&rig);
    let queue = create(&mut rig, &memory);
    memory.write_entry(0, &Command::flush(1), 5);
    let backing = rig.controller.backing();
    let file = backing.register_file().expect("registers are a file");
    let fd = file.file.try_clone_to_owned().expect("a descriptor");
    let other = MappedRegion::map(fd, file.bytes as u64, Access::ReadWrite).expect("mapped");
    let registers = other.span(file.offset, file.bytes as u64).expect("all of them");
    registers.atomic_u32(queue.submission_doorbell()).store(1, Ordering::SeqCst);
    assert_eq!(memory.await_entry(0).id, 5);
    assert!(backing.register_address(queue.completion_doorbell()).is_some());
    rig.controller.delete_raw_queue_pair(queue).expect("confirmed");
}

#[test]
fn memory_that_is_no_longer_mapped_is_not_accessed() {
    let mut rig = Rig::new(emulation());
    let memory = QueueMemory::new(&rig);
    let queue = create(&mut rig, &memory);
    memory.write_entry(0, &Command::flush(1), 5);
    let QueueMemory { region, span, mapping } = memory;
    drop(mapping);
    rig.controller.backing().write(queue.submission_doorbell(), 1);
    let start = Instant::now();
    // A controller that cannot read its queue fails.
    while rig.controller.check_alive().is_ok() {
        assert!(start.elapsed() < LONG);
        std::thread::yield_now();
    }
    assert!(span.atomic_u32(PAGE as usize + 12).load(Ordering::Acquire) == 0 && region.bytes() == 2 * PAGE);
    drop(rig.controller.delete_raw_queue_pair(queue).expect_err("it has failed"));
}

#[test]
fn invalid_places_and_sizes_are_refused() {
    let mut rig = Rig::new(emulation());
    let memory = QueueMemory::new(&rig);
    let good = memory.addresses();
    let odd = QueueAddresses { completions: good.completions + 64, ..good };
    for (entries, addresses) in [(1, good), (4097, good), (ENTRIES, odd)] {
        let refused = rig.controller.create_raw_queue_pair(entries, addresses);
        assert!(matches!(refused, Err(NvmeError::Invalid(_))), "{refused:?}");
    }
    let free = rig.controller.free_queue_pairs();
    let unmapped = QueueAddresses { submissions: 0x1000, completions: 0x2000 };
    let refused = rig.controller.create_raw_queue_pair(ENTRIES, unmapped);
    assert!(matches!(refused, Err(NvmeError::Refused { .. })), "{refused:?}");
    assert_eq!(rig.controller.free_queue_pairs(), free, "the number is free again");
    let part = memory.span.slice(64, 128).expect("inside");
    assert!(matches!(rig.controller.backing().map(&part), Err(NvmeError::Invalid(_))));
}
