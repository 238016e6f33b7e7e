//! Changed files of a process's credentials, used while it runs, and warnings before they end.
//!
//! Files that are invalid, or those of another process, are refused: the credentials before stay in use. They are refused
//! only if they are still the same at the next check, because a copy of three files from another machine takes a while.
//!
//! A certificate that has ended is refused as well, and one that is not valid yet is used as soon as it is: other processes
//! would refuse both, and the credentials before are at least as good.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use crate::credentials::{Credentials, Files};
use crate::tls::Tls;

/// Interval at which files are compared with those in use: three reads of some KiB from the page cache.
pub const CHECK_EVERY: Duration = Duration::from_secs(2);

/// Interval of warnings about one certificate.
const WARN_EVERY: Duration = Duration::from_secs(24 * 3_600);

/// Time before the end of an authority from which on it has to be replaced: certificates for 90 days are renewed from
/// both authorities meanwhile.
pub const REPLACE_AUTHORITY_WITHIN: Duration = Duration::from_secs(365 * 24 * 3_600);

/// Counters of changed files, and the reason of the last refusal.
#[derive(Debug, Default)]
pub struct Reloads {
    accepted: AtomicU64,
    refused: AtomicU64,
    /// Reason why the files are not in use, while they are not.
    problem: Mutex<Option<String>>,
}

impl Reloads {
    /// Number of changes that were used.
    pub fn accepted(&self) -> u64 {
        self.accepted.load(Ordering::Relaxed)
    }

    /// Number of changes that were refused.
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// Reason why the files in the folder are not in use; none if they are.
    pub fn problem(&self) -> Option<String> {
        self.problem.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_problem(&self, problem: Option<String>) {
        *self.problem.lock().unwrap_or_else(PoisonError::into_inner) = problem;
    }
}

/// Follows the files of one process.
#[derive(Debug)]
pub struct Follower {
    tls: Tls,
    folder: PathBuf,
    /// Files, or the error of reading them, that were used or refused last.
    seen: Result<Files, String>,
    /// Invalid files at the check before.
    doubtful: Option<Result<Files, String>>,
    /// Begin of the validity of the files that were refused last, if that was the reason.
    valid_from: Option<SystemTime>,
    warned: Option<SystemTime>,
    reloads: Arc<Reloads>,
}

impl Follower {
    /// Follows a folder whose files are in use.
    pub fn new(tls: Tls, folder: PathBuf) -> Follower {
        let seen = read(&folder);
        let reloads = Arc::default();
        Follower { tls, folder, seen, doubtful: None, valid_from: None, warned: None, reloads }
    }

    /// Counters, which this follower keeps up to date.
    pub fn reloads(&self) -> Arc<Reloads> {
        Arc::clone(&self.reloads)
    }

    /// Uses changed files, and warns at most once a day of credentials that end soon.
    pub fn check(&mut self, now: SystemTime) {
        self.check_files(now);
        if self.warned.is_none_or(|at| now.duration_since(at).is_ok_and(|since| since >= WARN_EVERY))
            && warn_of_end(&self.tls.credentials(), now)
        {
            self.warned = Some(now);
        }
    }

    fn check_files(&mut self, now: SystemTime) {
        let found = read(&self.folder);
        let has_become_valid = self.valid_from.is_some_and(|from| from <= now);
        if found == self.seen && !has_become_valid {
            self.doubtful = None;
            return;
        }
        let credentials = found.as_ref().map_err(Clone::clone).and_then(|files| self.validate(files));
        let begin = credentials.as_ref().map(|credentials| credentials.not_before);
        self.valid_from = begin.ok().filter(|from| *from > now);
        match credentials.and_then(|credentials| check_time(credentials, now)) {
            Ok(credentials) => {
                tracing::info!(
                    identity = %credentials.identity,
                    fingerprint = %credentials.fingerprint,
                    authorities = credentials.authorities.len(),
                    "use new certificates"
                );
                self.tls.replace(credentials);
                self.warned = None;
                self.reloads.accepted.fetch_add(1, Ordering::Relaxed);
                self.reloads.set_problem(None);
            }
            Err(_) if self.doubtful.as_ref() != Some(&found) => {
                self.doubtful = Some(found);
                return;
            }
            Err(error) => {
                tracing::warn!(folder = %self.folder.display(), %error, "keep the certificates before");
                self.reloads.refused.fetch_add(1, Ordering::Relaxed);
                self.reloads.set_problem(Some(error));
            }
        }
        (self.seen, self.doubtful) = (found, None);
    }

