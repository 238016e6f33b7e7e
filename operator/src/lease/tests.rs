//! The lease against a scripted API server: taken, renewed, lost.

use serde_json::{Value, json};

use super::*;
use crate::scripted::{Answer, refusal, serve};

/// So that a test takes less than a second; as [`Pace::OURS`] in proportion.
const FAST: Pace = Pace {
    lasts: Duration::from_millis(750),
    renews: Duration::from_millis(60),
    retries: Duration::from_millis(20),
    answers: Duration::from_millis(150),
    gives_up: Duration::from_millis(500),
};
/// Far more than anything here takes.
const WITHIN: Duration = Duration::from_secs(20);

fn lease(holder: Option<&str>) -> Answer {
    let metadata = json!({ "name": NAME, "namespace": "n", "resourceVersion": "1" });
    let spec = json!({ "holderIdentity": holder, "leaseTransitions": 1 });
    Answer::Is(
        200,
        json!({ "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec }),
    )
}

fn outdated() -> Answer {
    refusal(409, &json!([]))
}

async fn election(answers: Vec<Answer>) -> (Election, crate::scripted::Script) {
    let (client, script) = serve(answers).await;
    let mut election = Election::new(Api::namespaced(client, "n"), "us", None);
    election.pace = FAST;
    (election, script)
}

/// Holds the lease since now.
async fn holding(answers: Vec<Answer>) -> (Election, crate::scripted::Script) {
    let (mut election, script) = election(answers).await;
    election.renewed = Some(Instant::now());
    (election, script)
}

#[test]
fn a_holder_gives_up_before_others_take_over_and_tries_twice_before() {
    let pace = Pace::OURS;
    assert!(pace.gives_up + pace.renews < pace.lasts);
    assert!(pace.renews + pace.answers + pace.retries + pace.answers <= pace.gives_up);
}

#[tokio::test]
async fn a_renewal_that_is_refused_as_outdated_is_read_again_and_the_lease_kept() {
    // Read, refused, read: still ours, renewed. Then somebody else's.
    let answers =
        vec![lease(Some("us")), outdated(), lease(Some("us")), lease(Some("us")), lease(Some("them"))];
    let (mut election, script) = holding(answers).await;
    tokio::time::timeout(WITHIN, election.lost()).await.expect("it is lost at last");
    assert_eq!(script.methods(), ["GET", "PUT", "GET", "PUT", "GET"]);
}

#[tokio::test]
async fn one_that_is_refused_for_ever_is_lost_in_time_and_not_at_once() {
    let answers = (0..500).flat_map(|_| [lease(Some("us")), outdated()]).collect();
    let (mut election, script) = holding(answers).await;
    let begun = election.renewed.expect("it is held");
    tokio::time::timeout(WITHIN, election.lost()).await.expect("it is lost");
    assert!(begun.elapsed() >= FAST.gives_up);
    assert!(script.asked().len() > 2 * TRIES_MAX, "{:?}", script.methods());
}

#[tokio::test]
async fn a_server_that_does_not_answer_ends_a_holder_in_time() {
    let (mut election, script) = holding(vec![Answer::Never]).await;
    let begun = election.renewed.expect("it is held");
    tokio::time::timeout(WITHIN, election.lost()).await.expect("it is lost");
    assert!(begun.elapsed() >= FAST.gives_up);
    assert!(script.asked().len() >= 2, "each attempt has a bound of its own");
}

#[tokio::test]
async fn who_waits_for_a_server_that_does_not_answer_asks_again() {
    // The first question is never answered; then the lease is free.
    let (mut election, script) = election(vec![Answer::Never, lease(None)]).await;
    let begun = Instant::now();
    tokio::time::timeout(WITHIN, election.won()).await.expect("it is won");
    assert_eq!(script.methods(), ["GET", "GET", "PUT"]);
    assert!(begun.elapsed() >= FAST.answers);
    // Counted from before the request that took it, so never later than others count.
    assert!(election.renewed.expect("it is held") >= begun + FAST.answers);
}

#[tokio::test]
async fn of_two_that_make_the_lease_at_once_the_second_one_looks_whose_it_is() {
    let absent = refusal(404, &json!([]));
    let answers = vec![absent, outdated(), lease(Some("them")), lease(None)];
    let (mut election, script) = election(answers).await;
    tokio::time::timeout(WITHIN, election.won()).await.expect("it is won");
    assert_eq!(script.methods(), ["GET", "POST", "GET", "GET", "PUT"]);
}

#[tokio::test]
async fn a_holder_that_finds_the_lease_given_up_by_another_has_lost_it() {
    let (mut election, script) = holding(vec![lease(None)]).await;
    tokio::time::timeout(WITHIN, election.lost()).await.expect("it is lost");
    assert_eq!(script.methods(), ["GET"]);
    let taken: Vec<Value> = script.asked().into_iter().map(|asked| asked.body).collect();
    assert_eq!(taken, [Value::Null]);
}
