//! The limits in `docs/PROTOCOL.md`, parts 2 and 4, are those of this member.

use std::time::Duration;

use reprise_controlplane_core::directory::{CONSIDERED_MAX, REPLICAS_PER_KEY_MAX};
use reprise_controlplane_core::log;
use reprise_policy::placement::{ROOM_BLOCKS, ROOM_PART};
use reprise_policy::routing::{LOAD_STEP_BYTES, LoadClass};
use reprise_proto::local::KEYS_PER_CALL_MAX;

use crate::config::{EventsConfig, LimitsConfig, MembershipConfig};
use crate::{chains, events, membership, registry, server};

const DOCUMENT: &str = include_str!("../../docs/PROTOCOL.md");

#[test]
fn the_limits_in_the_document_are_those_of_a_member() {
    assert_eq!((server::MESSAGE_BYTES_MAX, server::STREAMS_MAX), (256 << 10, 1024));
    assert_eq!((KEYS_PER_CALL_MAX, REPLICAS_PER_KEY_MAX), (8192, 16));
    assert_eq!(LimitsConfig::default().calls_at_once, 1024);
    assert_eq!((registry::NODES_MAX, membership::NAME_BYTES_MAX), (65_535, 512));
    assert_eq!(MembershipConfig::default().forget_after.0, Duration::from_secs(8));
    let EventsConfig { history, subscribers, buffer_steps, .. } = EventsConfig::default();
    assert_eq!((history.0, subscribers, buffer_steps), (32 << 20, 64, 10_000));
    assert_eq!(chains::ANSWERED_WITHIN, Duration::from_millis(200));
    assert_eq!((ROOM_BLOCKS, ROOM_PART, CONSIDERED_MAX), (64, 64, 64));
    assert_eq!((LOAD_STEP_BYTES, LoadClass::MAX), (64 << 20, LoadClass(15)));
    assert_eq!((log::RECORD_BYTES, events::PART_CHANGES), (20, 1024));
    let (blocks_max, blocks_limit) =
        (events::format::BLOCKS_PER_BATCH_MAX, events::replay::BLOCKS_PER_BATCH_LIMIT);
    assert_eq!((blocks_max, blocks_limit), (256, 65_536));
    for words in [
        "Requests at most 256 KiB, 1,024 calls at once\non a connection, at most 8,192 keys in a call",
        "A member holds 1,024 calls of its directory at once (`limits.calls_at_once`)",
        "(1 to 65,535, kept in the store)",
        "Name: 1 to 512\n  letters",
        "(`forget_after`, 8 s by default)",
        "at most 16 a key",
        "Of a block with many replicas 64 are looked at",
        "over 64 MiB: 0 below that, up to 15",
        "room for 64 such blocks and a 64th of its pool",
        "waits 200 ms\n  at most",
        "(`events.history`, 32 MiB of 20 bytes\n  each)",
        "At most 1,024 changes",
        "`events.subscribers` connections each (64)",
        "`events.buffer_steps` batches (10,000)",
        "A batch has at most 256 blocks, those of a snapshot in\na replay up to 65,536",
    ] {
        assert!(DOCUMENT.contains(words), "docs/PROTOCOL.md lacks: {words}");
    }
}
