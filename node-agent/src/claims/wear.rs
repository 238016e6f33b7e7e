//! Which devices are more worn than their pools allow: by errors of their media, and by the spare capacity that they have left.
//!
//! Errors are counted by the agent since it opened the device, and by the drive, for all its life; one error is often in both, so the greater number counts. The
//! drive is asked every [`ASK_EVERY`], each by a thread of its own, since one that hangs answers late. What it said last stands until it says something else; what it does
//! not tell is not compared. A worn device is told of, and used all the same.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use reprise_io::HealthLog;

/// Drives are asked so often; what they tell changes within days.
const ASK_EVERY: Duration = Duration::from_secs(60);

/// A device of a pool, by its stable path, and where this process finds it.
pub(super) type Place = (String, PathBuf);

/// What a pool allows of its devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Limits {
    pub(super) media_errors_max: Option<u32>,
    pub(super) spare_percent_min: Option<u8>,
}

/// What is told of an open device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Reading {
    pub(super) media_errors: u32,
    pub(super) spare_percent: Option<u8>,
    /// That it is more worn than its pool allows, in words.
    pub(super) worn: Option<String>,
}

/// What drives have said, by the stable paths of devices.
#[derive(Debug, Default)]
pub(super) struct Wear {
    drives: BTreeMap<String, Drive>,
}

/// What one has said.
#[derive(Debug)]
struct Drive {
    said: Option<HealthLog>,
    asked: Instant,
    /// Whether somebody asks it now.
    asking: bool,
}

impl Wear {
    /// Devices to ask now, of those that are open. Whoever is given one brings its answer ([`Wear::answered`]).
    pub(super) fn due(&mut self, now: Instant, open: &[Place]) -> Vec<Place> {
        // Of one that hangs somebody still waits for the answer, so it is not asked a second time when it is opened again.
        self.drives.retain(|path, drive| drive.asking || open.iter().any(|(other, _)| other == path));
        let mut due = Vec::new();
        for place in open {
            match self.drives.get_mut(&place.0) {
                Some(drive) if drive.asking || now.duration_since(drive.asked) < ASK_EVERY => continue,
                Some(drive) => (drive.asked, drive.asking) = (now, true),
                None => {
                    let new = Drive { said: None, asked: now, asking: true };
                    self.drives.insert(place.0.clone(), new);
                }
            }
            due.push(place.clone());
        }
        due
    }

    /// A drive has answered; `None`: it tells nothing, or nobody could ask it. What it said last stands then.
    pub(super) fn answered(&mut self, path: &str, log: Option<HealthLog>) {
        if let Some(drive) = self.drives.get_mut(path) {
            (drive.asking, drive.said) = (false, log.or(drive.said));
        }
    }

    /// What is told of a device on which so many operations have met errors since it was opened.
    pub(super) fn of(&self, path: &str, errors: u32, limits: Limits) -> Reading {
        let log = self.drives.get(path).and_then(|drive| drive.said);
        let of_drive = log.map_or(0, |log| u32::try_from(log.media_errors).unwrap_or(u32::MAX));
        let (media_errors, spare_percent) = (errors.max(of_drive), log.and_then(|log| log.spare_percent));
        Reading { media_errors, spare_percent, worn: worn(media_errors, spare_percent, limits) }
    }
}

