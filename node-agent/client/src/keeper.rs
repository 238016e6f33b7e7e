//! A session that is opened anew by itself.
//!
//! An engine outlives its node's agent: it starts before it, and goes on while the agent is upgraded. Whoever needs
//! the session asks for the current one and takes "there is none" for an answer; a thread of the keeper's does the
//! waiting.
//!
//! ```text
//!             ┌────────── connect fails: 50 ms … 2 s ─────────┐
//!             ▼                                               │
//! absent ── connect ──► connected ── suspect ──► suspected ── probe is answered ──► connected
//!             ▲             └──────── the session ends ───────┘
//!             └─────────────────────────────┘
//! ```
//!
//! *Suspected* is an agent that accepts requests and does not answer, as one that is stopped or starved. Whoever
//! notices says so; nobody else runs into it until it has answered a cheap question.
//!
//! Invariants: no method but [`SessionKeeper::wait_until_connected`] and [`SessionKeeper::refusal`] waits for the agent;
//! the session ends with the keeper. The thread is not waited for when the keeper is dropped: it may be within one
//! attempt to connect, and ends after it.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};

use crate::client::{Client, ConnectOptions};
use crate::deadline;
use crate::error::ClientError;

/// Pause after the first attempt that failed, and after a session that ended: an agent that is restarted is back
/// within some tens of milliseconds.
pub const PAUSE_MIN: Duration = Duration::from_millis(50);

/// Longest pause between two attempts: a refused connection costs microseconds.
pub const PAUSE_MAX: Duration = Duration::from_secs(2);

/// Keeps a session with this node's agent. Dropping it ends the session.
#[derive(Debug)]
pub struct SessionKeeper {
    shared: Arc<Shared>,
}

/// How a keeper's session is, for whoever observes the engine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeeperStatus {
    /// Whether there is a session.
    pub is_connected: bool,
    /// Whether its agent is suspected not to answer.
    pub is_suspected: bool,
    /// Sessions that were opened so far.
    pub sessions: u64,
    /// Why there was no session when there was none last.
    pub last_error: Option<String>,
    /// Which error that was ([`ClientError::kind`]).
    pub last_error_kind: Option<&'static str>,
}

#[derive(Debug)]
struct Shared {
    options: ConnectOptions,
    state: Mutex<State>,
    changed: Condvar,
    /// Wakes the thread: a look at the state says what for.
    wake: Sender<()>,
}

#[derive(Debug, Default)]
struct State {
    client: Option<Client>,
    is_suspected: bool,
    sessions: u64,
    last_error: Option<Arc<ClientError>>,
    has_ended: bool,
}

impl SessionKeeper {
    /// Starts to keep a session; the first attempt to connect is made at once, by the thread.
    ///
    /// # Errors
    /// `Busy`: no thread can be started.
    pub fn new(options: ConnectOptions) -> Result<SessionKeeper, ClientError> {
        // One message is enough to wake.
        let (wake, woken) = bounded(1);
        let shared = Arc::new(Shared { options, state: Mutex::default(), changed: Condvar::new(), wake });
        let kept = Arc::clone(&shared);
        thread::Builder::new()
            .name("reprise-keeper".to_owned())
            .spawn(move || kept.keep(&woken))
            .map_err(|error| ClientError::Busy(format!("no thread can be started: {error}")))?;
        Ok(SessionKeeper { shared })
    }

    /// What the session is opened with.
    pub fn options(&self) -> &ConnectOptions {
        &self.shared.options
    }

    /// The session, if there is one now.
    pub fn current(&self) -> Option<Client> {
        self.shared.lock().client.clone().filter(Client::is_alive)
    }

    /// The session, if there is one now whose agent is not suspected.
    pub fn answering(&self) -> Option<Client> {
        let state = self.shared.lock();
        state.client.clone().filter(|client| client.is_alive() && !state.is_suspected)
    }

    /// The agent does not answer. [`SessionKeeper::answering`] is `None` until it does.
    pub fn suspect(&self) {
        let mut state = self.shared.lock();
        if state.client.is_some() && !state.is_suspected {
            state.is_suspected = true;
            tracing::warn!(socket = %self.shared.options.socket.display(), "the agent does not answer");
            self.shared.wake();
        }
    }

    /// How the session is.
    pub fn status(&self) -> KeeperStatus {
        let state = self.shared.lock();
        KeeperStatus {
            is_connected: state.client.as_ref().is_some_and(Client::is_alive),
            is_suspected: state.is_suspected,
            sessions: state.sessions,
            last_error: state.last_error.as_ref().map(ToString::to_string),
            last_error_kind: state.last_error.as_deref().map(ClientError::kind),
        }
    }

