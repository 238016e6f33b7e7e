//! Names of the ways that blocks take between the memory of an engine and the devices of its node.

use std::fmt;

/// What moves the blocks of a session's extents, as the session states it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum TransferBackend {
    /// A GPU drives NVMe queue pairs.
    GpuQueue = 1,
    /// A GPU or threads in its place drive queue pairs of a controller that the agent emulates.
    GpuQueueEmulated = 2,
    /// Threads in place of the GPU drive queue pairs of a real controller.
    GpuQueueHost = 3,
    /// cuFile moves data between devices and GPU memory.
    Gds = 4,
    /// io_uring, then copy engine and kernels of the GPU.
    Staged = 5,
    /// io_uring, then the host build of the kernels.
    StagedHost = 6,
    /// Copies by the CPU out of slots of the arena.
    Host = 7,
}

impl TransferBackend {
    /// All backends, in the order of their numbers.
    pub const ALL: [TransferBackend; 7] = [
        TransferBackend::GpuQueue,
        TransferBackend::GpuQueueEmulated,
        TransferBackend::GpuQueueHost,
        TransferBackend::Gds,
        TransferBackend::Staged,
        TransferBackend::StagedHost,
        TransferBackend::Host,
    ];

    /// Returns the name for logs, metrics and results; it states an emulation.
    pub fn name(self) -> &'static str {
        match self {
            TransferBackend::GpuQueue => "gpu-queue",
            TransferBackend::GpuQueueEmulated => "gpu-queue-emulated",
            TransferBackend::GpuQueueHost => "gpu-queue-host",
            TransferBackend::Gds => "gds",
            TransferBackend::Staged => "staged",
            TransferBackend::StagedHost => "staged-host",
            TransferBackend::Host => "host",
        }
    }

    /// Returns the number in messages of the session protocol.
    pub fn number(self) -> u8 {
        self as u8
    }

    /// Returns the backend with a number; `None` for an unknown number.
    pub fn from_number(number: u8) -> Option<TransferBackend> {
        TransferBackend::ALL.into_iter().find(|backend| backend.number() == number)
    }
}

impl fmt::Display for TransferBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_names_identify_a_backend() {
        for (index, backend) in TransferBackend::ALL.into_iter().enumerate() {
            assert_eq!(usize::from(backend.number()), index + 1);
            assert_eq!(TransferBackend::from_number(backend.number()), Some(backend));
            let same = TransferBackend::ALL.into_iter().filter(|other| other.name() == backend.name());
            assert_eq!(same.count(), 1, "{backend}");
        }
        assert_eq!(TransferBackend::from_number(0), None);
        assert_eq!(TransferBackend::from_number(8), None);
    }
}
