//! The real pool and worker over a simulated device, stepped manually on one thread; for tests.
//!
//! ```text
//!  DevicePool ── operations ──► Worker::run_once ──► SimulatedDevice
//!      ▲                            │
//!      └──────── reports ───────────┘
//! ```

use crossbeam_channel::{Receiver, Sender, bounded};
use reprise_agent_core::effect::{ArenaSlot, BlockRead, RegionId};
use reprise_agent_core::pool::{BlockWrite, DevicePool, PageNumber, PoolEvent, PoolParams, StoredBlock};
use reprise_buffers::{ArenaConfig, HugePolicy, PageCoverage, crc32c};
use reprise_io::simulated::{CrashMode, Image, SimulatedDevice, SimulatedSettings};
use reprise_policy::{BlockKey, ContentId, Layout, LayoutSpec, TenantId};

use super::*;
use crate::device::open::RawDevice;
use crate::device::open::tests::open_simulated;
use crate::device::{DeviceContent, OpenDecision, RecoveredPool};
use crate::error::AgentError;
use crate::metrics::Metrics;

/// Five segments of 2 MiB behind the journal.
pub(super) const DEVICE_BYTES: u64 = 12 << 20;

/// Number of arena slots, each large enough for the larger layout.
pub(super) const PLACES: usize = 32;

/// A device whose power a test cuts.
pub(super) trait PoweredDevice: Sized {
    /// Starts a device with this content and opens it as in the agent.
    fn start(image: Image, seed: u64) -> Result<(Self, RawDevice, DeviceContent), AgentError>;

    /// Ends all access to the device; returns the surviving content.
    fn cut_power(&self, mode: CrashMode) -> Image;
}

impl PoweredDevice for SimulatedDevice {
    fn start(image: Image, seed: u64) -> Result<(SimulatedDevice, RawDevice, DeviceContent), AgentError> {
        let settings = SimulatedSettings { seed, ..SimulatedSettings::default() };
        let device = SimulatedDevice::new(image, settings).expect("valid settings");
        let (open, content) = open_simulated(&device, None)?;
        Ok((device, open, content))
    }

    fn cut_power(&self, mode: CrashMode) -> Image {
        self.crash(mode)
    }
}

/// A device that was opened as in the agent, with its pool and its worker.
pub(super) struct TestBench<D = SimulatedDevice> {
    pub(super) device: D,
    pub(super) pool: DevicePool,
    /// Blocks that were recovered.
    pub(super) found: Vec<StoredBlock>,
    /// `None` if the device is lost.
    worker: Option<Worker>,
    /// Reasons of all reported losses.
    pub(super) losses: Vec<String>,
    commands: Sender<Command>,
    inputs: Receiver<Input>,
    arena: Arc<Arena>,
    /// Number of pool operations that the worker has not reported.
    outstanding: usize,
}

/// 16 KiB and 48 KiB: slots of two sizes, so that segments change their slot size.
pub(super) fn layouts() -> [Layout; 2] {
    [(4, 64), (6, 128)].map(|(layers, head_dim)| {
        let spec =
            LayoutSpec { layers, kv_heads: 1, head_dim, tokens_per_block: 16, ..LayoutSpec::LLAMA_3_8B };
        spec.validate().expect("a valid layout")
    })
}

fn key(number: u64) -> BlockKey {
    BlockKey((u128::from(number) << 64 | u128::from(number ^ 0x5eed)).to_le_bytes())
}

/// Returns the number from which a block's key and content are derived.
pub(super) fn number(key: &BlockKey) -> u64 {
    u64::from_le_bytes(key.0[8..].try_into().expect("8 of 16 bytes"))
}

/// Derives every word from the block's number and the word's offset.
fn payload(number: u64, layout: &Layout) -> Vec<u8> {
    let word = |at: u64| (number << 32 | at).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (0..layout.slot_bytes() / 8).flat_map(|at| word(at).to_le_bytes()).collect()
}

fn place(index: usize, layout: &Layout) -> ArenaSlot {
    let largest = layouts()[1].slot_bytes();
    ArenaSlot { region: RegionId(0), offset: index as u64 * largest, bytes: layout.slot_bytes() }
}

