//! Checks the examples in `docs/PROTOCOL.md` against the encoded messages, and its numbers against the
//! code.
//!
//! Every field of every message has a non-default value in some example, so changing the number or type of
//! a field changes an example.

#[path = "protocol_document/lookahead.rs"]
mod lookahead;
#[path = "protocol_document/placement.rs"]
mod placement;

use std::collections::BTreeSet;

use prost::Message;
use prost::bytes::Bytes;
use reprise_proto::controlplane as cluster;
use reprise_proto::local::{self, Request, Response, request, response};

const DOCUMENT: &str = include_str!("../../docs/PROTOCOL.md");
const PROTOS: [&str; 4] = [
    include_str!("../protos/local.proto"),
    include_str!("../protos/controlplane.proto"),
    include_str!("../protos/events.proto"),
    include_str!("../protos/placement.proto"),
];

/// Returns a run of `count` equal bytes for an example.
fn run(byte: u8, count: usize) -> Bytes {
    vec![byte; count].into()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Formats one line of the tables of examples.
fn row(name: &str, values: &str, message: &impl Message) -> String {
    format!("| {name} | {values} | `{}` |", hex(&message.encode_to_vec()))
}

fn layout() -> local::Layout {
    local::Layout {
        layers: 32,
        parts: 2,
        kv_heads: 8,
        head_dim: 128,
        dtype: 1,
        tokens_per_block: 16,
        tp_rank: 3,
        tp_size: 4,
    }
}

fn hello() -> local::Hello {
    local::Hello {
        protocol_version: 11,
        namespace: run(0x77, 32),
        layout: Some(layout()),
        client_name: "vllm-0".into(),
        tenant: "team-a".into(),
        service_account_token: "jwt".into(),
        gpu: Some(local::hello::Gpu::GpuPciAddress("0000:3b:00.0".into())),
    }
}

/// Returns a greeting with the other way to state the place of a GPU.
fn hello_with_a_numa_node() -> local::Hello {
    let (client_name, service_account_token) = (String::new(), String::new());
    let gpu = Some(local::hello::Gpu::GpuNumaNode(1));
    local::Hello { client_name, service_account_token, gpu, ..hello() }
}

fn requests() -> Vec<(&'static str, &'static str, request::Body)> {
    use request::Body;
    let packed = [[0; 8].as_slice(), &[0x44; 32]].concat().into();
    let inputs = Some(local::KeyInputs { packed, input_bytes: 40, namespaces: Vec::new() });
    let of_a_key = local::Match { keys: run(0x11, 16), ..local::Match::default() };
    let item = local::CommitItem { lease: 9, key: run(0x11, 16), checksums: run(0x22, 8) };
    let commit = local::Commit { items: vec![item], priority: 1, parent: run(0x33, 16), position: Some(300) };
    let load = local::Load {
        keys: run(0x11, 16),
        deadline_us: 5_000_000,
        read_bytes: 524_288,
        local_only: true,
        inputs: None,
    };
    vec![
        (
            "`Hello`",
            "version 11, namespace 32 × 77, layout 32, 2, 8, 128, 1, 16, 3, 4, client \"vllm-0\", tenant \"team-a\", token \"jwt\", \
             GPU 0000:3b:00.0",
            Body::Hello(hello()),
        ),
        (
            "`Hello` with a NUMA node",
            "version 11, namespace, layout and tenant as before, NUMA node 1",
            Body::Hello(hello_with_a_numa_node()),
        ),
        ("`Reserve`", "3 slots", Body::Reserve(local::Reserve { count: 3, kind: 0 })),
        ("`Reserve` of extents", "3 extents", Body::Reserve(local::Reserve { count: 3, kind: 1 })),
        (
            "`Commit`",
            "lease 9, key 16 × 11, checksums 8 × 22; priority 1; parent 16 × 33; position 300",
            Body::Commit(commit),
        ),
        ("`AwaitDurable`", "ticket 4", Body::AwaitDurable(local::AwaitDurable { ticket: 4 })),
        ("`Abort`", "leases 9, 300", Body::Abort(local::Abort { leases: vec![9, 300] })),
        (
            "`Match`",
            "key 16 × 11, local only; position 300",
            Body::Match(local::Match { local_only: true, position: Some(300), ..of_a_key.clone() }),
        ),
        (
            "`Match` with the inputs of its key",
            "key 16 × 11, local only; input of 40 bytes: group 0, rank 0, hash 32 × 44",
            Body::Match(local::Match { local_only: true, inputs, ..of_a_key.clone() }),
        ),
        ("`Match` of all ranks", "key 16 × 11", Body::Match(local::Match { all_ranks: true, ..of_a_key })),
        ("`Load`", "key 16 × 11, 5 s, reads of 512 KiB, local only", Body::Load(load)),
        ("`Release`", "load 6", Body::Release(local::Release { load: 6 })),
        ("`Stats`", "", Body::Stats(local::Stats {})),
        ("`Trim`", "", Body::Trim(local::Trim {})),
        (
            "`Suspect`",
            "load 6, blocks 0, 300",
            Body::Suspect(local::Suspect { load: 6, blocks: vec![0, 300] }),
        ),
        ("`Pin`", "key 16 × 11", Body::Pin(local::Pin { keys: run(0x11, 16) })),
        ("`Unpin`", "pins 9, 300", Body::Unpin(local::Unpin { pins: vec![9, 300] })),
        (
            "`ReportLayer`",
            "\"llama\", prefill, 512 input and 4,096 prefix tokens, 900 µs before",
            Body::ReportLayer(local::ReportLayer {
                model: "llama".into(),
                phase: local::ComputePhase::ComputePrefill as i32,
                input_tokens: 512,
                prefix_tokens: 4096,
                previous_layer_us: 900,
            }),
        ),
        (
            "`UseBackend`",
            "`gpu-queue-emulated`",
            Body::UseBackend(local::UseBackend { backend: local::Backend::GpuQueueEmulated as i32 }),
        ),
        (
            "`ReportLookahead`",
            "version 2, 20 ms; request 7 in 3 iterations at 900 ‰, key 16 × 11; request 5 cancelled; all ranks; begun: 4 runs, \
             key 16 × 11 behind 2; 3 preempted",
            Body::ReportLookahead(lookahead::message()),
        ),
        (
            "`ManageBlocks`",
            "pin for 60 s: key 16 × 11, all ranks",
            Body::ManageBlocks(local::ManageBlocks {
                action: local::BlockAction::Pin as i32,
                ttl_us: 60_000_000,
                all_ranks: true,
                selection: Some(local::manage_blocks::Selection::Keys(run(0x11, 16))),
            }),
        ),
        (
            "`ManageBlocks` of a session",
            "prefetch what session 5 lists",
            Body::ManageBlocks(local::ManageBlocks {
                action: local::BlockAction::Prefetch as i32,
                selection: Some(local::manage_blocks::Selection::Listed(5)),
                ..local::ManageBlocks::default()
            }),
        ),
        (
            "`ManageBlocks` of a namespace",
            "delete from 4,096",
            Body::ManageBlocks(local::ManageBlocks {
                action: local::BlockAction::Delete as i32,
                selection: Some(local::manage_blocks::Selection::NamespaceFrom(4096)),
                ..local::ManageBlocks::default()
            }),
        ),
        ("`RegisterMemory`", "8,192 bytes", Body::RegisterMemory(local::RegisterMemory { bytes: 8192 })),
        (
            "`RequestQueues`",
            "2 queue pairs of 64 entries on device 3, for memory 1",
            Body::RequestQueues(local::RequestQueues { device: 3, pairs: 2, depth: 64, memory: 1 }),
        ),
        ("`ReturnQueues`", "generation 300", Body::ReturnQueues(local::ReturnQueues { generation: 300 })),
    ]
}

fn queues_granted() -> local::QueuesGranted {
    let queue = local::GrantedQueue {
        queue: 5,
        entries: 64,
        bytes: 8192,
        address: 65_536,
        completions_at: 4096,
        lists_at: 8192,
        submission_doorbell: 4136,
        completion_doorbell: 4140,
    };
    local::QueuesGranted {
        generation: 300,
        queues: vec![queue],
        namespace: 1,
        block_bytes: 512,
        transfer_max: 1 << 20,
        format: local::DataFormat::Sgl as i32,
        doorbells_bytes: 12_288,
        memory_address: 131_072,
        emulated: true,
    }
}

fn responses() -> Vec<(&'static str, &'static str, response::Body)> {
    use response::Body;
    let place = || Some(local::Place { region: 1, offset: 4096, extent: None });
    let grants = || vec![local::RegionGrant { region: 1, bytes: 8192, writable: true }];
    let failure = local::Failure { kind: local::FailureKind::Busy as i32, message: "full".into() };
    let welcome = local::Welcome {
        session: 5,
        node: "node-a".into(),
        agent_version: "0.1.0".into(),
        progress_entries: 64,
        progress_entry_bytes: 1088,
        tenant_salt: vec![0x55; 32].into(),
        public_tenant: "prompts".into(),
    };
    let reserved = local::Reserved {
        regions: grants(),
        leases: vec![local::Lease { lease: 9, place: place() }],
        retry_after_us: 2000,
        devices: Vec::new(),
    };
    let committed = local::Committed { ticket: 4, statuses: vec![1, 2, 3, 4, 5, 6] };
    let loaded = local::Loaded {
        load: 6,
        progress_entry: 7,
        regions: grants(),
        blocks: vec![
            local::LoadedBlock { status: 1, source: 2, place: place(), checksums: run(0x22, 8) },
            local::LoadedBlock { status: 5, ..local::LoadedBlock::default() },
        ],
    };
    let stats = vec![local::Stat { name: "loads".into(), value: 8 }];
    let (device, offset, bytes) = (3, 8192, 4096);
    let (generation, header_crc, checksums_at) = (7, 5, 128);
    let extent = local::Extent { device, offset, bytes, generation, header_crc, checksums_at };
    let extent = || Some(local::Place { extent: Some(extent), ..local::Place::default() });
    let devices = || vec![local::DeviceGrant { device: 3, queues_only: true }];
    let leased = local::Reserved {
        regions: Vec::new(),
        leases: vec![local::Lease { lease: 9, place: extent() }],
        retry_after_us: 2000,
        devices: devices(),
    };
    let pinned = local::Pinned {
        devices: devices(),
        blocks: vec![
            local::PinnedBlock { status: 1, pin: 6, place: extent() },
            local::PinnedBlock { status: 3, ..local::PinnedBlock::default() },
        ],
    };
    vec![
        ("`Failure`", "`BUSY`, \"full\"", Body::Failure(failure)),
        (
            "`Welcome`",
            "session 5, \"node-a\", \"0.1.0\", 64 entries of 1,088 bytes, salt 32 × 55, public tenant \"prompts\"",
            Body::Welcome(welcome),
        ),
        (
            "`Reserved`",
            "region 1 of 8,192 bytes, writable; lease 9 at region 1, 4,096; retry after 2 ms",
            Body::Reserved(reserved),
        ),
        ("`Committed`", "ticket 4, each status in order", Body::Committed(committed)),
        ("`DurableAwaited`", "", Body::DurableAwaited(local::DurableAwaited {})),
        ("`Aborted`", "", Body::Aborted(local::Aborted {})),
        (
            "`Matched`",
            "each source in order",
            Body::Matched(local::Matched { sources: Bytes::from_static(&[1, 2, 3, 4]) }),
        ),
        (
            "`Loaded`",
            "load 6, entry 7, region 1 of 8,192 bytes, writable; a block from NVMe at region 1, 4,096, checksums 8 × 22; \
             one that missed its deadline",
            Body::Loaded(loaded),
        ),
        ("`Released`", "", Body::Released(local::Released {})),
        ("`Suspected`", "", Body::Suspected(local::Suspected {})),
        ("`StatsReply`", "\"loads\" is 8", Body::Stats(local::StatsReply { stats })),
        (
            "`Reserved` for extents",
            "device 3 with queues only; lease 9 at device 3, 8,192, 4,096 bytes, generation 7, checksum 5, 128; retry after 2 ms",
            Body::Reserved(leased),
        ),
        (
            "`Pinned`",
            "device 3 with queues only; pin 6 at device 3, 8,192, 4,096 bytes, generation 7, checksum 5, 128; a block that is not durable",
            Body::Pinned(pinned),
        ),
        ("`Unpinned`", "", Body::Unpinned(local::Unpinned {})),
        (
            "`LayerReported`",
            "900 µs, 220 µs of slack, 8 multiprocessors, 16 reads, 4 writes",
            Body::LayerReported(local::LayerReported {
                layer_us: 900,
                slack_us: 220,
                io_sms: 8,
                read_iocbs: 16,
                write_iocbs: 4,
            }),
        ),
        ("`BackendUsed`", "", Body::BackendUsed(local::BackendUsed {})),
        (
            "`LookaheadReported`",
            "window 6, 1 part ignored, request 7 is ready",
            Body::LookaheadReported(local::LookaheadReported { window: 6, ignored: 1, ready: vec![7] }),
        ),
        (
            "`BlocksManaged`",
            "1 to 6 blocks, 7 bytes, next 4,096; pins 1 of 2, DRAM 3 of 4, NVMe 5 of 6",
            Body::BlocksManaged(local::BlocksManaged {
                affected: 1,
                unchanged: 2,
                absent: 3,
                over_limit: 4,
                in_use: 5,
                pinned: 6,
                bytes: 7,
                next: 4096,
                retention: Some(local::RetentionUsage {
                    blocks: 1,
                    blocks_max: 2,
                    dram_bytes: 3,
                    dram_bytes_max: 4,
                    nvme_bytes: 5,
                    nvme_bytes_max: 6,
                }),
            }),
        ),
        ("`MemoryRegistered`", "memory 1", Body::MemoryRegistered(local::MemoryRegistered { memory: 1 })),
        (
            "`QueuesGranted`",
            "generation 300; queue 5: 64 entries, 8,192 bytes at 65,536, parts 4,096, 8,192, doorbells 4,136, 4,140; \
             namespace 1, 512, 1 MiB, SGL, doorbells 12,288, memory 131,072, emulated",
            Body::QueuesGranted(queues_granted()),
        ),
        ("`QueuesReturned`", "", Body::QueuesReturned(local::QueuesReturned {})),
        ("`Trimmed`", "3 blocks", Body::Trimmed(local::Trimmed { blocks: 3 })),
        (
            "`Durable`",
            "ticket 4, 1 durable, lost 16 × 11",
            Body::Durable(local::Durable { ticket: 4, durable: 1, lost_keys: run(0x11, 16) }),
        ),
        (
            "`QueuesRevoked`",
            "generation 300, \"gone\"",
            Body::QueuesRevoked(local::QueuesRevoked { generation: 300, reason: "gone".into() }),
        ),
    ]
}

fn session_rows() -> Vec<String> {
    let request = |(name, values, body)| row(name, values, &Request { id: 2, body: Some(body) });
    // Notices have id 0.
    let is_notice = |body: &_| matches!(body, response::Body::Durable(_) | response::Body::QueuesRevoked(_));
    let id = |body: &_| if is_notice(body) { 0 } else { 2 };
    let response = |(name, values, body)| row(name, values, &Response { id: id(&body), body: Some(body) });
    requests().into_iter().map(request).chain(responses().into_iter().map(response)).collect()
}

fn membership_rows() -> Vec<String> {
    let name = "n".to_owned();
    let peer_endpoints = vec![cluster::PeerEndpoint::tcp("p:1")];
    let (admin_address, failure_domain, version) = ("a:2".to_owned(), "r".to_owned(), "0.1.0".to_owned());
    let node = cluster::NodeInfo {
        node: 7,
        name: name.clone(),
        peer_endpoints: peer_endpoints.clone(),
        admin_address: admin_address.clone(),
        epoch: 3,
        alive: true,
        failure_domain: failure_domain.clone(),
        version: version.clone(),
        mode: cluster::NodeMode::Draining.into(),
        usage: Some(placement::usage()),
        drain: Some(placement::drain()),
        tenants: Some(cluster::NodeTenants { names: vec!["t".to_owned()] }),
    };
    let register = cluster::RegisterRequest { name, peer_endpoints, admin_address, failure_domain, version };
    let registered =
        cluster::RegisterReply { node: 7, epoch: 3, heartbeat_every_us: 250_000, dead_after_us: 1_500_000 };
    let words = "\"n\", \"tcp\" at \"p:1\", \"a:2\", \"r\", \"0.1.0\"";
    vec![
        row("`RegisterRequest`", words, &register),
        row("`RegisterReply`", "node 7, epoch 3, 250 ms, 1.5 s", &registered),
        row("`HeartbeatRequest`", "node 7, epoch 3", &cluster::HeartbeatRequest { node: 7, epoch: 3 }),
        row(
            "`HeartbeatReply`",
            "known, version 4",
            &cluster::HeartbeatReply { known: true, slots_version: 4 },
        ),
        row(
            "`ListNodesReply`",
            &format!(
                "node 7, epoch 3, alive, {words}; draining; uses 1 and 2 bytes, 3 queued; drained, 4, 5, 6, 7; \
                 acts for \"t\""
            ),
            &cluster::ListNodesReply { nodes: vec![node] },
        ),
        row(
            "`MemberList`",
            "epoch 3, member \"n\" at \"p:1\", incarnation 2, version \"v\"; \"n\" answers, registered",
            &cluster::MemberList {
                epoch: 3,
                members: vec![cluster::MemberInfo {
                    name: "n".to_owned(),
                    address: "p:1".to_owned(),
                    incarnation: 2,
                    version: "v".to_owned(),
                }],
                answering: "n".to_owned(),
                registered: true,
            },
        ),
        row(
            "`NodeChange`",
            "node 7, removed",
            &cluster::NodeChange {
                node: Some(cluster::NodeInfo { node: 7, ..cluster::NodeInfo::default() }),
                removed: true,
            },
        ),
        row("`ForgetNodeRequest`", "\"n\"", &cluster::ForgetNodeRequest { name: "n".to_owned() }),
        row("`ForgetNodeReply`", "was node 7", &cluster::ForgetNodeReply { node: 7 }),
    ]
}

fn directory_rows() -> Vec<String> {
    let operations = || Bytes::from_static(&[0x01, 0x82]);
    let update = cluster::UpdateRequest {
        node: 7,
        epoch: 3,
        sequence: 5,
        keys: run(0x11, 32),
        operations: operations(),
        reset: true,
        begins: run(0x0f, 2),
        ends: run(0x0f, 1),
    };
    let found = cluster::LookupReply {
        offsets: vec![0, 2, 2],
        replicas: Bytes::from_static(&[7, 0, 1, 0, 2, 1, 2, 3]),
        map_epoch: 12,
        elsewhere: vec![1],
        partial: 1,
    };
    let described = cluster::DescribeReply {
        keys: 1,
        replicas: 2,
        bytes: 3,
        lookups: 4,
        updates: 5,
        nodes: vec![cluster::NodeReplicas { node: 7, dram: 8, nvme: 9 }],
        slots_owned: 10,
        slots_partial: 6,
    };
    vec![
        row("`SlotsRequest`", "node 7, epoch 3", &cluster::SlotsRequest { node: 7, epoch: 3 }),
        row(
            "`SlotsReply`",
            "fenced; version 4; owned and wanted: sets shortened to 2 bytes and 1 byte",
            &cluster::SlotsReply {
                fenced: true,
                slots_version: 4,
                owned: run(0x0f, 2),
                wanted: run(0x0f, 1),
            },
        ),
        row(
            "`UpdateRequest`",
            "node 7, epoch 3, from change 5: 16 × 11 in DRAM, then withdrawn from NVMe; reset; begins, ends: sets shortened to 2 bytes and 1 byte",
            &update,
        ),
        row(
            "`UpdateReply`",
            "fenced, 5 expected, version 4",
            &cluster::UpdateReply { fenced: true, expected_sequence: 5, slots_version: 4 },
        ),
        row(
            "`LookupRequest`",
            "16 × 11, 16 × 11; asking node 9",
            &cluster::LookupRequest { keys: run(0x11, 32), asking_node: 9 },
        ),
        row(
            "`LookupReply`",
            "node 7 in DRAM, load class 0, and node 258 on NVMe, load class 3; no replicas; map epoch 12; key 1 elsewhere; 1 partial",
            &found,
        ),
        row("`DescribeReply`", "1, 2, 3, 4, 5; node 7: 8, 9; 10 slots, 6 partial", &described),
    ]
}

fn event_rows() -> Vec<String> {
    use cluster::follow_reply::Event;
    let position = cluster::Position { log: 5, next: 9 };
    let reply = |event| cluster::FollowReply { position: None, event: Some(event) };
    let begins = cluster::SnapshotBegins { reason: cluster::snapshot_begins::Reason::Behind.into() };
    let changes = cluster::ReplicaChanges {
        keys: run(0x11, 32),
        nodes: Bytes::from_static(&[7, 0, 2, 1]),
        operations: Bytes::from_static(&[0x01, 0x82]),
    };
    let cleared = cluster::Cleared { node: 7, slots: vec![1, 4095] };
    let current =
        cluster::FollowReply { position: Some(position), event: Some(Event::Current(cluster::Current {})) };
    vec![
        row("`FollowRequest`", "log 5, next 9", &cluster::FollowRequest { from: Some(position) }),
        row("`FollowReply`, `SnapshotBegins`", "behind; no position", &reply(Event::Snapshot(begins))),
        row(
            "`FollowReply`, `ReplicaChanges`",
            "16 × 11 in DRAM of node 7, withdrawn from NVMe of node 258; no position",
            &reply(Event::Changes(changes)),
        ),
        row(
            "`FollowReply`, `Cleared`",
            "node 7, slots 1, 4095; no position",
            &reply(Event::Cleared(cleared)),
        ),
        row("`FollowReply`, `Current`", "log 5, next 9", &current),
    ]
}

fn assert_rows(rows: &[String]) {
    let missing: Vec<&str> =
        rows.iter().filter(|row| !DOCUMENT.contains(row.as_str())).map(String::as_str).collect();
    assert!(
        missing.is_empty(),
        "docs/PROTOCOL.md differs from the encoded messages. If a change makes old peers misunderstand a message, it \
         needs a new protocol version. Otherwise update these lines:\n{}",
        missing.join("\n")
    );
}

#[test]
fn session_examples_match_the_encoded_messages() {
    assert_rows(&session_rows());
}

#[test]
fn control_plane_examples_match_the_encoded_messages() {
    assert_rows(&membership_rows());
    assert_rows(&directory_rows());
    assert_rows(&placement::rows());
    assert_rows(&event_rows());
}

#[test]
fn every_message_with_fields_appears_in_an_example() {
    let rows = [session_rows(), membership_rows(), directory_rows(), placement::rows(), event_rows()]
        .concat()
        .join("\n");
    // Messages that only occur inside others, or in every line of the session.
    let carried =
        ["Layout", "Request", "Response", "Place", "RegionGrant", "Lease", "CommitItem", "WaitingRequest"];
    let of_loads = ["BegunRequests", "BegunRequest", "Position", "LoadedBlock", "KeyInputs"];
    let of_extents = ["Extent", "DeviceGrant", "PinnedBlock", "GrantedQueue", "RetentionUsage"];
    let of_others = ["NodeInfo", "NodeTenants", "NodeReplicas", "MemberInfo", "PeerEndpoint", "Stat"];
    let others = of_extents.into_iter().chain(of_loads).chain(of_others).chain(placement::CARRIED);
    let carried: BTreeSet<&str> = carried.into_iter().chain(others).collect();
    let declared = PROTOS.iter().flat_map(|text| text.lines()).filter_map(|line| {
        let (name, fields) = line.strip_prefix("message ")?.split_once(" {")?;
        (fields != "}").then_some(name)
    });
    let without: Vec<&str> =
        declared.filter(|name| !carried.contains(name) && !rows.contains(&format!("`{name}`"))).collect();
    assert!(without.is_empty(), "messages without an example: {without:?}");
}

#[test]
fn session_limits_in_the_document_match_the_code() {
    assert_eq!(
        (local::PROTOCOL_VERSION, local::FRAME_BYTES_MAX, local::KEYS_PER_CALL_MAX),
        (11, 16 << 20, 8192)
    );
    for words in ["`PROTOCOL_VERSION` = 11 in `Hello`", "(little endian, at most 16 MiB)", "1 to 8,192 keys"]
    {
        assert!(DOCUMENT.contains(words), "docs/PROTOCOL.md lacks: {words}");
    }
}
