//! The engines of claims, and those of this build. Another engine is added here.

use reprise_agent_kubernetes::{Engine, FallbackEngine};
use reprise_io::EngineKind;

use crate::config::IoEngineChoice;

/// Returns the engine of this build for the engine of a claim; `None` if this release does not have it.
pub(super) fn choice(engine: Engine) -> Option<IoEngineChoice> {
    match engine {
        Engine::IoUring => Some(IoEngineChoice::IoUring),
        Engine::Plain => Some(IoEngineChoice::Plain),
        // The device decides: a controller has one engine.
        Engine::UserNvme => Some(IoEngineChoice::Auto),
        Engine::IoUringCmd | Engine::Gds | Engine::GpuQueue => None,
    }
}

/// Returns the engine that a claim allows as a fallback.
pub(super) fn fallback(engine: FallbackEngine) -> Option<IoEngineChoice> {
    match engine {
        FallbackEngine::None => None,
        FallbackEngine::Plain => Some(IoEngineChoice::Plain),
        FallbackEngine::IoUring => Some(IoEngineChoice::IoUring),
    }
}

/// Returns an engine in the terms of claims.
pub(super) fn reported(kind: EngineKind) -> Engine {
    match kind {
        EngineKind::IoUring => Engine::IoUring,
        EngineKind::UserNvme => Engine::UserNvme,
        EngineKind::Plain | EngineKind::Simulated => Engine::Plain,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_engine_is_reported_under_its_own_name() {
        for (kind, engine) in [
            (EngineKind::IoUring, Engine::IoUring),
            (EngineKind::Plain, Engine::Plain),
            (EngineKind::UserNvme, Engine::UserNvme),
        ] {
            assert_eq!(reported(kind), engine);
            assert!(choice(engine).is_some(), "{engine} is an engine of this build");
        }
    }
}
