//! A session that is opened anew by itself, for Python.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use reprise_client::{ClientError, KeeperStatus, SessionKeeper};

use crate::arguments::{Keys, scope, seconds};
use crate::client::connect_options;
use crate::error::{described, raised};
use crate::geometry::{Layout, Namespace};
use crate::outcome::source_numbers;

/// A session with this node's agent that is opened anew by itself: the agent may start later, stop, and come back.
/// Constructing it does not wait for the agent, nor does any method but ``check``, ``wait_connected`` and ``stats``. What becomes of the
/// session is logged by ``reprise`` when ``connected``, ``start_match`` or ``wait_connected`` next look at it.
///
/// Args:
///     socket: path of the agent's unix socket.
///     namespace: of the engine's blocks.
///     layout: geometry of the blocks.
///     tenant: whose blocks these are.
///     token_file: file with a service account's token of the audience ``reprise.dev``, which shows agents in Kubernetes whose pod this is; read at
///         each connection.
///     name: for the agent's logs and status, at most 64 bytes.
///     timeout: seconds that an answer may take.
#[pyclass(frozen, module = "reprise")]
#[derive(Debug)]
pub(crate) struct Session {
    /// `None`: closed.
    keeper: Mutex<Option<Arc<SessionKeeper>>>,
    /// What was logged last.
    told: Mutex<KeeperStatus>,
}

/// A match that was asked for. Dropping it is fine.
#[pyclass(frozen, module = "reprise")]
#[derive(Debug)]
pub(crate) struct PendingMatch {
    pending: Mutex<reprise_client::PendingMatch>,
}

#[pymethods]
impl Session {
    #[new]
    #[pyo3(signature = (socket, namespace, layout, *, tenant="default", token_file=None, name="python", timeout=5.0))]
    #[expect(clippy::too_many_arguments, reason = "those that are optional are named in Python")]
    fn new(
        socket: PathBuf,
        namespace: &Namespace,
        layout: &Layout,
        tenant: &str,
        token_file: Option<PathBuf>,
        name: &str,
        timeout: f64,
    ) -> PyResult<Session> {
        let options = connect_options(socket, namespace, layout, tenant, token_file)?
            .client_name(name)
            .call_timeout(seconds("timeout", timeout)?);
        let keeper = SessionKeeper::new(options).map_err(|error| raised(&error))?;
        Ok(Session { keeper: Mutex::new(Some(Arc::new(keeper))), told: Mutex::default() })
    }

    /// Whether there is a session now.
    #[getter]
    fn connected(&self, py: Python<'_>) -> bool {
        self.tell(py);
        self.status().is_connected
    }

    /// Whether the agent is suspected not to answer: it gets no questions until it has.
    #[getter]
    fn suspected(&self) -> bool {
        self.status().is_suspected
    }

    /// Sessions that were opened so far.
    #[getter]
    fn sessions(&self) -> u64 {
        self.status().sessions
    }

    /// Why there was no session when there was none last; None when that never was.
    #[getter]
    fn last_error(&self) -> Option<String> {
        self.status().last_error
    }

