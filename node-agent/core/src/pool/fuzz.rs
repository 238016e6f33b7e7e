//! Fuzz target of the pages of a device (`make fuzz`): superblock, bank header, journal page and slot header.
//!
//! An input changes fields of a valid page, which is then sealed or not. Laws: decoding never panics, a decoded page is equal
//! after its encoding, and areas lie on the device.

use reprise_fuzz::Unstructured;
use reprise_policy::{
    BlockKey, ContentId, Dtype, Generation, Layout, LayoutSpec, Parts, TenantId, TenantName,
};

use super::geometry::{DEVICE_BYTES_MAX, Geometry};
use super::header::{ExpectedHeader, HeaderFields, decode_header, encode_header, read_header};
use super::page::{PAGE, seal};
use super::record::{
    Area, BankIncarnation, FoundPage, LayoutCache, PageHead, PageOwner, RECORDS_PER_PAGE, Record, RecordKind,
    decode_page, encode_page,
};
use super::superblock::{BankHeader, FoundSuperblock, Superblock};
use super::{PageNumber, PoolParams};

/// Most changes of an input.
const CHANGES_MAX: usize = 16;

#[test]
fn pool_pages() {
    reprise_fuzz::check("pool_pages", &seeds(), run());
}

fn seeds() -> Vec<Vec<u8>> {
    (0..4_u8)
        .flat_map(|page| [vec![page, 0], vec![page, 1, 3, 0, 9, 200, 7, 1, 2, 3, 4, 5, 6, 7, 8]])
        .collect()
}

/// Valid pages of one pool.
struct Pages {
    superblock: Superblock,
    owner: PageOwner,
    pages: [Vec<u8>; 4],
}

fn run() -> impl Fn(&[u8]) {
    let valid = Pages::new();
    move |input| {
        let mut choices = Unstructured::new(input);
        let Ok(kind) = choices.int_in_range(0..=3_usize) else { return };
        let mut page = valid.pages[kind].clone();
        change(&mut page, &mut choices);
        match kind {
            0 => superblock(&page),
            1 => bank_header(&page, &valid.superblock),
            2 => journal_page(&page, &valid.owner),
            _ => slot_header(&page),
        }
    }
}

fn layout() -> Layout {
    let (kv_heads, dtype, tokens_per_block, tp_rank, tp_size) = (1, Dtype::Bf16, 16, 0, 1);
    LayoutSpec {
        layers: 4,
        parts: Parts::KeyValue,
        kv_heads,
        head_dim: 64,
        dtype,
        tokens_per_block,
        tp_rank,
        tp_size,
    }
    .validate()
    .expect("a valid layout")
}

impl Pages {
    fn new() -> Pages {
        let params = PoolParams {
            device_bytes: 12 << 20,
            segment_bytes: 2 << 20,
            pool_uuid: [9; 16],
            device_index: 1,
            created_unix_us: 5,
        };
        let geometry = Geometry::plan(&params).expect("valid parameters");
        let superblock = Superblock { pool_uuid: [9; 16], device_index: 1, created_unix_us: 5, geometry };
        let incarnation = BankIncarnation { epoch: 3, begun: 70 };
        let bank =
            BankHeader { incarnation, next_generation: 90, checkpoint_records: 4, checkpoint_pages: 1 };
        let owner = PageOwner { pool_uuid: [9; 16], incarnation, area: Area::Log };
        let record = |number: u8| Record {
            kind: [RecordKind::Store, RecordKind::Free, RecordKind::Quarantine, RecordKind::Lend]
                [usize::from(number % 4)],
            priority: 1,
            tenant: TenantId(2),
            layout: layout(),
            page: PageNumber(600 + u64::from(number) * 17),
            header_crc: 77,
            generation: 80 + u64::from(number),
            key: BlockKey([number; 16]),
            content: ContentId([number; 16]),
        };
        let records: Vec<Record> = (0..8).map(record).collect();
        let head = PageHead { sequence: 2, group_first: 1, group_pages: 2, next_generation: 90 };
        let mut journal = vec![0; PAGE];
        encode_page(&mut journal, &owner, &head, &records);
        let tenant: TenantName = "team-a".parse().expect("a name");
        let (header, _) = encode_header(&HeaderFields {
            pool_uuid: [9; 16],
            page: PageNumber(600),
            key: BlockKey([1; 16]),
            content: ContentId([2; 16]),
            layout: layout(),
            generation: Generation(80),
            tenant: Some(&tenant),
            checksums: &[1, 2, 3, 4, 5, 6, 7, 8],
        });
        let pages = [superblock.encode(), bank.encode(&superblock, 0), journal, header.into_vec()];
        Pages { superblock, owner, pages }
    }
}