    /// Returns the credentials of files that may replace those in use.
    fn validate(&self, files: &Files) -> Result<Credentials, String> {
        let credentials = Credentials::parse(files).map_err(|error| error.to_string())?;
        credentials.check_issuer().map_err(|error| error.to_string())?;
        let (own, found) = (&self.tls.credentials().identity, &credentials.identity);
        if found == own {
            Ok(credentials)
        } else {
            Err(format!("the certificate is of {found}, and this process is {own}: issue one for it"))
        }
    }
}

/// Returns credentials whose certificate is valid now.
fn check_time(credentials: Credentials, now: SystemTime) -> Result<Credentials, String> {
    let remedy = "check the clocks, or issue another one";
    let seconds = |from: SystemTime, to: SystemTime| to.duration_since(from).unwrap_or_default().as_secs();
    if now >= credentials.not_after {
        let ago = seconds(credentials.not_after, now);
        return Err(format!("the certificate ended {ago} s ago: {remedy}"));
    }
    if now < credentials.not_before {
        let left = seconds(now, credentials.not_before);
        return Err(format!("the certificate is not valid before {left} s from now: {remedy}"));
    }
    Ok(credentials)
}

fn read(folder: &std::path::Path) -> Result<Files, String> {
    Files::read(folder).map_err(|error| error.to_string())
}

/// Logs credentials that end soon. Returns whether they do.
fn warn_of_end(credentials: &Credentials, now: SystemTime) -> bool {
    let days = |left: Duration| left.as_secs() / 86_400;
    let (identity, left) = (&credentials.identity, credentials.remaining(now));
    let authority = credentials.authorities_not_after().duration_since(now).unwrap_or_default();
    let is_overdue = credentials.is_renewal_overdue(now);
    if left.is_zero() {
        tracing::error!(%identity, "the certificate has ended, and others refuse it: renew it");
    } else if is_overdue {
        tracing::warn!(%identity, days_left = days(left), seconds_left = left.as_secs(), "the certificate ends soon: renew it");
    }
    let authority_ends = authority < REPLACE_AUTHORITY_WITHIN;
    if authority_ends {
        tracing::warn!(%identity, days_left = days(authority), "a trusted authority ends: replace it");
    }
    is_overdue || authority_ends
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use time::{Duration as Span, OffsetDateTime};

    use super::*;
    use crate::authority::Authority;
    use crate::name::Identity;
    use crate::write;

    const DAY: Duration = Duration::from_secs(86_400);

    /// Files with a certificate for 90 days.
    fn files(authority: &Authority, role: &str) -> Files {
        files_from(authority, role, -Span::minutes(1))
    }

    /// The same, from so long after now.
    fn files_from(authority: &Authority, role: &str, from: Span) -> Files {
        let identity = Identity::new("c", role.parse().expect("a role")).expect("a name");
        let from = OffsetDateTime::now_utc() + from;
        let issued = authority.issue_between(&identity, from, from + Span::days(90)).expect("a certificate");
        issued.into_files(authority.certificate())
    }

    fn follower(folder: &Path, files: &Files) -> Follower {
        write::replace_files(folder, files).expect("the folder exists");
        let tls = Tls::new(Credentials::parse(files).expect("valid files"));
        Follower::new(tls, folder.to_owned())
    }

    #[test]
    fn renewed_files_are_used_and_others_are_refused_at_the_second_check() {
        let (folder, authority) =
            (tempfile::tempdir().expect("a folder"), Authority::create("c").expect("a name"));
        let first = files(&authority, "member");
        let mut follower = follower(folder.path(), &first);
        let reloads = follower.reloads();
        let now = SystemTime::now();
        let in_use = |follower: &Follower| follower.tls.credentials().fingerprint;
        let before = in_use(&follower);

        let renewed = files(&authority, "member");
        write::replace_files(folder.path(), &renewed).expect("the folder exists");
        follower.check(now);
        let after = in_use(&follower);
        assert!(after != before && reloads.accepted() == 1 && reloads.problem().is_none());

        let foreign = Authority::create("c").expect("a name");
        let of_foreign = Files { authorities: renewed.authorities.clone(), ..files(&foreign, "member") };
        for (wrong, words) in [
            (Files { key: first.key.clone(), ..renewed.clone() }, "replace both together"),
            (files(&authority, "agent/n"), "this process is reprise://c/member"),
            (of_foreign, "no authority in ca.crt"),
        ] {
            let refused = reloads.refused();
            write::replace_files(folder.path(), &wrong).expect("the folder exists");
            follower.check(now);
            assert_eq!(reloads.refused(), refused, "a copy may be under way");
            follower.check(now);
            follower.check(now);
            assert_eq!(reloads.refused(), refused + 1, "counted once");
            assert!(reloads.problem().is_some_and(|problem| problem.contains(words)), "{words}");
            assert_eq!(in_use(&follower), after);
        }
        std::fs::remove_file(folder.path().join("ca.crt")).expect("it exists");
        follower.check(now);
        follower.check(now);
        assert!(reloads.problem().is_some_and(|problem| problem.contains("cannot read")));
        write::replace_files(folder.path(), &first).expect("the folder exists");
        follower.check(now);
        assert!(in_use(&follower) == before && reloads.problem().is_none() && reloads.accepted() == 2);
    }

    #[test]
    fn certificates_that_are_not_valid_now_replace_no_valid_one() {
        let (folder, authority) =
            (tempfile::tempdir().expect("a folder"), Authority::create("c").expect("a name"));
        let mut follower = follower(folder.path(), &files(&authority, "member"));
        let (reloads, now) = (follower.reloads(), SystemTime::now());
        let in_use = |follower: &Follower| follower.tls.credentials().fingerprint;
        let before = in_use(&follower);
        for (number, from, words) in [(1, -Span::days(91), "ended"), (2, Span::days(1), "not valid before")] {
            let wrong = files_from(&authority, "member", from);
            write::replace_files(folder.path(), &wrong).expect("the folder exists");
            for _ in 0..4 {
                follower.check(now);
            }
            assert_eq!((reloads.refused(), reloads.accepted()), (number, 0), "counted once: {words}");
            assert!(reloads.problem().is_some_and(|problem| problem.contains(words)), "{words}");
            assert_eq!(in_use(&follower), before);
        }
        follower.check(now + DAY + Duration::from_secs(60));
        assert_eq!(reloads.accepted(), 1, "it has become valid");
        assert!(in_use(&follower) != before && reloads.problem().is_none());
        follower.check(now + 2 * DAY);
        assert_eq!((reloads.refused(), reloads.accepted()), (2, 1));
    }

    #[test]
    fn warns_once_a_day_from_three_tenths_of_the_validity_on() {
        let (folder, authority) =
            (tempfile::tempdir().expect("a folder"), Authority::create("c").expect("a name"));
        let mut follower = follower(folder.path(), &files(&authority, "member"));
        let start = SystemTime::now();
        let mut warnings = 0;
        for day in 0..100 {
            for hour in [0, 6, 18] {
                let before = follower.warned;
                follower.check(start + day * DAY + hour * DAY / 24);
                warnings += i32::from(follower.warned != before);
            }
        }
        assert_eq!(warnings, 37, "from day 63 on, also after the end");
    }
}
