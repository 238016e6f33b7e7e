//! The engine of a simulated device.

use std::time::Duration;

use crate::engine::{CloseOutcome, EngineKind, IoEngine, Wait};
use crate::error::{IoError, IoErrorKind};
use crate::op::{Completion, Submission};
use crate::simulated::state::{EngineSeat, Power};
use crate::simulated::{SimulatedClock, SimulatedDevice};
use crate::waker::{Doorbell, Waker};

/// Interval at which a real-clock wait checks for completions that became due otherwise (by a crash).
const CRASH_CHECK: Duration = Duration::from_millis(10);

/// The engine of a [`SimulatedDevice`]; there is at most one at a time.
pub struct SimulatedEngine {
    device: SimulatedDevice,
    bell: Doorbell,
    capacity: usize,
    refused: Vec<Completion>,
}

impl SimulatedEngine {
    pub(crate) fn open(device: &SimulatedDevice) -> Result<SimulatedEngine, IoError> {
        let bell = Doorbell::new()?;
        let mut state = device.lock();
        if state.power == Power::Off {
            let text = "the simulated device has crashed; create a new one from the surviving image";
            return Err(IoError::new(IoErrorKind::Lost, text));
        }
        if state.engine == EngineSeat::Taken {
            return Err(IoError::new(IoErrorKind::InUse, "the simulated device has an engine already"));
        }
        state.engine = EngineSeat::Taken;
        let capacity = state.settings.capacity;
        drop(state);
        Ok(SimulatedEngine { device: device.clone(), bell, capacity, refused: Vec::new() })
    }

    /// Returns the size of the device in bytes.
    pub(crate) fn device_bytes(&self) -> u64 {
        self.device.lock().seen.bytes()
    }

    /// Waits once, for at most `left`; returns the elapsed time.
    fn wait_once(&self, left: Duration) -> Duration {
        let (now, due, clock) = {
            let state = self.device.lock();
            (state.now(), state.next_due(), state.settings.clock)
        };
        let until_due = due.map(|due| due.saturating_sub(now));
        match (clock, until_due) {
            (SimulatedClock::Virtual, Some(until_due)) => {
                let step = until_due.min(left);
                self.device.advance(step);
                step
            }
            (SimulatedClock::Virtual, None) => {
                self.bell.sleep(left);
                self.device.advance(left);
                left
            }
            (SimulatedClock::Real, until_due) => {
                let pause = left.min(until_due.unwrap_or(left));
                let pause = if until_due.is_some() { pause.min(CRASH_CHECK) } else { pause };
                self.bell.sleep(pause);
                self.device.now().saturating_sub(now)
            }
        }
    }
}

impl IoEngine for SimulatedEngine {
    fn capacity(&self) -> usize {
        self.capacity
    }

    fn in_flight(&self) -> usize {
        self.device.lock().in_flight_ops() + self.refused.len()
    }

    fn submit(&mut self, submission: Submission) -> Result<(), Submission> {
        if self.in_flight() == self.capacity {
            return Err(submission);
        }
        let mut state = self.device.lock();
        match state.bounds().check(&submission.op) {
            Ok(()) => state.submit(submission),
            Err(error) => {
                let Submission { token, op } = submission;
                self.refused.push(Completion { token, op, result: Err(error) });
            }
        }
        Ok(())
    }

    fn reap(&mut self, wait: Wait, out: &mut Vec<Completion>) -> Result<(), IoError> {
        let before = out.len();
        out.append(&mut self.refused);
        self.device.lock().complete_due(out);
        let Wait::Until(mut left) = wait else { return Ok(()) };
        loop {
            let rung = self.bell.answer();
            if out.len() > before || rung || left.is_zero() {
                return Ok(());
            }
            left = left.saturating_sub(self.wait_once(left));
            self.device.lock().complete_due(out);
        }
    }

    fn waker(&self) -> Waker {
        self.bell.waker()
    }

    fn close(self: Box<Self>) -> CloseOutcome {
        let device = self.device.clone();
        drop(self);
        if device.lock().hangs() { CloseOutcome::Leaked } else { CloseOutcome::Drained }
    }

    fn kind(&self) -> EngineKind {
        EngineKind::Simulated
    }
}

impl Drop for SimulatedEngine {
    fn drop(&mut self) {
        let mut state = self.device.lock();
        state.complete_all(&mut Vec::new());
        state.engine = EngineSeat::Free;
    }
}
