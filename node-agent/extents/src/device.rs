//! The ring of one device, on queue pairs that the agent has granted.

use std::time::Duration;

use anyhow::{Context, ensure};
use reprise_client::queues::{DataFormat, GrantedQueuePair};
use reprise_client::{Client, QueueGrant, RegisteredMemory};
use reprise_cuda::ring::{Doorbells, HostRunner, QueueShape, Ring, RingMemory, RingQueue, RingSettings};
use reprise_cuda::store::{KvGeometry, MappingTable, NamespaceLimits, Planned, Processor, RingDevice};
use reprise_policy::layout::PAGE_BYTES;

use crate::rings::RingPathSettings;

/// Batches of a ring.
const BATCHES: usize = 16;

/// Queue pairs of a device, and where the mover has their ring.
#[derive(Debug)]
pub(super) struct GrantedDevice {
    /// Index of the ring in the mover.
    pub(super) index: usize,
    pub(super) grant: QueueGrant,
}

impl GrantedDevice {
    /// Returns the transfer of a page at an offset in the registered memory.
    pub(super) fn page_transfer(&self, index: usize, in_memory: u64, offset: u64) -> Planned {
        Planned {
            address: self.grant.memory_address() + in_memory,
            offset,
            bytes: PAGE_BYTES as u32,
            block: u32::try_from(index).expect("a window of blocks"),
        }
    }
}

/// Requests queue pairs, and starts a ring on them.
pub(super) fn open_ring(
    client: &Client,
    (device, memory): (u32, &RegisteredMemory),
    geometry: &KvGeometry,
    settings: &RingPathSettings,
    timeout: Duration,
) -> anyhow::Result<(RingDevice<'static>, QueueGrant)> {
    let grant = client.request_queues_within(device, (settings.pairs, settings.depth), memory, timeout)?;
    let table = MappingTable::build(*geometry, grant.memory_address()).map_err(anyhow::Error::msg)?;
    let queues = grant.queues().len();
    let size = RingSettings { depth: BATCHES, queues, entries_max: settings.depth as usize };
    let mut ring = Ring::on_host(&size)?;
    for (index, pair) in grant.queues().iter().enumerate() {
        ring.init_queue(index, ring_queue(&grant, pair)?)?;
    }
    let runner = HostRunner::start(&ring, 0..queues)?;
    let of_grant = grant.device();
    let limits = NamespaceLimits {
        namespace: of_grant.namespace,
        bytes: u64::MAX,
        block_bytes: of_grant.block_bytes,
        transfer_max: of_grant.transfer_max,
        is_emulated: of_grant.is_emulated,
    };
    Ok((RingDevice::new(ring, Processor::Host(runner), table, limits)?, grant))
}

/// Describes a granted queue pair for a ring.
fn ring_queue(grant: &QueueGrant, pair: &GrantedQueuePair) -> anyhow::Result<RingQueue> {
    let device = grant.device();
    let format = match device.format {
        DataFormat::Prp => reprise_nvme::DataFormat::Prp,
        DataFormat::Sgl => reprise_nvme::DataFormat::Sgl,
    };
    let transfer_max = device.transfer_max.min(reprise_nvme::DataFormat::BYTES_MAX);
    let shape = QueueShape {
        id: pair.id,
        entries: pair.entries,
        format,
        transfer_max: u32::try_from(transfer_max).context("transfer limit")?,
        block_bytes: device.block_bytes,
    };
    let expected = QueueShape::completions_offset(pair.entries) as u64;
    ensure!(
        pair.completions_at == expected,
        "the completion queue is at {}: expected {expected}",
        pair.completions_at
    );
    let memory = RingMemory::host(pair.memory.span(0, pair.memory.bytes())?)?;
    let words = grant.doorbells().span(0, grant.doorbells().bytes())?;
    let doorbells = Doorbells::mapped(
        &words,
        usize::try_from(pair.submission_doorbell)?,
        usize::try_from(pair.completion_doorbell)?,
    )?;
    Ok(RingQueue::new(shape, memory, pair.address, doorbells)?)
}
