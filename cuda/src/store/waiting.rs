//! Work of requests that begins when a point of a stream has passed.
//!
//! Work is taken in order, with one exception: work that can begin passes work that waits for a point. The points of one
//! stream pass in order, so nothing that waits for a stream passes earlier work of that stream. Work that was passed is
//! taken first when its point has passed, so it is not delayed further.
//!
//! A query of a point may fail because another thread has disturbed the driver, for example by the capture of a graph.
//! Such work stays until a later query, or the deadline of its request. After a permanent error only this work fails.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};

use crate::store::backoff::Backoff;
use crate::store::mover::{BlockError, REQUESTS_MAX};
use crate::store::progress::Progress;
use crate::store::stream::{Point, StreamNumber};

/// Work that waits at most before the work behind it waits, too: it bounds the time of a pass.
const PASSED_MAX: usize = 256;

/// Jobs that an [`Inbox`] takes from its channel at most: two parts of each request.
const JOBS_MAX: usize = 2 * REQUESTS_MAX;

/// Work of a request.
pub(super) trait Ordered {
    /// Returns the point before which it does not begin.
    fn after(&self) -> Option<&Point>;

    /// Returns the progress of the request.
    fn progress(&self) -> &Progress;
}

/// Work that has not begun, in the order of its requests.
#[derive(Debug)]
pub(super) struct Waiting<T> {
    queue: VecDeque<T>,
}

/// One pass over the work: each stream is queried at most once.
#[derive(Debug)]
pub(super) struct Pass<'a, T> {
    queue: &'a mut VecDeque<T>,
    at: usize,
    blocked: Vec<StreamNumber>,
}

impl<T> Default for Waiting<T> {
    fn default() -> Waiting<T> {
        Waiting { queue: VecDeque::new() }
    }
}

impl<T: Ordered> Waiting<T> {
    pub(super) fn push(&mut self, work: T) {
        self.queue.push_back(work);
    }

    pub(super) fn pass(&mut self) -> Pass<'_, T> {
        Pass { queue: &mut self.queue, at: 0, blocked: Vec::new() }
    }

    /// Takes all work, also if it cannot begin.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = T> + '_ {
        self.queue.drain(..)
    }
}

impl<T: Ordered> Pass<'_, T> {
    /// Takes the next work that can begin or whose request is over, with the permanent error of its point.
    pub(super) fn take(&mut self) -> Option<(T, Result<(), BlockError>)> {
        while self.at < self.queue.len().min(PASSED_MAX) {
            if let Some(ready) = self.check() {
                return self.queue.remove(self.at).map(|work| (work, ready));
            }
            self.at += 1;
        }
        None
    }

    /// Returns how the work at the current place begins; `None` if it waits.
    fn check(&mut self) -> Option<Result<(), BlockError>> {
        let work = &self.queue[self.at];
        let Some(point) = work.after() else { return Some(Ok(())) };
        if work.progress().has_expired() {
            return Some(Ok(()));
        }
        if self.blocked.contains(&point.stream()) {
            return None;
        }
        match point.has_passed() {
            Ok(true) => return Some(Ok(())),
            Ok(false) => {}
            Err(error) if error.is_permanent() => return Some(Err(BlockError::Failed(error.to_string()))),
            Err(error) => {
                if work.progress().note_failed_query() {
                    tracing::warn!(%error, "cannot query a stream; trying until the deadline of the request");
                }
            }
        }
        self.blocked.push(point.stream());
        None
    }
}

/// Work of a thread: that of a channel, and that whose points have not passed.
#[derive(Debug)]
pub(super) struct Inbox<T> {
    taken: Receiver<T>,
    waiting: Waiting<T>,
    waiting_count: usize,
}

impl<T: Ordered> Inbox<T> {
    pub(super) fn new(taken: Receiver<T>) -> Inbox<T> {
        Inbox { taken, waiting: Waiting::default(), waiting_count: 0 }
    }

    /// Waits for work that can begin or whose request is over; `None` when all work was taken and the sender is gone.
    pub(super) fn take(&mut self) -> Option<(T, Result<(), BlockError>)> {
        let mut pause = Backoff::start();
        loop {
            let is_closed = self.receive();
            if let Some(ready) = self.waiting.pass().take() {
                self.waiting_count -= 1;
                return Some(ready);
            }
            match (self.waiting_count, is_closed) {
                (0, true) => return None,
                (0, false) => {
                    let work = self.taken.recv().ok()?;
                    self.push(work);
                }
                (_, true) | (JOBS_MAX.., false) => pause.wait(),
                (_, false) => match pause.receive(&self.taken) {
                    Ok(work) => self.push(work),
                    Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
                },
            }
        }
    }

    /// Takes what the channel has; reports whether its sender is gone.
    fn receive(&mut self) -> bool {
        while self.waiting_count < JOBS_MAX {
            match self.taken.try_recv() {
                Ok(work) => self.push(work),
                Err(TryRecvError::Empty) => return false,
                Err(TryRecvError::Disconnected) => return true,
            }
        }
        false
    }

