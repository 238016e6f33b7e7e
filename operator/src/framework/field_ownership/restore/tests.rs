//! Rate of restores, and fields in reports.

use serde_json::json;

use super::*;

const KEY: &str = "ConfigMap/n/c";

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
