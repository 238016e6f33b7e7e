//! Verifies service account tokens with the API server, using the agent's account (TokenReview,
//! authentication.k8s.io/v1).
//!
//! A session presents a token with the agents' audience, which the kubelet issues for its pod. The
//! requester blocks on its own thread; the requests run on the runtime of the watch.
//!
//! While the API server is unreachable, a previous result stays valid for [`CACHED_FOR`], so that engines
//! can reconnect. Otherwise the server is always asked: a revoked token is rejected immediately.
//!
//! Signatures are not verified locally: that would ignore deleted pods, and require another copy of the
//! keys.

mod scraper;

use std::collections::HashMap;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec};
use kube::Client;
use kube::api::{Api, PostParams};
use reprise_policy::identity::ReviewOutcome;
use sha2::{Digest, Sha256};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::time::{Instant, timeout};

use crate::connect::Access;

/// Time limit of a request. Clients wait 5 s for the reply to their greeting by default.
const REVIEW_TIMEOUT: Duration = Duration::from_secs(2);

/// Time limit of a review, including the start of the service.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);

/// Validity of a cached result while the server is unreachable: longer than a restart of the server,
/// shorter than the lifetime of a token (1 h).
const CACHED_FOR: Duration = Duration::from_secs(600);

/// Maximum number of cached tokens: four for each of 256 sessions.
const CACHED_MAX: usize = 1024;

/// Maximum number of concurrent requests. Any process that can connect causes requests, and they share the
/// server with the agent's own.
const CONCURRENT_MAX: usize = 8;

/// Maximum size of a token in bytes; docs/PROTOCOL.md.
const TOKEN_BYTES_MAX: usize = 8 << 10;

/// Capacity of the request queue: one for each session in its handshake.
const QUEUED_MAX: usize = 256;

/// Submits token reviews; clones share the queue.
#[derive(Clone, Debug)]
pub struct TokenReviewer {
    requests: mpsc::Sender<ReviewRequest>,
}

/// Executes token reviews; see [`TokenReviewService::run`].
#[derive(Debug)]
pub struct TokenReviewService {
    requests: mpsc::Receiver<ReviewRequest>,
    audience: &'static str,
}

#[derive(Debug)]
struct ReviewRequest {
    token: String,
    answer: Answer,
}

/// Requester that waits for a review.
#[derive(Debug)]
enum Answer {
    Session(SyncSender<ReviewOutcome>),
    Scraper(oneshot::Sender<ReviewOutcome>),
}

/// Users of valid tokens, by the tokens' digests.
#[derive(Debug, Default)]
struct ReviewCache {
    users: HashMap<[u8; 32], (String, Instant)>,
}

/// Creates a reviewer and its service. Only tokens with this audience are accepted.
pub fn token_review_channel(audience: &'static str) -> (TokenReviewer, TokenReviewService) {
    let (send_review, requests) = mpsc::channel(QUEUED_MAX);
    (TokenReviewer { requests: send_review }, TokenReviewService { requests, audience })
}

impl TokenReviewer {
    /// Reviews a token; blocks for at most 3 s, so it must not run on a runtime's thread.
    pub fn review(&self, token: &str) -> ReviewOutcome {
        // Tokens issued by Kubernetes have three parts; others need no request.
        if token.len() > TOKEN_BYTES_MAX || token.split('.').count() != 3 {
            return ReviewOutcome::Rejected("not a service account token".to_owned());
        }
        let (answer, answered) = sync_channel(1);
        let request = ReviewRequest { token: token.to_owned(), answer: Answer::Session(answer) };
        let words = match self.requests.try_send(request) {
            Ok(()) => match answered.recv_timeout(ANSWER_TIMEOUT) {
                Ok(reviewed) => return reviewed,
                Err(_) => format!("timed out after {ANSWER_TIMEOUT:?}"),
            },
            Err(error) => format!("cannot queue the review: {error}"),
        };
        ReviewOutcome::Unreachable(words)
    }

    /// Reviews a token of any audience of the API server, whose account must be permitted to `get` the path
    /// `/metrics`.
    pub async fn review_scraper(&self, token: &str) -> ReviewOutcome {
        let (answer, answered) = oneshot::channel();
        let request = ReviewRequest { token: token.to_owned(), answer: Answer::Scraper(answer) };
        if let Err(error) = self.requests.try_send(request) {
            return ReviewOutcome::Unreachable(format!("cannot queue the review: {error}"));
        }
        match timeout(ANSWER_TIMEOUT, answered).await {
            Ok(Ok(reviewed)) => reviewed,
            Ok(Err(_)) | Err(_) => ReviewOutcome::Unreachable(format!("timed out after {ANSWER_TIMEOUT:?}")),
        }
    }
}

impl TokenReviewService {
    /// Runs until all reviewers are dropped.
    pub async fn run(mut self, access: Access) {
        let client = access.client().await;
        let audience = self.audience;
        let cache = Arc::new(Mutex::new(ReviewCache::default()));
        let permits = Arc::new(Semaphore::new(CONCURRENT_MAX));
        while let Some(ReviewRequest { token, answer }) = self.requests.recv().await {
            match &client {
                Ok(client) => {
                    // A requester that timed out while waiting for a permit ignores the result.
                    let Ok(permit) = Arc::clone(&permits).acquire_owned().await else { return };
                    let (client, cache) = (client.clone(), Arc::clone(&cache));
                    tokio::spawn(async move {
                        let _place = permit;
                        let outcome = match &answer {
                            Answer::Session(_) => {
                                let outcome = send_review(client, &token, audience).await;
                                let mut cache = cache.lock().unwrap_or_else(PoisonError::into_inner);
                                cache.update_cache(&token, outcome, Instant::now())
                            }
                            Answer::Scraper(_) => scraper::review(&client, &token).await,
                        };
                        answer.send(outcome);
                    });
                }
                Err(error) => answer.send(ReviewOutcome::Unreachable(error.to_string())),
            }
        }
    }
}

