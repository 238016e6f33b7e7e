//! Scenarios: admission to NVMe, and the daily write budget.

use std::time::Duration;

use reprise_agent_core::effect::{CommitStatus, PlaceKind, Reply};
use reprise_agent_core::event::{Event, Priority, Request, Scope};
use reprise_agent_core::pool::DeviceOpKind;
use reprise_agent_core::{Counters, Settings};
use reprise_policy::admission::AdmissionMode;
use reprise_policy::admission::budget::DailyBudget;
use reprise_policy::{BlockKey, SessionId, SlotSet, TenantId, Tick, Tier};

use crate::engine::RequestKind;
use crate::harness::{Harness, SMALL_KEYS_FROM, Setup, keys, large_layout, small_layout};
use crate::jobs::Job;

const DAY: Duration = Duration::from_secs(86_400);
const MINUTE: Duration = Duration::from_secs(60);

/// Bytes of a slot on a device, header page included.
const SLOT_BYTES: u64 = 64 << 10;

/// A budget of 6,400 blocks a day. A block of a whole segment may overdraw 32, so 32 are the most at once.
const BUDGET: DailyBudget = DailyBudget { bytes: 6400 * SLOT_BYTES, burst: 64 * SLOT_BYTES };

fn with(mode: AdmissionMode, budget: Option<DailyBudget>) -> (Harness, SessionId) {
    let settings = Settings { admission: mode, daily_write_budget: budget, ..Setup::default().settings };
    let mut harness = Harness::new(Setup { settings, ..Setup::default() });
    let session = harness.open_session(TenantId::DEFAULT, large_layout());
    (harness, session)
}

/// Commits blocks, and lets all writes end that are due then; returns the commit's statuses.
fn save(harness: &mut Harness, session: SessionId, keys: &[BlockKey]) -> Vec<CommitStatus> {
    harness.reserve(session, keys.len() as u32);
    let request = harness.commit(session, keys, Priority::Normal);
    harness.pass(Duration::from_millis(6));
    harness.finish_jobs();
    let replies = &harness.engines[&session].replies;
    let reply = replies.iter().rev().find(|(id, _)| *id == request).map(|(_, reply)| reply);
    match reply {
        Some(Reply::Committed { statuses, .. }) => statuses.clone(),
        other => panic!("{other:?} does not answer a commit"),
    }
}

fn load(harness: &mut Harness, session: SessionId, keys: &[BlockKey]) {
    harness.load(session, keys, Duration::from_secs(1), Scope::Local);
    harness.finish_jobs();
    let held: Vec<_> = harness.engines[&session].loads.keys().copied().collect();
    held.into_iter().for_each(|load| harness.release(session, load));
    harness.pass(Duration::from_millis(6));
    harness.finish_jobs();
}

fn stored(harness: &Harness, keys: &[BlockKey]) -> usize {
    keys.iter().filter(|key| harness.announced.contains(&(**key, Tier::Nvme))).count()
}

fn in_memory(harness: &Harness, keys: &[BlockKey]) -> usize {
    keys.iter().filter(|key| harness.announced.contains(&(**key, Tier::Dram))).count()
}

fn counters(harness: &Harness) -> Counters {
    harness.core.counters()
}

/// Durable items and lost keys of the last notice.
fn last_notice(harness: &Harness, session: SessionId) -> (u32, usize) {
    let (_, durable, lost) = harness.engines[&session].notices.last().expect("a notice");
    (*durable, lost.len())
}

#[test]
fn second_use_keeps_a_new_block_in_dram_and_reports_it_as_not_durable() {
    let (mut harness, session) = with(AdmissionMode::SecondUse, None);
    let saved = keys(0..4);
    assert_eq!(save(&mut harness, session, &saved), [CommitStatus::Committed; 4]);
    assert_eq!((stored(&harness, &saved), in_memory(&harness, &saved)), (0, 4));
    assert_eq!(last_notice(&harness, session), (0, 4), "the client has a clear answer");
    assert_eq!(counters(&harness).admission_first_use_blocks, 4);
}

