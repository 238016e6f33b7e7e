//! Rate limit for log lines of repeating conditions: one line at the beginning, a count at intervals, one
//! line at the end.
//!
//! ```text
//!   occurrence ──► Log        the first of its condition
//!              └─► Count      every further one
//!   interval   ──► Repeated   occurrences since the last report
//!              └─► Ended      no occurrence since the last report, or the caller has ended the condition
//! ```
//!
//! A condition that was ended and begins again within the interval is counted, not logged. A condition that
//! repeatedly starts and ends thus needs at most as many lines as a permanent one.
//!
//! A condition consists of a kind (a place in the code, or a name) and a subject (a peer, a device, a
//! listener). Subjects have external names and are bounded: those beyond [`SUBJECTS_MAX`] share one condition
//! of their kind. Kinds are defined by the code.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::time::Tick;

/// Interval between two reports of a condition.
pub const REPORT_INTERVAL: Duration = Duration::from_secs(60);

/// Maximum conditions with a subject: 100 peers with two kinds each, 32 devices, and a reserve. Each needs
/// less than 1 KiB.
pub const SUBJECTS_MAX: usize = 256;

/// Decision about one occurrence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogDecision {
    /// Log the occurrence now.
    Log,
    /// Do not log: the next report includes it in its count.
    Count,
}

/// Report about a condition, for the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report<D> {
    /// Details of the latest occurrence.
    pub details: D,
    /// State of the condition.
    pub what: ReportKind,
}

/// State of a condition in a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReportKind {
    /// The condition continues.
    Repeated {
        /// Number of occurrences counted since the last line about the condition.
        count: u64,
        /// Time since that line.
        within: Duration,
    },
    /// The condition has ended.
    Ended {
        /// Number of all its occurrences, logged or counted.
        total: u64,
        /// Time from the first to the last occurrence.
        lasted: Duration,
    },
}

/// Open conditions, each with details of its latest occurrence (`D`).
#[derive(Debug)]
pub struct LogRate<D> {
    /// Open conditions by kind and subject.
    open: BTreeMap<(String, String), Open<D>>,
    /// Number of open conditions with a subject.
    subjects: usize,
}

/// Occurrence of a condition.
#[derive(Clone, Debug)]
pub struct Occurrence<'a, D> {
    /// Kind of the condition.
    pub kind: &'a str,
    /// Subject of the condition; empty if the kind has none.
    pub subject: &'a str,
    /// Details for the report.
    pub details: D,
}

#[derive(Debug)]
struct Open<D> {
    details: D,
    began: Tick,
    last: Tick,
    reported: Tick,
    /// Occurrences since the time `reported`.
    counted: u64,
    total: u64,
    /// Whether the caller has ended the condition, and it has not occurred since.
    over: bool,
    /// Whether that end was reported.
    end_reported: bool,
    /// Whether it began again after a reported end: the next end waits for the interval.
    recurred: bool,
}

impl<D> Default for LogRate<D> {
    fn default() -> LogRate<D> {
        LogRate { open: BTreeMap::new(), subjects: 0 }
    }
}

impl<D: Clone> LogRate<D> {
    /// Decides whether to log an occurrence.
    pub fn occurred(&mut self, occurrence: Occurrence<'_, D>, now: Tick) -> LogDecision {
        let Occurrence { kind, subject, details } = occurrence;
        let mut key = (kind.to_owned(), subject.to_owned());
        if !self.open.contains_key(&key) && self.subjects >= SUBJECTS_MAX {
            key.1.clear();
        }
        if let Some(open) = self.open.get_mut(&key) {
            open.details = details;
            open.last = now;
            open.counted += 1;
            open.total += 1;
            open.recurred |= open.over;
            (open.over, open.end_reported) = (false, false);
            return LogDecision::Count;
        }
        self.subjects += usize::from(!key.1.is_empty());
        self.open.insert(key, Open::new(details, now));
        LogDecision::Log
    }

