//! Python classes for the decision whether blocks are loaded or computed.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use reprise_policy::Tick;
use reprise_policy::recompute::{
    BlockSize, Chain, Decision, EndedLoad, Reason, SourceCounts, Step, WaitBound, WaitLimit,
};
use reprise_policy::session::Source;

use crate::arguments::seconds;

/// Limit of the wait for a load: seconds while no block has arrived, and seconds for each leading one.
pub(crate) type Limit = (f64, f64);

/// Decision about the blocks of a request.
#[pyclass(frozen, module = "reprise")]
#[derive(Debug)]
pub(crate) struct LoadDecision {
    decision: Decision,
}

/// Decides for each request how many of its blocks are loaded, from measured rates of one engine.
///
/// Loading leading blocks and computing the others must be cheaper than any other split of them. Without measurements of
/// the computation, or of a source, all blocks are loaded.
///
/// Args:
///     block_tokens: tokens of a block. block_bytes: bytes that one load of a block moves. wait_cap, wait_base,
///     wait_per_token: seconds; a request waits for a load at most ``min(cap, base + per_token * tokens)`` longer than
///     computing the blocks that have arrived.
#[pyclass(frozen, module = "reprise")]
#[derive(Debug)]
pub(crate) struct LoadPolicy {
    policy: Mutex<reprise_policy::recompute::LoadPolicy>,
    began: Instant,
}

#[pymethods]
impl LoadPolicy {
    #[new]
    #[pyo3(signature = (block_tokens, block_bytes, *, wait_cap=1.0, wait_base=0.05, wait_per_token=1e-4))]
    fn new(
        block_tokens: u32,
        block_bytes: u64,
        wait_cap: f64,
        wait_base: f64,
        wait_per_token: f64,
    ) -> PyResult<LoadPolicy> {
        if block_tokens == 0 || block_bytes == 0 {
            return Err(PyValueError::new_err(format!(
                "invalid block of {block_tokens} tokens and {block_bytes} bytes: expected at least 1 of each"
            )));
        }
        let bound = WaitBound {
            cap: seconds("wait_cap", wait_cap)?,
            base: seconds("wait_base", wait_base)?,
            per_token: seconds("wait_per_token", wait_per_token)?,
        };
        let block = BlockSize { tokens: block_tokens, bytes: block_bytes };
        let policy = reprise_policy::recompute::LoadPolicy::new(bound, block);
        Ok(LoadPolicy { policy: Mutex::new(policy), began: Instant::now() })
    }

    /// Adds a measured step of the engine; returns whether it counts. An impossible measurement is counted as ignored.
    ///
    /// Args:
    ///     tokens: tokens of prompts that it computed; 0: none.
    ///     context: mean number of tokens before each of them.
    ///     seconds: time of the step.
    fn observe_step(&self, tokens: u64, context: f64, seconds: f64) -> bool {
        self.lock().observe_step(&Step { tokens, context, seconds })
    }

    /// Drops the measured steps, if no others will follow: all blocks are loaded, without a limit.
    fn forget_steps(&self) {
        self.lock().forget_steps();
    }

    /// Adds a load that has ended; returns whether it counts. An impossible measurement is counted as ignored.
    ///
    /// Args:
    ///     requested: number of blocks of each source, as in the decision.
    ///     loaded: number of loaded blocks of each source.
    ///     seconds: time that it ran.
    fn observe_load(&self, requested: SourceCounts, loaded: SourceCounts, seconds: f64) -> bool {
        self.lock().observe_load(&EndedLoad { requested, loaded, seconds }, self.now())
    }

    /// Decides about the blocks that a request could load.
    ///
    /// Args:
    ///     sources: source of each block. prefix_tokens: tokens before the first one.
    ///     is_computing: whether other requests compute; a load then also waits for the end of a step.
    #[pyo3(signature = (sources, prefix_tokens=0, is_computing=false))]
    fn decide(&self, sources: Vec<u32>, prefix_tokens: u64, is_computing: bool) -> PyResult<LoadDecision> {
        let sources: Vec<Source> = sources.into_iter().map(known).collect::<PyResult<_>>()?;
        let chain = Chain { sources: &sources, prefix_tokens, is_computing };
        Ok(LoadDecision { decision: self.lock().decide(&chain, self.now()) })
    }

    /// Returns the limit of the wait for a load of blocks behind a prefix, for ``Transfers.load``; None: no limit.
    fn limit(&self, blocks: u32, prefix_tokens: u64) -> Option<Limit> {
        self.lock().limit(prefix_tokens, blocks).map(limit_of)
    }

    /// Counts a load that was submitted, for which later ones wait; ``load_ended`` follows. ``requested`` is the number of
    /// its blocks from each source.
    fn load_started(&self, requested: SourceCounts) {
        self.lock().load_started(&requested, self.now());
    }

    /// Counts the end of a load, after ``observe_load`` if it was measured. ``requested`` is that of ``load_started``.
    fn load_ended(&self, requested: SourceCounts) {
        self.lock().load_ended(&requested);
    }

    /// Number of impossible measurements.
    #[getter]
    fn ignored(&self) -> u64 {
        self.lock().ignored()
    }
}

#[pymethods]
impl LoadDecision {
    /// Number of leading blocks to load.
    #[getter]
    fn blocks(&self) -> u32 {
        self.decision.blocks
    }

    /// Number of these blocks from each source, in the order of ``Source``.
    #[getter]
    fn requested(&self) -> SourceCounts {
        self.decision.requested
    }

    /// "unmeasured": a rate is unknown, so all blocks are loaded; "load": all; "part": some; "compute": none.
    #[getter]
    fn reason(&self) -> &'static str {
        match self.decision.reason {
            Reason::Unmeasured => "unmeasured",
            Reason::Load => "load",
            Reason::Part => "part",
            Reason::Compute => "compute",
        }
    }

    /// Expected seconds of the load; 0 if unknown.
    #[getter]
    fn load_time(&self) -> f64 {
        self.decision.load_time.as_secs_f64()
    }

    /// Expected seconds of computing all blocks; 0 if unknown.
    #[getter]
    fn compute_time(&self) -> f64 {
        self.decision.compute_time.as_secs_f64()
    }

    /// Limit of the wait for ``Transfers.load``; None: no limit.
    #[getter]
    fn limit(&self) -> Option<Limit> {
        self.decision.limit.map(limit_of)
    }

    fn __repr__(&self) -> String {
        format!("LoadDecision(blocks={}, reason={:?})", self.decision.blocks, self.reason())
    }
}

impl LoadPolicy {
    fn now(&self) -> Tick {
        Tick::default().after(self.began.elapsed())
    }

    fn lock(&self) -> MutexGuard<'_, reprise_policy::recompute::LoadPolicy> {
        self.policy.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn limit_of(limit: WaitLimit) -> Limit {
    (limit.bound.as_secs_f64(), limit.per_block.as_secs_f64())
}

/// Converts the limit of a wait.
pub(crate) fn wait_limit((bound, per_block): Limit) -> PyResult<WaitLimit> {
    let seconds = |name, value: f64| match value {
        // Longer than any deadline.
        value if value > 1e9 => Ok(Duration::MAX),
        value => seconds(name, value),
    };
    Ok(WaitLimit { bound: seconds("limit", bound)?, per_block: seconds("limit", per_block)? })
}

fn known(source: u32) -> PyResult<Source> {
    Source::from_number(source)
        .ok_or_else(|| PyValueError::new_err(format!("invalid source {source}: expected a number of Source")))
}
