//! Test that the limits in `docs/PROTOCOL.md`, parts 2 and 4, equal those in the code.

use std::time::Duration;

use reprise_controlplane_core::change_log;
use reprise_controlplane_core::directory::{CONSIDERED_MAX, REPLICAS_PER_KEY_MAX};
use reprise_policy::placement::{ROOM_BLOCKS, ROOM_PART};
use reprise_policy::routing::{LOAD_STEP_BYTES, LoadClass};
use reprise_proto::local::KEYS_PER_CALL_MAX;

use crate::config::{EventsConfig, LimitsConfig, MembershipConfig};
use crate::{events, membership, prefix_match, registry, server};

const DOCUMENT: &str = include_str!("../../docs/PROTOCOL.md");

/// Collapses each run of white space, line breaks included, into one space.
fn collapsed(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn documented_limits_equal_those_in_the_code() {
    assert_eq!((server::MESSAGE_BYTES_MAX, server::STREAMS_MAX), (256 << 10, 1024));
    assert_eq!((KEYS_PER_CALL_MAX, REPLICAS_PER_KEY_MAX), (8192, 16));
    assert_eq!(LimitsConfig::default().calls_at_once, 1024);
    assert_eq!((registry::NODES_MAX, membership::NAME_BYTES_MAX), (65_535, 512));
    assert_eq!(MembershipConfig::default().forget_after.0, Duration::from_secs(8));
    let EventsConfig { history, subscribers, buffer_steps, .. } = EventsConfig::default();
    assert_eq!((history.0, subscribers, buffer_steps), (32 << 20, 64, 10_000));
    assert_eq!(prefix_match::ANSWERED_WITHIN, Duration::from_millis(200));
    assert_eq!((ROOM_BLOCKS, ROOM_PART, CONSIDERED_MAX), (64, 64, 64));
    assert_eq!((LOAD_STEP_BYTES, LoadClass::MAX), (64 << 20, LoadClass(15)));
    assert_eq!((change_log::RECORD_BYTES, events::PART_CHANGES), (20, 1024));
    let (blocks_max, blocks_limit) =
        (events::format::BLOCKS_PER_BATCH_MAX, events::replay::BLOCKS_PER_BATCH_LIMIT);
    assert_eq!((blocks_max, blocks_limit), (256, 65_536));
    let document = collapsed(DOCUMENT);
    for words in [
        "at most 256 KiB per request, 1,024 concurrent calls per connection, 8,192 keys per call",
        "A member runs at most 1,024 calls of its directory at once (`limits.calls_at_once`)",
        "(1 to 65,535, kept in the store)",
        "Name: 1 to 512 letters",
        "(`forget_after`, 8 s by default)",
        "at most 16 per key",
        "At most 64 replicas of a block are considered",
        "Class 0 is below 64 MiB. Class c is at least 64 MiB × 2^(c − 1). The highest class is 15",
        "free space for 64 such blocks, and at least a 64th of the pool is free",
        "waits at most 200 ms",
        "(`events.history`, 32 MiB of 20 bytes each)",
        "at most 1,024 changes",
        "`events.subscribers` connections each (64)",
        "`events.buffer_steps` batches (10,000)",
        "A batch has at most 256 blocks; a batch of a snapshot in a replay has at most 65,536",
    ] {
        assert!(document.contains(&collapsed(words)), "docs/PROTOCOL.md lacks: {words}");
    }
}
