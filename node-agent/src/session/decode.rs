//! Decodes messages of the session protocol to requests of the core.
//!
//! Any input from a client results in a request, a rejection with a reason, or the end of the session, but
//! never in a panic. Lists are bounded by `KEYS_PER_CALL_MAX`, messages by `FRAME_BYTES_MAX`.

use std::time::Duration;

use bytes::Bytes;
use prost::Message;
use reprise_agent_core::effect::{LeaseId, LoadId, PlaceKind, Ticket};
use reprise_agent_core::event::{
    CommitItem, CommitRequest, LoadRequest, Lookahead, Priority, Request, RequestId, Scope,
};
use reprise_agent_core::extents::PinId;
use reprise_agent_core::limits::{
    COMMIT_ITEMS_MAX, LOAD_BLOCKS_MAX, LOAD_DEADLINE_MAX, LOOKAHEAD_REQUESTS_MAX, MATCH_KEYS_MAX,
    RESERVE_SLOTS_MAX,
};
use reprise_policy::prefetch::{BegunRequest, LookaheadRequest, RequestState};
use reprise_policy::queue_grants::{GrantGeneration, MemoryNumber};
use reprise_policy::session::{LayerReport, MODEL_BYTES_MAX, Ranks, TransferBackend};
use reprise_policy::slack::content::MICROS_MAX;
use reprise_policy::slack::{Computation, Phase};
use reprise_policy::{BlockKey, KeyInputs, NamespaceDigest};
use reprise_proto::local::{self, KEYS_PER_CALL_MAX};

use super::queue_calls::QueueCall;

// The protocol and the core use the same limit for lists.
const _: () = assert!(KEYS_PER_CALL_MAX == MATCH_KEYS_MAX && KEYS_PER_CALL_MAX == LOAD_BLOCKS_MAX);
const _: () =
    assert!(KEYS_PER_CALL_MAX == COMMIT_ITEMS_MAX && KEYS_PER_CALL_MAX == RESERVE_SLOTS_MAX as usize);

#[derive(Debug)]
pub(super) enum DecodeResult {
    /// A request for the core.
    Request {
        id: RequestId,
        body: Request,
        /// Inputs of the keys of a match or load.
        inputs: Option<KeyInputs>,
    },
    /// A report about the engine's computation, whose profile is looked up for the core.
    Layer { id: u64, report: LayerReport },
    /// A statement of what moves the session's blocks.
    Backend { id: u64, backend: TransferBackend },
    /// A request about queue pairs, which the core does not see.
    Queues { id: u64, call: QueueCall },
    /// An invalid request whose sender can be notified.
    Rejection { id: u64, message: String },
}

/// Decodes one message.
///
/// # Errors
/// A text for a client whose messages can no longer be separated: the session must end.
pub(super) fn request(frame: Bytes) -> Result<DecodeResult, String> {
    let message = local::Request::decode(frame)
        .map_err(|error| format!("invalid message, expected a request of the session protocol: {error}"))?;
    let id = message.id;
    if id == 0 {
        return Err("request id 0 is reserved for notices".to_owned());
    }
    let Some(body) = message.body else {
        let message = "unknown request; the client may be newer than the agent".to_owned();
        return Ok(DecodeResult::Rejection { id, message });
    };
    if let local::request::Body::ReportLayer(report) = body {
        return Ok(match layer_report(report) {
            Ok(report) => DecodeResult::Layer { id, report },
            Err(message) => DecodeResult::Rejection { id, message },
        });
    }
    if let local::request::Body::UseBackend(local::UseBackend { backend }) = body {
        return Ok(match super::backend::decode(backend) {
            Ok(backend) => DecodeResult::Backend { id, backend },
            Err(message) => DecodeResult::Rejection { id, message },
        });
    }
    if let Some(call) = queue_call(&body) {
        return Ok(match call {
            Ok(call) => DecodeResult::Queues { id, call },
            Err(message) => DecodeResult::Rejection { id, message },
        });
    }
    let decoded = key_inputs(&body).and_then(|inputs| Ok((convert(body)?, inputs)));
    Ok(match decoded {
        Ok((body, inputs)) => DecodeResult::Request { id: RequestId(id), body, inputs },
        Err(message) => DecodeResult::Rejection { id, message },
    })
}

