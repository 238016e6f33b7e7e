//! Many seeds of the simulated cluster, and tests of the simulation itself: equal seeds produce equal runs,
//! and injected flaws are detected.
//!
//! Replay one seed: `reprise sim chaos --seeds 1 --start SEED`.

use std::collections::BTreeMap;

use reprise_simulator::{Recording, Run, Variant, run};

fn replay(run: &Run) -> String {
    let violation = run.violation.as_deref().unwrap_or_default();
    format!("seed {}: {violation}\nreplay with: reprise sim chaos --seeds 1 --start {}", run.seed, run.seed)
}

/// Events that these runs must reach, so that the absence of violations is meaningful.
const REACHED: [&str; 102] = [
    "kills",
    "power losses",
    "pauses",
    "member restarts",
    "member pauses",
    "members cut off from the store",
    "store restarts",
    "store pauses",
    "clocks stopped",
    "clocks jumped",
    "store clocks stopped",
    "store clocks jumped",
    "slow stores",
    "compactions",
    "watches compacted",
    "store wipes",
    "stores found replaced",
    "leases gone",
    "leases unconfirmed",
    "member names taken",
    "maps learned",
    "redirects",
    "partial answers",
    "lookup parts unanswered",
    "grants",
    "reports",
    "budgets set",
    "budgets removed",
    "orders",
    "nodes bound by a budget",
    "local matches alone",
    "partitions",
    "connections lost",
    "slow disks",
    "bad media",
    "lost disks",
    "damaged memory",
    "rot",
    "engine deaths",
    "registrations",
    "registrations replaced",
    "replacements awaited",
    "inventories",
    "fenced",
    "lookups",
    "fetches",
    "serves",
    "suspects",
    "durable notices",
    "devices lost",
    "corrupt blocks",
    "corrupt memory",
    "hit_blocks_own_dram",
    "hit_blocks_own_nvme",
    "hit_blocks_peer_dram",
    "hit_blocks_peer_nvme",
    "deadline_blocks",
    "no_space_blocks",
    "lookup_failures",
    "fill_corrupt",
    "fill_peer_lost",
    "dram_evictions",
    "nvme_evictions",
    "modes set",
    "offers taken",
    "offers refused",
    "offers unanswered",
    "hot_blocks_given",
    "pulled_blocks",
    "pulls_dropped",
    "moves with a drop",
    "moves ended",
    "drains finished",
    "drains refused",
    "extents leased",
    "extent writes",
    "extent_commits",
    "extents written corrupt",
    "extents pinned",
    "pins refused",
    "pinned blocks read",
    "pinned blocks found corrupt",
    "extents in quarantine",
    "extents of an earlier agent",
    "extents awaited",
    "sessions ended before their holders",
    "extent writes after a session",
    "holders ended with I/O in flight",
    "extent writes of ended processes",
    "holders that outlived the agent",
    "extent writes after a restart of the agent",
    "extent writes in power losses",
    "blocks read after the end of their pin",
    "layer reports",
    "commits awaited",
    "writeback_slack_blocks",
    "writeback_decode_blocks",
    "writeback_carried_over_blocks",
    "writeback_nothing_fits_blocks",
    "writeback_overdue_blocks",
    "writeback_awaited_blocks",
    "writeback_memory_blocks",
];

#[test]
fn invariants_hold_under_random_faults() {
    let mut seen: BTreeMap<&str, u64> = BTreeMap::new();
    for seed in 60..210 {
        let run = run(seed, Variant::Production, Recording::Digest);
        assert!(run.violation.is_none(), "{}", replay(&run));
        for (what, count) in run.seen {
            *seen.entry(what).or_default() += count;
        }
    }
    for what in REACHED {
        assert!(seen.get(what).is_some_and(|count| *count > 0), "the runs never reached '{what}'");
    }
}

/// Seeds that found bugs:
///
/// * A member that knew a new map answered by it with the slots of the previous one.
/// * A draining node offered a damaged copy in DRAM repeatedly, and never became drained.
/// * A node accepted offered blocks for which its tenant had no free memory: its reservation was occupied
///   permanently by other tenants, or its limit was below one block.
/// * The past demand of a tenant, far beyond its budget, delayed the distribution of the budget for long.
/// * A new ledger granted a node above its limit bytes that another node had not released yet.
/// * Members of a replaced store registered in the new one, whose maps begin with the same epochs.
/// * A grant of a replaced store's ledger was mistaken for a grant of the new one with the same version.
///
/// Three seeds were errors of the audits. A lost device reduces the memory of tenants, and leaves memory that
/// it may still write to. Other nodes may evict their copies after the end of a drain.
///
/// Later changes gave all seeds other runs, the last one when members began to run the production code of their start
/// and of their expiry. Flaws revert the fixes of two bugs. Of the 13 older seeds none finds these now; the first two
/// seeds do: 312 the former slots (`AnswersBetweenMaps`), 38 the new ledger (`NewLedgerSkipsReports`). Whether the older
/// seeds still reach the other bugs was not checked since. With their fixes reverted, 14435, 23628 and 55024 passed
/// before that too. A unit test covers the replaced store (`a_member_of_a_replaced_store_does_not_register`); 55024 was
/// an error of the audit of drains.
const FOUND: [u64; 15] =
    [312, 38, 101, 448, 366, 389, 1144, 2010, 11299, 14435, 22782, 23628, 33440, 43417, 55024];

