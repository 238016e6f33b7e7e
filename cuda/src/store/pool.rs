//! Threads that run the transfers of layers, for backends whose copies are synchronous calls.

use std::fmt;
use std::marker::PhantomData;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use crate::ring::Operation;
use crate::store::mover::{
    BlockError, LayerMover, LayerOutcome, LayerRequest, LayerTicket, MoveError, MoverCounters, REQUESTS_MAX,
    check,
};
use crate::store::progress::{Progress, Requests};
use crate::store::waiting::{Inbox, Ordered};
use crate::store::{Backend, BackendKind, BlockPlace, EngineStream, KvGeometry, Point};

/// Contiguous bytes of a layer of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    pub(super) device: usize,
    /// Offset in KV memory.
    pub(super) in_memory: u64,
    /// Offset on the device.
    pub(super) on_device: u64,
    pub(super) bytes: u64,
    /// Index of the block in the request.
    pub(super) block: u32,
}

/// Moves one piece in the calling thread.
pub trait PieceMover: fmt::Debug + Send + Sync + 'static {
    /// The backend of the calls.
    const KIND: BackendKind;

    /// Moves a piece in a direction.
    ///
    /// # Errors
    /// Device, library or copy has failed.
    fn run(&self, operation: Operation, piece: &Piece) -> Result<(), BlockError>;
}

/// A part of a request.
struct Job {
    operation: Operation,
    pieces: Vec<Piece>,
    after: Option<Point>,
    progress: Arc<Progress>,
}

impl Ordered for Job {
    fn after(&self) -> Option<&Point> {
        self.after.as_ref()
    }

    fn progress(&self) -> &Progress {
        &self.progress
    }
}

/// Threads and open requests; dropping it waits for transfers that run.
#[derive(Debug)]
pub struct PoolMover<M> {
    geometry: KvGeometry,
    /// Size of each device in bytes.
    devices: Vec<Option<u64>>,
    requests: Requests,
    jobs: Option<SyncSender<Job>>,
    threads: Vec<JoinHandle<()>>,
    mover: PhantomData<fn() -> M>,
}

impl<M: PieceMover> PoolMover<M> {
    pub(super) fn start(
        (name, threads): (&str, usize),
        geometry: KvGeometry,
        devices: Vec<u64>,
        mover: M,
    ) -> Result<PoolMover<M>, MoveError> {
        let (jobs, taken) = sync_channel(REQUESTS_MAX * threads);
        let (mover, taken) = (Arc::new(mover), Arc::new(Mutex::new(Inbox::new(taken))));
        let devices = devices.into_iter().map(Some).collect();
        let mut pool = PoolMover {
            geometry,
            devices,
            requests: Requests::default(),
            jobs: Some(jobs),
            threads: Vec::new(),
            mover: PhantomData,
        };
        for index in 0..threads {
            let (mover, taken) = (Arc::clone(&mover), Arc::clone(&taken));
            let thread = std::thread::Builder::new().name(format!("{name}-{index}"));
            pool.threads.push(thread.spawn(move || run(&*mover, &taken))?);
        }
        Ok(pool)
    }
}

impl<M: PieceMover> Backend for PoolMover<M> {
    fn kind(&self) -> BackendKind {
        M::KIND
    }

    fn is_emulated(&self) -> bool {
        false
    }
}

impl<M: PieceMover> LayerMover for PoolMover<M> {
    fn submit(&mut self, operation: Operation, request: &LayerRequest<'_>) -> Result<LayerTicket, MoveError> {
        check(&self.geometry, &self.devices, request)?;
        let (pieces, transfers) = pieces(&self.geometry, request);
        let block_bytes = (self.geometry.parts * self.geometry.object_bytes) as u64;
        let after = request.order.begin()?;
        let (ticket, progress) = self.requests.open(transfers, block_bytes, request.timeout)?;
        // Before any transfer, so that an error leaves none behind.
        let ticket = self.requests.finish_order(ticket, request.order)?;
        let Some(jobs) = &self.jobs else { return Err(MoveError::Busy) };
        for part in pieces.chunks(pieces.len().div_ceil(self.threads.len()).max(1)) {
            let (after, progress) = (after.clone(), Arc::clone(&progress));
            let job = Job { operation, pieces: part.to_vec(), after, progress };
            if let Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) = jobs.try_send(job) {
                self.requests.forget(ticket);
                return Err(MoveError::Busy);
            }
        }
        Ok(ticket)
    }

    fn delay_stream(&mut self, ticket: LayerTicket, stream: &EngineStream) -> Result<(), MoveError> {
        self.requests.delay(ticket, stream)
    }

    fn poll(&mut self, ticket: LayerTicket) -> Result<Option<LayerOutcome>, MoveError> {
        self.requests.poll(ticket)
    }

    fn wait(&mut self, ticket: LayerTicket) -> Result<LayerOutcome, MoveError> {
        self.requests.wait(ticket)
    }

    fn given_up(&self) -> usize {
        self.requests.given_up()
    }

    fn counters(&self) -> MoverCounters {
        self.requests.counters()
    }
}

impl<M> Drop for PoolMover<M> {
    fn drop(&mut self) {
        self.requests.abandon();
        self.jobs = None;
        for thread in self.threads.drain(..) {
            // A panic of the thread was reported when it happened.
            let _ = thread.join();
        }
    }
}

fn run(mover: &impl PieceMover, jobs: &Mutex<Inbox<Job>>) {
    loop {
        // The other threads wait for the lock while one waits for work.
        let job = jobs.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some((Job { operation, pieces, progress, .. }, ready)) = job else { return };
        for piece in &pieces {
            if !progress.start(1) {
                break;
            }
            progress.end(piece.block, ready.clone().and_then(|()| mover.run(operation, piece)));
        }
    }
}

/// Returns the pieces of a request, and the number of pieces of each block. Adjacent objects are one piece.
fn pieces(geometry: &KvGeometry, request: &LayerRequest<'_>) -> (Vec<Piece>, Vec<u32>) {
    let mut pieces: Vec<Piece> = Vec::with_capacity(request.blocks.len() * geometry.parts);
    let mut counts = Vec::with_capacity(request.blocks.len());
    let bytes = geometry.object_bytes as u64;
    for (block, place) in (0..).zip(request.blocks) {
        let BlockPlace { device, payload, slot } = *place;
        let first = pieces.len();
        for object in request.layer * geometry.parts..(request.layer + 1) * geometry.parts {
            let (in_memory, on_device) = (geometry.offset(object, slot), payload + object as u64 * bytes);
            match pieces[first..].last_mut() {
                Some(last) if last.in_memory + last.bytes == in_memory => last.bytes += bytes,
                _ => pieces.push(Piece { device, in_memory, on_device, bytes, block }),
            }
        }
        counts.push((pieces.len() - first) as u32);
    }
    (pieces, counts)
}
