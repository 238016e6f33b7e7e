//! Heartbeats of one registration: when they are sent, and how long their answers may take.
//!
//! Heartbeats depend on nothing else, so that slow work cannot delay one. After a delay the period counts from
//! the late heartbeat. Pure: the caller sends them.

use std::time::Duration;

use reprise_policy::Tick;

use crate::registrar::Granted;

/// Time limit of a heartbeat, in periods. A node counts as dead after six periods, so three heartbeats in a
/// row may fail.
const ANSWER_PERIODS: u32 = 2;
/// Minimum time limit of a heartbeat, however short the period is.
const ANSWER_MIN: Duration = Duration::from_millis(100);
/// Accepted range of the period requested by the control plane.
const PERIOD_MIN: Duration = Duration::from_millis(10);
const PERIOD_MAX: Duration = Duration::from_secs(60);

/// The heartbeats of one registration; see the module.
#[derive(Clone, Copy, Debug)]
pub struct Heartbeats {
    /// Registration that they belong to.
    pub of: Granted,
    /// Time at which the last heartbeat was sent.
    sent: Option<Tick>,
}

impl Heartbeats {
    /// The heartbeats of a registration; the first is due now.
    pub fn new(of: Granted) -> Heartbeats {
        Heartbeats { of, sent: None }
    }

    /// Records that a heartbeat is sent.
    pub fn send(&mut self, now: Tick) {
        self.sent = Some(now);
    }

    /// Returns the time until the next heartbeat.
    pub fn wait(&self, now: Tick) -> Duration {
        self.sent.map_or(Duration::ZERO, |sent| sent.after(self.period()).since(now))
    }

    /// Returns the time limit of an answer.
    pub fn answer_within(&self) -> Duration {
        (self.period() * ANSWER_PERIODS).max(ANSWER_MIN)
    }

    fn period(&self) -> Duration {
        self.of.heartbeat_every.clamp(PERIOD_MIN, PERIOD_MAX)
    }
}

#[cfg(test)]
mod tests {
    use reprise_policy::{Epoch, NodeId};

    use super::*;

    fn heartbeats(every_ms: u64) -> Heartbeats {
        let heartbeat_every = Duration::from_millis(every_ms);
        Heartbeats::new(Granted { node: NodeId(1), epoch: Epoch(1), heartbeat_every })
    }

    #[test]
    fn heartbeats_keep_their_period_and_late_ones_shift_it() {
        let at = |milliseconds| Tick(0).after(Duration::from_millis(milliseconds));
        let mut heartbeats = heartbeats(250);
        assert_eq!(heartbeats.wait(at(7)), Duration::ZERO, "the first is due now");
        heartbeats.send(at(7));
        assert_eq!(heartbeats.wait(at(107)), Duration::from_millis(150));
        assert_eq!(heartbeats.wait(at(900)), Duration::ZERO);
        heartbeats.send(at(900));
        assert_eq!(heartbeats.wait(at(900)), Duration::from_millis(250));
    }

    #[test]
    fn period_and_time_limit_are_bounded() {
        assert_eq!(heartbeats(250).answer_within(), Duration::from_millis(500));
        assert_eq!(heartbeats(1).answer_within(), ANSWER_MIN);
        let mut rare = heartbeats(600_000);
        rare.send(Tick(0));
        assert_eq!(rare.wait(Tick(0)), PERIOD_MAX);
    }
}
