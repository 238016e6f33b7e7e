//! Damage on the device: each kind has a defined outcome, no block is lost without a report, and no wrong
//! block is recovered.

use std::collections::BTreeMap;

use crate::pool_harness::disk::Disk;
use crate::pool_harness::model::check_block_on_disk;
use crate::pool_harness::offsets::{BANK_BYTES, DATA, DEVICE_BYTES, bank_headers, checkpoint_page, log_page};
use crate::pool_harness::random::{Random, SeedGuard};
use crate::pool_harness::{Harness, PAGE, formatted, layout, params, recover};
use crate::rng::seeds;
use proptest::prelude::*;
use reprise_agent_core::pool::{
    DevicePool, FORMAT_VERSION, PoolError, PoolParams, Recovery, RecoveryReport, SUPERBLOCK_OFFSETS,
    StoredBlock,
};
use reprise_policy::BlockKey;

pub(crate) fn seal(page: &mut [u8]) {
    let crc = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, &page[..4092]) as u32;
    page[4092..].copy_from_slice(&crc.to_le_bytes());
}

/// A disk with a history: several bank switches, then a log with blocks stored and freed. All operations
/// of the returned harness are complete.
pub(crate) fn harness_with_history(seed: u64, switches: u64) -> Harness {
    let mut harness = Harness::new(&params(DEVICE_BYTES), seed);
    let sizes = [layout(3), layout(15)];
    harness.start_batch(60, &sizes);
    harness.run_to_completion();
    harness.start_batch(60, &sizes);
    harness.run_to_completion();
    while harness.pool.usage().checkpoints < switches || harness.pool.usage().journal_bytes_used < 12 * PAGE {
        harness.start_batch(3, &sizes);
        (0..3).for_each(|_| harness.free_one());
        // Without this a full device never starts a batch again: the frees that would make room are
        // journaled with a batch.
        harness.flush();
        harness.run_to_completion();
    }
    harness.flush();
    harness.run_to_completion();
    harness
}

/// The bank that is active after this number of bank switches.
fn active_bank(switches: u64) -> usize {
    usize::from(switches % 2 == 1)
}

fn recovered(disk: &Disk) -> (BTreeMap<BlockKey, StoredBlock>, RecoveryReport) {
    let (pool, stored, report) = recover(disk).expect("opens");
    pool.audit().expect("consistent");
    (stored.into_iter().map(|block| (block.key, block)).collect(), report)
}

/// What the pool itself recovers from a disk, after it has repaired that disk.
fn repaired(disk: &Disk) -> (BTreeMap<BlockKey, StoredBlock>, RecoveryReport) {
    let (mut pool, _, _) = recover(disk).expect("opens");
    let mut disk = disk.clone();
    let mut ops = pool.flush_frees();
    while let Some(op) = ops.pop() {
        if let reprise_agent_core::pool::DeviceOpKind::WritePages { offset, bytes } = &op.kind {
            disk.write_durably(*offset, bytes);
        }
        ops.extend(pool.done(op.token, Ok(())).0);
    }
    recovered(&disk)
}

fn keys(blocks: &BTreeMap<BlockKey, StoredBlock>) -> Vec<BlockKey> {
    blocks.keys().copied().collect()
}

fn recovery_error(disk: &Disk) -> PoolError {
    recover(disk).map(|(_, _, report)| report).expect_err("refused")
}

#[test]
fn offsets_match_a_real_device() {
    let harness = harness_with_history(1, 2);
    let written = harness.disk.written_before(DATA);
    for bank in 0..2 {
        for offset in bank_headers(bank).into_iter().chain([checkpoint_page(bank, 0), log_page(bank, 0)]) {
            assert!(written.contains(&offset), "{bank} {offset}");
        }
    }
    let begins =
        |offset, magic: &[u8]| harness.disk.read(offset, 4096).is_some_and(|page| page.starts_with(magic));
    assert!(begins(log_page(0, 0), b"RPLG") && begins(checkpoint_page(0, 0), b"RPCP"));
    assert!(begins(bank_headers(1)[1], b"RPRBANK\0"));
}

