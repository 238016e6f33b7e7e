//! Data: every byte, in every size and description; depths, wrap-arounds, many queues.

use std::collections::BTreeMap;

use proptest::prelude::*;
use reprise_cuda::ring::{CONTEXTS_MAX, ContextStatus, Transfer};
use reprise_nvme::emulated::Emulation;

use super::rig::{BLOCK, BYTES, Rig, emulation, pattern, reads, writes};

#[test]
fn written_bytes_are_read_back_in_every_size_and_description() {
    for sgl in [true, false] {
        let transfer_max = Some(64 << 10);
        let mut rig = Rig::new(Emulation { sgl, transfer_max, ..emulation() }, 1, 32);
        // Sizes below, at and above a page, a list of pages, and the limit of a command; some at odd addresses.
        let sizes = [512, 1024, 4096, 4608, 8192, 12_800, 65_536, 66_048, 262_144, 1 << 20];
        for (seed, (size, odd)) in sizes.into_iter().flat_map(|size| [(size, 0), (size, 1540)]).enumerate() {
            let expected = rig.fill(odd, size, seed as u64);
            rig.succeed(&writes(), &[rig.transfer(odd as u64, 1 << 20, size as u64)]);
            let into = (2 << 20) + odd as u64;
            rig.succeed(&reads(), &[rig.transfer(into, 1 << 20, size as u64)]);
            assert!(rig.contents(into as usize, size) == expected, "SGL {sgl}: {size} bytes at {odd}");
        }
        let (counters, _) = rig.stop();
        assert_eq!(counters.bad_addresses, 0);
    }
}

#[test]
fn every_context_ends_once_at_every_depth_over_many_wrap_arounds() {
    for entries in [2, 3, 31, 33, 64, 1000, 4096] {
        let mut rig = Rig::new(emulation(), 1, entries);
        let total = (entries as usize * 5 + 7).max(600);
        // Place i holds the block with the pattern of i.
        let places = BYTES as u64 / BLOCK / 2;
        rig.fill(0, BYTES / 2, 1);
        let whole: Vec<_> = (0..8).map(|part| rig.transfer(part << 18, part << 18, 1 << 18)).collect();
        rig.succeed(&writes(), &whole);
        let (mut next, mut ended) = (0, BTreeMap::<u64, usize>::new());
        while ended.values().sum::<usize>() < total {
            while next < total && rig.ring.free_iocbs() > 0 {
                let count = (total - next).min(1 + next * 7 % 300);
                let all: Vec<Transfer> = (next..next + count)
                    .map(|index| {
                        let place = index as u64 % places;
                        let into = BYTES as u64 / 2 + place * BLOCK;
                        rig.transfer(into, place * BLOCK, BLOCK)
                    })
                    .collect();
                let token = next as u64;
                rig.issue(0, &reprise_cuda::ring::BatchSettings { token, ..reads() }, &all);
                next += count;
            }
            let cqe = rig.wait();
            assert_eq!(cqe.failed, 0);
            assert!(rig.ring.statuses(cqe.ticket).all(|one| one == ContextStatus::Done));
            assert_eq!(ended.insert(cqe.token, cqe.contexts), None, "a batch ends once");
        }
        assert_eq!(ended.values().sum::<usize>(), total);
        assert_eq!(rig.ring.poll_cqe(), None, "nothing ends twice");
        let read = (total as u64).min(places) as usize * BLOCK as usize;
        assert!(rig.contents(BYTES / 2, read) == rig.contents(0, read), "{entries} entries");
        let (counters, _) = rig.stop();
        assert_eq!(counters.commands as usize, total + whole.len(), "{entries} entries: no command is lost");
    }
}

#[test]
fn sixty_four_queue_pairs_work_at_once_and_do_not_mix() {
    for sgl in [true, false] {
        let mut rig = Rig::new(Emulation { sgl, threads: 2, ..emulation() }, 64, 16);
        let part = BYTES / 128;
        rig.fill(0, BYTES / 2, 9);
        for settings in [writes(), reads()] {
            let (mut issued, mut ended) = (0_u64, 0);
            while ended < 64 {
                while issued < 64 && rig.ring.free_iocbs() > 0 {
                    let place = issued * part as u64;
                    let offset = if settings == reads() { BYTES as u64 / 2 } else { 0 };
                    // A queue has fewer entries than this batch has contexts.
                    let size = 1024;
                    let all: Vec<_> = (0..part as u64 / size)
                        .map(|index| rig.transfer(offset + place + index * size, place + index * size, size))
                        .collect();
                    rig.issue(issued as usize, &settings, &all);
                    issued += 1;
                }
                assert_eq!(rig.wait().failed, 0);
                ended += 1;
            }
        }
        assert!(rig.contents(BYTES / 2, BYTES / 2) == pattern(BYTES / 2, 9));
        for queue in 0..64 {
            assert!(rig.ring.counters(queue).commands > 0, "queue {queue} has worked");
        }
        rig.stop();
    }
}

