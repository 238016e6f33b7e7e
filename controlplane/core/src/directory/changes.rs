//! Changes of one node in wire format: validated once, applied without copying.

use std::ops::Range;

use reprise_policy::{BlockKey, Tier};

/// Bit of an operation byte that marks a withdrawal.
const WITHDRAWN: u8 = 0x80;

/// Consecutive changes: parallel arrays of packed keys (16 bytes each) and operations (one byte each: the
/// tier, plus 0x80 for a withdrawal). All operations are valid.
#[derive(Clone, Copy, Debug)]
pub struct Changes<'a> {
    keys: &'a [[u8; BlockKey::SIZE]],
    operations: &'a [u8],
}

/// Reasons to reject changes. Messages state the expected format.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidChanges {
    /// The length is not a multiple of the key size.
    #[error("invalid keys: {bytes} bytes, expected a multiple of 16")]
    TruncatedKeys {
        /// Number of bytes received.
        bytes: usize,
    },
    /// The numbers of keys and operations differ.
    #[error("{keys} keys with {operations} operations: expected one operation byte for each key")]
    CountMismatch {
        /// Number of keys received.
        keys: usize,
        /// Number of operations received.
        operations: usize,
    },
    /// An operation byte is unknown.
    #[error(
        "invalid operation {operation:#04x} at index {index}: expected tier 1 (DRAM) or 2 (NVMe), plus 0x80 to withdraw"
    )]
    UnknownOperation {
        /// Index of the change.
        index: usize,
        /// Value of the byte.
        operation: u8,
    },
}

/// A change of a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// The replica is present.
    Announce(Tier),
    /// The replica is no longer present.
    Withdraw(Tier),
}

impl<'a> Changes<'a> {
    /// Validates packed keys and their operations.
    pub fn parse(keys: &'a [u8], operations: &'a [u8]) -> Result<Changes<'a>, InvalidChanges> {
        let (whole, rest) = keys.as_chunks::<{ BlockKey::SIZE }>();
        if !rest.is_empty() {
            return Err(InvalidChanges::TruncatedKeys { bytes: keys.len() });
        }
        if whole.len() != operations.len() {
            return Err(InvalidChanges::CountMismatch { keys: whole.len(), operations: operations.len() });
        }
        match operations.iter().position(|operation| Operation::from_wire(*operation).is_none()) {
            Some(index) => Err(InvalidChanges::UnknownOperation { index, operation: operations[index] }),
            None => Ok(Changes { keys: whole, operations }),
        }
    }

    /// Number of changes in this batch.
    pub fn len(&self) -> usize {
        self.operations.len()
    }

    /// Whether there are no changes.
    pub fn is_empty(&self) -> bool {
        self.operations.is_empty()
    }

    /// The changes in a range of indices. Panics if it exceeds [`Changes::len`].
    pub fn range(&self, range: Range<usize>) -> Changes<'a> {
        Changes { keys: &self.keys[range.clone()], operations: &self.operations[range] }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (BlockKey, Operation)> + use<'a> {
        self.keys.iter().zip(self.operations).map(|(key, operation)| {
            (BlockKey(*key), Operation::from_wire(*operation).expect("checked when the changes were parsed"))
        })
    }
}

impl Operation {
    /// Decodes an operation byte.
    pub fn from_wire(operation: u8) -> Option<Operation> {
        let tier = Tier::from_wire(operation & !WITHDRAWN)?;
        Some(if operation & WITHDRAWN == 0 { Operation::Announce(tier) } else { Operation::Withdraw(tier) })
    }

    /// Encodes the operation as a byte.
    pub fn wire(self) -> u8 {
        match self {
            Operation::Announce(tier) => tier as u8,
            Operation::Withdraw(tier) => tier as u8 | WITHDRAWN,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejects_invalid_operation_bytes_and_reports_their_index() {
        for byte in 0..=u8::MAX {
            let operations = [1, byte];
            let parsed = Changes::parse(&[0; 32], &operations);
            if [1, 2, 0x81, 0x82].contains(&byte) {
                assert_eq!(parsed.expect("an operation").len(), 2);
                assert_eq!(Operation::from_wire(byte).map(Operation::wire), Some(byte));
            } else {
                let refused = parsed.expect_err("an invalid operation");
                assert_eq!(refused, InvalidChanges::UnknownOperation { index: 1, operation: byte });
                assert!(refused.to_string().contains("index 1"), "{refused}");
            }
        }
    }

    #[test]
    fn rejects_truncated_keys_and_arrays_of_different_lengths() {
        assert_eq!(Changes::parse(&[0; 17], &[1]).err(), Some(InvalidChanges::TruncatedKeys { bytes: 17 }));
        assert_eq!(
            Changes::parse(&[0; 32], &[1]).err(),
            Some(InvalidChanges::CountMismatch { keys: 2, operations: 1 })
        );
        assert!(Changes::parse(&[], &[]).expect("no changes are valid").is_empty());
    }
}