/// Returns a request about queue pairs; `None` for other requests.
fn queue_call(body: &local::request::Body) -> Option<Result<QueueCall, String>> {
    use local::request::Body;
    match *body {
        Body::RegisterMemory(local::RegisterMemory { bytes }) => Some(Ok(QueueCall::Register { bytes })),
        Body::RequestQueues(local::RequestQueues { device, pairs, depth, memory }) => {
            let request = |device| QueueCall::Request { device, pairs, depth, memory: MemoryNumber(memory) };
            Some(
                u8::try_from(device)
                    .map(request)
                    .map_err(|_| format!("request queues: unknown device {device}")),
            )
        }
        Body::ReturnQueues(local::ReturnQueues { generation }) => {
            Some(Ok(QueueCall::Return { generation: GrantGeneration(generation) }))
        }
        _ => None,
    }
}

/// Returns the inputs of the keys of a match or load.
fn key_inputs(body: &local::request::Body) -> Result<Option<KeyInputs>, String> {
    use local::request::Body;
    let (call, inputs) = match body {
        Body::Match(local::Match { inputs, .. }) => ("match", inputs),
        Body::Load(local::Load { inputs, .. }) => ("load", inputs),
        _ => return Ok(None),
    };
    let Some(inputs) = inputs else { return Ok(None) };
    let local::KeyInputs { packed, input_bytes, namespaces } = inputs;
    let inputs = usize::try_from(*input_bytes).ok();
    let inputs = inputs.and_then(|bytes| KeyInputs::unpack(packed.to_vec(), bytes)).ok_or_else(|| {
        format!(
            "{call}: invalid inputs, {} bytes of {input_bytes} each: expected 9 to {} bytes each",
            packed.len(),
            KeyInputs::INPUT_BYTES_MAX
        )
    })?;
    if inputs.len() > KEYS_PER_CALL_MAX || namespaces.len() > inputs.len() {
        let (inputs, namespaces) = (inputs.len(), namespaces.len());
        return Err(format!(
            "{call}: {inputs} inputs, {namespaces} namespaces: expected at most one for each key"
        ));
    }
    let namespace = |bytes: &Bytes| <[u8; 32]>::try_from(bytes.as_ref()).map(NamespaceDigest);
    let namespaces: Result<Vec<_>, _> = namespaces.iter().map(namespace).collect();
    let namespaces =
        namespaces.map_err(|_| format!("{call}: invalid namespace of inputs: expected 32 bytes"))?;
    Ok(Some(inputs.with_namespaces(namespaces)))
}

