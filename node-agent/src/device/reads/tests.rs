//! Reads from a device image in memory: every order of completion, every kind of damage.

use proptest::prelude::*;
use reprise_agent_core::effect::{ArenaSlot, ReadClass, RegionId};
use reprise_agent_core::pool::PageNumber;
use reprise_agent_core::pool::header::{HeaderFields, encode_header};
use reprise_buffers::{ArenaConfig, HugePolicy, crc32c};
use reprise_policy::{BlockKey, ContentId, Generation, Layout, LayoutSpec, TenantId};

use super::*;

const BLOCKS: usize = 3;

/// 8 layers of 2 × 2 KiB: two objects fill a page.
fn layout() -> Layout {
    let spec =
        LayoutSpec { layers: 8, kv_heads: 1, head_dim: 64, tokens_per_block: 16, ..LayoutSpec::LLAMA_3_8B };
    spec.validate().expect("a valid layout")
}

/// A device image with [`BLOCKS`] blocks, and an arena slot for each.
struct Fixture {
    arena: Arena,
    image: Vec<u8>,
    batch: ReadBatch,
    reads: Reads,
    index: BatchIndex,
    pages: PageBufferPool,
}

fn payload(block: usize) -> Vec<u8> {
    (0..layout().slot_bytes()).map(|at| (at as usize * 31 + block * 7) as u8).collect()
}

impl Fixture {
    /// `damage` may change the image before it is read.
    fn new(read_bytes: u64, damage: impl FnOnce(&mut [u8])) -> Fixture {
        let config = ArenaConfig { bytes: 2 << 20, region_bytes: 2 << 20, huge: HugePolicy::Never };
        let arena = Arena::new(&config).expect("2 MiB");
        let (layout, slot_bytes) = (layout(), layout().slot_bytes());
        let mut image = vec![0; BLOCKS * (PAGE_BYTES + slot_bytes) as usize];
        let mut blocks = Vec::new();
        for block in 0..BLOCKS {
            let bytes = payload(block);
            let checksums: Vec<u32> = bytes.chunks(layout.object_bytes() as usize).map(crc32c).collect();
            let start = block * (PAGE_BYTES + slot_bytes) as usize;
            let page = PageNumber(start as u64 / PAGE_BYTES);
            let (key, generation) = (BlockKey([block as u8; 16]), Generation(block as u32 + 5));
            let fields = HeaderFields {
                pool_uuid: [9; 16],
                page,
                key,
                content: ContentId::UNKNOWN,
                layout,
                generation,
                tenant: None,
                checksums: &checksums,
            };
            let (header, header_crc) = encode_header(&fields);
            image[start..start + header.len()].copy_from_slice(&header);
            image[start + header.len()..][..bytes.len()].copy_from_slice(&bytes);
            let slot =
                ArenaSlot { region: RegionId(0), offset: block as u64 * slot_bytes, bytes: slot_bytes };
            blocks.push(BlockRead { fill: FillId(block as u64), key, page, generation, header_crc, slot });
        }
        damage(&mut image);
        let batch =
            ReadBatch { tenant: TenantId::DEFAULT, class: ReadClass::Awaited, blocks, layout, read_bytes };
        let mut reads = Reads::default();
        let index = reads.add(&arena, &batch).expect("valid slots");
        Fixture { arena, image, batch, reads, index, pages: PageBufferPool::new(4) }
    }

    /// Returns all reads in the order in which they would be submitted.
    fn submit_all(&mut self) -> Vec<PieceRead> {
        std::iter::from_fn(|| self.reads.next(TenantId::DEFAULT, &self.pages)).collect()
    }

    /// Fills a read's buffers from the image and completes it.
    fn complete(&mut self, mut read: PieceRead, result: Result<(), FillError>) {
        let mut at = read.offset as usize;
        for span in &read.into {
            span.copy_in(&self.image[at..at + span.len()]).expect("writable");
            at += span.len();
        }
        drop(read.into);
        self.reads.finish(read.piece, result, read.header.as_mut());
    }

    fn updates(&mut self) -> Vec<(FillId, FillUpdate)> {
        let mut updates = Vec::new();
        self.reads.take_updates(&mut updates);
        updates
    }

    fn loaded(&self, block: usize) -> Vec<u8> {
        let slot = self.batch.blocks[block].slot;
        let mut bytes = vec![0; slot.bytes as usize];
        self.arena.span(0, slot.offset, slot.bytes).expect("in the arena").copy_out(&mut bytes);
        bytes
    }
}

fn layers_of(update: &FillUpdate) -> Result<u32, FillError> {
    match update {
        FillUpdate::Layers { layers, .. } => Ok(*layers),
        FillUpdate::Failed(error) => Err(*error),
    }
}

