//! Whose a token is: the API server is asked, by the agent's own account (TokenReview, authentication.k8s.io/v1).
//!
//! A session shows a token of the agents' own audience, which the kubelet makes for its pod. Who asks waits on a thread of its own;
//! the requests run beside the watch, on its runtime.
//!
//! What the server said of a token holds for [`REMEMBERED_FOR`] while it is away, so that an engine that connects again does. It is asked
//! whenever it answers: a token that it takes no more is refused at once.
//!
//! Deliberately absent: verifying signatures here. It would know nothing of pods that are gone, and be one more place for keys.

use std::collections::HashMap;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec};
use kube::Client;
use kube::api::{Api, PostParams};
use sha2::{Digest, Sha256};
use tokio::sync::{Semaphore, mpsc};
use tokio::time::{Instant, timeout};

use crate::connect::Access;

/// How long the API server may take. Clients wait 5 s for their greeting's answer unless told otherwise.
const REVIEW_TIMEOUT: Duration = Duration::from_secs(2);

/// How long somebody waits for the whole: the review, and the thread that asks, which may be starting still.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);

/// How long what was said of a token holds while the server is away: longer than its restart, shorter than the hour of a token.
const REMEMBERED_FOR: Duration = Duration::from_secs(600);

/// Tokens that are remembered: four for each of 256 sessions.
const REMEMBERED_MAX: usize = 1024;

/// Questions that the API server is asked at once: whoever may connect can ask, and the agent's own requests go the same way.
const ASKED_AT_ONCE: usize = 8;

/// Bytes of a token; docs/PROTOCOL.md.
const TOKEN_BYTES_MAX: usize = 8 << 10;

/// Questions that wait: one for each session that is greeted.
const QUESTIONS_MAX: usize = 256;

/// What became of a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reviewed {
    /// It is this user's.
    User(String),
    /// The server does not take it, in words.
    Refused(String),
    /// The server could not be asked, in words.
    Away(String),
}

/// Where tokens are asked about. Clones ask the same.
#[derive(Clone, Debug)]
pub struct Reviewer {
    questions: mpsc::Sender<Question>,
}

/// The other end, which [`Reviews::run`] serves.
#[derive(Debug)]
pub struct Reviews {
    questions: mpsc::Receiver<Question>,
    audience: &'static str,
}

#[derive(Debug)]
struct Question {
    token: String,
    answer: SyncSender<Reviewed>,
}

/// What was said of tokens, by their digests.
#[derive(Debug, Default)]
struct Remembered {
    users: HashMap<[u8; 32], (String, Instant)>,
}

/// Both ends. Tokens of this audience count, and no others.
pub fn reviews(audience: &'static str) -> (Reviewer, Reviews) {
    let (ask, questions) = mpsc::channel(QUESTIONS_MAX);
    (Reviewer { questions: ask }, Reviews { questions, audience })
}

impl Reviewer {
    /// Asks whose a token is, and waits for the answer, 3 s at the most. Not for a thread of a runtime.
    pub fn review(&self, token: &str) -> Reviewed {
        // The signed form that Kubernetes issues has three parts: nobody needs to be asked about anything else.
        if token.len() > TOKEN_BYTES_MAX || token.split('.').count() != 3 {
            return Reviewed::Refused("it is no token of a service account".to_owned());
        }
        let (answer, answered) = sync_channel(1);
        let question = Question { token: token.to_owned(), answer };
        let words = match self.questions.try_send(question) {
            Ok(()) => match answered.recv_timeout(ANSWER_TIMEOUT) {
                Ok(reviewed) => return reviewed,
                Err(_) => format!("there was no answer within {ANSWER_TIMEOUT:?}"),
            },
            Err(error) => format!("the agent cannot ask now: {error}"),
        };
        Reviewed::Away(words)
    }
}

impl Reviews {
    /// Asks the API server until nobody asks any more.
    pub async fn run(mut self, access: Access) {
        let client = access.client().await;
        let audience = self.audience;
        let remembered = Arc::new(Mutex::new(Remembered::default()));
        let places = Arc::new(Semaphore::new(ASKED_AT_ONCE));
        while let Some(Question { token, answer }) = self.questions.recv().await {
            match &client {
                Ok(client) => {
                    // Who waits too long for a place has gone by then.
                    let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
                    let (client, remembered) = (client.clone(), Arc::clone(&remembered));
                    tokio::spawn(async move {
                        let _place = place;
                        let said = ask(client, &token, audience).await;
                        let lock = || remembered.lock().unwrap_or_else(PoisonError::into_inner);
                        // Who asked may have gone.
                        let _ = answer.send(lock().settle(&token, said, Instant::now()));
                    });
                }
                Err(error) => drop(answer.send(Reviewed::Away(error.to_string()))),
            }
        }
    }
}

