//! The header page of a slot: whose block it is and the checksum of each of its objects.
//!
//! Chain of trust: the journal record of a block pins the checksum of its header page, the header pins the
//! checksum of every object. Whoever reads a block reads the header together with the first piece of the payload,
//! checks it here against what the index says, and then checks objects against `Header::checksums`.
//!
//! The page also names the block's tenant, whose number is the node's own affair: so names survive restarts with the blocks,
//! and are durable before any record speaks of the number.
//!
//! Invariant: [`decode_header`] returns a header only if it is the very page that the journal knows. A slot that was
//! reused meanwhile, written to a wrong place, or damaged, is refused.

use reprise_policy::layout::OBJECTS_MAX;
use reprise_policy::tenant::TENANT_NAME_BYTES_MAX;
use reprise_policy::{BlockKey, ContentId, Generation, Layout, TenantName};

use super::PageNumber;
use super::page::{CRC_AT, PAGE, bytes_at, intact, is_blank, put, seal, u32_at, u64_at};

/// Bytes of a header page.
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
const CHECKSUMS_AT: usize = 128;

const TENANT_BYTES_AT: usize = 3968;
const TENANT_AT: usize = TENANT_BYTES_AT + 1;

const _: () = assert!(CHECKSUMS_AT + 4 * OBJECTS_MAX as usize <= TENANT_BYTES_AT);
const _: () = assert!(TENANT_AT + TENANT_NAME_BYTES_MAX <= CRC_AT);

/// What goes into a header page.
#[derive(Clone, Copy, Debug)]
pub struct HeaderFields<'a> {
    /// The pool that the slot belongs to.
    pub pool_uuid: [u8; 16],
    /// Where the header page itself lies.
    pub page: PageNumber,
    /// The block.
    pub key: BlockKey,
    /// Its content id, or unknown.
    pub content: ContentId,
    /// Its geometry.
    pub layout: Layout,
    /// Which use of the slot this is.
    pub generation: Generation,
    /// The name of the tenant, if it is known.
    pub tenant: Option<&'a TenantName>,
    /// CRC32C of each object, in order; as many as the layout has objects.
    pub checksums: &'a [u32],
}

/// What the index knows about a slot's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpectedHeader {
    /// The block.
    pub key: BlockKey,
    /// Which use of the slot.
    pub generation: Generation,
    /// The checksum of the header page.
    pub header_crc: u32,
}

/// A header that is the expected one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// The pool that the slot belongs to.
    pub pool_uuid: [u8; 16],
    /// Where the header page lies.
    pub page: PageNumber,
    /// The block.
    pub key: BlockKey,
    /// Its content id, or unknown.
    pub content: ContentId,
    /// Its geometry.
    pub layout: Layout,
    /// Which use of the slot this is.
    pub generation: Generation,
    /// The name of the tenant, if the page has one.
    pub tenant: Option<TenantName>,
    /// CRC32C of each object, in order.
    pub checksums: Box<[u32]>,
}

/// Why a page is not the expected header. In every case the block is lost.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// Not 4096 bytes.
    #[error("a header page has {HEADER_BYTES} bytes, not {0}")]
    Size(usize),
    /// Never written, or trimmed.
    #[error("the slot is blank: it was never written, or the device has trimmed it")]
    Blank,
    /// No header, or a damaged one.
    #[error("the header page is damaged: its checksum does not match")]
    Damaged,
    /// Another block is there.
    #[error("the slot holds block {found}, not {expected}")]
    OtherBlock {
        /// The block that was looked for.
        expected: BlockKey,
        /// The block that is there.
        found: BlockKey,
    },
    /// Another use of the slot.
    #[error("the slot holds generation {}, not {}", .found.0, .expected.0)]
    OtherGeneration {
        /// The generation that was looked for.
        expected: Generation,
        /// The generation that is there.
        found: Generation,
    },
    /// Intact, but not the page that the journal has recorded.
    #[error("the header page is intact but is not the one that the journal recorded")]
    NotRecorded,
    /// Intact, but its fields contradict each other or this version.
    #[error("the header page is intact but its {0} makes no sense to this version")]
    Field(&'static str),
}

/// Builds a header page and returns it with its checksum.
///
/// # Panics
/// When the number of checksums is not the layout's number of objects.
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
        page[TENANT_BYTES_AT] = u8::try_from(name.len()).expect("a name has 63 bytes at the most");
        put(&mut page, TENANT_AT, name.as_bytes());
    }
    let places = page[CHECKSUMS_AT..TENANT_BYTES_AT].chunks_exact_mut(4);
    fields.checksums.iter().zip(places).for_each(|(crc, place)| place.copy_from_slice(&crc.to_le_bytes()));
    let crc = seal(&mut page);
    (page, crc)
}

/// Reads a header page and checks that it is the expected one.
///
/// # Errors
/// [`HeaderError`] says what is there instead.
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

/// Reads any intact header page, with its checksum, without knowing what should be there. For tools that look at a
/// device; whoever serves blocks uses [`decode_header`].
///
/// # Errors
/// [`HeaderError`] when the page is not an intact header of this version.
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
        page: PageNumber(u32_at(bytes, PAGE_AT)),
        key: BlockKey(bytes_at(bytes, KEY_AT)),
        content: ContentId(bytes_at(bytes, CONTENT_AT)),
        layout,
        generation: Generation(u32_at(bytes, GENERATION_AT)),
        tenant: tenant_at(bytes),
        checksums,
    };
    Ok((header, crc))
}

/// The tenant that a page names. A name that is none is no reason to lose the block.
fn tenant_at(page: &[u8]) -> Option<TenantName> {
    let bytes = usize::from(page[TENANT_BYTES_AT]);
    let name =
        page.get(TENANT_AT..TENANT_AT + bytes).filter(|_| (1..=TENANT_NAME_BYTES_MAX).contains(&bytes))?;
    std::str::from_utf8(name).ok()?.parse().ok()
}
