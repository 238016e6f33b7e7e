//! The threads of a transport, so that `shutdown` can join all of them.

use std::io;
use std::sync::{Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};

/// Handles of running threads; finished ones are joined whenever another starts.
#[derive(Default)]
pub(super) struct Threads {
    running: Mutex<Vec<JoinHandle<()>>>,
}

impl Threads {
    pub(super) fn spawn(&self, name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let handle = Builder::new().name(name.to_owned()).spawn(run)?;
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let (finished, mut still): (Vec<_>, Vec<_>) =
            std::mem::take(&mut *running).into_iter().partition(JoinHandle::is_finished);
        still.push(handle);
        *running = still;
        drop(running);
        join(finished);
        Ok(())
    }

    /// Joins every thread, including those that start meanwhile.
    pub(super) fn join_all(&self) {
        loop {
            let handles = std::mem::take(&mut *self.running.lock().unwrap_or_else(PoisonError::into_inner));
            if handles.is_empty() {
                return;
            }
            join(handles);
        }
    }
}

fn join(handles: Vec<JoinHandle<()>>) {
    for handle in handles {
        if handle.join().is_err() {
            tracing::error!("a transport thread panicked");
        }
    }
}