#[test]
fn pieces_are_read_layer_by_layer_across_the_blocks() {
    let mut fixture = Fixture::new(8 << 10, |_| {});
    let order: Vec<(usize, u32)> =
        fixture.submit_all().iter().map(|read| (read.piece.block, read.piece.piece)).collect();
    let expected: Vec<(usize, u32)> =
        (0..4).flat_map(|piece| (0..BLOCKS).map(move |block| (block, piece))).collect();
    assert_eq!(order, expected);
}

#[test]
fn index_of_a_batch_that_failed_is_not_read_in_the_turns_of_its_tenant() {
    let mut fixture = Fixture::new(8 << 10, |_| {});
    let fills: HashSet<FillId> = (0..BLOCKS as u64).map(FillId).collect();
    assert_eq!(fixture.reads.promote(&fills), BTreeSet::from([TenantId::DEFAULT]));
    // The batch ends before its turn.
    fixture.reads.fail_all(CloseOutcome::Drained);
    assert_eq!(fixture.updates().len(), BLOCKS);
    let (other, tenant) = (TenantId(7), TenantId::DEFAULT);
    let batch = ReadBatch { tenant: other, ..fixture.batch.clone() };
    assert_eq!(fixture.reads.add(&fixture.arena, &batch).expect("valid slots"), fixture.index);
    assert!(fixture.reads.next(tenant, &fixture.pages).is_none());
    assert!(fixture.reads.next_promoted(tenant, &fixture.pages).is_none());
    assert!(fixture.reads.next(other, &fixture.pages).is_some(), "the other tenant reads its batch");
}

#[test]
fn block_is_verified_and_reported_once_when_its_header_arrives_last() {
    let mut fixture = Fixture::new(8 << 10, |_| {});
    let mut reads: Vec<PieceRead> = fixture.submit_all();
    reads.retain(|read| read.piece.block == 0);
    for read in reads.into_iter().rev() {
        assert!(fixture.updates().is_empty(), "nothing is reported before the header");
        fixture.complete(read, Ok(()));
    }
    let updates = fixture.updates();
    let [(FillId(0), FillUpdate::Layers { layers: 8, checksums: Some(checksums), tier: Tier::Nvme })] =
        &updates[..]
    else {
        panic!("expected one update with all layers: {updates:?}");
    };
    assert_eq!(checksums.len(), 16);
    assert_eq!(fixture.loaded(0), payload(0));
}

#[test]
fn failed_block_is_reported_after_its_reads_have_completed() {
    let mut fixture = Fixture::new(4 << 10, |_| {});
    let mut reads = fixture.submit_all().into_iter().filter(|read| read.piece.block == 1);
    let first = reads.next().expect("pieces");
    let mut others: Vec<PieceRead> = reads.collect();
    fixture.complete(first, Err(FillError::Device));
    let last = others.pop().expect("pieces");
    for read in others {
        fixture.complete(read, Ok(()));
        assert!(fixture.updates().is_empty());
    }
    fixture.complete(last, Ok(()));
    let updates = fixture.updates();
    assert_eq!(updates.len(), 1);
    assert_eq!((updates[0].0, layers_of(&updates[0].1)), (FillId(1), Err(FillError::Device)));
}

#[test]
fn failed_block_is_not_read_further() {
    let mut fixture = Fixture::new(4 << 10, |_| {});
    let first = fixture.reads.next(TenantId::DEFAULT, &fixture.pages).expect("a read");
    assert_eq!(first.piece.block, 0);
    fixture.complete(first, Err(FillError::Device));
    assert_eq!(layers_of(&fixture.updates()[0].1), Err(FillError::Device));
    assert!(fixture.submit_all().iter().all(|read| read.piece.block != 0));
}

#[test]
fn lost_device_fails_every_block_that_is_not_done() {
    let mut fixture = Fixture::new(4 << 10, |_| {});
    for read in fixture.submit_all() {
        if read.piece.block == 2 {
            fixture.complete(read, Ok(()));
        }
    }
    assert_eq!(layers_of(&fixture.updates()[0].1), Ok(8));
    fixture.reads.fail_all(CloseOutcome::Drained);
    let failed: Vec<FillId> = fixture.updates().iter().map(|(fill, _)| *fill).collect();
    assert_eq!(failed, [FillId(0), FillId(1)]);
    assert!(!fixture.reads.is_open(fixture.index));
}