#[test]
fn seeds_that_found_bugs_pass() {
    for seed in FOUND {
        let run = run(seed, Variant::Production, Recording::Digest);
        assert!(run.violation.is_none(), "seed {seed}: {:?}", run.violation);
    }
}

/// Returns the first seed whose violation contains `words`. A flaw may violate other invariants as well.
fn finds(variant: Variant, seeds: std::ops::Range<u64>, words: &str) -> Option<(u64, String)> {
    seeds.into_iter().find_map(|seed| {
        let violation = run(seed, variant, Recording::Digest).violation?;
        violation.contains(words).then_some((seed, violation))
    })
}

#[test]
fn injected_flaws_are_detected() {
    // Most seeds detect most flaws. A range starts shortly before the first seed that detects its flaw, to
    // save time.
    let flaws = [
        (Variant::RegainedSlotsWithoutInventory, 0..100, "does not know all inventories"),
        (Variant::RegistrationKeepsDirectory, 0..100, "node"),
        (Variant::DurableBeforeSync, 0..100, "reported durable but lost"),
        (Variant::LookupsNameDeadNodes, 0..100, "silent for"),
        (Variant::ReadsUnverified, 60..160, "committed"),
        (Variant::EvictionsNotAnnounced, 0..100, "the directory lists missing replicas"),
        (Variant::AnswersAfterLease, 0..100, "after its lease has expired"),
        (Variant::AnswersBetweenMaps, 300..400, "two members answer for slot"),
        (Variant::LeaseFromAnswer, 640..740, "after the store has ended its lease"),
        (Variant::CompactionLosesChanges, 0..100, "know"),
        (Variant::NewOwnerClaimsComplete, 0..100, "reports complete knowledge"),
        (Variant::OutboxOutlivesRegistration, 0..100, "node"),
        (Variant::LookupsWithoutDeadline, 0..100, "a lookup exceeds its deadline"),
        (Variant::UnboundedQueue, 70..170, "queued changes exceed the bound"),
        (Variant::LocalNeedsControlPlane, 0..100, "blocks are on the node"),
        (Variant::PeersUnverified, 0..100, "a peer sent"),
        (Variant::TenantsMerged, 0..100, "of another tenant"),
        (Variant::GrantsInOrderOfArrival, 0..100, "over its limit"),
        (Variant::DramCountsAsDurable, 0..100, "is durable where it is not"),
        (Variant::ModesIgnored, 0..100, "places blocks on node"),
        (Variant::CordonsIgnored, 110..210, "and is not active"),
        (Variant::DrainsIgnored, 0..100, "does not drain"),
        (Variant::OffersWithoutDeadline, 0..100, "an offer exceeds its deadline"),
        (Variant::OffersEvictBlocks, 0..100, "although only offered blocks need room"),
        (Variant::MoveEndIgnored, 0..100, "the core still has a deadline"),
        (Variant::ReportToOtherOwnerCounts, 110..210, "has no grant for"),
        (Variant::NewLedgerSkipsReports, 20..120, "nodes may then hold"),
        (Variant::DeadNodeGrantsReused, 60..160, "nodes may then hold"),
        (Variant::LeasesIgnored, 0..100, "which is leased by"),
        (Variant::PinsIgnored, 0..100, "which is pinned by"),
        (Variant::QuarantineIgnored, 0..100, "to which I/O is in flight of"),
        (Variant::EarlierLeasesIgnored, 0..100, "which is leased by"),
        (Variant::ExtentsOutsideOfSyncs, 0..100, "reported durable but lost"),
        (Variant::PinnedReadsUnverified, 0..100, "was never committed"),
        (Variant::WritesMisdirected, 0..100, "is leased and was overwritten"),
        (Variant::WritesMisdirected, 0..100, "is pinned and was overwritten"),
    ];
    let mut missed = Vec::new();
    for (flaw, seeds, words) in flaws {
        let found = finds(flaw, seeds, words);
        println!("{flaw:?}: {found:?}");
        if found.is_none() {
            missed.push(format!("{flaw:?} was not found as '{words}'"));
        }
    }
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}

#[test]
fn equal_seeds_produce_equal_runs() {
    for seed in 0..10 {
        let [one, other] =
            [Recording::Lines, Recording::Lines].map(|recording| run(seed, Variant::Production, recording));
        assert_eq!(one.lines, other.lines, "seed {seed}");
        assert_eq!((one.digest, one.steps, &one.seen), (other.digest, other.steps, &other.seen));
        let without_lines = run(seed, Variant::Production, Recording::Digest);
        assert_eq!(without_lines.digest, one.digest, "recording does not affect the run");
    }
    let digests: std::collections::BTreeSet<u64> =
        (0..20).map(|seed| run(seed, Variant::Production, Recording::Digest).digest).collect();
    assert_eq!(digests.len(), 20, "different seeds produce different runs");
}
