//! Many agents that register at once: the time until the directories are complete, in simulated time.

use std::time::Duration;

use reprise_simulator::{Cluster, scale};

#[test]
fn a_thousand_agents_complete_every_directory_within_seconds() {
    let cluster = Cluster { nodes: 1000, members: 3, seed: 1 };
    let measured = scale(cluster).expect("the run ends");
    assert!(measured.first_start < Duration::from_secs(2), "{measured:?}");
    // Half a second until the members restart, two for the leases of their predecessors, and the retry
    // delays.
    assert!(measured.rebuild < Duration::from_secs(6), "{measured:?}");
    assert_eq!(measured.registrations, 6000, "each agent registers once with each process of each member");
    assert!(measured.replicas >= 2000, "every agent holds some blocks: {measured:?}");
    assert_eq!(measured.local_matches, 1000, "an engine needs no member for blocks of its node");
    let smaller = Cluster { nodes: 100, ..cluster };
    assert_eq!(scale(smaller), scale(smaller), "equal clusters produce equal runs");
}
