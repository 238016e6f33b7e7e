//! Submission queue entries (Base 2.0, 3.3.3.1) and the commands that this crate uses.

use super::{DataPointer, SQE_BYTES, SglDescriptor};

/// Delete I/O Submission Queue (Base 2.0, 5.7).
pub const DELETE_SQ: u8 = 0x00;
/// Create I/O Submission Queue (Base 2.0, 5.5).
pub const CREATE_SQ: u8 = 0x01;
/// Get Log Page (Base 2.0, 5.16).
pub const GET_LOG_PAGE: u8 = 0x02;
/// Delete I/O Completion Queue (Base 2.0, 5.6).
pub const DELETE_CQ: u8 = 0x04;
/// Create I/O Completion Queue (Base 2.0, 5.4).
pub const CREATE_CQ: u8 = 0x05;
/// Identify (Base 2.0, 5.17).
pub const IDENTIFY: u8 = 0x06;
/// Abort (Base 2.0, 5.1).
pub const ABORT: u8 = 0x08;
/// Set Features (Base 2.0, 5.27).
pub const SET_FEATURES: u8 = 0x09;
/// Asynchronous Event Request (Base 2.0, 5.2).
pub const ASYNC_EVENT_REQUEST: u8 = 0x0c;

/// Flush, an I/O command (Base 2.0, 7.1).
pub const FLUSH: u8 = 0x00;
/// Write, an I/O command (NVM Command Set 1.0, 3.2.6).
pub const WRITE: u8 = 0x01;
/// Read, an I/O command (NVM Command Set 1.0, 3.2.4).
pub const READ: u8 = 0x02;

/// Write Zeroes, an I/O command (NVM Command Set 1.0, 3.2.8).
pub const WRITE_ZEROES: u8 = 0x08;

/// Feature identifier: Number of Queues (Base 2.0, 5.27.1.5).
pub const FEATURE_QUEUES: u32 = 0x07;
/// Selects all namespaces (Base 2.0, 3.2.1.2).
pub const NSID_ALL: u32 = u32::MAX;

/// A submission queue entry. Its identifier is chosen when it is queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Command {
    /// Operation code.
    pub opcode: u8,
    /// Namespace; 0 if the command does not use one.
    pub namespace: u32,
    /// Memory of the data.
    pub data: DataPointer,
    /// Command dwords 10 to 15.
    pub dwords: [u32; 6],
}

impl Command {
    /// Creates a command without data and with dwords that are 0.
    pub fn new(opcode: u8) -> Command {
        Command { opcode, namespace: 0, data: DataPointer::NONE, dwords: [0; 6] }
    }

    /// Returns the command with this data.
    pub fn with_data(self, data: DataPointer) -> Command {
        Command { data, ..self }
    }

    /// Identify of a structure (CNS) of a namespace.
    pub fn identify(structure: u8, namespace: u32) -> Command {
        Command { namespace, dwords: [u32::from(structure), 0, 0, 0, 0, 0], ..Command::new(IDENTIFY) }
    }

    /// Get Log Page of the whole controller. `bytes` is a multiple of 4.
    pub fn log_page(page: u32, bytes: usize) -> Command {
        let dwords = (bytes / 4 - 1) as u32;
        let dwords = [(dwords & 0xffff) << 16 | page, dwords >> 16, 0, 0, 0, 0];
        Command { namespace: NSID_ALL, dwords, ..Command::new(GET_LOG_PAGE) }
    }

    /// Set Features: requests I/O queues of both kinds.
    pub fn request_queues(pairs: u16) -> Command {
        let count = u32::from(pairs - 1);
        Command { dwords: [FEATURE_QUEUES, count << 16 | count, 0, 0, 0, 0], ..Command::new(SET_FEATURES) }
    }

    /// Creates a completion queue without interrupts at a contiguous address.
    pub fn create_cq(id: u16, entries: u32, address: u64) -> Command {
        let dwords = [(entries - 1) << 16 | u32::from(id), 1, 0, 0, 0, 0];
        Command { dwords, ..Command::new(CREATE_CQ) }.with_data(DataPointer::prp(address, 0))
    }

    /// Creates a submission queue that completes to the completion queue with the same number.
    pub fn create_sq(id: u16, entries: u32, address: u64) -> Command {
        let dwords = [(entries - 1) << 16 | u32::from(id), u32::from(id) << 16 | 1, 0, 0, 0, 0];
        Command { dwords, ..Command::new(CREATE_SQ) }.with_data(DataPointer::prp(address, 0))
    }

    /// Deletes a queue: [`DELETE_SQ`] or [`DELETE_CQ`].
    pub fn delete_queue(opcode: u8, id: u16) -> Command {
        Command { dwords: [u32::from(id), 0, 0, 0, 0, 0], ..Command::new(opcode) }
    }