#[test]
fn second_use_writes_a_block_once_a_load_has_used_it() {
    let (mut harness, session) = with(AdmissionMode::SecondUse, None);
    let saved = keys(0..4);
    save(&mut harness, session, &saved);
    load(&mut harness, session, &saved[..2]);
    assert_eq!((stored(&harness, &saved[..2]), stored(&harness, &saved)), (2, 2));
    assert_eq!(counters(&harness).admission_used_again_blocks, 2);
    load(&mut harness, session, &saved[..2]);
    assert_eq!(counters(&harness).stored_blocks_total, 2, "a stored block is not written again");
}

#[test]
fn second_use_writes_a_block_that_is_committed_again() {
    let (mut harness, session) = with(AdmissionMode::SecondUse, None);
    let saved = keys(0..4);
    save(&mut harness, session, &saved);
    assert_eq!(save(&mut harness, session, &saved[..1]), [CommitStatus::Duplicate]);
    assert_eq!(last_notice(&harness, session), (1, 0), "a commit of a block in DRAM is a use");
    // 16 other blocks evict the rest from DRAM; then an engine computes one of them again.
    save(&mut harness, session, &keys(100..116));
    assert_eq!(in_memory(&harness, &saved[1..]), 0);
    assert!(counters(&harness).dram_dropped_blocks >= 3);
    assert_eq!(save(&mut harness, session, &saved[3..]), [CommitStatus::Committed]);
    assert_eq!((last_notice(&harness, session), stored(&harness, &saved)), ((1, 0), 2));
}

#[test]
fn expected_reuse_stops_writing_blocks_that_nothing_uses() {
    let (mut harness, session) = with(AdmissionMode::ExpectedReuse, None);
    for round in 0..120 {
        save(&mut harness, session, &keys(round * 16..round * 16 + 16));
    }
    // A block of 64 KiB is read in 0.12 ms and computed in 1.6 ms: refused below a probability of 8 %, after 740 blocks
    // of a class without a use. Only positions 8 to 15 have had as many.
    let all = counters(&harness);
    assert!(
        (150..300).contains(&all.admission_low_value_blocks),
        "{} refused",
        all.admission_low_value_blocks
    );
    assert_eq!(all.admission_admitted_blocks + all.admission_low_value_blocks, 120 * 16);
    assert_eq!(all.admission_admitted_blocks, all.stored_blocks_total);
    let last = keys(119 * 16..120 * 16);
    assert_eq!((stored(&harness, &last[..8]), stored(&harness, &last[8..])), (8, 0));
    assert_eq!(in_memory(&harness, &last), 16);
}

#[test]
fn blocks_beyond_the_budget_stay_readable_in_dram_and_are_reported_as_not_durable() {
    let (mut harness, session) = with(AdmissionMode::Always, Some(BUDGET));
    let saved = keys(0..12);
    assert_eq!(save(&mut harness, session, &saved), [CommitStatus::Committed; 12]);
    assert_eq!((stored(&harness, &saved), in_memory(&harness, &saved)), (0, 12), "a bucket starts empty");
    assert_eq!(last_notice(&harness, session), (0, 12));
    let all = counters(&harness);
    assert_eq!((all.admission_budget_blocks, all.unsaved_blocks), (12, 0));
    assert_eq!(all.write_budget_bytes, BUDGET.bytes);
    load(&mut harness, session, &saved);
    assert_eq!(harness.engines[&session].loads.len(), 0, "all were loaded and released");
    // An hour later, the bucket has its burst.
    harness.pass(60 * MINUTE);
    assert!(
        save(&mut harness, session, &keys(20..23)).iter().all(|status| *status == CommitStatus::Committed)
    );
    assert_eq!((stored(&harness, &keys(20..23)), last_notice(&harness, session)), (3, (3, 0)));
    assert!(counters(&harness).write_budget_left_bytes < 29 * SLOT_BYTES);
}

