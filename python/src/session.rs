//! Python class of a session that reconnects automatically.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use reprise_client::{ClientError, KeeperStatus, MatchOptions, SessionKeeper};

use crate::arguments::{Keys, scope, seconds};
use crate::client::connect_options;
use crate::error::{exception, message};
use crate::geometry::{Layout, Namespace};
use crate::layers::PendingReport;
use crate::lookahead::{ListedRequest, PendingLookahead, WaitingRequest};
use crate::manage::PendingBlocks;
use crate::outcome::source_numbers;

/// Session with this node's agent that reconnects automatically: the agent may start later, stop and return.
/// The constructor and all methods except ``check``, ``wait_connected`` and ``stats`` do not wait for the
/// agent. Changes of the session's state are logged by the logger ``reprise`` on the next call of
/// ``connected``, ``start_match`` or ``wait_connected``.
///
/// Args:
///     socket: path of the agent's Unix socket. namespace: namespace of the engine's blocks, with their tenant.
///     layout: geometry of the blocks. token_file: file with a service account token of the
///     audience ``reprise.dev``, by which agents in Kubernetes authenticate
///         this pod; read at each connection.
///     name: name in the agent's logs and status, at most 64 bytes.
///     timeout: timeout of a call in seconds.
#[pyclass(frozen, module = "reprise")]
#[derive(Debug)]
pub(crate) struct Session {
    /// Session keeper; `None` after `close`.
    keeper: Mutex<Option<Arc<SessionKeeper>>>,
    /// Last logged status.
    logged: Mutex<KeeperStatus>,
}

/// Pending match. It may be dropped at any time.
#[pyclass(frozen, module = "reprise")]
#[derive(Debug)]
pub(crate) struct PendingMatch {
    pending: Mutex<reprise_client::PendingMatch>,
}

#[pymethods]
impl Session {
    #[new]
    #[pyo3(signature = (socket, namespace, layout, *, token_file=None, name="python", timeout=5.0))]
    #[expect(clippy::too_many_arguments, reason = "optional arguments are keyword arguments in Python")]
    fn new(
        socket: PathBuf,
        namespace: &Namespace,
        layout: &Layout,
        token_file: Option<PathBuf>,
        name: &str,
        timeout: f64,
    ) -> PyResult<Session> {
        let options = connect_options(socket, namespace, layout, token_file)?
            .client_name(name)
            .call_timeout(seconds("timeout", timeout)?);
        let keeper = SessionKeeper::new(options).map_err(|error| exception(&error))?;
        Ok(Session { keeper: Mutex::new(Some(Arc::new(keeper))), logged: Mutex::default() })
    }

    /// Whether the session is connected.
    #[getter]
    fn connected(&self, py: Python<'_>) -> bool {
        self.log_changes(py);
        self.status().is_connected
    }

    /// Whether the agent is suspected to hang: no match is sent to it until it answers again.
    #[getter]
    fn suspected(&self) -> bool {
        self.status().is_suspected
    }

    /// Number of sessions opened so far.
    #[getter]
    fn sessions(&self) -> u64 {
        self.status().sessions
    }

    /// Message of the last error that ended or prevented a session, or None.
    #[getter]
    fn last_error(&self) -> Option<String> {
        self.status().last_error
    }

