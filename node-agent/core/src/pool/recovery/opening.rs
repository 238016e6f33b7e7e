//! Decisions on what the superblock and the bank headers say.

use super::super::error::PoolError;
use super::super::record::Area;
use super::super::superblock::{BANK_MAGIC, BankHeader, FORMAT_VERSION, FoundSuperblock, Superblock};

/// What a copy of a bank header was.
#[derive(Clone, Copy, Debug)]
pub(super) struct FoundHeader {
    /// The bank that it belongs to.
    pub(super) bank: usize,
    /// Its fields, if it is intact.
    pub(super) header: Option<BankHeader>,
    /// Whether there was anything at all.
    pub(super) trace: Trace,
}

/// Whether a page was ever written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Trace {
    /// All zero.
    Blank,
    /// Something, or unreadable.
    Written,
}

/// A bank with a valid header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bank {
    /// Which.
    pub(super) index: usize,
    /// Its header.
    pub(super) header: BankHeader,
    /// Copies of the header that are damaged or of an earlier epoch.
    pub(super) copies_bad: u64,
}

/// What is wrong with the copies of a superblock of which at least one is usable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Copies {
    /// Which are to be written again: those that are bad, or, when none is, one that is older. Never both that are usable,
    /// so that a power loss in that moment leaves one.
    pub(super) rewritten: [bool; 2],
    /// Those that are bad.
    pub(super) bad: u64,
    /// Those of the format before.
    pub(super) older: u64,
}

/// What the copies of the superblock come to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Identity {
    /// A pool.
    Pool(Superblock, Copies),
    /// Neither copy was ever written: look whether there is something else on the device.
    Blank,
}

/// Decides on the copies of the superblock, of which a tiny device has one or none.
///
/// # Errors
/// When there is no pool of this version that can be told from its copies.
pub(super) fn identify(copies: &[FoundSuperblock]) -> Result<Identity, PoolError> {
    let mut valid = None;
    let mut damaged = false;
    let mut foreign = None;
    for copy in copies {
        match copy {
            FoundSuperblock::Newer(found) => {
                return Err(PoolError::NewerVersion { found: *found, supported: FORMAT_VERSION });
            }
            FoundSuperblock::Valid(superblock) | FoundSuperblock::Older(superblock)
                if valid.is_some_and(|other| other != *superblock) =>
            {
                let what =
                    "the copies of its superblock name different pools; was formatting it interrupted?";
                return Err(PoolError::Corrupt { what: what.to_owned() });
            }
            FoundSuperblock::Valid(superblock) | FoundSuperblock::Older(superblock) => {
                valid = Some(*superblock);
            }
            FoundSuperblock::Damaged => damaged = true,
            FoundSuperblock::Blank => {}
            FoundSuperblock::Foreign(beginning) => foreign = foreign.or(Some(*beginning)),
        }
    }
    match (valid, foreign) {
        (Some(superblock), _) => Ok(Identity::Pool(superblock, judge(copies))),
        (None, _) if damaged => {
            Err(PoolError::Corrupt { what: "no copy of the superblock is readable".to_owned() })
        }
        (None, Some(beginning)) => Err(foreign_data(&beginning)),
        (None, None) => Ok(Identity::Blank),
    }
}

/// Which copies of a known superblock are to be written again.
fn judge(copies: &[FoundSuperblock]) -> Copies {
    let is_older = |copy: usize| matches!(copies.get(copy), Some(FoundSuperblock::Older(_)));
    let is_bad =
        |copy: usize| !is_older(copy) && !matches!(copies.get(copy), Some(FoundSuperblock::Valid(_)));
    let (bad, older) = ([is_bad(0), is_bad(1)], [is_older(0), is_older(1)]);
    let rewritten = match (bad, older) {
        ([false, false], [true, _]) => [true, false],
        ([false, false], [false, true]) => [false, true],
        _ => bad,
    };
    let count = |copies: [bool; 2]| copies.iter().filter(|copy| **copy).count() as u64;
    Copies { rewritten, bad: count(bad), older: count(older) }
}

/// The error for data that is not ours.
pub(super) fn foreign_data(beginning: &[u8]) -> PoolError {
    let shown = &beginning[..beginning.len().min(8)];
    PoolError::Foreign { beginning: format!("'{}'", shown.escape_ascii()) }
}

/// Whether a page is a trace of a format that did not reach its superblock: a page of ours, of whatever pool.
pub(super) fn is_journal_page(page: &[u8]) -> bool {
    page.starts_with(&BANK_MAGIC)
        || page.starts_with(&Area::Checkpoint.magic())
        || page.starts_with(&Area::Log.magic())
}

/// The banks that have a valid header, the active one first.
///
/// # Errors
/// When there is none: [`PoolError::NotFormatted`] if no header was ever written, else [`PoolError::Corrupt`].
pub(super) fn rank_banks(found: &[FoundHeader]) -> Result<Vec<Bank>, PoolError> {
    let mut banks: Vec<Bank> = (0..2).filter_map(|index| newest_copy(index, found)).collect();
    banks.sort_by_key(|bank| std::cmp::Reverse(bank.header.life.epoch));
    match banks.as_slice() {
        [] if found.iter().all(|copy| copy.trace == Trace::Blank) => Err(PoolError::NotFormatted),
        [] => Err(PoolError::Corrupt { what: "no header of either journal bank is readable".to_owned() }),
        [first, second] if first.header.life.epoch == second.header.life.epoch => {
            Err(PoolError::Corrupt { what: "both journal banks claim the same epoch".to_owned() })
        }
        _ => Ok(banks),
    }
}

fn newest_copy(index: usize, found: &[FoundHeader]) -> Option<Bank> {
    let copies: Vec<Option<BankHeader>> =
        found.iter().filter(|copy| copy.bank == index).map(|copy| copy.header).collect();
    let header = copies.iter().flatten().copied().max_by_key(|header| header.life.epoch)?;
    let copies_bad = copies.iter().filter(|copy| **copy != Some(header)).count() as u64;
    Some(Bank { index, header, copies_bad })
}
