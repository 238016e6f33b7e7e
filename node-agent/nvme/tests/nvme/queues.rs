//! Queue pairs: depths, wrap-around, full queues, many queues, random work against a model.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::Instant;

use proptest::prelude::*;
use reprise_nvme::emulated::{Emulation, Fault, FaultRule, Selection, Storage};
use reprise_nvme::spec::{Command, READ, WRITE};
use reprise_nvme::{Backing, DmaMemory, NvmeError, Piece, QueueMemory, QueueSizes};

use crate::bench_rig::{ARENA_BYTES, LONG, Rig, emulation, pattern, run, wait};

const PAGE: u64 = 4096;
const BLOCKS: u64 = 8;

#[test]
fn every_command_ends_once_at_every_depth_over_many_wrap_arounds() {
    for entries in [2, 3, 64, 4096] {
        let mut rig = Rig::new(emulation());
        let mut queue = rig.controller.create_queue_pair(entries).expect("granted");
        let total = u64::from(entries) * 5 + 7;
        let (mut submitted, mut ended) = (0_u64, BTreeMap::<u64, u32>::new());
        while (ended.len() as u64) < total {
            while submitted < total && queue.free() > 0 {
                queue.submit(&Command::flush(1), submitted, Instant::now() + LONG).expect("room");
                submitted += 1;
            }
            queue.ring();
            for one in wait(&mut queue, 1) {
                assert!(one.status.is_success());
                *ended.entry(one.token).or_default() += 1;
            }
        }
        assert!(ended.values().all(|count| *count == 1), "each command ends once");
        assert_eq!((queue.in_flight(), queue.free()), (0, entries as usize - 1));
    }
}

#[test]
fn a_full_queue_accepts_no_command_and_loses_none() {
    let on = Selection { queue: Some(1), ..Selection::default() };
    let fault = Fault::Late(std::time::Duration::from_millis(5));
    let faults = vec![FaultRule { on, fault }];
    let mut rig = Rig::new(Emulation { faults, ..emulation() });
    let mut queue = rig.controller.create_queue_pair(4).expect("granted");
    let deadline = Instant::now() + LONG;
    for token in 0..3 {
        queue.submit(&Command::flush(1), token, deadline).expect("three fit");
    }
    assert!(queue.next_list().is_none());
    assert!(matches!(queue.submit(&Command::flush(1), 3, deadline), Err(NvmeError::Invalid(_))));
    queue.ring();
    let mut tokens: Vec<_> = wait(&mut queue, 3).into_iter().map(|one| one.token).collect();
    tokens.sort_unstable();
    assert_eq!(tokens, [0, 1, 2]);
}

#[test]
fn a_queue_pair_works_in_memory_of_the_caller_that_holds_old_completions() {
    const ENTRIES: u32 = 16;
    let mut rig = Rig::new(emulation());
    let sizes = QueueSizes::of(ENTRIES);
    assert_eq!((sizes.submissions, sizes.completions, sizes.lists), (4096, 4096, 15 * 4096));
    let window = rig.controller.backing().allocate(2 * sizes.total()).expect("memory");
    for at in (0..window.bytes()).step_by(8) {
        window.word(at).store(u64::MAX, Ordering::Relaxed);
    }
    let memory = QueueMemory::within(&window, sizes.total(), ENTRIES).expect("it fits");
    let entries = memory.submissions.address()..memory.submissions.address() + sizes.submissions as u64;
    assert_eq!(entries.start, window.address() + sizes.total() as u64);
    let mut queue = rig.controller.create_queue_pair_in(ENTRIES, memory).expect("granted");
    rig.fill(0, PAGE, 1);
    for lba in 0..5 * u64::from(ENTRIES) {
        assert!(rig.write(&mut queue, lba * 8, 0, PAGE).is_success());
        assert!(rig.read(&mut queue, lba * 8, PAGE, PAGE).is_success());
    }
    assert!(rig.contents(PAGE, PAGE) == pattern(PAGE as usize, 1));
    assert_eq!(window.word(0).load(Ordering::Relaxed), u64::MAX, "memory before the queue pair is not used");
    rig.controller.delete_queue_pair(queue).expect("deleted");
}

#[test]
fn memory_that_is_too_small_for_a_queue_pair_is_refused_with_the_sizes() {
    let mut rig = Rig::new(emulation());
    let total = QueueSizes::of(16).total();
    let window = rig.controller.backing().allocate(total).expect("memory");
    for (offset, entries) in [(4096, 16), (0, 17), (0, 4096), (64, 2), (usize::MAX - 4095, 2)] {
        let error = QueueMemory::within(&window, offset, entries).expect_err("too small").to_string();
        assert!(error.contains(&total.to_string()) && error.contains("use a larger BAR"), "{error}");
    }
    let memory = QueueMemory::within(&window, 0, 16).expect("it fits");
    let error = rig.controller.create_queue_pair_in(100, memory).expect_err("too small").to_string();
    assert!(error.contains("4096 bytes for a queue of 100 entries: it needs 8192"), "{error}");
    for entries in [0, 1, 4097] {
        let memory = QueueMemory::within(&window, 0, 16).expect("it fits");
        let error = rig.controller.create_queue_pair_in(entries, memory).expect_err("impossible").to_string();
        assert!(error.contains("2 to 4096"), "{error}");
    }
    // The refusals have used no queue.
    assert_eq!(rig.controller.create_queue_pair(16).expect("granted").id(), 1);
}

