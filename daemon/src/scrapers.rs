//! Bearer tokens of scrapers, which may read `/metrics` without a client certificate.
//!
//! * A file with one token, on machines without Kubernetes. It is read at each request, so that it can be replaced while
//!   the process runs, and compared in constant time.
//! * Tokens that a review accepts, in Kubernetes: the API server confirms the token, and that its account may
//!   `get` the path `/metrics`. An accepted token is remembered for [`REMEMBERED_FOR`], so a scrape every few seconds
//!   costs one review in that time. A rejected token is remembered for [`REJECTED_FOR`].
//!
//! All clients that reach the port can cause a review, so reviews are bounded: [`REVIEWS_MAX`] at once and
//! [`REVIEWS_PER_SECOND_MAX`]. Tokens and addresses that were accepted within [`KNOWN_FOR`] have a second bound: a flood
//! of wrong tokens from elsewhere does not keep the scraper out.
//!
//! Only digests of tokens are kept.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::io::Read;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::Instant;

/// Validity of an accepted token without another review.
const REMEMBERED_FOR: Duration = Duration::from_secs(30);

/// Most remembered tokens; a cluster has a few scrapers.
const REMEMBERED_MAX: usize = 64;

/// Time for which a rejected token is rejected without another review: its account may get the permission meanwhile.
const REJECTED_FOR: Duration = Duration::from_secs(10);

/// Most remembered rejected tokens: those of [`REJECTED_FOR`] at [`REVIEWS_PER_SECOND_MAX`], and of known clients.
const REJECTED_MAX: usize = 128;

/// Reviews at once, of tokens that are not known; known ones have as many.
const REVIEWS_MAX: usize = 4;

/// Reviews of each kind that start within a second. A review is two calls of the API server.
const REVIEWS_PER_SECOND_MAX: usize = 8;

/// Time for which a token and its client's address are known after a review has accepted the token. Tokens of pods are
/// replaced hourly.
const KNOWN_FOR: Duration = Duration::from_secs(2 * 3_600);

/// Largest token in bytes, as of sessions.
const TOKEN_BYTES_MAX: usize = 8 << 10;

/// Shortest token in a file: 128 bits in hexadecimal.
const FILE_TOKEN_BYTES_MIN: usize = 32;

/// Outcome of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The token may read metrics.
    Accepted,
    /// The token may not, for this reason.
    Rejected(String),
    /// The check cannot be made now, for this reason.
    Unavailable(String),
    /// Too many tokens are being checked.
    Busy,
}

/// A running review of a token.
pub type Reviewing = Pin<Box<dyn Future<Output = Verdict> + Send>>;

/// Starts the review of a token.
pub type Review = dyn Fn(String) -> Reviewing + Send + Sync;

/// Tokens that are accepted. Clones share the remembered ones.
#[derive(Clone, Debug, Default)]
pub struct Scrapers(Source);

#[derive(Clone, Debug, Default)]
enum Source {
    #[default]
    None,
    File(PathBuf),
    Review(Arc<Reviewed>),
}

struct Reviewed {
    review: Box<Review>,
    /// Bounds of reviews for clients that are not known.
    unknown: Bound,
    /// Bounds of reviews for known clients.
    known: Bound,
    memory: Mutex<Memory>,
}

/// Bound of running and of starting reviews.
struct Bound {
    running: Semaphore,
    started: Mutex<VecDeque<Instant>>,
}

/// Results of reviews that are still known.
#[derive(Default)]
struct Memory {
    accepted: HashMap<[u8; 32], Instant>,
    rejected: HashMap<[u8; 32], Rejected>,
    /// Addresses of clients whose token was accepted.
    addresses: HashMap<IpAddr, Instant>,
}

struct Rejected {
    at: Instant,
    reason: String,
}

impl fmt::Debug for Reviewed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Reviewed")
    }
}

