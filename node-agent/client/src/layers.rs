//! Reports about the layers that an engine computes, for the scheduler of slack.
//!
//! An engine reports between two steps and must not wait: it starts a report, and polls the answer in a later step.

use std::sync::Arc;
use std::time::Duration;

use reprise_policy::session::{LayerGuidance, LayerReport};
use reprise_policy::slack::Phase;
use reprise_proto::local::{self, request, response};

use crate::client::{Client, Session};
use crate::connection::PendingCall;
use crate::error::ClientError;
use crate::matching::SendMode;

const CALL: &str = "report layer";

/// A sent report. It may be dropped at any time.
#[derive(Debug)]
pub struct PendingReport {
    session: Arc<Session>,
    state: ReportState,
}

#[derive(Debug)]
enum ReportState {
    Sent(PendingCall),
    Answered(LayerGuidance),
}

impl Client {
    /// Reports the computation that the engine begins, and the measured time of a layer of the one reported before.
    /// Returns what the slack profile of the model allows meanwhile.
    ///
    /// # Errors
    /// `BadRequest` for an invalid model or time, `Timeout`, `AgentLost`.
    pub fn report_layer(&self, report: &LayerReport) -> Result<LayerGuidance, ClientError> {
        let timeout = self.session().call_timeout();
        PendingReport::start(self.session(), report, SendMode::Blocking)?
            .poll(Duration::MAX)?
            .ok_or(ClientError::Timeout { call: CALL, after: timeout })
    }

    /// Sends a report and returns without waiting for the answer or for room in the socket.
    ///
    /// # Errors
    /// `Busy`, `AgentLost`.
    pub fn start_layer_report(&self, report: &LayerReport) -> Result<PendingReport, ClientError> {
        PendingReport::start(self.session(), report, SendMode::NonBlocking)
    }
}

impl PendingReport {
    fn start(
        session: &Arc<Session>,
        report: &LayerReport,
        sending: SendMode,
    ) -> Result<PendingReport, ClientError> {
        let (body, timeout) = (request::Body::ReportLayer(message(report)), session.call_timeout());
        let sent = match sending {
            SendMode::Blocking => session.connection().begin(CALL, body, timeout)?,
            SendMode::NonBlocking => session.connection().try_begin(CALL, body, timeout)?,
        };
        Ok(PendingReport { session: Arc::clone(session), state: ReportState::Sent(sent) })
    }

    /// Returns what the profile predicts and allows if the answer arrives within `patience`. `None`: poll again.
    /// Repeated calls return the same answer.
    ///
    /// # Errors
    /// `BadRequest` for an invalid model or time, `Timeout` (the session's call timeout has passed), `AgentLost`.
    pub fn poll(&mut self, patience: Duration) -> Result<Option<LayerGuidance>, ClientError> {
        let sent = match &mut self.state {
            ReportState::Answered(guidance) => return Ok(Some(*guidance)),
            ReportState::Sent(sent) => sent,
        };
        let Some(answer) = sent.poll(patience)? else { return Ok(None) };
        let response::Body::LayerReported(reported) = answer else {
            return Err(self.session.broken(ClientError::unexpected(CALL)));
        };
        let guidance = LayerGuidance {
            layer_micros: reported.layer_us,
            slack_micros: reported.slack_us,
            io_sms: reported.io_sms,
            read_iocbs: reported.read_iocbs,
            write_iocbs: reported.write_iocbs,
        };
        self.state = ReportState::Answered(guidance);
        Ok(Some(guidance))
    }
}

fn message(report: &LayerReport) -> local::ReportLayer {
    let (phase, input_tokens, prefix_tokens) = match report.computation {
        None => (local::ComputePhase::ComputeIdle, 0, 0),
        Some(of) => {
            let phase = match of.phase {
                Phase::Prefill => local::ComputePhase::ComputePrefill,
                Phase::Decode => local::ComputePhase::ComputeDecode,
            };
            (phase, of.input_tokens, of.prefix_tokens)
        }
    };
    local::ReportLayer {
        model: report.model.clone(),
        phase: phase as i32,
        input_tokens,
        prefix_tokens,
        previous_layer_us: report.previous_layer_micros.unwrap_or_default(),
    }
}
