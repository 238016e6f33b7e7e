//! What of conditions is an event.

use super::*;

/// What of these findings is news, one after the other, for one object.
fn news_of(findings: &[Finding]) -> Vec<bool> {
    let mut conditions = Vec::new();
    let mut is_news = |found: &Finding| !conclude(&mut conditions, std::slice::from_ref(found), 1).is_empty();
    findings.iter().map(&mut is_news).collect()
}

#[test]
fn another_status_and_another_reason_are_events_and_other_words_are_none() {
    let degraded = |reason, words: &str| Finding::yes(ConditionType::Degraded, reason, words);
    let works = Finding::no(ConditionType::Degraded, Reason::AsDesired, "");
    let all = [
        degraded(Reason::DeviceFailed, "1 node"),
        degraded(Reason::DeviceFailed, "2 nodes"),
        degraded(Reason::NotReported, "2 nodes"),
        degraded(Reason::NotReported, "2 nodes"),
        works.clone(),
        works,
    ];
    assert_eq!(news_of(&all), [true, false, true, false, true, false]);
}

#[test]
fn that_something_new_is_under_way_is_no_event_and_why_it_does_not_go_on_is_one() {
    let ready = |reason| Finding::no(ConditionType::Ready, reason, "");
    assert_eq!(news_of(&[ready(Reason::Progressing), ready(Reason::FieldConflict)]), [false, true]);
}

#[test]
fn what_a_new_object_waits_for_is_a_warning_only_when_it_is_no_longer_new() {
    let of = |reason: Reason| Finding::no(ConditionType::Ready, reason, "words");
    let (new, old) = (Some(Duration::from_secs(5)), Some(SETTLES_WITHIN));
    let is_warning = |reason: Reason, age: Option<Duration>| severity(&of(reason), age) == EventType::Warning;
    for reason in PASSING {
        assert!(
            !is_warning(reason, new) && is_warning(reason, old) && is_warning(reason, None),
            "{reason:?}"
        );
    }
    assert!(is_warning(Reason::InvalidSpec, new), "it does not pass");
    assert!(!is_warning(Reason::AsDesired, old) && !is_warning(Reason::Progressing, None));
}
