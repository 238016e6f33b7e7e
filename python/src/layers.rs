//! Python classes for reports about the layers that an engine computes.

use std::sync::{Mutex, PoisonError};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use reprise_client::ClientError;
use reprise_policy::session::{LayerReport, MODEL_BYTES_MAX};
use reprise_policy::slack::content::MICROS_MAX;
use reprise_policy::slack::{Computation, Phase};

use crate::session::{Session, log_debug};

/// What the slack profile of a model predicts and allows during a computation. All numbers are 0 if the agent
/// has no profile for the model; ``slack_micros`` is 0 outside of the profile's windows.
#[pyclass(frozen, get_all, module = "reprise")]
#[derive(Debug)]
pub(crate) struct LayerGuidance {
    /// Microseconds of one layer without I/O.
    layer_micros: u32,
    /// Microseconds of one layer that I/O may use.
    slack_micros: u32,
    /// Multiprocessors that I/O may use at the same time.
    io_sms: u32,
    /// IOCBs of the largest read kernel that fits the slack.
    read_iocbs: u32,
    /// IOCBs of the largest write kernel that fits the slack.
    write_iocbs: u32,
}

/// Sent report of a layer. It may be dropped at any time.
#[pyclass(frozen, module = "reprise")]
#[derive(Debug)]
pub(crate) struct PendingReport {
    pending: Mutex<reprise_client::PendingReport>,
}

#[pymethods]
impl PendingReport {
    /// Returns what the profile predicts and allows, or None if the answer is still pending. Does not wait. Any
    /// error is an answer of an agent without a profile.
    fn poll(&self, py: Python<'_>) -> Option<LayerGuidance> {
        let polled =
            self.pending.lock().unwrap_or_else(PoisonError::into_inner).poll(std::time::Duration::ZERO);
        let guidance = polled.unwrap_or_else(|error| {
            log_debug(py, &error);
            Some(reprise_policy::session::LayerGuidance::default())
        })?;
        Some(LayerGuidance {
            layer_micros: guidance.layer_micros,
            slack_micros: guidance.slack_micros,
            io_sms: guidance.io_sms,
            read_iocbs: guidance.read_iocbs,
            write_iocbs: guidance.write_iocbs,
        })
    }
}

/// Checks a report's arguments.
fn report(
    model: &str,
    phase: Option<&str>,
    (input_tokens, prefix_tokens): (u32, u32),
    previous_micros: Option<u32>,
) -> PyResult<LayerReport> {
    if model.is_empty() || model.len() > MODEL_BYTES_MAX {
        let bytes = model.len();
        return Err(PyValueError::new_err(format!(
            "invalid model of {bytes} bytes: expected 1 to {MODEL_BYTES_MAX}"
        )));
    }
    if previous_micros.is_some_and(|micros| micros == 0 || micros > MICROS_MAX) {
        return Err(PyValueError::new_err(format!("invalid previous_micros: expected 1 to {MICROS_MAX}")));
    }
    let phase = match phase {
        None => None,
        Some("prefill") => Some(Phase::Prefill),
        Some("decode") => Some(Phase::Decode),
        Some(other) => {
            return Err(PyValueError::new_err(format!(
                "invalid phase {other:?}: expected 'prefill', 'decode' or None"
            )));
        }
    };
    let computation = phase.map(|phase| Computation { phase, input_tokens, prefix_tokens });
    Ok(LayerReport { model: model.to_owned(), computation, previous_layer_micros: previous_micros })
}

impl Session {
    /// Sends a report to an agent that answers; `None` without one.
    pub(crate) fn send_report(
        &self,
        py: Python<'_>,
        (model, phase): (&str, Option<&str>),
        tokens: (u32, u32),
        previous_micros: Option<u32>,
    ) -> PyResult<Option<PendingReport>> {
        let report = report(model, phase, tokens, previous_micros)?;
        let Some(client) = self.keeper().and_then(|keeper| keeper.responsive()) else {
            return Ok(None);
        };
        let sent: Result<_, ClientError> = client.start_layer_report(&report);
        Ok(match sent {
            Ok(pending) => Some(PendingReport { pending: Mutex::new(pending) }),
            Err(error) => {
                log_debug(py, &error);
                None
            }
        })
    }
}
