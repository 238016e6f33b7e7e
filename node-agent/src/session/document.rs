//! Checks the examples and limits in `docs/PROTOCOL.md` against this side of the session.

use std::time::Duration;

use reprise_agent_core::effect::{
    BlockCounts, BlockReport, CommitStatus, LookaheadReport, Reply, RetentionUsage, Source, Ticket,
};
use reprise_agent_core::event::RequestId;
use reprise_buffers::{Arena, ArenaConfig, HugePolicy};
use reprise_policy::BlockKey;
use reprise_proto::local::FailureKind;

use super::decode::{self, DecodeResult};
use super::{encode, handshake, outbound};
use crate::config::Config;

const DOCUMENT: &str = include_str!("../../../docs/PROTOCOL.md");

/// Collapses each run of white space, line breaks included, into one space.
fn collapsed(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Returns the bytes of an example in part 1.
fn example(message: &str) -> Vec<u8> {
    // A name may be followed by words behind its closing quote.
    let begin = match message.contains('`') {
        true => format!("| `{message} |"),
        false => format!("| `{message}` |"),
    };
    let rows = DOCUMENT.lines().filter(|line| line.starts_with(&begin));
    let mut last_cells = rows.filter_map(|row| row.rsplit('`').nth(1));
    // Other tables have rows for the message too.
    let hex = last_cells.find(|cell| cell.bytes().all(|byte| byte.is_ascii_hexdigit())).expect("its example");
    let byte = |at| u8::from_str_radix(&hex[at..at + 2], 16).expect("hexadecimal");
    (0..hex.len()).step_by(2).map(byte).collect()
}

#[test]
fn requests_in_the_document_are_decoded() {
    for (message, meaning) in [
        ("Reserve", "Reserve { count: 3, kind: Arena }"),
        ("Reserve` of extents", "Reserve { count: 3, kind: Extent }"),
        (
            "Commit",
            "Commit(CommitRequest { items: [CommitItem { lease: LeaseId(9), key: Some(11111111111111111111111111111111), checksums: \
             [572662306, 572662306] }], priority: High, parent: Some(33333333333333333333333333333333), position: Some(300) })",
        ),
        ("AwaitDurable", "AwaitDurable { ticket: Ticket(4) }"),
        ("Abort", "Abort { leases: [LeaseId(9), LeaseId(300)] }"),
        (
            "Match",
            "Match { keys: [11111111111111111111111111111111], ranks: Own, position: Some(300), scope: Local, public: \
             None }",
        ),
        (
            "Match` of all ranks",
            "Match { keys: [11111111111111111111111111111111], ranks: All, position: None, scope: Cluster, public: \
             None }",
        ),
        (
            "Load",
            "Load(LoadRequest { keys: [11111111111111111111111111111111], deadline: 5s, read_bytes: 524288, scope: \
             Local, public: None })",
        ),
        ("Release", "Release { load: LoadId(6) }"),
        ("Stats", "Stats"),
        (
            "ReportLookahead",
            "Lookahead(Lookahead { version: 2, iteration: 20ms, requests: [LookaheadRequest { request: 7, iterations: \
             3, confidence: 900, keys: [11111111111111111111111111111111] }], cancelled: [5], begun: Some([BegunRequest { \
             request: 4, state: Running, first: 2, keys: [11111111111111111111111111111111] }, BegunRequest { request: 3, \
             state: Preempted, first: 0, keys: [] }]), ranks: All })",
        ),
        (
            "ManageBlocks",
            "Manage(BlockCommand { action: Pin { ttl: 60s }, selection: Keys([11111111111111111111111111111111]), ranks: All \
             })",
        ),
        (
            "ManageBlocks` of a session",
            "Manage(BlockCommand { action: Prefetch, selection: Listed(SessionId(5)), ranks: Own })",
        ),
        (
            "ManageBlocks` of a namespace",
            "Manage(BlockCommand { action: Delete, selection: Namespace { from: 4096 }, ranks: Own })",
        ),
        ("Trim", "Trim"),
        ("Pin", "Pin { keys: [11111111111111111111111111111111] }"),
        ("Unpin", "Unpin { pins: [PinId(9), PinId(300)] }"),
    ] {
        match decode::request(example(message).into()).expect("readable") {
            DecodeResult::Request { id: RequestId(2), body, inputs: None } => {
                assert_eq!(format!("{body:?}"), meaning);
            }
            other => panic!("{message} is decoded as {other:?}"),
        }
    }
}

#[test]
fn inputs_of_keys_in_the_document_are_decoded() {
    let message = example("Match` with the inputs of its key");
    let decoded = decode::request(message.into()).expect("readable");
    let DecodeResult::Request { inputs: Some(inputs), .. } = decoded else {
        panic!("no inputs: {decoded:?}")
    };
    assert_eq!((inputs.len(), inputs.input_bytes(), inputs.namespaces()), (1, 40, &[][..]));
    assert_eq!(inputs.packed()[8..], [0x44; 32]);
}

#[test]
fn requests_about_queue_pairs_in_the_document_are_decoded() {
    for (message, meaning) in [
        ("RegisterMemory", "Register { bytes: 8192 }"),
        ("RequestQueues", "Request { device: 3, pairs: 2, depth: 64, memory: MemoryNumber(1) }"),
        ("ReturnQueues", "Return { generation: GrantGeneration(300) }"),
    ] {
        match decode::request(example(message).into()).expect("readable") {
            DecodeResult::Queues { id: 2, call } => assert_eq!(format!("{call:?}"), meaning),
            other => panic!("{message} is decoded as {other:?}"),
        }
    }
}

#[test]
fn statement_of_a_backend_in_the_document_is_decoded_and_answered() {
    match decode::request(example("UseBackend").into()).expect("readable") {
        DecodeResult::Backend { id: 2, backend } => {
            assert_eq!(backend, reprise_policy::session::TransferBackend::GpuQueueEmulated);
        }
        other => panic!("decoded as {other:?}"),
    }
    let frame = encode::backend_used(2);
    let (bytes, _) = frame.next_part();
    assert_eq!(bytes[4..], example("BackendUsed"));
}

fn block_report() -> BlockReport {
    let counts =
        BlockCounts { affected: 1, unchanged: 2, absent: 3, over_limit: 4, in_use: 5, pinned: 6, bytes: 7 };
    let retention = RetentionUsage {
        blocks: 1,
        blocks_max: 2,
        dram_bytes: 3,
        dram_bytes_max: 4,
        nvme_bytes: 5,
        nvme_bytes_max: 6,
    };
    BlockReport { counts, next: Some(4096), retention }
}

#[test]
fn replies_match_the_bytes_in_the_document() {
    let config = ArenaConfig { bytes: 2 << 20, region_bytes: 2 << 20, huge: HugePolicy::Never };
    let arena = Arena::new(&config).expect("a small arena");
    let statuses = vec![
        CommitStatus::Committed,
        CommitStatus::Duplicate,
        CommitStatus::NoLease,
        CommitStatus::BadItem,
        CommitStatus::Durable,
        CommitStatus::Failed,
    ];
    let sources = vec![Source::OwnDram, Source::OwnNvme, Source::PeerDram, Source::PeerNvme];
    let replies = [
        ("Committed", Reply::Committed { ticket: Some(Ticket(4)), statuses }),
        ("DurableAwaited", Reply::DurableAwaited),
        (
            "LookaheadReported",
            Reply::LookaheadAccepted(LookaheadReport { window: 6, ignored: 1, ready: vec![7] }),
        ),
        ("BlocksManaged", Reply::Managed(block_report())),
        ("Aborted", Reply::Aborted),
        ("Matched", Reply::Matched { sources }),
        ("Released", Reply::Released),
        ("StatsReply", Reply::Stats(vec![("loads", 8)])),
        ("Trimmed", Reply::Trimmed { blocks: 3 }),
        ("Unpinned", Reply::Unpinned),
    ];
    let replies =
        replies.map(|(message, reply)| (message, encode::reply(&arena, RequestId(2), reply, Vec::new())));
    let failure = ("Failure", encode::failure(2, FailureKind::Busy, "full"));
    let durable = ("Durable", encode::durable(Ticket(4), 1, &[BlockKey([0x11; 16])]));
    for (message, frame) in replies.into_iter().chain([failure, durable]) {
        let example = example(message);
        let (bytes, _) = frame.next_part();
        assert_eq!(bytes[..4], (example.len() as u32).to_le_bytes(), "length of {message}");
        assert_eq!(bytes[4..], example, "{message}");
    }
}

#[test]
fn limits_in_the_document_match_the_sessions() {
    assert_eq!(super::SESSIONS_MAX, 256);
    assert_eq!(super::REQUESTS_IN_FLIGHT_MAX, 1024);
    assert_eq!((handshake::HELLO_BYTES_MAX, handshake::HELLO_TIMEOUT), (16 << 10, Duration::from_secs(5)));
    assert_eq!((outbound::QUEUE_FRAMES_MAX, outbound::QUEUE_BYTES_MAX), (2048, 64 << 20));
    assert_eq!(outbound::SEND_TIMEOUT, Duration::from_secs(10));
    let limits = Config::default().limits;
    assert_eq!(
        (limits.reservation.0, limits.load_hold.0),
        (Duration::from_secs(60), Duration::from_secs(600))
    );
    let document = collapsed(DOCUMENT);
    for words in [
        "at most 256 sessions at a time",
        "At most 1,024 requests of a session may be unanswered",
        "at most 16 KiB, is sent exactly once, and must arrive completely within 5 seconds",
        "2,048 frames or 64 MiB queued, or no byte accepted for 10 s",
        "`limits.reservation` (60 s)",
        "`limits.load_hold` (600 s)",
    ] {
        assert!(document.contains(&collapsed(words)), "docs/PROTOCOL.md lacks: {words}");
    }
}