fn params() -> PoolParams {
    PoolParams {
        device_bytes: DEVICE_BYTES,
        segment_bytes: 2 << 20,
        pool_uuid: *b"simulated device",
        device_index: 0,
        created_unix_us: 1_700_000_000_000_000,
    }
}

impl<D: PoweredDevice> TestBench<D> {
    /// Formats a blank device.
    pub(super) fn blank(seed: u64) -> TestBench<D> {
        TestBench::with(Image::new(DEVICE_BYTES), seed, |open, found| {
            assert!(matches!(found, DeviceContent::Blank { .. }), "nothing was written yet");
            let formatted = open.apply(&OpenDecision::Format(params())).expect("a blank device takes a pool");
            formatted.expect("the formatted pool is recovered")
        })
    }

    /// Opens a surviving image.
    pub(super) fn open(image: Image, seed: u64) -> TestBench<D> {
        TestBench::with(image, seed, |_, found| match found {
            DeviceContent::Pool(recovered) => *recovered,
            DeviceContent::Blank { .. } => panic!("the image has a pool"),
        })
    }

    fn with(
        image: Image,
        seed: u64,
        recover: impl FnOnce(&mut RawDevice, DeviceContent) -> RecoveredPool,
    ) -> TestBench<D> {
        let (device, mut open, found) = D::start(image, seed).expect("the device works");
        let RecoveredPool { pool, stored, .. } = recover(&mut open, found);
        let config = ArenaConfig { bytes: 2 << 20, region_bytes: 2 << 20, huge: HugePolicy::Never };
        let arena = Arc::new(Arena::new(&config).expect("2 MiB"));
        let (inbox, inputs) = Inbox::new();
        let (commands, receiver) = bounded(COMMANDS_MAX);
        let context = WorkerContext {
            bandwidth: Weights::default(),
            device: DeviceId(0),
            path: "simulated".to_owned(),
            commands: receiver,
            inbox,
            arena: arena.clone(),
            keys: crate::encryption::EncryptionKeys::default(),
            clock: Clock::start(),
            metrics: Metrics::new("test", PageCoverage::default()).device(DeviceId(0)),
            sync_failed: Arc::default(),
            write_error: Arc::default(),
            media_errors: Arc::default(),
        };
        let worker = Some(Worker::new(context, open.into_engine()));
        let (found, losses) = (stored, Vec::new());
        TestBench { device, pool, found, worker, losses, commands, inputs, arena, outstanding: 0 }
    }

    /// Submits operations of the pool to the worker.
    pub(super) fn submit(&mut self, ops: Vec<DeviceOp>) {
        self.outstanding += ops.len();
        for op in ops {
            self.commands.send(Command::Op(op)).expect("the worker is running");
        }
    }

    /// Runs one pass if operations are outstanding, and returns the resulting events.
    pub(super) fn run_once(&mut self) -> Vec<PoolEvent> {
        let mut events = Vec::new();
        if self.outstanding > 0 {
            for (token, result) in self.reports().into_iter().flat_map(|report| report.done) {
                self.outstanding -= 1;
                let (ops, happened) = self.pool.done(token, result);
                self.submit(ops);
                events.extend(happened);
            }
        }
        events
    }

    /// Runs passes until every operation of the pool has completed.
    pub(super) fn run_until_idle(&mut self) -> Vec<PoolEvent> {
        let mut events = Vec::new();
        while self.outstanding > 0 {
            events.extend(self.run_once());
        }
        events
    }

    /// Runs one pass of the worker, which reports a loss of the device.
    fn reports(&mut self) -> Vec<DeviceReport> {
        let mut worker = self.worker.take().expect("the worker of a lost device does not run");
        match worker.run_once() {
            Ok(CommandState::Open) => self.worker = Some(worker),
            Ok(CommandState::Ended) => panic!("the worker was not stopped"),
            Ok(CommandState::Closed) => panic!("the device was not closed"),
            Err(reason) => drop(worker.into_lost(Some(reason))),
        }
        let report = |input| match input {
            Input::Device(report) => report,
            _ => panic!("expected a device report"),
        };
        let reports: Vec<DeviceReport> = self.inputs.try_iter().map(report).collect();
        self.losses.extend(reports.iter().filter_map(|report| report.lost.clone()));
        reports
    }

