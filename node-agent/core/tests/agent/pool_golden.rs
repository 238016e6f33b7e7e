//! The bytes of format version 4, fixed by files that an independent program generated from
//! `docs/FORMAT.md`.
//!
//! A difference here means that existing pools can no longer be read: change the version, not the
//! fixtures.

use std::collections::BTreeMap;

use crate::pool_harness::disk::Disk;
use crate::pool_harness::{batch, block_write, layout, params, recover};
use proptest::prelude::*;
use reprise_agent_core::pool::header::encryption::{BlockCipher, SALT_BYTES, TenantKey, open_header};
use reprise_agent_core::pool::header::{
    ExpectedHeader, HEADER_BYTES, HeaderError, HeaderFields, decode_header, encode_header, read_header,
};
use reprise_agent_core::pool::{
    BlockWrite, DeviceOp, DeviceOpKind, DevicePool, PageNumber, PoolParams, SUPERBLOCK_OFFSETS,
};
use reprise_policy::layout::OBJECTS_MAX;
use reprise_policy::{BlockKey, ContentId, Dtype, Generation, Layout, LayoutSpec, Parts, TenantName};

const SUPERBLOCK: &str = include_str!("fixtures/superblock.hex");
const BANK_HEADER: &str = include_str!("fixtures/bank_header.hex");
const BANK_HEADER_2: &str = include_str!("fixtures/bank_header_2.hex");
const LOG_PAGE: &str = include_str!("fixtures/log_page.hex");
const LOG_PAGE_2: &str = include_str!("fixtures/log_page_2.hex");
const CHECKPOINT_PAGE: &str = include_str!("fixtures/checkpoint_page.hex");
const TAIL_PAGE: &str = include_str!("fixtures/tail_page.hex");
const SLOT_HEADER: &str = include_str!("fixtures/slot_header.hex");
const SLOT_HEADER_NAMED: &str = include_str!("fixtures/slot_header_named.hex");
const SLOT_HEADER_ENCRYPTED: &str = include_str!("fixtures/slot_header_encrypted.hex");

const DEVICE_BYTES: u64 = 64 << 20;
const PAGE: u64 = 4096;
const BANK_0: u64 = (1 << 20) + PAGE;
const CHECKPOINT_PAGES: u64 = 131;
const LOG_PAGES: u64 = 65;
const BANK_1: u64 = BANK_0 + (2 + CHECKPOINT_PAGES + LOG_PAGES) * PAGE;
const LOG_0: u64 = BANK_0 + (1 + CHECKPOINT_PAGES) * PAGE;
const LOG_1: u64 = BANK_1 + (1 + CHECKPOINT_PAGES) * PAGE;
const DATA_PAGE: u64 = 1024;
const FIRST_GENERATION: u32 = (1 << 20) + 1;
const CONTENT: ContentId = ContentId([0xC0; 16]);

fn golden_params() -> PoolParams {
    let mut pool_uuid = [0; 16];
    (0x10..).zip(&mut pool_uuid).for_each(|(value, byte)| *byte = value);
    PoolParams { pool_uuid, ..params(DEVICE_BYTES) }
}

fn fixture(text: &str) -> Vec<u8> {
    let mut page = vec![0; 4096];
    for row in text.lines().filter(|row| !row.starts_with('#')) {
        let (at, bytes) = row.split_once(": ").expect("offset: bytes");
        let at = usize::from_str_radix(at, 16).expect("hexadecimal");
        for (place, byte) in page[at..at + 16].iter_mut().zip(bytes.split(' ')) {
            *place = u8::from_str_radix(byte, 16).expect("hexadecimal");
        }
    }
    page
}

/// Compares a page with its fixture, row by row.
fn assert_page(found: &[u8], expected: &str, what: &str) {
    let expected = fixture(expected);
    assert_eq!(found.len(), expected.len(), "{what}");
    for (at, (found, expected)) in found.chunks(16).zip(expected.chunks(16)).enumerate() {
        assert_eq!(found, expected, "{what}, offset {:#x}", 16 * at);
    }
}

fn key(number: u8) -> BlockKey {
    BlockKey([number; 16])
}

