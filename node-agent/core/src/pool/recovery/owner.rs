//! Whose a device is, by its first bytes and as opening it would say, without opening it.

use super::super::error::PoolError;
use super::super::geometry::{SEGMENT_ALIGNMENT, SUPERBLOCK_OFFSETS};
use super::super::page::{PAGE, is_blank};
use super::super::superblock::Superblock;
use super::check_blankness;
use super::opening::{Identity, foreign_data, identify};

/// Bytes at the beginning of a device that say whose it is.
pub const OWNER_BYTES: usize = SEGMENT_ALIGNMENT as usize;

/// The pool that a device belongs to; `None` when nothing was ever written, or an unfinished pool. `start`: the first
/// [`OWNER_BYTES`], or all that a smaller device has.
///
/// # Errors
/// There is something else, or a pool that cannot be opened.
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
