//! Distinction between a torn tail and corruption, page by page.

use std::ops::Range;

use super::super::record::PageHead;

/// State of scanning a log.
#[derive(Clone, Debug, Default)]
pub(super) struct LogScan {
    /// Missing pages that no later group has proved durable yet.
    missing: Vec<Range<u32>>,
    /// Page behind the last valid one.
    end: u32,
    /// Pages of the group of the last valid page.
    group: Range<u32>,
    /// Number of pages behind `end` that have our header but are damaged.
    damaged_behind: u64,
    holes: u64,
}

/// Result of scanning a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LogEnd {
    /// First page that may be appended to.
    pub(super) next: u32,
    /// Number of missing pages that were durable once.
    pub(super) holes: u64,
    /// Number of missing pages of the last group before a valid one.
    pub(super) torn_inside: u64,
    /// Number of missing pages of the last append.
    pub(super) torn: u64,
    /// Whether a group was appended behind the first one, which the bank switch writes. Only then were both
    /// copies of the bank's header certainly durable.
    pub(super) was_active: bool,
}

impl LogScan {
    /// Adds a valid page.
    pub(super) fn valid(&mut self, head: &PageHead) {
        for run in &mut self.missing {
            let lost = run.start..run.end.min(head.group_first).max(run.start);
            self.holes += lost.len() as u64;
            run.start = lost.end;
        }
        self.missing.retain(|run| !run.is_empty());
        self.end = head.sequence + 1;
        self.group = head.group_first..head.group_first.saturating_add(u32::from(head.group_pages));
        self.damaged_behind = 0;
    }

    /// Adds a missing page; `damaged` is 1 if its write was started.
    pub(super) fn missing(&mut self, sequence: u32, damaged: u64) {
        self.damaged_behind += damaged;
        match self.missing.last_mut() {
            Some(run) if run.end == sequence => run.end += 1,
            _ => self.missing.push(sequence..sequence + 1),
        }
    }

    /// Ends the scan after the last page.
    pub(super) fn finish(self) -> LogEnd {
        let before_end = |run: &Range<u32>| u64::from(run.end.min(self.end).saturating_sub(run.start));
        let torn_inside = self.missing.iter().map(before_end).sum();
        let behind = u64::from(self.group.end.saturating_sub(self.end)).max(self.damaged_behind);
        let was_active = self.group.start > 0;
        LogEnd { next: self.end, holes: self.holes, torn_inside, torn: torn_inside + behind, was_active }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Scans a log given as text: one word per group of pages; `.` is a valid page, `x` a damaged one, `-` an
    /// absent one.
    fn scan(log: &str) -> LogEnd {
        let mut scan = LogScan::default();
        let mut sequence = 0;
        for group in log.split(' ') {
            let first = sequence;
            for page in group.chars() {
                let pages = u16::try_from(group.len()).expect("short");
                let head = PageHead { sequence, group_first: first, group_pages: pages, next_generation: 0 };
                match page {
                    '.' => scan.valid(&head),
                    'x' => scan.missing(sequence, 1),
                    _ => scan.missing(sequence, 0),
                }
                sequence += 1;
            }
        }
        scan.finish()
    }

    fn end(next: u32, holes: u64, torn_inside: u64, torn: u64) -> LogEnd {
        LogEnd { next, holes, torn_inside, torn, was_active: next > 1 }
    }

    #[test]
    fn intact_log_ends_behind_its_last_page() {
        assert_eq!(scan(""), end(0, 0, 0, 0));
        assert_eq!(scan(". .. . - - -"), end(4, 0, 0, 0));
    }

    #[test]
    fn log_of_one_group_may_not_have_been_active() {
        assert!(!scan("- -").was_active);
        assert!(!scan(".. -").was_active);
        assert!(scan(".. . -").was_active);
    }

    #[test]
    fn missing_pages_before_a_later_group_are_holes() {
        assert_eq!(scan(". x . -"), end(3, 1, 0, 0));
        assert_eq!(scan("x -- .. -"), end(5, 3, 0, 0));
        assert_eq!(scan(". .x. ."), end(5, 1, 0, 0));
    }

    #[test]
    fn missing_pages_in_the_last_group_are_torn() {
        assert_eq!(scan(". x - -"), end(1, 0, 0, 1));
        assert_eq!(scan(". x.- -"), end(3, 0, 1, 2));
        assert_eq!(scan(". ..-- -"), end(3, 0, 0, 2));
        assert_eq!(scan("- .x. -x."), end(7, 2, 2, 2));
    }
}