#[test]
fn a_controller_without_a_memory_buffer_reports_that() {
    let mut rig = Rig::new(emulation());
    let error = rig.controller.memory_buffer().expect_err("none").to_string();
    assert!(error.contains("no memory buffer"), "{error}");
}

#[test]
fn parts_keep_memory_mapped_until_the_last_of_them_is_dropped() {
    let mut rig = Rig::new(emulation());
    let window = rig.controller.backing().allocate(3 * 4096).expect("memory");
    let part = window.part(8192, 4096).expect("inside");
    drop(window);
    let mut queue = rig.controller.create_queue_pair(4).expect("granted");
    rig.fill(0, PAGE, 2);
    assert!(rig.write(&mut queue, 0, 0, PAGE).is_success());
    let to_part = |queue: &crate::bench_rig::Queue, rig: &Rig| {
        rig.transfer(queue, READ, 0, &[Piece { address: part.address(), bytes: PAGE }])
    };
    let command = to_part(&queue, &rig);
    assert!(run(&mut queue, &command).is_success());
    assert_eq!(part.word(0).load(Ordering::Relaxed).to_le_bytes(), pattern(8, 2)[..]);
    let command = to_part(&queue, &rig);
    drop(part);
    assert!(!run(&mut queue, &command).is_success(), "the address is no longer mapped");
}

#[test]
fn sixty_four_queue_pairs_work_at_once_and_do_not_mix() {
    for threads in [1, 4] {
        sixty_four_queue_pairs(threads);
    }
}

fn sixty_four_queue_pairs(threads: usize) {
    let mut rig = Rig::new(Emulation { threads, ..emulation() });
    let mut queues: Vec<_> =
        (0..64).map(|_| rig.controller.create_queue_pair(16).expect("granted")).collect();
    // Each queue writes its own page, and then reads it to another place.
    for opcode in [WRITE, READ] {
        for (index, queue) in (0..).zip(&mut queues) {
            let at = if opcode == WRITE { index * PAGE } else { (2 << 20) + index * PAGE };
            if opcode == WRITE {
                rig.fill(at, PAGE, index);
            }
            let command = rig.transfer(queue, opcode, index * BLOCKS, &[rig.piece(at, PAGE)]);
            queue.submit(&command, index, Instant::now() + LONG).expect("room");
            queue.ring();
        }
        for (index, queue) in (0..).zip(&mut queues) {
            let ended = wait(queue, 1);
            assert_eq!((ended[0].token, ended[0].status.is_success()), (index, true));
        }
    }
    for index in 0..64 {
        assert!(rig.contents((2 << 20) + index * PAGE, PAGE) == pattern(PAGE as usize, index), "{index}");
    }
}

#[test]
fn a_deleted_queue_returns_the_commands_that_had_not_ended() {
    let on = Selection { queue: Some(1), ..Selection::default() };
    let faults = vec![FaultRule { on, fault: Fault::Lost }];
    let mut rig = Rig::new(Emulation { faults, ..emulation() });
    let mut queue = rig.controller.create_queue_pair(8).expect("granted");
    for token in [7, 9] {
        queue.submit(&Command::flush(1), token, Instant::now() + LONG).expect("room");
    }
    queue.ring();
    let mut tokens = rig.controller.delete_queue_pair(queue).expect("confirmed").unfinished;
    tokens.sort_unstable();
    assert_eq!(tokens, [7, 9]);
}

#[derive(Clone, Debug)]
struct Step {
    queue: usize,
    write: bool,
    page: u64,
    pages: u64,
    seed: u64,
}

fn step() -> impl Strategy<Value = Step> {
    (0..3_usize, any::<bool>(), 0..56_u64, 1..8_u64, any::<u64>())
        .prop_map(|(queue, write, page, pages, seed)| Step { queue, write, page, pages, seed })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Commands on three queues, one at a time, agree with a model of the contents.
    #[test]
    fn random_transfers_agree_with_a_model(steps in prop::collection::vec(step(), 1..60), sgl in any::<bool>()) {
        let bytes = 64 * PAGE;
        let namespaces = vec![Storage::memory(bytes as usize)];
        let mut rig = Rig::new(Emulation { sgl, namespaces, ..emulation() });
        let mut queues: Vec<_> =
            [2, 5, 32].into_iter().map(|n| rig.controller.create_queue_pair(n).expect("granted")).collect();
        let mut model = vec![0_u8; bytes as usize];
        for one in steps {
            let (from, length) = ((one.page * PAGE) as usize, one.pages * PAGE);
            let range = from..from + length as usize;
            let queue = &mut queues[one.queue];
            if one.write {
                rig.fill(0, length, one.seed);
                prop_assert!(rig.write(queue, one.page * BLOCKS, 0, length).is_success());
                model[range].copy_from_slice(&rig.contents(0, length));
            } else {
                let into = ARENA_BYTES / 2;
                prop_assert!(rig.read(queue, one.page * BLOCKS, into, length).is_success());
                prop_assert!(rig.contents(into, length) == model[range]);
            }
        }
        prop_assert!(run(&mut queues[0], &Command::flush(1)).is_success());
    }
}
