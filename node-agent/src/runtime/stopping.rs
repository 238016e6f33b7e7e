//! Stops several items concurrently within one time limit.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// Stops every item on a separate thread and waits up to `patience` for all of them. Returns the number of
/// items that had not stopped in time; their threads run until the process ends.
pub(super) fn stop_all<T: Send + 'static>(items: Vec<T>, stop: fn(T), patience: Duration) -> usize {
    let until = Instant::now() + patience;
    let (stopped, is_stopped) = channel();
    let mut left = 0;
    for item in items {
        let stopped = stopped.clone();
        let body = move || {
            stop(item);
            // Fails only if the time limit has passed.
            let _ = stopped.send(());
        };
        match std::thread::Builder::new().name("stopping".to_owned()).spawn(body) {
            Ok(_) => left += 1,
            // The item was dropped with the thread that could not be spawned.
            Err(error) => tracing::warn!(%error, "cannot spawn a thread to stop a device"),
        }
    }
    drop(stopped);
    while left > 0 {
        match is_stopped.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(()) => left -= 1,
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
        }
    }
    left
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender};

    use super::*;

    /// Longer than any wait of a passing test.
    const PATIENCE: Duration = Duration::from_secs(20);

    #[test]
    fn items_that_depend_on_each_other_are_stopped_concurrently() {
        let (first, from_first) = channel::<()>();
        let (second, from_second) = channel::<()>();
        // Each item stops once the other has begun to stop, so a sequential stop would not end.
        let items: Vec<(Sender<()>, Receiver<()>)> = vec![(first, from_second), (second, from_first)];
        let meet = |(own, other): (Sender<()>, Receiver<()>)| {
            drop(own);
            let _ = other.recv();
        };
        assert_eq!(stop_all(items, meet, PATIENCE), 0);
    }

    #[test]
    fn item_that_does_not_stop_is_abandoned() {
        let (hold, held) = channel::<()>();
        let (ended, has_ended) = channel::<()>();
        let items: Vec<(Option<Receiver<()>>, Sender<()>)> = vec![(Some(held), ended.clone()), (None, ended)];
        let stop = |(held, ended): (Option<Receiver<()>>, Sender<()>)| {
            if let Some(held) = held {
                let _ = held.recv();
            }
            let _ = ended.send(());
        };
        assert_eq!(stop_all(items, stop, Duration::from_millis(500)), 1);
        has_ended.recv_timeout(PATIENCE).expect("the other item has stopped");
        drop(hold);
        has_ended.recv_timeout(PATIENCE).expect("the item was released");
    }
}
