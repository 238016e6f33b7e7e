//! Refusals of the API server, told apart by who else writes the field.

use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::ObjectMeta;
use serde_json::{Value, json};

use super::*;
use crate::scripted::{Answer, refusal, serve};

fn of_field() -> Value {
    json!([{ "reason": FIELD_MANAGER, "message": "conflict with \"somebody\"", "field": ".spec.replicas" }])
}

fn stored(uid: &str) -> Answer {
    Answer::Is(
        200,
        json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "c", "uid": uid } }),
    )
}

fn found(uid: &str) -> ConfigMap {
    let metadata =
        ObjectMeta { name: Some("c".to_owned()), uid: Some(uid.to_owned()), ..ObjectMeta::default() };
    ConfigMap { metadata, ..ConfigMap::default() }
}

/// What comes of an apply that is answered so, and how often it was asked for.
async fn applied(answers: Vec<Answer>) -> (Result<ConfigMap, kube::Error>, usize) {
    let (client, script) = serve(answers).await;
    let api: Api<ConfigMap> = Api::namespaced(client, "n");
    let answer = apply(&api, "c", Part::Object, &PatchParams::apply("test"), &json!({ "data": {} })).await;
    (answer, script.asked().len())
}

#[tokio::test]
async fn a_conflict_of_fields_is_reported_and_any_other_is_tried_again() {
    let (answer, asked) = applied(vec![refusal(409, &of_field()), stored("1")]).await;
    assert!(matches!(answer, Err(kube::Error::Api(status)) if is_of_fields(&status)));
    assert_eq!(asked, 1);
    let (answer, asked) = applied(vec![refusal(409, &json!([])), stored("1")]).await;
    assert!(answer.is_ok());
    assert_eq!(asked, 2);
    let (answer, asked) = applied(vec![refusal(409, &json!([]))]).await;
    assert!(matches!(answer, Err(kube::Error::Api(status)) if status.code == 409 && !is_of_fields(&status)));
    assert_eq!(asked, TRIES_MAX);
}

#[tokio::test]
async fn a_deletion_that_means_another_object_reads_anew() {
    let (client, script) = serve(vec![refusal(409, &json!([])), stored("new"), stored("new")]).await;
    let api: Api<ConfigMap> = Api::namespaced(client, "n");
    let removed = remove(&api, &found("old"), |live| live.uid().as_deref() == Some("new")).await;
    assert_eq!(removed.expect("deleted"), Removed::Now);
    assert_eq!(script.methods(), ["DELETE", "GET", "DELETE"]);
    let meant = |index: usize| script.asked()[index].body["preconditions"]["uid"].clone();
    assert_eq!((meant(0), meant(2)), (json!("old"), json!("new")));

    // What is there now is somebody's.
    let (client, script) = serve(vec![refusal(409, &json!([])), stored("new")]).await;
    let api: Api<ConfigMap> = Api::namespaced(client, "n");
    assert_eq!(remove(&api, &found("old"), |_| false).await.expect("left"), Removed::Already);
    assert_eq!(script.methods(), ["DELETE", "GET"]);
}

#[tokio::test]
async fn a_deletion_that_is_refused_again_and_again_fails() {
    let answers = vec![
        refusal(409, &json!([])),
        stored("1"),
        refusal(409, &json!([])),
        stored("2"),
        refusal(409, &json!([])),
    ];
    let (client, script) = serve(answers).await;
    let api: Api<ConfigMap> = Api::namespaced(client, "n");
    let removed = remove(&api, &found("0"), |_| true).await;
    assert!(matches!(removed, Err(kube::Error::Api(status)) if status.code == 409));
    assert_eq!(script.methods().len(), 2 * TRIES_MAX - 1);
}
