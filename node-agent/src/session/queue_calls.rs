//! Calls about queue pairs that a session drives itself. The session's reader thread makes them: they wait for
//! controllers, and the core does not.

use std::sync::Arc;

use reprise_nvme::DataFormat;
use reprise_policy::queue_grants::{
    GrantEnd, GrantGeneration, MemoryNumber, QueueGrantRefusal, QueueRequest,
};
use reprise_proto::local::{self, FailureKind, response::Body};

use super::frame::{Descriptor, Frame, FrameReader};
use super::outbound::Outgoing;
use super::{Session, SessionContext};
use crate::queue_grants::{NewGrant, NewQueue, RevocationEnd, RevocationSink};

/// A request about queue pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QueueCall {
    /// Its descriptor arrived with or before it.
    Register {
        bytes: u64,
    },
    Request {
        device: u8,
        pairs: u32,
        depth: u32,
        memory: MemoryNumber,
    },
    Return {
        generation: GrantGeneration,
    },
}

impl QueueCall {
    /// Whether the call releases resources; such calls are never rejected.
    pub(super) fn frees_resources(self) -> bool {
        matches!(self, QueueCall::Return { .. })
    }
}

/// Makes a call and sends its answer.
pub(super) fn answer(
    context: &SessionContext,
    session: &Arc<Session>,
    frames: &mut FrameReader,
    (id, call): (u64, QueueCall),
) {
    let answered = match call {
        QueueCall::Register { bytes } => register(context, session, frames, bytes).map(|memory| {
            let registered = local::MemoryRegistered { memory: memory.0 };
            frame(id, Body::MemoryRegistered(registered), Vec::new())
        }),
        QueueCall::Request { .. } if session.outbound.has_queued_grant() => {
            let text = "the answer to an earlier request for queue pairs is still queued: read it first";
            Err(QueueGrantRefusal::Exhausted(text.to_owned()))
        }
        QueueCall::Request { device, pairs, depth, memory } => {
            let tenant = session.tenant;
            let request = QueueRequest { session: session.id, tenant, device, pairs, depth, memory };
            context.queue_grants.grant(request).map(|grant| granted(id, grant))
        }
        QueueCall::Return { generation } => {
            return returned(session, id, context.queue_grants.return_grant(session.id, generation));
        }
    };
    match answered {
        Ok(frame) => session.outbound.send(Outgoing::Frame(frame)),
        Err(QueueGrantRefusal::Invalid(text)) => session.refuse(id, FailureKind::BadRequest, &text),
        Err(QueueGrantRefusal::Exhausted(text)) => session.refuse(id, FailureKind::Busy, &text),
    }
}

/// Answers the return of a grant. A session whose commands may still run is closed, which fences its extents.
fn returned(session: &Session, id: u64, end: GrantEnd) {
    match end {
        GrantEnd::Ended => {
            let body = Body::QueuesReturned(local::QueuesReturned {});
            session.outbound.send(Outgoing::Frame(frame(id, body, Vec::new())));
        }
        GrantEnd::Pending => {
            let text = "the queue pairs are still being deleted: return them again later";
            session.refuse(id, FailureKind::Busy, text);
        }
        GrantEnd::Unconfirmed => {
            let text = "the controller has not confirmed the end of the queue pairs, and may still run their commands: \
                        the session ends. Do not reuse the memory until the device was closed";
            tracing::error!(session = session.id.0, "session closed: its queue pairs could not be deleted");
            session.fence();
            session.refuse(id, FailureKind::Internal, text);
            session.outbound.close_when_sent();
        }
    }
}

fn register(
    context: &SessionContext,
    session: &Arc<Session>,
    frames: &mut FrameReader,
    bytes: u64,
) -> Result<MemoryNumber, QueueGrantRefusal> {
    let missing =
        || QueueGrantRefusal::Invalid("register memory: no descriptor came with the request".to_owned());
    // Descriptors are closed unless queue pairs are granted.
    context.queue_grants.check_enabled()?;
    let file = frames.take_descriptor().ok_or_else(missing)?;
    let weak = Arc::downgrade(session);
    let sink: RevocationSink = Arc::new(move |generation, reason, end| {
        if let Some(session) = weak.upgrade() {
            // Before the client knows: it would give its extents back.
            if end == RevocationEnd::Unconfirmed {
                session.fence();
            }
            session.outbound.send(Outgoing::Frame(revoked(generation, reason)));
            if end == RevocationEnd::Unconfirmed {
                tracing::error!(
                    session = session.id.0,
                    "session closed: its queue pairs could not be deleted"
                );
                session.outbound.close_when_sent();
            }
        }
    });
    context.queue_grants.register(session.id, (file, bytes), sink)
}

fn frame(id: u64, body: Body, descriptors: Vec<Descriptor>) -> Frame {
    Frame::new(&local::Response { id, body: Some(body) }, descriptors)
}

/// Encodes a grant, with the descriptors of doorbells and queue pairs.
fn granted(id: u64, grant: NewGrant) -> Frame {
    let NewGrant { generation, doorbells, queues, device, namespace, is_emulated, memory_address } = grant;
    let doorbells_bytes = doorbells.bytes();
    let mut descriptors = vec![Descriptor::Memory(doorbells.into_file())];
    let queue = |queue: NewQueue| {
        descriptors.push(Descriptor::Memory(queue.file));
        local::GrantedQueue {
            queue: queue.id.into(),
            entries: queue.entries,
            bytes: queue.bytes,
            address: queue.address,
            completions_at: queue.completions_at,
            lists_at: queue.lists_at,
            submission_doorbell: queue.submission_doorbell,
            completion_doorbell: queue.completion_doorbell,
        }
    };
    let queues = queues.into_iter().map(queue).collect();
    let format = match device.format {
        DataFormat::Prp => local::DataFormat::Prp,
        DataFormat::Sgl => local::DataFormat::Sgl,
    };
    let granted = local::QueuesGranted {
        generation: generation.0,
        queues,
        namespace,
        block_bytes: device.block_bytes,
        transfer_max: device.transfer_max,
        format: format as i32,
        doorbells_bytes,
        memory_address,
        emulated: is_emulated,
    };
    frame(id, Body::QueuesGranted(granted), descriptors)
}

/// Encodes the notice that a grant was revoked.
fn revoked(generation: GrantGeneration, reason: &str) -> Frame {
    let notice = local::QueuesRevoked { generation: generation.0, reason: reason.to_owned() };
    frame(0, Body::QueuesRevoked(notice), Vec::new())
}
