//! Copies of the host build on random layouts, next to a copy that is written another way.

use proptest::prelude::*;
use reprise_cuda::copy::{CopyJob, CopyKind, CopyResult, HostCopy, KvLayout, KvShape, copy_on_host};

/// Returns the CRC32C of `bytes` by an implementation that shares nothing with the kernels.
fn reference_checksum(bytes: &[u8]) -> u32 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

/// Returns the offset of an object by layer, part and block.
type ObjectOffset = Box<dyn Fn(usize, usize, usize) -> usize>;

/// Layouts and where their objects are, computed from the shape of their tensors.
fn layouts(shape: KvShape) -> Vec<(KvLayout, ObjectOffset)> {
    let KvShape { layers, parts, blocks, object_bytes } = shape;
    let (layers, parts) = (layers as usize, parts as usize);
    let (blocks, object) = (blocks as usize, object_bytes as usize);
    let layout = |layout: Result<KvLayout, _>| layout.expect("a valid layout");
    vec![
        (
            layout(KvLayout::block_major(shape)),
            Box::new(move |block, layer, part| ((block * layers + layer) * parts + part) * object),
        ),
        (
            layout(KvLayout::layer_major(shape)),
            Box::new(move |block, layer, part| ((layer * blocks + block) * parts + part) * object),
        ),
        (
            layout(KvLayout::split(shape)),
            Box::new(move |block, layer, part| ((layer * parts + part) * blocks + block) * object),
        ),
    ]
}

fn bytes(count: usize, seed: u32) -> Vec<u8> {
    (0..count as u32)
        .map(|index| (index.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 13) as u8)
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn all_kinds_copy_the_objects_of_their_jobs_and_nothing_else(
        (layers, parts, blocks) in (1_u32..4, 1_u32..3, 1_u32..6),
        vectors in prop_oneof![1_u32..10, 120_u32..140, 250_u32..260, 1150_u32..1160],
        (which, seed) in (0_usize..3, any::<u32>()),
        (first, last) in (any::<prop::sample::Index>(), any::<prop::sample::Index>()),
        targets in Just((0_u32..7).collect::<Vec<u32>>()).prop_shuffle(),
        count in any::<prop::sample::Index>(),
    ) {
        let shape = KvShape { layers, parts, blocks, object_bytes: 16 * vectors };
        let (layout, address) = layouts(shape).swap_remove(which);
        let object = shape.object_bytes as usize;
        let jobs: Vec<CopyJob> = (0..blocks)
            .zip(&targets)
            .take(1 + count.index(blocks as usize))
            .map(|(block, &slot)| CopyJob { block, slot })
            .collect();
        let start = first.index(shape.objects() as usize) as u32;
        let end = start + 1 + last.index((shape.objects() - start) as usize) as u32;
        for kind in CopyKind::ALL {
            let mut pages = bytes(shape.bytes() as usize, seed);
            let mut slots = bytes(7 * shape.block_bytes() as usize, !seed);
            let (mut pages_expected, mut slots_expected) = (pages.clone(), slots.clone());
            let mut checksums = Vec::new();
            for job in &jobs {
                for index in start..end {
                    let (layer, part) = (index / parts, index % parts);
                    let page = address(job.block as usize, layer as usize, part as usize);
                    let slot = (job.slot * shape.objects() + index) as usize * object;
                    match kind {
                        CopyKind::Gather | CopyKind::GatherChecked => {
                            slots_expected[slot..][..object].copy_from_slice(&pages[page..][..object]);
                            checksums.push(reference_checksum(&pages[page..][..object]));
                        }
                        CopyKind::Scatter | CopyKind::ScatterChecked => {
                            pages_expected[page..][..object].copy_from_slice(&slots[slot..][..object]);
                            checksums.push(reference_checksum(&slots[slot..][..object]));
                        }
                        CopyKind::Checksum => checksums.push(reference_checksum(&slots[slot..][..object])),
                    }
                }
            }
            let memory = HostCopy { pages: &mut pages, slots: &mut slots, expected: &[] };
            let result = copy_on_host(kind, &layout, memory, &jobs, start..end).expect("a valid copy");
            prop_assert!(pages == pages_expected, "pages differ: {:?}", kind);
            prop_assert!(slots == slots_expected, "slots differ: {:?}", kind);
            if kind.has_checksums() {
                prop_assert_eq!(result.checksums, checksums);
                prop_assert_eq!(result.mismatches, vec![0; jobs.len()]);
            } else {
                prop_assert_eq!(result, CopyResult::default());
            }
        }
    }
}

fn shape() -> KvShape {
    KvShape { layers: 2, parts: 2, blocks: 3, object_bytes: 1024 }
}

