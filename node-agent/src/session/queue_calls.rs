//! Calls about queue pairs that a session drives itself. They wait for controllers and pin memory, so a thread of the
//! session makes them, in order, while the reader continues with other requests. The thread starts with the first call.
//!
//! Requests that free extents do not overtake a return before them: they wait for its end behind it. If the controller does
//! not confirm the return, they are dropped, and the session ends fenced: its extents stay in quarantine.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::{Builder, Scope};

use reprise_agent_core::event::Request;
use reprise_nvme::DataFormat;
use reprise_policy::queue_grants::{
    GrantEnd, GrantGeneration, MemoryNumber, QueueGrantRefusal, QueueRequest,
};
use reprise_proto::local::{self, FailureKind, response::Body};

use super::decode::DecodeResult;
use super::frame::{Descriptor, Frame, FrameReader};
use super::outbound::Outgoing;
use super::{NO_EXTENTS, STOPPING, Session, SessionContext, submit_request};
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

/// Maximum calls that wait for the thread; a client has one or a few. Further ones are refused, except returns, which the
/// reader waits for. Each may have a descriptor.
pub(crate) const CALLS_WAITING_MAX: usize = 16;

/// Work of the thread.
enum Job {
    /// A call, with the descriptor that came with it.
    Call { id: u64, call: QueueCall, file: Option<OwnedFd> },
    /// A request for the core behind a return.
    Behind(DecodeResult),
}

/// State that reader and thread share.
#[derive(Default)]
struct Shared {
    /// Returns that were read and have not ended.
    returns: AtomicUsize,
    /// The session has ended: the rest of the work is dropped.
    has_ended: AtomicBool,
}

/// The calls of a session; see the module. Its thread ends after this is dropped, with the call that it makes.
pub(super) struct QueueCalls<'scope, 'env> {
    scope: &'scope Scope<'scope, 'env>,
    context: &'env SessionContext,
    session: &'env Arc<Session>,
    shared: Arc<Shared>,
    jobs: Option<SyncSender<Job>>,
}

impl<'scope, 'env> QueueCalls<'scope, 'env> {
    pub(super) fn new(
        scope: &'scope Scope<'scope, 'env>,
        context: &'env SessionContext,
        session: &'env Arc<Session>,
    ) -> QueueCalls<'scope, 'env> {
        QueueCalls { scope, context, session, shared: Arc::default(), jobs: None }
    }

    /// Passes a call to the thread, which sends the answer.
    pub(super) fn make(&mut self, frames: &mut FrameReader, id: u64, call: QueueCall) {
        if self.context.draining.load(Ordering::Relaxed) && !call.frees_resources() {
            return self.session.refuse(id, FailureKind::Busy, STOPPING);
        }
        // Closed with the job, unless queue pairs are granted.
        let file = if matches!(call, QueueCall::Register { .. }) { frames.take_descriptor() } else { None };
        if !call.frees_resources() && self.context.keys.of(&self.session.peer.tenant).is_some() {
            return self.session.refuse(id, FailureKind::BadRequest, NO_EXTENTS);
        }
        let Some(jobs) = self.thread() else {
            let text = "the agent cannot spawn a thread for queue pairs: retry later";
            tracing::warn!(
                session = self.session.id.0,
                "cannot spawn a thread for the queue pairs of a session"
            );
            return self.session.refuse(id, FailureKind::Busy, text);
        };
        let job = Job::Call { id, call, file };
        if call.frees_resources() {
            self.shared.returns.fetch_add(1, Ordering::Relaxed);
            // Fails only if the thread has panicked, which ends the process.
            let _ = jobs.send(job);
        } else if let Err(TrySendError::Full(_)) = jobs.try_send(job) {
            let text =
                format!("{CALLS_WAITING_MAX} calls about queue pairs of this session wait: retry later");
            self.session.refuse(id, FailureKind::Busy, &text);
        }
    }

    /// Passes a request to the core, behind the returns before it if it frees extents. Returns false if the core has
    /// stopped.
    pub(super) fn submit(&mut self, decoded: DecodeResult) -> bool {
        if !frees_extents(&decoded) {
            return submit_request(self.context, self.session, decoded);
        }
        if self.shared.returns.load(Ordering::Acquire) > 0
            && let Some(jobs) = &self.jobs
        {
            let _ = jobs.send(Job::Behind(decoded));
            return true;
        }
        // A return that has just ended may have fenced the session.
        self.session.is_fenced() || submit_request(self.context, self.session, decoded)
    }

    /// Returns the channel to the thread, which starts with the first call.
    fn thread(&mut self) -> Option<SyncSender<Job>> {
        if self.jobs.is_none() {
            let (jobs, taken) = sync_channel(CALLS_WAITING_MAX);
            let (context, session, shared) = (self.context, self.session, Arc::clone(&self.shared));
            let name = Builder::new().name(format!("session-{}-nvme", session.id));
            name.spawn_scoped(self.scope, move || run(context, session, &shared, &taken)).ok()?;
            self.jobs = Some(jobs);
        }
        self.jobs.clone()
    }
}

impl Drop for QueueCalls<'_, '_> {
    fn drop(&mut self) {
        self.shared.has_ended.store(true, Ordering::Release);
    }
}

/// Makes calls until the session ends; body of the thread.
fn run(context: &SessionContext, session: &Arc<Session>, shared: &Shared, jobs: &Receiver<Job>) {
    while let Ok(job) = jobs.recv() {
        // The end of the session ends all its grants, and quarantines its extents.
        if shared.has_ended.load(Ordering::Acquire) {
            return;
        }
        match job {
            Job::Call { id, call, file } => {
                answer(context, session, file, (id, call));
                if call.frees_resources() {
                    // After the session was fenced, if it was.
                    shared.returns.fetch_sub(1, Ordering::Release);
                }
            }
            Job::Behind(_) if session.is_fenced() => {}
            // The reader sees that the core has stopped.
            Job::Behind(decoded) => drop(submit_request(context, session, decoded)),
        }
    }
}

/// Whether a request frees extents that commands of queue pairs may access.
fn frees_extents(decoded: &DecodeResult) -> bool {
    let DecodeResult::Request { body, .. } = decoded else { return false };
    matches!(body, Request::Abort { .. } | Request::Unpin { .. } | Request::Commit(_))
}

/// Makes a call and sends its answer.
fn answer(
    context: &SessionContext,
    session: &Arc<Session>,
    file: Option<OwnedFd>,
    (id, call): (u64, QueueCall),
) {
    let answered = match call {
        QueueCall::Register { bytes } => register(context, session, file, bytes).map(|memory| {
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
        // A deletion that takes this long may never be confirmed; the extents are free when it is.
        GrantEnd::Pending | GrantEnd::Unconfirmed => {
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
    file: Option<OwnedFd>,
    bytes: u64,
) -> Result<MemoryNumber, QueueGrantRefusal> {
    let missing =
        || QueueGrantRefusal::Invalid("register memory: no descriptor came with the request".to_owned());
    // Descriptors are closed unless queue pairs are granted.
    context.queue_grants.check_enabled()?;
    let file = file.ok_or_else(missing)?;
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

#[cfg(test)]
mod tests;
