//! Controller properties in BAR 0 (Base 2.0, 3.1.3) and doorbells (PCIe Transport 1.0, 3.1.2).

use std::fmt;
use std::time::Duration;

/// Offsets of properties in bytes.
pub mod offset {
    /// Controller Capabilities, 8 bytes (3.1.3.1).
    pub const CAP: usize = 0x00;
    /// Version of the specification (3.1.3.2).
    pub const VS: usize = 0x08;
    /// Interrupt Mask Set (3.1.3.3).
    pub const INTMS: usize = 0x0c;
    /// CC, Controller Configuration (3.1.3.5).
    pub const CC: usize = 0x14;
    /// CSTS, Controller Status (3.1.3.6).
    pub const CSTS: usize = 0x1c;
    /// Admin Queue Attributes (3.1.3.8).
    pub const AQA: usize = 0x24;
    /// Admin Submission Queue Base Address, 8 bytes (3.1.3.9).
    pub const ASQ: usize = 0x28;
    /// Admin Completion Queue Base Address, 8 bytes (3.1.3.10).
    pub const ACQ: usize = 0x30;
    /// CMBLOC, Controller Memory Buffer Location (3.1.3.11).
    pub const CMBLOC: usize = 0x38;
    /// CMBSZ, Controller Memory Buffer Size (3.1.3.12).
    pub const CMBSZ: usize = 0x3c;
    /// CMBMSC, Controller Memory Buffer Memory Space Control, 8 bytes (3.1.3.16).
    pub const CMBMSC: usize = 0x50;
    /// First doorbell (PCIe Transport 1.0, 3.1.2).
    pub const DOORBELLS: usize = 0x1000;

    /// Submission Queue y Tail Doorbell (PCIe Transport 1.0, 3.1.2.1). `stride` is in bytes.
    pub const fn sq_tail(queue: u16, stride: usize) -> usize {
        DOORBELLS + 2 * queue as usize * stride
    }

    /// Completion Queue y Head Doorbell (PCIe Transport 1.0, 3.1.2.2). `stride` is in bytes.
    pub const fn cq_head(queue: u16, stride: usize) -> usize {
        DOORBELLS + (2 * queue as usize + 1) * stride
    }
}

/// CAP, Controller Capabilities (3.1.3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities(pub u64);

impl Capabilities {
    /// Returns the maximum number of entries of an I/O queue: MQES plus one, 2 to 65,536.
    pub fn entries_max(self) -> u32 {
        (self.0 & 0xffff) as u32 + 1
    }

    /// Reports whether the queues must be physically contiguous: CQR.
    pub fn contiguous_queues(self) -> bool {
        self.0 >> 16 & 1 == 1
    }

    /// Returns the maximum time of a change of `CSTS.RDY`: TO, and one unit more, since TO may be 0.
    pub fn ready_timeout(self) -> Duration {
        Duration::from_millis(((self.0 >> 24 & 0xff) + 1) * 500)
    }

    /// Returns the distance of two doorbells in bytes: DSTRD.
    pub fn doorbell_stride(self) -> usize {
        4 << (self.0 >> 32 & 0xf)
    }

    /// Reports whether the controller has the NVM Command Set: CSS bit 0.
    pub fn has_nvm_commands(self) -> bool {
        self.0 >> 37 & 1 == 1
    }

    /// Reports whether the controller has a memory buffer with a configurable address: CMBS.
    pub fn has_memory_buffer(self) -> bool {
        self.0 >> 57 & 1 == 1
    }

    /// Reports whether the controller accepts memory pages of 4 KiB: MPSMIN is 0.
    pub fn has_small_pages(self) -> bool {
        self.0 >> 48 & 0xf == 0
    }
}

/// CMBLOC and CMBSZ: place, size and purposes of the controller memory buffer (3.1.3.11, 3.1.3.12).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryBufferProperties {
    /// BAR that contains the buffer: BIR.
    pub bar: u8,
    /// Offset in the BAR in bytes: OFST, in units of SZU.
    pub offset: u64,
    /// Size in bytes: SZ, in units of SZU. 0 without a buffer.
    pub bytes: u64,
    /// Submission queues may be in the buffer: SQS.
    pub submissions: bool,
    /// Completion queues may be in the buffer: CQS.
    pub completions: bool,
    /// PRP lists and SGL segments may be in the buffer: LISTS.
    pub lists: bool,
    /// Data of commands may be read into the buffer and written from it: RDS and WDS.
    pub data: bool,
}

impl MemoryBufferProperties {
    /// Decodes the values of both registers.
    pub fn decode(location: u32, size: u32) -> MemoryBufferProperties {
        // SZU: 4 KiB · 16ⁿ. Values above 6 are reserved; they give a size that no BAR has.
        let unit = 1_u64 << (12 + 4 * (size >> 8 & 0xf)).min(63);
        let has = |bit: u32| size >> bit & 1 == 1;
        MemoryBufferProperties {
            bar: (location & 7) as u8,
            offset: u64::from(location >> 12).saturating_mul(unit),
            bytes: u64::from(size >> 12).saturating_mul(unit),
            submissions: has(0),
            completions: has(1),
            lists: has(2),
            data: has(3) && has(4),
        }
    }
}

/// CMBMSC: whether the buffer's registers have values (CRE), and the address that selects it (CMSE, CBA).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryBufferControl {
    /// CMBLOC and CMBSZ have values.
    pub registers: bool,
    /// Address at which the controller finds the buffer, a multiple of 4,096; `None` if at none.
    pub address: Option<u64>,
}

