//! Changed files of a process's credentials, used while it runs, and warnings before they end.
//!
//! Files that are invalid, or those of another process, are refused: the credentials before stay in use. They are refused
//! only if they are still the same at the next check, because a copy of three files from another machine takes a while.

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
    warned: Option<SystemTime>,
    reloads: Arc<Reloads>,
}

impl Follower {
    /// Follows a folder whose files are in use.
    pub fn new(tls: Tls, folder: PathBuf) -> Follower {
        let seen = read(&folder);
        Follower { tls, folder, seen, doubtful: None, warned: None, reloads: Arc::default() }
    }

    /// Counters, which this follower keeps up to date.
    pub fn reloads(&self) -> Arc<Reloads> {
        Arc::clone(&self.reloads)
    }

    /// Uses changed files, and warns at most once a day of credentials that end soon.
    pub fn check(&mut self, now: SystemTime) {
        self.check_files();
        if self.warned.is_none_or(|at| now.duration_since(at).is_ok_and(|since| since >= WARN_EVERY))
            && warn_of_end(&self.tls.credentials(), now)
        {
            self.warned = Some(now);
        }
    }

    fn check_files(&mut self) {
        let found = read(&self.folder);
        if found == self.seen {
            self.doubtful = None;
            return;
        }
        match found.as_ref().map_err(Clone::clone).and_then(|files| self.validate(files)) {
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

    fn files(authority: &Authority, role: &str) -> Files {
        let identity = Identity::new("c", role.parse().expect("a role")).expect("a name");
        let now = OffsetDateTime::now_utc();
        let issued = authority.issue_between(&identity, now, now + Span::days(90)).expect("a certificate");
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
