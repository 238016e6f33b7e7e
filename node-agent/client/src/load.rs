//! A load: blocks that are held readable in the arena, layer after layer.
//!
//! ```text
//! start_load ──► PendingLoad ── wait ──► Load ── wait_layer, copy … ──► drop (released)
//! ```
//!
//! Waiting for a layer looks at the session's progress page and needs no system call while the layer comes within
//! microseconds. A wait ends by its own timeout, by the agent's deadline for the load (missing blocks become failed),
//! or within [`WAIT_SLICE`] of the agent's death, whichever is first.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use reprise_buffers::{Access, ProgressReader, Span, WaitOutcome};
use reprise_policy::BlockKey;
use reprise_proto::local::{self, request, response};

use crate::client::Session;
use crate::connection::Ongoing;
use crate::deadline;
use crate::error::ClientError;
use crate::matching::{Scope, Source};

mod copy;

/// Deadline of a load unless told otherwise: the agent's own default.
pub const LOAD_DEADLINE_DEFAULT: Duration = Duration::from_secs(5);

/// Longest sleep on the progress page between looks at whether the agent is alive.
const WAIT_SLICE: Duration = Duration::from_millis(10);

/// What to load, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadRequest {
    /// Keys in the order of the prompt, `1..=8192`; fewer for layouts of more than 494 objects, as the agent then says
    /// (`BadRequest`): its answer names a checksum for each.
    pub keys: Vec<BlockKey>,
    /// What is not there by then is reported as missed. More than 600 s are refused (`BadRequest`).
    pub deadline: Duration,
    /// Bytes of one device read at the most, rounded to whole objects; 0: the agent's default. Small reads bring the
    /// first layers sooner, large ones the whole.
    pub read_bytes: u64,
    /// Where to look.
    pub scope: Scope,
}

/// Whether copies are checked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verify {
    /// Every object, in the copy, while it is in cache.
    #[default]
    Always,
    /// Never: whoever switches it off trusts every process that maps the arena.
    Off,
}

/// What became of one block of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockStatus {
    /// Readable as far as layers are ready.
    Ok,
    /// Nobody has it.
    Miss,
    /// It was there and could not be read or verified.
    Failed,
    /// The arena is full of leased blocks: release something and ask again, or recompute.
    NoSpace,
    /// The deadline passed.
    Deadline,
}

/// One block of a load, as the answer described it.
#[derive(Clone, Debug)]
pub struct LoadedBlock {
    status: BlockStatus,
    source: Option<Source>,
    span: Option<Span>,
    /// CRC32C of each object, 4 bytes little endian each: a slice of the answer's frame.
    checksums: Bytes,
}

/// How far a load is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerReady {
    /// Leading layers that are ready for every block that has not failed.
    pub layers: u32,
}

/// How long whoever loads waits for the next sign of progress, and of whom.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// For an agent that says nothing. After half of it the agent is asked whether it is there, and has the other half to
    /// say so.
    pub(crate) stall: Duration,
    /// For progress of an agent that is there; `None`: as long as it is.
    pub(crate) standstill: Option<Duration>,
    /// When an agent that is there has to have ended the load.
    pub(crate) until: Instant,
}

/// A load that was asked for. Dropping it releases the load when its answer comes.
#[derive(Debug)]
pub struct PendingLoad {
    session: Arc<Session>,
    ongoing: Ongoing,
    blocks: usize,
}

/// Blocks held readable in the arena. Dropping it lets them be evicted again.
#[derive(Debug)]
pub struct Load {
    session: Arc<Session>,
    id: u64,
    entry: u16,
    blocks: Vec<LoadedBlock>,
    verify: Verify,
    /// Blocks whose damage the agent has been told of.
    suspected: Mutex<BTreeSet<u32>>,
}

impl LoadRequest {
    /// A load with defaults: the whole cluster, [`LOAD_DEADLINE_DEFAULT`], the agent's read size.
    pub fn new(keys: Vec<BlockKey>) -> LoadRequest {
        LoadRequest { keys, deadline: LOAD_DEADLINE_DEFAULT, read_bytes: 0, scope: Scope::default() }
    }
}

/// A wait for the next sign of progress.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    patience: Patience,
    since: Instant,
}

