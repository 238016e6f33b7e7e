//! One socket to the agent: calls go out, a reader thread brings answers in.
//!
//! ```text
//! caller ── begin ──► outbox ──► socket ──► agent
//!    ▲                                        │
//!    └── channel ◄── reader thread ◄──────────┘  (also: durable notices, descriptors of regions)
//! ```
//!
//! A connection lives until its socket ends, the agent breaks the protocol or stops reading, or the client closes it.
//! From then on (`ended`) every waiting and every later call fails at once.
//!
//! Answers that nobody waits for any more (a call timed out, a pending load was dropped) are given back: their
//! leases are aborted, their load is released. So a timeout never leaks a slot for the life of the session.

use std::io::ErrorKind;
use std::os::fd::AsFd;
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
use crate::durable::DurableBoard;
use crate::error::ClientError;
use crate::regions::RegionMap;
use crate::wire::FrameReader;

mod descriptors;
mod outbox;
mod pending;

use descriptors::Descriptors;
use outbox::{Outbox, Patience};
pub(crate) use pending::Ongoing;
use pending::Pending;

/// Why a session that was closed by its own client has ended.
const CLOSED: &str = "it was closed by this process";

/// One session's connection. Shared by the client's handles and the reader thread.
#[derive(Debug)]
pub(crate) struct Connection {
    socket: UnixStream,
    outbox: Outbox,
    pending: Pending,
    board: DurableBoard,
    regions: RegionMap,
    progress: OnceLock<ProgressReader>,
    /// Set once, after `reason`; cheap to poll from waiting loads.
    ended: AtomicBool,
    reason: OnceLock<String>,
    /// What the agent has said of the session as a whole, if it refused or ended it with words.
    refusal: OnceLock<local::Failure>,
    /// What came in place of a greeting, of somebody who does not speak as agents do.
    stranger: OnceLock<String>,
    /// Who is told of the end, besides those who wait for something.
    watcher: OnceLock<Sender<()>>,
}

impl Connection {
    /// A connection over a connected socket. Whoever calls this runs [`Connection::read`] on a thread.
    ///
    /// # Errors
    /// What the system says about the socket's options.
    pub(crate) fn new(socket: UnixStream) -> std::io::Result<Connection> {
        socket.set_write_timeout(Some(outbox::WRITE_SLICE))?;
        Ok(Connection {
            socket,
            outbox: Outbox::new(),
            pending: Pending::default(),
            board: DurableBoard::default(),
            regions: RegionMap::default(),
            progress: OnceLock::new(),
            ended: AtomicBool::new(false),
            reason: OnceLock::new(),
            refusal: OnceLock::new(),
            stranger: OnceLock::new(),
            watcher: OnceLock::new(),
        })
    }

    /// Sends a request; the answer is waited for with [`Ongoing::wait`].
    ///
    /// # Errors
    /// `AgentLost`, `BadRequest` (frame too long), `Busy` (too many calls at once).
    pub(crate) fn begin(
        self: &Arc<Self>,
        call: &'static str,
        body: request::Body,
        timeout: Duration,
    ) -> Result<Ongoing, ClientError> {
        let ongoing = self.queue(call, body, timeout)?;
        self.sent(ongoing, Patience::Until(deadline::after(timeout)))
    }

    /// As [`Connection::begin`], for who may not wait: what the socket does not take at once goes out when the agent
    /// reads again.
    ///
    /// # Errors
    /// As [`Connection::begin`].
    pub(crate) fn begin_at_once(
        self: &Arc<Self>,
        call: &'static str,
        body: request::Body,
        timeout: Duration,
    ) -> Result<Ongoing, ClientError> {
        let ongoing = self.queue(call, body, timeout)?;
        self.sent(ongoing, Patience::Once)
    }

    fn queue(
        self: &Arc<Self>,
        call: &'static str,
        body: request::Body,
        timeout: Duration,
    ) -> Result<Ongoing, ClientError> {
        let deadline = deadline::after(timeout);
        let id = self.outbox.next_id();
        let answer = self.pending.register(id)?.ok_or_else(|| self.lost())?;
        let ongoing =
            Ongoing::new(Arc::clone(self), pending::Question { id, call, timeout, deadline }, answer);
        self.outbox.push(&Request { id, body: Some(body) })?;
        Ok(ongoing)
    }

    fn sent(&self, ongoing: Ongoing, patience: Patience) -> Result<Ongoing, ClientError> {
        match self.outbox.flush(&self.socket, patience) {
            Ok(()) => Ok(ongoing),
            // The agent has closed the session. Why it did may be in the socket still: the reader thread comes upon
            // these words, then upon the end, and fails the call.
            Err(error) if matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => {
                Ok(ongoing)
            }
            Err(error) => {
                self.end(&format!("the agent does not read its socket: {error}"));
                Err(self.lost())
            }
        }
    }

    /// Sends a request whose answer does not matter, without waiting for room in the socket; for use in `drop`.
    pub(crate) fn cast(&self, body: request::Body) {
        if self.has_ended() {
            return;
        }
        let id = self.outbox.next_id();
        // A full outbox means that the agent has not read for long: the calls that filled it will end the session.
        if self.outbox.push(&Request { id, body: Some(body) }).is_ok() {
            self.flush_once();
        }
    }

