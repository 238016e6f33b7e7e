//! The thread that ends requests for which streams wait: the engine's thread need not poll them.
//!
//! It ends them at their deadlines. For backends whose requests advance only when they are polled, it also polls.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::store::backoff::Backoff;
use crate::store::progress::Progress;

/// Watched requests from which on those that have ended are removed early.
const PRUNE_MIN: usize = 64;

/// Advances all requests of a backend.
pub(super) type Pump = Arc<dyn Fn() + Send + Sync>;

/// The running thread. After a drop, it only keeps the deadlines that are left.
#[derive(Debug)]
pub(super) struct Keeper {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    has_changed: Condvar,
}

#[derive(Debug)]
struct State {
    watched: Vec<Arc<Progress>>,
    /// Deadline until which the thread sleeps; `None` while it sleeps without one.
    next: Option<Instant>,
    prune_at: usize,
    is_closed: bool,
}

impl Keeper {
    pub(super) fn start(pump: Option<Pump>) -> std::io::Result<Keeper> {
        let state = State { watched: Vec::new(), next: None, prune_at: PRUNE_MIN, is_closed: false };
        let shared = Arc::new(Shared { state: Mutex::new(state), has_changed: Condvar::new() });
        let of_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("stream-keeper".to_owned());
        thread.spawn(move || run(&of_thread, pump))?;
        Ok(Keeper { shared })
    }

    /// Watches a request until it has ended.
    pub(super) fn watch(&self, progress: &Arc<Progress>) {
        let mut state = self.shared.lock();
        state.watched.push(Arc::clone(progress));
        let is_earlier = state.next.is_none_or(|next| progress.deadline() < next);
        if is_earlier || state.watched.len() >= state.prune_at {
            self.shared.has_changed.notify_one();
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        // The thread ends with the deadline of the last request: a stream may wait for a device that hangs.
        self.shared.lock().is_closed = true;
        self.shared.has_changed.notify_one();
    }
}

impl Shared {
    /// Every change leaves the state consistent, so a poisoned lock is ignored.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn run(shared: &Shared, mut pump: Option<Pump>) {
    let mut pause = Backoff::start();
    let mut state = shared.lock();
    loop {
        if state.is_closed {
            pump = None;
        }
        state.watched.retain(|progress| !progress.expire());
        if state.is_closed && state.watched.is_empty() {
            return;
        }
        state.prune_at = PRUNE_MIN.max(2 * state.watched.len());
        state.next = state.watched.iter().map(|progress| progress.deadline()).min();
        state = match (state.next, &pump) {
            (None, _) => {
                let waited = shared.has_changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                pause = Backoff::start();
                waited
            }
            (Some(_), Some(advance)) => {
                drop(state);
                advance();
                pause.wait();
                shared.lock()
            }
            (Some(next), None) => {
                let limit = next.saturating_duration_since(Instant::now());
                let waited = shared.has_changed.wait_timeout(state, limit);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
        };
    }
}