#[test]
fn either_copy_of_the_superblock_suffices_and_the_bad_one_is_rewritten() {
    let harness = harness_with_history(2, 1);
    for offset in SUPERBLOCK_OFFSETS {
        for place in [0, 5, 8, 20, 33, 90, 4095] {
            let mut disk = harness.disk.clone();
            disk.flip_bit(offset + place, 3);
            let (blocks, report) = recovered(&disk);
            assert_eq!((report.superblock_copies_bad, report.repair_due), (1, true), "{report:?}");
            assert_eq!(blocks.len() as u64, harness.pool.usage().blocks_stored);
            let (again, report) = repaired(&disk);
            assert!(report.is_clean(), "{report:?}");
            assert_eq!(keys(&again), keys(&blocks));
        }
    }
}

#[test]
fn a_pool_without_a_superblock_is_refused_as_corrupt() {
    let mut disk = harness_with_history(3, 0).disk;
    SUPERBLOCK_OFFSETS.into_iter().for_each(|offset| disk.flip_bit(offset + 100, 0));
    let error = recovery_error(&disk);
    assert!(
        matches!(error, PoolError::Corrupt { .. }) && error.to_string().contains("superblock"),
        "{error}"
    );
}

#[test]
fn copies_that_name_different_pools_are_refused() {
    let mut disk = formatted(&params(DEVICE_BYTES));
    let other = PoolParams { pool_uuid: [5; 16], ..params(DEVICE_BYTES) };
    let (offset, bytes) = DevicePool::format(&other).expect("formats").pop().expect("superblock last");
    disk.write_durably(offset, &bytes);
    assert!(matches!(recovery_error(&disk), PoolError::Corrupt { .. }));
}

#[test]
fn a_blank_tiny_or_empty_device_is_reported_as_not_formatted() {
    for bytes in [0, 512, 4096, 1 << 20, (1 << 20) + 4096, DEVICE_BYTES] {
        assert_eq!(recovery_error(&Disk::new(bytes)), PoolError::NotFormatted, "{bytes} bytes");
    }
}

#[test]
fn an_interrupted_format_leaves_an_unformatted_device_or_an_empty_pool() {
    let writes = DevicePool::format(&params(DEVICE_BYTES)).expect("formats");
    for survivors in 0..1u32 << writes.len() {
        let mut disk = Disk::new(DEVICE_BYTES);
        for (number, (offset, bytes)) in writes.iter().enumerate() {
            if survivors >> number & 1 == 1 {
                disk.write_durably(*offset, bytes);
            }
        }
        match recover(&disk) {
            Ok((_, stored, _)) => assert!(stored.is_empty()),
            Err(error) => assert_eq!(error, PoolError::NotFormatted, "{survivors:b}"),
        }
    }
}

#[test]
fn foreign_data_is_refused_and_quoted() {
    // The first sector, a RAID superblock at 4 KiB, a btrfs superblock at 64 KiB, arbitrary data at 1 MiB.
    for offset in [0, 4096, 64 << 10, 1 << 20, (2 << 20) - 4096] {
        let mut disk = Disk::new(DEVICE_BYTES);
        let mut page = vec![0; 4096];
        page[..8].copy_from_slice(b"\xebX\x90mkfs\n");
        disk.write_durably(offset, &page);
        let error = recovery_error(&disk);
        assert!(matches!(error, PoolError::Foreign { .. }), "{offset}: {error}");
        assert!(error.to_string().contains(r"'\xebX\x90mkfs\n'"), "{error}");
    }
}

#[test]
fn an_older_format_is_refused_with_the_remedy() {
    let mut disk = formatted(&params(DEVICE_BYTES));
    let mut page = disk.read(0, 4096).expect("readable");
    page[8..12].copy_from_slice(&2u32.to_le_bytes());
    seal(&mut page);
    disk.write_durably(0, &page);
    let error = recovery_error(&disk);
    assert_eq!(error, PoolError::OlderVersion { found: 2, supported: FORMAT_VERSION });
    assert!(error.to_string().contains("erase the first 2 MiB"), "{error}");
}

#[test]
fn a_newer_format_is_refused_with_the_agent_version_to_run() {
    for copies in [&SUPERBLOCK_OFFSETS[..], &SUPERBLOCK_OFFSETS[1..]] {
        let mut disk = formatted(&params(DEVICE_BYTES));
        for offset in copies {
            let mut page = disk.read(*offset, 4096).expect("readable");
            page[8..12].copy_from_slice(&7u32.to_le_bytes());
            seal(&mut page);
            disk.write_durably(*offset, &page);
        }
        let error = recovery_error(&disk);
        assert_eq!(error, PoolError::NewerVersion { found: 7, supported: FORMAT_VERSION });
        assert!(error.to_string().contains("newer agent"), "{error}");
    }
}

