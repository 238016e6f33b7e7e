//! Finds devices that are more worn than their pools allow, by media errors and remaining spare capacity.
//!
//! The agent counts media errors since it opened the device; the drive counts them over its lifetime. Many
//! errors are in both counts, so the greater one is compared. Each drive's health log is read every
//! [`READ_EVERY`], on a separate thread, because a hung drive blocks its reader. The last log stays valid
//! until the next one; values that a drive does not report are not compared. A worn device is reported and
//! stays in use.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use reprise_io::{DeviceDescription, HealthLog};

/// Interval between two reads of a health log; its values change within days.
const READ_EVERY: Duration = Duration::from_secs(60);

/// Stable path of a device, and its description in this process's mount namespace.
pub(in super::super) type DevicePath = (String, DeviceDescription);

/// Wear limits of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in super::super) struct WearLimits {
    pub(in super::super) media_errors_max: Option<u32>,
    pub(in super::super) spare_percent_min: Option<u8>,
}

/// Wear of an open device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) struct WearReading {
    pub(in super::super) media_errors: u32,
    pub(in super::super) spare_percent: Option<u8>,
    /// Which limits are exceeded, if any.
    pub(in super::super) worn: Option<String>,
}

/// Last health logs, by the devices' stable paths.
#[derive(Debug, Default)]
pub(in super::super) struct WearMonitor {
    drives: BTreeMap<String, Drive>,
}

/// The last health log of one drive.
#[derive(Debug)]
struct Drive {
    last: Option<HealthLog>,
    /// Written bytes in the first log; 0 if that had none, because a new drive has written nothing.
    written_at_first: Option<u64>,
    requested: Instant,
    /// Whether a thread is reading the log.
    in_flight: bool,
}

/// Bytes that drives count as written, over payload bytes that became durable: sums of the intervals in which the same
/// devices were open and all of them counted. Logs are a minute old, so only long sums are meaningful.
#[derive(Debug, Default)]
pub(in super::super) struct Amplification {
    before: Option<(BTreeMap<String, u64>, u64)>,
    written: u64,
    useful: u64,
}

impl Amplification {
    /// Adds the interval since the last call: what each device has written so far, `None` if a device does not count, and
    /// the payload so far.
    pub(in super::super) fn add(&mut self, written: Option<BTreeMap<String, u64>>, useful: u64) {
        let now = written.map(|written| (written, useful));
        if let (Some((before, useful_before)), Some((written, useful))) = (&self.before, &now)
            && before.keys().eq(written.keys())
        {
            let pairs = written.values().zip(before.values());
            self.written += pairs.map(|(now, before)| now.saturating_sub(*before)).sum::<u64>();
            self.useful += useful.saturating_sub(*useful_before);
        }
        self.before = now;
    }

    /// Bytes that drives wrote for 1,000 payload bytes; 0 while nothing is known.
    pub(in super::super) fn permille(&self) -> u64 {
        self.written.saturating_mul(1000).checked_div(self.useful).unwrap_or(0)
    }
}

impl WearMonitor {
    /// Returns the open devices whose health log is due. The caller reports each result with
    /// [`WearMonitor::record`].
    pub(in super::super) fn due(&mut self, now: Instant, open: &[DevicePath]) -> Vec<DevicePath> {
        // Entries of hung drives are kept while their thread waits, so that reopening the device does not
        // start a second one.
        self.drives.retain(|path, drive| drive.in_flight || open.iter().any(|(other, _)| other == path));
        let mut due = Vec::new();
        for place in open {
            match self.drives.get_mut(&place.0) {
                Some(drive) if drive.in_flight || now.duration_since(drive.requested) < READ_EVERY => {
                    continue;
                }
                Some(drive) => (drive.requested, drive.in_flight) = (now, true),
                None => {
                    let new = Drive { last: None, written_at_first: None, requested: now, in_flight: true };
                    self.drives.insert(place.0.clone(), new);
                }
            }
            due.push(place.clone());
        }
        due
    }

    /// Records a health log; `None` if the drive does not report one or reading failed. The previous log
    /// then stays valid.
    pub(in super::super) fn record(&mut self, path: &str, log: Option<HealthLog>) {
        if let Some(drive) = self.drives.get_mut(path) {
            (drive.in_flight, drive.last) = (false, log.or(drive.last));
            let written = log.map(|log| log.written_bytes.unwrap_or(0));
            drive.written_at_first = drive.written_at_first.or(written);
        }
    }

