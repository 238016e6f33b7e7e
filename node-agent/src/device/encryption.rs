//! Encrypts blocks on their way to a device, and decrypts groups of objects that were read (ADR 19).
//!
//! Blocks are in memory that engines map, which may change at any time. So objects are encrypted and decrypted in private
//! memory: a write in a buffer of the block's size, a read in one of a group's size, which is copied back.

use reprise_agent_core::event::FillError;
use reprise_agent_core::pool::header::encryption::{
    self, BlockCipher, GroupTags, Groups, SALT_BYTES, TAG_BYTES, TenantKey, key_of, names_block, open_header,
};
use reprise_agent_core::pool::header::{ExpectedHeader, read_header};
use reprise_buffers::{PageBuffer, Span, crc32c};
use reprise_policy::{Layout, TenantName};
use ring::rand::{SecureRandom as _, SystemRandom};

use super::pieces::PieceMap;
use crate::encryption::EncryptionKeys;

/// Unused buffers that are kept: as many blocks of 2 MiB as may be in flight.
const SPARE_BUFFERS_MAX: usize = 4;

/// A block that cannot be written, because it must be encrypted and cannot be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum EncryptError {
    /// The tenant must have a key and has none.
    #[error("its tenant must be encrypted and has no key")]
    NoKey,
    /// The header page has no room for tags.
    #[error("its layout has too many objects to be encrypted")]
    TooManyObjects,
    /// A client has written the payload.
    #[error("a client has written it in plaintext, and its tenant has a key since then")]
    Plaintext,
    /// Header and slot do not match, or no memory is left.
    #[error("{0}")]
    Refused(&'static str),
}

/// How a block is written.
#[derive(Clone, Debug)]
pub(super) enum WriteForm {
    /// As it is in memory.
    Plain,
    /// Encrypted with this key.
    Encrypted { layout: Layout, key: TenantKey },
}

/// Encrypts the writes of a device.
#[derive(Debug, Default)]
pub(super) struct Encryptor {
    spare: Vec<PageBuffer>,
}

/// Decrypts the groups of one block.
#[derive(Debug)]
pub(super) struct Decryptor {
    cipher: BlockCipher,
    tags: GroupTags,
}

/// Returns how the block with this header page is written.
///
/// # Errors
/// [`EncryptError::NoKey`], [`EncryptError::TooManyObjects`].
pub(super) fn form_of(header: &[u8], keys: &EncryptionKeys) -> Result<WriteForm, EncryptError> {
    let Some(keys) = keys.of(&owner(encryption::tenant_of(header))) else { return Ok(WriteForm::Plain) };
    let key = keys.first().cloned().ok_or(EncryptError::NoKey)?;
    let (header, _) = read_header(header).map_err(|_| EncryptError::Refused("invalid header page"))?;
    Groups::of(&header.layout).ok_or(EncryptError::TooManyObjects)?;
    Ok(WriteForm::Encrypted { layout: header.layout, key })
}

/// Tenant of a header page. Only pages of the default tenant have no name.
fn owner(tenant: Option<TenantName>) -> TenantName {
    tenant.unwrap_or_else(TenantName::default_tenant)
}