    /// Which error that was: the name of its exception.
    #[getter]
    fn last_error_kind(&self) -> Option<&'static str> {
        self.status().last_error_kind
    }

    /// Finds out whether the agent will never keep blocks of this session, within so many seconds. An agent that is absent,
    /// full or silent says nothing of the kind.
    ///
    /// Raises:
    ///     Version, Forbidden, BadRequest: it refuses the session, or a slot for one block, and what to do.
    fn check(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        let timeout = seconds("timeout", timeout)?;
        let keeper = self.keeper();
        let refusal = py.detach(|| keeper.and_then(|keeper| keeper.refusal(timeout)));
        refusal.map_or(Ok(()), |error| Err(raised(&error)))
    }

    /// Asks where leading blocks are, at most 8,192; None when there is no agent that answers. Does not wait, and keeps the
    /// GIL: who lets go of it may wait for other threads to get it back.
    #[pyo3(signature = (keys, local=false))]
    fn start_match(&self, py: Python<'_>, keys: Keys, local: bool) -> PyResult<Option<PendingMatch>> {
        self.tell(py);
        let Some(client) = self.keeper().and_then(|keeper| keeper.answering()) else {
            return Ok(None);
        };
        let Keys(keys) = keys;
        match client.start_match(&keys, scope(local)) {
            Ok(pending) => Ok(Some(PendingMatch { pending: Mutex::new(pending) })),
            Err(error @ ClientError::BadRequest(_)) => Err(raised(&error)),
            Err(error) => {
                log(py, &error);
                Ok(None)
            }
        }
    }

    /// The agent does not answer: it gets no questions until it has answered a cheap one, which is asked in the background.
    fn suspect(&self) {
        if let Some(keeper) = self.keeper() {
            keeper.suspect();
        }
    }

    /// Waits until there is a session whose agent answers; whether there is.
    fn wait_connected(&self, py: Python<'_>, timeout: f64) -> PyResult<bool> {
        let timeout = seconds("timeout", timeout)?;
        let keeper = self.keeper();
        let is_connected = py.detach(|| keeper.is_some_and(|keeper| keeper.wait_until_connected(timeout)));
        self.tell(py);
        Ok(is_connected)
    }

    /// The agent's counters by name.
    ///
    /// Raises:
    ///     AgentLost: there is no session. Timeout: the agent does not answer.
    fn stats(&self, py: Python<'_>) -> PyResult<BTreeMap<String, u64>> {
        let keeper = self.keeper().ok_or_else(|| raised(&closed()))?;
        let stats = py.detach(|| keeper.current().ok_or_else(|| keeper.absence())?.stats());
        Ok(stats.map_err(|error| raised(&error))?.into_iter().collect())
    }

    /// Ends the session for good, once no Transfers use it any more.
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
    /// The keeper, until the session is closed.
    pub(crate) fn keeper(&self) -> Option<Arc<SessionKeeper>> {
        self.lock().clone()
    }

    /// Logs what has changed since it was told last.
    fn tell(&self, py: Python<'_>) {
        let status = self.status();
        let told = {
            let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
            if *told == status {
                return;
            }
            std::mem::replace(&mut *told, status.clone())
        };
        match &status.last_error {
            Some(error) if status.last_error != told.last_error => {
                write_log(
                    py,
                    "warning",
                    &format!("no session with the agent, another is tried for: {error}"),
                );
            }
            _ => {}
        }
        if status.sessions != told.sessions {
            write_log(py, "info", "connected to the agent");
        }
        let (level, words) = match (told.is_suspected, status.is_suspected) {
            (false, true) => ("warning", "the agent does not answer: it gets no questions until it does"),
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
        // The client's threads need no GIL; who drops this may hold it.
        let keeper = self.lock().take();
        Python::attach(|py| py.detach(|| drop(keeper)));
    }
}

#[pymethods]
impl PendingMatch {
    /// Where leading blocks are, as numbers of ``Source``, if the answer comes within so many seconds; None: not yet, ask
    /// again. An error of any kind is an answer without blocks.
    #[pyo3(signature = (seconds=0.0))]
    fn poll(&self, py: Python<'_>, seconds: f64) -> PyResult<Option<Vec<u32>>> {
        let patience = crate::arguments::seconds("seconds", seconds)?;
        let poll = || self.pending.lock().unwrap_or_else(PoisonError::into_inner).poll(patience);
        // Who only looks keeps the GIL: getting it back may take longer than the look.
        let polled = if patience.is_zero() { poll() } else { py.detach(poll) };
        match polled {
            Ok(sources) => Ok(sources.map(|sources| source_numbers(&sources))),
            Err(error) => {
                log(py, &error);
                Ok(Some(Vec::new()))
            }
        }
    }
}

/// What is said of calls on a session that was closed here.
pub(crate) fn closed() -> ClientError {
    ClientError::AgentLost { reason: "it was closed by this process".into() }
}

/// An error that nobody is bothered with, for who looks at the log of `reprise` at level debug.
fn log(py: Python<'_>, error: &ClientError) {
    write_log(py, "debug", &described(error));
}

/// Writes to Python's log of `reprise`.
fn write_log(py: Python<'_>, level: &str, words: &str) {
    let logged = py
        .import("logging")
        .and_then(|logging| logging.call_method1("getLogger", ("reprise",)))
        .and_then(|logger| logger.call_method1(level, ("%s", words)));
    if let Err(error) = logged {
        error.write_unraisable(py, None);
    }
}
