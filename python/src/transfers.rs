//! Saves and loads on native threads, for Python.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use reprise_client::{LoadOptions, PagedMemory, SaveOptions, TransferId, TransferOptions};

use crate::arguments::{Key, Keys, placed, scope, seconds};
use crate::error::raised;
use crate::memory::KvMemory;
use crate::outcome::Finished;
use crate::session::{Session, closed};

/// Saves from and loads to a memory, on native threads: submitted now, looked at later. Usable in ``with``.
///
/// Every transfer ends, whatever happens to the agent: a load then with blocks that are not ok, a save with blocks that are
/// unsaved.
///
/// Args:
///     session: whose agent; without one, transfers end at once undone.
///     memory: of the engine.
///     load_deadline: seconds after which the missing part of a load is given up.
///     load_stall: seconds after which a load is given up whose agent makes no progress and does not answer.
///     load_standstill: seconds after which a load is given up of which nothing comes although the agent answers: another
///         node hangs, or a device.
///     save_stall: seconds after which a save without an answer is given up.
///     room_wait: seconds that a save waits for room in a full arena.
///     layer_wait: seconds that a save by layers waits for the next one.
///     queued_max: loads, and saves, that may wait; one more ends undone at once.
///     local: whether blocks of peers are left out.
#[pyclass(frozen, module = "reprise")]
#[derive(Debug)]
pub(crate) struct Transfers {
    /// `None`: closed.
    transfers: Mutex<Option<Arc<reprise_client::Transfers>>>,
}

#[pymethods]
impl Transfers {
    #[new]
    #[pyo3(signature = (session, memory, *, load_deadline=5.0, load_stall=0.5, load_standstill=0.75, save_stall=0.5,
        room_wait=0.5, layer_wait=10.0, queued_max=1024, local=false))]
    #[expect(clippy::too_many_arguments, reason = "those that are optional are named in Python")]
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
            return Err(PyValueError::new_err("queued_max is 0: nothing could ever be transferred"));
        }
        let keeper = session.keeper().ok_or_else(|| raised(&closed()))?;
        let memory: Arc<dyn PagedMemory> = memory.paged.clone();
        let options = TransferOptions { save, load, queued_max };
        let transfers =
            reprise_client::Transfers::new(keeper, memory, options).map_err(|error| raised(&error))?;
        Ok(Transfers { transfers: Mutex::new(Some(Arc::new(transfers))) })
    }

    /// Submits a load of blocks to their places in the memory; returns its id. The places hold nothing to be used until it
    /// has ended.
    fn load(&self, keys: Keys, blocks: Vec<usize>) -> PyResult<u64> {
        let blocks = placed(keys, blocks)?;
        self.open()?.submit_load(blocks).map(|id| id.0).map_err(|error| raised(&error))
    }

    /// Submits a load that copies the first layers of all blocks before the others, for a computation that waits for each by
    /// ``wait_layer``; returns its id. Its deadline counts from now. Whether a block is whole is known when the load has ended:
    /// what was computed from one that is not is to be thrown away.
    fn load_by_layers(&self, keys: Keys, blocks: Vec<usize>) -> PyResult<u64> {
        let blocks = placed(keys, blocks)?;
        self.open()?.submit_load_by_layers(blocks).map(|id| id.0).map_err(|error| raised(&error))
    }

    /// Waits until these loads have copied a layer of all blocks that have not failed, or have ended, for so many seconds;
    /// whether they have.
    fn wait_layer(&self, py: Python<'_>, ids: Vec<u64>, layer: u32, timeout: f64) -> PyResult<bool> {
        self.waiting(py, ids, timeout, |transfers, ids, timeout| transfers.wait_layer(ids, layer, timeout))
    }

    /// Submits a save of consecutive blocks of one chain, in its order; returns its id. They must not change until it has ended.
    /// ``parent``: key of the block before the first one, so that the agent evicts the new blocks before that one.
    #[pyo3(signature = (keys, blocks, parent=None))]
    fn save(&self, keys: Keys, blocks: Vec<usize>, parent: Option<Key>) -> PyResult<u64> {
        let (blocks, parent) = (placed(keys, blocks)?, parent.map(|Key(key)| key));
        self.open()?.submit_save(blocks, parent).map(|id| id.0).map_err(|error| raised(&error))
    }

    /// Submits a save of blocks that are filled layer by layer, as ``note_filled`` tells; returns its id. What was told filled
    /// must not change until it has ended.
    #[pyo3(signature = (keys, blocks, parent=None))]
    fn save_by_layers(&self, keys: Keys, blocks: Vec<usize>, parent: Option<Key>) -> PyResult<u64> {
        let (blocks, parent) = (placed(keys, blocks)?, parent.map(|Key(key)| key));
        self.open()?.submit_save_by_layers(blocks, parent).map(|id| id.0).map_err(|error| raised(&error))
    }

    /// So many leading layers of all blocks of these saves by layers are filled. Does not wait.
    fn note_filled(&self, ids: Vec<u64>, layers: u32) -> PyResult<()> {
        let transfers = self.open()?;
        ids.into_iter().for_each(|id| transfers.note_filled(TransferId(id), layers));
        Ok(())
    }

    /// The transfers that have ended since the last call. Does not wait.
    fn finished(&self) -> Vec<Finished> {
        let ended = self.lock().as_ref().map(|transfers| transfers.finished());
        ended.unwrap_or_default().iter().map(Finished::from).collect()
    }

    /// Waits until these have ended, for so many seconds; whether they have. ``finished`` tells them all the same.
    fn wait(&self, py: Python<'_>, ids: Vec<u64>, timeout: f64) -> PyResult<bool> {
        self.waiting(py, ids, timeout, |transfers, ids, timeout| transfers.wait(ids, timeout))
    }

    /// Transfers that have not ended.
    #[getter]
    fn unfinished(&self) -> usize {
        self.lock().as_ref().map_or(0, |transfers| transfers.unfinished())
    }

    /// Ends the threads: transfers at work end with the part that they are at, what waits ends undone. The memory is not
    /// touched after it.
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
    /// Waits while other Python threads run.
    fn waiting(
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
            // The last one waits for threads.
            drop(transfers);
            waited
        });
        Ok(waited)
    }

    fn open(&self) -> PyResult<Arc<reprise_client::Transfers>> {
        self.lock().clone().ok_or_else(|| raised(&closed()))
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<reprise_client::Transfers>>> {
        self.transfers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Transfers {
    fn drop(&mut self) {
        // Waits for threads: other Python threads run meanwhile.
        let transfers = self.lock().take();
        Python::attach(|py| py.detach(|| drop(transfers)));
    }
}