impl Encryptor {
    /// Encrypts the payload of a block into a buffer, and its header page in place.
    ///
    /// # Errors
    /// [`EncryptError`].
    pub(super) fn encrypt(
        &mut self,
        header: &mut [u8],
        payload: &Span,
        (layout, key): (&Layout, &TenantKey),
    ) -> Result<PageBuffer, EncryptError> {
        let bytes = payload.len();
        let spare = self.spare.iter().position(|buffer| buffer.len() == bytes);
        let mut buffer = match spare {
            Some(at) => self.spare.swap_remove(at),
            None => PageBuffer::new(bytes).map_err(|_| EncryptError::Refused("no memory for a block"))?,
        };
        let mut salt = [0; SALT_BYTES];
        SystemRandom::new().fill(&mut salt).map_err(|_| EncryptError::Refused("no random numbers"))?;
        let cipher =
            BlockCipher::for_block(header, layout, key, &salt).ok_or(EncryptError::TooManyObjects)?;
        let of_objects = usize::try_from(layout.block_bytes()).expect("a block is at most 128 MiB");
        let Some((objects, padding)) = buffer.split_at_mut_checked(of_objects) else {
            return Err(EncryptError::Refused("invalid size of a slot"));
        };
        // The slot may have been another block's, whose bytes are not encrypted here.
        padding.fill(0);
        let group_bytes = group_bytes(layout, cipher.groups());
        let mut tags: Vec<[u8; TAG_BYTES]> = Vec::with_capacity(cipher.groups().count() as usize);
        // Copied group by group, so that its bytes are in the processor's cache when they are encrypted.
        for (group, bytes) in (0..).zip(objects.chunks_mut(group_bytes)) {
            let plaintext = payload.slice(group as usize * group_bytes, bytes.len());
            plaintext.map_err(|_| EncryptError::Refused("invalid size of a slot"))?.copy_out(bytes);
            tags.push(cipher.seal_group(group, bytes));
        }
        cipher.seal_header(header, &tags);
        Ok(buffer)
    }

    /// Takes back the buffer of a completed write.
    pub(super) fn put(&mut self, buffer: PageBuffer) {
        if buffer.is_lent() {
            return;
        }
        // The oldest one may have the size of a layout that is no longer written.
        if self.spare.len() == SPARE_BUFFERS_MAX {
            self.spare.remove(0);
        }
        self.spare.push(buffer);
    }
}

impl Decryptor {
    /// Restores the header page of an encrypted block; `None` for a block that is not encrypted.
    ///
    /// # Errors
    /// `Absent`: the key is gone. `Corrupt`: the page was changed, or is another block's.
    pub(super) fn of_page(
        page: &mut [u8],
        expected: &ExpectedHeader,
        keys: &EncryptionKeys,
    ) -> Result<Option<Decryptor>, FillError> {
        // A damaged page may name any key. The caller finds the damage.
        let Some((tenant, id)) = key_of(page) else { return Ok(None) };
        if !names_block(page, expected) {
            return Err(FillError::Corrupt);
        }
        let key = keys.of(&owner(tenant)).and_then(|keys| keys.iter().find(|key| key.id() == id).cloned());
        let (cipher, tags) =
            open_header(page, &key.ok_or(FillError::Absent)?).map_err(|_| FillError::Corrupt)?;
        Ok(Some(Decryptor { cipher, tags }))
    }

    /// Decrypts the objects of a piece in a slot; `false` if one does not match its tag, or its checksum. Both are verified
    /// in private memory, which is in the processor's cache.
    pub(super) fn open_piece(
        &self,
        slot: &Span,
        (pieces, piece): (&PieceMap, u32),
        checksums: &[u32],
    ) -> bool {
        let (groups, layout) = (self.cipher.groups(), pieces.layout());
        let objects = pieces.objects(piece);
        let range = objects.start / groups.per_group()..objects.end.div_ceil(groups.per_group());
        let group_bytes = group_bytes(layout, groups);
        let object_bytes = usize::try_from(layout.object_bytes()).expect("a block is at most 128 MiB");
        let of_objects = usize::try_from(layout.block_bytes()).expect("a block is at most 128 MiB");
        let mut private = vec![0; group_bytes.min(of_objects)];
        range.into_iter().all(|group| {
            let start = group as usize * group_bytes;
            let private = &mut private[..group_bytes.min(of_objects - start)];
            let Ok(shared) = slot.slice(start, private.len()) else { return false };
            shared.copy_out(private);
            let first = (group * groups.per_group()) as usize;
            self.cipher.open_group(group, &self.tags[group as usize], private)
                && private
                    .chunks(object_bytes)
                    .zip(&checksums[first..])
                    .all(|(object, checksum)| crc32c(object) == *checksum)
                && shared.copy_in(private).is_ok()
        })
    }
}

/// Returns the bytes of a group.
fn group_bytes(layout: &Layout, groups: Groups) -> usize {
    let bytes = layout.object_bytes() * u64::from(groups.per_group());
    usize::try_from(bytes.min(layout.block_bytes())).expect("a block is at most 128 MiB")
}
