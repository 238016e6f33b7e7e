//! Calls that wait for their answer.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use reprise_proto::local::response;

use super::Connection;
use crate::deadline;
use crate::error::ClientError;

/// Calls in flight on one session at the most: more threads than any engine has.
const CALLS_MAX: usize = 1024;

/// Who waits for which answer.
#[derive(Debug, Default)]
pub(super) struct Pending {
    calls: Mutex<Calls>,
}

/// A call whose answer is under way. Dropping it gives the answer back when it comes.
#[derive(Debug)]
pub(crate) struct Ongoing {
    connection: Arc<Connection>,
    question: Question,
    answer: Option<Receiver<response::Body>>,
}

/// What was asked and until when its answer is wanted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Question {
    pub(super) id: u64,
    pub(super) call: &'static str,
    pub(super) timeout: Duration,
    pub(super) deadline: Instant,
}

/// What giving up a call found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Abandoned {
    /// No answer had come; one that comes now is given back by the reader thread.
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
    /// Notes a call; `None` when the connection has ended.
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

    /// Hands an answer to its caller; gives it back when nobody waits for it.
    pub(super) fn answer(&self, id: u64, body: response::Body) -> Option<response::Body> {
        let sender = self.lock().waiting.remove(&id);
        match sender {
            Some(sender) => sender.send(body).err().map(|unsent| unsent.0),
            None => Some(body),
        }
    }

    /// Gives up waiting.
    pub(super) fn abandon(&self, id: u64) -> Abandoned {
        match self.lock().waiting.remove(&id) {
            Some(_) => Abandoned::Unanswered,
            None => Abandoned::Answered,
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

impl Ongoing {
    pub(super) fn new(
        connection: Arc<Connection>,
        question: Question,
        answer: Receiver<response::Body>,
    ) -> Ongoing {
        Ongoing { connection, question, answer: Some(answer) }
    }

    /// The answer; refusals of the agent become errors.
    ///
    /// # Errors
    /// `AgentLost`, `Timeout`, or what the agent refused with.
    pub(crate) fn wait(mut self) -> Result<response::Body, ClientError> {
        self.poll(Duration::MAX)?.ok_or_else(|| self.timeout())
    }

    /// The answer, if it comes within `patience`; ask again otherwise, until the call's own timeout ends it. Once
    /// there was an answer or an error, there is nothing more to ask for.
    ///
    /// # Errors
    /// As [`Ongoing::wait`].
    pub(crate) fn poll(&mut self, patience: Duration) -> Result<Option<response::Body>, ClientError> {
        let Some(answer) = self.answer.take() else {
            return Err(self.connection.lost());
        };
        let look_until = deadline::after(patience).min(self.question.deadline);
        let received = match answer.recv_deadline(look_until) {
            Ok(body) => Ok(body),
            Err(RecvTimeoutError::Disconnected) => Err(self.connection.lost()),
            Err(RecvTimeoutError::Timeout) if look_until < self.question.deadline => {
                self.answer = Some(answer);
                return Ok(None);
            }
            Err(RecvTimeoutError::Timeout) => match self.connection.abandon(self.question.id) {
                Abandoned::Unanswered => Err(self.timeout()),
                // The reader thread has taken the sender: it sends, or drops it, at once.
                Abandoned::Answered => answer.recv().map_err(|_| self.connection.lost()),
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

impl Drop for Ongoing {
    fn drop(&mut self) {
        let Some(answer) = self.answer.take() else { return };
        if self.connection.abandon(self.question.id) == Abandoned::Answered
            && let Ok(body) = answer.recv()
        {
            self.connection.give_back(body);
        }
    }
}
