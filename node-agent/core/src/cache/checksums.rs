//! Checksums of the blocks in DRAM.
//!
//! Blocks with the same number of objects share one table. A row of it contains the CRC32C of each object of
//! one block. A frame stores a 4-byte row number. A separate allocation for each block would cost a 16-byte
//! pointer and 16 to 28 bytes of the allocator, in addition to the checksums.
//!
//! ```text
//! 64 objects:   row 0 │ crc … crc │ row 1 │ crc … crc │ row 2 (free) │ …
//!  8 objects:   row 0 │ crc … crc │ …
//! ```
//!
//! A table keeps the memory of its largest population, which the arena bounds, until its last row is removed.

use std::collections::BTreeMap;

/// Row of a block in the table for its number of objects; [`ChecksumRow::UNKNOWN`] until the checksums are
/// known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ChecksumRow(u32);

/// Tables of all checksums.
#[derive(Debug, Default)]
pub(crate) struct Checksums {
    /// Tables by number of objects.
    tables: BTreeMap<usize, Table>,
}

#[derive(Debug, Default)]
struct Table {
    words: Vec<u32>,
    free: Vec<ChecksumRow>,
}

impl ChecksumRow {
    /// Row of blocks whose checksums are unknown.
    pub(crate) const UNKNOWN: ChecksumRow = ChecksumRow(u32::MAX);

    fn words(self, objects: usize) -> std::ops::Range<usize> {
        let first = self.0 as usize * objects;
        first..first + objects
    }
}

impl Checksums {
    /// Stores the checksums of a block, one for each object.
    pub(crate) fn insert(&mut self, checksums: &[u32]) -> ChecksumRow {
        let objects = checksums.len();
        assert!(objects > 0, "a block has objects");
        let table = self.tables.entry(objects).or_default();
        if let Some(row) = table.free.pop() {
            table.words[row.words(objects)].copy_from_slice(checksums);
            return row;
        }
        let row = u32::try_from(table.words.len() / objects).expect("an arena holds fewer than 2^32 slots");
        table.words.extend_from_slice(checksums);
        ChecksumRow(row)
    }

    /// Returns the checksums of a block with this number of objects.
    pub(crate) fn get(&self, row: ChecksumRow, objects: usize) -> &[u32] {
        assert!(row != ChecksumRow::UNKNOWN, "checksums are used only when they are known");
        &self.tables[&objects].words[row.words(objects)]
    }

    /// Removes the checksums of a block with this number of objects, if they are known.
    pub(crate) fn remove(&mut self, row: ChecksumRow, objects: usize) {
        if row == ChecksumRow::UNKNOWN {
            return;
        }
        let table = self.tables.get_mut(&objects).expect("a row has a table");
        table.free.push(row);
        if table.len(objects) == 0 {
            self.tables.remove(&objects);
        }
    }

    /// Number of rows in use.
    pub(crate) fn len(&self) -> usize {
        self.tables.iter().map(|(objects, table)| table.len(*objects)).sum()
    }
}

impl Table {
    fn len(&self, objects: usize) -> usize {
        self.words.len() / objects - self.free.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn returns_the_checksums_of_each_block_after_rows_were_reused() {
        let mut checksums = Checksums::default();
        let rows: Vec<_> = (0..6).map(|block| checksums.insert(&[block, block + 100, block + 200])).collect();
        let other = checksums.insert(&[7; 64]);
        checksums.remove(rows[2], 3);
        checksums.remove(rows[4], 3);
        let again = checksums.insert(&[1, 2, 3]);
        assert_eq!(again, rows[4], "a free row is used before the table grows");
        assert_eq!(checksums.get(again, 3), [1, 2, 3]);
        assert_eq!(checksums.get(rows[5], 3), [5, 105, 205]);
        assert_eq!(checksums.get(other, 64), [7; 64]);
        assert_eq!(checksums.len(), 6);
    }

    #[test]
    fn removes_table_with_its_last_row() {
        let mut checksums = Checksums::default();
        let row = checksums.insert(&[1, 2]);
        checksums.remove(row, 2);
        checksums.remove(ChecksumRow::UNKNOWN, 2);
        assert_eq!(checksums.len(), 0);
        assert!(checksums.tables.is_empty());
    }
}