impl Scrapers {
    /// Accepts no token: scrapers need a client certificate.
    pub fn none() -> Scrapers {
        Scrapers(Source::None)
    }

    /// Accepts the token of a file.
    ///
    /// # Errors
    /// The file cannot be read, or has no usable token; the text has the remedy.
    pub fn of_file(path: &Path) -> Result<Scrapers, String> {
        read_token(path)?;
        Ok(Scrapers(Source::File(path.to_owned())))
    }

    /// Accepts tokens that a review accepts.
    pub fn reviewed(review: Box<Review>) -> Scrapers {
        let (unknown, known, memory) = (Bound::new(), Bound::new(), Mutex::default());
        Scrapers(Source::Review(Arc::new(Reviewed { review, unknown, known, memory })))
    }

    /// Checks whether a token of a client at this address may read metrics.
    pub async fn check(&self, token: &str, client: Option<IpAddr>) -> Verdict {
        match &self.0 {
            _ if token.len() > TOKEN_BYTES_MAX => Verdict::Rejected("the token is too long".to_owned()),
            Source::None => Verdict::Rejected("this process accepts no tokens".to_owned()),
            Source::File(path) => match read_token(path) {
                Err(error) => Verdict::Unavailable(error),
                // The lengths may differ: their comparison reveals the length of the token only.
                Ok(own) if own.as_bytes().ct_eq(token.as_bytes()).into() => Verdict::Accepted,
                Ok(_) => Verdict::Rejected("it is not the token of the file".to_owned()),
            },
            Source::Review(reviewed) => reviewed.check(token, client).await,
        }
    }
}

impl Reviewed {
    async fn check(&self, token: &str, client: Option<IpAddr>) -> Verdict {
        let digest: [u8; 32] = Sha256::digest(token.as_bytes()).into();
        let is_known = {
            let memory = self.memory();
            if let Some(verdict) = memory.verdict(&digest) {
                return verdict;
            }
            memory.is_known(&digest, client)
        };
        let bound = if is_known { &self.known } else { &self.unknown };
        let Some(_running) = bound.start() else { return Verdict::Busy };
        let verdict = (self.review)(token.to_owned()).await;
        self.memory().remember(digest, client, &verdict);
        verdict
    }

    /// Locks the memory. A poisoned lock is usable, because a panic cannot leave a change half applied.
    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Bound {
    fn new() -> Bound {
        Bound { running: Semaphore::new(REVIEWS_MAX), started: Mutex::default() }
    }

    /// Permits a review to start; `None` if too many run, or have started within a second.
    fn start(&self) -> Option<SemaphorePermit<'_>> {
        let permit = self.running.try_acquire().ok()?;
        let mut started = self.started.lock().unwrap_or_else(PoisonError::into_inner);
        while started.front().is_some_and(|at| at.elapsed() >= Duration::from_secs(1)) {
            started.pop_front();
        }
        if started.len() >= REVIEWS_PER_SECOND_MAX {
            return None;
        }
        started.push_back(Instant::now());
        Some(permit)
    }
}

impl Memory {
    /// Result that is still valid.
    fn verdict(&self, digest: &[u8; 32]) -> Option<Verdict> {
        if self.accepted.get(digest).is_some_and(|at| at.elapsed() < REMEMBERED_FOR) {
            return Some(Verdict::Accepted);
        }
        let rejected = self.rejected.get(digest).filter(|rejected| rejected.at.elapsed() < REJECTED_FOR);
        rejected.map(|rejected| Verdict::Rejected(rejected.reason.clone()))
    }

    fn is_known(&self, digest: &[u8; 32], client: Option<IpAddr>) -> bool {
        let is_recent = |at: &Instant| at.elapsed() < KNOWN_FOR;
        self.accepted.get(digest).is_some_and(is_recent)
            || client.is_some_and(|client| self.addresses.get(&client).is_some_and(is_recent))
    }