#[test]
fn a_device_that_shrank_is_refused_and_one_that_grew_opens_as_it_was() {
    let mut disk = harness_with_history(4, 0).disk;
    disk.resize(DEVICE_BYTES - PAGE);
    assert_eq!(
        recovery_error(&disk),
        PoolError::WrongSize { recorded: DEVICE_BYTES, found: DEVICE_BYTES - PAGE }
    );
    disk.resize(2 * DEVICE_BYTES);
    assert!(recovered(&disk).1.is_clean());
}

#[test]
fn a_device_keeps_its_identity_when_it_is_moved() {
    let (pool, _, _) = recover(&formatted(&params(DEVICE_BYTES))).expect("opens");
    let expected = params(DEVICE_BYTES);
    assert_eq!((pool.pool_uuid(), pool.device_index()), (expected.pool_uuid, expected.device_index));
}

#[test]
fn pages_of_a_former_pool_on_the_same_device_are_ignored() {
    let mut disk = harness_with_history(5, 1).disk;
    let again = PoolParams { pool_uuid: [8; 16], ..params(DEVICE_BYTES) };
    for (offset, bytes) in DevicePool::format(&again).expect("formats") {
        disk.write_durably(offset, &bytes);
    }
    let (blocks, report) = recovered(&disk);
    assert!(blocks.is_empty() && report.is_clean() && report.torn_pages == 0, "{report:?}");
}

#[test]
fn one_bad_copy_of_a_bank_header_loses_no_block() {
    for switches in 0..3 {
        let harness = harness_with_history(6, switches);
        let (all, _) = recovered(&harness.disk);
        for offset in bank_headers(active_bank(switches)) {
            let mut disk = harness.disk.clone();
            disk.flip_bit(offset + 33, 1);
            let (blocks, report) = recovered(&disk);
            assert_eq!((keys(&blocks), report.bank_headers_bad), (keys(&all), 1), "{report:?}");
            let (blocks, report) = repaired(&disk);
            assert!(keys(&blocks) == keys(&all) && report.is_clean(), "{report:?}");
        }
    }
}

#[test]
fn the_active_bank_is_found_through_the_other_bank_when_its_headers_are_bad() {
    for switches in 1..4 {
        let harness = harness_with_history(7, switches);
        let (all, _) = recovered(&harness.disk);
        let mut disk = harness.disk.clone();
        bank_headers(active_bank(switches)).into_iter().for_each(|offset| disk.flip_bit(offset + 40, 7));
        let (blocks, report) = recovered(&disk);
        assert_eq!(keys(&blocks), keys(&all));
        assert!(report.other_bank_used && !report.is_clean() && report.bank_headers_bad == 2, "{report:?}");
        let (blocks, report) = repaired(&disk);
        assert!(keys(&blocks) == keys(&all) && report.is_clean(), "{report:?}");
    }
}

#[test]
fn a_device_without_a_bank_header_is_refused_with_a_message() {
    let mut disk = harness_with_history(8, 2).disk;
    (0..2).flat_map(bank_headers).for_each(|offset| disk.flip_bit(offset, 0));
    let error = recovery_error(&disk);
    assert!(matches!(error, PoolError::Corrupt { .. }) && error.to_string().contains("bank"), "{error}");
}

#[test]
fn a_bad_checkpoint_page_is_replaced_by_the_other_bank() {
    for switches in 1..4 {
        let harness = harness_with_history(9, switches);
        let (all, report) = recovered(&harness.disk);
        assert!(report.checkpoint_records > 63, "more than one page: {report:?}");
        for page in 0..2 {
            let mut disk = harness.disk.clone();
            disk.flip_bit(checkpoint_page(active_bank(switches), page) + 77, 2);
            let (blocks, report) = recovered(&disk);
            assert_eq!(keys(&blocks), keys(&all), "{report:?}");
            assert!(report.other_bank_used && report.checkpoint_pages_bad == 1, "{report:?}");
            let (blocks, report) = repaired(&disk);
            assert!(keys(&blocks) == keys(&all) && report.is_clean(), "{report:?}");
        }
    }
}

