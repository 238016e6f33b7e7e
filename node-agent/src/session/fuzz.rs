//! Fuzz targets of the local session (`make fuzz`): the messages of clients, and their frames on a socket.

use std::io::Write as _;
use std::os::unix::net::UnixStream;

use bytes::Bytes;
use prost::Message as _;
use reprise_agent_core::event::{BlockSelection, Request};
use reprise_proto::local::{self, KEYS_PER_CALL_MAX, PROTOCOL_VERSION, request::Body};

use super::decode::{self, DecodeResult};
use super::frame::{FrameError, FrameReader, Limits};
use super::handshake;

#[test]
fn session_messages() {
    reprise_fuzz::check("session_messages", &seeds(), message);
}

#[test]
fn session_frames() {
    let all: Vec<u8> = seeds().iter().flat_map(|message| framed(message)).collect();
    let seeds = [
        framed(b""),
        framed(b"message"),
        all[..all.len().min(4096)].to_vec(),
        u32::MAX.to_le_bytes().to_vec(),
    ];
    reprise_fuzz::check("session_frames", &seeds, frames);
}

fn framed(message: &[u8]) -> Vec<u8> {
    [&(message.len() as u32).to_le_bytes()[..], message].concat()
}

/// One valid message of each kind.
fn seeds() -> Vec<Vec<u8>> {
    let keys = || Bytes::from(vec![7; 32]);
    let layout = local::Layout {
        layers: 2,
        parts: 2,
        kv_heads: 1,
        head_dim: 64,
        dtype: 1,
        tokens_per_block: 16,
        tp_rank: 0,
        tp_size: 1,
    };
    let hello = local::Hello {
        protocol_version: PROTOCOL_VERSION,
        namespace: vec![1; 32].into(),
        layout: Some(layout),
        client_name: "engine".to_owned(),
        tenant: "team-a".to_owned(),
        service_account_token: "token".to_owned(),
        gpu: Some(local::hello::Gpu::GpuPciAddress("0000:3b:00.0".to_owned())),
    };
    let item = local::CommitItem { lease: 3, key: vec![5; 16].into(), checksums: vec![6; 16].into() };
    let commit =
        local::Commit { items: vec![item], priority: 1, parent: vec![4; 16].into(), position: Some(1) };
    let waiting = local::WaitingRequest { request: 1, iterations: 2, confidence_permille: 900, keys: keys() };
    let begun = local::BegunRequest { request: 2, preempted: true, first: 1, keys: keys() };
    let lookahead = local::ReportLookahead {
        version: 1,
        iteration_us: 9_000,
        requests: vec![waiting],
        cancelled: vec![3],
        begun: Some(local::BegunRequests { requests: vec![begun] }),
        all_ranks: true,
    };
    let manage = local::ManageBlocks {
        action: local::BlockAction::Pin as i32,
        ttl_us: 1_000,
        all_ranks: false,
        selection: Some(local::manage_blocks::Selection::Keys(keys())),
    };
    let layer = local::ReportLayer {
        model: "model".to_owned(),
        phase: 1,
        input_tokens: 100,
        prefix_tokens: 200,
        previous_layer_us: 300,
    };
    let inputs = Some(local::KeyInputs {
        packed: vec![7; 80].into(),
        input_bytes: 40,
        namespaces: vec![vec![7; 32].into()],
    });
    let matched = local::Match {
        keys: keys(),
        local_only: true,
        all_ranks: true,
        position: Some(2),
        inputs: inputs.clone(),
    };
    let (deadline_us, read_bytes) = (1_000, 65_536);
    let load = local::Load { keys: keys(), deadline_us, read_bytes, local_only: false, inputs };
    let bodies = [
        Body::Hello(hello),
        Body::Reserve(local::Reserve { count: 4, kind: 1 }),
        Body::Commit(commit),
        Body::AwaitDurable(local::AwaitDurable { ticket: 9 }),
        Body::Abort(local::Abort { leases: vec![1, 2] }),
        Body::Match(matched),
        Body::Load(load),
        Body::Release(local::Release { load: 5 }),
        Body::Suspect(local::Suspect { load: 5, blocks: vec![0, 1] }),
        Body::Stats(local::Stats {}),
        Body::Trim(local::Trim {}),
        Body::Pin(local::Pin { keys: keys() }),
        Body::Unpin(local::Unpin { pins: vec![8] }),
        Body::ManageBlocks(manage),
        Body::ReportLookahead(lookahead),
        Body::ReportLayer(layer),
        Body::UseBackend(local::UseBackend { backend: 1 }),
        Body::RegisterMemory(local::RegisterMemory { bytes: 4096 }),
        Body::RequestQueues(local::RequestQueues { device: 1, pairs: 2, depth: 64, memory: 1 }),
        Body::ReturnQueues(local::ReturnQueues { generation: 1 }),
    ];
    bodies.into_iter().map(|body| local::Request { id: 1, body: Some(body) }.encode_to_vec()).collect()
}

