//! Encrypted blocks: AES-256-GCM over the objects of a block and over the secret part of its header page (ADR 19).
//!
//! Each block has its own key, derived from the tenant's key and a random salt, so nonces are indices and never repeat.
//! A tag covers a group of objects, so that parts of a block are verified as they arrive. The page names the tenant's key,
//! and keeps key, layout and place of the block readable, for recovery.
//!
//! Invariant: [`open_header`] restores exactly the page that [`super::encode_header`] built, or fails. So the checksum of
//! the journal covers encrypted pages, too.
//!
//! Out of scope: where keys are stored, and random numbers.

use std::fmt;

use reprise_policy::layout::OBJECTS_MAX;
use reprise_policy::{Layout, TenantName};
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, Tag, UnboundKey};
use ring::{digest, hmac};

use super::{
    CHECKSUMS_AT, CONTENT_AT, ExpectedHeader, HEADER_BYTES, HeaderError, KEY_AT, LAYOUT_AT, TENANT_BYTES_AT,
    UUID_AT, bytes_at, intact, put, read_header, seal, tenant_at,
};

const SALT_AT: usize = 100;
const KEY_ID_AT: usize = 116;
const KIND_AT: usize = 124;

/// Kind of a block whose objects are encrypted with AES-256-GCM; 0 is plaintext.
const AES_256_GCM_KIND: u8 = 1;

/// Bytes of a key's id.
pub const KEY_ID_BYTES: usize = 8;

/// Random bytes of each block.
pub const SALT_BYTES: usize = 16;

/// Bytes of a tag.
pub const TAG_BYTES: usize = 16;

/// Distinguishes this derivation of keys from others with the same secret.
const DERIVATION: &[u8] = b"reprise-block-key-v1";

/// Nonce of the header page; groups have the following ones.
const HEADER_NONCE: u32 = 0;

const CONTENT_BYTES: usize = 16;

/// Number of a key, by which a block names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KeyId(pub [u8; KEY_ID_BYTES]);

/// Key of a tenant. Its debug form hides the secret.
#[derive(Clone)]
pub struct TenantKey {
    id: KeyId,
    secret: hmac::Key,
}

/// Cipher of one block.
pub struct BlockCipher {
    key: LessSafeKey,
    groups: Groups,
}

/// Groups of objects that have one tag each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Groups {
    objects: u32,
    per_group: u32,
}

/// Tags of the groups of a block, in order.
pub type GroupTags = Box<[[u8; TAG_BYTES]]>;

impl TenantKey {
    /// Uses a secret of 32 random bytes.
    pub fn new(secret: &[u8; 32]) -> TenantKey {
        let id = digest::digest(&digest::SHA256, secret);
        let (id, _) = id.as_ref().split_first_chunk().expect("a digest has 32 bytes");
        TenantKey { id: KeyId(*id), secret: hmac::Key::new(hmac::HMAC_SHA256, secret) }
    }

    /// Returns the id by which blocks name this key.
    pub fn id(&self) -> KeyId {
        self.id
    }

    /// Derives the key of the block whose header page this is.
    fn derive(&self, page: &[u8]) -> LessSafeKey {
        let mut context = hmac::Context::with_key(&self.secret);
        let salt: [u8; SALT_BYTES] = bytes_at(page, SALT_AT);
        for (at, bytes) in [(UUID_AT, 16), (KEY_AT, 16), (LAYOUT_AT, 16)] {
            context.update(&page[at..at + bytes]);
        }
        context.update(&salt);
        context.update(DERIVATION);
        let key = UnboundKey::new(&AES_256_GCM, context.sign().as_ref()).expect("a key of 32 bytes");
        LessSafeKey::new(key)
    }
}

impl fmt::Debug for TenantKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TenantKey").field("id", &self.id).finish_non_exhaustive()
    }
}

impl Groups {
    /// Returns the groups of a layout; `None` if its header page has no room for a tag.
    pub fn of(layout: &Layout) -> Option<Groups> {
        Groups::of_objects(layout.objects())
    }

    fn of_objects(objects: u32) -> Option<Groups> {
        let room = TENANT_BYTES_AT - CHECKSUMS_AT;
        let sizes = (0..=OBJECTS_MAX.next_power_of_two().trailing_zeros()).map(|shift| 1 << shift);
        let mut all = sizes.map(|per_group| Groups { objects, per_group });
        all.find(|groups| 4 * objects as usize + TAG_BYTES * (groups.count() as usize + 1) <= room)
    }

    /// Returns the number of groups, at least one.
    pub fn count(self) -> u32 {
        self.objects.div_ceil(self.per_group)
    }

    /// Returns the number of objects in each group but the last one: a power of two.
    pub fn per_group(self) -> u32 {
        self.per_group
    }

    /// Returns the byte offset of a tag in the page; the first one is that of the header.
    fn tag_at(self, index: u32) -> usize {
        CHECKSUMS_AT + 4 * self.objects as usize + TAG_BYTES * index as usize
    }
}

/// Returns the tenant and the key of an encrypted block's header page; `None` for plaintext, and for a damaged page.
pub fn key_of(page: &[u8]) -> Option<(Option<TenantName>, KeyId)> {
    let is_encrypted = page.len() == HEADER_BYTES && page[KIND_AT] == AES_256_GCM_KIND;
    (is_encrypted && intact(page).is_some()).then(|| (tenant_at(page), KeyId(bytes_at(page, KEY_ID_AT))))
}

/// Whether the readable fields of a header page name the expected block. Without the key, the checksum that the journal
/// recorded cannot be compared.
pub fn names_block(page: &[u8], expected: &ExpectedHeader) -> bool {
    let found = read_header(page);
    found.is_ok_and(|(header, _)| (header.key, header.generation) == (expected.key, expected.generation))
}

