//! Offsets of a pool's blocks in its file, found by their headers (docs/FORMAT.md), for references that read
//! the same bytes. The agent has written the file in the same run, so nothing is verified.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, ensure};
use reprise_policy::BlockKey;

/// Bytes of a page: the size of a slot's header, and the unit of all structures on the device.
const PAGE_BYTES: u64 = 4096;

/// First bytes of a slot's header.
const SLOT_MAGIC: &[u8; 8] = b"RPRSLOT\0";

/// Offset of the block's key in a slot's header.
const SLOT_KEY_AT: usize = 32;

/// Fields of the superblock: bytes of a segment, byte offset of the first, number of segments.
const SEGMENT_BYTES_AT: usize = 40;
const SEGMENTS_OFFSET_AT: usize = 88;
const SEGMENTS_AT: usize = 96;

/// Returns byte offsets of the payloads of `keys`, in order, in a pool with slots of `slot_bytes` of payload.
pub fn payload_offsets(pool: &Path, slot_bytes: u64, keys: &[BlockKey]) -> anyhow::Result<Vec<u64>> {
    let found = payloads(pool, slot_bytes)?;
    let offsets: Vec<u64> = keys.iter().filter_map(|key| found.get(key).copied()).collect();
    ensure!(offsets.len() == keys.len(), "the pool has {} of {} blocks", offsets.len(), keys.len());
    Ok(offsets)
}

/// Returns byte offsets of all payloads by key, in a pool with slots of `slot_bytes` of payload.
pub fn payloads(pool: &Path, slot_bytes: u64) -> anyhow::Result<BTreeMap<BlockKey, u64>> {
    let file = File::open(pool).with_context(|| format!("opening {}", pool.display()))?;
    let mut page = [0; PAGE_BYTES as usize];
    file.read_exact_at(&mut page, 0).context("reading the superblock")?;
    let (segment_bytes, first) = (number(&page, SEGMENT_BYTES_AT), number(&page, SEGMENTS_OFFSET_AT));
    let segments = number(&page, SEGMENTS_AT) & u64::from(u32::MAX);
    let slot = PAGE_BYTES + slot_bytes;
    let mut found = BTreeMap::new();
    for segment in 0..segments {
        for header in (0..segment_bytes / slot).map(|index| first + segment * segment_bytes + index * slot) {
            file.read_exact_at(&mut page, header).context("reading a slot's header")?;
            if page.starts_with(SLOT_MAGIC) {
                let key: [u8; 16] = page[SLOT_KEY_AT..SLOT_KEY_AT + 16].try_into().expect("16 bytes");
                found.insert(BlockKey(key), header + PAGE_BYTES);
            }
        }
    }
    Ok(found)
}

fn number(page: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(page[at..at + 8].try_into().expect("8 bytes"))
}
