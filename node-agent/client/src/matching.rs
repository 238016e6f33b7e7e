//! Matches that are polled.
//!
//! An engine's scheduler must not wait: it starts a match, polls it for some milliseconds, and polls again in
//! its next step.
//!
//! ```text
//! start_match ──► PendingMatch ── poll ──► None: later ──► poll ──► sources
//! ```

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use reprise_policy::BlockKey;
use reprise_policy::session::{Scope, Source};
use reprise_proto::local::{self, request, response};

use crate::client::Session;
use crate::connection::PendingCall;
use crate::error::ClientError;

/// A requested match. It holds no blocks, so it may be dropped at any time.
#[derive(Debug)]
pub struct PendingMatch {
    session: Arc<Session>,
    keys: usize,
    state: MatchState,
    /// From the request to the answer.
    span: tracing::Span,
}

/// Behaviour of a request when the socket is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SendMode {
    /// Waits until the agent reads, as long as for an answer.
    Blocking,
    /// Queues the rest, which is sent when the agent reads again.
    NonBlocking,
}

#[derive(Debug)]
enum MatchState {
    Asked(PendingCall),
    Known(Vec<Source>),
}

impl PendingMatch {
    pub(crate) fn start(
        session: &Arc<Session>,
        keys: &[BlockKey],
        scope: Scope,
        sending: SendMode,
    ) -> Result<PendingMatch, ClientError> {
        let body =
            local::Match { keys: Bytes::from(BlockKey::pack(keys)), local_only: scope == Scope::Local };
        let span = session.span("match");
        let entered = span.enter();
        let timeout = session.call_timeout();
        let body = request::Body::Match(body);
        let ongoing = match sending {
            SendMode::Blocking => session.connection().begin("match", body, timeout)?,
            SendMode::NonBlocking => session.connection().try_begin("match", body, timeout)?,
        };
        drop(entered);
        Ok(PendingMatch {
            session: Arc::clone(session),
            keys: keys.len(),
            state: MatchState::Asked(ongoing),
            span,
        })
    }

    /// Creates a match whose answer needs no request.
    pub(crate) fn known(session: &Arc<Session>, sources: Vec<Source>) -> PendingMatch {
        PendingMatch {
            session: Arc::clone(session),
            keys: sources.len(),
            state: MatchState::Known(sources),
            span: tracing::Span::none(),
        }
    }

    /// Returns the source of each leading available block if the answer arrives within `patience`; the length
    /// is their number. `None`: poll again. Repeated calls return the same answer.
    ///
    /// # Errors
    /// `Timeout` (the session's call timeout has passed), `Busy`, `AgentLost`.
    pub fn poll(&mut self, patience: Duration) -> Result<Option<Vec<Source>>, ClientError> {
        let _entered = self.span.clone().entered();
        let ongoing = match &mut self.state {
            MatchState::Known(sources) => return Ok(Some(sources.clone())),
            MatchState::Asked(ongoing) => ongoing,
        };
        let Some(answer) = ongoing.poll(patience)? else {
            return Ok(None);
        };
        let sources = self.sources(&answer).map_err(|error| self.session.broken(error))?;
        self.state = MatchState::Known(sources.clone());
        self.span = tracing::Span::none();
        Ok(Some(sources))
    }

    /// Waits for the answer within the session's call timeout.
    pub(crate) fn wait(mut self) -> Result<Vec<Source>, ClientError> {
        let timeout = self.session.call_timeout();
        self.poll(Duration::MAX)?.ok_or(ClientError::Timeout { call: "match", after: timeout })
    }

    fn sources(&self, answer: &response::Body) -> Result<Vec<Source>, ClientError> {
        let response::Body::Matched(matched) = answer else {
            return Err(ClientError::unexpected("match"));
        };
        let sources: Option<Vec<Source>> =
            matched.sources.iter().map(|number| Source::from_number(u32::from(*number))).collect();
        match sources {
            Some(sources) if sources.len() <= self.keys => Ok(sources),
            _ => Err(ClientError::Protocol("invalid sources in the answer to a match".into())),
        }
    }
}
