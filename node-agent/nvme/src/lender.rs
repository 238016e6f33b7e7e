//! Queue pairs that another process drives.
//!
//! The lender creates them in a file that the other process maps, next to a file with doorbells. That process submits
//! commands without a system call. It must be trusted with the whole namespace: a controller does not restrict what a
//! queue reads and writes.
//!
//! Doorbells are the registers of the controller where these are a file of their own (the emulated controller). Else they
//! are words in memory, which the relay's thread forwards: see [`DoorbellKind`].
//!
//! Order of an end: [`QueueLender::delete`] for each queue pair, then the drop of its memory and of the mappings that its
//! commands may use. If the controller does not confirm, [`QueueLender::keep`] has them until it was disabled.

use std::any::Any;
use std::fmt;
use std::os::fd::OwnedFd;

use reprise_buffers::{BufferError, MappedRegion, Span};

use crate::backing::{Backing, DmaMapping};
use crate::controller::QueueAddresses;
use crate::data::DataFormat;
use crate::error::NvmeError;
use crate::relay::{COMPLETION_AT, LINE_BYTES, RelayedQueue};
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

/// How doorbells of another process reach the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DoorbellKind {
    /// The process stores to the registers.
    Registers,
    /// The process stores to memory, and a thread of this process to the registers.
    Relayed,
}

impl fmt::Display for DoorbellKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DoorbellKind::Registers => "registers",
            DoorbellKind::Relayed => "relayed",
        })
    }
}

/// Doorbells that one other process maps, for up to 64 queue pairs.
#[derive(Debug)]
pub struct LentDoorbells {
    file: OwnedFd,
    bytes: u64,
    place: DoorbellPlace,
}

#[derive(Debug)]
enum DoorbellPlace {
    /// Offset of register 0 in the file.
    Registers(u64),
    /// The file in this process, and the number of its lines in use.
    Relayed(MappedRegion, usize),
}

impl LentDoorbells {
    /// Returns doorbells in a file of registers, whose register 0 lies at an offset.
    pub fn of_registers(file: OwnedFd, bytes: u64, offset: u64) -> LentDoorbells {
        LentDoorbells { file, bytes, place: DoorbellPlace::Registers(offset) }
    }

    /// Allocates words for a relay: a page.
    fn relayed() -> Result<LentDoorbells, NvmeError> {
        let (memory, file) = MappedRegion::allocate(PAGE_BYTES as u64)?;
        Ok(LentDoorbells { file, bytes: memory.bytes(), place: DoorbellPlace::Relayed(memory, 0) })
    }

    /// Returns how they reach the controller.
    pub fn kind(&self) -> DoorbellKind {
        match self.place {
            DoorbellPlace::Registers(_) => DoorbellKind::Registers,
            DoorbellPlace::Relayed(..) => DoorbellKind::Relayed,
        }
    }

    /// Returns the size of the file in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the file for the other process.
    pub fn into_file(self) -> OwnedFd {
        self.file
    }

    /// Returns the offsets of a queue pair's doorbells in the file, submission queue first, and the line of a relay.
    fn take(&mut self, registers: [usize; 2]) -> Result<([u64; 2], Option<Span>), NvmeError> {
        match &mut self.place {
            DoorbellPlace::Registers(offset) => Ok((registers.map(|at| *offset + at as u64), None)),
            DoorbellPlace::Relayed(memory, lines) => {
                let at = (*lines * LINE_BYTES) as u64;
                let full =
                    |_| NvmeError::Invalid(format!("{lines} queue pairs are the maximum of one grant"));
                let line = memory.span(at, LINE_BYTES as u64).map_err(full)?;
                *lines += 1;
                Ok(([at, at + COMPLETION_AT as u64], Some(line)))
            }
        }
    }
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
    /// Offset of the submission queue's doorbell in the file of doorbells.
    pub submission_doorbell: u64,
    /// Offset of the completion queue's doorbell in the file of doorbells.
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

    /// Returns doorbells for the queue pairs of one other process.
    ///
    /// # Errors
    /// `Memory` with the missing resource.
    fn lend_doorbells(&self) -> Result<LentDoorbells, NvmeError>;

