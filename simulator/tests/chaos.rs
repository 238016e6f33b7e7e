//! Many seeds of the simulated cluster, and what must be so of the simulation itself: equal seeds give equal runs, and
//! flaws that are put in on purpose are found.
//!
//! Replay one seed: `reprise sim chaos --seeds 1 --start SEED`.

use std::collections::BTreeMap;

use reprise_simulator::{Recording, Run, Variant, run};

fn replay(run: &Run) -> String {
    let violation = run.violation.as_deref().unwrap_or_default();
    format!("seed {}: {violation}\nreplay with: reprise sim chaos --seeds 1 --start {}", run.seed, run.seed)
}

/// What these runs must have met, for their silence to mean something.
const REACHED: [&str; 72] = [
    "kills",
    "power losses",
    "pauses",
    "member restarts",
    "member pauses",
    "members cut off from the store",
    "store restarts",
    "store pauses",
    "clocks stood still",
    "clocks jumped",
    "store clocks stood still",
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
];

#[test]
fn whatever_breaks_no_invariant_does() {
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

/// Found by them: a member that had heard of a new map answered by it with the slots of the one before; a draining node gave away
/// a damaged copy in DRAM again and again, and never became drained; a node took offered blocks for which its tenant was owed memory
/// that others had for good, or of which it may have less than a block; what a tenant had wanted far beyond its budget kept the budget from being shared out for long; a
/// new ledger gave a node that held more than its limit what another was still to give up; members of a store that was replaced
/// registered in the new one, whose maps begin with the same epochs; an order of a replaced store's ledger was taken for the new one's
/// of the same version. Three of them are about the auditor: a lost device takes room from tenants, and memory that it may still write
/// to, and what others had when a drain ended they may evict.
const FOUND: [u64; 13] = [101, 448, 366, 389, 1144, 2010, 11299, 14435, 22782, 23628, 33440, 43417, 55024];

#[test]
fn seeds_that_have_found_something_find_nothing_any_more() {
    for seed in FOUND {
        let run = run(seed, Variant::Production, Recording::Digest);
        assert!(run.violation.is_none(), "seed {seed}: {:?}", run.violation);
    }
}

/// The first seed that finds a flaw.
fn finds(variant: Variant, seeds: std::ops::Range<u64>) -> Option<(u64, String)> {
    seeds
        .into_iter()
        .find_map(|seed| run(seed, variant, Recording::Digest).violation.map(|words| (seed, words)))
}

#[test]
fn flaws_that_are_put_in_on_purpose_are_found() {
    // Each is found often; the ranges begin where it is found soon.
    let flaws = [
        (Variant::RegainedSlotsUnasked, 0..100, "does not know everything"),
        (Variant::RegistrationKeepsDirectory, 0..100, "node"),
        (Variant::DurableBeforeSync, 0..100, "told durable and gone"),
        (Variant::DeadNodesOffered, 0..100, "silent for"),
        (Variant::ReadsUnchecked, 0..100, "committed"),
        (Variant::EvictionsUnannounced, 0..100, "the directory names what is not there"),
        (Variant::AnswersAfterLease, 0..100, "after its lease has expired"),
        (Variant::AnswersBetweenMaps, 320..420, "two members answer for slot"),
        (Variant::LeaseFromAnswer, 230..330, "after the store has ended its lease"),
        (Variant::CompactionLosesChanges, 140..240, "know"),
        (Variant::NewOwnerWhole, 0..100, "says that it knows everything"),
        (Variant::OutboxOutlivesRegistration, 10..110, "node"),
        (Variant::LookupsWithoutEnd, 0..100, "a lookup is not over in time"),
        (Variant::QueueWithoutBound, 50..150, "changes wait for a member"),
        (Variant::LocalNeedsControlPlane, 0..100, "blocks are on the node"),
        (Variant::PeersUnchecked, 180..280, "a peer sent"),
        (Variant::TenantsTogether, 0..100, "of another tenant"),
        (Variant::GrantsInOrderOfArrival, 1..101, "over its limit"),
        (Variant::DramCountsAsDurable, 0..100, "that it is durable where it is not"),
        (Variant::ModesUnfollowed, 0..100, "places blocks on node"),
        (Variant::CordonsUnheard, 0..100, "and is not active"),
        (Variant::DrainsUnheard, 0..100, "does not drain"),
        (Variant::OffersWithoutEnd, 100..200, "an offer is not over in time"),
        (Variant::OffersOfOneTenant, 25..125, "blocks are on the node"),
        (Variant::TakenPushesOut, 0..100, "only what was offered to it needs room"),
        (Variant::MovesWithoutEnd, 0..100, "nothing is left to wait for"),
        (Variant::ElsewhereHeard, 20..120, "has no order for"),
        (Variant::NewLedgerDeaf, 0..100, "then nodes may hold"),
        (Variant::DeadNodesFreed, 60..160, "then nodes may hold"),
    ];
    for (flaw, seeds, words) in flaws {
        let found = finds(flaw, seeds);
        println!("{flaw:?}: {found:?}");
        assert!(
            found.is_some_and(|(_, violation)| violation.contains(words)),
            "{flaw:?} was not found as '{words}'"
        );
    }
}

#[test]
fn equal_seeds_give_equal_runs() {
    for seed in 0..10 {
        let [one, other] =
            [Recording::Lines, Recording::Lines].map(|recording| run(seed, Variant::Production, recording));
        assert_eq!(one.lines, other.lines, "seed {seed}");
        assert_eq!((one.digest, one.steps, &one.seen), (other.digest, other.steps, &other.seen));
        let without_lines = run(seed, Variant::Production, Recording::Digest);
        assert_eq!(without_lines.digest, one.digest, "recording changes nothing");
    }
    let digests: std::collections::BTreeSet<u64> =
        (0..20).map(|seed| run(seed, Variant::Production, Recording::Digest).digest).collect();
    assert_eq!(digests.len(), 20, "other seeds, other runs");
}
