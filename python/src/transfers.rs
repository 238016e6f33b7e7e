//! Python class for saves and loads on native threads.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use reprise_client::{LoadOptions, PagedMemory, SaveChain, SaveOptions, TransferId, TransferOptions};

use crate::arguments::{Key, Keys, chain_place, placed, priority, scope, seconds};
use crate::error::exception;
use crate::extents::{ExtentReport, Extents};
use crate::memory::KvMemory;
use crate::outcome::Finished;
use crate::recompute::{Limit, wait_limit};
use crate::session::{Session, closed};

/// Asynchronous saves and loads of an engine's memory, on native threads. Can be used in ``with``.
///
/// Every transfer ends, regardless of the agent's state: a failed load has blocks that are not ok, a failed
/// save has blocks that are unsaved.
///
/// Args:
///     session: session with the agent; while it is not connected, transfers fail at once. memory: memory of
///     the engine. load_deadline: seconds after which the missing part of a load fails. load_stall: seconds
///     without progress and without an answer of the agent after which a load fails. load_standstill: seconds
///     without progress after which a load fails although the agent answers: a device or another
///         node hangs.
///     save_stall: seconds without an answer after which a save fails.
///     room_wait: seconds that a save waits for space in a full arena.
///     layer_wait: seconds that a save by layers waits for the next layer.
///     queued_max: maximum number of queued loads, and of queued saves; further ones fail at once.
///     local: whether to load only blocks of this node.
///     extents: whether blocks move through extents of this node's devices where the agent lends them. Blocks that
///         are elsewhere, and transfers by layers, always take the agent's arena.
#[pyclass(frozen, module = "reprise")]
#[derive(Debug)]
pub(crate) struct Transfers {
    /// Native transfers; `None` after `close`.
    transfers: Mutex<Option<Arc<reprise_client::Transfers>>>,
    extents: Option<Extents>,
}

