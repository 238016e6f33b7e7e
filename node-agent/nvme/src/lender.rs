//! Queue pairs that another process drives.
//!
//! The lender creates them in a file that the other process maps, next to the registers. That process submits commands
//! without a system call. It must be trusted with the whole namespace: a controller does not restrict what a queue reads
//! and writes.
//!
//! Order of an end: [`QueueLender::delete`] for each queue pair, then the drop of its memory and of the mappings that its
//! commands may use.

use std::os::fd::OwnedFd;

use reprise_buffers::{BufferError, MappedRegion, Span};

use crate::backing::{Backing, DmaMapping};
use crate::controller::QueueAddresses;
use crate::data::DataFormat;
use crate::error::NvmeError;
use crate::shared::SharedController;
use crate::spec::{CQE_BYTES, PAGE_BYTES, SQE_BYTES};

/// Properties of a device that its queue pairs depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LentDevice {
    /// Bytes of a logical block.
    pub block_bytes: u32,
    /// Maximum bytes of the data of one command.
    pub transfer_max: u64,
    /// How commands describe their memory.
    pub format: DataFormat,
    /// Maximum number of entries of a queue.
    pub entries_max: u32,
}

/// Registers that another process maps.
#[derive(Debug)]
pub struct LentRegisters {
    /// The file.
    pub file: OwnedFd,
    /// Bytes of the file.
    pub bytes: u64,
    /// Offset of register 0 in the file.
    pub offset: u64,
}

/// A queue pair that another process drives. Submission queue, completion queue and a page for the list of each command
/// slot (PRP only) lie in one file.
#[derive(Debug)]
pub struct LentQueue {
    /// Number of both queues.
    pub id: u16,
    /// Entries of each queue.
    pub entries: u32,
    /// The file.
    pub file: OwnedFd,
    /// Bytes of the file.
    pub bytes: u64,
    /// Offset of the completion queue in the file.
    pub completions_at: u64,
    /// Offset of the pages for lists; the end of the file with SGLs.
    pub lists_at: u64,
    /// Offset of the submission queue's doorbell behind register 0.
    pub submission_doorbell: u64,
    /// Offset of the completion queue's doorbell behind register 0.
    pub completion_doorbell: u64,
    /// The file as the controller accesses it. Dropped after the queue pair was deleted.
    pub mapping: DmaMapping,
    /// The file in this process. Dropped after `mapping`.
    pub memory: MappedRegion,
}

/// Lends queue pairs of an open controller. Calls wait for other users of the admin queue, and for its commands:
/// microseconds, or seconds if the controller hangs.
pub trait QueueLender: Send + Sync {
    /// Returns the properties of a namespace; `None` if the controller has no such namespace.
    fn lent_device(&self, namespace: u32) -> Option<LentDevice>;

    /// Returns the registers.
    ///
    /// # Errors
    /// `Unsupported` if the registers are not in a file that another process can map.
    fn lend_registers(&self) -> Result<LentRegisters, NvmeError>;

    /// Makes memory of another process accessible for the controller.
    ///
    /// # Errors
    /// `Unsupported`, or `Memory` with the missing resource.
    fn map_lent(&self, memory: &Span) -> Result<DmaMapping, NvmeError>;

    /// Creates a queue pair with `entries` entries, 2 to [`LentDevice::entries_max`].
    ///
    /// # Errors
    /// `NoQueue` if the controller has no further queue pair; `Memory`, `Invalid`, `Closed`, or the admin queue fails.
    fn lend(&self, entries: u32) -> Result<LentQueue, NvmeError>;

    /// Deletes a queue pair. Its commands no longer access memory, and write nothing to the device. For a closed
    /// device it returns `Ok`, because its controller was disabled.
    ///
    /// # Errors
    /// The controller does not confirm: its commands may still run.
    fn delete(&self, queue: u16) -> Result<(), NvmeError>;
}

impl<B: Backing> QueueLender for SharedController<B> {
    fn lent_device(&self, namespace: u32) -> Option<LentDevice> {
        let device = self.with(|controller| {
            let found = controller.namespaces().iter().find(|one| one.id == namespace);
            Ok(found.map(|namespace| LentDevice {
                block_bytes: namespace.block_bytes,
                transfer_max: controller.transfer_max(),
                format: controller.data_format(),
                entries_max: controller.entries_max(),
            }))
        });
        device.ok().flatten()
    }

    fn lend_registers(&self) -> Result<LentRegisters, NvmeError> {
        let Some(registers) = self.backing().register_file() else {
            let text = "another process cannot map its registers; use extents of the kernel's driver";
            return Err(NvmeError::Unsupported(text.into()));
        };
        let failed = |source| BufferError::System { what: "duplicate a descriptor".into(), source };
        let file = registers.file.try_clone_to_owned().map_err(|error| NvmeError::Memory(failed(error)))?;
        let (bytes, offset) = (registers.offset + registers.bytes as u64, registers.offset);
        Ok(LentRegisters { file, bytes, offset })
    }

    fn map_lent(&self, memory: &Span) -> Result<DmaMapping, NvmeError> {
        self.backing().map(memory)
    }

    fn lend(&self, entries: u32) -> Result<LentQueue, NvmeError> {
        let most = self.with(|controller| Ok(controller.entries_max()))?;
        if !(2..=most).contains(&entries) {
            return Err(NvmeError::Invalid(format!(
                "{entries} entries of a queue pair: expected 2 to {most}"
            )));
        }
        let whole = |bytes: usize| bytes.next_multiple_of(PAGE_BYTES) as u64;
        let completions_at = whole(entries as usize * SQE_BYTES);
        let lists_at = completions_at + whole(entries as usize * CQE_BYTES);
        let lists = match self.format() {
            DataFormat::Prp => u64::from(entries - 1) * PAGE_BYTES as u64,
            DataFormat::Sgl => 0,
        };
        let bytes = lists_at + lists;
        let (memory, file) = MappedRegion::allocate(bytes)?;
        let mapping = self.backing().map(&memory.span(0, bytes)?)?;
        let submissions = mapping.address();
        let addresses = QueueAddresses { submissions, completions: submissions + completions_at };
        let queue = self.with(|controller| controller.create_raw_queue_pair(entries, addresses))?;
        let (id, doorbells) = (queue.id(), [queue.submission_doorbell(), queue.completion_doorbell()]);
        self.lent().insert(id, queue);
        Ok(LentQueue {
            id,
            entries,
            file,
            bytes,
            completions_at,
            lists_at,
            submission_doorbell: doorbells[0] as u64,
            completion_doorbell: doorbells[1] as u64,
            mapping,
            memory,
        })
    }

    fn delete(&self, queue: u16) -> Result<(), NvmeError> {
        let lent = self.lent().remove(&queue);
        let lent = lent.ok_or_else(|| NvmeError::Invalid(format!("queue pair {queue} is not lent")))?;
        match self.with(|controller| controller.delete_raw_queue_pair(lent)) {
            Err(NvmeError::Closed) => Ok(()),
            deleted => deleted,
        }
    }
}
