//! Identification of a device's pool by its first bytes, without opening it.

use super::super::error::PoolError;
use super::super::geometry::{SEGMENT_ALIGNMENT, SUPERBLOCK_OFFSETS};
use super::super::page::{PAGE, is_blank};
use super::super::superblock::Superblock;
use super::check_blankness;
use super::identity::{Identity, foreign_data, identify};

/// Bytes at the beginning of a device that identify its pool.
pub const OWNER_BYTES: usize = SEGMENT_ALIGNMENT as usize;

/// Returns the pool that a device belongs to; `None` if the device is blank or formatting it was interrupted.
/// `start` contains the first [`OWNER_BYTES`], or all bytes of a smaller device.
///
/// # Errors
/// If the device holds other data, or a pool that cannot be opened.
pub fn owner(start: &[u8]) -> Result<Option<[u8; 16]>, PoolError> {
    let page_at = |offset: u64| usize::try_from(offset).ok().and_then(|at| start.get(at..at + PAGE));
    let copies = SUPERBLOCK_OFFSETS.into_iter().filter_map(page_at).map(Superblock::decode);
    match identify(&copies.collect::<Result<Vec<_>, PoolError>>()?)? {
        Identity::Pool(superblock, _) => Ok(Some(superblock.pool_uuid)),
        Identity::Blank => {
            let mut pages = start.chunks_exact(PAGE);
            pages.try_for_each(|page| check_blankness(Some(page)))?;
            let rest = start.chunks_exact(PAGE).remainder();
            if is_blank(rest) { Ok(None) } else { Err(foreign_data(rest)) }
        }
    }
}
