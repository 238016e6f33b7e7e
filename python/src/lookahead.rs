//! Python classes for hints about what an engine runs next.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use reprise_client::ClientError;
use reprise_policy::prefetch::{BegunRequest, HINT_VERSION, Lookahead, LookaheadRequest, RequestState};
use reprise_policy::session::Ranks;

use crate::arguments::Keys;
use crate::error::exception;
use crate::session::{Session, log_debug};

/// Answer to a hint.
#[pyclass(frozen, get_all, module = "reprise")]
#[derive(Debug)]
pub(crate) struct LookaheadReport {
    /// Iterations that the agent looks ahead.
    window: u32,
    /// Parts of the hint that the agent ignored.
    ignored: u32,
    /// Listed requests whose blocks are all in DRAM.
    ready: Vec<u64>,
}

/// Sent hint. It may be dropped at any time.
#[pyclass(frozen, module = "reprise")]
#[derive(Debug)]
pub(crate) struct PendingLookahead {
    pending: Mutex<reprise_client::PendingLookahead>,
}

#[pymethods]
impl PendingLookahead {
    /// Returns the agent's answer, or None if it is still pending. Does not wait.
    ///
    /// Raises:
    ///     BadRequest: a list is too long, or the keys do not match the ranks. Timeout, AgentLost.
    fn poll(&self) -> PyResult<Option<LookaheadReport>> {
        let polled = self.pending.lock().unwrap_or_else(PoisonError::into_inner).poll(Duration::ZERO);
        let report = polled.map_err(|error| exception(&error))?;
        Ok(report.map(|report| LookaheadReport {
            window: report.window,
            ignored: report.ignored,
            ready: report.ready,
        }))
    }
}

/// A request that waits: its number, iterations until it runs, confidence, and keys.
pub(crate) type WaitingRequest = (u64, u32, f64, Keys);

fn request((request, iterations, confidence, Keys(keys)): WaitingRequest) -> PyResult<LookaheadRequest> {
    if !(0.0..=1.0).contains(&confidence) {
        return Err(PyValueError::new_err(format!("invalid confidence {confidence}: expected 0 to 1")));
    }
    // At most 1,000.
    let confidence = (confidence * 1000.0).round() as u16;
    Ok(LookaheadRequest { request, iterations, confidence, keys })
}

/// A request that has begun: its number, whether it is preempted, the number of its first key here, and the keys.
pub(crate) type ListedRequest = (u64, bool, u32, Keys);

fn begun((request, is_preempted, first, Keys(keys)): ListedRequest) -> BegunRequest {
    let state = if is_preempted { RequestState::Preempted } else { RequestState::Running };
    BegunRequest { request, state, first, keys }
}

impl Session {
    /// Sends a hint to an agent that answers; `None` without one.
    pub(crate) fn send_lookahead(
        &self,
        py: Python<'_>,
        (iteration, all_ranks): (f64, bool),
        (requests, cancelled): (Vec<WaitingRequest>, Vec<u64>),
        listed: Option<Vec<ListedRequest>>,
    ) -> PyResult<Option<PendingLookahead>> {
        let lookahead = Lookahead {
            version: HINT_VERSION,
            iteration: crate::arguments::seconds("iteration", iteration)?,
            requests: requests.into_iter().map(request).collect::<PyResult<_>>()?,
            cancelled,
            begun: listed.map(|listed| listed.into_iter().map(begun).collect()),
            ranks: if all_ranks { Ranks::All } else { Ranks::Own },
        };
        let Some(client) = self.keeper().and_then(|keeper| keeper.responsive()) else {
            return Ok(None);
        };
        let sent: Result<_, ClientError> = client.start_lookahead(&lookahead);
        Ok(match sent {
            Ok(pending) => Some(PendingLookahead { pending: Mutex::new(pending) }),
            Err(error) => {
                log_debug(py, &error);
                None
            }
        })
    }
}