fn convert(body: local::request::Body) -> Result<Request, String> {
    use local::request::Body;
    match body {
        Body::Hello(_) => Err("hello is only allowed as the first message of a session".to_owned()),
        Body::Reserve(local::Reserve { count, kind }) => {
            count_within("reserve: count", count as usize)?;
            Ok(Request::Reserve { count, kind: place_kind(kind)? })
        }
        Body::Commit(commit) => convert_commit(&commit).map(Request::Commit),
        Body::AwaitDurable(local::AwaitDurable { ticket }) => {
            Ok(Request::AwaitDurable { ticket: Ticket(ticket) })
        }
        Body::Abort(local::Abort { leases }) => {
            count_within("abort: leases", leases.len())?;
            Ok(Request::Abort { leases: leases.into_iter().map(LeaseId).collect() })
        }
        Body::Match(local::Match { keys, local_only, all_ranks, position, .. }) => Ok(Request::Match {
            keys: unpack("match: keys", &keys)?,
            ranks: if all_ranks { Ranks::All } else { Ranks::Own },
            position,
            scope: scope(local_only),
            public: None,
        }),
        Body::Load(load) => convert_load(&load),
        Body::Release(local::Release { load }) => Ok(Request::Release { load: LoadId(load) }),
        Body::Suspect(local::Suspect { load, blocks }) => {
            count_within("suspect: blocks", blocks.len())?;
            Ok(Request::Suspect { load: LoadId(load), blocks })
        }
        Body::Stats(local::Stats {}) => Ok(Request::Stats),
        Body::Trim(local::Trim {}) => Ok(Request::Trim),
        Body::Pin(local::Pin { keys }) => Ok(Request::Pin { keys: unpack("pin: keys", &keys)? }),
        Body::Unpin(local::Unpin { pins }) => {
            count_within("unpin: pins", pins.len())?;
            Ok(Request::Unpin { pins: pins.into_iter().map(PinId).collect() })
        }
        Body::ManageBlocks(command) => super::manage::decode(command).map(Request::Manage),
        Body::ReportLookahead(hint) => convert_lookahead(&hint).map(Request::Lookahead),
        Body::ReportLayer(_) | Body::UseBackend(_) => unreachable!("reports were separated"),
        Body::RegisterMemory(_) | Body::RequestQueues(_) | Body::ReturnQueues(_) => {
            unreachable!("requests about queue pairs were separated")
        }
    }
}

fn layer_report(report: local::ReportLayer) -> Result<LayerReport, String> {
    let local::ReportLayer { model, phase, input_tokens, prefix_tokens, previous_layer_us } = report;
    if model.is_empty() || model.len() > MODEL_BYTES_MAX {
        return Err(format!("report layer: invalid model: expected 1 to {MODEL_BYTES_MAX} bytes"));
    }
    if previous_layer_us > MICROS_MAX {
        return Err(format!(
            "report layer: invalid time of {previous_layer_us} µs: expected at most {MICROS_MAX}"
        ));
    }
    let phase = match local::ComputePhase::try_from(phase) {
        Ok(local::ComputePhase::ComputeIdle) => None,
        Ok(local::ComputePhase::ComputePrefill) => Some(Phase::Prefill),
        Ok(local::ComputePhase::ComputeDecode) => Some(Phase::Decode),
        Err(_) => return Err(format!("report layer: invalid phase {phase}: expected 0 to 2")),
    };
    let computation = phase.map(|phase| Computation { phase, input_tokens, prefix_tokens });
    let previous_layer_micros = (previous_layer_us > 0).then_some(previous_layer_us);
    Ok(LayerReport { model, computation, previous_layer_micros })
}

fn place_kind(number: i32) -> Result<PlaceKind, String> {
    match local::PlaceKind::try_from(number) {
        Ok(local::PlaceKind::Arena) => Ok(PlaceKind::Arena),
        Ok(local::PlaceKind::Extent) => Ok(PlaceKind::Extent),
        Err(_) => Err(format!("reserve: invalid kind {number}: expected 0 (arena) or 1 (extent)")),
    }
}

fn convert_commit(commit: &local::Commit) -> Result<CommitRequest, String> {
    count_within("commit: items", commit.items.len())?;
    let priority = match commit.priority {
        0 => Priority::Normal,
        1 => Priority::High,
        2 => Priority::Low,
        other => {
            return Err(format!(
                "commit: invalid priority {other}: expected 0 (normal), 1 (high) or 2 (low)"
            ));
        }
    };
    let parent = match commit.parent.as_ref() {
        [] => None,
        bytes => Some(BlockKey(bytes.try_into().map_err(|_| {
            format!(
                "commit: parent has {} bytes: expected a key of {} bytes or none",
                bytes.len(),
                BlockKey::SIZE
            )
        })?)),
    };
    let items = commit.items.iter().map(convert_item).collect();
    Ok(CommitRequest { items, priority, parent, position: commit.position })
}