    /// Gives leases back, as [`Connection::cast`] sends; many that are given back one by one share messages.
    pub(crate) fn give_back_leases(&self, leases: impl IntoIterator<Item = u64>) {
        if self.has_ended() {
            return;
        }
        self.outbox.give_back(leases);
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

    /// Ends the connection: the agent sees it closed, everybody who waits learns the reason.
    pub(crate) fn end(&self, reason: &str) {
        if self.reason.set(reason.to_owned()).is_err() {
            return;
        }
        if reason != CLOSED {
            tracing::warn!(reason, "the session with the agent has ended");
        }
        self.ended.store(true, Ordering::Release);
        // Fails only when the other side was faster; the descriptor itself is closed with the last handle.
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
        self.board.close(reason);
        self.pending.close();
        self.wake_watcher();
    }

    /// Wakes `watcher` when the connection has ended, or now if it has. Only the first watcher is kept.
    pub(crate) fn watch(&self, watcher: Sender<()>) {
        if self.watcher.set(watcher).is_ok() && self.has_ended() {
            self.wake_watcher();
        }
    }

    fn wake_watcher(&self) {
        if let Some(watcher) = self.watcher.get() {
            // Full: it is to wake up already.
            let _ = watcher.try_send(());
        }
    }

    /// Ends the connection because this side wants no more of it.
    pub(crate) fn close(&self) {
        self.end(CLOSED);
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// The error of a call on an ended connection.
    pub(crate) fn lost(&self) -> ClientError {
        let reason = self.reason.get().map_or("it is ending", String::as_str);
        ClientError::AgentLost { reason: reason.to_owned() }
    }

    /// Why the agent has refused or ended the session, if it said so; or that it is none.
    pub(crate) fn refusal(&self) -> Option<ClientError> {
        let refused = self.refusal.get().cloned().map(ClientError::refused);
        refused.or_else(|| self.stranger.get().map(|said| ClientError::stranger(said)))
    }

    pub(crate) fn board(&self) -> &DurableBoard {
        &self.board
    }

    pub(crate) fn regions(&self) -> &RegionMap {
        &self.regions
    }

    /// The progress page; `None` before the greeting.
    pub(crate) fn progress(&self) -> Option<&ProgressReader> {
        self.progress.get()
    }

    /// Receives once and hands on what is complete. `Err` is the reason why the connection ends.
    fn read_once(
        self: &Arc<Self>,
        frames: &mut FrameReader,
        descriptors: &mut Descriptors,
    ) -> Result<(), String> {
        match descriptors.receive(self.socket.as_fd(), frames.space()) {
            Ok(0) => return Err("the agent closed it: it has stopped, or refused this process".into()),
            Ok(count) => frames.received(count),
            Err(error) => return Err(error.to_string()),
        }
        while let Some(frame) = frames.next_frame().map_err(|error| self.misread(&error))? {
            self.deliver(frame, descriptors).map_err(|error| self.misread(&error))?;
        }
        Ok(())
    }

    /// What cannot be read, in words. Of one that has not greeted it says that no agent listens there.
    fn misread(&self, error: &ClientError) -> String {
        let words = error.to_string();
        let is_strange = matches!(error, ClientError::Protocol(_) | ClientError::Version(_));
        if is_strange && self.progress().is_none() {
            // Only the first ends the session.
            let _ = self.stranger.set(words.clone());
        }
        words
    }

    /// Hands one message to whom it concerns.
    fn deliver(self: &Arc<Self>, frame: Bytes, descriptors: &mut Descriptors) -> Result<(), ClientError> {
        let response = Response::decode(frame)
            .map_err(|error| ClientError::Protocol(format!("undecodable message: {error}")))?;
        let Some(body) = response.body else {
            return Err(ClientError::Protocol("a message of an unknown kind".into()));
        };
        self.take_descriptors(&body, descriptors)?;
        match body {
            response::Body::Durable(notice) => self.board.post(&notice),
            // About the session instead of a request: the agent refuses or ends it, and says why.
            response::Body::Failure(failure) if response.id == 0 => {
                // Only the first ends the session.
                let _ = self.refusal.set(failure.clone());
                Err(ClientError::refused(failure))
            }
            body => {
                if let Some(unwanted) = self.pending.answer(response.id, body) {
                    self.outbox.answered(response.id);
                    self.give_back(unwanted);
                }
                Ok(())
            }
        }
    }

    /// Maps what came by descriptor with a message, before anybody sees the message.
    fn take_descriptors(
        &self,
        body: &response::Body,
        descriptors: &mut Descriptors,
    ) -> Result<(), ClientError> {
        let grants = match body {
            response::Body::Welcome(welcome) => {
                let reader = descriptors.progress_page(welcome)?;
                return self
                    .progress
                    .set(reader)
                    .map_err(|_| ClientError::Protocol("a second welcome in one session".into()));
            }
            response::Body::Reserved(reserved) => &reserved.regions,
            response::Body::Loaded(loaded) => &loaded.regions,
            _ => return Ok(()),
        };
        grants.iter().try_for_each(|grant| self.regions.insert(grant, descriptors.next()?))
    }

    /// Gives back what an answer that nobody waits for has brought.
    pub(crate) fn give_back(&self, body: response::Body) {
        match body {
            response::Body::Loaded(loaded) => {
                self.cast(request::Body::Release(local::Release { load: loaded.load }));
            }
            response::Body::Reserved(reserved) if !reserved.leases.is_empty() => {
                self.give_back_leases(reserved.leases.iter().map(|lease| lease.lease));
            }
            _ => {}
        }
    }

    fn flush_once(&self) {
        // A socket that broke is noticed by the reader thread; here there is nobody to tell.
        let _ = self.outbox.flush(&self.socket, Patience::Once);
    }

    fn abandon(&self, id: u64) -> pending::Abandoned {
        self.pending.abandon(id)
    }
}

/// Ends the connection when the reader thread panics, so that nobody waits for answers that nobody reads. After an
/// orderly end it does nothing.
struct EndOnPanic<'a>(&'a Connection);

impl Drop for EndOnPanic<'_> {
    fn drop(&mut self) {
        self.0.end("the client's reader thread has failed");
    }
}
