//! Where blocks are looked for and where they were found; matches that are asked for now and looked at later.
//!
//! An engine's scheduler may not wait: it asks, looks for some milliseconds, and comes back in its next step.
//!
//! ```text
//! start_match ──► PendingMatch ── poll ──► None: later ──► poll ──► sources
//! ```

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use reprise_policy::BlockKey;
use reprise_proto::local::{self, request, response};

use crate::client::Session;
use crate::connection::Ongoing;
use crate::error::ClientError;

/// Where to look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    /// This node only: never asks the network.
    Local,
    /// This node, then its peers.
    #[default]
    Cluster,
}

/// Where a block was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Source {
    /// This node's DRAM.
    OwnDram = 1,
    /// This node's NVMe.
    OwnNvme = 2,
    /// A peer's DRAM.
    PeerDram = 3,
    /// A peer's NVMe.
    PeerNvme = 4,
}

/// A match that was asked for. Dropping it is fine: nothing is held.
#[derive(Debug)]
pub struct PendingMatch {
    session: Arc<Session>,
    keys: usize,
    state: MatchState,
    /// From the question to the answer.
    span: tracing::Span,
}

/// How a question is sent when the socket is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sending {
    /// By waiting for the agent to read, as long as for an answer.
    Waits,
    /// When the agent reads again.
    AtOnce,
}

#[derive(Debug)]
enum MatchState {
    Asked(Ongoing),
    Known(Vec<Source>),
}

impl PendingMatch {
    pub(crate) fn start(
        session: &Arc<Session>,
        keys: &[BlockKey],
        scope: Scope,
        sending: Sending,
    ) -> Result<PendingMatch, ClientError> {
        let body =
            local::Match { keys: Bytes::from(BlockKey::pack(keys)), local_only: scope.is_local_only() };
        let span = session.span("match");
        let entered = span.enter();
        let timeout = session.call_timeout();
        let body = request::Body::Match(body);
        let ongoing = match sending {
            Sending::Waits => session.connection().begin("match", body, timeout)?,
            Sending::AtOnce => session.connection().begin_at_once("match", body, timeout)?,
        };
        drop(entered);
        Ok(PendingMatch {
            session: Arc::clone(session),
            keys: keys.len(),
            state: MatchState::Asked(ongoing),
            span,
        })
    }

    /// An answer that needs no question.
    pub(crate) fn known(session: &Arc<Session>, sources: Vec<Source>) -> PendingMatch {
        PendingMatch {
            session: Arc::clone(session),
            keys: sources.len(),
            state: MatchState::Known(sources),
            span: tracing::Span::none(),
        }
    }

    /// Where each leading block is, if the answer comes within `patience`: the length is the number of them. `None`:
    /// not yet, ask again. An answer that was given is given again.
    ///
    /// # Errors
    /// `Timeout` (none came within the session's patience for calls), `Busy`, `AgentLost`.
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

    /// Waits for the answer as long as any call waits.
    pub(crate) fn wait(mut self) -> Result<Vec<Source>, ClientError> {
        let timeout = self.session.call_timeout();
        self.poll(Duration::MAX)?.ok_or(ClientError::Timeout { call: "match", after: timeout })
    }

    fn sources(&self, answer: &response::Body) -> Result<Vec<Source>, ClientError> {
        let response::Body::Matched(matched) = answer else {
            return Err(ClientError::unexpected("match"));
        };
        let sources: Option<Vec<Source>> =
            matched.sources.iter().map(|number| Source::from_wire(u32::from(*number))).collect();
        match sources {
            Some(sources) if sources.len() <= self.keys => Ok(sources),
            _ => Err(ClientError::Protocol("sources of a match".into())),
        }
    }
}

impl Source {
    /// All sources, in order of expected arrival.
    pub const ALL: [Source; 4] = [Source::OwnDram, Source::OwnNvme, Source::PeerDram, Source::PeerNvme];

    /// The source of a number from the wire, if it is one.
    pub(crate) fn from_wire(number: u32) -> Option<Source> {
        Source::ALL.into_iter().find(|source| *source as u32 == number)
    }
}

impl Scope {
    pub(crate) fn is_local_only(self) -> bool {
        matches!(self, Scope::Local)
    }
}
