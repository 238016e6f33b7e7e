//! Python class of the blocking client.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use reprise_client::{
    BlockReport, ClientError, ConnectOptions, LoadOptions, MatchOptions, SaveOptions, Ticket,
};

use crate::arguments::{self, Key, Keys, placed, scope, seconds};
use crate::error::exception;
use crate::geometry::{Layout, Namespace};
use crate::manage::BlocksReport;
use crate::memory::KvMemory;
use crate::outcome::{Durable, Loaded, Saved, source_numbers};

/// Session with this node's agent. Calls block until the agent answers, without the GIL. Several threads may
/// call at the same time. Can be used in ``with``.
///
/// Args:
///     socket: path of the agent's Unix socket. namespace: namespace of the engine's blocks, with their tenant.
///     layout: geometry of the blocks. token_file: file with a service account token of the
///     audience ``reprise.dev``, by which agents in Kubernetes authenticate
///         this pod; read at each connection.
///     name: name in the agent's logs and status, at most 64 bytes.
///     timeout: timeout of a call in seconds.
///
/// Raises:
///     AgentAbsent, Forbidden, Version, BadRequest, Timeout, AgentLost: the session cannot be opened; see the
///     exceptions.
#[pyclass(frozen, module = "reprise")]
#[derive(Debug)]
pub(crate) struct Client {
    client: reprise_client::Client,
    timeout: Duration,
}

#[pymethods]
impl Client {
    #[new]
    #[pyo3(signature = (socket, namespace, layout, *, token_file=None, name="python", timeout=5.0))]
    #[expect(clippy::too_many_arguments, reason = "optional arguments are keyword arguments in Python")]
    fn new(
        py: Python<'_>,
        socket: PathBuf,
        namespace: &Namespace,
        layout: &Layout,
        token_file: Option<PathBuf>,
        name: &str,
        timeout: f64,
    ) -> PyResult<Client> {
        let timeout = seconds("timeout", timeout)?;
        let options =
            connect_options(socket, namespace, layout, token_file)?.client_name(name).call_timeout(timeout);
        let client =
            py.detach(|| reprise_client::Client::connect(options)).map_err(|error| exception(&error))?;
        Ok(Client { client, timeout })
    }

