//! Recovers the names of tenants from the header pages of their blocks.
//!
//! Journal records contain only a tenant's number, which is local to this node. The name is in the header
//! pages of blocks written when it was known. When a device is opened, headers of each tenant are read,
//! youngest blocks first, since blocks of older agents have no name. Usually one page per tenant suffices;
//! the maximum is [`HEADERS_TRIED`] pages for each of 1,024 tenants, 64 MiB.

use std::collections::BTreeMap;
use std::ops::Deref;

use reprise_agent_core::pool::StoredBlock;
use reprise_agent_core::pool::header::encryption::{key_of, names_block};
use reprise_agent_core::pool::header::{ExpectedHeader, decode_header};
use reprise_policy::tenant::TENANTS_MAX;
use reprise_policy::{TenantId, TenantName};

/// Maximum number of header pages read per tenant.
const HEADERS_TRIED: usize = 16;

/// Finds the names of the tenants of these blocks. `read` returns the page at a byte offset, if it is
/// readable.
pub(super) fn find<P: Deref<Target = [u8]>>(
    stored: &[StoredBlock],
    mut read: impl FnMut(u64) -> Option<P>,
) -> BTreeMap<TenantId, TenantName> {
    let mut youngest: BTreeMap<TenantId, Vec<&StoredBlock>> = BTreeMap::new();
    for block in stored.iter().filter(|block| block.tenant != TenantId::DEFAULT) {
        let room = youngest.len() < TENANTS_MAX;
        match youngest.get_mut(&block.tenant) {
            Some(blocks) => keep_youngest(blocks, block),
            None if room => drop(youngest.insert(block.tenant, vec![block])),
            None => {}
        }
    }
    let mut name_of = |blocks: Vec<&StoredBlock>| {
        blocks.into_iter().find_map(|block| name_in(&read(block.page.offset())?, block))
    };
    youngest.into_iter().filter_map(|(tenant, blocks)| Some((tenant, name_of(blocks)?))).collect()
}

/// Inserts a block into the list of the youngest, which is sorted youngest first.
fn keep_youngest<'a>(blocks: &mut Vec<&'a StoredBlock>, block: &'a StoredBlock) {
    let at = blocks.partition_point(|other| other.generation.0 > block.generation.0);
    if at < HEADERS_TRIED {
        blocks.truncate(HEADERS_TRIED - 1);
        blocks.insert(at, block);
    }
}

