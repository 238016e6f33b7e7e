//! Damages a pool file. Offsets are those of `docs/FORMAT.md`.
//!
//! Agents read with direct I/O. Writes here go through the page cache and are synced, so a running agent sees
//! them with its next read.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crc_fast::{CrcAlgorithm, checksum};
use reprise_policy::{BlockKey, Layout};

/// Unit of all structures on a device.
pub const PAGE: u64 = 4096;

/// Offset of a page's checksum: its last 4 bytes.
const CHECKSUM_AT: usize = 4092;

/// First bytes of both copies of the superblock.
pub const SUPERBLOCK: &[u8] = b"REPRISE\0";

/// First bytes of a journal bank's header.
pub const BANK_HEADER: &[u8] = b"RPRBANK\0";

/// First bytes of a page of a journal's log.
pub const LOG_PAGE: &[u8] = b"RPLG";

/// First bytes of a slot's header page.
pub const SLOT_HEADER: &[u8] = b"RPRSLOT\0";

/// Offset of the format version in a superblock.
const VERSION_AT: usize = 8;

/// Offset of the key in a slot's header page.
const KEY_AT: usize = 32;

/// A pool file, open for reading and writing.
#[derive(Debug)]
pub struct PoolFile {
    file: File,
    bytes: u64,
}

impl PoolFile {
    /// Opens the file of a pool.
    pub fn open(path: &Path) -> PoolFile {
        let file = File::options().read(true).write(true).open(path).expect("the pool exists");
        let bytes = file.metadata().expect("a file has a size").len();
        PoolFile { file, bytes }
    }

    /// Returns the size of the file.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the offsets of the pages that begin with these bytes, in ascending order.
    pub fn pages_beginning(&self, with: &[u8]) -> Vec<u64> {
        let mut run = vec![0; 256 * PAGE as usize];
        let mut found = Vec::new();
        let mut offset = 0;
        while offset < self.bytes {
            let length = (self.bytes - offset).min(run.len() as u64);
            let read = &mut run[..usize::try_from(length).expect("a run is small")];
            self.file.read_exact_at(read, offset).expect("the file can be read");
            let pages = read.chunks_exact(PAGE as usize).zip((offset..).step_by(PAGE as usize));
            found.extend(pages.filter(|(page, _)| page.starts_with(with)).map(|(_, at)| at));
            offset += length;
        }
        found
    }

    /// Returns the offsets of a block's header pages; the payload begins one page later. Freed slots keep
    /// their bytes, so a key that was stored more than once has several.
    pub fn headers_of(&self, key: &BlockKey) -> Vec<u64> {
        let of_key = |offset: &u64| self.read(offset + KEY_AT as u64, key.0.len()) == key.0;
        self.pages_beginning(SLOT_HEADER).into_iter().filter(of_key).collect()
    }

    /// Flips one bit of the byte at `offset`.
    pub fn flip(&self, offset: u64, bit: u8) {
        let mut byte = self.read(offset, 1);
        byte[0] ^= 1 << bit;
        self.write(offset, &byte);
    }

    /// Flips a bit of an object of a block, in every slot that has ever stored the block.
    pub fn flip_object(&self, key: &BlockKey, layout: &Layout, object: u32) {
        let headers = self.headers_of(key);
        assert!(!headers.is_empty(), "the block is on the device");
        for header in headers {
            self.flip(header + PAGE + u64::from(object) * layout.object_bytes() + 77, 3);
        }
    }

    /// Changes the format version of the superblock at `offset`, and fixes its checksum.
    pub fn forge_version(&self, offset: u64, version: u32) {
        let mut page = self.read(offset, PAGE as usize);
        page[VERSION_AT..VERSION_AT + 4].copy_from_slice(&version.to_le_bytes());
        self.write(offset, &page);
        self.seal(offset);
    }

    /// Fixes the checksum of the page at `offset`.
    pub fn seal(&self, offset: u64) {
        let page = self.read(offset, PAGE as usize);
        let crc = checksum(CrcAlgorithm::Crc32Iscsi, &page[..CHECKSUM_AT]);
        let crc = u32::try_from(crc).expect("a checksum of 32 bits");
        self.write(offset + CHECKSUM_AT as u64, &crc.to_le_bytes());
    }

    /// Reads `length` bytes at `offset`.
    pub fn read(&self, offset: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.file.read_exact_at(&mut bytes, offset).expect("the file can be read");
        bytes
    }

    /// Writes bytes and syncs them to the disk.
    pub fn write(&self, offset: u64, bytes: &[u8]) {
        self.file.write_all_at(bytes, offset).expect("the file can be written");
        self.file.sync_data().expect("the file can be synced");
    }
}