/// What is more than allowed, in words.
fn worn(media_errors: u32, spare_percent: Option<u8>, limits: Limits) -> Option<String> {
    let errors = limits
        .media_errors_max
        .filter(|most| media_errors > *most)
        .map(|most| format!("it has met {media_errors} media errors, and its pool allows {most}"));
    let spare = limits.spare_percent_min.zip(spare_percent).filter(|(least, left)| left < least);
    let spare = spare.map(|(least, left)| {
        format!("{left} % of its spare capacity are left, and its pool asks for {least} %")
    });
    let words: Vec<String> = errors.into_iter().chain(spare).collect();
    (!words.is_empty()).then(|| words.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { media_errors_max: Some(10), spare_percent_min: Some(20) };

    fn place(name: &str) -> Place {
        (name.to_owned(), PathBuf::from(format!("/root{name}")))
    }

    fn log(media_errors: u64, spare_percent: Option<u8>) -> Option<HealthLog> {
        Some(HealthLog { media_errors, spare_percent })
    }

    fn knowing(log: Option<HealthLog>) -> Wear {
        let mut wear = Wear::default();
        wear.due(Instant::now(), &[place("/a")]);
        wear.answered("/a", log);
        wear
    }

    #[test]
    fn a_device_is_worn_by_more_errors_or_less_spare_than_its_pool_allows() {
        for (log, errors, words) in [
            (log(10, Some(20)), 10, None),
            (log(11, Some(20)), 0, Some("11 media errors, and its pool allows 10")),
            (log(0, Some(100)), 11, Some("11 media errors")),
            (log(0, Some(19)), 0, Some("19 % of its spare capacity are left, and its pool asks for 20 %")),
            (log(12, Some(0)), 0, Some("allows 10; 0 % of its spare")),
            // What it does not tell is not compared.
            (log(3, None), 4, None),
            (None, 10, None),
            (None, 11, Some("11 media errors")),
        ] {
            let reading = knowing(log).of("/a", errors, LIMITS);
            assert_eq!(reading.worn.is_some(), words.is_some(), "{reading:?}");
            assert!(reading.worn.unwrap_or_default().contains(words.unwrap_or_default()), "{words:?}");
        }
        let without = knowing(log(1000, Some(0))).of("/a", 1000, Limits::default());
        assert_eq!(without, Reading { media_errors: 1000, spare_percent: Some(0), worn: None });
    }

    #[test]
    fn the_greater_of_two_counters_is_told_and_one_that_nobody_keeps_is_not() {
        let told = |log, errors| knowing(log).of("/a", errors, LIMITS);
        assert_eq!(told(log(7, Some(90)), 3).media_errors, 7);
        assert_eq!(told(log(2, Some(90)), 3).media_errors, 3);
        assert_eq!(told(log(u64::MAX, None), 3).media_errors, u32::MAX);
        assert_eq!(told(None, 0), Reading { media_errors: 0, spare_percent: None, worn: None });
        assert_eq!(knowing(log(7, Some(9))).of("/b", 0, LIMITS).spare_percent, None, "another device");
    }

    #[test]
    fn a_drive_is_asked_once_a_minute_and_when_it_is_new_and_never_twice_at_a_time() {
        let (mut wear, now) = (Wear::default(), Instant::now());
        assert_eq!(wear.due(now, &[]), []);
        let one = [place("/a")];
        assert_eq!(wear.due(now, &one), one);
        assert_eq!(wear.due(now + 2 * ASK_EVERY, &one), [], "somebody asks still");
        wear.answered("/a", log(1, Some(50)));
        assert_eq!(wear.due(now + ASK_EVERY / 2, &one), []);
        assert_eq!(wear.due(now + ASK_EVERY, &one), one);
        // Nobody could: it stands.
        wear.answered("/a", None);
        assert_eq!(wear.of("/a", 0, LIMITS).spare_percent, Some(50));

        let both = [place("/a"), place("/b")];
        let later = now + ASK_EVERY + Duration::from_secs(1);
        assert_eq!(wear.due(later, &both), [place("/b")], "the new one");
        wear.answered("/b", None);
        assert_eq!(wear.due(later, &both), [], "one that tells nothing was asked");
        // Closed, and what it said is forgotten.
        assert_eq!(wear.due(later, &[place("/b")]), []);
        assert_eq!(wear.of("/a", 0, LIMITS).spare_percent, None);
    }

    #[test]
    fn a_drive_that_hangs_keeps_nobody_from_asking_others_and_is_not_asked_again_when_it_comes_back() {
        let (mut wear, now) = (Wear::default(), Instant::now());
        let both = [place("/hangs"), place("/b")];
        assert_eq!(wear.due(now, &both), both);
        wear.answered("/b", log(1, Some(50)));
        assert_eq!(wear.due(now + ASK_EVERY, &both), [place("/b")]);
        wear.answered("/b", log(2, Some(49)));
        assert_eq!(wear.of("/b", 0, LIMITS).spare_percent, Some(49));
        // It was closed and opened meanwhile.
        assert_eq!(wear.due(now + 2 * ASK_EVERY, &[]), []);
        assert_eq!(wear.due(now + 2 * ASK_EVERY, &both), [place("/b")]);
        wear.answered("/hangs", log(0, Some(7)));
        assert_eq!(wear.of("/hangs", 0, LIMITS).spare_percent, Some(7));
    }
}