#[test]
fn bad_checkpoint_pages_in_both_banks_lose_only_their_own_blocks() {
    let harness = harness_with_history(10, 3);
    let (all, _) = recovered(&harness.disk);
    let mut disk = harness.disk.clone();
    (0..2).for_each(|bank| disk.flip_bit(checkpoint_page(bank, 0) + 900, 2));
    let (blocks, report) = recovered(&disk);
    assert_eq!(report.checkpoint_pages_bad, 2);
    assert!(blocks.iter().all(|(key, block)| all.get(key) == Some(block)), "no other block is recovered");
    assert!(blocks.len() < all.len() && blocks.len() + 63 >= all.len(), "{} of {}", blocks.len(), all.len());
    let (again, report) = repaired(&disk);
    assert!(keys(&again) == keys(&blocks) && report.is_clean(), "{report:?}");
}

#[test]
fn a_damaged_log_page_loses_only_its_own_records() {
    for seed in seeds(6) {
        let _guard = SeedGuard { run: "a_damaged_log_page", seed };
        let switches = seed % 3;
        let harness = harness_with_history(seed, switches);
        let (all, report) = recovered(&harness.disk);
        let pages = report.log_pages;
        assert!(pages > 10, "{report:?}");
        for page in 0..pages - 1 {
            let mut disk = harness.disk.clone();
            let mut random = Random::new(page);
            disk.flip_bit(log_page(active_bank(switches), page) + random.below(PAGE), 5);
            let (blocks, report) = recovered(&disk);
            assert_eq!((report.journal_holes, report.repair_due), (1, true), "page {page}: {report:?}");
            blocks.values().for_each(|block| check_block_on_disk(block, &disk));
            let lost = all.keys().filter(|key| !blocks.contains_key(*key)).count();
            let back = blocks.keys().filter(|key| !all.contains_key(*key)).count();
            assert!(lost + back <= 63, "page {page}: {lost} lost, {back} recovered");
            let (again, report) = repaired(&disk);
            assert!(keys(&again) == keys(&blocks) && report.is_clean(), "{report:?}");
        }
    }
}

#[test]
fn several_damaged_log_pages_never_recover_a_block_over_a_newer_one() {
    for seed in seeds(60) {
        let _guard = SeedGuard { run: "several_damaged_log_pages", seed };
        let mut harness = harness_with_history(seed, 1);
        let (_, report) = recovered(&harness.disk);
        let mut random = Random::new(seed);
        let holes = 2 + random.below(3);
        for _ in 0..holes {
            let page = random.below(report.log_pages - 1);
            harness.disk.flip_bit(log_page(1, page) + random.below(PAGE), 5);
        }
        let (blocks, report) = recovered(&harness.disk);
        assert!(report.journal_holes > 0, "{report:?}");
        // With several holes, both the free of a block and the store of its successor may be lost: the
        // header in such a slot then differs. There are at most as many such slots as lost records.
        let wrong = blocks.values().filter(|block| !header_matches(block, &harness.disk)).count() as u64;
        assert!(wrong <= 63 * report.journal_holes, "{wrong} of {}", blocks.len());
        let mut pages: Vec<_> = blocks.values().map(|block| block.page).collect();
        pages.dedup();
        assert_eq!(pages.len(), blocks.len(), "one block per slot");
    }
}

fn header_matches(block: &StoredBlock, disk: &Disk) -> bool {
    use reprise_agent_core::pool::header::{ExpectedHeader, decode_header};
    let expected =
        ExpectedHeader { key: block.key, generation: block.generation, header_crc: block.header_crc };
    decode_header(&disk.read(block.page.offset(), 4096).expect("readable"), &expected).is_ok()
}

#[test]
fn unreadable_pages_count_as_damaged() {
    let harness = harness_with_history(11, 1);
    let (all, _) = recovered(&harness.disk);
    let places = [
        SUPERBLOCK_OFFSETS[0],
        SUPERBLOCK_OFFSETS[1],
        bank_headers(1)[0],
        bank_headers(1)[1],
        checkpoint_page(1, 0),
        checkpoint_page(1, 1),
    ];
    for offset in places {
        let mut disk = harness.disk.clone();
        disk.make_unreadable(offset);
        let (blocks, report) = recovered(&disk);
        assert_eq!(keys(&blocks), keys(&all), "{report:?}");
        assert!(report.unreadable_pages >= 1 && report.repair_due, "{report:?}");
    }
    let mut disk = harness.disk.clone();
    disk.make_unreadable(log_page(1, 4));
    assert_eq!(recovered(&disk).1.journal_holes, 1);
}

