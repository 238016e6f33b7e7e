//! Hints about what an engine runs next, from which the agent reads blocks ahead of their load.
//!
//! An engine sends a hint between two iterations and must not wait: it starts the report, and polls the answer in a
//! later iteration or never.

use std::sync::Arc;
use std::time::Duration;

use reprise_policy::BlockKey;
use reprise_policy::prefetch::{BegunRequest, Lookahead, LookaheadReport, RequestState};
use reprise_policy::session::Ranks;
use reprise_proto::local::{self, request, response};

use crate::client::{Client, Session};
use crate::connection::PendingCall;
use crate::error::ClientError;
use crate::matching::SendMode;

const CALL: &str = "report lookahead";

/// A sent hint. It may be dropped at any time.
#[derive(Debug)]
pub struct PendingLookahead {
    session: Arc<Session>,
    sent: PendingCall,
}

impl Client {
    /// Hints what the engine runs next, and waits for the answer.
    ///
    /// # Errors
    /// `BadRequest` for an unknown version or a list that is too long, `Timeout`, `AgentLost`.
    pub fn report_lookahead(&self, lookahead: &Lookahead) -> Result<LookaheadReport, ClientError> {
        let timeout = self.session().call_timeout();
        PendingLookahead::start(self.session(), lookahead, SendMode::Blocking)?
            .poll(Duration::MAX)?
            .ok_or(ClientError::Timeout { call: CALL, after: timeout })
    }

    /// Sends a hint and returns without waiting for the answer or for room in the socket.
    ///
    /// # Errors
    /// `Busy`, `AgentLost`.
    pub fn start_lookahead(&self, lookahead: &Lookahead) -> Result<PendingLookahead, ClientError> {
        PendingLookahead::start(self.session(), lookahead, SendMode::NonBlocking)
    }
}

impl PendingLookahead {
    fn start(
        session: &Arc<Session>,
        lookahead: &Lookahead,
        sending: SendMode,
    ) -> Result<PendingLookahead, ClientError> {
        let (body, timeout) = (request::Body::ReportLookahead(message(lookahead)), session.call_timeout());
        let sent = match sending {
            SendMode::Blocking => session.connection().begin(CALL, body, timeout)?,
            SendMode::NonBlocking => session.connection().try_begin(CALL, body, timeout)?,
        };
        Ok(PendingLookahead { session: Arc::clone(session), sent })
    }

    /// Returns the answer if it arrives within `patience`. `None`: poll again.
    ///
    /// # Errors
    /// `BadRequest` for an unknown version or a list that is too long, `Timeout` (the session's call timeout has
    /// passed), `AgentLost`.
    pub fn poll(&mut self, patience: Duration) -> Result<Option<LookaheadReport>, ClientError> {
        let Some(answer) = self.sent.poll(patience)? else { return Ok(None) };
        let response::Body::LookaheadReported(local::LookaheadReported { window, ignored, ready }) = answer
        else {
            return Err(self.session.broken(ClientError::unexpected(CALL)));
        };
        Ok(Some(LookaheadReport { window, ignored, ready }))
    }
}

fn message(lookahead: &Lookahead) -> local::ReportLookahead {
    let requests = lookahead.requests.iter().map(|waiting| local::WaitingRequest {
        request: waiting.request,
        iterations: waiting.iterations,
        confidence_permille: u32::from(waiting.confidence),
        keys: BlockKey::pack(&waiting.keys).into(),
    });
    local::ReportLookahead {
        version: lookahead.version,
        iteration_us: u64::try_from(lookahead.iteration.as_micros()).unwrap_or(u64::MAX),
        requests: requests.collect(),
        cancelled: lookahead.cancelled.clone(),
        all_ranks: lookahead.ranks == Ranks::All,
        begun: lookahead.begun.as_deref().map(begun),
    }
}

fn begun(requests: &[BegunRequest]) -> local::BegunRequests {
    let requests = requests.iter().map(|begun| local::BegunRequest {
        request: begun.request,
        preempted: begun.state == RequestState::Preempted,
        first: begun.first,
        keys: BlockKey::pack(&begun.keys).into(),
    });
    local::BegunRequests { requests: requests.collect() }
}
