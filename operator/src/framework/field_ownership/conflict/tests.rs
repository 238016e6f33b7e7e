//! Field conflicts and concurrent writes against a test API server.

use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::ObjectMeta;
use serde_json::{Value, json};

use super::*;
use crate::framework::test_api_server::{CannedResponse, error_response, serve};

fn of_field() -> Value {
    json!([{ "reason": FIELD_MANAGER, "message": "conflict with \"kubectl\"", "field": ".spec.replicas" }])
}

fn stored(uid: &str) -> CannedResponse {
    CannedResponse::Json(
        200,
        json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "c", "uid": uid } }),
    )
}

fn found(uid: &str) -> ConfigMap {
    let metadata =
        ObjectMeta { name: Some("c".to_owned()), uid: Some(uid.to_owned()), ..ObjectMeta::default() };
    ConfigMap { metadata, ..ConfigMap::default() }
}

/// Applies an object against these responses. Returns the result and the number of requests.
async fn applied(answers: Vec<CannedResponse>) -> (Result<ConfigMap, kube::Error>, usize) {
    let (client, server) = serve(answers);
    let api: Api<ConfigMap> = Api::namespaced(client, "n");
    let answer = apply(&api, "c", Part::Object, &PatchParams::apply("test"), &json!({ "data": {} })).await;
    (answer, server.requests().len())
}

#[tokio::test]
async fn reports_field_conflict_and_retries_other_conflicts() {
    let (answer, asked) = applied(vec![error_response(409, &of_field()), stored("1")]).await;
    assert!(matches!(answer, Err(kube::Error::Api(status)) if is_field_conflict(&status)));
    assert_eq!(asked, 1);
    let (answer, asked) = applied(vec![error_response(409, &json!([])), stored("1")]).await;
    assert!(answer.is_ok());
    assert_eq!(asked, 2);
    let (answer, asked) = applied(vec![error_response(409, &json!([]))]).await;
    assert!(
        matches!(answer, Err(kube::Error::Api(status)) if status.code == 409 && !is_field_conflict(&status))
    );
    assert_eq!(asked, TRIES_MAX);
}

#[tokio::test]
async fn deletion_reads_again_if_the_name_belongs_to_another_object() {
    let (client, server) = serve(vec![error_response(409, &json!([])), stored("new"), stored("new")]);
    let api: Api<ConfigMap> = Api::namespaced(client, "n");
    let removed = delete(&api, &found("old"), |live| live.uid().as_deref() == Some("new")).await;
    assert_eq!(removed.expect("deleted"), DeleteOutcome::Deleted);
    assert_eq!(server.methods(), ["DELETE", "GET", "DELETE"]);
    let deleted_uid = |index: usize| server.requests()[index].body["preconditions"]["uid"].clone();
    assert_eq!((deleted_uid(0), deleted_uid(2)), (json!("old"), json!("new")));

    // The new object is kept.
    let (client, server) = serve(vec![error_response(409, &json!([])), stored("new")]);
    let api: Api<ConfigMap> = Api::namespaced(client, "n");
    assert_eq!(delete(&api, &found("old"), |_| false).await.expect("kept"), DeleteOutcome::NotNeeded);
    assert_eq!(server.methods(), ["DELETE", "GET"]);
}

#[tokio::test]
async fn deletion_that_is_rejected_on_every_attempt_fails() {
    let answers = vec![
        error_response(409, &json!([])),
        stored("1"),
        error_response(409, &json!([])),
        stored("2"),
        error_response(409, &json!([])),
    ];
    let (client, server) = serve(answers);
    let api: Api<ConfigMap> = Api::namespaced(client, "n");
    let removed = delete(&api, &found("0"), |_| true).await;
    assert!(matches!(removed, Err(kube::Error::Api(status)) if status.code == 409));
    assert_eq!(server.methods().len(), 2 * TRIES_MAX - 1);
}