#[pymethods]
impl Transfers {
    #[new]
    #[pyo3(signature = (session, memory, *, load_deadline=5.0, load_stall=0.5, load_standstill=0.75, save_stall=0.5,
        room_wait=0.5, layer_wait=10.0, queued_max=1024, local=false, extents=false))]
    #[expect(clippy::too_many_arguments, reason = "optional arguments are keyword arguments in Python")]
    fn new(
        session: &Session,
        memory: &KvMemory,
        load_deadline: f64,
        load_stall: f64,
        load_standstill: f64,
        save_stall: f64,
        room_wait: f64,
        layer_wait: f64,
        queued_max: usize,
        local: bool,
        extents: bool,
    ) -> PyResult<Transfers> {
        let load = LoadOptions {
            deadline: seconds("load_deadline", load_deadline)?,
            stall_timeout: seconds("load_stall", load_stall)?,
            standstill_timeout: Some(seconds("load_standstill", load_standstill)?),
            scope: scope(local),
            ..LoadOptions::default()
        };
        let save = SaveOptions {
            room_wait: seconds("room_wait", room_wait)?,
            stall_timeout: seconds("save_stall", save_stall)?,
            layer_wait: seconds("layer_wait", layer_wait)?,
            ..SaveOptions::default()
        };
        if queued_max == 0 {
            return Err(PyValueError::new_err("invalid queued_max 0: expected at least 1"));
        }
        let keeper = session.keeper().ok_or_else(|| exception(&closed()))?;
        let memory: Arc<dyn PagedMemory> = memory.paged.clone();
        let options = TransferOptions { save, load, queued_max };
        let extents = extents.then(Extents::default);
        let path = extents.as_ref().and_then(Extents::path);
        let transfers = reprise_client::Transfers::with_path(keeper, memory, options, path)
            .map_err(|error| exception(&error))?;
        Ok(Transfers { transfers: Mutex::new(Some(Arc::new(transfers))), extents })
    }

    /// Submits a load of blocks into the memory; returns its id. The contents of these blocks are undefined
    /// until it ends. ``limit`` is that of a ``LoadDecision``: the load ends after its first number of seconds from now,
    /// and its second number more for each leading block that has arrived.
    #[pyo3(signature = (keys, blocks, limit=None))]
    fn load(&self, keys: Keys, blocks: Vec<usize>, limit: Option<Limit>) -> PyResult<u64> {
        let blocks = placed(keys, blocks)?;
        let transfers = self.open()?;
        let submitted = match limit {
            Some(limit) => transfers.submit_load_within(blocks, wait_limit(limit)?),
            None => transfers.submit_load(blocks),
        };
        submitted.map(|id| id.0).map_err(|error| exception(&error))
    }

    /// Submits a load that copies layer by layer, for a computation that waits for each layer with
    /// ``wait_layer``; returns its id. Its deadline counts from now. Whether a block is complete is known
    /// only at the end of the load: results computed from an incomplete block must be discarded.
    fn load_by_layers(&self, keys: Keys, blocks: Vec<usize>) -> PyResult<u64> {
        let blocks = placed(keys, blocks)?;
        self.open()?.submit_load_by_layers(blocks).map(|id| id.0).map_err(|error| exception(&error))
    }

    /// Waits for up to ``timeout`` seconds until these loads have ended, or have copied a layer of all blocks
    /// that have not failed; returns whether they have.
    fn wait_layer(&self, py: Python<'_>, ids: Vec<u64>, layer: u32, timeout: f64) -> PyResult<bool> {
        self.wait_detached(py, ids, timeout, |transfers, ids, timeout| {
            transfers.wait_layer(ids, layer, timeout)
        })
    }

    /// Submits a save of consecutive blocks of one chain, in order; returns its id. The blocks must not
    /// change until it ends. ``parent`` is the key of the block before the first one, so that the agent
    /// evicts the new blocks before that one. ``position`` is the number of blocks before the first one in its chain, 0
    /// for the first block of a chain; without it, the agent uses the position of ``parent`` if it knows that.
    /// ``priority`` is "low", "normal" or "high", as for ``Client.save``.
    #[expect(clippy::too_many_arguments, reason = "optional arguments are keyword arguments in Python")]
    #[pyo3(signature = (keys, blocks, parent=None, position=None, priority="normal"))]
    fn save(
        &self,
        keys: Keys,
        blocks: Vec<usize>,
        parent: Option<Key>,
        position: Option<u32>,
        priority: &str,
    ) -> PyResult<u64> {
        let (blocks, chain) = (placed(keys, blocks)?, chain(parent, position, priority)?);
        self.open()?.submit_save(blocks, chain).map(|id| id.0).map_err(|error| exception(&error))
    }

    /// Submits a save of blocks that are filled layer by layer, as reported by ``note_filled``; returns its
    /// id. Filled layers must not change until the save ends. The other arguments are as for ``save``.
    #[expect(clippy::too_many_arguments, reason = "optional arguments are keyword arguments in Python")]
    #[pyo3(signature = (keys, blocks, parent=None, position=None, priority="normal"))]
    fn save_by_layers(
        &self,
        keys: Keys,
        blocks: Vec<usize>,
        parent: Option<Key>,
        position: Option<u32>,
        priority: &str,
    ) -> PyResult<u64> {
        let (blocks, chain) = (placed(keys, blocks)?, chain(parent, position, priority)?);
        self.open()?.submit_save_by_layers(blocks, chain).map(|id| id.0).map_err(|error| exception(&error))
    }

    /// Reports that the first ``layers`` layers of all blocks of these saves by layers are filled. Does not
    /// wait.
    fn note_filled(&self, ids: Vec<u64>, layers: u32) -> PyResult<()> {
        let transfers = self.open()?;
        ids.into_iter().for_each(|id| transfers.note_filled(TransferId(id), layers));
        Ok(())
    }

    /// Returns the transfers that have ended since the last call. Does not wait.
    fn finished(&self) -> Vec<Finished> {
        let ended = self.lock().as_ref().map(|transfers| transfers.finished());
        ended.unwrap_or_default().iter().map(Finished::from).collect()
    }

    /// Waits for up to ``timeout`` seconds until these transfers have ended; returns whether they have.
    /// ``finished`` still returns them afterwards.
    fn wait(&self, py: Python<'_>, ids: Vec<u64>, timeout: f64) -> PyResult<bool> {
        self.wait_detached(py, ids, timeout, |transfers, ids, timeout| transfers.wait(ids, timeout))
    }

    /// Returns what extents have done so far; None unless they were requested.
    fn extents(&self) -> Option<ExtentReport> {
        self.extents.as_ref().map(Extents::report)
    }

    /// Number of transfers that have not ended.
    #[getter]
    fn unfinished(&self) -> usize {
        self.lock().as_ref().map_or(0, |transfers| transfers.unfinished())
    }

    /// Stops the threads: running transfers end after their current part, queued transfers fail. The memory
    /// is not accessed after this call.
    fn close(&self, py: Python<'_>) {
        let transfers = self.lock().take();
        if let Some(transfers) = &transfers {
            transfers.cancel();
        }
        py.detach(|| drop(transfers));
    }

    fn __enter__(this: PyRef<'_, Self>) -> PyRef<'_, Self> {
        this
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, pyo3::types::PyTuple>) {
        self.close(py);
    }
}

impl Transfers {
    /// Waits without the GIL.
    fn wait_detached(
        &self,
        py: Python<'_>,
        ids: Vec<u64>,
        timeout: f64,
        wait: impl FnOnce(&reprise_client::Transfers, &[TransferId], Duration) -> bool + Send,
    ) -> PyResult<bool> {
        let timeout = seconds("timeout", timeout)?;
        let ids: Vec<TransferId> = ids.into_iter().map(TransferId).collect();
        let transfers = self.open()?;
        let waited = py.detach(|| {
            let waited = wait(&transfers, &ids, timeout);
            // Dropping the last reference waits for threads, so drop it without the GIL.
            drop(transfers);
            waited
        });
        Ok(waited)
    }

    fn open(&self) -> PyResult<Arc<reprise_client::Transfers>> {
        self.lock().clone().ok_or_else(|| exception(&closed()))
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<reprise_client::Transfers>>> {
        self.transfers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn chain(parent: Option<Key>, position: Option<u32>, name: &str) -> PyResult<SaveChain> {
    Ok(SaveChain { place: chain_place(parent, position), priority: Some(priority(name)?) })
}

impl Drop for Transfers {
    fn drop(&mut self) {
        // Dropping waits for threads, so release the GIL.
        let transfers = self.lock().take();
        Python::attach(|py| py.detach(|| drop(transfers)));
    }
}