    /// Makes memory of another process accessible for the controller.
    ///
    /// # Errors
    /// `Unsupported`, `Function` with the remedy, or `Memory` with the missing resource.
    fn map_lent(&self, memory: &Span) -> Result<DmaMapping, NvmeError>;

    /// Creates a queue pair with `entries` entries, 2 to [`LentDevice::entries_max`], and with doorbells of the process.
    ///
    /// # Errors
    /// `NoQueue` if the controller has no further queue pair; `Memory`, `Invalid`, `Closed`, or the admin queue fails.
    fn lend(&self, entries: u32, doorbells: &mut LentDoorbells) -> Result<LentQueue, NvmeError>;

    /// Ends the effect of relayed doorbells of queue pairs before it returns. Deletions may take long, or be left out
    /// after one that the controller does not confirm.
    fn silence(&self, queues: &[u16]);

    /// Deletes a queue pair. Its doorbells have no effect afterwards. Its commands no longer access memory, and write
    /// nothing to the device. For a closed device it returns `Ok`, because its controller was disabled.
    ///
    /// # Errors
    /// The controller does not confirm: its commands may still run.
    fn delete(&self, queue: u16) -> Result<(), NvmeError>;

    /// Keeps memory and mappings of queue pairs whose deletion the controller has not confirmed. They are dropped when
    /// the controller was disabled, or at once if it was.
    fn keep(&self, memory: Box<dyn Any + Send>);
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

    fn lend_doorbells(&self) -> Result<LentDoorbells, NvmeError> {
        let Some(registers) = self.backing().register_file() else { return LentDoorbells::relayed() };
        let failed = |source| BufferError::System { what: "duplicate a descriptor".into(), source };
        let file = registers.file.try_clone_to_owned().map_err(|error| NvmeError::Memory(failed(error)))?;
        let (bytes, offset) = (registers.offset + registers.bytes as u64, registers.offset);
        Ok(LentDoorbells::of_registers(file, bytes, offset))
    }

    fn map_lent(&self, memory: &Span) -> Result<DmaMapping, NvmeError> {
        self.backing().map(memory)
    }

    fn lend(&self, entries: u32, doorbells: &mut LentDoorbells) -> Result<LentQueue, NvmeError> {
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
        let queue = match self.with(|controller| controller.create_raw_queue_pair(entries, addresses)) {
            Ok(queue) => queue,
            Err(error) => {
                // The controller may have created it, and writes completions there.
                if matches!(error, NvmeError::Timeout { .. } | NvmeError::Fatal | NvmeError::Violation(_)) {
                    self.keep(Box::new((mapping, memory)));
                }
                return Err(error);
            }
        };
        let id = queue.id();
        let registers = [queue.submission_doorbell(), queue.completion_doorbell()];
        self.lent().insert(id, queue);
        let relayed = doorbells.take(registers).and_then(|(at, line)| {
            if let Some(line) = line {
                self.relay(RelayedQueue { id, entries, line, registers })?;
            }
            Ok(at)
        });
        let [submission_doorbell, completion_doorbell] = match relayed {
            Ok(at) => at,
            Err(error) => {
                if self.delete(id).is_err() {
                    self.keep(Box::new((mapping, memory)));
                }
                return Err(error);
            }
        };
        Ok(LentQueue {
            id,
            entries,
            file,
            bytes,
            completions_at,
            lists_at,
            submission_doorbell,
            completion_doorbell,
            mapping,
            memory,
        })
    }

    fn silence(&self, queues: &[u16]) {
        queues.iter().for_each(|queue| self.end_relay(*queue));
    }

    fn delete(&self, queue: u16) -> Result<(), NvmeError> {
        let lent = self.lent().remove(&queue);
        let lent = lent.ok_or_else(|| NvmeError::Invalid(format!("queue pair {queue} is not lent")))?;
        self.end_relay(queue);
        match self.with(|controller| controller.delete_raw_queue_pair(lent)) {
            Err(NvmeError::Closed) => Ok(()),
            deleted => deleted,
        }
    }

    fn keep(&self, memory: Box<dyn Any + Send>) {
        self.keep_until_disabled(memory);
    }
}
