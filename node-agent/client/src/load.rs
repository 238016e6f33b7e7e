//! A load: blocks that are held readable in the arena, layer by layer.
//!
//! ```text
//! start_load ──► PendingLoad ── wait ──► Load ── wait_layer, copy … ──► drop (released)
//! ```
//!
//! Waiting for a layer polls the session's progress page and needs no system call while the layer arrives
//! within microseconds. A wait ends by its own timeout, by the agent's deadline for the load (missing blocks
//! become failed), or within [`WAIT_SLICE`] of the agent's death, whichever is first.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use reprise_buffers::{Access, ProgressReader, Span, WaitOutcome};
use reprise_policy::session::{Scope, Source};
use reprise_policy::{BlockKey, KeyInputs};
use reprise_proto::local::{self, request, response};

use crate::client::Session;
use crate::connection::PendingCall;
use crate::deadline;
use crate::error::ClientError;
use crate::matching::inputs_message;

mod copy;

/// Default deadline of a load; equals the agent's default.
pub const LOAD_DEADLINE_DEFAULT: Duration = Duration::from_secs(5);

/// Longest sleep on the progress page before the wait checks whether the connection has ended.
const WAIT_SLICE: Duration = Duration::from_millis(10);

/// Blocks to load, and how to load them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadRequest {
    /// Keys in the order of the prompt, `1..=8192`. For layouts of more than 494 objects the agent accepts
    /// fewer (`BadRequest`), because its answer contains a checksum for each object.
    pub keys: Vec<BlockKey>,
    /// Blocks that are not loaded within this time are reported as missed. The agent rejects more than 600 s
    /// (`BadRequest`).
    pub deadline: Duration,
    /// Maximum size of one device read in bytes, rounded to whole objects; 0: the agent's default. Small
    /// reads deliver the first layers sooner, large ones the whole block.
    pub read_bytes: u64,
    /// Where the agent searches for the blocks.
    pub scope: Scope,
    /// Inputs of the leading keys, in their order: blocks of the public tenant are loaded too. `None`: those that
    /// [`LearnedSalt`](crate::LearnedSalt) remembers. Not sent if no tenant is public.
    pub inputs: Option<KeyInputs>,
}

/// Whether copies are verified.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verify {
    /// Verifies every object during the copy, while it is in cache.
    #[default]
    Always,
    /// Skips verification: the caller trusts every process that maps the arena.
    Off,
}

/// Status of one block of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockStatus {
    /// Readable as far as layers are ready.
    Ok,
    /// No node has the block.
    Miss,
    /// The block exists but could not be read or verified.
    Failed,
    /// The arena is full of leased blocks: release some and load again, or recompute.
    NoSpace,
    /// The deadline passed before the block was loaded.
    Deadline,
}

/// One block of a load, as described by the answer.
#[derive(Clone, Debug)]
pub struct LoadedBlock {
    status: BlockStatus,
    source: Option<Source>,
    span: Option<Span>,
    /// CRC32C of each object, 4 bytes little endian each: a slice of the answer's frame.
    checksums: Bytes,
}

/// Progress of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerReady {
    /// Number of leading layers that are ready for every block that has not failed.
    pub layers: u32,
}

/// Timeouts of a wait for the next progress of a load.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LoadTimeouts {
    /// Time without any sign of life of the agent. After half of it the client probes the agent, which has
    /// the other half to answer.
    pub(crate) stall: Duration,
    /// Time without progress while the agent answers; `None`: no limit.
    pub(crate) standstill: Option<Duration>,
    /// Deadline by which an agent that answers must have ended the load.
    pub(crate) until: Instant,
    /// End of a wait with a limit, whether or not the agent answers; `None`: no limit.
    pub(crate) limit: Option<Instant>,
}

/// A requested load. Dropping it releases the load when its answer arrives.
#[derive(Debug)]
pub struct PendingLoad {
    session: Arc<Session>,
    ongoing: PendingCall,
    blocks: usize,
}

/// Blocks held readable in the arena. Dropping it makes them evictable again.
#[derive(Debug)]
pub struct Load {
    session: Arc<Session>,
    id: u64,
    entry: u16,
    blocks: Vec<LoadedBlock>,
    verify: Verify,
    /// Blocks whose damage was reported to the agent.
    suspected: Mutex<BTreeSet<u32>>,
}

impl LoadRequest {
    /// Creates a load with defaults: the whole cluster, [`LOAD_DEADLINE_DEFAULT`], the agent's read size.
    pub fn new(keys: Vec<BlockKey>) -> LoadRequest {
        let (deadline, scope) = (LOAD_DEADLINE_DEFAULT, Scope::default());
        LoadRequest { keys, deadline, read_bytes: 0, scope, inputs: None }
    }
}