#[test]
fn stranded_slots_of_a_lost_device_are_reported_separately() {
    let mut fixture = Fixture::new(16 << 10, |_| {});
    let mut reads: Vec<PieceRead> =
        (0..5).filter_map(|_| fixture.reads.next(TenantId::DEFAULT, &fixture.pages)).collect();
    let blocks: Vec<usize> = reads.iter().map(|read| read.piece.block).collect();
    assert_eq!(blocks, [0, 1, 2, 0, 1]);
    // The third block has no reads in flight. The first has already failed, but its second read is in
    // flight.
    fixture.complete(reads.remove(2), Ok(()));
    fixture.complete(reads.remove(0), Err(FillError::Device));
    fixture.reads.fail_all(CloseOutcome::Leaked);
    let mut ends: Vec<_> =
        fixture.updates().iter().map(|(fill, update)| (fill.0, layers_of(update))).collect();
    ends.sort_unstable_by_key(|(fill, _)| *fill);
    let stranded = Err(FillError::Stranded);
    assert_eq!(ends, [(0, stranded), (1, stranded), (2, Err(FillError::Device))]);
}

#[test]
fn waiting_reads_are_counted_in_pieces_and_bytes() {
    let mut fixture = Fixture::new(8 << 10, |_| {});
    let block = PAGE_BYTES + layout().slot_bytes();
    assert_eq!(fixture.reads.pending(), PendingReads { pieces: 12, bytes: 3 * block });
    let first = fixture.reads.next(TenantId::DEFAULT, &fixture.pages).expect("a read");
    assert_eq!(
        fixture.reads.pending(),
        PendingReads { pieces: 11, bytes: 3 * block - PAGE_BYTES - (8 << 10) }
    );
    fixture.complete(first, Err(FillError::Device));
    fixture.reads.fail_all(CloseOutcome::Drained);
    fixture.updates();
    assert_eq!(fixture.reads.pending(), PendingReads::default());
    assert!(fixture.reads.next(TenantId::DEFAULT, &fixture.pages).is_none());
    assert_eq!(fixture.reads.pending(), PendingReads::default());
}

#[test]
fn slot_outside_the_arena_or_too_small_is_rejected() {
    let fixture = Fixture::new(4 << 10, |_| {});
    for slot in [
        ArenaSlot { region: RegionId(1), offset: 0, bytes: layout().slot_bytes() },
        ArenaSlot { region: RegionId(0), offset: 2 << 20, bytes: layout().slot_bytes() },
        ArenaSlot { region: RegionId(0), offset: 0, bytes: layout().slot_bytes() - 4096 },
    ] {
        let mut batch = fixture.batch.clone();
        batch.blocks[1].slot = slot;
        assert!(Reads::default().add(&fixture.arena, &batch).is_err());
    }
}

proptest! {
    #[test]
    fn flipped_bit_fails_only_its_block_in_any_order_of_completion(
        order in Just((0..64usize).collect::<Vec<_>>()).prop_shuffle(),
        read_bytes in prop_oneof![Just(1u64), Just(4 << 10), Just(12 << 10), Just(1 << 20)],
        flip in prop::option::of((0..BLOCKS, 0..(4096 + 32_768usize), 0..8u32)),
        polls in prop::collection::vec(any::<bool>(), 64),
    ) {
        let stride = (PAGE_BYTES + layout().slot_bytes()) as usize;
        let mut fixture = Fixture::new(read_bytes, |image| {
            if let Some((block, byte, bit)) = flip {
                image[block * stride + byte % stride] ^= 1 << bit;
            }
        });
        let mut reads: Vec<Option<PieceRead>> = fixture.submit_all().into_iter().map(Some).collect();
        let mut last = [None; BLOCKS];
        let mut check = |updates: Vec<(FillId, FillUpdate)>| {
            for (FillId(block), update) in updates {
                let last: &mut Option<Result<u32, FillError>> = &mut last[block as usize];
                assert!(!matches!(last, Some(Ok(8) | Err(_))), "an update after the last one");
                let first = last.is_none();
                if let FillUpdate::Layers { checksums, layers, .. } = &update {
                    assert_eq!(checksums.is_some(), first);
                    assert!(last.is_none_or(|last| last.is_ok_and(|last| last < *layers)));
                }
                *last = Some(layers_of(&update));
            }
        };
        for at in order {
            if let Some(read) = reads.get_mut(at).and_then(Option::take) {
                fixture.complete(read, Ok(()));
                if polls[at] {
                    check(fixture.updates());
                }
            }
        }
        check(fixture.updates());
        for (block, last) in last.into_iter().enumerate() {
            let damaged = flip.is_some_and(|(flipped, ..)| flipped == block);
            prop_assert_eq!(last, Some(if damaged { Err(FillError::Corrupt) } else { Ok(8) }));
            if !damaged {
                prop_assert_eq!(fixture.loaded(block), payload(block));
            }
        }
        prop_assert!(!fixture.reads.is_open(fixture.index));
    }
}