#[test]
fn recovery_accepts_only_the_requested_bytes() {
    let disk = formatted(&params(DEVICE_BYTES));
    let mut recovery = Recovery::new(disk.bytes());
    assert_eq!(recovery.feed(&[0; 512]), Err(PoolError::WrongRead { expected: 4096, found: 512 }));
    assert_eq!(recovery.next_read(), Some((0, 4096)));
    assert_eq!(Recovery::new(disk.bytes()).finish().map(|_| ()), Err(PoolError::Unfinished));
    let mut total = 0;
    while let Some((offset, bytes)) = recovery.next_read() {
        total += bytes as u64;
        assert!(offset + bytes as u64 <= DATA, "recovery never reads data");
        recovery.feed(&disk.read(offset, bytes).expect("readable")).expect("sound");
    }
    assert!(total < 2 * BANK_BYTES);
    assert_eq!(recovery.feed(&[0; 4096]), Err(PoolError::WrongRead { expected: 0, found: 4096 }));
}

#[test]
fn no_flipped_bit_loses_a_block_without_a_report() {
    let harness = harness_with_history(12, 2);
    let (all, report) = recovered(&harness.disk);
    assert!(report.is_clean() && report.torn_pages == 0);
    let mut random = Random::new(99);
    for offset in harness.disk.written_before(DATA) {
        // Every byte of page headers and checksums, and a sample of the rest.
        let places = (0..128).chain(4088..4096).chain((0..48).map(|_| random.below(PAGE)));
        for place in places.collect::<Vec<_>>() {
            let mut disk = harness.disk.clone();
            disk.flip_bit(offset + place, (place % 8) as u8);
            let (blocks, report) = recovered(&disk);
            let reported_damage = !report.is_clean() || report.torn_pages > 0;
            assert!(reported_damage || blocks == all, "byte {place} of page {offset}: {report:?}");
            blocks.values().for_each(|block| assert!(header_matches(block, &disk), "{block:?}"));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    /// Pages whose checksums are correct but whose fields are invalid, as a bug or an attacker may write
    /// them.
    #[test]
    fn intact_pages_with_random_fields_neither_panic_nor_make_the_slots_inconsistent(
        edits in prop::collection::vec((0usize..4, 0usize..2, 0u64..24, 0usize..4092, any::<[u8; 8]>()), 1..6)
    ) {
        let mut disk = small_history();
        for (kind, bank, page, place, bytes) in edits {
            let offset = match kind {
                0 => SUPERBLOCK_OFFSETS[bank],
                1 => bank_headers(bank)[usize::from(page % 2 == 1)],
                2 => checkpoint_page(bank, page % 3),
                _ => log_page(bank, page),
            };
            let mut content = disk.read(offset, 4096).expect("readable");
            let end = (place + bytes.len()).min(4092);
            content[place..end].copy_from_slice(&bytes[..end - place]);
            seal(&mut content);
            disk.write_durably(offset, &content);
        }
        if let Ok((mut pool, _, _)) = recover(&disk) {
            pool.audit().expect("consistent");
            let mut ops = pool.flush_frees();
            while let Some(op) = ops.pop() {
                ops.extend(pool.done(op.token, Ok(())).0);
            }
            pool.audit().expect("consistent");
        }
    }

    #[test]
    fn arbitrary_bytes_are_refused_without_a_panic(seed in any::<u64>(), ours in any::<bool>()) {
        let mut random = Random::new(seed);
        let mut disk = if ours { small_history() } else { Disk::new(DEVICE_BYTES) };
        for _ in 0..random.below(40) {
            let page: Vec<u8> = (0..512).flat_map(|_| random.bits().to_le_bytes()).collect();
            disk.write_durably(random.below(DATA / PAGE) * PAGE, &page);
        }
        if let Ok((pool, _, _)) = recover(&disk) {
            pool.audit().expect("consistent");
        }
    }
}

fn small_history() -> Disk {
    thread_local!(static HISTORY: Disk = harness_with_history(13, 2).disk);
    HISTORY.with(Disk::clone)
}
