//! How a command names the memory of its data: PRP (Base 2.0, 4.1.1) or SGL (Base 2.0, 4.1.2).

use super::PAGE_BYTES;

/// Number of entries of a page of a PRP list.
pub const PRP_LIST_ENTRIES: usize = PAGE_BYTES / 8;

/// Data pointer of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataPointer {
    /// Two addresses: the second one is of the second page, or of a list of all further pages.
    Prp {
        /// Address of the first byte; a multiple of 4.
        first: u64,
        /// 0, the address of the second page, or that of a list.
        second: u64,
    },
    /// A descriptor: the data block itself, or a segment of further descriptors.
    Sgl(SglDescriptor),
}

impl DataPointer {
    /// A command without data.
    pub const NONE: DataPointer = DataPointer::Prp { first: 0, second: 0 };

    /// Creates a PRP pair.
    pub fn prp(first: u64, second: u64) -> DataPointer {
        DataPointer::Prp { first, second }
    }
}

/// Type of an SGL descriptor (4.1.2.1): bits 4 to 7 of its last byte; the sub type is "address".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SglKind {
    /// Data.
    DataBlock,
    /// Descriptors, the last one of which is a segment.
    Segment,
    /// Descriptors of data only.
    LastSegment,
    /// A type that this crate does not use.
    Other(u8),
}

/// An SGL descriptor: 16 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SglDescriptor {
    /// Address of the first byte.
    pub address: u64,
    /// Length in bytes.
    pub bytes: u32,
    /// What lies there.
    pub kind: SglKind,
}

impl SglDescriptor {
    /// Size of a descriptor.
    pub const BYTES: usize = 16;

    /// Creates a descriptor of data.
    pub fn data(address: u64, bytes: u32) -> SglDescriptor {
        SglDescriptor { address, bytes, kind: SglKind::DataBlock }
    }

    /// Encodes the descriptor as two words.
    pub fn words(self) -> [u64; 2] {
        let kind = match self.kind {
            SglKind::DataBlock => 0x0,
            SglKind::Segment => 0x2,
            SglKind::LastSegment => 0x3,
            SglKind::Other(kind) => u64::from(kind & 0xf),
        };
        [self.address, kind << 60 | u64::from(self.bytes)]
    }

    /// Decodes a descriptor from two words.
    pub fn of_words(words: [u64; 2]) -> SglDescriptor {
        let kind = match (words[1] >> 60, words[1] >> 56 & 0xf) {
            (0x0, 0) => SglKind::DataBlock,
            (0x2, 0) => SglKind::Segment,
            (0x3, 0) => SglKind::LastSegment,
            (kind, _) => SglKind::Other(kind as u8),
        };
        SglDescriptor { address: words[0], bytes: words[1] as u32, kind }
    }
}

const _: () = assert!(size_of::<[u64; 2]>() == SglDescriptor::BYTES);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_survive_their_encoding() {
        for kind in [SglKind::DataBlock, SglKind::Segment, SglKind::LastSegment, SglKind::Other(5)] {
            let descriptor = SglDescriptor { address: 0x1_2345_6000, bytes: u32::MAX, kind };
            assert_eq!(SglDescriptor::of_words(descriptor.words()), descriptor);
        }
        assert_eq!(SglDescriptor::data(0, 1).words()[1] >> 56, 0x00);
        let last = SglDescriptor { address: 0, bytes: 32, kind: SglKind::LastSegment };
        assert_eq!(last.words()[1].to_le_bytes()[7], 0x30, "type 3h, sub type 0h");
    }

    #[test]
    fn a_sub_type_other_than_address_is_not_taken_for_data() {
        let kind = SglDescriptor::of_words([0, 0x01 << 56]).kind;
        assert_eq!(kind, SglKind::Other(0));
    }
}
