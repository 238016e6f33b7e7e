//! The end of a device: everything under way fails, and whatever still comes is answered with an error.
//!
//! The engine is closed first, so that no slot of the arena is touched after its block is reported. An engine that cannot
//! end its operations (a driver that holds them for longer than the drain's limit) says so; the slots of blocks with reads
//! in flight are then reported as stranded, and the core never uses them again. Memory that such an engine only reads
//! from (writes of blocks and of the journal) may be used again: what it still writes lands on a device that is lost, in
//! places that its journal does not name.

use reprise_agent_core::event::{FillError, FillUpdate};
use reprise_agent_core::pool::DeviceError;
use reprise_io::Closed;

use super::{InFlight, Purpose, Surroundings, Work, Worker};
use crate::core_loop::DeviceReport;
use crate::device::Command;

/// Answers for a device that is gone.
pub(super) struct LostDevice {
    around: Surroundings,
    report: DeviceReport,
}

impl Worker {
    /// Everything under way and in the queue fails. `None`: the device is closed because nobody wants it any more.
    pub(super) fn lose(self, reason: Option<String>) -> LostDevice {
        let Worker { around, engine, mut queue, mut reads, mut in_flight, completed, mut report, .. } = self;
        let closed = engine.close();
        if closed == Closed::Leaked {
            tracing::warn!(path = %around.path, "a lost device may still write to memory; the arena slots that it was reading into are not used again");
        }
        let under_way = in_flight.iter_mut().filter_map(Option::take).map(|InFlight { purpose, .. }| purpose);
        let mut lost = |token| report.done.push((token, Err(DeviceError::Lost)));
        for done in completed {
            match done.purpose {
                Purpose::Write { token, .. } | Purpose::Sync { token } => lost(token),
                // It has ended: the device has let go of its memory.
                Purpose::Piece { piece, .. } => reads.finish(piece, Err(FillError::Device), None),
            }
        }
        for purpose in under_way {
            match purpose {
                Purpose::Write { token, .. } | Purpose::Sync { token } => lost(token),
                Purpose::Piece { .. } => {}
            }
        }
        while let Some(work) = queue.pop(around.clock.now()) {
            match work {
                Work::Write { token, .. } | Work::Sync { token } => lost(token),
                Work::Piece => {}
            }
        }
        reads.fail_all(closed);
        reads.take_updates(&mut report.fills);
        report.lost = reason;
        around.metrics.queue(&Default::default());
        around.send(&mut report);
        LostDevice { around, report }
    }
}

impl LostDevice {
    pub(super) fn run(mut self) {
        while let Ok(command) = self.around.commands.recv() {
            match command {
                Command::Op(op) => self.report.done.push((op.token, Err(DeviceError::Lost))),
                Command::Read(batch) => {
                    let failed = |fill| (fill, FillUpdate::Failed(FillError::Device));
                    self.report.fills.extend(batch.blocks.iter().map(|block| failed(block.fill)));
                }
                Command::Close => {}
                Command::Stop => return,
            }
            self.around.send(&mut self.report);
        }
    }
}