/// State of a wait for the next progress.
#[derive(Clone, Copy, Debug)]
struct ProgressWait {
    patience: LoadTimeouts,
    since: Instant,
    /// Last sign of life of the agent.
    answered: Instant,
}

impl ProgressWait {
    fn begin(patience: LoadTimeouts) -> ProgressWait {
        let now = Instant::now();
        ProgressWait { patience, since: now, answered: now }
    }

    /// Time until the agent must be probed, or the wait reaches its limit.
    fn next_check(self) -> Duration {
        let LoadTimeouts { stall, standstill, limit, .. } = self.patience;
        let standstill = standstill.map(|standstill| standstill.saturating_sub(self.since.elapsed()));
        let limit = limit.map(|limit| limit.saturating_duration_since(Instant::now()));
        [standstill, limit].into_iter().flatten().fold(stall / 2, Duration::min)
    }

    /// Handles a wait without progress: probes the agent to decide whether to continue.
    ///
    /// # Errors
    /// `LimitReached` at the limit; `Timeout` if the agent does not answer; `Stalled` if it does and the limit for
    /// progress has passed.
    fn check_agent(&mut self, session: &Session) -> Result<(), ClientError> {
        let half = self.patience.stall / 2;
        let left = self.patience.limit.map_or(half, |limit| limit.saturating_duration_since(Instant::now()));
        if left.is_zero() {
            return Err(self.limit_reached());
        }
        match session.probe(left.min(half)) {
            Ok(()) => self.answered = Instant::now(),
            // A shorter time does not show that the agent hangs.
            Err(ClientError::Timeout { .. }) if left < half => return Err(self.limit_reached()),
            Err(error) => return Err(error),
        }
        match self.patience.standstill {
            Some(standstill) if self.since.elapsed() >= standstill => {
                Err(ClientError::Stalled { after: standstill })
            }
            _ => Ok(()),
        }
    }

    fn limit_reached(self) -> ClientError {
        let reason = format!("no block within {:?}", self.since.elapsed());
        ClientError::LimitReached { reason, unanswered: self.answered.elapsed() }
    }
}

impl PendingLoad {
    pub(crate) fn start(session: &Arc<Session>, request: &LoadRequest) -> Result<PendingLoad, ClientError> {
        let inputs = match &request.inputs {
            Some(inputs) if inputs.len() > request.keys.len() => {
                let (inputs, keys) = (inputs.len(), request.keys.len());
                let what = format!("load: {inputs} inputs of {keys} keys: expected at most one for each key");
                return Err(ClientError::BadRequest(what));
            }
            Some(inputs) => Some(inputs.clone()),
            None => session.recent_inputs(&request.keys, 1),
        };
        let body = local::Load {
            keys: Bytes::from(BlockKey::pack(&request.keys)),
            // 0 would mean the agent's default instead of "at once".
            deadline_us: u64::try_from(request.deadline.as_micros()).unwrap_or(u64::MAX).max(1),
            read_bytes: request.read_bytes,
            local_only: request.scope == Scope::Local,
            inputs: inputs.filter(|_| session.has_public_tenant()).map(inputs_message),
        };
        let timeout = request.deadline.saturating_add(session.call_timeout());
        let _span = session.span("load").entered();
        let ongoing = session.connection().begin("load", request::Body::Load(body), timeout)?;
        Ok(PendingLoad { session: Arc::clone(session), ongoing, blocks: request.keys.len() })
    }

    /// Waits for the answer: every block has failed, or is placed with layer 0 verified.
    ///
    /// # Errors
    /// `BadRequest`, `Busy`, `Timeout`, `AgentLost`.
    pub fn wait(self) -> Result<Load, ClientError> {
        self.wait_traced(|pending| pending.ongoing.poll(Duration::MAX))
    }

    /// [`PendingLoad::wait`] with limits for a hanging agent and for a hanging device or peer.
    ///
    /// # Errors
    /// As [`PendingLoad::wait`]; `Timeout` if the agent does not answer; `Stalled` if it answers without
    /// progress; `LimitReached` at the limit.
    pub(crate) fn wait_with(self, patience: LoadTimeouts) -> Result<Load, ClientError> {
        self.wait_traced(|pending| {
            let mut waiting = ProgressWait::begin(patience);
            loop {
                if let Some(answer) = pending.ongoing.poll(waiting.next_check())? {
                    return Ok(Some(answer));
                }
                waiting.check_agent(&pending.session)?;
            }
        })
    }