/// Everything written while the script of the fixtures runs, by offset.
fn run_script() -> BTreeMap<u64, Vec<u8>> {
    let mut written = BTreeMap::new();
    let mut disk = Disk::new(DEVICE_BYTES);
    for (offset, bytes) in DevicePool::format(&golden_params()).expect("formats") {
        disk.write_durably(offset, &bytes);
        written.insert(offset, bytes);
    }
    let (mut pool, _, _) = recover(&disk).expect("opens");
    let mut name = 0;
    let mut write = |pool: &mut DevicePool, blocks: &[(u8, ContentId)]| {
        let blocks = blocks.iter().map(|(number, content)| {
            let page = pool.allocate(layout(3).slot_bytes()).expect("room");
            BlockWrite { content: *content, ..block_write(key(*number), layout(3), page) }
        });
        let blocks = blocks.collect();
        name += 1;
        let ops = pool.write_batch(batch(name), blocks);
        run_to_completion(pool, ops, &mut written);
    };
    write(&mut pool, &[(0x11, ContentId::UNKNOWN), (0x22, CONTENT)]);
    pool.free(PageNumber(DATA_PAGE + 4));
    pool.quarantine(PageNumber(DATA_PAGE));
    write(&mut pool, &[(0x33, ContentId::UNKNOWN)]);
    (0x40..0x5E).for_each(|number| write(&mut pool, &[(number, ContentId::UNKNOWN)]));
    assert_eq!(pool.usage().checkpoints, 1);
    written
}

fn run_to_completion(pool: &mut DevicePool, mut ops: Vec<DeviceOp>, written: &mut BTreeMap<u64, Vec<u8>>) {
    while let Some(op) = ops.pop() {
        match op.kind {
            DeviceOpKind::WritePages { offset, bytes } => {
                for (page, at) in bytes.chunks(4096).zip((offset..).step_by(4096)) {
                    written.insert(at, page.to_vec());
                }
            }
            DeviceOpKind::WriteBlock { offset, header, .. }
            | DeviceOpKind::WriteHeader { offset, header } => {
                written.insert(offset, header.to_vec());
            }
            DeviceOpKind::Sync => {}
        }
        ops.extend(pool.done(op.token, Ok(())).0);
    }
}

#[test]
fn written_pages_match_the_fixtures() {
    let written = run_script();
    for offset in SUPERBLOCK_OFFSETS {
        assert_page(&written[&offset], SUPERBLOCK, "superblock");
    }
    for offset in [BANK_0, BANK_1 - PAGE] {
        assert_page(&written[&offset], BANK_HEADER, "bank header");
    }
    assert_page(&written[&LOG_0], LOG_PAGE, "log page");
    assert_page(&written[&(LOG_0 + PAGE)], LOG_PAGE_2, "second log page");
    assert_page(&written[&(BANK_1 + PAGE)], CHECKPOINT_PAGE, "checkpoint page");
    assert_page(&written[&LOG_1], TAIL_PAGE, "tail page");
    for offset in [BANK_1, 2 * BANK_1 - BANK_0 - PAGE] {
        assert_page(&written[&offset], BANK_HEADER_2, "bank header of epoch 2");
    }
}

fn disk_of(pages: &[(u64, &str)]) -> Disk {
    let mut disk = Disk::new(DEVICE_BYTES);
    pages.iter().for_each(|(offset, text)| disk.write_durably(*offset, &fixture(text)));
    disk
}

#[test]
fn a_pool_made_of_the_fixtures_opens() {
    let base = [(0, SUPERBLOCK), (1 << 20, SUPERBLOCK), (BANK_0, BANK_HEADER), (BANK_1 - PAGE, BANK_HEADER)];
    let one = [base.as_slice(), &[(LOG_0, LOG_PAGE)]].concat();
    let (_, stored, report) = recover(&disk_of(&one)).expect("opens");
    assert!(report.is_clean() && !report.repair_due, "{report:?}");
    assert_eq!(stored.iter().map(|block| block.key).collect::<Vec<_>>(), [key(0x11), key(0x22)]);
    assert_eq!((stored[1].page, stored[1].priority), (PageNumber(DATA_PAGE + 4), 1));
    assert_eq!(stored[1].generation, Generation(FIRST_GENERATION + 1));
    assert_eq!(stored[1].layout, layout(3));
    assert_eq!(stored.iter().map(|block| block.tenant.0).collect::<Vec<_>>(), [0x0204, 0x0102]);

    let two = [one.as_slice(), &[(LOG_0 + PAGE, LOG_PAGE_2)]].concat();
    let (_, stored, report) = recover(&disk_of(&two)).expect("opens");
    assert_eq!(stored.iter().map(|block| block.key).collect::<Vec<_>>(), [key(0x33)]);
    assert_eq!((report.slots_quarantined, report.log_records, report.log_pages), (1, 5, 2));

    let flipped = [
        (BANK_1, BANK_HEADER_2),
        (2 * BANK_1 - BANK_0 - PAGE, BANK_HEADER_2),
        (BANK_1 + PAGE, CHECKPOINT_PAGE),
        (LOG_1, TAIL_PAGE),
    ];
    let (_, stored, report) = recover(&disk_of(&[two.as_slice(), &flipped].concat())).expect("opens");
    assert_eq!((report.bank_epoch, report.checkpoint_records, report.slots_quarantined), (2, 31, 1));
    let mut keys: Vec<BlockKey> = stored.iter().map(|block| block.key).collect();
    keys.sort();
    assert_eq!(keys, [0x33].into_iter().chain(0x40..0x5E).map(key).collect::<Vec<_>>());
}