impl MemoryBufferControl {
    /// Returns the value of the register.
    pub fn encode(self) -> u64 {
        self.address.unwrap_or(0) & !0xfff
            | u64::from(self.address.is_some()) << 1
            | u64::from(self.registers)
    }
}

/// VS, version of the specification (3.1.3.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u32);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.0 >> 16, self.0 >> 8 & 0xff, self.0 & 0xff)
    }
}

/// Request for a shutdown: `CC.SHN` (3.1.3.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shutdown {
    /// No shutdown.
    None = 0,
    /// The controller writes its caches before.
    Normal = 1,
}

/// Controller Configuration (3.1.3.5), with the NVM Command Set, pages of 4 KiB and round-robin arbitration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Configuration {
    /// The controller processes commands.
    pub enable: bool,
    /// Request for a shutdown.
    pub shutdown: Shutdown,
}

impl Configuration {
    /// Returns the value of the register, with entries of 2⁶ and 2⁴ bytes (IOSQES, IOCQES).
    pub fn encode(self) -> u32 {
        4 << 20 | 6 << 16 | (self.shutdown as u32) << 14 | u32::from(self.enable)
    }

    /// Returns whether a value of the register enables the controller.
    pub fn is_enabled(value: u32) -> bool {
        value & 1 == 1
    }

    /// Returns whether a value of the register requests a shutdown.
    pub fn wants_shutdown(value: u32) -> bool {
        value >> 14 & 3 != 0
    }
}

/// Progress of a shutdown: `CSTS.SHST` (3.1.3.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShutdownStatus {
    /// No shutdown was requested.
    None,
    /// The shutdown continues.
    Running,
    /// The shutdown has ended.
    Complete,
}

/// CSTS, Controller Status (3.1.3.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControllerStatus(pub u32);

impl ControllerStatus {
    /// Reports whether the controller processes commands: RDY.
    pub fn is_ready(self) -> bool {
        self.0 & 1 == 1
    }

    /// Reports whether the controller has failed and needs a reset: CFS.
    pub fn is_fatal(self) -> bool {
        self.0 >> 1 & 1 == 1
    }

    /// Returns the progress of a shutdown.
    pub fn shutdown(self) -> ShutdownStatus {
        match self.0 >> 2 & 3 {
            0 => ShutdownStatus::None,
            1 => ShutdownStatus::Running,
            _ => ShutdownStatus::Complete,
        }
    }

    /// Reports whether the function no longer answers: reads of a removed PCI function return all ones.
    pub fn is_gone(self) -> bool {
        self.0 == u32::MAX
    }
}

/// Admin Queue Attributes (3.1.3.8): the number of entries of both queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdminQueueSizes {
    /// Entries of the submission queue, 2 to 4,096.
    pub submission: u16,
    /// Entries of the completion queue, 2 to 4,096.
    pub completion: u16,
}

impl AdminQueueSizes {
    /// Returns the value of the register.
    pub fn encode(self) -> u32 {
        u32::from(self.completion - 1) << 16 | u32::from(self.submission - 1)
    }

    /// Decodes a value of the register.
    pub fn decode(value: u32) -> AdminQueueSizes {
        let entries = |bits: u32| (bits & 0xfff) as u16 + 1;
        AdminQueueSizes { submission: entries(value), completion: entries(value >> 16) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decodes_the_capabilities_of_a_known_controller() {
        // CAP of QEMU 7.2's controller with a controller memory buffer.
        let capabilities = Capabilities(0x0240_1820_0f01_07ff);
        assert_eq!(capabilities.entries_max(), 2048);
        assert!(capabilities.contiguous_queues());
        assert_eq!(capabilities.ready_timeout(), Duration::from_millis(8_000));
        assert_eq!(capabilities.doorbell_stride(), 4);
        assert!(capabilities.has_nvm_commands() && capabilities.has_small_pages());
    }

    #[test]
    fn decodes_the_memory_buffer_of_a_known_controller() {
        assert!(Capabilities(0x0240_1820_0f01_07ff).has_memory_buffer());
        // QEMU 7.2 with a buffer of 16 MiB.
        let buffer = MemoryBufferProperties::decode(0x62, 0x1021d);
        let expected = MemoryBufferProperties {
            bar: 2,
            offset: 0,
            bytes: 16 << 20,
            submissions: true,
            completions: false,
            lists: true,
            data: true,
        };
        assert_eq!(buffer, expected);
        let control = MemoryBufferControl { registers: true, address: Some(0x12_3456_7000) };
        assert_eq!(control.encode(), 0x12_3456_7003);
        assert_eq!(MemoryBufferControl { registers: false, address: None }.encode(), 0);
    }

    #[test]
    fn doorbells_alternate_by_queue() {
        assert_eq!(offset::sq_tail(0, 4), 0x1000);
        assert_eq!(offset::cq_head(0, 4), 0x1004);
        assert_eq!(offset::sq_tail(3, 8), 0x1000 + 6 * 8);
    }

    #[test]
    fn sizes_of_the_admin_queues_survive_the_register() {
        let sizes = AdminQueueSizes { submission: 32, completion: 4096 };
        assert_eq!(sizes.encode(), 4095 << 16 | 31);
        assert_eq!(AdminQueueSizes::decode(sizes.encode()), sizes);
    }

    #[test]
    fn a_configuration_enables_and_shuts_down() {
        let enabled = Configuration { enable: true, shutdown: Shutdown::None }.encode();
        assert_eq!(enabled, 0x0046_0001);
        assert!(Configuration::is_enabled(enabled) && !Configuration::wants_shutdown(enabled));
        let ending = Configuration { enable: true, shutdown: Shutdown::Normal }.encode();
        assert!(Configuration::wants_shutdown(ending));
    }
}
