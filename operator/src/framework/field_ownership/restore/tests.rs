//! Rate of restores, reported writers, and the requests that the API server receives.

use k8s_openapi::api::core::v1::ConfigMap;
use serde_json::json;

use super::*;
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

/// Applies an object against these responses. Returns the outcome and whether each request was forced.
async fn applied(
    other_writers: &OtherWriters,
    answers: Vec<CannedResponse>,
) -> (Result<WriteOutcome<ConfigMap>, kube::Error>, Vec<bool>) {
    let (client, server) = serve(answers);
    let api: Api<ConfigMap> = Api::namespaced(client, "n");
    let write = OwnedWrite {
        api: &api,
        key: KEY,
        name: "c",
        part: Part::Object,
        params: PatchParams::apply("test"),
        body: &json!({ "data": {} }),
    };
    let outcome = apply(other_writers, &write).await;
    (outcome, server.requests().iter().map(|request| request.path.contains("force=true")).collect())
}

#[tokio::test]
async fn writes_without_force_if_no_other_manager_owns_fields() {
    let (outcome, forced) = applied(&OtherWriters::default(), vec![stored()]).await;
    assert!(matches!(outcome, Ok(WriteOutcome::Written(_))), "{outcome:?}");
    assert_eq!(forced, [false]);
}

#[tokio::test]
async fn restores_foreign_fields_with_force_and_names_the_writer() {
    let fields = [".data.f", ".data.e", ".data.d", ".data.c", ".data.b", ".data.a"];
    let (outcome, forced) = applied(&OtherWriters::default(), vec![of_fields(&fields), stored()]).await;
    let Ok(WriteOutcome::Restored(_, foreign)) = outcome else { panic!("{outcome:?}") };
    assert_eq!(foreign.by, "\"kubectl\" using v1");
    assert_eq!(foreign.fields, ".data.a, .data.b, .data.c, .data.d, .data.e, 1 more");
    assert_eq!(forced, [false, true]);
}

#[tokio::test]
async fn failed_forced_apply_is_an_error_and_not_counted_as_restore() {
    let other_writers = OtherWriters::default();
    let (outcome, _) =
        applied(&other_writers, vec![of_fields(&[".data.a"]), error_response(403, &json!([]))]).await;
    assert!(matches!(outcome, Err(kube::Error::Api(status)) if status.code == 403));
    assert!(other_writers.of_fields.lock().expect("no panic").is_empty());
}

#[tokio::test]
async fn does_not_write_paced_object() {
    let other_writers = OtherWriters::default();
    for _ in 0..PACED_FROM {
        other_writers.record_restore(KEY, Instant::now());
    }
    let (outcome, forced) = applied(&other_writers, vec![stored()]).await;
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
