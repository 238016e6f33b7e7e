//! One socket to the agent: callers send requests, a reader thread distributes the answers.
//!
//! ```text
//! caller ── begin ──► outbox ──► socket ──► agent
//!    ▲                                        │
//!    └── channel ◄── reader thread ◄──────────┘  (also: durable notices, descriptors of regions)
//! ```
//!
//! A connection lives until its socket ends, the agent breaks the protocol or stops reading, or the client
//! closes it. From then on (`ended`), every waiting and every later call fails at once.
//!
//! An answer can arrive after its caller has stopped waiting: the call timed out, or a pending load was
//! dropped. Such answers are reversed: their leases are aborted, their load is released. A timeout therefore
//! never leaks a slot for the life of the session.

use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use crossbeam_channel::Sender;
use prost::Message;
use reprise_buffers::ProgressReader;
use reprise_proto::local::{self, Request, Response, request, response};

use crate::deadline;
use crate::durable::DurableOutcomes;
use crate::error::ClientError;
use crate::extents::DeviceMap;
use crate::queues::GrantMap;
use crate::regions::RegionMap;
use crate::wire::FrameReader;

mod descriptors;
#[cfg(test)]
mod fuzz;
mod outbox;
mod pending;

use descriptors::Descriptors;
pub(crate) use outbox::Releasable;
use outbox::{Outbox, WriteMode};
use pending::Pending;
pub(crate) use pending::PendingCall;

/// Reason of a session that its own client closed.
const CLOSED: &str = "closed by this process";

/// Connection of one session, shared by the client's handles and the reader thread.
#[derive(Debug)]
pub(crate) struct Connection {
    socket: UnixStream,
    outbox: Outbox,
    pending: Pending,
    durable_outcomes: DurableOutcomes,
    regions: RegionMap,
    devices: DeviceMap,
    grants: GrantMap,
    progress: OnceLock<ProgressReader>,
    /// Set once, after `reason`; waiting loads poll it cheaply.
    ended: AtomicBool,
    reason: OnceLock<String>,
    /// The agent's message about the session as a whole, if it rejected or ended the session with one.
    refusal: OnceLock<local::Failure>,
    /// Description of the message that arrived in place of a greeting, from a process that is not an agent.
    not_an_agent: OnceLock<String>,
    /// Notified when the connection ends, in addition to the waiting calls.
    watcher: OnceLock<Sender<()>>,
}

impl Connection {
    /// Wraps a connected socket. The caller must run [`Connection::read`] on a thread.
    ///
    /// # Errors
    /// The system's error for the socket's options.
    pub(crate) fn new(socket: UnixStream) -> std::io::Result<Connection> {
        socket.set_write_timeout(Some(outbox::WRITE_SLICE))?;
        Ok(Connection {
            socket,
            outbox: Outbox::new(),
            pending: Pending::default(),
            durable_outcomes: DurableOutcomes::default(),
            regions: RegionMap::default(),
            devices: DeviceMap::default(),
            grants: GrantMap::default(),
            progress: OnceLock::new(),
            ended: AtomicBool::new(false),
            reason: OnceLock::new(),
            refusal: OnceLock::new(),
            not_an_agent: OnceLock::new(),
            watcher: OnceLock::new(),
        })
    }

    /// Sends a request; [`PendingCall::wait`] waits for the answer.
    ///
    /// # Errors
    /// `AgentLost`, `BadRequest` (frame too long), `Busy` (too many calls at once).
    pub(crate) fn begin(
        self: &Arc<Self>,
        call: &'static str,
        body: request::Body,
        timeout: Duration,
    ) -> Result<PendingCall, ClientError> {
        self.begin_with(call, (body, None), timeout)
    }

    /// [`Connection::begin`] with a descriptor that the request names.
    ///
    /// # Errors
    /// As [`Connection::begin`].
    pub(crate) fn begin_with(
        self: &Arc<Self>,
        call: &'static str,
        (body, descriptor): (request::Body, Option<OwnedFd>),
        timeout: Duration,
    ) -> Result<PendingCall, ClientError> {
        let ongoing = self.queue(call, (body, descriptor), timeout)?;
        self.sent(ongoing, WriteMode::Until(deadline::after(timeout)))
    }

    /// [`Connection::begin`] for callers that must not wait. Bytes that do not fit into the socket now are
    /// sent when the agent reads again.
    ///
    /// # Errors
    /// As [`Connection::begin`].
    pub(crate) fn try_begin(
        self: &Arc<Self>,
        call: &'static str,
        body: request::Body,
        timeout: Duration,
    ) -> Result<PendingCall, ClientError> {
        self.try_begin_with(call, (body, None), timeout)
    }

    /// [`Connection::try_begin`] with a descriptor.
    ///
    /// # Errors
    /// As [`Connection::begin`].
    pub(crate) fn try_begin_with(
        self: &Arc<Self>,
        call: &'static str,
        (body, descriptor): (request::Body, Option<OwnedFd>),
        timeout: Duration,
    ) -> Result<PendingCall, ClientError> {
        let ongoing = self.queue(call, (body, descriptor), timeout)?;
        self.sent(ongoing, WriteMode::Once)
    }