    fn wait_traced(
        mut self,
        wait: impl FnOnce(&mut PendingLoad) -> Result<Option<response::Body>, ClientError>,
    ) -> Result<Load, ClientError> {
        let span = tracing::debug_span!(
            "load_wait",
            session = self.session.number(),
            blocks = self.blocks,
            placed = tracing::field::Empty,
            outcome = tracing::field::Empty
        )
        .entered();
        let waited = wait(&mut self).and_then(|answer| self.loaded(answer));
        match &waited {
            Ok(load) => span.record("outcome", "answered").record("placed", load.placed_blocks()),
            Err(error) => span.record("outcome", tracing::field::display(error)),
        };
        waited
    }

    fn loaded(&self, answer: Option<response::Body>) -> Result<Load, ClientError> {
        match answer {
            Some(response::Body::Loaded(loaded)) => {
                Load::new(&self.session, loaded, self.blocks).map_err(|error| self.session.broken(error))
            }
            _ => Err(self.session.broken(ClientError::unexpected("load"))),
        }
    }
}

impl LoadedBlock {
    /// Status in the answer; the block may have failed since, see [`Load::status`].
    pub fn status(&self) -> BlockStatus {
        self.status
    }

    /// Reports whether the answer placed the block.
    pub fn is_ok(&self) -> bool {
        self.status == BlockStatus::Ok
    }

    /// Returns the source of the block; `None` if it was not placed.
    pub fn source(&self) -> Option<Source> {
        self.source
    }

    /// Returns the block's payload in the arena: unverified, and readable as far as layers are ready. `None`
    /// if the block was not placed. Other crates only get verified copies through [`Load`].
    pub(crate) fn span(&self) -> Option<&Span> {
        self.span.as_ref()
    }

    /// Returns the expected CRC32C of an object; `None` if the object does not exist.
    pub fn checksum(&self, object: u32) -> Option<u32> {
        let (checksums, _) = self.checksums.as_chunks::<4>();
        checksums.get(object as usize).map(|bytes| u32::from_le_bytes(*bytes))
    }
}

impl Load {
    fn new(session: &Arc<Session>, loaded: local::Loaded, blocks: usize) -> Result<Load, ClientError> {
        let entry = u16::try_from(loaded.progress_entry).map_err(|_| {
            ClientError::Protocol(format!("invalid progress entry {}", loaded.progress_entry))
        })?;
        if loaded.blocks.len() != blocks {
            return Err(ClientError::Protocol(format!(
                "{} blocks in the answer to a load of {blocks} blocks",
                loaded.blocks.len()
            )));
        }
        let layout = session.layout();
        let places = loaded.blocks.iter().map(|block| {
            let is_placed = block.status() == local::BlockStatus::BlockOk;
            block.place.as_ref().filter(|_| is_placed)
        });
        let spans = session.connection().regions().spans(places, layout.block_bytes(), Access::ReadOnly)?;
        let checksum_bytes = layout.objects() as usize * 4;
        let blocks = loaded
            .blocks
            .into_iter()
            .zip(spans)
            .map(|(block, span)| loaded_block(block, span, checksum_bytes))
            .collect::<Result<_, _>>()?;
        Ok(Load {
            session: Arc::clone(session),
            id: loaded.load,
            entry,
            blocks,
            verify: Verify::default(),
            suspected: Mutex::default(),
        })
    }

    /// Sets whether copies are verified.
    pub fn with_verify(mut self, verify: Verify) -> Load {
        self.verify = verify;
        self
    }

    /// Returns the blocks, in the order of the request's keys.
    pub fn blocks(&self) -> &[LoadedBlock] {
        &self.blocks
    }

    /// Returns the current status of a block; `Miss` if the block does not exist.
    pub fn status(&self, block: usize) -> BlockStatus {
        match self.blocks.get(block).map(LoadedBlock::status) {
            Some(BlockStatus::Ok) if self.has_failed(block) => BlockStatus::Failed,
            Some(status) => status,
            None => BlockStatus::Miss,
        }
    }

    /// Returns the number of leading blocks that are available now: the usable part for an engine that needs
    /// a prefix.
    pub fn leading_blocks(&self) -> usize {
        (0..self.blocks.len()).take_while(|block| self.status(*block) == BlockStatus::Ok).count()
    }

    fn placed_blocks(&self) -> usize {
        self.blocks.iter().filter(|block| block.is_ok()).count()
    }

    /// Returns the number of leading layers that are ready for every block that has not failed.
    pub fn ready_layers(&self) -> u32 {
        self.progress().map_or(0, |progress| {
            if progress.is_done(self.entry) {
                self.session.layout().layers()
            } else {
                progress.layers(self.entry)
            }
        })
    }