/// Returns the name in a header page if the page matches the journal. An encrypted page is not decrypted, because its key
/// may be gone.
fn name_in(page: &[u8], block: &StoredBlock) -> Option<TenantName> {
    let expected =
        ExpectedHeader { key: block.key, generation: block.generation, header_crc: block.header_crc };
    match key_of(page) {
        Some((tenant, _)) if names_block(page, &expected) => tenant,
        Some(_) => None,
        None => decode_header(page, &expected).ok()?.tenant,
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use reprise_agent_core::pool::PageNumber;
    use reprise_agent_core::pool::header::encryption::{BlockCipher, SALT_BYTES, TAG_BYTES, TenantKey};
    use reprise_agent_core::pool::header::{HeaderFields, encode_header};
    use reprise_policy::{BlockKey, ContentId, Dtype, Generation, Layout, LayoutSpec, Parts};

    use super::*;

    fn layout() -> Layout {
        let spec = LayoutSpec {
            layers: 1,
            parts: Parts::Latent,
            kv_heads: 1,
            head_dim: 64,
            dtype: Dtype::Fp8,
            tokens_per_block: 16,
            ..LayoutSpec::LLAMA_3_8B
        };
        spec.validate().expect("a small layout")
    }

    fn name(text: &str) -> TenantName {
        text.parse().expect("a name")
    }

    /// A disk with blocks given by number, tenant and name. The number is also page, generation and key.
    struct Disk {
        stored: Vec<StoredBlock>,
        pages: BTreeMap<u64, Box<[u8]>>,
    }

    impl Disk {
        fn of(blocks: &[(u32, u16, Option<&str>)]) -> Disk {
            let (mut stored, mut pages) = (Vec::new(), BTreeMap::new());
            for (number, tenant, text) in blocks {
                let (page, generation, layout) =
                    (PageNumber(u64::from(*number)), Generation(*number), layout());
                let (key, named) = (BlockKey([*number as u8; 16]), text.map(name));
                let checksums = vec![0; layout.objects() as usize];
                let fields = HeaderFields {
                    pool_uuid: [1; 16],
                    page,
                    key,
                    content: ContentId::UNKNOWN,
                    layout,
                    generation,
                    tenant: named.as_ref(),
                    checksums: &checksums,
                };
                let (bytes, header_crc) = encode_header(&fields);
                pages.insert(page.offset(), bytes);
                let tenant = TenantId(*tenant);
                stored.push(StoredBlock { key, tenant, layout, page, generation, header_crc, priority: 1 });
            }
            Disk { stored, pages }
        }

        fn names(&self) -> BTreeMap<TenantId, TenantName> {
            find(&self.stored, |offset| self.pages.get(&offset).map(|page| &**page))
        }
    }

    #[test]
    fn each_tenant_with_blocks_has_its_name_back_and_the_default_tenant_needs_none() {
        let disk = Disk::of(&[(1, 7, Some("a")), (2, 0, None), (3, 9, Some("b")), (4, 7, Some("a"))]);
        assert_eq!(disk.names(), BTreeMap::from([(TenantId(7), name("a")), (TenantId(9), name("b"))]));
    }

    #[test]
    fn blocks_without_a_name_do_not_hide_a_younger_one_with_a_name() {
        let mut blocks: Vec<_> = (1..200).map(|number| (number, 7, None)).collect();
        blocks.insert(50, (200, 7, Some("a")));
        assert_eq!(Disk::of(&blocks).names(), BTreeMap::from([(TenantId(7), name("a"))]));
    }

    #[test]
    fn damaged_and_foreign_headers_are_ignored() {
        let mut disk = Disk::of(&[(1, 7, Some("a")), (2, 7, Some("b")), (3, 7, Some("c"))]);
        disk.pages.get_mut(&PageNumber(3).offset()).expect("written")[40] ^= 1;
        disk.stored[1].header_crc ^= 1;
        assert_eq!(disk.names(), BTreeMap::from([(TenantId(7), name("a"))]));
        disk.pages.clear();
        assert!(disk.names().is_empty(), "nothing can be read");
    }

    #[test]
    fn name_in_an_encrypted_page_needs_no_key() {
        let mut disk = Disk::of(&[(1, 7, Some("a")), (2, 9, Some("b"))]);
        for number in [1, 2] {
            let page = disk.pages.get_mut(&PageNumber(number).offset()).expect("written");
            let cipher = BlockCipher::for_block(page, &layout(), &TenantKey::new(&[7; 32]), &[3; SALT_BYTES]);
            let cipher = cipher.expect("a small layout");
            cipher.seal_header(page, &vec![[0; TAG_BYTES]; cipher.groups().count() as usize]);
        }
        assert_eq!(disk.names(), BTreeMap::from([(TenantId(7), name("a")), (TenantId(9), name("b"))]));
        disk.stored[0].generation.0 += 1;
        assert_eq!(disk.names(), BTreeMap::from([(TenantId(9), name("b"))]), "the page of an older block");
    }

    #[test]
    fn tenant_without_a_name_costs_a_bounded_number_of_reads() {
        let disk = Disk::of(&(1..100).map(|number| (number, 7, None)).collect::<Vec<_>>());
        let reads = Cell::new(0);
        let found = find(&disk.stored, |offset| {
            reads.set(reads.get() + 1);
            disk.pages.get(&offset).map(|page| &**page)
        });
        assert!(found.is_empty());
        assert_eq!(reads.get(), HEADERS_TRIED);
    }
}
