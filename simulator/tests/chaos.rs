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

#[test]
fn whatever_breaks_no_invariant_does() {
    let mut seen: BTreeMap<&str, u64> = BTreeMap::new();
    for seed in 0..200 {
        let run = run(seed, Variant::Production, Recording::Digest);
        assert!(run.violation.is_none(), "{}", replay(&run));
        for (what, count) in run.seen {
            *seen.entry(what).or_default() += count;
        }
    }
    println!("{seen:#?}");
}

/// The first seed that finds a flaw, of the first hundreds.
fn finds(variant: Variant) -> Option<(u64, String)> {
    (0..300).find_map(|seed| run(seed, variant, Recording::Digest).violation.map(|violation| (seed, violation)))
}

#[test]
fn flaws_that_are_put_in_on_purpose_are_found() {
    let flaws = [
        Variant::RegistrationKeepsDirectory,
        Variant::DurableBeforeSync,
        Variant::DeadNodesOffered,
        Variant::ReadsUnchecked,
        Variant::EvictionsUnannounced,
    ];
    for flaw in flaws {
        let found = finds(flaw);
        println!("{flaw:?}: {found:?}");
        assert!(found.is_some(), "{flaw:?} was not found");
    }
}