    /// Name of that error's exception, or None.
    #[getter]
    fn last_error_kind(&self) -> Option<&'static str> {
        self.status().last_error_kind
    }

    /// Checks for up to ``timeout`` seconds whether the agent permanently rejects this session's blocks. An
    /// agent that is absent, full or hanging does not raise an error.
    ///
    /// Raises:
    ///     Version, Forbidden, BadRequest: the agent rejects the session, or a reservation for one block; the
    ///     message has the remedy.
    fn check(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        let timeout = seconds("timeout", timeout)?;
        let keeper = self.keeper();
        let refusal = py.detach(|| keeper.and_then(|keeper| keeper.refusal(timeout)));
        refusal.map_or(Ok(()), |error| Err(exception(&error)))
    }

    /// Starts a match of at most 8,192 keys; returns None if no agent answers. With ``all_ranks``, the keys are those
    /// of all tensor-parallel ranks, first all of rank 0, then all of rank 1, and so on, and a block is found only if
    /// the parts of all ranks are. ``position`` is the number of blocks before the first one in its chain, None if it is
    /// unknown. Does not wait and keeps the GIL, because reacquiring it may take longer than the call.
    #[expect(clippy::too_many_arguments, reason = "optional arguments are keyword arguments in Python")]
    #[pyo3(signature = (keys, local=false, all_ranks=false, position=None))]
    fn start_match(
        &self,
        py: Python<'_>,
        keys: Keys,
        local: bool,
        all_ranks: bool,
        position: Option<u32>,
    ) -> PyResult<Option<PendingMatch>> {
        self.log_changes(py);
        let Some(client) = self.keeper().and_then(|keeper| keeper.responsive()) else {
            return Ok(None);
        };
        let (Keys(keys), options) = (keys, MatchOptions { scope: scope(local), position, inputs: None });
        let started = match all_ranks {
            false => client.start_match(&keys, options),
            true => client.start_match_ranks(&keys, options),
        };
        match started {
            Ok(pending) => Ok(Some(PendingMatch { pending: Mutex::new(pending) })),
            Err(error @ ClientError::BadRequest(_)) => Err(exception(&error)),
            Err(error) => {
                log_debug(py, &error);
                Ok(None)
            }
        }
    }

    /// Reports the computation of the step that begins, and the measured time of a layer of the step reported before;
    /// returns None if no agent answers. The agent compares the time with its slack profile of the model. Does not
    /// wait.
    ///
    /// Args:
    ///     model: name of the model, as in the subject of its profile; 1 to 253 bytes. phase: "prefill", "decode", or
    ///     None if the engine computes nothing. input_tokens: tokens that the step computes. prefix_tokens: tokens
    ///     before them, of all sequences. previous_micros: measured microseconds of one layer, at most 10,000,000;
    ///         None: not measured.
    #[pyo3(signature = (model, phase, input_tokens=0, prefix_tokens=0, previous_micros=None))]
    #[expect(clippy::too_many_arguments, reason = "optional arguments are keyword arguments in Python")]
    fn start_layer_report(
        &self,
        py: Python<'_>,
        model: &str,
        phase: Option<&str>,
        input_tokens: u32,
        prefix_tokens: u32,
        previous_micros: Option<u32>,
    ) -> PyResult<Option<PendingReport>> {
        self.send_report(py, (model, phase), (input_tokens, prefix_tokens), previous_micros)
    }

    /// Hints what the engine runs next, once for each iteration, so that the agent reads blocks from NVMe into DRAM
    /// ahead of their load. ``iteration`` is the time of the last iteration in seconds. ``requests`` lists all
    /// requests that wait: number, iterations until it is expected to run, confidence of that from 0 to 1, and the
    /// keys of the blocks that it will load; no keys refer to those of an earlier hint. A request that is missing
    /// in the next hint has begun. ``cancelled`` lists requests that were preempted or have finished. With
    /// ``all_ranks``, the keys are those of all ranks, block after block. ``begun`` lists all requests that have begun and
    /// not finished: number, whether it is preempted, the number of its keys in earlier hints that stay listed, and the
    /// keys from there on; no keys change nothing. Their blocks have the eviction class of their state. None: as in the
    /// hint before, for at most 10 s. Does not wait; returns None if no agent answers.
    #[pyo3(signature = (iteration, requests, cancelled=Vec::new(), all_ranks=false, begun=None))]
    #[expect(clippy::too_many_arguments, reason = "optional arguments are keyword arguments in Python")]
    fn start_lookahead(
        &self,
        py: Python<'_>,
        iteration: f64,
        requests: Vec<WaitingRequest>,
        cancelled: Vec<u64>,
        all_ranks: bool,
        begun: Option<Vec<ListedRequest>>,
    ) -> PyResult<Option<PendingLookahead>> {
        self.send_lookahead(py, (iteration, all_ranks), (requests, cancelled), begun)
    }

    /// Starts a command on at most 8,192 blocks of this node, and does not wait: "pin" with a time ``ttl`` in seconds,
    /// "unpin", "prefetch", "demote" or "delete", as the methods of ``Client``. With ``all_ranks``, the keys are those of
    /// all ranks, block after block. Returns None if no agent answers.
    #[expect(clippy::too_many_arguments, reason = "optional arguments are keyword arguments in Python")]
    #[pyo3(signature = (action, keys, *, ttl=None, all_ranks=false))]
    fn start_command(
        &self,
        py: Python<'_>,
        action: &str,
        keys: Keys,
        ttl: Option<f64>,
        all_ranks: bool,
    ) -> PyResult<Option<PendingBlocks>> {
        self.send_command(py, action, keys, (ttl, all_ranks))
    }

    /// Marks the agent as hanging: no match is sent until the agent answers a cheap request, sent in the
    /// background.
    fn suspect(&self) {
        if let Some(keeper) = self.keeper() {
            keeper.suspect();
        }
    }

    /// Waits for up to ``timeout`` seconds until the session is connected and its agent answers; returns
    /// whether it is.
    fn wait_connected(&self, py: Python<'_>, timeout: f64) -> PyResult<bool> {
        let timeout = seconds("timeout", timeout)?;
        let keeper = self.keeper();
        let is_connected = py.detach(|| keeper.is_some_and(|keeper| keeper.wait_until_connected(timeout)));
        self.log_changes(py);
        Ok(is_connected)
    }

    /// Returns the agent's counters by name.
    ///
    /// Raises:
    ///     AgentLost: the session is not connected. Timeout: the agent does not answer.
    fn stats(&self, py: Python<'_>) -> PyResult<BTreeMap<String, u64>> {
        let keeper = self.keeper().ok_or_else(|| exception(&closed()))?;
        let stats = py.detach(|| keeper.current().ok_or_else(|| keeper.unavailable_reason())?.stats());
        Ok(stats.map_err(|error| exception(&error))?.into_iter().collect())
    }

    /// Ends the session permanently, as soon as no ``Transfers`` use it.
    fn close(&self, py: Python<'_>) {
        let keeper = self.lock().take();
        py.detach(|| drop(keeper));
    }

    fn __enter__(this: PyRef<'_, Self>) -> PyRef<'_, Self> {
        this
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, pyo3::types::PyTuple>) {
        self.close(py);
    }
}

