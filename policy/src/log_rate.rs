//! How often a condition that repeats is logged: once when it begins, a count at an interval, once when it ends.
//!
//! ```text
//!   occurrence ──► Log        the first of its condition
//!              └─► Count      every further one
//!   interval   ──► Repeated   occurrences since the last report
//!              └─► Ended      none since the last report, or the caller has seen the end
//! ```
//!
//! A condition that the caller has seen to end and that begins again within the interval is counted, not logged: one that
//! comes and goes takes no more lines than one that stays.
//!
//! A condition is a kind (a place in the code, or a name) and a subject (a peer, a device, a listener). Subjects come from
//! outside and are bounded: those beyond [`SUBJECTS_MAX`] share one condition of their kind. Kinds come from the code.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::time::Tick;

/// Time between two reports of one condition.
pub const REPORT_INTERVAL: Duration = Duration::from_secs(60);

/// Conditions with a subject of their own: 100 peers in two ways, 32 devices, and room. Each takes less than 1 KiB.
pub const SUBJECTS_MAX: usize = 256;

/// What to do with one occurrence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogDecision {
    /// Log it.
    Log,
    /// It was counted; a report will name the number.
    Count,
}

/// A condition and what to log about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report<D> {
    /// Details of its latest occurrence.
    pub details: D,
    /// What has happened.
    pub what: ReportKind,
}

/// What has happened to a condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReportKind {
    /// The condition lasts.
    Repeated {
        /// Occurrences that were counted since the last line about it.
        count: u64,
        /// Time since that line.
        within: Duration,
    },
    /// It is over.
    Ended {
        /// All its occurrences, logged or counted.
        total: u64,
        /// Time from the first to the last of them.
        lasted: Duration,
    },
}

/// Conditions that go on, each with details of its latest occurrence (`D`).
#[derive(Debug)]
pub struct LogRate<D> {
    /// By kind and subject.
    open: BTreeMap<(String, String), Open<D>>,
    /// Open conditions that have a subject.
    subjects: usize,
}

/// One occurrence of a condition.
#[derive(Clone, Debug)]
pub struct Occurrence<'a, D> {
    /// The kind of condition.
    pub kind: &'a str,
    /// Empty where the kind has none.
    pub subject: &'a str,
    /// For the report.
    pub details: D,
}

#[derive(Debug)]
struct Open<D> {
    details: D,
    began: Tick,
    last: Tick,
    reported: Tick,
    /// Since `reported`.
    counted: u64,
    total: u64,
    /// The caller has seen its end, and it has not occurred since.
    over: bool,
    /// That end was reported.
    end_reported: bool,
    /// It has begun again after a reported end: the next end waits for the interval.
    recurred: bool,
}

impl<D> Default for LogRate<D> {
    fn default() -> LogRate<D> {
        LogRate { open: BTreeMap::new(), subjects: 0 }
    }
}

impl<D: Clone> LogRate<D> {
    /// Decides about an occurrence of a condition.
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

    /// Ends a condition of which the caller has seen the end; `None` when nothing is to be logged now.
    pub fn ended(&mut self, kind: &str, subject: &str, now: Tick) -> Option<Report<D>> {
        let open = self.open.get_mut(&(kind.to_owned(), subject.to_owned()))?;
        if std::mem::replace(&mut open.over, true) || open.recurred {
            return None;
        }
        (open.end_reported, open.counted, open.reported) = (true, 0, now);
        Some(open.end())
    }

    /// Reports that are due. A single occurrence without a second one within the interval ends without a report.
    pub fn due(&mut self, now: Tick) -> Vec<Report<D>> {
        let is_due = |(_, open): &(&(String, String), &Open<D>)| now.since(open.reported) >= REPORT_INTERVAL;
        let due: Vec<(String, String)> =
            self.open.iter().filter(is_due).map(|(key, _)| key.clone()).collect();
        due.iter().filter_map(|key| self.report(key, now)).collect()
    }

    /// When the next report may be due.
    pub fn next_due(&self) -> Option<Tick> {
        self.open.values().map(|open| open.reported.after(REPORT_INTERVAL)).min()
    }

    /// Reports of everything that was counted and not reported, for a process that is about to end.
    pub fn flush(&mut self, now: Tick) -> Vec<Report<D>> {
        let keys: Vec<(String, String)> =
            self.open.iter().filter(|(_, open)| open.counted > 0).map(|(key, _)| key.clone()).collect();
        keys.iter().filter_map(|key| self.report(key, now)).collect()
    }

    fn report(&mut self, key: &(String, String), now: Tick) -> Option<Report<D>> {
        let open = self.open.get_mut(key)?;
        if open.counted == 0 {
            let open = self.remove(key)?;
            // One occurrence was logged as itself.
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
        assert_eq!(occurred(&mut rate, ("unreachable", "node-b"), 201), LogDecision::Log, "it begins again");
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
        assert_eq!(rate.ended("store", "", at(0)), None, "it was not open");
        occurred(&mut rate, ("store", ""), 0);
        occurred(&mut rate, ("store", ""), 2);
        let ended = rate.ended("store", "", at(3)).expect("it was open");
        let what = ReportKind::Ended { total: 2, lasted: Duration::from_secs(2) };
        assert_eq!(ended, Report { details: 2, what }, "with details of the latest occurrence");
        assert_eq!(rate.ended("store", "", at(4)), None, "once");
        assert_eq!(rate.due(at(63)), []);
        assert_eq!(occurred(&mut rate, ("store", ""), 64), LogDecision::Log);
    }

    #[test]
    fn a_condition_that_comes_and_goes_takes_as_few_lines_as_one_that_stays() {
        let mut rate = LogRate::default();
        let mut lines = 0;
        for second in 0..600 {
            lines += usize::from(occurred(&mut rate, ("store", ""), second) == LogDecision::Log);
            lines += usize::from(rate.ended("store", "", at(second)).is_some());
            lines += rate.due(at(second)).len();
        }
        assert!(lines <= 2 * 600 / 60 + 2, "{lines}");
        lines = rate.due(at(700)).len() + rate.due(at(800)).len();
        assert_eq!((lines, rate.next_due()), (2, None), "the last count, and the end");
    }

    #[test]
    fn peers_and_disks_are_conditions_of_their_own() {
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
        let ended = rate.ended("refused", "0", at(0)).expect("it has one of its own");
        assert!(matches!(ended.what, ReportKind::Ended { total: 1, .. }));
        rate.due(at(60));
        assert_eq!(occurred(&mut rate, ("refused", "new"), 61), LogDecision::Log, "there is room again");
    }

    #[test]
    fn a_process_that_ends_reports_what_it_has_counted() {
        let mut rate = LogRate::default();
        occurred(&mut rate, ("garbage", ""), 0);
        occurred(&mut rate, ("single", ""), 0);
        occurred(&mut rate, ("garbage", ""), 1);
        assert!(matches!(only(rate.flush(at(2))), ReportKind::Repeated { count: 1, .. }));
    }
}
