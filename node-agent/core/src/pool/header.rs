//! Header page of a slot: identity of its block, and the checksum of each object.
//!
//! Chain of trust: the journal record of a block contains the checksum of its header page, and the header
//! page contains the checksum of every object. A reader reads the header page with the first piece of the
//! payload, verifies it here against the index, and then verifies objects against `Header::checksums`.
//!
//! The page also contains the tenant's name, because tenant numbers are local to a node. Names thus survive
//! restarts with the blocks, and are durable before any record refers to the number.
//!
//! Invariant: [`decode_header`] returns a header only if the page is exactly the one that the journal
//! recorded. A slot that was reused, written to a wrong offset or damaged is rejected.

use reprise_policy::layout::OBJECTS_MAX;
use reprise_policy::tenant::TENANT_NAME_BYTES_MAX;
use reprise_policy::{BlockKey, ContentId, Generation, Layout, TenantName};

pub mod encryption;

use super::PageNumber;
use super::page::{CRC_AT, PAGE, bytes_at, intact, is_blank, put, seal, u32_at, u64_at};

/// Size of a header page in bytes.
pub const HEADER_BYTES: usize = PAGE;

/// Version of the header page.
const VERSION: u32 = 1;

const MAGIC: [u8; 8] = *b"RPRSLOT\0";
const MAGIC_AT: usize = 0;
const VERSION_AT: usize = 8;
const OBJECTS_AT: usize = 12;
const UUID_AT: usize = 16;
const KEY_AT: usize = 32;
const CONTENT_AT: usize = 48;
const LAYOUT_AT: usize = 64;
const PAYLOAD_AT: usize = 80;
const GENERATION_AT: usize = 88;
const PAGE_AT: usize = 92;
/// Byte offset of the object checksums in a header page: CRC32C, 4 bytes little endian each.
pub const CHECKSUMS_AT: usize = 128;

const TENANT_BYTES_AT: usize = 3968;
const TENANT_AT: usize = TENANT_BYTES_AT + 1;

const _: () = assert!(CHECKSUMS_AT + 4 * OBJECTS_MAX as usize <= TENANT_BYTES_AT);
const _: () = assert!(TENANT_AT + TENANT_NAME_BYTES_MAX <= CRC_AT);

/// Fields of a header page to write.
#[derive(Clone, Copy, Debug)]
pub struct HeaderFields<'a> {
    /// The pool that the slot belongs to.
    pub pool_uuid: [u8; 16],
    /// Page number of the header page itself.
    pub page: PageNumber,
    /// Key of the block.
    pub key: BlockKey,
    /// Content id of the block, or unknown.
    pub content: ContentId,
    /// Layout of the block.
    pub layout: Layout,
    /// Generation of the slot write.
    pub generation: Generation,
    /// Name of the tenant, if known.
    pub tenant: Option<&'a TenantName>,
    /// CRC32C of each object, in order; one per object of the layout.
    pub checksums: &'a [u32],
}

/// Expected identity of a slot's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpectedHeader {
    /// Key of the block.
    pub key: BlockKey,
    /// Generation of the slot write.
    pub generation: Generation,
    /// CRC32C of the header page.
    pub header_crc: u32,
}

/// Header page that was read and verified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// The pool that the slot belongs to.
    pub pool_uuid: [u8; 16],
    /// Page number of the header page.
    pub page: PageNumber,
    /// Key of the block.
    pub key: BlockKey,
    /// Content id of the block, or unknown.
    pub content: ContentId,
    /// Layout of the block.
    pub layout: Layout,
    /// Generation of the slot write.
    pub generation: Generation,
    /// Name of the tenant, if the page contains one.
    pub tenant: Option<TenantName>,
    /// CRC32C of each object, in order.
    pub checksums: Box<[u32]>,
}

/// Reason why a page is not the expected header. In every case, the block is lost.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// The page does not have 4096 bytes.
    #[error("a header page has {HEADER_BYTES} bytes, not {0}")]
    Size(usize),
    /// The slot was never written, or the device trimmed it.
    #[error("the slot is blank: it was never written, or the device has trimmed it")]
    Blank,
    /// The page has no header, or a damaged one.
    #[error("the header page is damaged: its checksum does not match")]
    Damaged,
    /// The slot holds another block.
    #[error("the slot holds block {found}, not {expected}")]
    OtherBlock {
        /// Key of the expected block.
        expected: BlockKey,
        /// Key of the block in the slot.
        found: BlockKey,
    },
    /// The slot was written again with the same key.
    #[error("the slot holds generation {}, not {}", .found.0, .expected.0)]
    OtherGeneration {
        /// Expected generation of the slot.
        expected: Generation,
        /// Generation in the header page.
        found: Generation,
    },
    /// The page is intact, but is not the one that the journal recorded.
    #[error("the header page is intact but is not the one that the journal recorded")]
    NotRecorded,
    /// The page is intact, but a field is invalid in this version.
    #[error("the header page is intact, but its {0} is invalid in this version")]
    Field(&'static str),
}