async fn send_review(client: Client, token: &str, audience: &str) -> ReviewOutcome {
    let spec = TokenReviewSpec { token: token.to_owned(), audiences: Some(vec![audience.to_owned()]) };
    let review = TokenReview { spec, ..TokenReview::default() };
    let api: Api<TokenReview> = Api::all(client);
    match timeout(REVIEW_TIMEOUT, api.create(&PostParams::default(), &review)).await {
        Ok(Ok(answer)) => interpret(answer, audience),
        Ok(Err(error)) => ReviewOutcome::Unreachable(error.to_string()),
        Err(_) => {
            ReviewOutcome::Unreachable(format!("the API server did not respond within {REVIEW_TIMEOUT:?}"))
        }
    }
}

/// Interprets a review. A server that does not support audiences returns none; its result is then rejected.
fn interpret(answer: TokenReview, audience: &str) -> ReviewOutcome {
    let status = answer.status.unwrap_or_default();
    let for_us = status.audiences.iter().flatten().any(|known| known == audience);
    let user = status.user.and_then(|user| user.username);
    match user {
        Some(user) if status.authenticated == Some(true) && for_us => ReviewOutcome::User(user),
        _ => ReviewOutcome::Rejected(
            status.error.unwrap_or_else(|| format!("the token does not have the audience {audience}")),
        ),
    }
}

impl Answer {
    /// Sends an answer; the requester may have timed out.
    fn send(self, outcome: ReviewOutcome) {
        match self {
            Answer::Session(answer) => drop(answer.send(outcome)),
            Answer::Scraper(answer) => drop(answer.send(outcome)),
        }
    }
}

impl ReviewCache {
    /// Updates the cache and returns the result for the requester.
    fn update_cache(&mut self, token: &str, outcome: ReviewOutcome, now: Instant) -> ReviewOutcome {
        let digest: [u8; 32] = Sha256::digest(token.as_bytes()).into();
        match &outcome {
            ReviewOutcome::User(user) => {
                self.users.retain(|_, (_, at)| now - *at < CACHED_FOR);
                if self.users.len() < CACHED_MAX || self.users.contains_key(&digest) {
                    self.users.insert(digest, (user.clone(), now));
                }
            }
            ReviewOutcome::Rejected(_) => drop(self.users.remove(&digest)),
            ReviewOutcome::Unreachable(_) => {
                let known = self.users.get(&digest).filter(|(_, at)| now - *at < CACHED_FOR);
                if let Some((user, _)) = known {
                    return ReviewOutcome::User(user.clone());
                }
            }
        }
        outcome
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AUDIENCE: &str = "agents";

    fn answer(status: &serde_json::Value) -> ReviewOutcome {
        let whole = serde_json::json!({ "spec": {}, "status": status });
        interpret(serde_json::from_value(whole).expect("a review"), AUDIENCE)
    }

    #[test]
    fn token_is_valid_only_if_the_server_confirms_user_and_audience() {
        let user = "system:serviceaccount:chat:vllm";
        let outcome = |authenticated: bool, audiences: &[&str]| {
            answer(&serde_json::json!({
                "authenticated": authenticated, "audiences": audiences, "user": { "username": user },
            }))
        };
        assert_eq!(outcome(true, &[AUDIENCE]), ReviewOutcome::User(user.to_owned()));
        for other in [outcome(true, &[]), outcome(true, &["https://kubernetes"]), outcome(false, &[AUDIENCE])]
        {
            assert!(matches!(other, ReviewOutcome::Rejected(words) if words.contains(AUDIENCE)));
        }
        let words = answer(&serde_json::json!({ "authenticated": false, "error": "token has expired" }));
        assert_eq!(words, ReviewOutcome::Rejected("token has expired".to_owned()));
        assert!(matches!(answer(&serde_json::json!({})), ReviewOutcome::Rejected(_)));
    }

    #[test]
    fn cached_result_is_used_for_a_time_while_the_server_is_unreachable() {
        let (mut cache, now) = (ReviewCache::default(), Instant::now());
        let (user, away) =
            (ReviewOutcome::User("u".to_owned()), ReviewOutcome::Unreachable("down".to_owned()));
        assert_eq!(cache.update_cache("t", away.clone(), now), away);
        assert_eq!(cache.update_cache("t", user.clone(), now), user);
        assert_eq!(cache.update_cache("t", away.clone(), now + CACHED_FOR / 2), user);
        assert_eq!(cache.update_cache("other", away.clone(), now), away);
        assert_eq!(cache.update_cache("t", away.clone(), now + CACHED_FOR), away);
        cache.update_cache("t", user, now);
        let refused = ReviewOutcome::Rejected("its pod is gone".to_owned());
        assert_eq!(cache.update_cache("t", refused.clone(), now), refused);
        assert_eq!(
            cache.update_cache("t", away.clone(), now),
            away,
            "a rejected token is dropped from the cache"
        );
    }

    #[test]
    fn cache_is_bounded() {
        let (mut cache, now) = (ReviewCache::default(), Instant::now());
        for index in 0..CACHED_MAX + 10 {
            cache.update_cache(&index.to_string(), ReviewOutcome::User("u".to_owned()), now);
        }
        assert_eq!(cache.users.len(), CACHED_MAX);
        cache.update_cache("late", ReviewOutcome::User("u".to_owned()), now + CACHED_FOR);
        assert_eq!(cache.users.len(), 1, "expired entries are removed");
    }
}