/// Returns the tenant of a header page.
pub fn tenant_of(page: &[u8]) -> Option<TenantName> {
    tenant_at(page)
}

impl BlockCipher {
    /// Starts to encrypt a block: writes salt and id of the key into the page that [`super::encode_header`] built.
    /// `salt` must be random. Returns `None` if the layout has too many objects.
    pub fn for_block(
        page: &mut [u8],
        layout: &Layout,
        key: &TenantKey,
        salt: &[u8; SALT_BYTES],
    ) -> Option<BlockCipher> {
        let groups = Groups::of(layout)?;
        put(page, SALT_AT, salt);
        put(page, KEY_ID_AT, &key.id.0);
        page[KIND_AT] = AES_256_GCM_KIND;
        Some(BlockCipher { key: key.derive(page), groups })
    }

    /// Returns the groups of the block.
    pub fn groups(&self) -> Groups {
        self.groups
    }

    /// Encrypts the objects of a group in place and returns their tag.
    pub fn seal_group(&self, group: u32, bytes: &mut [u8]) -> [u8; TAG_BYTES] {
        self.seal(group + 1, &[], bytes)
    }

    /// Decrypts the objects of a group in place; `false`, with undefined contents, if they do not match their tag.
    #[must_use]
    pub fn open_group(&self, group: u32, tag: &[u8; TAG_BYTES], bytes: &mut [u8]) -> bool {
        self.open(group + 1, &[], tag, bytes)
    }

    /// Encrypts checksums and content id of the page, and writes the tags of all groups, in order.
    ///
    /// # Panics
    /// If the number of tags is not that of the groups.
    pub fn seal_header(&self, page: &mut [u8], tags: &[[u8; TAG_BYTES]]) {
        assert_eq!(tags.len(), self.groups.count() as usize, "one tag for each group");
        let mut secret = self.secret_of(page);
        let tag = self.seal(HEADER_NONCE, &public_of(page), &mut secret);
        self.put_secret(page, &secret);
        put(page, self.groups.tag_at(0), &tag);
        for (index, tag) in (1..).zip(tags) {
            put(page, self.groups.tag_at(index), tag);
        }
        seal(page);
    }

    /// Returns the bytes of a page that are encrypted: content id and checksums.
    fn secret_of(&self, page: &[u8]) -> Vec<u8> {
        let checksums = &page[CHECKSUMS_AT..self.groups.tag_at(0)];
        [&page[CONTENT_AT..CONTENT_AT + CONTENT_BYTES], checksums].concat()
    }

    fn put_secret(&self, page: &mut [u8], secret: &[u8]) {
        let (content, checksums) = secret.split_at(CONTENT_BYTES);
        put(page, CONTENT_AT, content);
        put(page, CHECKSUMS_AT, checksums);
    }

    fn seal(&self, nonce: u32, public: &[u8], bytes: &mut [u8]) -> [u8; TAG_BYTES] {
        let sealed = self.key.seal_in_place_separate_tag(nonce_of(nonce), Aad::from(public), bytes);
        let tag = sealed.expect("a block is shorter than the limit of AES-GCM");
        tag.as_ref().try_into().expect("a tag has 16 bytes")
    }

    fn open(&self, nonce: u32, public: &[u8], tag: &[u8; TAG_BYTES], bytes: &mut [u8]) -> bool {
        let opened = self.key.open_in_place_separate_tag(
            nonce_of(nonce),
            Aad::from(public),
            Tag::from(*tag),
            bytes,
            0..,
        );
        opened.is_ok()
    }
}

impl fmt::Debug for BlockCipher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockCipher").field("groups", &self.groups).finish_non_exhaustive()
    }
}

/// Decrypts a header page and restores the page that [`super::encode_header`] built. Returns the cipher of the block's
/// objects, and their tags.
///
/// # Errors
/// The page is damaged, or was not encrypted with this key.
pub fn open_header(page: &mut [u8], key: &TenantKey) -> Result<(BlockCipher, GroupTags), HeaderError> {
    if intact(page).is_none() {
        return Err(HeaderError::Damaged);
    }
    let layout = Layout::decode(&bytes_at(page, LAYOUT_AT)).ok_or(HeaderError::Field("layout"))?;
    let groups = Groups::of(&layout).ok_or(HeaderError::Field("number of objects of an encrypted block"))?;
    let cipher = BlockCipher { key: key.derive(page), groups };
    let mut secret = cipher.secret_of(page);
    let tag = bytes_at(page, groups.tag_at(0));
    if !cipher.open(HEADER_NONCE, &public_of(page), &tag, &mut secret) {
        return Err(HeaderError::Field("tag"));
    }
    let tags = (1..=groups.count()).map(|index| bytes_at(page, groups.tag_at(index))).collect();
    cipher.put_secret(page, &secret);
    page[groups.tag_at(0)..groups.tag_at(groups.count() + 1)].fill(0);
    page[SALT_AT..=KIND_AT].fill(0);
    seal(page);
    Ok((cipher, tags))
}

/// Returns the readable fields of a page, which its tag covers.
fn public_of(page: &[u8]) -> Vec<u8> {
    [&page[..CONTENT_AT], &page[LAYOUT_AT..CHECKSUMS_AT]].concat()
}

fn nonce_of(index: u32) -> Nonce {
    let mut nonce = [0; 12];
    nonce[8..].copy_from_slice(&index.to_be_bytes());
    Nonce::assume_unique_for_key(nonce)
}

#[cfg(test)]
mod tests;