    /// Fills an arena slot with a block to be written.
    pub(super) fn fill(&self, index: usize, number: u64, layout: Layout, page: PageNumber) -> BlockWrite {
        let (slot, payload) = (place(index, &layout), payload(number, &layout));
        self.write_arena(&slot, &payload);
        let checksums = payload.chunks(layout.object_bytes() as usize).map(crc32c).collect();
        let (key, content) = (key(number), ContentId::UNKNOWN);
        let tenant = TenantId::DEFAULT;
        BlockWrite { key, tenant, tenant_name: None, layout, content, priority: 0, checksums, slot, page }
    }

    /// Overwrites an arena slot, as its next owner would.
    pub(super) fn overwrite(&self, index: usize) {
        let slot = place(index, &layouts()[1]);
        self.write_arena(&slot, &vec![0xee; slot.bytes as usize]);
    }

    fn write_arena(&self, slot: &ArenaSlot, bytes: &[u8]) {
        let span = self.arena.span(slot.region.0, slot.offset, slot.bytes).expect("inside the arena");
        span.copy_in(bytes).expect("the arena is writable");
    }

    /// Returns whether an arena slot holds a block.
    pub(super) fn holds(&self, index: usize, number: u64, layout: &Layout) -> bool {
        let slot = place(index, layout);
        let mut bytes = vec![0; slot.bytes as usize];
        self.arena
            .span(slot.region.0, slot.offset, slot.bytes)
            .expect("inside the arena")
            .copy_out(&mut bytes);
        bytes == payload(number, layout)
    }

    /// Returns why the device rejects writes, if so.
    pub(super) fn write_error(&self) -> Option<String> {
        self.worker.as_ref().and_then(|worker| worker.context.write_error.get().cloned())
    }

    /// Reads blocks through the worker and compares their content.
    pub(super) fn read_and_compare(&mut self, blocks: &[StoredBlock]) {
        for layout in layouts() {
            let of_layout: Vec<StoredBlock> =
                blocks.iter().copied().filter(|block| block.layout == layout).collect();
            of_layout.chunks(PLACES).for_each(|some| self.read_and_compare_some(some, layout));
        }
    }

    fn read_and_compare_some(&mut self, blocks: &[StoredBlock], layout: Layout) {
        let reads = blocks.iter().enumerate().map(|(index, block)| BlockRead {
            fill: FillId(number(&block.key)),
            key: block.key,
            page: block.page,
            generation: block.generation,
            header_crc: block.header_crc,
            slot: place(index, &layout),
        });
        let batch = ReadBatch {
            tenant: TenantId::DEFAULT,
            class: ReadClass::Awaited,
            blocks: reads.collect(),
            layout,
            read_bytes: 16 << 10,
        };
        self.commands.send(Command::Read(batch)).expect("the worker is here");
        let mut left = blocks.len();
        while left > 0 {
            for (FillId(number), update) in self.reports().into_iter().flat_map(|report| report.fills) {
                match update {
                    FillUpdate::Layers { layers, .. } => left -= usize::from(layers == layout.layers()),
                    FillUpdate::Failed(error) => panic!("cannot read block {number}: {error:?}"),
                }
            }
        }
        for (index, block) in blocks.iter().enumerate() {
            let number = number(&block.key);
            assert!(self.holds(index, number, &layout), "block {number} has different content");
        }
    }

    /// Asserts that exactly the slots of the recovered blocks are in use.
    pub(super) fn assert_no_slot_leaks(&self) {
        self.pool.audit().expect("the slots are consistent");
        let usage = self.pool.usage();
        let used: u64 = self.found.iter().map(|stored| stored.layout.slot_bytes() + PAGE_BYTES).sum();
        assert_eq!(
            (usage.blocks_stored, usage.slot_bytes_used),
            (self.found.len() as u64, used),
            "{usage:?}"
        );
        let left = usage.slot_bytes_free + usage.slack_bytes + usage.slot_bytes_quarantined;
        assert_eq!((usage.pending_frees_bytes, left), (0, usage.capacity_bytes - used), "{usage:?}");
    }
}
