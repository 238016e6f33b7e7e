//! Encrypted blocks: restored and refused pages and groups, and the readable part of a page.

use proptest::prelude::*;
use reprise_policy::{BlockKey, ContentId, Generation, LayoutSpec, Parts};

use super::*;
use crate::pool::PageNumber;
use crate::pool::header::{ExpectedHeader, HeaderFields, decode_header, encode_header};

const SALT: [u8; SALT_BYTES] = [9; SALT_BYTES];

fn layout(objects: u16) -> Layout {
    let spec = LayoutSpec {
        layers: objects,
        parts: Parts::Latent,
        kv_heads: 1,
        head_dim: 64,
        tokens_per_block: 16,
        ..LayoutSpec::LLAMA_3_8B
    };
    spec.validate().expect("a valid layout")
}

fn key(byte: u8) -> TenantKey {
    TenantKey::new(&[byte; 32])
}

/// Returns a page as the core builds it, and its checksum.
fn page(layout: Layout) -> (Box<[u8]>, u32) {
    let checksums: Vec<u32> = (0..layout.objects()).map(|object| 0xc0de_0000 + object).collect();
    let tenant: TenantName = "team-a".parse().expect("a name");
    encode_header(&HeaderFields {
        pool_uuid: [1; 16],
        page: PageNumber(512),
        key: BlockKey([2; 16]),
        content: ContentId([3; 16]),
        layout,
        generation: Generation(4),
        tenant: Some(&tenant),
        checksums: &checksums,
    })
}

/// Encrypts groups of some bytes and their page.
fn encrypted(layout: Layout, key: &TenantKey) -> (Box<[u8]>, Vec<Vec<u8>>) {
    let (mut page, _) = page(layout);
    let cipher = BlockCipher::for_block(&mut page, &layout, key, &SALT).expect("room for tags");
    let mut groups: Vec<Vec<u8>> = (0..cipher.groups().count()).map(plain_group).collect();
    let tags: Vec<_> = (0..).zip(&mut groups).map(|(index, bytes)| cipher.seal_group(index, bytes)).collect();
    cipher.seal_header(&mut page, &tags);
    (page, groups)
}

fn plain_group(index: u32) -> Vec<u8> {
    vec![u8::try_from(index % 251).expect("a byte"); 100]
}

#[test]
fn groups_have_one_object_up_to_191_and_fit_up_to_952() {
    let of = |objects| Groups::of_objects(objects).map(|groups| (groups.per_group(), groups.count()));
    assert_eq!(of(1), Some((1, 1)));
    assert_eq!(of(64), Some((1, 64)));
    assert_eq!(of(191), Some((1, 191)));
    assert_eq!(of(192), Some((2, 96)));
    assert_eq!(of(494), Some((8, 62)));
    assert_eq!(of(952), Some((1024, 1)));
    assert_eq!(of(953), None);
    assert_eq!(of(OBJECTS_MAX), None);
}

#[test]
fn page_and_groups_are_restored_with_the_key_only() {
    for objects in [1, 64, 191, 192, 494, 952] {
        let layout = layout(objects);
        let (mut stored, groups) = encrypted(layout, &key(7));
        assert_eq!(key_of(&stored), Some(("team-a".parse().ok(), key(7).id())));
        let mut with_another = stored.clone();
        assert_eq!(open_header(&mut with_another, &key(8)).err(), Some(HeaderError::Field("tag")));
        assert_eq!(with_another, stored, "a page that is not opened does not change");

        let (cipher, tags) = open_header(&mut stored, &key(7)).expect("opens");
        let (plain, header_crc) = page(layout);
        assert_eq!(stored, plain);
        let expected = ExpectedHeader { key: BlockKey([2; 16]), generation: Generation(4), header_crc };
        assert_eq!(decode_header(&stored, &expected).expect("the recorded page").content, ContentId([3; 16]));
        for ((index, mut bytes), tag) in (0..).zip(groups).zip(&tags) {
            assert_ne!(bytes, plain_group(index));
            let mut of_another = bytes.clone();
            assert!(!cipher.open_group(index + 1, tag, &mut of_another), "a group has its place");
            assert!(cipher.open_group(index, tag, &mut bytes));
            assert_eq!(bytes, plain_group(index));
        }
    }
}

#[test]
fn a_page_shows_neither_checksums_nor_content_and_two_writes_share_nothing() {
    let layout = layout(64);
    let (plain, _) = page(layout);
    let (stored, groups) = encrypted(layout, &key(7));
    assert_ne!(stored[CONTENT_AT..CONTENT_AT + 16], plain[CONTENT_AT..CONTENT_AT + 16]);
    for (stored, plain) in stored[CHECKSUMS_AT..].chunks(4).zip(plain[CHECKSUMS_AT..].chunks(4)).take(64) {
        assert_ne!(stored, plain);
    }
    let mut page = plain.clone();
    let cipher = BlockCipher::for_block(&mut page, &layout, &key(7), &[8; SALT_BYTES]).expect("room");
    let mut again = plain_group(0);
    cipher.seal_group(0, &mut again);
    assert_ne!(again, groups[0]);
    assert_eq!(key_of(&plain), None);
    assert!(!format!("{:?} {cipher:?}", key(7)).contains("7, 7"));
}

proptest! {
    #[test]
    fn every_changed_bit_is_found(at in 0usize..4096, bit in 0u8..8, reseal: bool) {
        let layout = layout(300);
        let (stored, groups) = encrypted(layout, &key(7));
        let mut damaged = stored.clone();
        damaged[at] ^= 1 << bit;
        if reseal {
            // An attacker can correct the checksum of the page.
            seal(&mut damaged);
        }
        prop_assume!(damaged != stored);
        let (_, header_crc) = page(layout);
        let expected = ExpectedHeader { key: BlockKey([2; 16]), generation: Generation(4), header_crc };
        let opens = open_header(&mut damaged, &key(7)).is_ok_and(|(cipher, tags)| {
            decode_header(&damaged, &expected).is_ok()
                && (0..).zip(&groups).zip(&tags).all(|((index, bytes), tag)| {
                    cipher.open_group(index, tag, &mut bytes.clone())
                })
        });
        prop_assert!(!opens, "byte {at}");
    }
}