impl Waiting {
    fn begin(patience: Patience) -> Waiting {
        Waiting { patience, since: Instant::now() }
    }

    /// How long to wait until the agent is asked whether it is there.
    fn next_look(self) -> Duration {
        let half = self.patience.stall / 2;
        let left = self.patience.standstill.map(|standstill| standstill.saturating_sub(self.since.elapsed()));
        left.map_or(half, |left| left.min(half))
    }

    /// Nothing has come until now: whether to go on is for the agent to say.
    ///
    /// # Errors
    /// `Timeout` when it says nothing, `Stalled` when it does and patience is over.
    fn go_on(self, session: &Session) -> Result<(), ClientError> {
        session.probe(self.patience.stall / 2)?;
        match self.patience.standstill {
            Some(standstill) if self.since.elapsed() >= standstill => {
                Err(ClientError::Stalled { after: standstill })
            }
            _ => Ok(()),
        }
    }
}

impl PendingLoad {
    pub(crate) fn start(session: &Arc<Session>, request: &LoadRequest) -> Result<PendingLoad, ClientError> {
        let body = local::Load {
            keys: Bytes::from(BlockKey::pack(&request.keys)),
            // 0 would mean the agent's default instead of "at once".
            deadline_us: u64::try_from(request.deadline.as_micros()).unwrap_or(u64::MAX).max(1),
            read_bytes: request.read_bytes,
            local_only: request.scope.is_local_only(),
        };
        let timeout = request.deadline.saturating_add(session.call_timeout());
        let _span = session.span("load").entered();
        let ongoing = session.connection().begin("load", request::Body::Load(body), timeout)?;
        Ok(PendingLoad { session: Arc::clone(session), ongoing, blocks: request.keys.len() })
    }

    /// Waits for the answer: every block is placed with layer 0 verified, or has failed.
    ///
    /// # Errors
    /// `BadRequest`, `Busy`, `Timeout`, `AgentLost`.
    pub fn wait(self) -> Result<Load, ClientError> {
        self.wait_traced(|pending| pending.ongoing.poll(Duration::MAX))
    }