/// Decodes a message as the first one of a session, and as a later one. Laws: no panic, lists within the limit, and a reason
/// for each rejection.
fn message(input: &[u8]) {
    if let Ok(local::Request { body: Some(Body::Hello(hello)), .. }) = local::Request::decode(input) {
        handshake::check_fields(hello);
    }
    match decode::request(Bytes::copy_from_slice(input)) {
        Err(message) | Ok(DecodeResult::Rejection { message, .. }) => assert!(!message.is_empty()),
        Ok(DecodeResult::Request { id, body, .. }) => {
            assert!(id.0 > 0, "number 0 is that of notices");
            assert!((1..=KEYS_PER_CALL_MAX).contains(&items(&body)), "a list beyond the limit");
        }
        Ok(
            DecodeResult::Layer { id, .. }
            | DecodeResult::Backend { id, .. }
            | DecodeResult::Queues { id, .. },
        ) => {
            assert!(id > 0);
        }
    }
}

/// Number of items of a request; one without a list.
fn items(body: &Request) -> usize {
    match body {
        Request::Reserve { count, .. } => *count as usize,
        Request::Commit(commit) => commit.items.len(),
        Request::Abort { leases } => leases.len(),
        Request::Match { keys, .. } | Request::Pin { keys } => keys.len(),
        Request::Load(load) => load.keys.len(),
        Request::Suspect { blocks, .. } => blocks.len(),
        Request::Unpin { pins } => pins.len(),
        Request::Manage(command) => match &command.selection {
            BlockSelection::Keys(keys) => keys.len(),
            BlockSelection::Listed(_) | BlockSelection::Namespace { .. } => 1,
        },
        Request::AwaitDurable { .. }
        | Request::Release { .. }
        | Request::Lookahead(_)
        | Request::Trim
        | Request::Stats => 1,
    }
}

/// Reads a stream from a socket. Laws: the frames are those of the stream, and the reader ends at its end.
fn frames(input: &[u8]) {
    let (mut client, agent) = UnixStream::pair().expect("a socket pair");
    client.write_all(input).expect("it fits the buffer of the socket");
    drop(client);
    let mut reader = FrameReader::new(agent, Limits::SESSION);
    let mut rest = input;
    loop {
        let expected = rest
            .split_first_chunk::<4>()
            .and_then(|(length, behind)| behind.split_at_checked(u32::from_le_bytes(*length) as usize));
        match (reader.next_frame(), expected) {
            (Ok(Some(frame)), Some((message, behind))) => {
                assert_eq!(frame, message);
                rest = behind;
            }
            (Ok(None), None) => return assert!(rest.is_empty(), "an incomplete frame is an error"),
            (Err(FrameError::TooLong(_) | FrameError::Io(_)), None) => return assert!(!rest.is_empty()),
            (read, expected) => panic!("read {read:?}, expected {expected:?}"),
        }
    }
}
