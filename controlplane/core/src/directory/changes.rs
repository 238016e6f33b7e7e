//! One node's changes as they come off the wire, checked once and then applied without a copy.

use std::ops::Range;

use reprise_policy::{BlockKey, Tier};

/// Bit of an operation byte that withdraws the replica.
const WITHDRAWN: u8 = 0x80;

/// A run of changes, in order: parallel arrays of packed keys (16 bytes each) and operations (one byte each: tier,
/// with 0x80 when withdrawn). Every operation in it is one.
#[derive(Clone, Copy, Debug)]
pub struct Changes<'a> {
    keys: &'a [[u8; BlockKey::SIZE]],
    operations: &'a [u8],
}

/// Why bytes are no changes. Texts say what to send instead.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadChanges {
    /// The keys do not come out even.
    #[error("{bytes} bytes of keys are no whole number of 16-byte keys")]
    TornKeys {
        /// Bytes received.
        bytes: usize,
    },
    /// Keys and operations differ in number.
    #[error("{keys} keys with {operations} operations: send one operation byte for each key")]
    Uneven {
        /// Keys received.
        keys: usize,
        /// Operations received.
        operations: usize,
    },
    /// An operation is none.
    #[error(
        "operation {operation:#04x} at index {index}: send tier 1 (DRAM) or 2 (NVMe), with 0x80 added to withdraw"
    )]
    UnknownOperation {
        /// Which change.
        index: usize,
        /// Its byte.
        operation: u8,
    },
}

/// What happens to a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// It is there.
    Announce(Tier),
    /// It is not there any more.
    Withdraw(Tier),
}

impl<'a> Changes<'a> {
    /// Checks packed keys and their operations.
    pub fn parse(keys: &'a [u8], operations: &'a [u8]) -> Result<Changes<'a>, BadChanges> {
        let (whole, rest) = keys.as_chunks::<{ BlockKey::SIZE }>();
        if !rest.is_empty() {
            return Err(BadChanges::TornKeys { bytes: keys.len() });
        }
        if whole.len() != operations.len() {
            return Err(BadChanges::Uneven { keys: whole.len(), operations: operations.len() });
        }
        match operations.iter().position(|operation| Operation::from_wire(*operation).is_none()) {
            Some(index) => Err(BadChanges::UnknownOperation { index, operation: operations[index] }),
            None => Ok(Changes { keys: whole, operations }),
        }
    }

    /// Number of changes.
    pub fn len(&self) -> usize {
        self.operations.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.operations.is_empty()
    }

    /// The changes of a range of indices. Panics when the range reaches beyond [`Changes::len`].
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
    /// The operation of a byte, if it is one.
    pub fn from_wire(operation: u8) -> Option<Operation> {
        let tier = Tier::from_wire(operation & !WITHDRAWN)?;
        Some(if operation & WITHDRAWN == 0 { Operation::Announce(tier) } else { Operation::Withdraw(tier) })
    }

    /// Its byte.
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
    fn every_byte_that_is_no_operation_is_refused_with_its_place() {
        for byte in 0..=u8::MAX {
            let operations = [1, byte];
            let parsed = Changes::parse(&[0; 32], &operations);
            if [1, 2, 0x81, 0x82].contains(&byte) {
                assert_eq!(parsed.expect("an operation").len(), 2);
                assert_eq!(Operation::from_wire(byte).map(Operation::wire), Some(byte));
            } else {
                let refused = parsed.expect_err("no operation");
                assert_eq!(refused, BadChanges::UnknownOperation { index: 1, operation: byte });
                assert!(refused.to_string().contains("index 1"), "{refused}");
            }
        }
    }

    #[test]
    fn torn_keys_and_uneven_arrays_are_refused() {
        assert_eq!(Changes::parse(&[0; 17], &[1]).err(), Some(BadChanges::TornKeys { bytes: 17 }));
        assert_eq!(Changes::parse(&[0; 32], &[1]).err(), Some(BadChanges::Uneven { keys: 2, operations: 1 }));
        assert!(Changes::parse(&[], &[]).expect("nothing is something").is_empty());
    }
}