    /// Aborts a command of a submission queue.
    pub fn abort(queue: u16, id: u16) -> Command {
        Command { dwords: [u32::from(id) << 16 | u32::from(queue), 0, 0, 0, 0, 0], ..Command::new(ABORT) }
    }

    /// Flush of a namespace.
    pub fn flush(namespace: u32) -> Command {
        Command { namespace, ..Command::new(FLUSH) }
    }

    /// [`READ`], [`WRITE`] or [`WRITE_ZEROES`] of 1 to 65,536 logical blocks.
    pub fn transfer(opcode: u8, namespace: u32, lba: u64, blocks: u32) -> Command {
        let dwords = [lba as u32, (lba >> 32) as u32, (blocks - 1) & 0xffff, 0, 0, 0];
        Command { namespace, dwords, ..Command::new(opcode) }
    }

    /// Returns the first logical block of a transfer.
    pub fn lba(&self) -> u64 {
        u64::from(self.dwords[0]) | u64::from(self.dwords[1]) << 32
    }

    /// Returns the number of logical blocks of a transfer.
    pub fn blocks(&self) -> u32 {
        (self.dwords[2] & 0xffff) + 1
    }

    /// Encodes the entry as 8 words.
    pub fn encode(&self, id: u16) -> [u64; SQE_BYTES / 8] {
        let dword = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let [psdt, first, second] = match self.data {
            DataPointer::Prp { first, second } => [0, first, second],
            // PSDT 01b: an SGL for the data, and no metadata.
            DataPointer::Sgl(descriptor) => [1, descriptor.words()[0], descriptor.words()[1]],
        };
        let start = u32::from(self.opcode) | (psdt as u32) << 14 | u32::from(id) << 16;
        let [d10, d11, d12, d13, d14, d15] = self.dwords;
        [dword(start, self.namespace), 0, 0, first, second, dword(d10, d11), dword(d12, d13), dword(d14, d15)]
    }

    /// Decodes an entry; returns its identifier too.
    pub fn decode(words: [u64; SQE_BYTES / 8]) -> (u16, Command) {
        let [start, _, _, first, second, d10, d12, d14] = words;
        let data = match start >> 14 & 3 {
            0 => DataPointer::Prp { first, second },
            _ => DataPointer::Sgl(SglDescriptor::of_words([first, second])),
        };
        let low = |word: u64| word as u32;
        let high = |word: u64| (word >> 32) as u32;
        let dwords = [low(d10), high(d10), low(d12), high(d12), low(d14), high(d14)];
        ((start >> 16) as u16, Command { opcode: start as u8, namespace: high(start), data, dwords })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{SglKind, le};

    fn bytes(words: [u64; 8]) -> [u8; SQE_BYTES] {
        let mut all = [0; SQE_BYTES];
        for (place, word) in all.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        all
    }

    #[test]
    fn every_command_survives_its_encoding() {
        let sgl = SglDescriptor { address: 0x1234_5000, bytes: 8192, kind: SglKind::DataBlock };
        let all = [
            Command::identify(1, 7),
            Command::log_page(2, 512),
            Command::request_queues(64),
            Command::create_cq(3, 1024, 0xabc000),
            Command::create_sq(3, 1024, 0xdef000),
            Command::delete_queue(DELETE_SQ, 3),
            Command::abort(3, 77),
            Command::flush(1),
            Command::transfer(READ, 1, 0x1_0000_0002, 65_536).with_data(DataPointer::Sgl(sgl)),
            Command::transfer(WRITE, 1, 5, 1).with_data(DataPointer::prp(0x1000, 0x2000)),
        ];
        for command in all {
            assert_eq!(Command::decode(command.encode(0xbeef)), (0xbeef, command));
        }
    }

    #[test]
    fn fields_lie_where_the_specification_puts_them() {
        let entry = bytes(Command::transfer(READ, 9, 0x1_0000_0002, 8).encode(5));
        assert_eq!(entry[0], READ);
        assert_eq!(le!(entry, 2, u16), 5, "command identifier");
        assert_eq!(le!(entry, 4, u32), 9, "namespace");
        assert_eq!(le!(entry, 40, u64), 0x1_0000_0002, "starting LBA");
        assert_eq!(le!(entry, 48, u16), 7, "number of blocks, from zero");
        let entry = bytes(Command::create_sq(2, 1024, 0x5000).encode(0));
        assert_eq!(le!(entry, 24, u64), 0x5000);
        assert_eq!(le!(entry, 40, u32), 1023 << 16 | 2);
        assert_eq!(le!(entry, 44, u32), 2 << 16 | 1, "completion queue, physically contiguous");
    }
}