    /// Waits until a layer is ready for every block that has not failed; [`Load::status`] reports failures.
    ///
    /// # Errors
    /// `Timeout` (wait again, or recompute), `AgentLost`, `BadRequest` (the layer does not exist).
    pub fn wait_layer(&self, layer: u32, timeout: Duration) -> Result<LayerReady, ClientError> {
        let layers = self.session.layout().layers();
        if layer >= layers {
            return Err(ClientError::BadRequest(format!(
                "invalid layer {layer}: the layout has {layers} layers"
            )));
        }
        if self.ready_layers() > layer {
            return Ok(LayerReady { layers: self.ready_layers() });
        }
        let connection = self.session.connection();
        let progress = self.progress().ok_or_else(|| connection.ended_error())?;
        let deadline = deadline::after(timeout);
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match progress.wait_layers(self.entry, self.id, layer + 1, left.min(WAIT_SLICE)) {
                WaitOutcome::Ready | WaitOutcome::Done => {
                    return Ok(LayerReady { layers: self.ready_layers() });
                }
                WaitOutcome::Superseded => {
                    let reason = "the progress entry of an open load was reused";
                    return Err(self.session.broken(ClientError::Protocol(reason.into())));
                }
                WaitOutcome::Timeout if connection.has_ended() => return Err(connection.ended_error()),
                WaitOutcome::Timeout if left.is_zero() => {
                    return Err(ClientError::Timeout { call: "wait_layer", after: timeout });
                }
                WaitOutcome::Timeout => {}
            }
        }
    }

    /// [`Load::wait_layer`] with limits for a hanging agent and for a hanging device or peer.
    ///
    /// # Errors
    /// `Timeout` if the agent does not answer, or does not end the load in its time. `Stalled` if it answers
    /// without progress. `LimitReached` at the limit. `AgentLost`, `BadRequest` (the layer does not exist).
    pub(crate) fn wait_layer_with(
        &self,
        layer: u32,
        patience: LoadTimeouts,
    ) -> Result<LayerReady, ClientError> {
        let mut waiting = ProgressWait::begin(patience);
        loop {
            match self.wait_layer(layer, waiting.next_check()) {
                Err(ClientError::Timeout { .. }) => waiting.check_agent(&self.session)?,
                waited => return waited,
            }
            if Instant::now() >= deadline::from(patience.until, patience.stall) {
                return Err(ClientError::Timeout { call: "wait_layer", after: patience.stall });
            }
        }
    }

    /// Reports once per block that a copy did not match its checksum. The agent verifies the block itself and
    /// drops a damaged one, so that the next load uses another replica.
    fn suspect(&self, block: usize) {
        let Ok(block) = u32::try_from(block) else { return };
        let mut suspected = self.suspected.lock().unwrap_or_else(PoisonError::into_inner);
        if suspected.insert(block) {
            let body = local::Suspect { load: self.id, blocks: vec![block] };
            self.session.connection().cast(request::Body::Suspect(body));
        }
    }

    fn progress(&self) -> Option<&ProgressReader> {
        self.session.connection().progress()
    }

    /// Reports whether the block has failed since the answer.
    fn has_failed(&self, block: usize) -> bool {
        self.progress().is_none_or(|progress| {
            progress.failed_count(self.entry) > 0 && progress.is_failed(self.entry, block)
        })
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        let release = request::Body::Release(local::Release { load: self.id });
        self.session.connection().cast(release);
    }
}

/// Validates one block of an answer.
fn loaded_block(
    block: local::LoadedBlock,
    span: Option<Span>,
    checksum_bytes: usize,
) -> Result<LoadedBlock, ClientError> {
    let status = match block.status() {
        local::BlockStatus::BlockOk => BlockStatus::Ok,
        local::BlockStatus::BlockMiss => BlockStatus::Miss,
        local::BlockStatus::BlockFailed => BlockStatus::Failed,
        local::BlockStatus::BlockNoSpace => BlockStatus::NoSpace,
        local::BlockStatus::BlockDeadline => BlockStatus::Deadline,
        local::BlockStatus::BlockUnspecified => {
            return Err(ClientError::Protocol("loaded block without a status".into()));
        }
    };
    if status != BlockStatus::Ok {
        return Ok(LoadedBlock { status, source: None, span: None, checksums: Bytes::new() });
    }
    let source = Source::from_number(block.source);
    if source.is_none() || span.is_none() || block.checksums.len() != checksum_bytes {
        return Err(ClientError::Protocol("loaded block without source, place or checksums".into()));
    }
    Ok(LoadedBlock { status, source, span, checksums: block.checksums })
}