/// Requests four extents; returns the number of leases.
fn lease_extents(harness: &mut Harness, session: SessionId) -> usize {
    let body = Request::Reserve { count: 4, kind: PlaceKind::Extent };
    harness.request(session, RequestKind::LeaseExtents(4), body);
    harness.finish_jobs();
    match harness.engines[&session].replies.last() {
        Some((_, Reply::Reserved { leases, .. })) => leases.len(),
        other => panic!("{other:?} does not answer a reservation"),
    }
}

#[test]
fn extents_are_not_lent_beyond_the_budget() {
    let (mut harness, session) = with(AdmissionMode::Always, Some(BUDGET));
    assert_eq!(lease_extents(&mut harness, session), 0);
    harness.pass(60 * MINUTE);
    assert_eq!(lease_extents(&mut harness, session), 4);
    assert!(counters(&harness).write_budget_left_bytes < 28 * SLOT_BYTES);
}

#[test]
fn extents_are_not_lent_for_saves_that_admission_decides_about() {
    for mode in [AdmissionMode::SecondUse, AdmissionMode::ExpectedReuse] {
        let (mut harness, session) = with(mode, None);
        let body = Request::Reserve { count: 4, kind: PlaceKind::Extent };
        harness.request(session, RequestKind::Other, body);
        let Some((_, Reply::BadRequest(text))) = harness.engines[&session].replies.last() else {
            panic!("{mode:?} lends extents");
        };
        assert!(text.contains("pool.admission") && text.contains("arena"), "{text}");
        assert_eq!(save(&mut harness, session, &keys(0..1)), [CommitStatus::Committed]);
        harness.pin_extents(session, &keys(0..1));
        assert!(matches!(harness.engines[&session].replies.last(), Some((_, Reply::Pinned { .. }))));
    }
}

#[test]
fn extents_that_are_returned_unwritten_are_refunded_up_to_the_burst() {
    let (mut harness, session) = with(AdmissionMode::Always, Some(BUDGET));
    harness.pass(60 * MINUTE);
    harness.apply(Event::Tick);
    let full = counters(&harness).write_budget_left_bytes;
    for _ in 0..20 {
        assert_eq!(lease_extents(&mut harness, session), 4, "leases that are returned spend no budget");
        harness.abort_extents(session);
        harness.finish_jobs();
    }
    let left = counters(&harness).write_budget_left_bytes;
    // The journal pages of the leases stay charged.
    assert!(left <= full && left + 8 * SLOT_BYTES > full, "{left} of {full} bytes left");
}

#[test]
fn device_bytes_and_useful_bytes_are_counted() {
    let (mut harness, session) = with(AdmissionMode::Always, None);
    save(&mut harness, session, &keys(0..4));
    let all = counters(&harness);
    let blocks = 4 * SLOT_BYTES;
    assert!(all.journal_written_bytes >= 4096 && all.journal_written_bytes.is_multiple_of(4096));
    assert_eq!(all.pool_written_bytes, blocks + all.journal_written_bytes);
    let useful = 4 * large_layout().block_bytes();
    assert_eq!(all.stored_bytes_total, useful);
    assert_eq!(all.write_amplification_permille, all.pool_written_bytes * 1000 / useful);
}

/// Bytes written to devices by time, from the operations that the core requested.
#[derive(Default)]
struct WriteLog {
    /// Start of the current agent on the clock of the log.
    base: Duration,
    writes: Vec<(Duration, u64)>,
}

impl WriteLog {
    /// Completes all jobs and logs the bytes of their writes.
    fn finish(&mut self, harness: &mut Harness) {
        while let Some(job) = harness.jobs.first() {
            if let Job::Device { op, .. } = job {
                let bytes = match &op.kind {
                    DeviceOpKind::WritePages { bytes, .. } => bytes.len() as u64,
                    DeviceOpKind::WriteBlock { header, slot, .. } => header.len() as u64 + slot.bytes,
                    DeviceOpKind::WriteHeader { header, .. } => header.len() as u64,
                    DeviceOpKind::Sync => 0,
                };
                self.writes.push((self.base + harness.now.since(Tick(0)), bytes));
            }
            harness.advance(0);
        }
    }

