//! Order between requests of layers and work of an engine's stream, without a wait of the CPU.
//!
//! ```text
//!   stream of the engine:  work ─▶ mark ─────────────▶ wait until word ≥ value ─▶ later work
//!   request:                        └▶ transfers ─▶ end ─┘ (stores the value)
//! ```
//!
//! A request begins when its mark has passed. The end of a request stores a value to a word of host memory, for which
//! the stream waits. Requests end in any order, so each wait has its own word; a word is used again with the next value,
//! and waits compare in cyclic order. A signal stores its value when it is dropped, so a word advances in each case: end,
//! failure, deadline, and drop of the mover.

mod host;
mod words;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::gpu::{Event, GpuError, HostMemory, Stream};
use crate::store::mover::MoveError;

pub use host::HostStream;
use host::Mark;
pub(super) use words::Signal;
use words::{WORDS_MAX, Words};

/// A stream of an engine on which requests are enqueued. Clones refer to the same stream.
///
/// Create one for each stream and keep it: each has a page of words. Drop it after the movers that have used it, because
/// releasing the page waits until the GPU has nothing to do.
#[derive(Clone, Debug)]
pub struct EngineStream {
    number: StreamNumber,
    words: Arc<Words>,
    work: Work,
}

/// Number of a stream in this process: points of one stream pass in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StreamNumber(u64);

impl StreamNumber {
    fn next() -> StreamNumber {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        StreamNumber(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

#[derive(Clone, Debug)]
enum Work {
    Gpu(Arc<Stream>),
    Host(HostStream),
}

/// A point in a stream. Clones refer to the same point.
#[derive(Clone, Debug)]
pub struct Point {
    kind: Kind,
    /// The stream of the point, or a number without other points.
    stream: StreamNumber,
}

#[derive(Clone, Debug)]
enum Kind {
    Gpu(Arc<Event>),
    Host(Mark),
}

/// Order of a request and work of the engine.
#[derive(Clone, Copy, Debug, Default)]
pub enum RequestOrder<'a> {
    /// The request begins at once.
    #[default]
    Unordered,
    /// No byte moves before the point has passed.
    After(&'a Point),
    /// No byte moves before the work that the stream has; later work of the stream begins after the end of the request.
    On(&'a EngineStream),
}

impl RequestOrder<'_> {
    /// Returns the point before which no byte moves; marks the stream.
    pub(super) fn begin(self) -> Result<Option<Point>, MoveError> {
        Ok(match self {
            RequestOrder::Unordered => None,
            RequestOrder::After(point) => Some(point.clone()),
            RequestOrder::On(stream) => Some(stream.mark()?),
        })
    }

    /// Returns the stream whose later work begins after the end of the request.
    pub(super) fn stream(&self) -> Option<&EngineStream> {
        match self {
            RequestOrder::On(stream) => Some(stream),
            RequestOrder::Unordered | RequestOrder::After(_) => None,
        }
    }
}

impl EngineStream {
    /// Prepares a stream of a GPU.
    ///
    /// # Errors
    /// `NoStreamWaits` if the driver or the GPU cannot let a stream wait for a word; too little memory that can be pinned.
    pub fn on_gpu(stream: Arc<Stream>) -> Result<EngineStream, GpuError> {
        stream.gpu().stream_waits()?;
        let memory = HostMemory::new(stream.gpu(), 4 * WORDS_MAX as u64)?;
        memory.write(0, &[0; 4 * WORDS_MAX])?;
        let (number, words) = (StreamNumber::next(), Arc::new(Words::on_gpu(memory)));
        Ok(EngineStream { number, words, work: Work::Gpu(stream) })
    }

    /// Prepares an emulated stream.
    pub fn on_host(stream: &HostStream) -> EngineStream {
        let (number, words) = (StreamNumber::next(), Arc::new(Words::on_host()));
        EngineStream { number, words, work: Work::Host(stream.clone()) }
    }

    /// Marks the point behind all work that the stream has so far.
    ///
    /// # Errors
    /// The driver has failed, or the stream is being captured into a graph.
    pub fn mark(&self) -> Result<Point, GpuError> {
        let kind = match &self.work {
            Work::Gpu(stream) => {
                stream.require_no_capture()?;
                let event = Event::without_time(stream.gpu())?;
                event.record(stream)?;
                Kind::Gpu(Arc::new(event))
            }
            Work::Host(stream) => Kind::Host(stream.mark()),
        };
        Ok(Point { kind, stream: self.number })
    }

    /// Delays later work of the stream until the signal is dropped.
    pub(super) fn delay(&self) -> Result<Signal, MoveError> {
        let signal = Words::take(&self.words).ok_or(MoveError::StreamBusy)?;
        match &self.work {
            Work::Gpu(stream) => self.words.delay(stream, &signal)?,
            Work::Host(stream) => stream.wait_word(&self.words, &signal),
        }
        Ok(signal)
    }

    /// Reports whether both are clones of one value.
    pub(super) fn is_same(&self, other: &EngineStream) -> bool {
        Arc::ptr_eq(&self.words, &other.words)
    }
}

impl Point {
    /// Uses an event of a GPU that was recorded.
    pub fn of_event(event: Arc<Event>) -> Point {
        Point { kind: Kind::Gpu(event), stream: StreamNumber::next() }
    }

    /// Reports whether the work before the point has ended.
    ///
    /// # Errors
    /// The GPU has failed ([`GpuError::is_permanent`]), or another thread has disturbed the query.
    pub fn has_passed(&self) -> Result<bool, GpuError> {
        match &self.kind {
            Kind::Gpu(event) => event.has_passed(),
            Kind::Host(mark) => mark.query(),
        }
    }

    pub(super) fn stream(&self) -> StreamNumber {
        self.stream
    }
}
