//! Evaluation of superblock copies and bank headers.

use super::super::error::PoolError;
use super::super::record::Area;
use super::super::superblock::{BANK_MAGIC, BankHeader, FORMAT_VERSION, FoundSuperblock, Superblock};

/// Copy of a bank header that was read.
#[derive(Clone, Copy, Debug)]
pub(super) struct FoundHeader {
    /// Bank that it belongs to.
    pub(super) bank: usize,
    /// Fields of the header, if it is intact.
    pub(super) header: Option<BankHeader>,
    /// Whether the page was ever written.
    pub(super) trace: LogTrace,
}

/// Whether a page was ever written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LogTrace {
    /// The page has only zeros.
    Blank,
    /// The page has data, or is unreadable.
    Written,
}

/// Bank with a valid header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bank {
    /// Index of the bank.
    pub(super) index: usize,
    /// Its header.
    pub(super) header: BankHeader,
    /// Number of header copies that are damaged or of an earlier epoch.
    pub(super) copies_bad: u64,
}

/// State of the superblock copies, at least one of which is usable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SuperblockCopies {
    /// Copies to rewrite: damaged ones, and one that an interrupted growth left behind. At least one copy
    /// remains as it is, so that a power loss does not destroy both.
    pub(super) rewritten: [bool; 2],
    /// Number of damaged copies.
    pub(super) bad: u64,
    /// Number of copies with the size before an interrupted growth.
    pub(super) outdated: u64,
}

/// Result of evaluating the superblock copies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Identity {
    /// The device holds a pool.
    Pool(Superblock, SuperblockCopies),
    /// Neither copy was ever written: check whether the device holds other data.
    Blank,
}

/// Evaluates the copies of the superblock; a tiny device has only one or none.
///
/// # Errors
/// If the copies do not identify a pool of a supported version.
pub(super) fn identify(copies: &[FoundSuperblock]) -> Result<Identity, PoolError> {
    let mut valid: Option<Superblock> = None;
    let mut damaged = false;
    let mut foreign = None;
    for copy in copies {
        match copy {
            FoundSuperblock::Newer(found) => {
                return Err(PoolError::NewerVersion { found: *found, supported: FORMAT_VERSION });
            }
            FoundSuperblock::Older(found) => {
                return Err(PoolError::OlderVersion { found: *found, supported: FORMAT_VERSION });
            }
            FoundSuperblock::Valid(superblock)
                if valid.is_some_and(|other| !other.is_same_pool(superblock)) =>
            {
                let what =
                    "the copies of its superblock belong to different pools; was formatting interrupted?";
                return Err(PoolError::Corrupt { what: what.to_owned() });
            }
            // Of two sizes the larger one counts: growth was interrupted.
            FoundSuperblock::Valid(superblock) => {
                let larger = valid.filter(|other| other.geometry.segments > superblock.geometry.segments);
                valid = Some(larger.unwrap_or(*superblock));
            }
            FoundSuperblock::Damaged => damaged = true,
            FoundSuperblock::Blank => {}
            FoundSuperblock::Foreign(beginning) => foreign = foreign.or(Some(*beginning)),
        }
    }
    match (valid, foreign) {
        (Some(superblock), _) => Ok(Identity::Pool(superblock, find_repairs(copies, &superblock))),
        (None, _) if damaged => {
            Err(PoolError::Corrupt { what: "no copy of the superblock is readable".to_owned() })
        }
        (None, Some(beginning)) => Err(foreign_data(&beginning)),
        (None, None) => Ok(Identity::Blank),
    }
}

/// Determines which copies of a known superblock to rewrite.
fn find_repairs(copies: &[FoundSuperblock], current: &Superblock) -> SuperblockCopies {
    let is_bad = |copy: usize| !matches!(copies.get(copy), Some(FoundSuperblock::Valid(_)));
    let is_outdated =
        |copy: usize| matches!(&copies.get(copy), Some(FoundSuperblock::Valid(found)) if found != current);
    let (bad, outdated) = ([is_bad(0), is_bad(1)], [is_outdated(0), is_outdated(1)]);
    let count = |copies: [bool; 2]| copies.iter().filter(|copy| **copy).count() as u64;
    let rewritten = [0, 1].map(|copy| bad[copy] || outdated[copy]);
    SuperblockCopies { rewritten, bad: count(bad), outdated: count(outdated) }
}

/// Returns the error for data that does not belong to Reprise.
pub(super) fn foreign_data(beginning: &[u8]) -> PoolError {
    let shown = &beginning[..beginning.len().min(8)];
    PoolError::Foreign { beginning: format!("'{}'", shown.escape_ascii()) }
}

/// Whether a page belongs to a journal of any pool, left behind by an interrupted format.
pub(super) fn is_journal_page(page: &[u8]) -> bool {
    page.starts_with(&BANK_MAGIC)
        || page.starts_with(&Area::Checkpoint.magic())
        || page.starts_with(&Area::Log.magic())
}

/// Returns the banks with a valid header, the active one first.
///
/// # Errors
/// If no bank has one: [`PoolError::NotFormatted`] if no header was ever written, otherwise
/// [`PoolError::Corrupt`].
pub(super) fn rank_banks(found: &[FoundHeader]) -> Result<Vec<Bank>, PoolError> {
    let mut banks: Vec<Bank> = (0..2).filter_map(|index| newest_copy(index, found)).collect();
    banks.sort_by_key(|bank| std::cmp::Reverse(bank.header.incarnation.epoch));
    match banks.as_slice() {
        [] if found.iter().all(|copy| copy.trace == LogTrace::Blank) => Err(PoolError::NotFormatted),
        [] => Err(PoolError::Corrupt { what: "no header of either journal bank is readable".to_owned() }),
        [first, second] if first.header.incarnation.epoch == second.header.incarnation.epoch => {
            Err(PoolError::Corrupt { what: "both journal banks have the same epoch".to_owned() })
        }
        _ => Ok(banks),
    }
}

fn newest_copy(index: usize, found: &[FoundHeader]) -> Option<Bank> {
    let copies: Vec<Option<BankHeader>> =
        found.iter().filter(|copy| copy.bank == index).map(|copy| copy.header).collect();
    let header = copies.iter().flatten().copied().max_by_key(|header| header.incarnation.epoch)?;
    let copies_bad = copies.iter().filter(|copy| **copy != Some(header)).count() as u64;
    Some(Bank { index, header, copies_bad })
}
