//! The election against a test API server: acquiring, renewing and losing the lease. Time is paused, so the
//! times are exact.

use serde_json::json;

use super::*;
use crate::framework::test_api_server::{CannedResponse, RequestLog, error_response, serve};

/// Longer than every step of these tests, on the paused clock.
const WITHIN: Duration = Duration::from_secs(60);

fn lease(holder: Option<&str>) -> CannedResponse {
    let metadata = json!({ "name": NAME, "namespace": "n", "resourceVersion": "1" });
    let spec = json!({ "holderIdentity": holder, "leaseTransitions": 1 });
    CannedResponse::Json(
        200,
        json!({ "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec }),
    )
}

fn outdated() -> CannedResponse {
    error_response(409, &json!([]))
}

fn election(answers: Vec<CannedResponse>) -> (Election, RequestLog) {
    let (client, server) = serve(answers);
    (Election::new(Api::namespaced(client, "n"), "us", None), server)
}

/// An election that holds the lease from now on.
fn holding(answers: Vec<CannedResponse>) -> (Election, RequestLog) {
    let (mut election, server) = election(answers);
    election.renewed = Some(Instant::now());
    (election, server)
}

#[test]
fn holder_gives_up_before_others_take_over_and_after_two_attempts() {
    assert!(RENEW_DEADLINE + RENEW_INTERVAL < LEASE_DURATION);
    assert!(RENEW_INTERVAL + ATTEMPT_TIMEOUT + RETRY_INTERVAL + ATTEMPT_TIMEOUT <= RENEW_DEADLINE);
}

#[tokio::test(start_paused = true)]
async fn retries_renewal_that_was_rejected_as_outdated_and_keeps_the_lease() {
    // Read, rejected, read: still held, renewed. Then another replica holds it.
    let answers =
        vec![lease(Some("us")), outdated(), lease(Some("us")), lease(Some("us")), lease(Some("them"))];
    let (mut election, server) = holding(answers);
    tokio::time::timeout(WITHIN, election.renew_until_lost()).await.expect("lost in the end");
    assert_eq!(server.methods(), ["GET", "PUT", "GET", "PUT", "GET"]);
}

#[tokio::test(start_paused = true)]
async fn loses_lease_at_the_deadline_if_renewals_are_rejected_or_not_answered() {
    let rejected = (0..500).flat_map(|_| [lease(Some("us")), outdated()]).collect();
    for (answers, requests_min) in [(rejected, 7), (vec![CannedResponse::Hang], 2)] {
        let (mut election, server) = holding(answers);
        let begun = election.renewed.expect("held");
        tokio::time::timeout(WITHIN, election.renew_until_lost()).await.expect("lost");
        assert_eq!(begun.elapsed(), RENEW_DEADLINE);
        assert!(server.requests().len() >= requests_min, "{:?}", server.methods());
    }
}

#[tokio::test(start_paused = true)]
async fn waiting_replica_retries_if_the_server_does_not_answer() {
    // The first request is never answered; then the lease is free.
    let (mut election, server) = election(vec![CannedResponse::Hang, lease(None)]);
    let begun = Instant::now();
    tokio::time::timeout(WITHIN, election.acquire()).await.expect("acquired");
    assert_eq!(server.methods(), ["GET", "GET", "PUT"]);
    assert_eq!(begun.elapsed(), ATTEMPT_TIMEOUT + RENEW_INTERVAL);
    // Counts from before the acquire request, so this replica never holds it longer than others assume.
    assert_eq!(election.renewed.expect("held"), Instant::now());
}

#[tokio::test(start_paused = true)]
async fn second_of_two_creators_reads_the_lease_again() {
    let absent = error_response(404, &json!([]));
    let answers = vec![absent, outdated(), lease(Some("them")), lease(None)];
    let (mut election, server) = election(answers);
    tokio::time::timeout(WITHIN, election.acquire()).await.expect("acquired");
    assert_eq!(server.methods(), ["GET", "POST", "GET", "GET", "PUT"]);
}

#[tokio::test(start_paused = true)]
async fn holder_that_finds_the_lease_free_has_lost_it() {
    let (mut election, server) = holding(vec![lease(None)]);
    tokio::time::timeout(WITHIN, election.renew_until_lost()).await.expect("lost");
    assert_eq!(server.methods(), ["GET"]);
}
