//! Scenarios: writes in the slack of the layers that engines compute.

use std::time::Duration;

use reprise_agent_core::effect::{Reply, Ticket};
use reprise_agent_core::event::{Event, Priority, Request, Scope};
use reprise_agent_core::pool::DeviceOpKind;
use reprise_agent_core::{Counters, Settings};
use reprise_policy::slack::{LayerSlack, Phase, WriteSlack};
use reprise_policy::{BlockKey, SessionId, TenantId, Tick};

use crate::engine::RequestKind;
use crate::harness::{Harness, Setup, keys, large_layout};
use crate::jobs::Job;

const MILLISECOND: Duration = Duration::from_millis(1);

/// Blocks are due after 5 ms, and deferred for at most 200 ms. Of 16 slots, 8 may be unsaved before writes go at once.
fn harness() -> (Harness, SessionId) {
    let slot = large_layout().slot_bytes();
    let settings = Settings {
        slack_delay: Duration::from_millis(200),
        writeback_bytes: 16 * slot,
        ..Setup::default().settings
    };
    let mut harness = Harness::new(Setup { settings, ..Setup::default() });
    let session = harness.open_session(TenantId::DEFAULT, large_layout());
    (harness, session)
}

/// Windows of 10 ms for `blocks` blocks each, in a profile whose largest window fits two blocks.
fn windows(phase: Phase, blocks: u64) -> Option<WriteSlack> {
    let slot = large_layout().slot_bytes();
    let (bytes, bytes_max) = (blocks * slot, 2 * slot);
    Some(WriteSlack::Layers(LayerSlack { phase, cycle_micros: 10_000, bytes, bytes_max }))
}

fn report(harness: &mut Harness, session: SessionId, slack: Option<WriteSlack>) {
    harness.apply(Event::LayerReported { session, slack });
}

fn save(harness: &mut Harness, session: SessionId, keys: &[BlockKey]) {
    harness.reserve(session, keys.len() as u32);
    harness.commit(session, keys, Priority::Normal);
}

/// Number of blocks that are being written.
fn writes(harness: &Harness) -> usize {
    let is_write = |job: &&Job| match job {
        Job::Device { op, .. } => matches!(op.kind, DeviceOpKind::WriteBlock { .. }),
        _ => false,
    };
    harness.jobs.iter().filter(is_write).count()
}

/// Passes time and returns the number of blocks whose writes then began, and ends them.
fn written_after(harness: &mut Harness, time: Duration) -> usize {
    harness.pass(time);
    let begun = writes(harness);
    harness.finish_device_ops();
    begun
}

fn counters(harness: &Harness) -> Counters {
    harness.core.counters()
}

#[test]
fn due_writes_fill_each_window_and_the_rest_is_carried_over() {
    let (mut harness, session) = harness();
    report(&mut harness, session, windows(Phase::Prefill, 2));
    save(&mut harness, session, &keys(0..5));
    assert_eq!(written_after(&mut harness, 4 * MILLISECOND), 0, "no write is due before the delay");
    assert_eq!(written_after(&mut harness, MILLISECOND), 2, "the first window");
    assert_eq!(counters(&harness).writeback_deferred_bytes, 3 * large_layout().slot_bytes());
    assert_eq!(harness.core.next_deadline(), Some(Tick(10_000)), "the next window opens");
    assert_eq!(written_after(&mut harness, Duration::from_micros(4_999)), 0);
    assert_eq!(written_after(&mut harness, Duration::from_micros(1)), 2, "the second window");
    assert_eq!(written_after(&mut harness, 10 * MILLISECOND), 1, "the third window");
    let all = counters(&harness);
    assert_eq!((all.writeback_slack_blocks, all.writeback_carried_over_blocks), (5, 3));
    assert_eq!((all.writeback_deferred_bytes, all.unsaved_blocks), (0, 0));
    assert_eq!(harness.core.next_deadline(), None);
}