impl Session {
    /// Returns the keeper; `None` after `close`.
    pub(crate) fn keeper(&self) -> Option<Arc<SessionKeeper>> {
        self.lock().clone()
    }

    /// Logs changes of the status since the last call.
    fn log_changes(&self, py: Python<'_>) {
        let status = self.status();
        let logged = {
            let mut logged = self.logged.lock().unwrap_or_else(PoisonError::into_inner);
            if *logged == status {
                return;
            }
            std::mem::replace(&mut *logged, status.clone())
        };
        match &status.last_error {
            Some(error) if status.last_error != logged.last_error => {
                write_log(py, "warning", &format!("no session with the agent, reconnecting: {error}"));
            }
            _ => {}
        }
        if status.sessions != logged.sessions {
            write_log(py, "info", "connected to the agent");
        }
        let (level, words) = match (logged.is_suspected, status.is_suspected) {
            (false, true) => ("warning", "the agent does not answer: no requests are sent until it does"),
            (true, false) if status.is_connected => ("info", "the agent answers again"),
            _ => return,
        };
        write_log(py, level, words);
    }

    fn status(&self) -> KeeperStatus {
        self.keeper().map(|keeper| keeper.status()).unwrap_or_default()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<SessionKeeper>>> {
        self.keeper.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // Dropping waits for the client's threads, so release the GIL if the dropping thread holds it.
        let keeper = self.lock().take();
        Python::attach(|py| py.detach(|| drop(keeper)));
    }
}

#[pymethods]
impl PendingMatch {
    /// Waits for up to ``seconds`` for the answer: the sources of the leading blocks, as numbers of
    /// ``Source``. Returns None if the answer is still pending. Any error is an answer without blocks.
    #[pyo3(signature = (seconds=0.0))]
    fn poll(&self, py: Python<'_>, seconds: f64) -> PyResult<Option<Vec<u32>>> {
        let patience = crate::arguments::seconds("seconds", seconds)?;
        let poll = || self.pending.lock().unwrap_or_else(PoisonError::into_inner).poll(patience);
        // A poll without waiting keeps the GIL: reacquiring it may take longer than the poll.
        let polled = if patience.is_zero() { poll() } else { py.detach(poll) };
        match polled {
            Ok(sources) => Ok(sources.map(|sources| source_numbers(&sources))),
            Err(error) => {
                log_debug(py, &error);
                Ok(Some(Vec::new()))
            }
        }
    }
}

/// Returns the error of calls on a closed session.
pub(crate) fn closed() -> ClientError {
    ClientError::AgentLost { reason: "it was closed by this process".into() }
}

/// Logs an expected error, which callers handle as a miss, at level debug.
pub(crate) fn log_debug(py: Python<'_>, error: &ClientError) {
    write_log(py, "debug", &message(error));
}

/// Writes to Python's logger `reprise`.
fn write_log(py: Python<'_>, level: &str, words: &str) {
    let logged = py
        .import("logging")
        .and_then(|logging| logging.call_method1("getLogger", ("reprise",)))
        .and_then(|logger| logger.call_method1(level, ("%s", words)));
    if let Err(error) = logged {
        error.write_unraisable(py, None);
    }
}