/// An item with an invalid key or checksums is still passed to the core, which releases its lease.
fn convert_item(item: &local::CommitItem) -> CommitItem {
    let key = <[u8; BlockKey::SIZE]>::try_from(item.key.as_ref()).ok().map(BlockKey);
    let (words, rest) = item.checksums.as_chunks::<4>();
    let checksums = match rest {
        [] => words.iter().map(|word| u32::from_le_bytes(*word)).collect(),
        _ => Box::default(),
    };
    CommitItem { lease: LeaseId(item.lease), key, checksums }
}

/// The core checks all but the keys, because it counts ignored parts.
fn convert_lookahead(hint: &local::ReportLookahead) -> Result<Lookahead, String> {
    // Before any list is copied. The core checks the rest, and counts rejected hints.
    let begun = hint.begun.as_ref().map_or(&[][..], |begun| &begun.requests[..]);
    let requests = hint.requests.len().max(hint.cancelled.len()).max(begun.len());
    if requests > LOOKAHEAD_REQUESTS_MAX {
        return Err(format!("lookahead: {requests} requests: expected at most {LOOKAHEAD_REQUESTS_MAX}"));
    }
    let keys = |keys: &[u8]| {
        BlockKey::unpack(keys).ok_or_else(|| {
            format!("lookahead: keys: {} bytes are not a multiple of 16-byte keys", keys.len())
        })
    };
    let convert = |waiting: &local::WaitingRequest| {
        Ok(LookaheadRequest {
            request: waiting.request,
            iterations: waiting.iterations,
            confidence: u16::try_from(waiting.confidence_permille).unwrap_or(u16::MAX),
            keys: keys(&waiting.keys)?,
        })
    };
    let convert_begun = |listed: &local::BegunRequest| {
        let state = if listed.preempted { RequestState::Preempted } else { RequestState::Running };
        Ok(BegunRequest { request: listed.request, state, first: listed.first, keys: keys(&listed.keys)? })
    };
    let begun = begun.iter().map(convert_begun).collect::<Result<_, String>>()?;
    Ok(Lookahead {
        version: hint.version,
        iteration: Duration::from_micros(hint.iteration_us),
        requests: hint.requests.iter().map(convert).collect::<Result<_, String>>()?,
        cancelled: hint.cancelled.clone(),
        begun: hint.begun.is_some().then_some(begun),
        ranks: if hint.all_ranks { Ranks::All } else { Ranks::Own },
    })
}

/// A deadline or read size of 0 is passed on: the core applies its default.
fn convert_load(load: &local::Load) -> Result<Request, String> {
    let keys = unpack("load: keys", &load.keys)?;
    let deadline = Duration::from_micros(load.deadline_us);
    if deadline > LOAD_DEADLINE_MAX {
        return Err(format!("load: a deadline of {deadline:?} exceeds the limit of {LOAD_DEADLINE_MAX:?}"));
    }
    Ok(Request::Load(LoadRequest {
        keys,
        deadline,
        read_bytes: load.read_bytes,
        scope: scope(load.local_only),
        public: None,
    }))
}

fn scope(local_only: bool) -> Scope {
    if local_only { Scope::Local } else { Scope::Cluster }
}

pub(super) fn unpack(what: &str, packed: &[u8]) -> Result<Vec<BlockKey>, String> {
    let keys = BlockKey::unpack(packed)
        .ok_or_else(|| format!("{what}: {} bytes are not a multiple of 16-byte keys", packed.len()))?;
    count_within(what, keys.len())?;
    Ok(keys)
}

fn count_within(what: &str, count: usize) -> Result<(), String> {
    if (1..=KEYS_PER_CALL_MAX).contains(&count) {
        return Ok(());
    }
    Err(format!("{what}: invalid number {count}: expected 1 to {KEYS_PER_CALL_MAX}"))
}

#[cfg(test)]
mod tests {
    use local::request::Body;

    use super::*;

