//! The backend `staged`: io_uring moves layers between files and a window in host memory, and copy kernels between the
//! window and paged KV memory.
//!
//! The window has two halves. While the kernel converts one half, the devices fill or empty the other half. With KV
//! memory of a GPU, the window is registered for the GPU, and its copy engine and kernels convert. With KV memory of the
//! host, the host build of the same kernels converts: the backend is then `staged-host`.
//!
//! One thread runs all requests, in order; requests that wait for a point of a stream are passed. A request whose deadline has passed converts nothing more. Its operations on
//! devices cannot be cancelled: they are given up until the devices end them, and the thread waits for that.

mod convert;
mod worker;

use std::sync::Arc;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use reprise_io::DeviceFile;

use crate::ring::Operation;
use crate::store::mover::{
    LayerMover, LayerOutcome, LayerRequest, LayerTicket, MoveError, MoverCounters, REQUESTS_MAX, check,
};
use crate::store::progress::{Progress, Requests};
use crate::store::waiting::{Inbox, Ordered};
use crate::store::{Backend, BackendKind, BlockPlace, EngineStream, KvGeometry, KvMemory, Point};

/// Bytes of the window that make it large enough: each half has many operations in flight.
const WINDOW_BYTES: u64 = 32 << 20;

/// How long a dropped backend waits for its thread. Operations of a device that hangs in the kernel end later; the thread
/// keeps files, window and KV memory of the host until then.
const DROP_LIMIT: Duration = Duration::from_secs(1);

/// Size of a page, of which layers of blocks must be multiples for direct I/O.
const PAGE: usize = reprise_io::IO_ALIGN;

/// A request on its way to the thread.
struct Job {
    operation: Operation,
    layer: usize,
    blocks: Vec<BlockPlace>,
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

/// Files of devices, a window, and the thread that uses them; see the module.
#[derive(Debug)]
pub struct StagedMover {
    geometry: KvGeometry,
    /// Size of each device in bytes.
    devices: Vec<Option<u64>>,
    requests: Requests,
    is_on_gpu: bool,
    jobs: Option<SyncSender<Job>>,
    thread: Option<JoinHandle<()>>,
}

impl StagedMover {
    /// Opens the files with io_uring, and allocates the window.
    ///
    /// # Errors
    /// `Invalid` if layers of blocks are not whole pages, or KV memory is too small; `Io` if a file or io_uring cannot be
    /// used; `Gpu`, `Ring` for memory; `Thread`.
    pub fn new(
        geometry: KvGeometry,
        memory: KvMemory,
        files: Vec<DeviceFile>,
    ) -> Result<StagedMover, MoveError> {
        let layer_bytes = geometry.parts * geometry.object_bytes;
        if layer_bytes == 0 || !layer_bytes.is_multiple_of(PAGE) {
            return Err(MoveError::Invalid(format!(
                "layers of blocks of {layer_bytes} bytes: direct I/O needs whole pages of {PAGE} bytes; use more tokens \
                 per block"
            )));
        }
        memory.check(&geometry)?;
        let devices = files.iter().map(|file| Some(file.size())).collect();
        let is_on_gpu = memory.is_on_gpu();
        let (jobs, taken) = sync_channel(REQUESTS_MAX);
        let (opened, opening) = sync_channel(1);
        let thread = std::thread::Builder::new().name("staged".to_owned());
        let thread =
            thread.spawn(move || worker::run(geometry, &memory, files, &opened, Inbox::new(taken)))?;
        // The thread opens everything, because it borrows the kernels.
        let open = opening.recv();
        open.unwrap_or_else(|_| Err(MoveError::Invalid("the thread of the backend has ended".to_owned())))?;
        let (jobs, thread, requests) = (Some(jobs), Some(thread), Requests::default());
        Ok(StagedMover { geometry, devices, requests, is_on_gpu, jobs, thread })
    }
}

impl Backend for StagedMover {
    fn kind(&self) -> BackendKind {
        BackendKind::Staged
    }

    fn is_emulated(&self) -> bool {
        !self.is_on_gpu
    }
}

impl LayerMover for StagedMover {
    fn submit(&mut self, operation: Operation, request: &LayerRequest<'_>) -> Result<LayerTicket, MoveError> {
        check(&self.geometry, &self.devices, request)?;
        // A layer of a block is contiguous on its device: one transfer.
        let transfers = vec![1; request.blocks.len()];
        let block_bytes = (self.geometry.parts * self.geometry.object_bytes) as u64;
        let after = request.order.begin()?;
        let (ticket, progress) = self.requests.open(transfers, block_bytes, request.timeout)?;
        // Before any transfer, so that an error leaves none behind.
        let ticket = self.requests.finish_order(ticket, request.order)?;
        let blocks = request.blocks.to_vec();
        let job = Job { operation, layer: request.layer, blocks, after, progress };
        match self.jobs.as_ref().map(|jobs| jobs.try_send(job)) {
            Some(Ok(())) => Ok(ticket),
            Some(Err(TrySendError::Full(_) | TrySendError::Disconnected(_))) | None => {
                self.requests.forget(ticket);
                Err(MoveError::Busy)
            }
        }
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

impl Drop for StagedMover {
    fn drop(&mut self) {
        // Queued requests start nothing more, and reads that end later do not reach KV memory.
        self.requests.abandon();
        self.jobs = None;
        let Some(thread) = self.thread.take() else { return };
        let until = Instant::now() + DROP_LIMIT;
        while !thread.is_finished() {
            if Instant::now() >= until {
                tracing::error!(
                    "a device has not ended its operations: leaving their memory and files to a thread"
                );
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        // A panic of the thread was reported when it happened.
        let _ = thread.join();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::KvOrder;

    #[test]
    fn drop_does_not_wait_for_a_device_that_hangs() {
        let (resume, hung) = sync_channel::<()>(0);
        let (jobs, taken) = sync_channel(1);
        let thread = std::thread::spawn(move || {
            let _ = hung.recv();
            taken.iter().for_each(drop::<Job>);
        });
        let mut requests = Requests::default();
        let (_, progress) = requests.open(vec![1], 4096, Duration::from_secs(60)).expect("room");
        let job = Job {
            operation: Operation::Read,
            layer: 0,
            blocks: Vec::new(),
            after: None,
            progress: Arc::clone(&progress),
        };
        assert!(jobs.try_send(job).is_ok());
        let order = KvOrder::BlockLayerPart;
        let geometry = KvGeometry { layers: 1, parts: 1, blocks: 1, object_bytes: PAGE, order };
        let (jobs, thread) = (Some(jobs), Some(thread));
        let mover = StagedMover { geometry, devices: Vec::new(), requests, is_on_gpu: false, jobs, thread };
        let start = Instant::now();
        drop(mover);
        assert!(start.elapsed() < 10 * DROP_LIMIT);
        assert!(progress.is_over() && !progress.start(1), "the queued request starts nothing");
        drop(resume);
    }
}