#[test]
fn writes_that_fit_no_window_of_prefill_are_flushed_in_decode() {
    let (mut harness, session) = harness();
    report(&mut harness, session, windows(Phase::Prefill, 0));
    save(&mut harness, session, &keys(0..3));
    assert_eq!(written_after(&mut harness, 100 * MILLISECOND), 0, "a later window fits them");
    report(&mut harness, session, windows(Phase::Decode, 2));
    assert_eq!(writes(&harness), 2);
    harness.finish_device_ops();
    assert_eq!(written_after(&mut harness, 10 * MILLISECOND), 1);
    let all = counters(&harness);
    assert_eq!((all.writeback_slack_blocks, all.writeback_decode_blocks), (0, 3));
    assert_eq!(all.writeback_carried_over_blocks, 3);
}

#[test]
fn writes_without_a_report_wait_for_reads_up_to_their_delay_bound() {
    let (mut harness, session) = harness();
    save(&mut harness, session, &keys(0..2));
    harness.pass(5 * MILLISECOND);
    harness.finish_jobs();
    harness.request(session, RequestKind::Other, Request::Trim);
    harness.load(session, &keys(0..1), Duration::from_secs(1), Scope::Local);
    save(&mut harness, session, &keys(2..4));
    harness.pass(100 * MILLISECOND);
    assert_eq!(writes(&harness), 0, "a read is in flight");
    assert_eq!(counters(&harness).writeback_deferred_bytes, 2 * large_layout().slot_bytes());
    save(&mut harness, session, &keys(4..5));
    assert_eq!(written_after(&mut harness, 104 * MILLISECOND), 0);
    assert_eq!(written_after(&mut harness, MILLISECOND), 2, "those that waited for 205 ms, and no others");
    assert_eq!(counters(&harness).writeback_bound_blocks, 2);
    while let Some(read) = harness.fills().first().copied() {
        assert_eq!(writes(&harness), 0);
        harness.advance(read);
    }
    assert_eq!(writes(&harness), 1, "the last read has ended");
    let all = counters(&harness);
    assert_eq!((all.writeback_bound_blocks, all.writeback_no_report_blocks), (2, 3));
}

#[test]
fn awaited_writes_do_not_wait_for_reads() {
    let (mut harness, session) = harness();
    save(&mut harness, session, &keys(0..2));
    harness.pass(5 * MILLISECOND);
    harness.finish_jobs();
    harness.request(session, RequestKind::Other, Request::Trim);
    harness.load(session, &keys(0..1), Duration::from_secs(1), Scope::Local);
    save(&mut harness, session, &keys(2..4));
    harness.pass(6 * MILLISECOND);
    assert_eq!(writes(&harness), 0);
    let ticket = *harness.engines[&session].tickets.keys().next().expect("a commit without a notice");
    harness.request(session, RequestKind::Other, Request::AwaitDurable { ticket });
    assert_eq!(writes(&harness), 2);
}

#[test]
fn writes_wait_for_reads_from_devices_which_start_at_once() {
    let (mut harness, session) = harness();
    save(&mut harness, session, &keys(0..2));
    harness.pass(5 * MILLISECOND);
    harness.finish_jobs();
    harness.request(session, RequestKind::Other, Request::Trim);
    report(&mut harness, session, windows(Phase::Prefill, 2));
    save(&mut harness, session, &keys(2..4));
    harness.load(session, &keys(0..2), Duration::from_secs(1), Scope::Local);
    let reads = |harness: &Harness| harness.jobs.iter().filter(|job| matches!(job, Job::Read { .. })).count();
    assert_eq!(reads(&harness), 2, "reads do not wait for a window");
    harness.pass(50 * MILLISECOND);
    assert_eq!((reads(&harness), writes(&harness)), (2, 0));
    while let Some(read) = harness.fills().first().copied() {
        assert_eq!(writes(&harness), 0);
        harness.advance(read);
    }
    assert_eq!(writes(&harness), 2, "the window is open when the last read ends");
    assert_eq!(counters(&harness).writeback_no_report_blocks, 2, "those before the report");
}