    fn queue(
        self: &Arc<Self>,
        call: &'static str,
        (body, descriptor): (request::Body, Option<OwnedFd>),
        timeout: Duration,
    ) -> Result<PendingCall, ClientError> {
        let deadline = deadline::after(timeout);
        let id = self.outbox.next_id();
        let answer = self.pending.register(id)?.ok_or_else(|| self.ended_error())?;
        let ongoing =
            PendingCall::new(Arc::clone(self), pending::CallContext { id, call, timeout, deadline }, answer);
        self.outbox.push_with(&Request { id, body: Some(body) }, descriptor)?;
        Ok(ongoing)
    }

    fn sent(&self, ongoing: PendingCall, patience: WriteMode) -> Result<PendingCall, ClientError> {
        match self.outbox.flush(&self.socket, patience) {
            Ok(()) => Ok(ongoing),
            // The agent has closed the session. Its reason may still be in the socket: the reader thread
            // reads that message, then the end of the stream, and fails the call.
            Err(error) if matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => {
                Ok(ongoing)
            }
            Err(error) => {
                self.end(&format!("the agent does not read from its socket: {error}"));
                Err(self.ended_error())
            }
        }
    }

    /// Sends a request whose answer does not matter, without waiting for room in the socket; for use in
    /// `drop`.
    pub(crate) fn cast(&self, body: request::Body) {
        if self.has_ended() {
            return;
        }
        let id = self.outbox.next_id();
        // A full outbox means that the agent has not read for long. The calls that filled it will end the
        // session.
        if self.outbox.push(&Request { id, body: Some(body) }).is_ok() {
            self.flush_once();
        }
    }

    /// Releases leases or pins as [`Connection::cast`] sends requests; those that are released one by one share
    /// messages.
    pub(crate) fn release_each(&self, kind: Releasable, numbers: impl IntoIterator<Item = u64>) {
        if self.has_ended() {
            return;
        }
        self.outbox.release(kind, numbers);
        self.flush_once();
    }

    /// Reads answers until the connection ends; body of the reader thread.
    pub(crate) fn read(self: &Arc<Self>) {
        let _ending = EndOnPanic(self);
        let mut frames = FrameReader::new();
        let mut descriptors = Descriptors::default();
        let reason = loop {
            match self.read_once(&mut frames, &mut descriptors) {
                Ok(()) => self.flush_once(),
                Err(reason) => break reason,
            }
        };
        self.end(&reason);
    }

    /// Ends the connection: the agent sees it closed, waiting calls fail with the reason.
    pub(crate) fn end(&self, reason: &str) {
        if self.reason.set(reason.to_owned()).is_err() {
            return;
        }
        if reason != CLOSED {
            tracing::warn!(reason, "session with the agent ended");
        }
        self.ended.store(true, Ordering::Release);
        // Fails only if the agent has closed it first; the descriptor itself is closed with the last handle.
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
        self.durable_outcomes.close(reason);
        self.pending.close();
        self.devices.clear();
        self.wake_watcher();
    }

    /// Registers `watcher`, which is notified when the connection ends, or now if it has. Only the first
    /// watcher is kept.
    pub(crate) fn watch(&self, watcher: Sender<()>) {
        if self.watcher.set(watcher).is_ok() && self.has_ended() {
            self.wake_watcher();
        }
    }

    fn wake_watcher(&self) {
        if let Some(watcher) = self.watcher.get() {
            // A full channel already holds a wake-up.
            let _ = watcher.try_send(());
        }
    }