    /// Ends a condition; returns the report to log now, if any.
    pub fn ended(&mut self, kind: &str, subject: &str, now: Tick) -> Option<Report<D>> {
        let open = self.open.get_mut(&(kind.to_owned(), subject.to_owned()))?;
        if std::mem::replace(&mut open.over, true) || open.recurred {
            return None;
        }
        (open.end_reported, open.counted, open.reported) = (true, 0, now);
        Some(open.end())
    }

    /// Returns the reports that are due. A single occurrence without another one within the interval ends
    /// without a report.
    pub fn due(&mut self, now: Tick) -> Vec<Report<D>> {
        let is_due = |(_, open): &(&(String, String), &Open<D>)| now.since(open.reported) >= REPORT_INTERVAL;
        let due: Vec<(String, String)> =
            self.open.iter().filter(is_due).map(|(key, _)| key.clone()).collect();
        due.iter().filter_map(|key| self.report(key, now)).collect()
    }

    /// Time at which the next report may be due.
    pub fn next_due(&self) -> Option<Tick> {
        self.open.values().map(|open| open.reported.after(REPORT_INTERVAL)).min()
    }

    /// Returns reports of all occurrences that were counted and not reported, for a process that is about to
    /// end.
    pub fn flush(&mut self, now: Tick) -> Vec<Report<D>> {
        let keys: Vec<(String, String)> =
            self.open.iter().filter(|(_, open)| open.counted > 0).map(|(key, _)| key.clone()).collect();
        keys.iter().filter_map(|key| self.report(key, now)).collect()
    }

    fn report(&mut self, key: &(String, String), now: Tick) -> Option<Report<D>> {
        let open = self.open.get_mut(key)?;
        if open.counted == 0 {
            let open = self.remove(key)?;
            // A single occurrence was already logged.
            return (open.total > 1 && !open.end_reported).then(|| open.end());
        }
        let within = now.since(open.reported);
        let count = std::mem::take(&mut open.counted);
        (open.reported, open.recurred) = (now, false);
        Some(Report { details: open.details.clone(), what: ReportKind::Repeated { count, within } })
    }

    fn remove(&mut self, key: &(String, String)) -> Option<Open<D>> {
        let open = self.open.remove(key)?;
        self.subjects -= usize::from(!key.1.is_empty());
        Some(open)
    }
}

impl<D: Clone> Open<D> {
    fn new(details: D, now: Tick) -> Open<D> {
        Open {
            details,
            began: now,
            last: now,
            reported: now,
            counted: 0,
            total: 1,
            over: false,
            end_reported: false,
            recurred: false,
        }
    }

