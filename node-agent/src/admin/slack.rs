//! `/slack/<profile>/<phase>/<input>/<prefix>`: the I/O budget of a slack profile for a batch with this input
//! and prefix length in tokens, and the launch sizes that fit it.

use reprise_policy::slack::{Budget, Computation, Direction, Phase};
use serde::Serialize;

use crate::slack::ActiveProfile;

/// JSON object of a budget.
#[derive(Serialize)]
pub(super) struct Page {
    profile: String,
    digest: String,
    phase: &'static str,
    input_tokens: u32,
    prefix_tokens: u32,
    /// Computation of one layer in microseconds; `null` if it was not measured.
    layer_micros: Option<u32>,
    /// Usable slack of each layer in microseconds; `null` outside of all windows.
    micros: Option<u32>,
    /// Multiprocessors that I/O may use concurrently; `null` outside of all windows.
    io_sms: Option<u32>,
    /// Maximum IOCBs of a read kernel that fits the window.
    read_iocbs: u32,
    /// Maximum IOCBs of a write kernel that fits the window.
    write_iocbs: u32,
    /// Fallback outside of all windows; `null` within one.
    fallback: Option<&'static str>,
}

/// Returns the phase with this name.
pub(super) fn phase(name: &str) -> Option<Phase> {
    Phase::ALL.into_iter().find(|phase| phase.as_str() == name)
}

impl Page {
    pub(super) fn new(name: &str, found: &ActiveProfile, of: Computation) -> Page {
        let budget = found.profile.budget(of);
        let (micros, io_sms, fallback) = match budget {
            Budget::Window { micros, io_sms } => (Some(micros), Some(io_sms), None),
            Budget::Outside(fallback) => (None, None, Some(fallback.as_str())),
        };
        Page {
            profile: name.to_owned(),
            digest: found.digest.clone(),
            phase: of.phase.as_str(),
            input_tokens: of.input_tokens,
            prefix_tokens: of.prefix_tokens,
            layer_micros: found.profile.window(of).map(|window| window.layer_micros),
            micros,
            io_sms,
            read_iocbs: found.profile.fitting(Direction::Read, budget),
            write_iocbs: found.profile.fitting(Direction::Write, budget),
            fallback,
        }
    }
}
