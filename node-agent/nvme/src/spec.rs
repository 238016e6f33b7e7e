//! Structures and constants of the NVM Express specifications: Base 2.0, PCIe Transport 1.0, NVM Command Set 1.0.
//!
//! No I/O. Multi-byte fields are little-endian. Each item names its section.

mod command;
mod completion;
mod data_pointer;
mod identify;
mod registers;

pub use command::{
    ABORT, ASYNC_EVENT_REQUEST, CREATE_CQ, CREATE_SQ, Command, DELETE_CQ, DELETE_SQ, FEATURE_QUEUES, FLUSH,
    GET_LOG_PAGE, IDENTIFY, NSID_ALL, READ, SET_FEATURES, WRITE, WRITE_ZEROES,
};
pub use completion::{Completion, Status};
pub use data_pointer::{DataPointer, PRP_LIST_ENTRIES, SglDescriptor, SglKind};
pub use identify::{ControllerIdentity, LbaFormat, NamespaceIdentity, NamespaceList, cns};
pub use registers::{
    AdminQueueSizes, Capabilities, Configuration, ControllerStatus, MemoryBufferControl,
    MemoryBufferProperties, Shutdown, ShutdownStatus, Version, offset,
};

/// Size of a submission queue entry in bytes (Base 2.0, 3.3.3.1).
pub const SQE_BYTES: usize = 64;
/// Size of a completion queue entry in bytes (Base 2.0, 3.3.3.2).
pub const CQE_BYTES: usize = 16;
/// Size of a memory page of the controller that this crate uses: `CC.MPS` 0 (Base 2.0, 3.1.3.5).
pub const PAGE_BYTES: usize = 4096;
/// Size of the data of Identify (Base 2.0, 5.17).
pub const IDENTIFY_BYTES: usize = 4096;
/// Size of the SMART / Health Information log page (Base 2.0, 5.16.1.3).
pub const HEALTH_BYTES: usize = 512;
/// Log page identifier of SMART / Health Information (Base 2.0, 5.16.1).
pub const HEALTH_LOG: u32 = 0x02;

/// Reads a little-endian integer of a structure.
macro_rules! le {
    ($bytes:expr, $offset:expr, $kind:ty) => {{
        const N: usize = size_of::<$kind>();
        let mut field = [0_u8; N];
        field.copy_from_slice(&$bytes[$offset..$offset + N]);
        <$kind>::from_le_bytes(field)
    }};
}
pub(crate) use le;
