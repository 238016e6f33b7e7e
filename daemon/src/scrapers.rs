//! Bearer tokens of scrapers, which may read `/metrics` without a client certificate.
//!
//! * A file with one token, on machines without Kubernetes. It is read at each request, so that it can be replaced while
//!   the process runs, and compared in constant time.
//! * Tokens that a review accepts, in Kubernetes: the API server confirms the token, and that its account may
//!   `get` the path `/metrics`. An accepted token is remembered for [`REMEMBERED_FOR`], so a scrape every few seconds
//!   costs one review in that time. Rejected tokens are not remembered: [`REVIEWS_MAX`] reviews at once are the bound.
//!
//! Only digests of tokens are kept.

use std::collections::HashMap;
use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use tokio::sync::Semaphore;
use tokio::time::Instant;

/// Validity of an accepted token without another review.
const REMEMBERED_FOR: Duration = Duration::from_secs(30);

/// Most remembered tokens; a cluster has a few scrapers.
const REMEMBERED_MAX: usize = 64;

/// Reviews at once. All clients that reach the port can cause one.
const REVIEWS_MAX: usize = 4;

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
    reviews: Semaphore,
    remembered: Mutex<HashMap<[u8; 32], Instant>>,
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
        let reviews = Semaphore::new(REVIEWS_MAX);
        Scrapers(Source::Review(Arc::new(Reviewed { review, reviews, remembered: Mutex::default() })))
    }

    /// Checks whether a token may read metrics.
    pub async fn check(&self, token: &str) -> Verdict {
        match &self.0 {
            _ if token.len() > TOKEN_BYTES_MAX => Verdict::Rejected("the token is too long".to_owned()),
            Source::None => Verdict::Rejected("this process accepts no tokens".to_owned()),
            Source::File(path) => match read_token(path) {
                Err(error) => Verdict::Unavailable(error),
                // The lengths may differ: their comparison reveals the length of the token only.
                Ok(own) if own.as_bytes().ct_eq(token.as_bytes()).into() => Verdict::Accepted,
                Ok(_) => Verdict::Rejected("it is not the token of the file".to_owned()),
            },
            Source::Review(reviewed) => reviewed.check(token).await,
        }
    }
}

impl Reviewed {
    async fn check(&self, token: &str) -> Verdict {
        let digest: [u8; 32] = Sha256::digest(token.as_bytes()).into();
        let is_recent = |at: &Instant| at.elapsed() < REMEMBERED_FOR;
        let remembered = || self.remembered.lock().unwrap_or_else(PoisonError::into_inner);
        if remembered().get(&digest).is_some_and(is_recent) {
            return Verdict::Accepted;
        }
        let Ok(_permit) = self.reviews.try_acquire() else {
            return Verdict::Unavailable("too many tokens are being reviewed".to_owned());
        };
        let verdict = (self.review)(token.to_owned()).await;
        let mut remembered = remembered();
        remembered.retain(|_, at| is_recent(at));
        if verdict == Verdict::Accepted && remembered.len() < REMEMBERED_MAX {
            remembered.insert(digest, Instant::now());
        }
        verdict
    }
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
        assert_eq!(scrapers.check(&first).await, Verdict::Accepted);
        for wrong in ["", &first[1..], &second] {
            assert!(matches!(scrapers.check(wrong).await, Verdict::Rejected(_)), "{wrong}");
        }
        std::fs::write(&path, &second).expect("written");
        assert_eq!(scrapers.check(&second).await, Verdict::Accepted);
        assert!(matches!(scrapers.check(&first).await, Verdict::Rejected(_)));
        std::fs::remove_file(&path).expect("removed");
        assert!(matches!(scrapers.check(&second).await, Verdict::Unavailable(_)));
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
    async fn accepted_token_is_reviewed_again_after_a_time_and_a_rejected_one_always() {
        let (scrapers, reviews) = counted("good");
        for _ in 0..3 {
            assert_eq!(scrapers.check("good").await, Verdict::Accepted);
        }
        assert_eq!(reviews.load(Ordering::Relaxed), 1);
        tokio::time::advance(REMEMBERED_FOR).await;
        assert_eq!(scrapers.check("good").await, Verdict::Accepted);
        assert_eq!(reviews.load(Ordering::Relaxed), 2);
        for _ in 0..2 {
            assert!(matches!(scrapers.check("bad").await, Verdict::Rejected(_)));
        }
        assert_eq!(reviews.load(Ordering::Relaxed), 4);
    }

    #[tokio::test]
    async fn remembered_tokens_are_bounded() {
        let (scrapers, _) = counted("good");
        for number in 0..REMEMBERED_MAX + 10 {
            assert_eq!(scrapers.check(&format!("good{number}")).await, Verdict::Accepted);
        }
        let Source::Review(reviewed) = &scrapers.0 else { panic!("it reviews") };
        assert_eq!(reviewed.remembered.lock().expect("no panic").len(), REMEMBERED_MAX);
    }

    #[tokio::test]
    async fn reviews_at_once_are_bounded() {
        let scrapers = Scrapers::reviewed(Box::new(|_| Box::pin(std::future::pending())));
        let waiting: Vec<_> = (0..REVIEWS_MAX)
            .map(|number| {
                let scrapers = scrapers.clone();
                tokio::spawn(async move { scrapers.check(&number.to_string()).await })
            })
            .collect();
        let Source::Review(reviewed) = &scrapers.0 else { panic!("it reviews") };
        while reviewed.reviews.available_permits() > 0 {
            tokio::task::yield_now().await;
        }
        assert!(matches!(scrapers.check("another").await, Verdict::Unavailable(_)));
        waiting.iter().for_each(tokio::task::JoinHandle::abort);
    }
}
