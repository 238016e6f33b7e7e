//! Many agents at once: how long the directories take to be whole, in simulated time.

use std::time::Duration;

use reprise_simulator::{Cluster, scale};

#[test]
fn a_hundred_agents_that_register_at_once_make_every_directory_whole_within_seconds() {
    let cluster = Cluster { nodes: 100, members: 3, seed: 1 };
    let measured = scale(cluster).expect("it comes to its end");
    assert!(measured.first_start < Duration::from_secs(2), "{measured:?}");
    // Half a second until members are back, two for the lease of those that were, and the delays between attempts.
    assert!(measured.rebuild < Duration::from_secs(6), "{measured:?}");
    assert_eq!(
        measured.registrations, 600,
        "each agent registers once with each member, in each of its lives"
    );
    assert!(measured.replicas >= 200, "every agent holds some blocks: {measured:?}");
    assert_eq!(scale(cluster), Ok(measured), "equal clusters give equal runs");
}