    fn push(&mut self, work: T) {
        self.waiting.push(work);
        self.waiting_count += 1;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::{Sender, channel, sync_channel};
    use std::time::{Duration, Instant};

    use super::*;
    use crate::store::progress::Requests;
    use crate::store::{EngineStream, HostStream};

    const LONG: Duration = Duration::from_secs(60);

    struct Work {
        name: &'static str,
        after: Option<Point>,
        progress: Arc<Progress>,
    }

    impl Ordered for Work {
        fn after(&self) -> Option<&Point> {
            self.after.as_ref()
        }

        fn progress(&self) -> &Progress {
            &self.progress
        }
    }

    fn work(name: &'static str, after: Option<&Point>, timeout: Duration) -> Work {
        let (_, progress) = Requests::default().open(vec![1], 0, timeout).expect("room");
        Work { name, after: after.cloned(), progress }
    }

    fn names(waiting: &mut Waiting<Work>) -> Vec<&'static str> {
        let mut pass = waiting.pass();
        std::iter::from_fn(|| pass.take().map(|(work, _)| work.name)).collect()
    }

    /// A stream that has stopped until the sender is dropped, and a point behind that.
    fn stopped() -> (HostStream, EngineStream, Sender<()>, Point) {
        let host = HostStream::start().expect("a thread");
        let (open, gate) = channel();
        host.launch(move || gate.recv().unwrap_or(()));
        let stream = EngineStream::on_host(&host);
        let point = stream.mark().expect("a mark");
        (host, stream, open, point)
    }

    #[test]
    fn ready_work_passes_work_that_waits_but_not_work_of_its_own_stream() {
        let (host, stream, open, first) = stopped();
        let (other, free) = (HostStream::start().expect("a thread"), HostStream::start().expect("a thread"));
        let passed = EngineStream::on_host(&free).mark().expect("a mark");
        free.synchronize();
        let mut waiting = Waiting::default();
        let second = stream.mark().expect("a mark");
        for (name, after) in [("a", Some(&first)), ("b", None), ("c", Some(&second)), ("d", Some(&passed))] {
            waiting.push(work(name, after, LONG));
        }
        assert_eq!(names(&mut waiting), ["b", "d"]);
        drop(open);
        host.synchronize();
        waiting.push(work("e", None, LONG));
        assert_eq!(names(&mut waiting), ["a", "c", "e"], "passed work comes first");
        drop(other);
    }

    #[test]
    fn number_of_passed_works_is_bounded() {
        let (_host, _stream, _open, point) = stopped();
        let mut waiting = Waiting::default();
        (0..PASSED_MAX - 1).for_each(|_| waiting.push(work("waits", Some(&point), LONG)));
        waiting.push(work("in reach", None, LONG));
        waiting.push(work("behind", None, LONG));
        waiting.push(work("waits", Some(&point), LONG));
        assert_eq!(names(&mut waiting), ["in reach", "behind"]);
        waiting.push(work("out of reach", None, LONG));
        assert_eq!(names(&mut waiting), [""; 0]);
    }

    #[test]
    fn failed_query_is_repeated_and_a_permanent_error_ends_its_work_only() {
        let (host, _stream, open, point) = stopped();
        drop(open);
        host.synchronize();
        let mut waiting = Waiting::default();
        waiting.push(work("a", Some(&point), LONG));
        waiting.push(work("b", Some(&point), LONG));
        // As while another thread captures a graph.
        host.fail_queries(2, 900);
        assert_eq!(names(&mut waiting), [""; 0], "one query for each pass");
        assert_eq!(host.failing_queries(), 1);
        assert_eq!(names(&mut waiting), [""; 0]);
        host.fail_queries(1, 700);
        let mut pass = waiting.pass();
        let (work, ended) = pass.take().expect("it has failed");
        assert_eq!(work.name, "a");
        assert!(matches!(ended, Err(BlockError::Failed(text)) if text.contains("(700)")));
        let (work, ended) = pass.take().expect("its query succeeds");
        assert_eq!((work.name, ended), ("b", Ok(())));
    }

    #[test]
    fn inbox_takes_later_work_while_earlier_work_waits_and_ends_with_its_sender() {
        let (host, _stream, open, point) = stopped();
        let (jobs, taken) = sync_channel(4);
        let mut inbox = Inbox::new(taken);
        let send = |job| assert!(jobs.send(job).is_ok());
        send(work("waits", Some(&point), LONG));
        send(work("late", Some(&point), Duration::from_millis(20)));
        send(work("ready", None, LONG));
        let name = |inbox: &mut Inbox<Work>| inbox.take().map(|(work, _)| work.name);
        assert_eq!(name(&mut inbox), Some("ready"));
        let began = Instant::now();
        assert_eq!(name(&mut inbox), Some("late"), "its deadline has passed");
        assert!(began.elapsed() < LONG);
        drop(jobs);
        drop(open);
        host.synchronize();
        assert_eq!(name(&mut inbox), Some("waits"));
        assert_eq!(name(&mut inbox), None);
    }
}
