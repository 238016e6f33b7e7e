//! Tests of windows: their bytes, several engines, and reports that expire.

use super::*;

const ONE: SessionId = SessionId(1);
const OTHER: SessionId = SessionId(2);

fn layers(phase: Phase, cycle_micros: u32, bytes: u64) -> WriteSlack {
    WriteSlack::Layers(LayerSlack { phase, cycle_micros, bytes, bytes_max: 100 })
}

/// Bytes that are left in the open windows, and when the next ones open.
fn left(slack: &Slack, now: u64) -> (u64, Option<Tick>) {
    let window = slack.window(Tick(now)).expect("a window limits writes");
    (window.bytes, window.next)
}

#[test]
fn each_window_admits_its_bytes_once_and_unused_slack_ends_with_it() {
    let mut slack = Slack::default();
    slack.report(Tick(5_000), ONE, Some(layers(Phase::Prefill, 2_000, 30)));
    assert_eq!(left(&slack, 5_000), (30, Some(Tick(7_000))));
    slack.charge(Tick(5_500), 20);
    assert_eq!(left(&slack, 6_999), (10, Some(Tick(7_000))));
    slack.charge(Tick(6_999), 20);
    assert_eq!(left(&slack, 6_999).0, 0, "more than fits leaves nothing");
    assert_eq!(left(&slack, 7_000), (30, Some(Tick(9_000))));
    assert_eq!(left(&slack, 99_000), (30, Some(Tick(101_000))), "slack does not accumulate");
    assert_eq!(slack.window(Tick(99_500)).map(|window| window.opened), Ok(Tick(99_000)));
}

#[test]
fn repeated_report_continues_its_windows_and_another_keeps_the_written_bytes() {
    let mut slack = Slack::default();
    slack.report(Tick(0), ONE, Some(layers(Phase::Decode, 2_000, 30)));
    slack.charge(Tick(100), 20);
    slack.report(Tick(1_000), ONE, Some(layers(Phase::Decode, 2_000, 30)));
    assert_eq!(left(&slack, 1_000), (10, Some(Tick(2_000))));
    slack.report(Tick(1_500), ONE, Some(layers(Phase::Prefill, 3_000, 50)));
    assert_eq!(left(&slack, 1_500), (30, Some(Tick(4_500))));
    assert_eq!(left(&slack, 2_000).0, 50, "the window in which the bytes were written has ended");
}

#[test]
fn writes_fit_the_windows_of_all_engines() {
    let mut slack = Slack::default();
    slack.report(Tick(0), ONE, Some(layers(Phase::Decode, 2_000, 30)));
    slack.report(Tick(500), OTHER, Some(layers(Phase::Prefill, 4_000, 20)));
    let window = slack.window(Tick(600)).expect("both limit writes");
    assert_eq!((window.phase, window.bytes, window.opened), (Phase::Prefill, 20, Tick(500)));
    assert_eq!(window.next, Some(Tick(4_500)), "both are open again");
    slack.charge(Tick(600), 15);
    assert_eq!(left(&slack, 600).0, 5);
    assert_eq!(left(&slack, 2_100).0, 5, "the window of the other engine is still the same");
    slack.report(Tick(2_200), OTHER, Some(WriteSlack::Idle));
    assert_eq!(left(&slack, 2_200).0, 30, "an idle engine limits nothing");
    slack.report(Tick(2_300), OTHER, Some(layers(Phase::Prefill, 0, 0)));
    assert_eq!(left(&slack, 2_300), (0, None), "its computation has no window for writes");
    slack.remove(OTHER);
    assert_eq!(left(&slack, 2_400).0, 30);
}

#[test]
fn no_window_limits_writes_without_a_recent_report_of_a_computation() {
    let mut slack = Slack::default();
    let why = |slack: &Slack, now| slack.window(Tick(now)).expect_err("unlimited");
    assert_eq!(why(&slack, 0), AtOnce::NoReport);
    slack.report(Tick(0), ONE, Some(WriteSlack::Idle));
    assert_eq!(why(&slack, 0), AtOnce::Idle);
    slack.report(Tick(0), OTHER, Some(WriteSlack::Unrestricted));
    assert_eq!(why(&slack, 0), AtOnce::Fallback);
    slack.report(Tick(0), ONE, Some(layers(Phase::Decode, 2_000, 30)));
    assert!(slack.window(Tick(0)).is_ok());
    slack.report(Tick(0), ONE, None);
    assert_eq!(why(&slack, 0), AtOnce::Fallback, "the model no longer has a profile");
}

#[test]
fn report_expires_after_a_second_and_one_of_long_layers_after_the_windows_of_a_model() {
    let mut slack = Slack::default();
    slack.report(Tick(0), ONE, Some(layers(Phase::Decode, 2_000, 30)));
    slack.report(Tick(0), OTHER, Some(layers(Phase::Prefill, 100_000, 30)));
    assert_eq!(slack.window(Tick(9)).map(|window| window.expires), Ok(Tick(1_000_000)));
    slack.drop_expired(Tick(999_999));
    assert_eq!(slack.sessions().count(), 2);
    slack.drop_expired(Tick(1_000_000));
    assert_eq!(slack.sessions().collect::<Vec<_>>(), [OTHER]);
    slack.drop_expired(Tick(12_800_000));
    assert_eq!(slack.window(Tick(12_800_000)), Err(AtOnce::NoReport));
}