async fn ask(client: Client, token: &str, audience: &str) -> Reviewed {
    let spec = TokenReviewSpec { token: token.to_owned(), audiences: Some(vec![audience.to_owned()]) };
    let review = TokenReview { spec, ..TokenReview::default() };
    let api: Api<TokenReview> = Api::all(client);
    match timeout(REVIEW_TIMEOUT, api.create(&PostParams::default(), &review)).await {
        Ok(Ok(answer)) => judge(answer, audience),
        Ok(Err(error)) => Reviewed::Away(error.to_string()),
        Err(_) => Reviewed::Away(format!("the API server did not answer within {REVIEW_TIMEOUT:?}")),
    }
}

/// What an answer says. A server that does not know audiences names none, and its word is not about ours.
fn judge(answer: TokenReview, audience: &str) -> Reviewed {
    let status = answer.status.unwrap_or_default();
    let for_us = status.audiences.iter().flatten().any(|known| known == audience);
    let user = status.user.and_then(|user| user.username);
    match user {
        Some(user) if status.authenticated == Some(true) && for_us => Reviewed::User(user),
        _ => {
            Reviewed::Refused(status.error.unwrap_or_else(|| format!("it is not of the audience {audience}")))
        }
    }
}

impl Remembered {
    /// The answer to give, after the server was asked.
    fn settle(&mut self, token: &str, said: Reviewed, now: Instant) -> Reviewed {
        let digest: [u8; 32] = Sha256::digest(token.as_bytes()).into();
        match &said {
            Reviewed::User(user) => {
                self.users.retain(|_, (_, at)| now - *at < REMEMBERED_FOR);
                if self.users.len() < REMEMBERED_MAX || self.users.contains_key(&digest) {
                    self.users.insert(digest, (user.clone(), now));
                }
            }
            Reviewed::Refused(_) => drop(self.users.remove(&digest)),
            Reviewed::Away(_) => {
                let known = self.users.get(&digest).filter(|(_, at)| now - *at < REMEMBERED_FOR);
                if let Some((user, _)) = known {
                    return Reviewed::User(user.clone());
                }
            }
        }
        said
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AUDIENCE: &str = "agents";

    fn answer(status: &serde_json::Value) -> Reviewed {
        let whole = serde_json::json!({ "spec": {}, "status": status });
        judge(serde_json::from_value(whole).expect("a review"), AUDIENCE)
    }

    #[test]
    fn a_token_is_a_users_only_when_the_server_says_so_for_our_audience() {
        let user = "system:serviceaccount:chat:vllm";
        let said = |authenticated: bool, audiences: &[&str]| {
            answer(&serde_json::json!({
                "authenticated": authenticated, "audiences": audiences, "user": { "username": user },
            }))
        };
        assert_eq!(said(true, &[AUDIENCE]), Reviewed::User(user.to_owned()));
        for other in [said(true, &[]), said(true, &["https://kubernetes"]), said(false, &[AUDIENCE])] {
            assert!(matches!(other, Reviewed::Refused(words) if words.contains(AUDIENCE)));
        }
        let words = answer(&serde_json::json!({ "authenticated": false, "error": "token has expired" }));
        assert_eq!(words, Reviewed::Refused("token has expired".to_owned()));
        assert!(matches!(answer(&serde_json::json!({})), Reviewed::Refused(_)));
    }

    #[test]
    fn while_the_server_is_away_what_it_said_holds_for_a_time() {
        let (mut remembered, now) = (Remembered::default(), Instant::now());
        let (user, away) = (Reviewed::User("u".to_owned()), Reviewed::Away("down".to_owned()));
        assert_eq!(remembered.settle("t", away.clone(), now), away);
        assert_eq!(remembered.settle("t", user.clone(), now), user);
        assert_eq!(remembered.settle("t", away.clone(), now + REMEMBERED_FOR / 2), user);
        assert_eq!(remembered.settle("other", away.clone(), now), away);
        assert_eq!(remembered.settle("t", away.clone(), now + REMEMBERED_FOR), away);
        remembered.settle("t", user, now);
        let refused = Reviewed::Refused("its pod is gone".to_owned());
        assert_eq!(remembered.settle("t", refused.clone(), now), refused);
        assert_eq!(remembered.settle("t", away.clone(), now), away, "what it takes no more is forgotten");
    }

    #[test]
    fn so_many_tokens_are_remembered_and_no_more() {
        let (mut remembered, now) = (Remembered::default(), Instant::now());
        for index in 0..REMEMBERED_MAX + 10 {
            remembered.settle(&index.to_string(), Reviewed::User("u".to_owned()), now);
        }
        assert_eq!(remembered.users.len(), REMEMBERED_MAX);
        remembered.settle("late", Reviewed::User("u".to_owned()), now + REMEMBERED_FOR);
        assert_eq!(remembered.users.len(), 1, "what is old makes room");
    }
}
