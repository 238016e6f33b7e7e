//! The ways of blocks between KV memory and devices, in the order in which they are tried.

use std::fmt;

use reprise_policy::session::TransferBackend;

/// A way of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum BackendKind {
    /// A GPU drives NVMe queue pairs.
    GpuQueue,
    /// cuFile moves data between device and GPU memory.
    Gds,
    /// The agent reads into the arena; copy engine and kernels of the GPU move it.
    Staged,
    /// The agent reads into the arena; the CPU copies it.
    Host,
}

impl BackendKind {
    /// All kinds, in the order in which they are tried.
    pub const ALL: [BackendKind; 4] =
        [BackendKind::GpuQueue, BackendKind::Gds, BackendKind::Staged, BackendKind::Host];
}

impl fmt::Display for BackendKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            BackendKind::GpuQueue => "gpu-queue",
            BackendKind::Gds => "gds",
            BackendKind::Staged => "staged",
            BackendKind::Host => "host",
        })
    }
}

/// An open way of blocks.
pub trait Backend {
    /// Returns the kind of the backend.
    fn kind(&self) -> BackendKind;

    /// Reports whether threads of the host, or an emulated controller, stand in for the hardware of the kind.
    fn is_emulated(&self) -> bool;

    /// Returns the name for logs, metrics and results; it states an emulation.
    fn name(&self) -> &'static str {
        self.transfer_backend().name()
    }

    /// Returns the value that a session states to its agent.
    fn transfer_backend(&self) -> TransferBackend {
        match (self.kind(), self.is_emulated()) {
            (BackendKind::GpuQueue, false) => TransferBackend::GpuQueue,
            (BackendKind::GpuQueue, true) => TransferBackend::GpuQueueEmulated,
            (BackendKind::Gds, _) => TransferBackend::Gds,
            (BackendKind::Staged, false) => TransferBackend::Staged,
            (BackendKind::Staged, true) => TransferBackend::StagedHost,
            (BackendKind::Host, _) => TransferBackend::Host,
        }
    }
}

/// Why a kind is not used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unusable {
    /// The kind.
    pub kind: BackendKind,
    /// The reason, with the remedy.
    pub reason: String,
}

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is not used: {}", self.kind, self.reason)
    }
}

/// The chosen way, and why the ways before it are not used.
#[derive(Debug)]
pub struct BackendChoice<B> {
    /// The first way that could be opened.
    pub backend: B,
    /// Ways that were tried before.
    pub unusable: Vec<Unusable>,
}

/// Opens the first possible way, in the order of [`BackendKind::ALL`]; `open` returns why a kind cannot be used. Each
/// reason is logged.
///
/// # Errors
/// The reasons of all kinds, if none can be used.
pub fn choose<B>(
    open: impl FnMut(BackendKind) -> Result<B, String>,
) -> Result<BackendChoice<B>, Vec<Unusable>> {
    let mut open = open;
    let mut unusable = Vec::new();
    for kind in BackendKind::ALL {
        match open(kind) {
            Ok(backend) => return Ok(BackendChoice { backend, unusable }),
            Err(reason) => {
                tracing::info!(backend = %kind, reason, "backend not used");
                unusable.push(Unusable { kind, reason });
            }
        }
    }
    Err(unusable)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Rings;

    impl Backend for Rings {
        fn kind(&self) -> BackendKind {
            BackendKind::GpuQueue
        }

        fn is_emulated(&self) -> bool {
            true
        }
    }

    #[test]
    fn first_usable_backend_is_taken_and_the_others_have_reasons() {
        let mut tried = Vec::new();
        let choice = choose(|kind| {
            tried.push(kind);
            match kind {
                BackendKind::Staged => Ok(kind),
                other => Err(format!("no hardware for {other}")),
            }
        });
        let choice = choice.expect("one can be used");
        assert_eq!(choice.backend, BackendKind::Staged);
        assert_eq!(tried, [BackendKind::GpuQueue, BackendKind::Gds, BackendKind::Staged]);
        let texts: Vec<String> = choice.unusable.iter().map(ToString::to_string).collect();
        assert_eq!(
            texts,
            ["gpu-queue is not used: no hardware for gpu-queue", "gds is not used: no hardware for gds"]
        );
    }

    #[test]
    fn all_reasons_are_returned_if_no_backend_can_be_used() {
        let refused = choose(|kind| Err::<(), _>(kind.to_string())).expect_err("none");
        assert_eq!(refused.len(), BackendKind::ALL.len());
    }

    #[test]
    fn name_states_an_emulation() {
        assert_eq!(Rings.name(), "gpu-queue-emulated");
    }
}