#[test]
fn a_changed_byte_is_a_mismatch_of_its_block_only() {
    let layout = KvLayout::split(shape()).expect("a layout");
    let mut pages = bytes(shape().bytes() as usize, 1);
    let mut slots = vec![0; shape().bytes() as usize];
    let jobs: Vec<CopyJob> = (0..3).map(|block| CopyJob { block, slot: 2 - block }).collect();
    let memory = HostCopy { pages: &mut pages, slots: &mut slots, expected: &[] };
    let saved = copy_on_host(CopyKind::GatherChecked, &layout, memory, &jobs, 0..4).expect("a copy");
    // One bit of the last object of block 1, and one of each of two objects of block 2.
    let block_bytes = shape().block_bytes() as usize;
    slots[block_bytes + 3 * 1024 + 1023] ^= 0x80;
    slots[0] ^= 1;
    slots[1024] ^= 1;
    let memory = HostCopy { pages: &mut pages, slots: &mut slots, expected: &saved.checksums };
    let loaded = copy_on_host(CopyKind::ScatterChecked, &layout, memory, &jobs, 0..4).expect("a copy");
    assert_eq!(loaded.mismatches, [0, 1, 2]);
}

#[test]
fn invalid_copies_are_rejected_before_memory_is_accessed() {
    let layout = KvLayout::split(shape()).expect("a layout");
    let attempt = |job: CopyJob, objects, pages: usize, expected: &[u32]| {
        let (mut pages, mut slots) = (vec![0; pages], vec![0; 2 * shape().block_bytes() as usize]);
        let memory = HostCopy { pages: &mut pages, slots: &mut slots, expected };
        copy_on_host(CopyKind::Scatter, &layout, memory, &[job], objects).map_err(|error| error.to_string())
    };
    let job = |block, slot| CopyJob { block, slot };
    let whole = shape().bytes() as usize;
    attempt(job(2, 1), 0..4, whole, &[]).expect("a valid copy");
    for (result, part) in [
        (attempt(job(3, 0), 0..4, whole, &[]), "there are 3 blocks and 2 slots"),
        (attempt(job(0, 2), 0..4, whole, &[]), "there are 3 blocks and 2 slots"),
        (attempt(job(0, 0), 0..5, whole, &[]), "a block has 4"),
        (attempt(job(0, 0), 2..2, whole, &[]), "a block has 4"),
        (attempt(job(0, 0), 0..4, whole - 1, &[]), "but their layout has"),
        (attempt(job(0, 0), 0..4, whole, &[1]), "1 expected checksums for 4 objects"),
    ] {
        let error = result.expect_err(part);
        assert!(error.contains(part), "{error}");
    }
    for (offsets, stride, object) in
        [(vec![8], 64, 64), (vec![0], 72, 64), (vec![0], 48, 64), (vec![0], 64, 8)]
    {
        assert!(KvLayout::new(offsets.clone(), stride, 4, object).is_err(), "{offsets:?} {stride} {object}");
    }
    assert!(KvLayout::new(Vec::new(), 64, 4, 64).is_err());
    assert!(KvLayout::new(vec![0], 64, 0, 64).is_err());
}

#[test]
fn layouts_that_kernels_cannot_count_are_rejected() {
    let error = |layout: Result<KvLayout, reprise_cuda::gpu::GpuError>, part: &str| {
        let error = layout.expect_err(part).to_string();
        assert!(error.contains(part), "{error}");
    };
    // The end of each of these is a small number when it wraps.
    error(KvLayout::new(vec![u64::MAX - 15], 64, 1, 64), "beyond 64 bits");
    error(KvLayout::new(vec![0], 1 << 60, 17, 64), "beyond 64 bits");
    error(KvLayout::new(vec![u64::MAX - 127], 64, 3, 64), "beyond 64 bits");
    KvLayout::new(vec![u64::MAX - 127], 64, 1, 64).expect("it ends before");
    // Sizes of which the number of chunks wraps to 0.
    error(KvLayout::new(vec![0], 1 << 32, 1, u32::MAX - 15), "at most 1048576 of at most 1073741824");
    KvLayout::new(vec![0], 1 << 30, 1, 1 << 30).expect("the largest object");
    let shape = KvShape { layers: 1 << 16, parts: 1 << 16, blocks: 1, object_bytes: 16 };
    let large = KvShape { layers: 1 << 19, parts: 2, blocks: u32::MAX, object_bytes: 1 << 30 };
    for layout in [KvLayout::split, KvLayout::block_major, KvLayout::layer_major] {
        error(layout(shape), "expected at most 1048576");
        error(layout(large), "more than 2^63 bytes");
    }
    assert_eq!((shape.objects(), large.bytes()), (u32::MAX, u64::MAX));
}
