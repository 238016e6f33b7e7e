//! Events for changes of conditions.

use super::*;

/// For a sequence of findings on one object: whether each is published as an event.
fn events_of(findings: &[Finding]) -> Vec<bool> {
    let mut conditions = Vec::new();
    let mut is_event =
        |found: &Finding| !merge_findings(&mut conditions, std::slice::from_ref(found), 1).is_empty();
    findings.iter().map(&mut is_event).collect()
}

#[test]
fn publishes_changes_of_status_and_reason_but_not_of_the_message() {
    let degraded = |reason, message: &str| Finding::yes(ConditionType::Degraded, reason, message);
    let works = Finding::no(ConditionType::Degraded, Reason::AsDesired, "");
    let all = [
        degraded(Reason::DeviceFailed, "1 node"),
        degraded(Reason::DeviceFailed, "2 nodes"),
        degraded(Reason::NotReported, "2 nodes"),
        degraded(Reason::NotReported, "2 nodes"),
        works.clone(),
        works,
    ];
    assert_eq!(events_of(&all), [true, false, true, false, true, false]);
}

#[test]
fn publishes_obstacles_but_not_the_start_of_progress() {
    let ready = |reason| Finding::no(ConditionType::Ready, reason, "");
    assert_eq!(events_of(&[ready(Reason::Progressing), ready(Reason::FieldConflict)]), [false, true]);
}

#[test]
fn transient_reasons_are_warnings_only_for_older_objects() {
    let of = |reason: Reason| Finding::no(ConditionType::Ready, reason, "message");
    let (new, old) = (Some(Duration::from_secs(5)), Some(GRACE_PERIOD));
    let is_warning = |reason: Reason, age: Option<Duration>| severity(&of(reason), age) == EventType::Warning;
    for reason in TRANSIENT_REASONS {
        assert!(
            !is_warning(reason, new) && is_warning(reason, old) && is_warning(reason, None),
            "{reason:?}"
        );
    }
    assert!(is_warning(Reason::InvalidSpec, new), "it is not transient");
    assert!(!is_warning(Reason::AsDesired, old) && !is_warning(Reason::Progressing, None));
}