fn golden_header() -> (Vec<u8>, ExpectedHeader) {
    let page = fixture(SLOT_HEADER);
    let header_crc = u32::from_le_bytes([page[4092], page[4093], page[4094], page[4095]]);
    (page, ExpectedHeader { key: key(0x22), generation: Generation(FIRST_GENERATION + 1), header_crc })
}

#[test]
fn a_slot_header_matches_its_fixture_when_written_and_read() {
    let (page, expected) = golden_header();
    let written = run_script();
    let number = PageNumber(DATA_PAGE + 4);
    let fields = HeaderFields {
        pool_uuid: golden_params().pool_uuid,
        page: number,
        key: key(0x22),
        content: CONTENT,
        layout: layout(3),
        generation: expected.generation,
        tenant: None,
        checksums: &crate::pool_harness::checksums(&key(0x22), &layout(3)),
    };
    let (encoded, crc) = encode_header(&fields);
    assert_eq!(crc, expected.header_crc);
    assert_page(&encoded, SLOT_HEADER, "slot header");
    assert!(written.contains_key(&number.offset()));
    let header = decode_header(&page, &expected).expect("the expected header");
    assert_eq!((header.content, header.layout, header.page), (CONTENT, layout(3), number));
    assert_eq!(&*header.checksums, fields.checksums);
    assert_eq!(read_header(&page), Ok((header, crc)));
}

#[test]
fn a_slot_header_matches_its_fixture_with_a_tenant_name_and_is_valid_without_one() {
    let (unnamed, expected) = golden_header();
    let name: TenantName = "team-7".parse().expect("a name");
    let mut disk = Disk::new(DEVICE_BYTES);
    DevicePool::format(&golden_params())
        .expect("sound")
        .iter()
        .for_each(|(at, page)| disk.write_durably(*at, page));
    let (mut pool, _, _) = recover(&disk).expect("opens");
    let write = |pool: &mut DevicePool, number: u8, name: Option<TenantName>| {
        let page = pool.allocate(layout(3).slot_bytes()).expect("room");
        let write =
            BlockWrite { content: CONTENT, tenant_name: name, ..block_write(key(number), layout(3), page) };
        let ops = pool.write_batch(batch(u64::from(number)), vec![write]);
        ops.into_iter().find_map(|op| match op.kind {
            DeviceOpKind::WriteBlock { header, .. } => Some(header),
            _ => None,
        })
    };
    let page = fixture(SLOT_HEADER_NAMED);
    let header = read_header(&page).expect("intact").0;
    assert_eq!(header.tenant, Some(name.clone()));
    assert_eq!(decode_header(&unnamed, &expected).expect("the expected header").tenant, None);
    let first = write(&mut pool, 0x21, None).expect("written");
    assert_eq!(read_header(&first).expect("intact").0.tenant, None);
    let second = write(&mut pool, 0x22, Some(name)).expect("written");
    assert_page(&second, SLOT_HEADER_NAMED, "slot header with a name");
}

#[test]
fn the_header_of_an_encrypted_block_matches_its_fixture_and_is_restored() {
    let (plain, key) = (fixture(SLOT_HEADER_NAMED), TenantKey::new(&[0x42; 32]));
    let salt: [u8; SALT_BYTES] = std::array::from_fn(|at| at as u8 + 1);
    let mut page = plain.clone();
    let cipher = BlockCipher::for_block(&mut page, &layout(3), &key, &salt).expect("few objects");
    let mut payload: Vec<u8> = (0..layout(3).block_bytes()).map(|at| (at * 7) as u8).collect();
    let groups = (0..).zip(payload.chunks_mut(layout(3).object_bytes() as usize));
    let tags: Vec<_> = groups.map(|(group, bytes)| cipher.seal_group(group, bytes)).collect();
    cipher.seal_header(&mut page, &tags);
    assert_page(&page, SLOT_HEADER_ENCRYPTED, "encrypted slot header");
    open_header(&mut page, &key).expect("the key of the page");
    assert_page(&page, SLOT_HEADER_NAMED, "restored slot header");
}

