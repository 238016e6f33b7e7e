//! Many agents at once: how long the directories take to be whole, in simulated time.

use std::time::Duration;

use reprise_simulator::{Cluster, scale};

#[test]
fn a_thousand_agents_that_register_at_once_make_every_directory_whole_within_seconds() {
    let cluster = Cluster { nodes: 1000, members: 3, seed: 1 };
    let measured = scale(cluster).expect("it comes to its end");
    assert!(measured.first_start < Duration::from_secs(2), "{measured:?}");
    // Half a second until members are back, two for the lease of those that were, and the delays between attempts.
    assert!(measured.rebuild < Duration::from_secs(6), "{measured:?}");
    assert_eq!(
        measured.registrations, 6000,
        "each agent registers once with each member, in each of its lives"
    );
    assert!(measured.replicas >= 2000, "every agent holds some blocks: {measured:?}");
    assert_eq!(measured.local_matches, 1000, "nobody needs a member for its own blocks");
    let smaller = Cluster { nodes: 100, ..cluster };
    assert_eq!(scale(smaller), scale(smaller), "equal clusters give equal runs");
}
