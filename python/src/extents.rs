//! Python class of the report about extents, and the way of blocks through them, if this build has it.

use std::sync::Arc;

use pyo3::prelude::*;
use reprise_client::path::BlockPath;

/// What extents have done for an engine.
#[pyclass(frozen, get_all, module = "reprise")]
#[derive(Debug, Default)]
pub(crate) struct ExtentReport {
    /// Name of the backend of loads: "gpu-queue", "staged" or one of their emulations. None: all loads take the agent's
    /// arena, or none was made yet.
    load_backend: Option<String>,
    /// Name of the backend of saves, as for loads.
    save_backend: Option<String>,
    /// Why backends are not used, each with its remedy.
    unusable: Vec<String>,
    /// Number of blocks that were read from extents and match their checksums.
    loaded: u64,
    /// Number of blocks that were written to extents and are durable.
    saved: u64,
    /// Number of blocks on this node's devices that were not read from extents, so that the arena was asked.
    not_loaded: u64,
    /// Number of blocks that were not written to extents, so that they took the arena.
    not_saved: u64,
    /// Number of batches of the rings.
    batches: u64,
    /// Number of transfers of the rings.
    contexts: u64,
    /// Bytes that rings have read, header pages included.
    bytes_read: u64,
    /// Bytes that rings have written.
    bytes_written: u64,
}

#[pymethods]
impl ExtentReport {
    fn __repr__(&self) -> String {
        let Self { load_backend, save_backend, loaded, saved, not_loaded, not_saved, .. } = self;
        let [load, save] = [load_backend, save_backend].map(|name| name.as_deref().unwrap_or("arena"));
        format!(
            "ExtentReport(load_backend={load:?}, save_backend={save:?}, loaded={loaded}, saved={saved}, \
             not_loaded={not_loaded}, not_saved={not_saved})"
        )
    }
}

/// The way of blocks through extents.
#[derive(Debug, Default)]
pub(crate) struct Extents {
    #[cfg(feature = "extents")]
    blocks: Arc<reprise_extents::ExtentBlocks>,
}

#[cfg(feature = "extents")]
impl Extents {
    pub(crate) fn path(&self) -> Option<Arc<dyn BlockPath>> {
        let blocks: Arc<dyn BlockPath> = self.blocks.clone();
        Some(blocks)
    }

    pub(crate) fn report(&self) -> ExtentReport {
        let report = self.blocks.report();
        ExtentReport {
            unusable: report.unusable(),
            load_backend: report.loads.backend,
            save_backend: report.saves.backend,
            loaded: report.loaded,
            saved: report.saved,
            not_loaded: report.not_loaded,
            not_saved: report.not_saved,
            batches: report.rings.batches,
            contexts: report.rings.contexts,
            bytes_read: report.rings.bytes_read,
            bytes_written: report.rings.bytes_written,
        }
    }
}

/// A build without a C++ compiler.
#[cfg(not(feature = "extents"))]
impl Extents {
    #[expect(clippy::unused_self, reason = "as with extents")]
    pub(crate) fn path(&self) -> Option<Arc<dyn BlockPath>> {
        None
    }

    #[expect(clippy::unused_self, reason = "as with extents")]
    pub(crate) fn report(&self) -> ExtentReport {
        let reason = "this package was built without extents: build it with a C++ compiler (python/wheel.sh)";
        ExtentReport { unusable: vec![reason.to_owned()], ..ExtentReport::default() }
    }
}
