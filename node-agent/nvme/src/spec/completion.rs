//! Completion queue entries and status (Base 2.0, 3.3.3.2).

use std::fmt;

use super::CQE_BYTES;

/// Status field without the phase bit (Base 2.0, 3.3.3.2.1): code in bits 0 to 7, type in bits 8 to 10, "do not
/// retry" in bit 14.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Status(pub u16);

impl Status {
    /// The command has succeeded.
    pub const SUCCESS: Status = Status(0x000);
    /// Invalid Command Opcode (generic).
    pub const INVALID_OPCODE: Status = Status(0x001);
    /// Invalid Field in Command.
    pub const INVALID_FIELD: Status = Status(0x002);
    /// Data Transfer Error: the controller could not access the data or its description.
    pub const DATA_TRANSFER: Status = Status(0x004);
    /// Internal Error (generic status).
    pub const INTERNAL: Status = Status(0x006);
    /// Command Abort Requested (generic).
    pub const ABORTED: Status = Status(0x007);
    /// Command Aborted due to SQ Deletion.
    pub const QUEUE_DELETED: Status = Status(0x008);
    /// Invalid Namespace or Format.
    pub const INVALID_NAMESPACE: Status = Status(0x00b);
    /// Data SGL Length Invalid.
    pub const SGL_LENGTH: Status = Status(0x00f);
    /// SGL Descriptor Type Invalid.
    pub const SGL_TYPE: Status = Status(0x011);
    /// Namespace is Write Protected.
    pub const WRITE_PROTECTED: Status = Status(0x020);
    /// LBA Out of Range.
    pub const OUT_OF_RANGE: Status = Status(0x080);
    /// Capacity Exceeded (NVM commands).
    pub const CAPACITY: Status = Status(0x081);
    /// Invalid Queue Identifier (command specific).
    pub const INVALID_QUEUE: Status = Status(0x101);
    /// Invalid Queue Size (command specific).
    pub const INVALID_QUEUE_SIZE: Status = Status(0x102);
    /// Asynchronous Event Request Limit Exceeded (command specific).
    pub const EVENT_LIMIT: Status = Status(0x105);
    /// Write Fault (media error).
    pub const WRITE_FAULT: Status = Status(0x280);
    /// Unrecovered Read Error (media).
    pub const READ_ERROR: Status = Status(0x281);

    /// Reports whether the command has succeeded.
    pub fn is_success(self) -> bool {
        self.0 & 0x7ff == 0
    }

    /// Returns type and code, without the bits that say whether a retry may help.
    pub fn code(self) -> Status {
        Status(self.0 & 0x7ff)
    }

    /// Reports whether the error is one of media and data integrity: status code type 2.
    pub fn is_media(self) -> bool {
        self.0 >> 8 & 7 == 2
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.code() {
            Status::SUCCESS => "success",
            Status::INVALID_OPCODE => "invalid opcode",
            Status::INVALID_FIELD => "invalid field",
            Status::DATA_TRANSFER => "data transfer error",
            Status::INTERNAL => "internal error",
            Status::ABORTED => "aborted",
            Status::QUEUE_DELETED => "queue deleted",
            Status::INVALID_NAMESPACE => "invalid namespace",
            Status::SGL_LENGTH => "invalid SGL length",
            Status::SGL_TYPE => "invalid SGL descriptor",
            Status::WRITE_PROTECTED => "write protected",
            Status::OUT_OF_RANGE => "LBA out of range",
            Status::CAPACITY => "capacity exceeded",
            Status::INVALID_QUEUE => "invalid queue",
            Status::INVALID_QUEUE_SIZE => "invalid queue size",
            Status::EVENT_LIMIT => "too many event requests",
            Status::WRITE_FAULT => "write fault",
            Status::READ_ERROR => "unrecovered read error",
            _ => "error",
        };
        write!(f, "{name} (type {}, code {:#04x})", self.0 >> 8 & 7, self.0 & 0xff)
    }
}

/// A completion queue entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// Result of the command, dword 0.
    pub result: u32,
    /// Entries of the submission queue that the controller has taken.
    pub sq_head: u16,
    /// Submission queue of the command.
    pub sq_id: u16,
    /// Identifier of the command.
    pub id: u16,
    /// Status of the command.
    pub status: Status,
    /// Phase bit: it toggles with each pass of the queue.
    pub phase: bool,
}

impl Completion {
    /// Encodes the entry as 4 dwords; the last one has the phase bit and must be written last.
    pub fn encode(&self) -> [u32; CQE_BYTES / 4] {
        let status = u32::from(self.status.0) << 1 | u32::from(self.phase);
        let queue = u32::from(self.sq_id) << 16 | u32::from(self.sq_head);
        [self.result, 0, queue, status << 16 | u32::from(self.id)]
    }

    /// Decodes an entry from dwords.
    pub fn decode(dwords: [u32; CQE_BYTES / 4]) -> Completion {
        let [result, _, queue, end] = dwords;
        Completion {
            result,
            sq_head: queue as u16,
            sq_id: (queue >> 16) as u16,
            id: end as u16,
            status: Status((end >> 17) as u16),
            phase: end >> 16 & 1 == 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_survives_its_encoding() {
        for phase in [false, true] {
            let status = Status(0x4281);
            let entry = Completion { result: 7, sq_head: 3, sq_id: 2, id: 0xfffe, status, phase };
            assert_eq!(Completion::decode(entry.encode()), entry);
        }
    }

    #[test]
    fn names_status_codes_and_ignores_the_retry_bit() {
        let status = Status(0x4281);
        assert!(status.is_media() && !status.is_success());
        assert_eq!(status.to_string(), "unrecovered read error (type 2, code 0x81)");
        assert!(Status(0x4000).is_success());
    }
}
