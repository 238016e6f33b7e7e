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
const REACHED: [&str; 68] = [
    "kills",
    "power losses",
    "pauses",
    "member restarts",
    "member pauses",
    "members cut off from the store",
    "store restarts",
    "store pauses",
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
/// a damaged copy in DRAM again and again, and never became drained.
const FOUND: [u64; 2] = [101, 448];

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
        (Variant::RegainedSlotsUnasked, 0..300, "does not know everything"),
        (Variant::RegistrationKeepsDirectory, 0..300, "node"),
        (Variant::DurableBeforeSync, 0..300, "told durable and gone"),
        (Variant::DeadNodesOffered, 0..300, "silent for"),
        (Variant::ReadsUnchecked, 0..300, "committed"),
        (Variant::EvictionsUnannounced, 0..300, "the directory names what is not there"),
        (Variant::AnswersAfterLease, 0..300, "after its lease has expired"),
        (Variant::AnswersBetweenMaps, 120..420, "two members answer for slot"),
        (Variant::LeaseFromAnswer, 225..525, "after the store has ended its lease"),
        (Variant::CompactionLosesChanges, 0..300, "know"),
        (Variant::NewOwnerWhole, 0..300, "says that it knows everything"),
        (Variant::OutboxOutlivesRegistration, 0..300, "node"),
        (Variant::LookupsWithoutEnd, 0..300, "a lookup is not over in time"),
        (Variant::QueueWithoutBound, 0..300, "changes wait for a member"),
        (Variant::LocalNeedsControlPlane, 0..300, "blocks are on the node"),
        (Variant::PeersUnchecked, 65..365, "a peer sent"),
        (Variant::TenantsTogether, 0..300, "of another tenant"),
        (Variant::GrantsInOrderOfArrival, 0..300, "over its limit"),
        (Variant::DramCountsAsDurable, 0..300, "that it is durable where it is not"),
        (Variant::ModesUnfollowed, 0..300, "places blocks on node"),
        (Variant::CordonsUnheard, 0..300, "nothing is left to wait for"),
        (Variant::DrainsUnheard, 0..300, "does not drain"),
        (Variant::OffersWithoutEnd, 0..300, "an offer is not over in time"),
        (Variant::OffersOfOneTenant, 0..300, "blocks are on the node"),
        (Variant::TakenPushesOut, 0..300, "only what was offered to it needs room"),
        (Variant::MovesWithoutEnd, 0..300, "nothing is left to wait for"),
        (Variant::ElsewhereHeard, 0..300, "nodes may hold"),
        (Variant::NewLedgerDeaf, 0..300, "then nodes may hold"),
        (Variant::DeadNodesFreed, 20..320, "then nodes may hold"),
        (Variant::RecoveryWithoutSync, 245..845, "told durable and gone"),
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
