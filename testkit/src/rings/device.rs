//! The ring of one device, on queue pairs that the agent has granted.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use reprise_client::queues::{DataFormat, GrantedQueuePair};
use reprise_client::{Client, QueueGrant, RegisteredMemory};
use reprise_cuda::ring::{
    BatchSettings, CONTEXTS_MAX, ContextStatus, Doorbells, HostRunner, Operation, QueueShape, Ring,
    RingMemory, RingQueue, RingSettings, Ticket, Transfer,
};
use reprise_cuda::store::{KvGeometry, MappingTable, Planned};
use reprise_policy::layout::PAGE_BYTES;

use super::RingPathSettings;

/// Batches of a ring.
const BATCHES: usize = 16;

/// Time beyond the deadline of a batch in which the ring must report its end.
const REPORT_WITHIN: Duration = Duration::from_secs(10);

/// Work that a path of rings has issued since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingCounters {
    /// Batches, each with one doorbell.
    pub batches: u64,
    /// Contexts of the batches: one for each transfer of objects or of a header page.
    pub contexts: u64,
    /// Bytes of reads, header pages included.
    pub bytes_read: u64,
    /// Bytes of writes.
    pub bytes_written: u64,
}

impl RingCounters {
    /// Counts a batch of one operation.
    fn issue(&mut self, operation: Operation, batch: &[Planned]) {
        let bytes: u64 = batch.iter().map(|planned| u64::from(planned.bytes)).sum();
        self.batches += 1;
        self.contexts += batch.len() as u64;
        match operation {
            Operation::Read => self.bytes_read += bytes,
            Operation::Write => self.bytes_written += bytes,
        }
    }
}

impl std::ops::Add for RingCounters {
    type Output = RingCounters;

    fn add(self, other: RingCounters) -> RingCounters {
        RingCounters {
            batches: self.batches + other.batches,
            contexts: self.contexts + other.contexts,
            bytes_read: self.bytes_read + other.bytes_read,
            bytes_written: self.bytes_written + other.bytes_written,
        }
    }
}

/// A ring on granted queue pairs; see the module.
pub(super) struct DeviceRing {
    device: u32,
    /// Parks its threads before the grant is returned.
    runner: HostRunner,
    ring: Ring,
    grant: QueueGrant,
    table: MappingTable,
    next_queue: usize,
    counters: RingCounters,
}

impl DeviceRing {
    /// Requests queue pairs and starts their threads.
    pub(super) fn open(
        client: &Client,
        (device, memory): (u32, &RegisteredMemory),
        geometry: &KvGeometry,
        settings: &RingPathSettings,
    ) -> anyhow::Result<DeviceRing> {
        let grant = client.request_queues(device, (settings.pairs, settings.depth), memory)?;
        let table = MappingTable::build(*geometry, grant.memory_address()).map_err(anyhow::Error::msg)?;
        let queues = grant.queues().len();
        let size = RingSettings { depth: BATCHES, queues, entries_max: settings.depth as usize };
        let mut ring = Ring::on_host(&size)?;
        for (index, pair) in grant.queues().iter().enumerate() {
            ring.init_queue(index, ring_queue(&grant, pair)?)?;
        }
        let runner = HostRunner::start(&ring, 0..queues)?;
        Ok(DeviceRing {
            device,
            runner,
            ring,
            grant,
            table,
            next_queue: 0,
            counters: RingCounters::default(),
        })
    }

    pub(super) fn table(&self) -> &MappingTable {
        &self.table
    }

    pub(super) fn transfer_max(&self) -> u64 {
        self.grant.device().transfer_max
    }

    pub(super) fn generation(&self) -> u64 {
        self.grant.generation()
    }

    pub(super) fn revoked(&self) -> Option<String> {
        self.grant.revoked()
    }

    pub(super) fn counters(&self) -> RingCounters {
        self.counters
    }

    /// Returns the transfer of a page at an offset in the registered memory.
    pub(super) fn page_transfer(&self, index: usize, in_memory: u64, offset: u64) -> Planned {
        Planned {
            address: self.grant.memory_address() + in_memory,
            offset,
            bytes: PAGE_BYTES as u32,
            block: u32::try_from(index).expect("a window of blocks"),
        }
    }

