//! `/slack/<profile>/<phase>/<tokens>`: the I/O budget of a slack profile for a batch with this number of
//! tokens in a phase.

use reprise_policy::slack::{Budget, Phase};
use serde::Serialize;

use crate::slack::ActiveProfile;

/// JSON object of a budget.
#[derive(Serialize)]
pub(super) struct Page {
    profile: String,
    digest: String,
    phase: &'static str,
    tokens: u32,
    /// Slack of each layer in microseconds; `null` outside of all windows.
    micros: Option<u32>,
    /// Multiprocessors that I/O may use concurrently; `null` outside of all windows.
    io_sms: Option<u32>,
    /// Fallback outside of all windows; `null` within one.
    fallback: Option<&'static str>,
}

/// Returns the phase with this name.
pub(super) fn phase(name: &str) -> Option<Phase> {
    Phase::ALL.into_iter().find(|phase| phase.as_str() == name)
}

impl Page {
    pub(super) fn new(name: &str, found: &ActiveProfile, (phase, tokens): (Phase, u32)) -> Page {
        let (micros, io_sms, fallback) = match found.profile.budget(phase, tokens) {
            Budget::Window { micros, io_sms } => (Some(micros), Some(io_sms), None),
            Budget::Outside(fallback) => (None, None, Some(fallback.as_str())),
        };
        Page {
            profile: name.to_owned(),
            digest: found.digest.clone(),
            phase: phase.as_str(),
            tokens,
            micros,
            io_sms,
            fallback,
        }
    }
}