#[test]
fn a_batch_has_one_doorbell_if_it_fits_the_queue() {
    let mut rig = Rig::new(emulation(), 1, 4096);
    let all: Vec<_> =
        (0..CONTEXTS_MAX as u64).map(|index| rig.transfer(index * 512, index * 512, 512)).collect();
    for round in 1..=3 {
        rig.succeed(&reads(), &all);
        rig.ring.park(0).expect("it stops");
        let counters = rig.ring.counters(0);
        assert_eq!((counters.doorbells, counters.commands), (round, round * CONTEXTS_MAX as u64));
        rig.recreate(0);
    }
}

#[test]
fn a_batch_is_full_at_its_limit_and_free_again_if_it_is_dropped() {
    let mut rig = Rig::new(emulation(), 1, 16);
    let one = rig.transfer(0, 0, 512);
    let free = rig.ring.free_iocbs();
    let mut iocb = rig.ring.get_iocb(&reads()).expect("free");
    for _ in 0..CONTEXTS_MAX {
        assert!(iocb.push(&one));
    }
    assert!(!iocb.push(&one) && iocb.len() == CONTEXTS_MAX);
    drop(iocb);
    assert_eq!(rig.ring.free_iocbs(), free);
    let empty = rig.ring.get_iocb(&reads()).expect("free");
    assert!(empty.is_empty() && empty.issue_io(0).is_err());
    assert!(rig.ring.get_iocb(&reads()).expect("free").issue_io(7).is_err());
    assert_eq!(rig.ring.free_iocbs(), free);
    rig.stop();
}

#[test]
fn invalid_contexts_fail_alone() {
    let mut rig = Rig::new(emulation(), 1, 16);
    let good = rig.transfer(0, 0, 512);
    let beyond = Transfer { block: u64::MAX - 7, ..good };
    let all = [
        good,
        Transfer { bytes: 0, ..good },
        Transfer { bytes: 100, ..good },
        Transfer { address: good.address + 2, ..good },
        Transfer { address: 0x10, ..good },
        beyond,
        good,
    ];
    let statuses = rig.run(&reads(), &all);
    use ContextStatus::{Done, Failed, Invalid};
    let out_of_range = Failed(reprise_nvme::spec::Status::OUT_OF_RANGE);
    let unmapped = Failed(reprise_nvme::spec::Status::DATA_TRANSFER);
    assert_eq!(statuses, [Done, Invalid, Invalid, Invalid, unmapped, out_of_range, Done]);
    rig.stop();
}

#[derive(Clone, Debug)]
struct Step {
    write: bool,
    queue: usize,
    /// Place and number of blocks of each context.
    parts: Vec<(u64, u64)>,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let part = (0_u64..2000, 1_u64..200);
    let step = (any::<bool>(), 0_usize..3, prop::collection::vec(part, 1..40));
    prop::collection::vec(step.prop_map(|(write, queue, parts)| Step { write, queue, parts }), 1..12)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn random_batches_agree_with_a_model(steps in steps(), sgl in any::<bool>(), entries in 2_u32..80) {
        let transfer_max = Some(16 << 10);
        let mut rig = Rig::new(Emulation { sgl, transfer_max, ..emulation() }, 3, entries);
        let mut model = vec![0_u8; BYTES];
        for (seed, step) in steps.iter().enumerate() {
            // Contexts of a batch may run in any order: those that overlap are left out.
            let (mut memory, mut used, mut all) = (0_u64, Vec::<(u64, u64)>::new(), Vec::new());
            for &(place, count) in &step.parts {
                let overlaps = used.iter().any(|(from, length)| place < from + length && *from < place + count);
                if overlaps || memory + count > 4000 {
                    continue;
                }
                used.push((place, count));
                all.push(rig.transfer(memory * BLOCK, place * BLOCK, count * BLOCK));
                memory += count;
            }
            let expected = rig.fill(0, (memory * BLOCK) as usize, seed as u64 + 1);
            let settings = if step.write { writes() } else { reads() };
            rig.issue(step.queue, &settings, &all);
            prop_assert_eq!(rig.wait().failed, 0);
            let data = rig.contents(0, (memory * BLOCK) as usize);
            let mut at = 0;
            for (place, count) in used {
                let (length, place) = ((count * BLOCK) as usize, (place * BLOCK) as usize);
                if step.write {
                    model[place..place + length].copy_from_slice(&expected[at..at + length]);
                } else {
                    prop_assert!(data[at..at + length] == model[place..place + length]);
                }
                at += length;
            }
        }
        prop_assert!(rig.stop().1 == model);
    }
}
