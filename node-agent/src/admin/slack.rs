//! `/slack/<profile>/<phase>/<tokens>`: what I/O may take by a profile while a batch of so many tokens is in a phase.

use reprise_policy::slack::{Budget, Phase};
use serde::Serialize;

use crate::slack::Effective;

/// The page.
#[derive(Serialize)]
pub(super) struct Page {
    profile: String,
    digest: String,
    phase: &'static str,
    tokens: u32,
    /// Microseconds of each layer; `null` outside of all windows.
    micros: Option<u32>,
    /// Multiprocessors at once; `null` outside of all windows.
    io_sms: Option<u32>,
    /// What happens outside of all windows; `null` within one.
    fallback: Option<&'static str>,
}

/// A phase by its name.
pub(super) fn phase(name: &str) -> Option<Phase> {
    Phase::ALL.into_iter().find(|phase| phase.as_str() == name)
}

impl Page {
    pub(super) fn new(name: &str, found: &Effective, (phase, tokens): (Phase, u32)) -> Page {
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
