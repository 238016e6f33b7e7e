//! When a node reports to one member of the control plane.
//!
//! A report is due once a period, and earlier after an urgent change. Without a registration it waits for one. The next
//! period begins when the report was due, so a report that takes longer delays the next one. Pure: the caller sends the
//! reports.

use std::time::Duration;

use reprise_policy::Tick;

use crate::registrar::Granted;

/// Interval between two reports to a member.
const REPORT_EVERY: Duration = Duration::from_secs(1);
/// Minimum time between two reports to a member, however urgent.
const URGENT_AFTER: Duration = Duration::from_millis(20);
/// Time limit of a report, well below the two seconds in which a tenant's budget can get another owner.
pub const REPORT_TIMEOUT: Duration = Duration::from_secs(1);

/// The schedule of the reports to one member; see the module.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReportSchedule {
    /// Time at which the last report was due.
    due: Option<Tick>,
    /// Whether it was not sent yet.
    is_open: bool,
}

impl ReportSchedule {
    /// Returns the time until the next report is due.
    pub fn wait(&self, now: Tick) -> Duration {
        self.due.map_or(Duration::ZERO, |due| due.after(REPORT_EVERY).since(now))
    }

    /// Returns the time until an urgent report is due.
    pub fn wait_urgent(&self, now: Tick) -> Duration {
        self.due.map_or(Duration::ZERO, |due| due.after(URGENT_AFTER).since(now))
    }

    /// Records that a report is due.
    pub fn open(&mut self, now: Tick) {
        (self.due, self.is_open) = (Some(now), true);
    }

    /// Returns the registration under which to send the report that is due; `None` if there is nothing to
    /// send. The report counts as sent afterwards.
    pub fn send(&mut self, granted: Option<Granted>) -> Option<Granted> {
        let sent = granted.filter(|_| self.is_open)?;
        self.is_open = false;
        Some(sent)
    }
}

#[cfg(test)]
mod tests {
    use reprise_policy::{Epoch, NodeId};

    use super::*;

    #[test]
    fn due_report_waits_for_a_registration_and_is_sent_once() {
        let at = |milliseconds| Tick(0).after(Duration::from_millis(milliseconds));
        let granted = Granted { node: NodeId(1), epoch: Epoch(1), heartbeat_every: Duration::ZERO };
        let mut schedule = ReportSchedule::default();
        assert_eq!(schedule.wait(at(5)), Duration::ZERO);
        assert_eq!(schedule.send(Some(granted)), None, "none is due yet");
        schedule.open(at(5));
        assert_eq!(schedule.send(None), None);
        assert_eq!(schedule.send(Some(granted)), Some(granted));
        assert_eq!(schedule.send(Some(granted)), None);
        assert_eq!(schedule.wait(at(405)), Duration::from_millis(600));
        assert_eq!(schedule.wait_urgent(at(10)), Duration::from_millis(15));
        assert_eq!(schedule.wait_urgent(at(405)), Duration::ZERO);
        assert_eq!(schedule.wait(at(2005)), Duration::ZERO, "a slow report delays the next one");
    }
}