    /// Returns the bytes that a drive counts as written since the first health log after it was opened; `None` if it
    /// does not count them.
    pub(in super::super) fn written(&self, path: &str) -> Option<u64> {
        let drive = self.drives.get(path)?;
        Some(drive.last?.written_bytes?.saturating_sub(drive.written_at_first?))
    }

    /// Returns the wear of a device with this number of I/O errors since it was opened.
    pub(in super::super) fn of(&self, path: &str, errors: u32, limits: WearLimits) -> WearReading {
        let log = self.drives.get(path).and_then(|drive| drive.last);
        let of_drive = log.map_or(0, |log| u32::try_from(log.media_errors).unwrap_or(u32::MAX));
        let (media_errors, spare_percent) = (errors.max(of_drive), log.and_then(|log| log.spare_percent));
        WearReading { media_errors, spare_percent, worn: worn(media_errors, spare_percent, limits) }
    }
}

/// Describes the exceeded limits.
fn worn(media_errors: u32, spare_percent: Option<u8>, limits: WearLimits) -> Option<String> {
    let errors = limits
        .media_errors_max
        .filter(|most| media_errors > *most)
        .map(|most| format!("{media_errors} media errors; its pool allows {most}"));
    let spare = limits.spare_percent_min.zip(spare_percent).filter(|(least, left)| left < least);
    let spare =
        spare.map(|(least, left)| format!("{left} % spare capacity left; its pool requires {least} %"));
    let words: Vec<String> = errors.into_iter().chain(spare).collect();
    (!words.is_empty()).then(|| words.join("; "))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    const LIMITS: WearLimits = WearLimits { media_errors_max: Some(10), spare_percent_min: Some(20) };

    fn device(name: &str) -> DevicePath {
        (name.to_owned(), PathBuf::from(format!("/root{name}")).into())
    }

    fn log(media_errors: u64, spare_percent: Option<u8>) -> Option<HealthLog> {
        Some(HealthLog { media_errors, spare_percent, written_bytes: None })
    }

    fn knowing(log: Option<HealthLog>) -> WearMonitor {
        let mut wear = WearMonitor::default();
        wear.due(Instant::now(), &[device("/a")]);
        wear.record("/a", log);
        wear
    }

    #[test]
    fn device_is_worn_if_errors_or_spare_capacity_exceed_the_limits() {
        for (log, errors, words) in [
            (log(10, Some(20)), 10, None),
            (log(11, Some(20)), 0, Some("11 media errors; its pool allows 10")),
            (log(0, Some(100)), 11, Some("11 media errors")),
            (log(0, Some(19)), 0, Some("19 % spare capacity left; its pool requires 20 %")),
            (log(12, Some(0)), 0, Some("allows 10; 0 % spare")),
            // Values that a drive does not report are not compared.
            (log(3, None), 4, None),
            (None, 10, None),
            (None, 11, Some("11 media errors")),
        ] {
            let reading = knowing(log).of("/a", errors, LIMITS);
            assert_eq!(reading.worn.is_some(), words.is_some(), "{reading:?}");
            assert!(reading.worn.unwrap_or_default().contains(words.unwrap_or_default()), "{words:?}");
        }
        let without = knowing(log(1000, Some(0))).of("/a", 1000, WearLimits::default());
        assert_eq!(without, WearReading { media_errors: 1000, spare_percent: Some(0), worn: None });
    }

    #[test]
    fn reports_the_greater_error_counter_and_omits_unknown_values() {
        let reading = |log, errors| knowing(log).of("/a", errors, LIMITS);
        assert_eq!(reading(log(7, Some(90)), 3).media_errors, 7);
        assert_eq!(reading(log(2, Some(90)), 3).media_errors, 3);
        assert_eq!(reading(log(u64::MAX, None), 3).media_errors, u32::MAX);
        assert_eq!(reading(None, 0), WearReading { media_errors: 0, spare_percent: None, worn: None });
        assert_eq!(knowing(log(7, Some(9))).of("/b", 0, LIMITS).spare_percent, None, "another device");
    }

    #[test]
    fn written_bytes_are_those_since_the_first_log() {
        let log = |written_bytes| Some(HealthLog { media_errors: 0, spare_percent: None, written_bytes });
        let mut wear = knowing(log(None));
        assert_eq!(wear.written("/a"), None, "the drive does not count them");
        wear.record("/a", log(Some(512_000_000)));
        assert_eq!((wear.written("/a"), wear.written("/b")), (Some(512_000_000), None), "a new drive");
        wear.record("/a", log(Some(700_000_000)));
        assert_eq!(wear.written("/a"), Some(700_000_000));
        wear.record("/a", None);
        assert_eq!(wear.written("/a"), Some(700_000_000), "reading failed: the last log stays valid");
        wear.due(Instant::now(), &[]);
        wear.due(Instant::now(), &[device("/a")]);
        wear.record("/a", log(Some(900_000_000)));
        assert_eq!(wear.written("/a"), Some(0), "the device was opened again");
    }

    #[test]
    fn amplification_counts_intervals_in_which_all_devices_count() {
        let of = |devices: &[(&str, u64)]| {
            Some(devices.iter().map(|(path, bytes)| ((*path).to_owned(), *bytes)).collect::<BTreeMap<_, _>>())
        };
        let mut ratio = Amplification::default();
        ratio.add(of(&[("/a", 5_000)]), 1_000);
        assert_eq!(ratio.permille(), 0, "nothing is known before the second call");
        ratio.add(of(&[("/a", 6_500)]), 2_000);
        assert_eq!(ratio.permille(), 1_500);
        // A device is added that has written before, another one does not count, and the first is opened again.
        ratio.add(of(&[("/a", 6_500), ("/b", 90_000)]), 2_000);
        ratio.add(None, 3_000);
        ratio.add(of(&[("/a", 0), ("/b", 90_000)]), 4_000);
        assert_eq!(ratio.permille(), 1_500);
        ratio.add(of(&[("/a", 400), ("/b", 90_100)]), 5_000);
        assert_eq!(ratio.permille(), 1_000);
    }

    #[test]
    fn health_log_is_read_once_a_minute_and_for_new_drives_and_never_twice_at_a_time() {
        let (mut wear, now) = (WearMonitor::default(), Instant::now());
        assert_eq!(wear.due(now, &[]), []);
        let one = [device("/a")];
        assert_eq!(wear.due(now, &one), one);
        assert_eq!(wear.due(now + 2 * READ_EVERY, &one), [], "a read is in flight");
        wear.record("/a", log(1, Some(50)));
        assert_eq!(wear.due(now + READ_EVERY / 2, &one), []);
        assert_eq!(wear.due(now + READ_EVERY, &one), one);
        // Reading failed: the last log stays valid.
        wear.record("/a", None);
        assert_eq!(wear.of("/a", 0, LIMITS).spare_percent, Some(50));

        let both = [device("/a"), device("/b")];
        let later = now + READ_EVERY + Duration::from_secs(1);
        assert_eq!(wear.due(later, &both), [device("/b")], "the new one");
        wear.record("/b", None);
        assert_eq!(wear.due(later, &both), [], "a drive without a log was read");
        // Closed, and its log is dropped.
        assert_eq!(wear.due(later, &[device("/b")]), []);
        assert_eq!(wear.of("/a", 0, LIMITS).spare_percent, None);
    }

    #[test]
    fn hung_drive_does_not_block_others_and_is_not_read_twice() {
        let (mut wear, now) = (WearMonitor::default(), Instant::now());
        let both = [device("/hangs"), device("/b")];
        assert_eq!(wear.due(now, &both), both);
        wear.record("/b", log(1, Some(50)));
        assert_eq!(wear.due(now + READ_EVERY, &both), [device("/b")]);
        wear.record("/b", log(2, Some(49)));
        assert_eq!(wear.of("/b", 0, LIMITS).spare_percent, Some(49));
        // The device was closed and reopened meanwhile.
        assert_eq!(wear.due(now + 2 * READ_EVERY, &[]), []);
        assert_eq!(wear.due(now + 2 * READ_EVERY, &both), [device("/b")]);
        wear.record("/hangs", log(0, Some(7)));
        assert_eq!(wear.of("/hangs", 0, LIMITS).spare_percent, Some(7));
    }
}