#[test]
fn deferred_write_goes_out_after_the_maximum_delay() {
    let (mut harness, session) = harness();
    report(&mut harness, session, windows(Phase::Prefill, 0));
    save(&mut harness, session, &keys(0..2));
    harness.pass(100 * MILLISECOND);
    save(&mut harness, session, &keys(2..3));
    report(&mut harness, session, windows(Phase::Prefill, 0));
    assert_eq!(written_after(&mut harness, Duration::from_micros(104_999)), 0);
    assert_eq!(harness.core.next_deadline(), Some(Tick(205_000)));
    assert_eq!(written_after(&mut harness, Duration::from_micros(1)), 2, "the third block still waits");
    assert_eq!(harness.core.next_deadline(), Some(Tick(305_000)));
    assert_eq!(written_after(&mut harness, 100 * MILLISECOND), 1);
    assert_eq!(counters(&harness).writeback_overdue_blocks, 3);
}

#[test]
fn maximum_delay_also_bounds_writes_behind_endless_reads() {
    let (mut harness, session) = harness();
    save(&mut harness, session, &keys(0..1));
    harness.pass(5 * MILLISECOND);
    harness.finish_jobs();
    harness.request(session, RequestKind::Other, Request::Trim);
    harness.load(session, &keys(0..1), Duration::from_secs(10), Scope::Local);
    report(&mut harness, session, windows(Phase::Prefill, 2));
    save(&mut harness, session, &keys(1..2));
    assert_eq!(written_after(&mut harness, 204 * MILLISECOND), 0);
    assert_eq!(written_after(&mut harness, MILLISECOND), 1);
    assert_eq!(counters(&harness).writeback_overdue_blocks, 1);
}

#[test]
fn blocks_that_fit_no_window_of_the_profile_go_at_once() {
    let (mut harness, session) = harness();
    let slack = LayerSlack {
        phase: Phase::Prefill,
        cycle_micros: 10_000,
        bytes: 1,
        bytes_max: large_layout().slot_bytes() - 1,
    };
    report(&mut harness, session, Some(WriteSlack::Layers(slack)));
    save(&mut harness, session, &keys(0..3));
    assert_eq!(written_after(&mut harness, 5 * MILLISECOND), 3);
    assert_eq!(counters(&harness).writeback_nothing_fits_blocks, 3);
    assert_eq!(harness.core.next_deadline(), None);
}

#[test]
fn commit_whose_durability_a_client_awaits_is_not_deferred() {
    let (mut harness, session) = harness();
    report(&mut harness, session, windows(Phase::Prefill, 0));
    save(&mut harness, session, &keys(0..2));
    assert_eq!(written_after(&mut harness, 50 * MILLISECOND), 0);
    let awaited = Request::AwaitDurable { ticket: Ticket(9) };
    harness.request(session, RequestKind::Other, awaited);
    assert_eq!(writes(&harness), 0, "an unknown ticket is ignored");
    for _ in 0..2 {
        let ticket = Ticket(1);
        harness.request(session, RequestKind::Other, Request::AwaitDurable { ticket });
        assert_eq!(writes(&harness), 2);
        let reply = harness.engines[&session].replies.last().map(|(_, reply)| reply.clone());
        assert!(matches!(reply, Some(Reply::DurableAwaited)), "{reply:?}");
    }
    harness.finish_device_ops();
    assert_eq!(harness.engines[&session].notices.len(), 1);
    assert_eq!(counters(&harness).writeback_awaited_blocks, 2);
    save(&mut harness, session, &keys(2..3));
    report(&mut harness, session, windows(Phase::Prefill, 0));
    assert_eq!(written_after(&mut harness, 50 * MILLISECOND), 0, "nothing is awaited any longer");
}

#[test]
fn closed_session_neither_defers_nor_awaits() {
    let (mut harness, session) = harness();
    let other = harness.open_session(TenantId::DEFAULT, large_layout());
    report(&mut harness, session, windows(Phase::Prefill, 0));
    save(&mut harness, session, &keys(0..1));
    report(&mut harness, other, windows(Phase::Prefill, 0));
    assert_eq!(written_after(&mut harness, 50 * MILLISECOND), 0);
    harness.close_session(other);
    assert_eq!(written_after(&mut harness, MILLISECOND), 0);
    harness.close_session(session);
    assert_eq!(writes(&harness), 1);
    assert_eq!(counters(&harness).writeback_no_report_blocks, 1);
    report(&mut harness, session, windows(Phase::Prefill, 0));
    harness.core.audit().expect("the report of a closed session is ignored");
}

