//! A lost or closed device: everything in flight fails, and later commands complete with errors.
//!
//! The engine is closed first, so that no arena slot is accessed after its block was reported. An engine
//! that cannot complete its operations (a driver holds them longer than the drain limit) reports that.
//! Slots of blocks with reads in flight are then reported as stranded, and the core never reuses them.
//! Memory that the engine only reads from (writes of blocks and of the journal) may be reused: late writes
//! go to a lost device, in places that its journal does not reference.

use reprise_agent_core::event::{FillError, FillUpdate};
use reprise_agent_core::pool::DeviceError;
use reprise_io::CloseOutcome;

use super::{InFlight, Purpose, Work, Worker, WorkerContext};
use crate::core_loop::DeviceReport;
use crate::device::Command;

/// Completes commands of a lost or closed device.
pub(super) struct LostDevice {
    context: WorkerContext,
    report: DeviceReport,
}

impl Worker {
    /// Fails everything in flight and queued. `reason` is `None` if the device was closed because it is no
    /// longer needed.
    pub(super) fn into_lost(self, reason: Option<String>) -> LostDevice {
        let Worker { context, engine, mut queue, mut reads, mut in_flight, completed, mut report, .. } = self;
        let closed = engine.close();
        if closed == CloseOutcome::Leaked {
            tracing::warn!(path = %context.path, "a lost device may still write to memory; its arena slots are not reused");
        }
        let under_way = in_flight.iter_mut().filter_map(Option::take).map(|InFlight { purpose, .. }| purpose);
        let mut lost = |token| report.done.push((token, Err(DeviceError::Lost)));
        for done in completed {
            match done.purpose {
                Purpose::Write { token, .. } | Purpose::Sync { token } => lost(token),
                // The read has completed, so the device has released its memory.
                Purpose::Piece { class, piece, .. } => {
                    reads.of(class).reads.finish(piece, Err(FillError::Device), None);
                }
            }
        }
        for purpose in under_way {
            match purpose {
                Purpose::Write { token, .. } | Purpose::Sync { token } => lost(token),
                Purpose::Piece { .. } => {}
            }
        }
        while let Some(work) = queue.pop(context.clock.now(), |_| true) {
            match work {
                Work::Write { token, .. } | Work::Sync { token } => lost(token),
                Work::Piece(_) => {}
            }
        }
        reads.fail_all(closed);
        reads.take_updates(&mut report.fills);
        report.lost = reason;
        context.metrics.queue(&Default::default());
        context.send(&mut report);
        LostDevice { context, report }
    }
}

impl LostDevice {
    pub(super) fn run(mut self) {
        while let Ok(command) = self.context.commands.recv() {
            match command {
                // The reads fail with their batch.
                Command::Promote(_) | Command::ReleaseRegion(..) | Command::AddRegion(_) => {}
                Command::Op(op) => self.report.done.push((op.token, Err(DeviceError::Lost))),
                Command::Read(batch) => {
                    let failed = |fill| (fill, FillUpdate::Failed(FillError::Device));
                    self.report.fills.extend(batch.blocks.iter().map(|block| failed(block.fill)));
                }
                Command::Close => {}
                Command::Stop => return,
            }
            self.context.send(&mut self.report);
        }
    }
}