/// Changes fields of a page, and seals it in most cases.
fn change(page: &mut Vec<u8>, choices: &mut Unstructured<'_>) {
    let mut is_sealed = false;
    for number in 0..CHANGES_MAX {
        if choices.is_empty() {
            break;
        }
        if number == 0 {
            is_sealed = choices.ratio(7, 8_u8).unwrap_or(false);
        }
        // Fields begin at even offsets, most of them in the first bytes.
        let end = if choices.arbitrary().unwrap_or(false) { 127 } else { page.len() - 8 };
        let at = choices.int_in_range(0..=end).unwrap_or(0) & !1;
        let bytes = choices.choose(&[1_usize, 2, 4, 8]).copied().unwrap_or(1);
        let field: [u8; 8] = choices.arbitrary().unwrap_or_default();
        page[at..at + bytes].copy_from_slice(&field[..bytes]);
    }
    if is_sealed {
        seal(page);
    }
    if choices.ratio(1, 32_u8).unwrap_or(false) {
        page.truncate(PAGE / 2);
    }
}

fn superblock(page: &[u8]) {
    if let Ok(FoundSuperblock::Valid(found)) = Superblock::decode(page) {
        assert!(found.geometry.device_bytes <= DEVICE_BYTES_MAX);
        for bank in 0..2 {
            let last = found.geometry.header_offsets(bank)[1];
            assert!(last < found.geometry.data_offset, "a bank lies before the segments");
        }
        assert_eq!(Superblock::decode(&found.encode()), Ok(FoundSuperblock::Valid(found)));
    }
}

fn bank_header(page: &[u8], superblock: &Superblock) {
    if let Some(header) = BankHeader::decode(page, superblock, 0) {
        assert_eq!(BankHeader::decode(&header.encode(superblock, 0), superblock, 0), Some(header));
    }
}

fn journal_page(page: &[u8], owner: &PageOwner) {
    let FoundPage::Page(head, records) = decode_page(page, owner, 2) else { return };
    assert!(head.group_first <= head.sequence);
    let records: Vec<Option<Record>> = records.iter(&mut LayoutCache::default()).collect();
    assert!(records.len() <= RECORDS_PER_PAGE);
    // Page numbers beyond any device are rejected when the record is applied.
    let sound: Vec<Record> =
        records.into_iter().flatten().filter(|record| record.page.offset() < DEVICE_BYTES_MAX).collect();
    let mut encoded = vec![0; PAGE];
    encode_page(&mut encoded, owner, &head, &sound);
    let FoundPage::Page(_, again) = decode_page(&encoded, owner, 2) else { panic!("an encoded page") };
    let again: Vec<Option<Record>> = again.iter(&mut LayoutCache::default()).collect();
    assert_eq!(again, sound.into_iter().map(Some).collect::<Vec<_>>());
}

fn slot_header(page: &[u8]) {
    let Ok((header, crc)) = read_header(page) else { return };
    let expected = ExpectedHeader { key: header.key, generation: header.generation, header_crc: crc };
    assert_eq!(decode_header(page, &expected), Ok(header.clone()));
    let (encoded, _) = encode_header(&HeaderFields {
        pool_uuid: header.pool_uuid,
        page: header.page,
        key: header.key,
        content: header.content,
        layout: header.layout,
        generation: header.generation,
        tenant: header.tenant.as_ref(),
        checksums: &header.checksums,
    });
    assert_eq!(read_header(&encoded).map(|(again, _)| again), Ok(header));
}