    /// Runs transfers, in batches that alternate between the queue pairs; returns the indices of blocks with a transfer
    /// that failed.
    pub(super) fn run(
        &mut self,
        operation: Operation,
        transfers: &[Planned],
        timeout: Duration,
    ) -> anyhow::Result<Vec<usize>> {
        let block_bytes = u64::from(self.grant.device().block_bytes);
        let namespace = self.grant.device().namespace;
        let (mut failed, mut in_flight) = (Vec::new(), Vec::new());
        // All queue pairs get a part.
        let part = transfers.len().div_ceil(self.grant.queues().len()).clamp(1, CONTEXTS_MAX);
        for batch in transfers.chunks(part) {
            let settings = BatchSettings { operation, namespace, timeout: Some(timeout), token: 0 };
            while self.ring.free_iocbs() == 0 {
                self.take(&mut in_flight, &mut failed, timeout)?;
            }
            let mut iocb = self.ring.get_iocb(&settings).context("a batch is free")?;
            for planned in batch {
                let Planned { address, offset, bytes, .. } = *planned;
                let pushed =
                    iocb.push(&Transfer { address, block: offset / block_bytes, bytes, checksum: 0 });
                ensure!(pushed, "a batch has room for {CONTEXTS_MAX} transfers");
            }
            let ticket = iocb.issue_io(self.next_queue)?;
            self.counters.issue(operation, batch);
            self.next_queue = (self.next_queue + 1) % self.grant.queues().len();
            in_flight.push((ticket, batch));
        }
        while !in_flight.is_empty() {
            self.take(&mut in_flight, &mut failed, timeout)?;
        }
        Ok(failed)
    }

    /// Waits for a batch, and collects the blocks of its failed transfers.
    fn take(
        &mut self,
        in_flight: &mut Vec<(Ticket, &[Planned])>,
        failed: &mut Vec<usize>,
        timeout: Duration,
    ) -> anyhow::Result<()> {
        let start = Instant::now();
        let cqe = self.ring.wait_cqe(timeout + REPORT_WITHIN);
        let cqe =
            cqe.with_context(|| format!("the ring reports no end of a batch within {:?}", start.elapsed()))?;
        let at =
            in_flight.iter().position(|(ticket, _)| *ticket == cqe.ticket).context("a batch in flight")?;
        let (ticket, batch) = in_flight.swap_remove(at);
        if cqe.failed > 0 {
            let statuses = self.ring.statuses(ticket).zip(batch);
            let wrong = statuses.filter(|(status, _)| *status != ContextStatus::Done);
            failed.extend(wrong.map(|(status, planned)| {
                tracing::warn!(
                    device = self.device,
                    ?status,
                    offset = planned.offset,
                    "a transfer of a ring failed"
                );
                planned.block as usize
            }));
        }
        Ok(())
    }

    /// Whether commands were given up, or the grant has ended: they may still access KV memory.
    pub(super) fn must_be_renewed(&self) -> bool {
        let unfinished = |queue| self.ring.given_up(queue) > 0 || self.ring.is_broken(queue);
        self.grant.revoked().is_some() || (0..self.grant.queues().len()).any(unfinished)
    }

    /// Returns the queue pairs, so that the agent deletes them with their commands, and requests others.
    pub(super) fn renew(
        self,
        client: &Client,
        memory: &RegisteredMemory,
        geometry: &KvGeometry,
        settings: &RingPathSettings,
    ) -> anyhow::Result<DeviceRing> {
        let (device, counters) = (self.device, self.counters);
        self.close(client)?;
        let renewed = DeviceRing::open(client, (device, memory), geometry, settings)?;
        Ok(DeviceRing { counters, ..renewed })
    }

    /// Parks the threads, and returns the queue pairs.
    pub(super) fn close(self, client: &Client) -> anyhow::Result<()> {
        let DeviceRing { runner, ring, grant, .. } = self;
        drop(runner);
        drop(ring);
        Ok(client.return_queues(grant)?)
    }
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
    let registers = grant.registers().span(0, grant.registers().bytes())?;
    let doorbells = Doorbells::mapped(
        &registers,
        usize::try_from(pair.submission_doorbell)?,
        usize::try_from(pair.completion_doorbell)?,
    )?;
    Ok(RingQueue::new(shape, memory, pair.address, doorbells)?)
}