#[test]
fn writes_go_at_once_when_unsaved_blocks_take_half_of_their_share() {
    let (mut harness, session) = harness();
    report(&mut harness, session, windows(Phase::Prefill, 0));
    save(&mut harness, session, &keys(0..8));
    assert_eq!(written_after(&mut harness, 50 * MILLISECOND), 0);
    harness.reserve(session, 1);
    assert_eq!(writes(&harness), 8, "before a reservation fails");
    assert_eq!(counters(&harness).writeback_memory_blocks, 8);
}

#[test]
fn writes_go_at_once_without_a_recent_report_or_while_engines_are_idle() {
    type Reason = fn(&Counters) -> u64;
    let reasons: [(Option<WriteSlack>, Reason); 3] = [
        (None, |all| all.writeback_no_report_blocks),
        (Some(WriteSlack::Idle), |all| all.writeback_idle_blocks),
        (Some(WriteSlack::Unrestricted), |all| all.writeback_fallback_blocks),
    ];
    for (slack, reason) in reasons {
        let (mut harness, session) = harness();
        report(&mut harness, session, windows(Phase::Prefill, 0));
        save(&mut harness, session, &keys(0..1));
        assert_eq!(written_after(&mut harness, 50 * MILLISECOND), 0);
        report(&mut harness, session, slack);
        assert_eq!((writes(&harness), reason(&counters(&harness))), (1, 1), "{slack:?}");
    }
}

#[test]
fn expired_report_defers_nothing() {
    let slot = large_layout().slot_bytes();
    let settings = Settings { writeback_bytes: 16 * slot, ..Setup::default().settings };
    let mut harness = Harness::new(Setup { settings, ..Setup::default() });
    let session = harness.open_session(TenantId::DEFAULT, large_layout());
    let unmeasured = LayerSlack { phase: Phase::Prefill, cycle_micros: 0, bytes: 0, bytes_max: 2 * slot };
    report(&mut harness, session, Some(WriteSlack::Layers(unmeasured)));
    harness.pass(500 * MILLISECOND);
    save(&mut harness, session, &keys(0..1));
    assert_eq!(written_after(&mut harness, 499 * MILLISECOND), 0);
    assert_eq!(written_after(&mut harness, MILLISECOND), 1, "a second after the report");
    assert_eq!(counters(&harness).writeback_no_report_blocks, 1);
}

#[test]
fn zero_delay_disables_deferring() {
    let settings = Settings { slack_delay: Duration::ZERO, ..Setup::default().settings };
    let mut harness = Harness::new(Setup { settings, ..Setup::default() });
    let session = harness.open_session(TenantId::DEFAULT, large_layout());
    report(&mut harness, session, windows(Phase::Prefill, 0));
    save(&mut harness, session, &keys(0..2));
    assert_eq!(written_after(&mut harness, 5 * MILLISECOND), 2);
}

#[test]
fn agent_that_is_about_to_stop_defers_nothing() {
    let (mut harness, session) = harness();
    report(&mut harness, session, windows(Phase::Prefill, 0));
    save(&mut harness, session, &keys(0..2));
    harness.apply(Event::Flush);
    assert_eq!(writes(&harness), 2);
    harness.finish_device_ops();
    save(&mut harness, session, &keys(2..3));
    assert_eq!(written_after(&mut harness, 5 * MILLISECOND), 1, "a commit after the flush too");
    assert_eq!(counters(&harness).writeback_stopping_blocks, 3);
}

#[test]
fn blocks_without_a_device_are_lost_at_once_also_while_windows_limit_writes() {
    let slot = large_layout().slot_bytes();
    let settings = Settings { writeback_bytes: slot, ..Setup::default().settings };
    let mut harness = Harness::new(Setup { settings, disks: Vec::new(), ..Setup::default() });
    let session = harness.open_session(TenantId::DEFAULT, large_layout());
    report(&mut harness, session, windows(Phase::Prefill, 2));
    save(&mut harness, session, &keys(0..3));
    harness.pass(Duration::from_secs(1));
    assert_eq!(harness.engines[&session].notices.len(), 1, "without a device, all blocks are lost at once");
    assert_eq!(counters(&harness).unsaved_blocks, 0);
}