    /// As [`PendingLoad::wait`], for who does not want to wait for an agent, or for whom it waits for, that hangs.
    ///
    /// # Errors
    /// As [`PendingLoad::wait`]; `Timeout` when the agent says nothing; `Stalled` when it does, and nothing comes.
    pub(crate) fn wait_with(self, patience: Patience) -> Result<Load, ClientError> {
        self.wait_traced(|pending| {
            let waiting = Waiting::begin(patience);
            loop {
                if let Some(answer) = pending.ongoing.poll(waiting.next_look())? {
                    return Ok(Some(answer));
                }
                waiting.go_on(&pending.session)?;
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
    /// What the answer said of the block; it may still have failed since, see [`Load::status`].
    pub fn status(&self) -> BlockStatus {
        self.status
    }

    /// Whether the answer placed the block.
    pub fn is_ok(&self) -> bool {
        self.status == BlockStatus::Ok
    }

    /// Where the block came from; `None` when it did not.
    pub fn source(&self) -> Option<Source> {
        self.source
    }

    /// The block's payload in the arena, unverified and readable as far as layers are ready; `None` when it is
    /// not there. Only copies through [`Load`], which are checked, leave this crate.
    pub(crate) fn span(&self) -> Option<&Span> {
        self.span.as_ref()
    }

    /// The CRC32C that an object must have; `None` when there is no such object.
    pub fn checksum(&self, object: u32) -> Option<u32> {
        let (checksums, _) = self.checksums.as_chunks::<4>();
        checksums.get(object as usize).map(|bytes| u32::from_le_bytes(*bytes))
    }
}

impl Load {
    fn new(session: &Arc<Session>, loaded: local::Loaded, blocks: usize) -> Result<Load, ClientError> {
        let entry = u16::try_from(loaded.progress_entry)
            .map_err(|_| ClientError::Protocol(format!("progress entry {}", loaded.progress_entry)))?;
        if loaded.blocks.len() != blocks {
            return Err(ClientError::Protocol(format!(
                "{} blocks in the answer to a load of {blocks}",
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

    /// The same with copies checked or not.
    pub fn with_verify(mut self, verify: Verify) -> Load {
        self.verify = verify;
        self
    }

    /// The blocks, in the order of the request's keys.
    pub fn blocks(&self) -> &[LoadedBlock] {
        &self.blocks
    }

    /// What has become of a block by now; `Miss` when there is no such block.
    pub fn status(&self, block: usize) -> BlockStatus {
        match self.blocks.get(block).map(LoadedBlock::status) {
            Some(BlockStatus::Ok) if self.has_failed(block) => BlockStatus::Failed,
            Some(status) => status,
            None => BlockStatus::Miss,
        }
    }

    /// Leading blocks that are there by now: what an engine that needs a prefix can use.
    pub fn leading_blocks(&self) -> usize {
        (0..self.blocks.len()).take_while(|block| self.status(*block) == BlockStatus::Ok).count()
    }

    fn placed_blocks(&self) -> usize {
        self.blocks.iter().filter(|block| block.is_ok()).count()
    }

    /// Leading layers that are ready for every block that has not failed.
    pub fn ready_layers(&self) -> u32 {
        self.progress().map_or(0, |progress| {
            if progress.is_done(self.entry) {
                self.session.layout().layers()
            } else {
                progress.layers(self.entry)
            }
        })
    }

    /// Waits until a layer is ready for every block that has not failed. Which have: [`Load::status`].
    ///
    /// # Errors
    /// `Timeout` (ask again, or recompute), `AgentLost`, `BadRequest` (no such layer).
    pub fn wait_layer(&self, layer: u32, timeout: Duration) -> Result<LayerReady, ClientError> {
        let layers = self.session.layout().layers();
        if layer >= layers {
            return Err(ClientError::BadRequest(format!("layer {layer} of {layers}")));
        }
        if self.ready_layers() > layer {
            return Ok(LayerReady { layers: self.ready_layers() });
        }
        let connection = self.session.connection();
        let progress = self.progress().ok_or_else(|| connection.lost())?;
        let deadline = deadline::after(timeout);
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match progress.wait_layers(self.entry, self.id, layer + 1, left.min(WAIT_SLICE)) {
                WaitOutcome::Ready | WaitOutcome::Done => {
                    return Ok(LayerReady { layers: self.ready_layers() });
                }
                WaitOutcome::Superseded => {
                    let reason = "a load's progress entry was given away while it was held";
                    return Err(self.session.broken(ClientError::Protocol(reason.into())));
                }
                WaitOutcome::Timeout if connection.has_ended() => return Err(connection.lost()),
                WaitOutcome::Timeout if left.is_zero() => {
                    return Err(ClientError::Timeout { call: "wait_layer", after: timeout });
                }
                WaitOutcome::Timeout => {}
            }
        }
    }

    /// As [`Load::wait_layer`], with patience for whom the agent waits for.
    ///
    /// # Errors
    /// `Timeout` when the agent says nothing, or does not end the load in its time; `Stalled` when it is there, and nothing
    /// comes; `AgentLost`, `BadRequest` (no such layer).
    pub(crate) fn wait_layer_with(&self, layer: u32, patience: Patience) -> Result<LayerReady, ClientError> {
        let waiting = Waiting::begin(patience);
        loop {
            match self.wait_layer(layer, waiting.next_look()) {
                Err(ClientError::Timeout { .. }) => waiting.go_on(&self.session)?,
                waited => return waited,
            }
            if Instant::now() >= deadline::from(patience.until, patience.stall) {
                return Err(ClientError::Timeout { call: "wait_layer", after: patience.stall });
            }
        }
    }

    /// Tells the agent, once for each block, that a copy did not match: it looks at the block itself, and drops what is
    /// damaged, so that the next load finds the block elsewhere.
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

    /// Whether the block has failed since the answer.
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

/// Checks one block of an answer.
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
            return Err(ClientError::Protocol("a loaded block without a status".into()));
        }
    };
    if status != BlockStatus::Ok {
        return Ok(LoadedBlock { status, source: None, span: None, checksums: Bytes::new() });
    }
    let source = Source::from_wire(block.source);
    if source.is_none() || span.is_none() || block.checksums.len() != checksum_bytes {
        return Err(ClientError::Protocol("a loaded block without source, place or checksums".into()));
    }
    Ok(LoadedBlock { status, source, span, checksums: block.checksums })
}