    fn end(&self) -> Report<D> {
        let what = ReportKind::Ended { total: self.total, lasted: self.last.since(self.began) };
        Report { details: self.details.clone(), what }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Tick {
        Tick(0).after(Duration::from_secs(seconds))
    }

    fn occurred(rate: &mut LogRate<u64>, (kind, subject): (&str, &str), second: u64) -> LogDecision {
        rate.occurred(Occurrence { kind, subject, details: second }, at(second))
    }

    fn only(reports: Vec<Report<u64>>) -> ReportKind {
        let [report] = <[Report<u64>; 1]>::try_from(reports).expect("one report");
        report.what
    }

    #[test]
    fn logs_the_first_occurrence_and_counts_the_rest_once_an_interval() {
        let mut rate = LogRate::default();
        assert_eq!(occurred(&mut rate, ("garbage", "peers"), 0), LogDecision::Log);
        for second in 1..50 {
            assert_eq!(occurred(&mut rate, ("garbage", "peers"), second), LogDecision::Count);
            assert_eq!(rate.due(at(second)), []);
        }
        assert_eq!(rate.next_due(), Some(at(60)));
        let within = Duration::from_secs(60);
        assert_eq!(only(rate.due(at(60))), ReportKind::Repeated { count: 49, within });
        assert_eq!(rate.due(at(61)), []);
    }

    #[test]
    fn reports_the_end_with_the_total_after_an_interval_without_occurrences() {
        let mut rate = LogRate::default();
        occurred(&mut rate, ("unreachable", "node-b"), 0);
        occurred(&mut rate, ("unreachable", "node-b"), 10);
        assert!(matches!(only(rate.due(at(60))), ReportKind::Repeated { count: 1, .. }));
        let lasted = Duration::from_secs(10);
        assert_eq!(only(rate.due(at(120))), ReportKind::Ended { total: 2, lasted });
        assert_eq!((rate.due(at(200)), rate.next_due()), (Vec::new(), None));
        assert_eq!(occurred(&mut rate, ("unreachable", "node-b"), 201), LogDecision::Log, "a new condition");
    }

    #[test]
    fn a_single_occurrence_ends_without_a_report() {
        let mut rate = LogRate::default();
        occurred(&mut rate, ("slow", "nvme0"), 0);
        assert_eq!(rate.due(at(60)), []);
        assert_eq!(rate.next_due(), None);
    }

    #[test]
    fn a_success_ends_a_condition_at_once() {
        let mut rate = LogRate::default();
        assert_eq!(rate.ended("store", "", at(0)), None, "the condition was not open");
        occurred(&mut rate, ("store", ""), 0);
        occurred(&mut rate, ("store", ""), 2);
        let ended = rate.ended("store", "", at(3)).expect("the condition was open");
        let what = ReportKind::Ended { total: 2, lasted: Duration::from_secs(2) };
        assert_eq!(ended, Report { details: 2, what }, "with details of the latest occurrence");
        assert_eq!(rate.ended("store", "", at(4)), None, "ended only once");
        assert_eq!(rate.due(at(63)), []);
        assert_eq!(occurred(&mut rate, ("store", ""), 64), LogDecision::Log);
    }

    #[test]
    fn intermittent_condition_needs_few_lines() {
        let mut rate = LogRate::default();
        let mut lines = 0;
        for second in 0..600 {
            lines += usize::from(occurred(&mut rate, ("store", ""), second) == LogDecision::Log);
            lines += usize::from(rate.ended("store", "", at(second)).is_some());
            lines += rate.due(at(second)).len();
        }
        assert!(lines <= 2 * 600 / 60 + 2, "{lines}");
        lines = rate.due(at(700)).len() + rate.due(at(800)).len();
        assert_eq!((lines, rate.next_due()), (2, None), "the last count and the end");
    }

    #[test]
    fn each_subject_is_a_separate_condition() {
        let mut rate = LogRate::default();
        let kinds = [("unreachable", "node-a"), ("unreachable", "node-b"), ("device error", "/dev/nvme0n1")];
        for (kind, subject) in kinds {
            assert_eq!(occurred(&mut rate, (kind, subject), 0), LogDecision::Log);
            assert_eq!(occurred(&mut rate, (kind, subject), 1), LogDecision::Count);
        }
        assert_eq!(rate.due(at(60)).len(), 3);
    }

    #[test]
    fn subjects_beyond_the_bound_share_one_condition_of_their_kind() {
        let mut rate = LogRate::default();
        let logged = (0..10 * SUBJECTS_MAX)
            .filter(|number| occurred(&mut rate, ("refused", &number.to_string()), 0) == LogDecision::Log)
            .count();
        assert_eq!(logged, SUBJECTS_MAX + 1);
        let ended = rate.ended("refused", "0", at(0)).expect("the subject has its own condition");
        assert!(matches!(ended.what, ReportKind::Ended { total: 1, .. }));
        rate.due(at(60));
        assert_eq!(occurred(&mut rate, ("refused", "new"), 61), LogDecision::Log, "a subject has ended");
    }

    #[test]
    fn flush_reports_all_counted_occurrences() {
        let mut rate = LogRate::default();
        occurred(&mut rate, ("garbage", ""), 0);
        occurred(&mut rate, ("single", ""), 0);
        occurred(&mut rate, ("garbage", ""), 1);
        assert!(matches!(only(rate.flush(at(2))), ReportKind::Repeated { count: 1, .. }));
    }
}