    /// Most bytes in any 24 hours.
    fn busiest_day(&self) -> u64 {
        let from = |start: &Duration| {
            let within = self.writes.iter().filter(|(at, _)| (*start..*start + DAY).contains(at));
            within.map(|(_, bytes)| bytes).sum()
        };
        self.writes.iter().map(|(at, _)| from(at)).max().unwrap_or(0)
    }

    fn bytes_after(&self, time: Duration) -> u64 {
        self.writes.iter().filter(|(at, _)| *at >= time).map(|(_, bytes)| bytes).sum()
    }
}

/// Saves bursts of 48 blocks every five minutes for two days: more than twice the budget. Restarts the agent
/// before these bursts.
fn two_days_of_bursts(restarts: &[u64]) -> (WriteLog, Counters) {
    let (mut harness, mut session) = with(AdmissionMode::Always, Some(BUDGET));
    let mut log = WriteLog::default();
    for burst in 0..576_u64 {
        if restarts.contains(&burst) {
            log.base += harness.now.since(Tick(0));
            harness = harness.kill();
            harness.apply(Event::InventoryWanted { slots: Box::new(SlotSet::ALL) });
            session = harness.open_session(TenantId::DEFAULT, large_layout());
            log.finish(&mut harness);
        }
        for part in 0..4 {
            let first = (burst * 4 + part) * 12;
            harness.reserve(session, 12);
            harness.commit(session, &keys(first..first + 12), Priority::Normal);
            harness.pass(Duration::from_millis(6));
            log.finish(&mut harness);
        }
        harness.pass(5 * MINUTE - Duration::from_millis(24));
        log.finish(&mut harness);
    }
    (log, counters(&harness))
}

#[test]
fn bursty_writes_hold_the_budget_of_a_simulated_day_within_one_percent() {
    let (log, all) = two_days_of_bursts(&[]);
    let busiest = log.busiest_day();
    assert!(busiest <= BUDGET.bytes, "{busiest} bytes in a day, {} allowed", BUDGET.bytes);
    let second = log.bytes_after(DAY);
    assert!(second >= BUDGET.bytes / 1000 * 985, "{second} bytes of {} on the second day", BUDGET.bytes);
    assert!(all.admission_budget_blocks > 2 * 6400, "the load offers twice the budget");
    assert_eq!(all.unsaved_blocks, 0);
}

#[test]
fn restarts_do_not_add_to_the_budget() {
    let (log, _) = two_days_of_bursts(&[2, 4, 120, 286, 288, 290, 292, 400]);
    let busiest = log.busiest_day();
    assert!(busiest <= BUDGET.bytes, "{busiest} bytes in a day, {} allowed", BUDGET.bytes);
    assert!(log.bytes_after(DAY) >= BUDGET.bytes / 100 * 90, "each restart costs at most a burst");
}

#[test]
fn small_blocks_leave_a_part_of_the_budget_to_large_ones() {
    let (mut harness, large) = with(AdmissionMode::Always, Some(BUDGET));
    let small = harness.open_session(TenantId::DEFAULT, small_layout());
    // Past the overdraft of the start. Then four small blocks take all that the bucket gains in a round, before or after
    // a large one, which is more than twice as much.
    harness.pass(Duration::from_secs(440));
    let rounds = 100;
    let of_small = |round: u64| SMALL_KEYS_FROM + 4 * round..SMALL_KEYS_FROM + 4 * (round + 1);
    for round in 0..rounds {
        harness.pass(Duration::from_secs(5));
        let mut offers = [(small, keys(of_small(round))), (large, keys(round..round + 1))];
        if round % 2 == 1 {
            offers.reverse();
        }
        for (session, keys) in offers {
            save(&mut harness, session, &keys);
        }
    }
    let small = stored(&harness, &keys(SMALL_KEYS_FROM..SMALL_KEYS_FROM + 4 * rounds));
    let large = stored(&harness, &keys(0..rounds));
    assert!(small >= 3 && large >= 3, "{small} small and {large} large blocks are durable");
}