    /// Ends the connection at the request of this process.
    pub(crate) fn close(&self) {
        self.end(CLOSED);
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Returns the error for calls on an ended connection.
    pub(crate) fn ended_error(&self) -> ClientError {
        let reason = self.reason.get().map_or("the session is ending", String::as_str);
        ClientError::AgentLost { reason: reason.to_owned() }
    }

    /// Returns the reason for which the agent rejected or ended the session, if it sent one, or the error for
    /// a socket whose listener is not an agent.
    pub(crate) fn refusal(&self) -> Option<ClientError> {
        let refused = self.refusal.get().cloned().map(ClientError::refused);
        refused.or_else(|| self.not_an_agent.get().map(|reason| ClientError::not_an_agent(reason)))
    }

    pub(crate) fn durable_outcomes(&self) -> &DurableOutcomes {
        &self.durable_outcomes
    }

    pub(crate) fn devices(&self) -> &DeviceMap {
        &self.devices
    }

    pub(crate) fn grants(&self) -> &GrantMap {
        &self.grants
    }

    pub(crate) fn regions(&self) -> &RegionMap {
        &self.regions
    }

    /// Returns the progress page; `None` before the greeting.
    pub(crate) fn progress(&self) -> Option<&ProgressReader> {
        self.progress.get()
    }

    /// Receives once and delivers all complete messages. `Err` is the reason for which the connection ends.
    fn read_once(
        self: &Arc<Self>,
        frames: &mut FrameReader,
        descriptors: &mut Descriptors,
    ) -> Result<(), String> {
        match descriptors.receive(self.socket.as_fd(), frames.space()) {
            Ok(0) => {
                return Err("the agent closed the connection: it has stopped or rejected this process".into());
            }
            Ok(count) => frames.received(count),
            Err(error) => return Err(error.to_string()),
        }
        while let Some(frame) = frames.next_frame().map_err(|error| self.misread(&error))? {
            self.deliver(frame, descriptors).map_err(|error| self.misread(&error))?;
        }
        Ok(())
    }

    /// Converts a decoding error to text. Before the greeting, the error means that the listener is not an
    /// agent.
    fn misread(&self, error: &ClientError) -> String {
        let words = error.to_string();
        let is_strange = matches!(error, ClientError::Protocol(_) | ClientError::Version(_));
        if is_strange && self.progress().is_none() {
            // Only the first error ends the session.
            let _ = self.not_an_agent.set(words.clone());
        }
        words
    }

    /// Delivers one message to its receiver.
    fn deliver(self: &Arc<Self>, frame: Bytes, descriptors: &mut Descriptors) -> Result<(), ClientError> {
        let response = Response::decode(frame)
            .map_err(|error| ClientError::Protocol(format!("cannot decode a message: {error}")))?;
        let Some(body) = response.body else {
            return Err(ClientError::Protocol("message of unknown kind".into()));
        };
        self.take_descriptors(&body, descriptors)?;
        match body {
            response::Body::Durable(notice) => self.durable_outcomes.post(&notice),
            response::Body::QueuesRevoked(notice) => {
                tracing::warn!(
                    generation = notice.generation,
                    reason = notice.reason,
                    "granted queue pairs were revoked"
                );
                self.grants.revoke(&notice);
                Ok(())
            }
            // Request number 0 means the whole session: the agent rejects or ends it, with the reason.
            response::Body::Failure(failure) if response.id == 0 => {
                // Only the first error ends the session.
                let _ = self.refusal.set(failure.clone());
                Err(ClientError::refused(failure))
            }
            body => {
                if let Some(unwanted) = self.pending.answer(response.id, body) {
                    self.outbox.answered(response.id);
                    self.release(unwanted);
                }
                Ok(())
            }
        }
    }

    /// Maps the memory whose descriptor arrived with a message, before the message is delivered.
    fn take_descriptors(
        &self,
        body: &response::Body,
        descriptors: &mut Descriptors,
    ) -> Result<(), ClientError> {
        let (regions, devices) = match body {
            response::Body::Welcome(welcome) => {
                let reader = descriptors.progress_page(welcome)?;
                return self
                    .progress
                    .set(reader)
                    .map_err(|_| ClientError::Protocol("second welcome message in one session".into()));
            }
            response::Body::Reserved(reserved) => (reserved.regions.as_slice(), reserved.devices.as_slice()),
            response::Body::Loaded(loaded) => (loaded.regions.as_slice(), [].as_slice()),
            response::Body::Pinned(pinned) => ([].as_slice(), pinned.devices.as_slice()),
            response::Body::QueuesGranted(granted) => {
                return self.grants.insert(granted, || descriptors.next());
            }
            _ => return Ok(()),
        };
        regions.iter().try_for_each(|grant| self.regions.insert(grant, descriptors.next()?))?;
        self.take_devices(devices, descriptors)
    }

    /// Keeps the descriptors of devices that arrived with a message.
    fn take_devices(
        &self,
        grants: &[local::DeviceGrant],
        descriptors: &mut Descriptors,
    ) -> Result<(), ClientError> {
        for grant in grants {
            let descriptor = if grant.queues_only { None } else { Some(descriptors.next()?) };
            self.devices.insert(grant.device, descriptor);
        }
        Ok(())
    }

    /// Releases the slots or load of an answer that has no waiting caller.
    pub(crate) fn release(&self, body: response::Body) {
        match body {
            response::Body::Loaded(loaded) => {
                self.cast(request::Body::Release(local::Release { load: loaded.load }));
            }
            response::Body::Reserved(reserved) if !reserved.leases.is_empty() => {
                self.release_each(Releasable::Leases, reserved.leases.iter().map(|lease| lease.lease));
            }
            response::Body::Pinned(pinned) => {
                let pins = pinned.blocks.iter().map(|block| block.pin).filter(|pin| *pin > 0);
                self.release_each(Releasable::Pins, pins);
            }
            response::Body::QueuesGranted(granted) => {
                let generation = granted.generation;
                self.grants.forget(generation);
                self.cast(request::Body::ReturnQueues(local::ReturnQueues { generation }));
            }
            _ => {}
        }
    }

    fn flush_once(&self) {
        // The reader thread notices a broken socket; a drop has no caller to report it to.
        let _ = self.outbox.flush(&self.socket, WriteMode::Once);
    }

    fn abandon(&self, id: u64) -> pending::AbandonOutcome {
        self.pending.abandon(id)
    }
}

/// Ends the connection when the reader thread panics; otherwise calls would wait for answers that no thread
/// reads. After an orderly end it has no effect.
struct EndOnPanic<'a>(&'a Connection);

impl Drop for EndOnPanic<'_> {
    fn drop(&mut self) {
        self.0.end("the client's reader thread panicked");
    }
}
