//! Rate of restores, reported writers, and the requests that the API server receives.

use k8s_openapi::api::core::v1::ConfigMap;
use serde_json::json;

use super::*;
use crate::framework::services::tests::services;
use crate::framework::test_api_server::{CannedResponse, error_response, serve};

const KEY: &str = "ConfigMap/n/c";

fn stored() -> CannedResponse {
    CannedResponse::Json(
        200,
        json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "c", "uid": "1" } }),
    )
}

fn of_fields(fields: &[&str]) -> CannedResponse {
    let cause = |field: &&str| json!({ "reason": "FieldManagerConflict", "message": "conflict with \"kubectl\" using v1", "field": field });
    error_response(409, &fields.iter().map(cause).collect())
}

/// Applies an object against these responses. Returns the outcome and whether each patch was forced.
async fn applied(
    services: &Services,
    answers: Vec<CannedResponse>,
) -> (Result<WriteOutcome<ConfigMap>, kube::Error>, Vec<bool>) {
    let (client, server) = serve(answers);
    let api: Api<ConfigMap> = Api::namespaced(client, "n");
    let subject = Subject::of(&ConfigMap::default());
    let write = OwnedWrite {
        api: &api,
        kind: "ConfigMap",
        key: KEY,
        name: "c",
        part: Part::Object,
        params: PatchParams::apply("test"),
        body: &json!({ "data": {} }),
        extras: Extras::Kept,
        subject: &subject,
    };
    let outcome = apply(services, &write, |_| None).await;
    (outcome, server.requests().iter().map(|request| request.path.contains("force=true")).collect())
}

#[tokio::test(start_paused = true)]
async fn takes_fields_of_other_managers_with_force_and_counts_that() {
    for (answers, expected, is_restored) in [
        (vec![stored()], &[false][..], false),
        (vec![of_fields(&[".data.a"]), stored()], &[false, true], true),
        (vec![of_fields(&[".data.a"]), error_response(403, &json!([]))], &[false, true], false),
    ] {
        let services = services();
        let (outcome, forced) = applied(&services, answers).await;
        assert_eq!(forced, expected, "{outcome:?}");
        let is_counted = services.metrics.text().contains("put_backs_total{kind=\"ConfigMap\"} 1");
        let is_recorded = !services.other_writers.of_fields.lock().expect("no panic").is_empty();
        assert_eq!((is_counted, is_recorded), (is_restored, is_restored), "{outcome:?}");
    }
}

#[test]
fn names_the_managers_and_at_most_five_fields() {
    let cause = |field: &str| json!({ "reason": "FieldManagerConflict", "message": "conflict with \"kubectl\" using v1", "field": field });
    let causes: Vec<_> =
        ["f", "e", "d", "c", "b", "a"].iter().map(|name| cause(&format!(".data.{name}"))).collect();
    let status = serde_json::from_value(json!({ "details": { "causes": causes } })).expect("a status");
    let foreign = ForeignWrite::from_status(&status);
    assert_eq!(foreign.by, "\"kubectl\" using v1");
    assert_eq!(foreign.fields, ".data.a, .data.b, .data.c, .data.d, .data.e, 1 more");
}

#[tokio::test(start_paused = true)]
async fn does_not_write_paced_object() {
    let services = services();
    for _ in 0..PACED_FROM {
        services.other_writers.record_restore(KEY, Instant::now());
    }
    let (outcome, forced) = applied(&services, vec![stored()]).await;
    assert!(matches!(outcome, Ok(WriteOutcome::Paced(_))), "{outcome:?}");
    assert_eq!(forced, Vec::<bool>::new());
}

#[test]
fn paces_object_to_once_a_minute_from_fifth_restore_within_ten_minutes() {
    let other_writers = OtherWriters::default();
    let start = Instant::now();
    let at = |seconds: u64| start + Duration::from_secs(seconds);
    for number in 0..4 {
        other_writers.record_restore(KEY, at(number));
    }
    assert_eq!(other_writers.pacing_delay(KEY, at(4)), None);
    other_writers.record_restore(KEY, at(4));
    assert_eq!(other_writers.pacing_delay(KEY, at(4)), Some(PACED_INTERVAL));
    assert_eq!(other_writers.pacing_delay(KEY, at(63)), Some(Duration::from_secs(1)));
    assert_eq!(other_writers.pacing_delay(KEY, at(64)), None, "the pause is over");
    assert_eq!(other_writers.pacing_delay("ConfigMap/n/other", at(4)), None);
    other_writers.record_restore(KEY, at(590));
    assert_eq!(other_writers.pacing_delay(KEY, at(591)), Some(PACED_INTERVAL - Duration::from_secs(1)));
    assert_eq!(
        other_writers.pacing_delay(KEY, at(602)),
        None,
        "two of the six are more than ten minutes old"
    );
}

#[test]
fn forgets_restores_older_than_ten_minutes() {
    let other_writers = OtherWriters::default();
    let start = Instant::now();
    other_writers.record_restore(KEY, start);
    other_writers.record_restore("ConfigMap/n/other", start + WITHIN + Duration::from_secs(1));
    let kept: Vec<String> = other_writers.of_fields.lock().expect("no panic").keys().cloned().collect();
    assert_eq!(kept, ["ConfigMap/n/other"]);
}

#[test]
fn foreign_objects_and_agent_reports_are_new_once() {
    let other_writers = OtherWriters::default();
    let key = "CacheNode//n1";
    let report = |words: &str| other_writers.record_report("n1", Some(words.to_owned()));
    assert_eq!((other_writers.mark_foreign(key, "1"), other_writers.mark_foreign(key, "1")), (true, false));
    assert!(other_writers.mark_foreign(key, "2"), "another object");
    other_writers.clear_foreign(key);
    assert!(other_writers.mark_foreign(key, "2"), "it was the operator's in between");
    assert_eq!((report("a"), report("a"), report("b")), (true, false, true));
    assert!(!other_writers.record_report("n1", None));
    assert!(report("b"), "after a report of nothing");
}