    fn decode(id: u64, body: Body) -> DecodeResult {
        let message = local::Request { id, body: Some(body) };
        request(Bytes::from(message.encode_to_vec())).expect("readable")
    }

    fn refusal(body: Body) -> String {
        match decode(7, body) {
            DecodeResult::Rejection { id: 7, message } => message,
            other => panic!("expected a rejection, got {other:?}"),
        }
    }

    fn one_item() -> local::Commit {
        local::Commit {
            items: vec![local::CommitItem::default()],
            priority: 0,
            parent: Bytes::new(),
            position: None,
        }
    }

    #[test]
    fn invalid_sizes_are_rejected_with_a_reason() {
        let keys = |bytes: usize| Bytes::from(vec![0; bytes]);
        let lookup = |bytes| Body::Match(local::Match { keys: keys(bytes), ..local::Match::default() });
        assert!(refusal(lookup(17)).contains("16-byte keys"));
        assert!(refusal(lookup(0)).contains("1 to 8192"));
        assert!(refusal(lookup(8193 * 16)).contains("8193"));
        let reserve = |count, kind| Body::Reserve(local::Reserve { count, kind });
        assert!(refusal(reserve(0, 0)).contains("reserve"));
        assert!(refusal(reserve(u32::MAX, 1)).contains("reserve"));
        assert!(refusal(reserve(1, 2)).contains("invalid kind 2"));
        let load = local::Load { keys: keys(16), deadline_us: u64::MAX, ..local::Load::default() };
        assert!(refusal(Body::Load(load)).contains("deadline"));
        for (bytes, input_bytes) in [(41, 40), (40, 8), (73, 73), (9 * 8193, 9)] {
            let inputs = Some(local::KeyInputs { packed: keys(bytes), input_bytes, namespaces: Vec::new() });
            let text =
                refusal(Body::Match(local::Match { keys: keys(16), inputs, ..local::Match::default() }));
            assert!(text.contains("inputs"), "{text}");
        }
        let suspect = local::Suspect { load: 1, blocks: Vec::new() };
        assert!(refusal(Body::Suspect(suspect)).contains("suspect: blocks"));
        assert!(refusal(Body::Hello(local::Hello::default())).contains("first message"));
        let commit = local::Commit { priority: 9, ..one_item() };
        assert!(refusal(Body::Commit(commit)).contains("priority"));
        let commit = local::Commit { parent: keys(15), ..one_item() };
        assert!(refusal(Body::Commit(commit)).contains("parent has 15 bytes"));
    }

    #[test]
    fn commit_item_with_an_invalid_key_or_checksums_keeps_its_lease() {
        let item = local::CommitItem {
            lease: 3,
            key: Bytes::from_static(b"short"),
            checksums: Bytes::from_static(b"abc"),
        };
        let decoded = decode(1, Body::Commit(local::Commit { items: vec![item], ..one_item() }));
        let DecodeResult::Request { body: Request::Commit(CommitRequest { items, .. }), .. } = decoded else {
            panic!("expected a commit, got {decoded:?}");
        };
        assert_eq!((items[0].lease, items[0].key, items[0].checksums.len()), (LeaseId(3), None, 0));
    }

    #[test]
    fn invalid_messages_and_the_id_of_notices_end_the_session() {
        assert!(request(Bytes::from_static(&[0xff; 9])).expect_err("garbage").contains("invalid message"));
        let zero = local::Request { id: 0, body: Some(Body::Stats(local::Stats {})) };
        assert!(request(Bytes::from(zero.encode_to_vec())).expect_err("id 0").contains("id 0"));
    }

    #[test]
    fn unknown_request_is_rejected_and_the_session_continues() {
        let message = local::Request { id: 5, body: None };
        let decoded = request(Bytes::from(message.encode_to_vec())).expect("readable");
        assert!(matches!(decoded, DecodeResult::Rejection { id: 5, message } if message.contains("newer")));
    }
}
