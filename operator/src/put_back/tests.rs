//! How often an object is put back, what is reported of it, and what the API server is asked for.

use k8s_openapi::api::core::v1::ConfigMap;
use serde_json::json;

use super::*;
use crate::scripted::{Answer, refusal, serve};

const KEY: &str = "ConfigMap/n/c";

fn stored() -> Answer {
    Answer::Is(
        200,
        json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "c", "uid": "1" } }),
    )
}

fn of_fields(fields: &[&str]) -> Answer {
    let cause = |field: &&str| json!({ "reason": "FieldManagerConflict", "message": "conflict with \"somebody\" using v1", "field": field });
    refusal(409, &fields.iter().map(cause).collect())
}

/// What comes of it, and whether each request was by force.
async fn applied(
    disputes: &Disputes,
    answers: Vec<Answer>,
) -> (Result<Outcome<ConfigMap>, kube::Error>, Vec<bool>) {
    let (client, script) = serve(answers).await;
    let api: Api<ConfigMap> = Api::namespaced(client, "n");
    let ours = Ours {
        api: &api,
        key: KEY,
        name: "c",
        part: Part::Object,
        params: PatchParams::apply("test"),
        body: &json!({ "data": {} }),
    };
    let outcome = apply(disputes, &ours).await;
    (outcome, script.asked().iter().map(|asked| asked.path.contains("force=true")).collect())
}

#[tokio::test]
async fn what_is_nobody_elses_is_written_without_force() {
    let (outcome, forced) = applied(&Disputes::default(), vec![stored()]).await;
    assert!(matches!(outcome, Ok(Outcome::Written(_))), "{outcome:?}");
    assert_eq!(forced, [false]);
}

#[tokio::test]
async fn what_somebody_has_written_is_put_back_by_force_and_named() {
    let fields = [".data.f", ".data.e", ".data.d", ".data.c", ".data.b", ".data.a"];
    let (outcome, forced) = applied(&Disputes::default(), vec![of_fields(&fields), stored()]).await;
    let Ok(Outcome::PutBack(_, taken)) = outcome else { panic!("{outcome:?}") };
    assert_eq!(taken.by, "\"somebody\" using v1");
    assert_eq!(taken.fields, ".data.a, .data.b, .data.c, .data.d, .data.e, 1 more");
    assert_eq!(forced, [false, true]);
}

#[tokio::test]
async fn a_force_that_is_refused_is_an_error_and_no_put_back() {
    let disputes = Disputes::default();
    let (outcome, _) = applied(&disputes, vec![of_fields(&[".data.a"]), refusal(403, &json!([]))]).await;
    assert!(matches!(outcome, Err(kube::Error::Api(status)) if status.code == 403));
    assert!(disputes.of_fields.lock().expect("nobody panics").is_empty());
}

#[tokio::test]
async fn an_object_that_is_paced_is_not_written_before_its_turn() {
    let disputes = Disputes::default();
    for _ in 0..MANY {
        disputes.put_back(KEY, Instant::now());
    }
    let (outcome, forced) = applied(&disputes, vec![stored()]).await;
    assert!(matches!(outcome, Ok(Outcome::Waits(_))), "{outcome:?}");
    assert_eq!(forced, Vec::<bool>::new());
}

#[test]
fn from_the_fifth_write_back_within_ten_minutes_on_an_object_is_written_once_a_minute() {
    let disputes = Disputes::default();
    let start = Instant::now();
    let at = |seconds: u64| start + Duration::from_secs(seconds);
    for number in 0..4 {
        disputes.put_back(KEY, at(number));
    }
    assert_eq!(disputes.waits(KEY, at(4)), None);
    disputes.put_back(KEY, at(4));
    assert_eq!(disputes.waits(KEY, at(4)), Some(SPACED));
    assert_eq!(disputes.waits(KEY, at(63)), Some(Duration::from_secs(1)));
    assert_eq!(disputes.waits(KEY, at(64)), None, "its turn");
    assert_eq!(disputes.waits("ConfigMap/n/other", at(4)), None);
    disputes.put_back(KEY, at(590));
    assert_eq!(disputes.waits(KEY, at(591)), Some(SPACED - Duration::from_secs(1)));
    assert_eq!(disputes.waits(KEY, at(602)), None, "two of the six are more than ten minutes old");
}

#[test]
fn an_object_that_was_put_back_long_ago_is_forgotten() {
    let disputes = Disputes::default();
    let start = Instant::now();
    disputes.put_back(KEY, start);
    disputes.put_back("ConfigMap/n/other", start + WITHIN + Duration::from_secs(1));
    let kept: Vec<String> = disputes.of_fields.lock().expect("no test panics").keys().cloned().collect();
    assert_eq!(kept, ["ConfigMap/n/other"]);
}

#[test]
fn what_is_left_and_what_agents_say_is_news_once() {
    let disputes = Disputes::default();
    let key = "CacheNode//n1";
    let said = |words: &str| disputes.hear("n1", Some(words.to_owned()));
    assert_eq!((disputes.leave(key, "1"), disputes.leave(key, "1")), (true, false));
    assert!(disputes.leave(key, "2"), "another object");
    disputes.take(key);
    assert!(disputes.leave(key, "2"), "it was ours in between");
    assert_eq!((said("a"), said("a"), said("b")), (true, false, true));
    assert!(!disputes.hear("n1", None));
    assert!(said("b"), "after it was silent");
}
