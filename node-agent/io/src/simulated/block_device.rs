//! A simulated device as a [`BlockDevice`]: before an engine is started, its synchronous operations are those
//! of the engine, with latencies and faults.

use std::time::Duration;

use reprise_buffers::PageBuffer;

use crate::block_device::BlockDevice;
use crate::device::{Caching, Preallocation, Reserve};
use crate::engine::{IoEngine, Wait};
use crate::error::{IoError, IoErrorKind};
use crate::op::{Op, Submission, Token};
use crate::open::EngineSettings;
use crate::simulated::SimulatedEngine;

/// Longest wait for one operation at a time.
const REAP_WAIT: Duration = Duration::from_secs(1);

/// Size of one write of an erasure in bytes.
const ERASE_BYTES: u64 = 1 << 20;

impl SimulatedEngine {
    /// Runs one operation to completion.
    fn execute(&mut self, op: Op) -> Result<(), IoError> {
        let submitted = self.submit(Submission { token: Token(0), op });
        submitted.map_err(|_| IoError::new(IoErrorKind::Busy, "the simulated engine is not idle"))?;
        let mut completed = Vec::with_capacity(1);
        while completed.is_empty() {
            self.reap(Wait::Until(REAP_WAIT), &mut completed)?;
        }
        completed.pop().expect("the loop ended").result
    }

    fn write_zeroes(&mut self, range: std::ops::Range<u64>) -> Result<(), IoError> {
        let no_memory = |_| IoError::new(IoErrorKind::Busy, "erasing the simulated device");
        let mut offset = range.start;
        while offset < range.end {
            let bytes = (range.end - offset).min(ERASE_BYTES);
            let mut zeroes = PageBuffer::new(bytes as usize).map_err(no_memory)?;
            self.execute(Op::Write { offset, from: vec![zeroes.span()] })?;
            offset += bytes;
        }
        Ok(())
    }
}

impl BlockDevice for SimulatedEngine {
    fn size(&self) -> u64 {
        self.device_bytes()
    }

    fn caching(&self) -> Caching {
        Caching::Direct
    }

    fn read(&mut self, offset: u64, into: &mut PageBuffer) -> Result<(), IoError> {
        self.execute(Op::Read { offset, into: vec![into.span()] })
    }

    fn sync(&mut self) -> Result<(), IoError> {
        self.execute(Op::Sync)
    }

    fn preallocate(&mut self, bytes: u64, _reserve: Reserve) -> Result<Preallocation, IoError> {
        let size = BlockDevice::size(self);
        if size >= bytes {
            return Ok(Preallocation::Device);
        }
        let text = format!("pool of {bytes} bytes on a simulated device of {size} bytes");
        Err(IoError::new(IoErrorKind::NoSpace, text))
    }

    fn erase(&mut self) -> Result<(), IoError> {
        self.write_zeroes(0..BlockDevice::size(self))?;
        BlockDevice::sync(self)
    }

    fn erase_ends(&mut self, bytes: u64) -> Result<(), IoError> {
        let size = BlockDevice::size(self);
        let first = bytes.min(size);
        self.write_zeroes(0..first)?;
        self.write_zeroes(size.saturating_sub(bytes).max(first)..size)?;
        BlockDevice::sync(self)
    }

    fn discard(self: Box<Self>) {}

    /// Returns itself: it serves operations from the beginning. The settings of [`SimulatedSettings`] apply.
    ///
    /// [`SimulatedSettings`]: crate::simulated::SimulatedSettings
    fn start_engine(self: Box<Self>, _settings: &EngineSettings) -> Result<Box<dyn IoEngine>, IoError> {
        Ok(self)
    }
}
