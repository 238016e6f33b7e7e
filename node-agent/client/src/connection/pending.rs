//! Calls that wait for their answer.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use reprise_proto::local::response;

use super::Connection;
use crate::deadline;
use crate::error::ClientError;

/// Calls in flight on one session; more than any engine has threads.
const CALLS_MAX: usize = 1024;

/// Waiting calls by request number.
#[derive(Debug, Default)]
pub(super) struct Pending {
    calls: Mutex<Calls>,
}

/// A sent call. Dropping it undoes the answer when it arrives: its leases or load are released.
#[derive(Debug)]
pub(crate) struct PendingCall {
    connection: Arc<Connection>,
    question: CallContext,
    answer: Option<Receiver<response::Body>>,
}

/// Description of a call, with the deadline for its answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct CallContext {
    pub(super) id: u64,
    pub(super) call: &'static str,
    pub(super) timeout: Duration,
    pub(super) deadline: Instant,
}

/// State of a call when its caller stops waiting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AbandonOutcome {
    /// No answer has arrived; the reader thread undoes one that arrives later.
    Unanswered,
    /// The answer is in the channel, or will be within an instant.
    Answered,
}

#[derive(Debug, Default)]
struct Calls {
    waiting: HashMap<u64, Sender<response::Body>>,
    closed: bool,
}

impl Pending {
    /// Registers a call; `None` if the connection has ended.
    ///
    /// # Errors
    /// `Busy` beyond [`CALLS_MAX`].
    pub(super) fn register(&self, id: u64) -> Result<Option<Receiver<response::Body>>, ClientError> {
        let mut calls = self.lock();
        if calls.closed {
            return Ok(None);
        }
        if calls.waiting.len() >= CALLS_MAX {
            return Err(ClientError::Busy(format!("{CALLS_MAX} calls are in flight on this session")));
        }
        let (sender, receiver) = bounded(1);
        calls.waiting.insert(id, sender);
        Ok(Some(receiver))
    }

    /// Passes an answer to its caller; returns it if the caller no longer waits.
    pub(super) fn answer(&self, id: u64, body: response::Body) -> Option<response::Body> {
        let sender = self.lock().waiting.remove(&id);
        match sender {
            Some(sender) => sender.send(body).err().map(|unsent| unsent.0),
            None => Some(body),
        }
    }

    /// Stops waiting for an answer.
    pub(super) fn abandon(&self, id: u64) -> AbandonOutcome {
        match self.lock().waiting.remove(&id) {
            Some(_) => AbandonOutcome::Unanswered,
            None => AbandonOutcome::Answered,
        }
    }

    /// Fails all waiting calls (their senders are dropped) and all later ones.
    pub(super) fn close(&self) {
        let mut calls = self.lock();
        calls.closed = true;
        calls.waiting.clear();
    }

    fn lock(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PendingCall {
    pub(super) fn new(
        connection: Arc<Connection>,
        question: CallContext,
        answer: Receiver<response::Body>,
    ) -> PendingCall {
        PendingCall { connection, question, answer: Some(answer) }
    }

    /// Waits for the answer; failures sent by the agent become errors.
    ///
    /// # Errors
    /// `AgentLost`, `Timeout`, or the failure that the agent sent.
    pub(crate) fn wait(mut self) -> Result<response::Body, ClientError> {
        self.poll(Duration::MAX)?.ok_or_else(|| self.timeout())
    }

    /// Returns the answer if it arrives within `patience`, otherwise `None`: poll again until the call's own
    /// timeout ends it. Do not poll again after an answer or an error.
    ///
    /// # Errors
    /// As [`PendingCall::wait`].
    pub(crate) fn poll(&mut self, patience: Duration) -> Result<Option<response::Body>, ClientError> {
        let Some(answer) = self.answer.take() else {
            return Err(self.connection.ended_error());
        };
        let look_until = deadline::after(patience).min(self.question.deadline);
        let received = match answer.recv_deadline(look_until) {
            Ok(body) => Ok(body),
            Err(RecvTimeoutError::Disconnected) => Err(self.connection.ended_error()),
            Err(RecvTimeoutError::Timeout) if look_until < self.question.deadline => {
                self.answer = Some(answer);
                return Ok(None);
            }
            Err(RecvTimeoutError::Timeout) => match self.connection.abandon(self.question.id) {
                AbandonOutcome::Unanswered => Err(self.timeout()),
                // The reader thread has taken the sender: it sends, or drops it, at once.
                AbandonOutcome::Answered => answer.recv().map_err(|_| self.connection.ended_error()),
            },
        };
        match received? {
            response::Body::Failure(failure) => Err(ClientError::refused(failure)),
            body => Ok(Some(body)),
        }
    }

    fn timeout(&self) -> ClientError {
        ClientError::Timeout { call: self.question.call, after: self.question.timeout }
    }
}

impl Drop for PendingCall {
    fn drop(&mut self) {
        let Some(answer) = self.answer.take() else { return };
        if self.connection.abandon(self.question.id) == AbandonOutcome::Answered
            && let Ok(body) = answer.recv()
        {
            self.connection.release(body);
        }
    }
}