/// Builds a header page and returns it with its checksum.
///
/// # Panics
/// If the number of checksums differs from the layout's number of objects.
pub fn encode_header(fields: &HeaderFields<'_>) -> (Box<[u8]>, u32) {
    assert_eq!(fields.checksums.len(), fields.layout.objects() as usize, "one checksum per object");
    let mut page = vec![0; PAGE].into_boxed_slice();
    put(&mut page, MAGIC_AT, &MAGIC);
    put(&mut page, VERSION_AT, &VERSION.to_le_bytes());
    put(&mut page, OBJECTS_AT, &fields.layout.objects().to_le_bytes());
    put(&mut page, UUID_AT, &fields.pool_uuid);
    put(&mut page, KEY_AT, &fields.key.0);
    put(&mut page, CONTENT_AT, &fields.content.0);
    put(&mut page, LAYOUT_AT, &fields.layout.encode());
    put(&mut page, PAYLOAD_AT, &fields.layout.block_bytes().to_le_bytes());
    put(&mut page, GENERATION_AT, &fields.generation.0.to_le_bytes());
    put(&mut page, PAGE_AT, &fields.page.0.to_le_bytes());
    if let Some(name) = fields.tenant.map(TenantName::as_str) {
        page[TENANT_BYTES_AT] = u8::try_from(name.len()).expect("a name has at most 63 bytes");
        put(&mut page, TENANT_AT, name.as_bytes());
    }
    let places = page[CHECKSUMS_AT..TENANT_BYTES_AT].chunks_exact_mut(4);
    fields.checksums.iter().zip(places).for_each(|(crc, place)| place.copy_from_slice(&crc.to_le_bytes()));
    let crc = seal(&mut page);
    (page, crc)
}

/// Reads a header page and verifies that it is the expected one.
///
/// # Errors
/// [`HeaderError`] describes the page that was found.
pub fn decode_header(bytes: &[u8], expected: &ExpectedHeader) -> Result<Header, HeaderError> {
    let (header, crc) = read_header(bytes)?;
    if header.key != expected.key {
        return Err(HeaderError::OtherBlock { expected: expected.key, found: header.key });
    }
    if header.generation != expected.generation {
        return Err(HeaderError::OtherGeneration { expected: expected.generation, found: header.generation });
    }
    if crc != expected.header_crc {
        return Err(HeaderError::NotRecorded);
    }
    Ok(header)
}

/// Reads any intact header page, with its checksum, without an expected identity. For tools that inspect a
/// device; code that serves blocks uses [`decode_header`].
///
/// # Errors
/// [`HeaderError`] if the page is not an intact header of this version.
pub fn read_header(bytes: &[u8]) -> Result<(Header, u32), HeaderError> {
    if bytes.len() != PAGE {
        return Err(HeaderError::Size(bytes.len()));
    }
    let Some(crc) = intact(bytes) else {
        return Err(if is_blank(bytes) { HeaderError::Blank } else { HeaderError::Damaged });
    };
    if bytes_at(bytes, MAGIC_AT) != MAGIC {
        return Err(HeaderError::Field("magic"));
    }
    if u32_at(bytes, VERSION_AT) != VERSION {
        return Err(HeaderError::Field("version"));
    }
    let layout = Layout::decode(&bytes_at(bytes, LAYOUT_AT)).ok_or(HeaderError::Field("layout"))?;
    if u32_at(bytes, OBJECTS_AT) != layout.objects() {
        return Err(HeaderError::Field("object count"));
    }
    if u64_at(bytes, PAYLOAD_AT) != layout.block_bytes() {
        return Err(HeaderError::Field("payload length"));
    }
    let checksums =
        (0..layout.objects() as usize).map(|index| u32_at(bytes, CHECKSUMS_AT + 4 * index)).collect();
    let header = Header {
        pool_uuid: bytes_at(bytes, UUID_AT),
        page: PageNumber(u64_at(bytes, PAGE_AT)),
        key: BlockKey(bytes_at(bytes, KEY_AT)),
        content: ContentId(bytes_at(bytes, CONTENT_AT)),
        layout,
        generation: Generation(u32_at(bytes, GENERATION_AT)),
        tenant: tenant_at(bytes),
        checksums,
    };
    Ok((header, crc))
}

/// Tenant name in a page. An invalid name does not make the block unusable.
fn tenant_at(page: &[u8]) -> Option<TenantName> {
    let bytes = usize::from(page[TENANT_BYTES_AT]);
    let name =
        page.get(TENANT_AT..TENANT_AT + bytes).filter(|_| (1..=TENANT_NAME_BYTES_MAX).contains(&bytes))?;
    std::str::from_utf8(name).ok()?.parse().ok()
}