    /// Returns the source of each leading block that is available, as numbers of ``Source``. With ``all_ranks``, the
    /// keys are those of all tensor-parallel ranks, first all of rank 0, then all of rank 1, and so on, and a block is
    /// available only if the parts of all ranks are; its source is that of the slowest part. ``position`` is the number
    /// of blocks before the first one in its chain: 0 if the match begins with the first block, None if it is unknown.
    #[expect(clippy::too_many_arguments, reason = "optional arguments are keyword arguments in Python")]
    #[pyo3(signature = (keys, *, local=false, all_ranks=false, position=None))]
    fn r#match(
        &self,
        py: Python<'_>,
        keys: Keys,
        local: bool,
        all_ranks: bool,
        position: Option<u32>,
    ) -> PyResult<Vec<u32>> {
        let (Keys(keys), options) = (keys, MatchOptions { scope: scope(local), position, inputs: None });
        let matched = py.detach(|| match all_ranks {
            false => self.client.match_keys(&keys, options),
            true => self.client.match_ranks(&keys, options),
        });
        matched.map(|sources| source_numbers(&sources)).map_err(|error| exception(&error))
    }

    /// Saves blocks of the memory under their keys: consecutive blocks of one chain, in order. ``parent`` is
    /// the key of the block before the first one, so that the agent evicts the new blocks before that one.
    /// ``position`` is the number of blocks before the first one in its chain, 0 for the first block of a chain; without
    /// it, the agent uses the position of ``parent`` if it knows that. ``room_wait`` is the time in seconds to wait for
    /// space in a full arena.
    #[pyo3(signature = (keys, memory, blocks, *, parent=None, position=None, priority="normal", room_wait=5.0))]
    #[expect(clippy::too_many_arguments, reason = "optional arguments are keyword arguments in Python")]
    fn save(
        &self,
        py: Python<'_>,
        keys: Keys,
        memory: &KvMemory,
        blocks: Vec<usize>,
        parent: Option<Key>,
        position: Option<u32>,
        priority: &str,
        room_wait: f64,
    ) -> PyResult<Saved> {
        let options = SaveOptions {
            priority: arguments::priority(priority)?,
            parent: parent.map(|Key(key)| key),
            position,
            room_wait: seconds("room_wait", room_wait)?,
            stall_timeout: self.timeout,
            ..SaveOptions::default()
        };
        let blocks = placed(keys, blocks)?;
        let saved = py.detach(|| self.client.save_blocks(&blocks, &*memory.paged, &options));
        let saved = saved.map_err(|error| exception(&error))?;
        saved.stopped_by.as_ref().map_or(Ok(()), |error| Err(exception(error)))?;
        Ok(Saved::from(&saved))
    }

    /// Loads blocks into the memory. Blocks that are not loaded after ``deadline`` seconds are misses. The
    /// contents of blocks that are not "ok" are undefined.
    #[pyo3(signature = (keys, memory, blocks, *, deadline=5.0, local=false))]
    #[expect(clippy::too_many_arguments, reason = "optional arguments are keyword arguments in Python")]
    fn load(
        &self,
        py: Python<'_>,
        keys: Keys,
        memory: &KvMemory,
        blocks: Vec<usize>,
        deadline: f64,
        local: bool,
    ) -> PyResult<Loaded> {
        let options = self.load_options(deadline, local)?;
        let blocks = placed(keys, blocks)?;
        let loaded = py.detach(|| self.client.load_blocks(&blocks, &*memory.paged, &options));
        let loaded = loaded.map_err(|error| exception(&error))?;
        loaded.stopped_by.as_ref().map_or(Ok(()), |error| Err(exception(error)))?;
        Ok(Loaded::from(&loaded))
    }

    /// Loads blocks into this node's DRAM; returns the number of blocks that are there.
    #[pyo3(signature = (keys, *, deadline=5.0, local=false))]
    fn prefetch(&self, py: Python<'_>, keys: Keys, deadline: f64, local: bool) -> PyResult<usize> {
        let Keys(keys) = keys;
        let options = self.load_options(deadline, local)?;
        py.detach(|| self.client.prefetch(&keys, &options)).map_err(|error| exception(&error))
    }

    /// Keeps the copies that blocks have on this node from eviction for ``ttl`` seconds, within the share of the
    /// tenant. Blocks that are pinned get the new time.
    fn pin(&self, py: Python<'_>, keys: Keys, ttl: f64) -> PyResult<BlocksReport> {
        let (Keys(keys), ttl) = (keys, seconds("ttl", ttl)?);
        self.manage(py, move |client| client.pin_blocks(&keys, ttl))
    }

    /// Ends the retention pins of blocks.
    fn unpin(&self, py: Python<'_>, keys: Keys) -> PyResult<BlocksReport> {
        let Keys(keys) = keys;
        self.manage(py, move |client| client.unpin_blocks(&keys))
    }

    /// Starts to read blocks from devices of this node into DRAM, behind all other reads, and does not wait.
    /// ``prefetch`` also fetches them from peers, and waits for them.
    fn start_prefetch(&self, py: Python<'_>, keys: Keys) -> PyResult<BlocksReport> {
        let Keys(keys) = keys;
        self.manage(py, move |client| client.start_prefetch(&keys))
    }

    /// Drops copies in DRAM of blocks that are on a device of this node.
    fn demote(&self, py: Python<'_>, keys: Keys) -> PyResult<BlocksReport> {
        let Keys(keys) = keys;
        self.manage(py, move |client| client.demote_blocks(&keys))
    }

    /// Removes blocks from this node. Copies of other nodes remain.
    fn delete(&self, py: Python<'_>, keys: Keys) -> PyResult<BlocksReport> {
        let Keys(keys) = keys;
        self.manage(py, move |client| client.delete_blocks(&keys))
    }

    /// Waits until each block of a ticket (``Saved.tickets``) is durable or lost.
    #[pyo3(signature = (ticket, timeout=30.0))]
    fn wait_durable(&self, py: Python<'_>, ticket: u64, timeout: f64) -> PyResult<Durable> {
        let timeout = seconds("timeout", timeout)?;
        let outcome = py.detach(|| self.client.wait_durable(Ticket(ticket), timeout));
        outcome.map(Durable::from).map_err(|error| exception(&error))
    }

    /// Returns the agent's counters by name.
    fn stats(&self, py: Python<'_>) -> PyResult<BTreeMap<String, u64>> {
        let stats = py.detach(|| self.client.stats()).map_err(|error| exception(&error))?;
        Ok(stats.into_iter().collect())
    }

    /// Drops clean DRAM copies of blocks on NVMe, so that their next load is cold; returns the number of
    /// dropped copies.
    fn trim(&self, py: Python<'_>) -> PyResult<u64> {
        py.detach(|| self.client.trim()).map_err(|error| exception(&error))
    }

    /// Ends the session; later calls fail.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.client.close());
    }

    /// Whether the session is connected.
    #[getter]
    fn connected(&self) -> bool {
        self.client.is_alive()
    }

    /// Name of the agent's node.
    #[getter]
    fn node(&self) -> &str {
        self.client.node()
    }

    /// Version of the agent.
    #[getter]
    fn agent_version(&self) -> &str {
        self.client.agent_version()
    }

    fn __enter__(this: PyRef<'_, Self>) -> PyRef<'_, Self> {
        this
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, pyo3::types::PyTuple>) {
        self.close(py);
    }
}

impl Client {
    fn manage(
        &self,
        py: Python<'_>,
        command: impl FnOnce(&reprise_client::Client) -> Result<BlockReport, ClientError> + Send,
    ) -> PyResult<BlocksReport> {
        let report = py.detach(|| command(&self.client));
        report.map(BlocksReport::from).map_err(|error| exception(&error))
    }

    fn load_options(&self, deadline: f64, local: bool) -> PyResult<LoadOptions> {
        Ok(LoadOptions {
            deadline: seconds("deadline", deadline)?,
            stall_timeout: self.timeout,
            scope: scope(local),
            ..LoadOptions::default()
        })
    }
}

/// Builds the options of a session from its arguments.
pub(crate) fn connect_options(
    socket: PathBuf,
    namespace: &Namespace,
    layout: &Layout,
    token_file: Option<PathBuf>,
) -> PyResult<ConnectOptions> {
    if namespace.layout != *layout {
        return Err(PyValueError::new_err(format!(
            "the namespace's layout {:?} differs from the session's {:?}: pass the same layout",
            namespace.layout, layout
        )));
    }
    let salt = namespace.tenant.0.clone();
    let options = ConnectOptions::new(socket, namespace.digest, layout.0)
        .tenant(salt.tenant().clone())
        .learned_salt(salt);
    Ok(match token_file {
        Some(path) => options.token_file(path),
        None => options,
    })
}
