//! Matches that are polled.
//!
//! An engine's scheduler must not wait: it starts a match, polls it for some milliseconds, and polls again in
//! its next step.
//!
//! ```text
//! start_match ──► PendingMatch ── poll ──► None: later ──► poll ──► sources
//! ```
//!
//! The scheduler of a tensor-parallel engine matches the parts of all ranks in one call. Then a block counts only if
//! every rank has committed its part.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use reprise_policy::session::{Ranks, Scope, Source};
use reprise_policy::{BlockKey, KeyInputs};
use reprise_proto::local::{self, request, response};

use crate::client::{Client, Session, check_count};
use crate::connection::PendingCall;
use crate::error::ClientError;

/// Properties of a match.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MatchOptions {
    /// Nodes to search for blocks.
    pub scope: Scope,
    /// Number of blocks before the first one in its chain: `Some(0)` if the match begins with the first block. `None`
    /// if the caller does not know it. With it, the agent evicts the blocks in the order of their chain, even those
    /// that it has found on its devices after a restart or received from peers.
    pub position: Option<u32>,
    /// Inputs of the keys, one for each: blocks of the public tenant count too. `None`: those that
    /// [`LearnedSalt`](crate::LearnedSalt) remembers. Not sent if no tenant is public.
    pub inputs: Option<KeyInputs>,
}

/// A requested match. It holds no blocks, so it may be dropped at any time.
#[derive(Debug)]
pub struct PendingMatch {
    session: Arc<Session>,
    /// Number of matched blocks.
    blocks: usize,
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

impl From<Scope> for MatchOptions {
    /// Options of a match whose position is not known.
    fn from(scope: Scope) -> MatchOptions {
        MatchOptions { scope, position: None, inputs: None }
    }
}

impl Client {
    /// Returns the source of each leading block that is available; the length of the result is their number.
    /// Accepts at most 8,192 keys. For no keys (a prompt shorter than a block) it returns an empty result
    /// without a request.
    ///
    /// # Errors
    /// `BadRequest` (too many keys), `Timeout`, `AgentLost`.
    pub fn match_keys(
        &self,
        keys: &[BlockKey],
        options: impl Into<MatchOptions>,
    ) -> Result<Vec<Source>, ClientError> {
        self.ask((keys, Ranks::Own), options.into(), SendMode::Blocking)?.wait()
    }

    /// [`Client::match_keys`] for the parts of all ranks of the session's layout: all keys of rank 0, then as many of
    /// rank 1, and so on. A block is available only if the parts of all ranks are; its source is that of its slowest
    /// part.
    ///
    /// # Errors
    /// As [`Client::match_keys`]; `BadRequest` if the number of keys is not a multiple of the number of ranks.
    pub fn match_ranks(
        &self,
        keys: &[BlockKey],
        options: impl Into<MatchOptions>,
    ) -> Result<Vec<Source>, ClientError> {
        self.ask((keys, Ranks::All), options.into(), SendMode::Blocking)?.wait()
    }

    /// Sends a match request and returns without waiting for the answer or for room in the socket; at most
    /// 8,192 keys.
    ///
    /// # Errors
    /// `BadRequest` (too many keys), `Busy`, `AgentLost`.
    pub fn start_match(
        &self,
        keys: &[BlockKey],
        options: impl Into<MatchOptions>,
    ) -> Result<PendingMatch, ClientError> {
        self.ask((keys, Ranks::Own), options.into(), SendMode::NonBlocking)
    }

    /// [`Client::start_match`] for the parts of all ranks, as in [`Client::match_ranks`].
    ///
    /// # Errors
    /// As [`Client::start_match`]; `BadRequest` if the number of keys is not a multiple of the number of ranks.
    pub fn start_match_ranks(
        &self,
        keys: &[BlockKey],
        options: impl Into<MatchOptions>,
    ) -> Result<PendingMatch, ClientError> {
        self.ask((keys, Ranks::All), options.into(), SendMode::NonBlocking)
    }

    fn ask(
        &self,
        (keys, ranks): (&[BlockKey], Ranks),
        options: MatchOptions,
        sending: SendMode,
    ) -> Result<PendingMatch, ClientError> {
        if keys.is_empty() {
            return Ok(PendingMatch::known(self.session(), Vec::new()));
        }
        check_count("match", keys.len())?;
        PendingMatch::start(self.session(), (keys, ranks), options, sending)
    }
}

impl PendingMatch {
    fn start(
        session: &Arc<Session>,
        (keys, ranks): (&[BlockKey], Ranks),
        options: MatchOptions,
        sending: SendMode,
    ) -> Result<PendingMatch, ClientError> {
        let parts = match ranks {
            Ranks::Own => 1,
            Ranks::All => usize::from(session.layout().spec().tp_size),
        };
        let blocks = keys.len() / parts;
        if blocks * parts != keys.len() {
            return Err(ClientError::BadRequest(format!(
                "match: {} keys of {parts} ranks: expected the same number of each rank",
                keys.len()
            )));
        }
        let order = block_after_block(keys.len(), blocks, ranks);
        let keys: Vec<BlockKey> = order.iter().map(|at| keys[*at]).collect();
        let inputs = match options.inputs {
            Some(inputs) if inputs.len() == keys.len() => Some(inputs.select(order.into_iter())),
            Some(inputs) => {
                let (inputs, keys) = (inputs.len(), keys.len());
                let what = format!("match: {inputs} inputs of {keys} keys: expected one for each key");
                return Err(ClientError::BadRequest(what));
            }
            None => session.recent_inputs(&keys, parts),
        };
        let body = local::Match {
            keys: Bytes::from(BlockKey::pack(&keys)),
            local_only: options.scope == Scope::Local,
            all_ranks: ranks == Ranks::All,
            position: options.position,
            inputs: inputs.filter(|_| session.has_public_tenant()).map(inputs_message),
        };
        let span = session.span("match");
        let entered = span.enter();
        let timeout = session.call_timeout();
        let body = request::Body::Match(body);
        let ongoing = match sending {
            SendMode::Blocking => session.connection().begin("match", body, timeout)?,
            SendMode::NonBlocking => session.connection().try_begin("match", body, timeout)?,
        };
        drop(entered);
        Ok(PendingMatch { session: Arc::clone(session), blocks, state: MatchState::Asked(ongoing), span })
    }

    /// Creates a match whose answer needs no request.
    fn known(session: &Arc<Session>, sources: Vec<Source>) -> PendingMatch {
        PendingMatch {
            session: Arc::clone(session),
            blocks: sources.len(),
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
    fn wait(mut self) -> Result<Vec<Source>, ClientError> {
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
            Some(sources) if sources.len() <= self.blocks => Ok(sources),
            _ => Err(ClientError::Protocol("invalid sources in the answer to a match".into())),
        }
    }
}

/// Indices of keys in the order block after block: those of all ranks are passed in the order rank after rank.
fn block_after_block(keys: usize, blocks: usize, ranks: Ranks) -> Vec<usize> {
    match ranks {
        Ranks::Own => (0..keys).collect(),
        Ranks::All => (0..blocks).flat_map(|block| (block..keys).step_by(blocks)).collect(),
    }
}

/// Returns the message for inputs of keys.
pub(crate) fn inputs_message(inputs: KeyInputs) -> local::KeyInputs {
    let input_bytes = u32::try_from(inputs.input_bytes()).expect("an input has at most 72 bytes");
    let namespaces = inputs.namespaces().iter().map(|namespace| namespace.0.to_vec().into()).collect();
    local::KeyInputs { packed: inputs.into_packed().into(), input_bytes, namespaces }
}