    fn remember(&mut self, digest: [u8; 32], client: Option<IpAddr>, verdict: &Verdict) {
        let now = Instant::now();
        self.rejected.retain(|_, rejected| rejected.at.elapsed() < REJECTED_FOR);
        match verdict {
            Verdict::Accepted => {
                insert_bounded(&mut self.accepted, digest, now);
                if let Some(client) = client {
                    insert_bounded(&mut self.addresses, client, now);
                }
            }
            Verdict::Rejected(reason) => {
                self.accepted.remove(&digest);
                if self.rejected.len() < REJECTED_MAX {
                    self.rejected.insert(digest, Rejected { at: now, reason: reason.clone() });
                }
            }
            Verdict::Unavailable(_) | Verdict::Busy => {}
        }
    }
}

/// Remembers a key; forgets the one of the longest ago when there are too many.
fn insert_bounded<K: Copy + Eq + std::hash::Hash>(map: &mut HashMap<K, Instant>, key: K, now: Instant) {
    if map.len() >= REMEMBERED_MAX && !map.contains_key(&key) {
        let oldest = map.iter().min_by_key(|(_, at)| **at).map(|(key, _)| *key);
        oldest.map(|oldest| map.remove(&oldest));
    }
    map.insert(key, now);
}

fn read_token(path: &Path) -> Result<String, String> {
    let remedy =
        "write a random token of at least 32 characters into it, for example of `openssl rand -hex 32`";
    let failed =
        |error: std::io::Error| format!("cannot read the token file {}: {error}; {remedy}", path.display());
    let mut text = String::new();
    let file = std::fs::File::open(path).map_err(failed)?;
    file.take(TOKEN_BYTES_MAX as u64 + 1).read_to_string(&mut text).map_err(failed)?;
    let token = text.trim();
    if !(FILE_TOKEN_BYTES_MIN..=TOKEN_BYTES_MAX).contains(&token.len()) {
        let length = token.len();
        return Err(format!("the token in {} has {length} characters: {remedy}", path.display()));
    }
    Ok(token.to_owned())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[tokio::test]
    async fn token_of_a_file_is_accepted_until_the_file_has_another_one() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("token");
        let (first, second) = ("a".repeat(32), "b".repeat(40));
        std::fs::write(&path, format!("{first}\n")).expect("written");
        let scrapers = Scrapers::of_file(&path).expect("a token");
        assert_eq!(scrapers.check(&first, None).await, Verdict::Accepted);
        for wrong in ["", &first[1..], &second] {
            assert!(matches!(scrapers.check(wrong, None).await, Verdict::Rejected(_)), "{wrong}");
        }
        std::fs::write(&path, &second).expect("written");
        assert_eq!(scrapers.check(&second, None).await, Verdict::Accepted);
        assert!(matches!(scrapers.check(&first, None).await, Verdict::Rejected(_)));
        std::fs::remove_file(&path).expect("removed");
        assert!(matches!(scrapers.check(&second, None).await, Verdict::Unavailable(_)));
    }

    #[test]
    fn short_or_absent_tokens_are_refused_with_the_remedy() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("token");
        let absent = Scrapers::of_file(&path).expect_err("absent");
        assert!(absent.contains("openssl rand"), "{absent}");
        std::fs::write(&path, "secret").expect("written");
        let short = Scrapers::of_file(&path).expect_err("short");
        assert!(short.contains("has 6 characters"), "{short}");
    }

    fn counted(accepts: &'static str) -> (Scrapers, Arc<AtomicUsize>) {
        let reviews = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&reviews);
        let scrapers = Scrapers::reviewed(Box::new(move |token| {
            counter.fetch_add(1, Ordering::Relaxed);
            let accepted = token.starts_with(accepts);
            Box::pin(async move {
                if accepted { Verdict::Accepted } else { Verdict::Rejected("unknown".to_owned()) }
            })
        }));
        (scrapers, reviews)
    }

    #[tokio::test(start_paused = true)]
    async fn tokens_are_reviewed_again_after_a_time() {
        let (scrapers, reviews) = counted("good");
        for _ in 0..3 {
            assert_eq!(scrapers.check("good", None).await, Verdict::Accepted);
            assert!(
                matches!(scrapers.check("bad", None).await, Verdict::Rejected(reason) if reason == "unknown")
            );
        }
        assert_eq!(reviews.load(Ordering::Relaxed), 2);
        tokio::time::advance(REJECTED_FOR).await;
        assert!(matches!(scrapers.check("bad", None).await, Verdict::Rejected(_)));
        assert_eq!(reviews.load(Ordering::Relaxed), 3);
        tokio::time::advance(REMEMBERED_FOR).await;
        assert_eq!(scrapers.check("good", None).await, Verdict::Accepted);
        assert_eq!(reviews.load(Ordering::Relaxed), 4);
    }

    #[tokio::test(start_paused = true)]
    async fn a_flood_of_wrong_tokens_causes_few_reviews_and_keeps_no_scraper_out() {
        let (scrapers, reviews) = counted("good");
        let (scraper, attacker) = (Some("10.0.0.1".parse().expect("an address")), None);
        assert_eq!(scrapers.check("good", scraper).await, Verdict::Accepted);
        let seconds = 120;
        let mut rejected = 0;
        for second in 0..seconds {
            for number in 0..100 {
                match scrapers.check(&format!("bad {second} {number}"), attacker).await {
                    Verdict::Rejected(_) => rejected += 1,
                    verdict => assert_eq!(verdict, Verdict::Busy),
                }
            }
            // Its token is reviewed again every 30 s, and replaced after a minute.
            let token = if second < seconds / 2 { "good" } else { "good again" };
            assert_eq!(scrapers.check(token, scraper).await, Verdict::Accepted, "after {second} s");
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        assert_eq!(rejected, seconds * REVIEWS_PER_SECOND_MAX - 1, "one was the first of the scraper");
        assert!(reviews.load(Ordering::Relaxed) <= seconds * REVIEWS_PER_SECOND_MAX + 5);
    }

    #[tokio::test(start_paused = true)]
    async fn remembered_tokens_are_bounded() {
        let (scrapers, _) = counted("good");
        for number in 0..REMEMBERED_MAX + 10 {
            tokio::time::advance(Duration::from_secs(1)).await;
            assert_eq!(scrapers.check(&format!("good{number}"), None).await, Verdict::Accepted);
        }
        for number in 0..2 * REJECTED_MAX {
            if number % REVIEWS_PER_SECOND_MAX == 0 {
                tokio::time::advance(Duration::from_secs(1)).await;
            }
            assert!(matches!(scrapers.check(&number.to_string(), None).await, Verdict::Rejected(_)));
        }
        let Source::Review(reviewed) = &scrapers.0 else { panic!("it reviews") };
        let memory = reviewed.memory();
        assert_eq!(memory.accepted.len(), REMEMBERED_MAX);
        assert!(memory.rejected.len() <= REJECTED_MAX, "{}", memory.rejected.len());
    }

    #[tokio::test]
    async fn reviews_at_once_are_bounded() {
        let scrapers = Scrapers::reviewed(Box::new(|_| Box::pin(std::future::pending())));
        let waiting: Vec<_> = (0..REVIEWS_MAX)
            .map(|number| {
                let scrapers = scrapers.clone();
                tokio::spawn(async move { scrapers.check(&number.to_string(), None).await })
            })
            .collect();
        let Source::Review(reviewed) = &scrapers.0 else { panic!("it reviews") };
        while reviewed.unknown.running.available_permits() > 0 {
            tokio::task::yield_now().await;
        }
        assert_eq!(scrapers.check("another", None).await, Verdict::Busy);
        waiting.iter().for_each(tokio::task::JoinHandle::abort);
    }
}
