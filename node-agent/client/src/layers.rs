//! Reports about the layers that an engine computes, for the scheduler of slack.

use reprise_policy::session::{LayerGuidance, LayerReport};
use reprise_policy::slack::Phase;
use reprise_proto::local::{self, request, response};

use crate::client::Client;
use crate::error::ClientError;

impl Client {
    /// Reports the computation that the engine begins, and the measured time of a layer of the one reported before.
    /// Returns what the slack profile of the model allows meanwhile.
    ///
    /// # Errors
    /// `BadRequest` for an invalid model or time, `Timeout`, `AgentLost`.
    pub fn report_layer(&self, report: &LayerReport) -> Result<LayerGuidance, ClientError> {
        let (phase, of) = match report.computation {
            None => (local::ComputePhase::ComputeIdle, (0, 0)),
            Some(of) => {
                let phase = match of.phase {
                    Phase::Prefill => local::ComputePhase::ComputePrefill,
                    Phase::Decode => local::ComputePhase::ComputeDecode,
                };
                (phase, (of.input_tokens, of.prefix_tokens))
            }
        };
        let body = local::ReportLayer {
            model: report.model.clone(),
            phase: phase as i32,
            input_tokens: of.0,
            prefix_tokens: of.1,
            previous_layer_us: report.previous_layer_micros.unwrap_or_default(),
        };
        match self.session().call("report layer", request::Body::ReportLayer(body))? {
            response::Body::LayerReported(reported) => Ok(LayerGuidance {
                layer_micros: reported.layer_us,
                slack_micros: reported.slack_us,
                io_sms: reported.io_sms,
                read_iocbs: reported.read_iocbs,
                write_iocbs: reported.write_iocbs,
            }),
            _ => Err(self.session().broken(ClientError::unexpected("report layer"))),
        }
    }
}