#[test]
fn an_invalid_tenant_name_in_a_header_loses_no_block() {
    for (length, text) in [(64, "a"), (1, "A"), (255, "team-7"), (3, "a\u{fc}")] {
        let mut page = fixture(SLOT_HEADER_NAMED);
        page[3968..4032].fill(0);
        page[3968] = length;
        page[3969..3969 + text.len()].copy_from_slice(text.as_bytes());
        let crc = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, &page[..4092]) as u32;
        page[4092..].copy_from_slice(&crc.to_le_bytes());
        assert_eq!(read_header(&page).expect("intact").0.tenant, None, "{length} of {text}");
    }
}

#[test]
fn a_slot_header_of_another_block_is_refused_with_the_differing_field() {
    let (page, expected) = golden_header();
    let refused = |expected: ExpectedHeader| decode_header(&page, &expected).expect_err("another header");
    let other = refused(ExpectedHeader { key: key(0x23), ..expected });
    assert_eq!(other, HeaderError::OtherBlock { expected: key(0x23), found: key(0x22) });
    let stale = refused(ExpectedHeader { generation: Generation(5), ..expected });
    assert!(stale.to_string().contains("generation 1048578, not 5"), "{stale}");
    assert_eq!(refused(ExpectedHeader { header_crc: 1, ..expected }), HeaderError::NotRecorded);
    assert_eq!(decode_header(&[0; HEADER_BYTES], &expected), Err(HeaderError::Blank));
}

#[test]
fn every_flipped_bit_and_every_truncation_of_a_slot_header_is_refused() {
    let (page, expected) = golden_header();
    for bit in 0..8 * HEADER_BYTES {
        let mut flipped = page.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(decode_header(&flipped, &expected), Err(HeaderError::Damaged), "bit {bit}");
    }
    for bytes in 0..HEADER_BYTES {
        assert_eq!(decode_header(&page[..bytes], &expected), Err(HeaderError::Size(bytes)));
    }
}

fn any_layout() -> impl Strategy<Value = Layout> {
    let dims = (1u16..=480, 1u16..=8, 1u16..=128, 1u16..=32, 0u16..4);
    dims.prop_map(|(layers, kv_heads, head_dim, tokens_per_block, tp_rank)| {
        let spec = LayoutSpec {
            layers,
            parts: Parts::KeyValue,
            kv_heads,
            head_dim,
            dtype: Dtype::Fp8,
            tokens_per_block,
            tp_rank,
            tp_size: 4,
        };
        spec.validate().expect("within the limits")
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_slot_header_decodes_to_its_encoded_fields(
        layout in any_layout(), key in any::<[u8; 16]>(), generation in any::<u32>(), base in any::<u32>(),
        name in prop::option::of("[a-z0-9-]{1,63}")
    ) {
        let checksums: Vec<u32> = (0..layout.objects()).map(|object| base.wrapping_mul(object + 1)).collect();
        let name: Option<TenantName> = name.map(|name| name.parse().expect("a name"));
        let fields = HeaderFields {
            pool_uuid: [1; 16],
            page: PageNumber(u64::from(base)),
            key: BlockKey(key),
            content: ContentId::UNKNOWN,
            layout,
            generation: Generation(generation),
            tenant: name.as_ref(),
            checksums: &checksums,
        };
        prop_assert!(layout.objects() <= OBJECTS_MAX);
        let (page, header_crc) = encode_header(&fields);
        let expected = ExpectedHeader { key: fields.key, generation: fields.generation, header_crc };
        let header = decode_header(&page, &expected).expect("the same header");
        prop_assert_eq!((header.layout, header.page), (layout, fields.page));
        prop_assert_eq!(&*header.checksums, checksums.as_slice());
        prop_assert_eq!(header.tenant, name);
    }

    /// A page with a correct checksum over random fields is refused or decoded, and never panics.
    #[test]
    fn an_intact_page_with_random_fields_does_not_panic(
        edits in prop::collection::vec((0usize..4088, any::<u32>()), 1..8)
    ) {
        let (mut page, expected) = golden_header();
        for (at, value) in edits {
            page[at..at + 4].copy_from_slice(&value.to_le_bytes());
        }
        let crc = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, &page[..4092]) as u32;
        page[4092..].copy_from_slice(&crc.to_le_bytes());
        prop_assert!(decode_header(&page, &expected).is_err() || crc == expected.header_crc);
        if let Ok((header, _)) = read_header(&page) {
            prop_assert_eq!(header.checksums.len(), header.layout.objects() as usize);
        }
    }
}