    /// Why [`SessionKeeper::answering`] is `None`.
    pub fn absence(&self) -> ClientError {
        let state = self.shared.lock();
        let reason = match &state.last_error {
            _ if state.is_suspected => "it does not answer".to_owned(),
            Some(error) => error.to_string(),
            None => "it has not been reached yet".to_owned(),
        };
        ClientError::AgentLost { reason }
    }

    /// Waits until there is a session whose agent answers; whether there is.
    pub fn wait_until_connected(&self, timeout: Duration) -> bool {
        let is_answering =
            |state: &State| state.client.as_ref().is_some_and(Client::is_alive) && !state.is_suspected;
        self.shared.wait_for(deadline::after(timeout), |state| is_answering(state).then_some(())).is_some()
    }

    /// Why this agent will never keep blocks of this session: it refuses the session, or a slot for one block. Waits for
    /// what comes of the first attempt to connect and for one answer, both within `timeout`. `None`: it takes them, it is
    /// absent, or it does not say.
    pub fn refusal(&self, timeout: Duration) -> Option<Arc<ClientError>> {
        let deadline = deadline::after(timeout);
        let outcome = self.shared.wait_for(deadline, |state| {
            let error = state.last_error.clone().map(Err);
            state.client.clone().map(Ok).or(error)
        })?;
        let refused = match outcome {
            Err(error) => error,
            Ok(client) => {
                let left = deadline.saturating_duration_since(Instant::now());
                // What is reserved is given back at once.
                Arc::new(client.reserve_within(1, Duration::ZERO, left).err()?)
            }
        };
        refused.is_refusal().then_some(refused)
    }
}

impl Drop for SessionKeeper {
    fn drop(&mut self) {
        let client = {
            let mut state = self.shared.lock();
            state.has_ended = true;
            state.client.take()
        };
        if let Some(client) = client {
            client.close();
        }
        self.shared.wake();
    }
}

impl Shared {
    /// Opens session after session; body of the thread.
    fn keep(&self, woken: &Receiver<()>) {
        let mut pause = PAUSE_MIN;
        while !self.has_ended() {
            match Client::connect(self.options.clone()) {
                Ok(client) => {
                    let opened = Instant::now();
                    self.hold(&client, woken);
                    if opened.elapsed() >= PAUSE_MAX {
                        pause = PAUSE_MIN;
                    }
                }
                Err(error) => self.note_absence(error),
            }
            if self.has_ended() {
                return;
            }
            // A wake-up that is meant for a session that has ended only shortens the pause.
            let _ = woken.recv_timeout(pause);
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    /// Stays with a session to its end.
    fn hold(&self, client: &Client, woken: &Receiver<()>) {
        client.watch(self.wake.clone());
        if !self.publish(client) {
            client.close();
            return;
        }
        while client.is_alive() {
            if !self.is_suspected() {
                // The other end is in `self`.
                let _ = woken.recv();
                continue;
            }
            match client.probe(self.options.call_timeout) {
                Ok(()) => self.trust(),
                Err(_) if !client.is_alive() => {}
                // It has waited for its answer, or there are too many calls.
                Err(_) => drop(woken.recv_timeout(PAUSE_MIN)),
            }
        }
        if !self.has_ended() {
            self.note_absence(client.lost());
        }
    }

    /// Makes a session the current one; not if the keeper has ended.
    fn publish(&self, client: &Client) -> bool {
        let mut state = self.lock();
        if state.has_ended {
            return false;
        }
        state.client = Some(client.clone());
        state.is_suspected = false;
        state.sessions += 1;
        drop(state);
        tracing::info!(node = client.node(), "connected to the agent");
        self.changed.notify_all();
        true
    }

    fn trust(&self) {
        self.lock().is_suspected = false;
        tracing::info!("the agent answers again");
        self.changed.notify_all();
    }

    /// There is no session; what is said about it is logged when it is something new.
    fn note_absence(&self, error: ClientError) {
        let reason = error.to_string();
        let mut state = self.lock();
        let is_same = state.last_error.as_ref().is_some_and(|last| last.to_string() == reason);
        let known = is_same && state.client.is_none();
        let ended = state.client.take();
        state.is_suspected = false;
        state.last_error = Some(Arc::new(error));
        drop(state);
        drop(ended);
        if !known {
            tracing::warn!(error = reason, "there is no session with the agent; another is tried for");
        }
        self.changed.notify_all();
    }

    /// Waits until there is something to see in the state; `None`: not by then.
    fn wait_for<T>(&self, deadline: Instant, see: impl Fn(&State) -> Option<T>) -> Option<T> {
        let mut state = self.lock();
        loop {
            if let Some(seen) = see(&state) {
                return Some(seen);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn is_suspected(&self) -> bool {
        self.lock().is_suspected
    }

    fn has_ended(&self) -> bool {
        self.lock().has_ended
    }

    fn wake(&self) {
        // Full: it is to wake up already.
        let _ = self.wake.try_send(());
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
