//! Rings on emulated controllers of this process, for checks of the backend `gpu-queue`.

use reprise_buffers::{PAGE_BYTES, Span};
use reprise_nvme::emulated::{EmulatedController, Emulation};
use reprise_nvme::{Backing, Controller, DmaMapping, DriverSettings};

use crate::gpu::Partition;
use crate::kernels::Kernels;
use crate::ring::{
    GpuRunner, HostRunner, OwnedQueue, QueueShape, Ring, RingError, RingMemory, RingSettings, WorkMemory,
    connect_gpu,
};
use crate::store::mover::MoveError;
use crate::store::{
    DetachedRing, KvGeometry, MappingTable, NamespaceLimits, Processor, RingDevice, RingMover,
};

/// Queue pairs of each controller.
const QUEUES: usize = 2;
/// Entries of each queue.
const ENTRIES: u32 = 32;
/// Batches of each ring.
const BATCHES: usize = 8;
/// Size of a logical block in bytes.
const BLOCK_BYTES: u32 = 512;
/// Number of the namespace.
const NAMESPACE: u32 = 1;

/// A mover over emulated controllers, each with one namespace.
#[derive(Debug)]
pub struct EmulatedRings<'k> {
    mover: RingMover<'k>,
    owners: Vec<Owner>,
}

/// What a ring needs at its controller.
#[derive(Debug)]
struct Owner {
    controller: Controller<EmulatedController>,
    queues: Vec<OwnedQueue<EmulatedController>>,
    _memory: DmaMapping,
}

impl<'k> EmulatedRings<'k> {
    /// Starts the controllers, and rings that threads drive, or the kernel if `gpu` is present.
    ///
    /// # Errors
    /// `Invalid` for objects that are not whole pages; `Ring`, `Gpu`.
    pub fn start(
        geometry: KvGeometry,
        memory: &Span,
        emulations: Vec<Emulation>,
        gpu: Option<(&'k Kernels, &Partition)>,
    ) -> Result<EmulatedRings<'k>, MoveError> {
        let (mut mover, mut owners) = (RingMover::new(geometry), Vec::new());
        for emulation in emulations {
            let (device, owner) = start(geometry, memory, emulation, gpu)?;
            mover.attach(device);
            owners.push(owner);
        }
        Ok(EmulatedRings { mover, owners })
    }

    /// Returns the mover over all controllers.
    pub fn mover(&mut self) -> &mut RingMover<'k> {
        &mut self.mover
    }

    /// Deletes the queue pairs of rings that were detached.
    ///
    /// # Errors
    /// `Ring` if a controller does not confirm.
    pub fn delete_queues(&mut self) -> Result<(), MoveError> {
        for Owner { controller, queues, .. } in &mut self.owners {
            queues.iter_mut().try_for_each(|queue| queue.delete(controller).map(|_| ()))?;
        }
        Ok(())
    }

    /// Stops the rings, and deletes their queue pairs.
    ///
    /// # Errors
    /// `Ring` if a controller does not confirm.
    pub fn stop(mut self) -> Result<(), MoveError> {
        let detached = self.mover.detach_all();
        self.delete_queues()?;
        // Streams wait for this. Memory of rings and queue pairs is released afterwards, because that waits for streams.
        detached.into_iter().for_each(DetachedRing::release);
        Ok(())
    }
}

fn start<'k>(
    geometry: KvGeometry,
    memory: &Span,
    emulation: Emulation,
    gpu: Option<(&'k Kernels, &Partition)>,
) -> Result<(RingDevice<'k>, Owner), MoveError> {
    let bytes = emulation.namespaces.first().map_or(0, |storage| storage.bytes());
    let backing = EmulatedController::start(emulation).map_err(RingError::from)?;
    let driver = DriverSettings { queue_pairs: QUEUES as u16, ..DriverSettings::default() };
    let mut controller = Controller::start(backing, driver).map_err(RingError::from)?;
    let mapping = controller.backing().map(memory).map_err(RingError::from)?;
    let allocate = |bytes: usize| match gpu {
        Some((kernels, _)) => RingMemory::registered(kernels.gpu(), bytes),
        None => RingMemory::allocate(bytes),
    };
    let pair_bytes = QueueShape::memory_bytes(ENTRIES, controller.data_format()).next_multiple_of(PAGE_BYTES);
    let mut queues = Vec::new();
    for _ in 0..QUEUES {
        queues.push(OwnedQueue::create(&mut controller, allocate(pair_bytes)?, ENTRIES, BLOCK_BYTES)?);
    }
    let settings = RingSettings { depth: BATCHES, queues: QUEUES, entries_max: ENTRIES as usize };
    let (ring, processor) = match gpu {
        None => {
            let mut ring = Ring::on_host(&settings)?;
            for (index, queue) in queues.iter().enumerate() {
                ring.init_queue(index, queue.for_host()?)?;
            }
            let runner = HostRunner::start(&ring, 0..QUEUES)?;
            (ring, Processor::Host(runner))
        }
        Some((kernels, partition)) => {
            let (shared, work) = settings.memory_bytes()?;
            let work = WorkMemory::on_gpu(kernels.gpu(), work)?;
            let mut ring = Ring::new(&settings, allocate(shared)?, work)?;
            connect_gpu(&mut ring, kernels.gpu(), &controller, &queues)?;
            let stream = partition.io_stream()?;
            let runner = GpuRunner::start(&ring, 0..QUEUES, kernels, stream, partition.io_sms())?;
            (ring, Processor::Gpu(runner))
        }
    };
    let table = MappingTable::build(geometry, mapping.address()).map_err(MoveError::Invalid)?;
    let limits = NamespaceLimits {
        namespace: NAMESPACE,
        bytes,
        block_bytes: BLOCK_BYTES,
        transfer_max: controller.transfer_max(),
        is_emulated: true,
    };
    let device = RingDevice::new(ring, processor, table, limits)?;
    Ok((device, Owner { controller, queues, _memory: mapping }))
}
