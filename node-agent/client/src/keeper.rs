//! A session that reconnects automatically.
//!
//! An engine outlives its node's agent: it starts before the agent, and continues while the agent is
//! upgraded. Callers ask for the current session and must handle its absence; a background thread connects
//! and waits.
//!
//! ```text
//!              ┌────────── connect fails: 50 ms … 2 s ─────────┐
//!              ▼                                               │
//! absent ── connect ──► connected ── suspect ──► suspected ── probe is answered ──► connected
//!              ▲             └──────── the session ends ───────┘
//!              └─────────────────────────────┘
//! ```
//!
//! *Suspected* is an agent that accepts requests and does not answer, for example one that is stopped or
//! starved of CPU. The caller that notices calls [`SessionKeeper::suspect`]; other callers get no session
//! until the agent has answered a cheap request.
//!
//! Invariants:
//!
//! * Only [`SessionKeeper::wait_until_connected`] and [`SessionKeeper::refusal`] wait for the agent.
//! * The session ends with the keeper. Dropping the keeper does not join the thread: it may be in an attempt
//!   to connect, and ends after that.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};

use crate::client::{Client, ConnectOptions};
use crate::deadline;
use crate::error::ClientError;

/// Pause after the first failed attempt, and after a session that ended: a restarted agent is back within
/// some tens of milliseconds.
pub const PAUSE_MIN: Duration = Duration::from_millis(50);

/// Longest pause between two attempts: a rejected connection costs microseconds.
pub const PAUSE_MAX: Duration = Duration::from_secs(2);

/// Keeps a session with this node's agent open. Dropping it ends the session.
#[derive(Debug)]
pub struct SessionKeeper {
    shared: Arc<Shared>,
}

/// State of a keeper's session, for monitoring.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeeperStatus {
    /// True while there is a session.
    pub is_connected: bool,
    /// True while the agent is suspected of not answering.
    pub is_suspected: bool,
    /// Number of sessions opened so far.
    pub sessions: u64,
    /// Reason of the last time without a session.
    pub last_error: Option<String>,
    /// Kind of that error ([`ClientError::kind`]).
    pub last_error_kind: Option<&'static str>,
}

#[derive(Debug)]
struct Shared {
    options: ConnectOptions,
    state: Mutex<State>,
    changed: Condvar,
    /// Wakes the thread, which reads its task from the state.
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
    /// Starts the thread, which makes the first attempt to connect at once.
    ///
    /// # Errors
    /// `Busy`: cannot spawn the thread.
    pub fn new(options: ConnectOptions) -> Result<SessionKeeper, ClientError> {
        // One message is enough to wake the thread.
        let (wake, woken) = bounded(1);
        let shared = Arc::new(Shared { options, state: Mutex::default(), changed: Condvar::new(), wake });
        let kept = Arc::clone(&shared);
        thread::Builder::new()
            .name("reprise-keeper".to_owned())
            .spawn(move || kept.keep(&woken))
            .map_err(|error| ClientError::Busy(format!("cannot spawn the keeper thread: {error}")))?;
        Ok(SessionKeeper { shared })
    }

    /// Returns the options of the session.
    pub fn options(&self) -> &ConnectOptions {
        &self.shared.options
    }

    /// Returns the current session, if there is one.
    pub fn current(&self) -> Option<Client> {
        self.shared.lock().client.clone().filter(Client::is_alive)
    }

    /// Returns the current session, if there is one and its agent is not suspected.
    pub fn responsive(&self) -> Option<Client> {
        let state = self.shared.lock();
        state.client.clone().filter(|client| client.is_alive() && !state.is_suspected)
    }

    /// Reports that the agent does not answer. [`SessionKeeper::responsive`] is `None` until it answers
    /// again.
    pub fn suspect(&self) {
        let mut state = self.shared.lock();
        if state.client.is_some() && !state.is_suspected {
            state.is_suspected = true;
            tracing::warn!(socket = %self.shared.options.socket.display(), "agent does not answer");
            self.shared.wake();
        }
    }

    /// Returns the state of the session.
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

    /// Returns the reason for which [`SessionKeeper::responsive`] is `None`.
    pub fn unavailable_reason(&self) -> ClientError {
        let state = self.shared.lock();
        let reason = match &state.last_error {
            _ if state.is_suspected => "the agent does not answer".to_owned(),
            Some(error) => error.to_string(),
            None => "not connected yet".to_owned(),
        };
        ClientError::AgentLost { reason }
    }

    /// Waits until there is a session whose agent answers; returns false on timeout.
    pub fn wait_until_connected(&self, timeout: Duration) -> bool {
        let is_answering =
            |state: &State| state.client.as_ref().is_some_and(Client::is_alive) && !state.is_suspected;
        self.shared.wait_for(deadline::after(timeout), |state| is_answering(state).then_some(())).is_some()
    }

    /// Returns the permanent error, if the agent rejects the session or a reservation of one slot. Waits
    /// within `timeout` for the first attempt to connect and for one answer. `None`: the agent accepts, is
    /// absent, or did not answer in time.
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
                // The reserved slot is released at once.
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
                Err(error) => self.record_disconnect(error),
            }
            if self.has_ended() {
                return;
            }
            // A wake-up for a session that has ended only shortens the pause.
            let _ = woken.recv_timeout(pause);
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    /// Publishes a session and returns when it has ended.
    fn hold(&self, client: &Client, woken: &Receiver<()>) {
        client.watch(self.wake.clone());
        if !self.publish(client) {
            client.close();
            return;
        }
        while client.is_alive() {
            if !self.is_suspected() {
                // Cannot fail: `self` holds a sender.
                let _ = woken.recv();
                continue;
            }
            match client.probe(self.options.call_timeout) {
                Ok(()) => self.trust(),
                Err(_) if !client.is_alive() => {}
                // The probe has timed out, or too many calls are in flight.
                Err(_) => drop(woken.recv_timeout(PAUSE_MIN)),
            }
        }
        if !self.has_ended() {
            self.record_disconnect(client.ended_error());
        }
    }

    /// Makes a session the current one, unless the keeper was dropped; returns whether it did.
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
        tracing::info!("agent answers again");
        self.changed.notify_all();
    }

    /// Records that there is no session; logs the error unless it equals the previous one.
    fn record_disconnect(&self, error: ClientError) {
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
            tracing::warn!(error = reason, "no session with the agent, reconnecting");
        }
        self.changed.notify_all();
    }

    /// Waits until `see` returns a value; `None` at the deadline.
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
        // A full channel already holds a wake-up.
        let _ = self.wake.try_send(());
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
