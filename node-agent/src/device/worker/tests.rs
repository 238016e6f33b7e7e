//! The worker over a simulated device: blocks are verified, and faults have bounded effects.

use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, bounded};
use reprise_agent_core::effect::{ArenaSlot, BlockRead, RegionId};
use reprise_agent_core::pool::PageNumber;
use reprise_agent_core::pool::header::{HeaderFields, encode_header};
use reprise_buffers::{ArenaConfig, HugePolicy, crc32c};
use reprise_io::Waker;
use reprise_io::simulated::{Fault, FaultKind, Image, SimulatedDevice, SimulatedSettings};
use reprise_policy::{BlockKey, ContentId, Generation, Layout, LayoutSpec, Tick};

use reprise_agent_core::effect::FillId;

use super::*;
use crate::device::reads::{PendingReads, PieceRead};
use crate::metrics::Metrics;

/// Maximum wait for events that take microseconds.
const PATIENCE: Duration = Duration::from_secs(20);

/// Blocks on the device in adjacent slots.
const BLOCKS: u32 = 40;

/// A worker on its thread.
struct Fixture {
    device: SimulatedDevice,
    arena: Arc<Arena>,
    commands: Sender<Command>,
    waker: Waker,
    inputs: Receiver<Input>,
    thread: Option<JoinHandle<()>>,
    media_errors: Arc<AtomicU32>,
}

/// 4 layers of 2 × 4 KiB.
fn layout() -> Layout {
    let spec =
        LayoutSpec { layers: 4, kv_heads: 1, head_dim: 128, tokens_per_block: 16, ..LayoutSpec::LLAMA_3_8B };
    spec.validate().expect("a valid layout")
}

fn stride() -> u64 {
    PAGE_BYTES + layout().slot_bytes()
}

fn payload(block: u32) -> Vec<u8> {
    (0..layout().slot_bytes()).map(|at| (at * 7 + u64::from(block) * 13) as u8).collect()
}

/// Returns the header page of a block and its checksum.
fn header(block: u32) -> (Box<[u8]>, u32) {
    let checksums: Vec<u32> = payload(block).chunks(layout().object_bytes() as usize).map(crc32c).collect();
    encode_header(&HeaderFields {
        pool_uuid: [1; 16],
        page: page(block),
        key: BlockKey([block as u8; 16]),
        content: ContentId::UNKNOWN,
        layout: layout(),
        generation: Generation(1),
        tenant: None,
        checksums: &checksums,
    })
}

fn page(block: u32) -> PageNumber {
    PageNumber(u64::from(block) * stride() / PAGE_BYTES)
}

fn slot(block: u32) -> ArenaSlot {
    ArenaSlot {
        region: RegionId(0),
        offset: u64::from(block) * layout().slot_bytes(),
        bytes: layout().slot_bytes(),
    }
}

/// Write of a block from its arena slot to its place on the device.
fn write(block: u32) -> DeviceOpKind {
    write_from(block, slot(block))
}

fn write_from(block: u32, slot: ArenaSlot) -> DeviceOpKind {
    let (tenant, header) = (TenantId::DEFAULT, header(block).0);
    DeviceOpKind::WriteBlock { tenant, offset: u64::from(block) * stride(), header, slot }
}

/// Resources of a worker with an arena of 2 MiB.
fn context() -> (WorkerContext, Sender<Command>, Receiver<Input>) {
    let config = ArenaConfig { bytes: 2 << 20, region_bytes: 2 << 20, huge: HugePolicy::Never };
    let (inbox, inputs) = Inbox::new();
    let (commands, receiver) = bounded(COMMANDS_MAX);
    let context = WorkerContext {
        bandwidth: Weights::default(),
        device: DeviceId(0),
        path: "simulated".to_owned(),
        commands: receiver,
        inbox,
        arena: Arc::new(Arena::new(&config).expect("2 MiB")),
        keys: crate::encryption::EncryptionKeys::default(),
        clock: Clock::start(),
        metrics: Metrics::new("test", reprise_buffers::PageCoverage::default()).device(DeviceId(0)),
        sync_failed: Arc::default(),
        write_error: Arc::default(),
        media_errors: Arc::default(),
    };
    (context, commands, inputs)
}

/// A worker that does not run.
fn idle_worker() -> (SimulatedDevice, Worker) {
    let image = Image::new(u64::from(BLOCKS) * stride());
    let device = SimulatedDevice::new(image, SimulatedSettings::default()).expect("a device");
    let engine = device.open_engine().expect("the device has no other engine");
    (device, Worker::new(context().0, Box::new(engine)))
}

impl Fixture {
    /// Creates a device that holds all blocks; the arena is blank.
    fn new() -> Fixture {
        let mut image = Image::new(u64::from(BLOCKS) * stride());
        for block in 0..BLOCKS {
            image.write(u64::from(block) * stride(), &header(block).0);
            image.write(u64::from(block) * stride() + PAGE_BYTES, &payload(block));
        }
        Fixture::on(image)
    }

    /// Creates a device from an image; the arena is blank.
    fn on(image: Image) -> Fixture {
        let device = SimulatedDevice::new(image, SimulatedSettings::default()).expect("a device");
        let engine = device.open_engine().expect("the device has no other engine");
        let (waker, (context, commands, inputs)) = (engine.waker(), context());
        let (arena, media_errors) = (context.arena.clone(), context.media_errors.clone());
        let thread = Some(std::thread::spawn(move || Worker::new(context, Box::new(engine)).run()));
        Fixture { device, arena, commands, waker, inputs, thread, media_errors }
    }

    fn command(&self, command: Command) {
        self.commands.send(command).expect("the worker is running");
        self.waker.wake();
    }

    fn read(&self, blocks: impl IntoIterator<Item = u32>) {
        let batch = Fixture::batch(ReadClass::Awaited, blocks);
        self.command(Command::Read(batch));
    }

    fn batch(class: ReadClass, blocks: impl IntoIterator<Item = u32>) -> ReadBatch {
        let block = |block| BlockRead {
            fill: FillId(u64::from(block)),
            key: BlockKey([block as u8; 16]),
            page: page(block),
            generation: Generation(1),
            header_crc: header(block).1,
            slot: slot(block),
        };
        let blocks = blocks.into_iter().map(block).collect();
        ReadBatch { tenant: TenantId::DEFAULT, class, blocks, layout: layout(), read_bytes: 8 << 10 }
    }

    fn op(&self, token: u64, kind: DeviceOpKind) {
        self.command(Command::Op(DeviceOp { token: OpToken(token), kind }));
    }

    /// Returns the results of this number of fills, by block.
    fn ends(&self, wanted: usize) -> Vec<(u32, Result<(), FillError>)> {
        let mut ends = Vec::new();
        while ends.len() < wanted {
            let Input::Device(DeviceReport { fills, done, .. }) =
                self.inputs.recv_timeout(PATIENCE).expect("a fill update")
            else {
                panic!("expected a device report");
            };
            assert!(done.is_empty(), "expected fills only");
            for (FillId(fill), update) in fills {
                match update {
                    FillUpdate::Layers { layers: 4, .. } => ends.push((fill as u32, Ok(()))),
                    FillUpdate::Layers { .. } => {}
                    FillUpdate::Failed(error) => ends.push((fill as u32, Err(error))),
                }
            }
        }
        ends.sort_unstable_by_key(|(block, _)| *block);
        ends
    }

    fn done(&self) -> (u64, Result<(), DeviceError>) {
        match self.inputs.recv_timeout(PATIENCE).expect("a completed operation") {
            Input::Device(DeviceReport { mut done, fills, .. }) if done.len() == 1 && fills.is_empty() => {
                let (token, result) = done.remove(0);
                (token.0, result)
            }
            _ => panic!("expected one operation"),
        }
    }

    /// Returns the worker's next report.
    fn report(&self) -> DeviceReport {
        match self.inputs.recv_timeout(PATIENCE).expect("a device report") {
            Input::Device(report) => report,
            _ => panic!("expected a device report"),
        }
    }

    fn in_arena(&self, block: u32) -> Vec<u8> {
        let mut bytes = vec![0; layout().slot_bytes() as usize];
        self.arena.span(0, slot(block).offset, slot(block).bytes).expect("inside").copy_out(&mut bytes);
        bytes
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        // Fails if the worker has panicked, which the join below reports.
        let _ = self.commands.send(Command::Stop);
        self.waker.wake();
        let ended = self.thread.take().expect("joined once").join();
        assert!(ended.is_ok() || std::thread::panicking(), "the worker panicked");
    }
}

#[test]
fn blocks_are_read_and_verified() {
    let fixture = Fixture::new();
    fixture.read(0..20);
    fixture.read(20..BLOCKS);
    assert!(fixture.ends(BLOCKS as usize).iter().all(|(_, end)| end.is_ok()));
    assert!((0..BLOCKS).all(|block| fixture.in_arena(block) == payload(block)));
}

#[test]
fn written_block_has_its_header_in_front_and_survives_after_a_sync() {
    let fixture = Fixture::new();
    fixture.device.corrupt(|image| image.write(0, &vec![0; 5 * stride() as usize]));
    let span = fixture.arena.span(0, slot(3).offset, slot(3).bytes).expect("inside");
    span.copy_in(&payload(3)).expect("writable");
    fixture.op(7, write(3));
    assert_eq!(fixture.done(), (7, Ok(())));
    fixture.op(8, DeviceOpKind::WritePages { offset: 0, bytes: vec![9; 8192] });
    assert_eq!(fixture.done(), (8, Ok(())));
    fixture.op(9, DeviceOpKind::Sync);
    assert_eq!(fixture.done(), (9, Ok(())));
    let image = fixture.device.image();
    let mut on_device = vec![0; stride() as usize];
    image.read(3 * stride(), &mut on_device);
    assert!(on_device[..4096] == *header(3).0 && on_device[4096..] == payload(3));
}

/// Tenants of the next reads of a rank: tenant 1 reads the first half of the blocks, tenant 2 the second one.
fn next_tenants(reads: &mut ReadsByClass, rank: ReadClass, count: usize) -> Vec<TenantId> {
    let pages = PageBufferPool::new(1);
    let tenant = |read: PieceRead| TenantId(1 + u16::from(read.offset >= u64::from(BLOCKS / 2) * stride()));
    let next = || reads.next(rank, &pages).map(|(_, read)| tenant(read));
    std::iter::from_fn(next).take(count).collect()
}

#[test]
fn tenants_get_shares_of_reads_by_weight_and_all_that_others_leave() {
    let (context, ..) = context();
    let half = BLOCKS / 2;
    for class in [ReadClass::Awaited, ReadClass::Prefetch] {
        let mut reads = ReadsByClass::new(
            &crate::encryption::EncryptionKeys::default(),
            &[(TenantId(1), 3)].into_iter().collect(),
        );
        for (tenant, blocks) in [(2, half..BLOCKS), (1, 0..half)] {
            let batch = ReadBatch { tenant: TenantId(tenant), ..Fixture::batch(class, blocks) };
            assert!(reads.add(&context.arena, &batch).is_ok());
        }
        let first = next_tenants(&mut reads, class, 40);
        let of_first = first.iter().filter(|tenant| **tenant == TenantId(1)).count();
        assert!((28..=32).contains(&of_first), "{of_first} of 40 reads have a weight of 3 in 4");
        let rest = next_tenants(&mut reads, class, usize::MAX);
        assert_eq!(rest.len(), 120, "four reads for each block");
        assert!(rest[80..].iter().all(|tenant| *tenant == TenantId(2)), "the other tenant has ended");
    }
}

#[test]
fn writes_count_against_the_share_of_reads() {
    let (context, ..) = context();
    let half = BLOCKS / 2;
    let mut reads = ReadsByClass::new(&crate::encryption::EncryptionKeys::default(), &Weights::default());
    for (tenant, blocks) in [(1, 0..half), (2, half..BLOCKS)] {
        let batch = ReadBatch { tenant: TenantId(tenant), ..Fixture::batch(ReadClass::Awaited, blocks) };
        assert!(reads.add(&context.arena, &batch).is_ok());
    }
    let [first, second, third] = [1, 2, 3].map(TenantId);
    assert!(reads.may_precede(first) && reads.may_precede(third));
    // Ten reads of 8 KiB.
    reads.charge_write(first, 80 << 10);
    reads.charge_write(third, 80 << 10);
    assert!(!reads.may_precede(first) && reads.may_precede(second) && !reads.may_precede(third));
    // The first reads of blocks have 12 KiB.
    let next = next_tenants(&mut reads, ReadClass::Awaited, 6);
    assert!(next.iter().all(|tenant| *tenant == second), "{next:?}");
    next_tenants(&mut reads, ReadClass::Awaited, 8);
    assert!([first, third].iter().any(|tenant| reads.may_precede(*tenant)), "both have caught up");
}

#[test]
fn writes_count_only_against_the_class_that_they_have_preceded() {
    let (context, ..) = context();
    let third = BLOCKS / 3;
    let mut reads = ReadsByClass::new(&crate::encryption::EncryptionKeys::default(), &Weights::default());
    let [a, b, c] = [1, 2, 3].map(TenantId);
    let add = |reads: &mut ReadsByClass, tenant: TenantId, class: ReadClass, blocks: std::ops::Range<u32>| {
        let batch = ReadBatch { tenant, ..Fixture::batch(class, blocks) };
        assert!(reads.add(&context.arena, &batch).is_ok());
    };
    // B has the first place of each class, so that the writes of A are out of turn.
    add(&mut reads, b, ReadClass::Awaited, 0..third);
    add(&mut reads, b, ReadClass::Prefetch, 0..third);
    add(&mut reads, a, ReadClass::Prefetch, third..2 * third);
    (0..1024).for_each(|_| reads.charge_write(a, 1 << 20));
    add(&mut reads, c, ReadClass::Prefetch, 2 * third..BLOCKS);
    let pages = PageBufferPool::new(1);
    let next: Vec<u64> = std::iter::from_fn(|| reads.next(ReadClass::Prefetch, &pages))
        .take(6)
        .map(|(_, read)| read.offset / stride())
        .collect();
    let of = |blocks: std::ops::Range<u32>| {
        next.iter().filter(|block| blocks.contains(&u32::try_from(**block).expect("few blocks"))).count()
    };
    let counts = [of(0..third), of(third..2 * third), of(2 * third..BLOCKS)];
    assert_eq!(counts, [2, 2, 2], "no tenant owes anything in the other class: {next:?}");
}

#[test]
fn promoted_reads_have_the_share_of_their_tenant() {
    let (context, ..) = context();
    let half = BLOCKS / 2;
    let mut reads = ReadsByClass::new(&crate::encryption::EncryptionKeys::default(), &Weights::default());
    for (tenant, class, blocks) in [(1, ReadClass::Awaited, 0..half), (2, ReadClass::Prefetch, half..BLOCKS)]
    {
        let batch = ReadBatch { tenant: TenantId(tenant), ..Fixture::batch(class, blocks) };
        assert!(reads.add(&context.arena, &batch).is_ok());
    }
    assert!(reads.promote(&(half..BLOCKS).map(|block| FillId(block.into())).collect()));
    let first = next_tenants(&mut reads, ReadClass::Awaited, 40);
    let of_first = first.iter().filter(|tenant| **tenant == TenantId(1)).count();
    assert!((18..=22).contains(&of_first), "{of_first} of 40 reads");
}

#[test]
fn medium_error_fails_one_block_and_one_write() {
    let fixture = Fixture::new();
    let bad = 2 * stride()..2 * stride() + PAGE_BYTES;
    fixture.device.inject(Fault::at(FaultKind::ReadError, bad.clone()));
    fixture.device.inject(Fault::at(FaultKind::WriteError, bad));
    fixture.read(0..5);
    let expected: Vec<_> =
        (0..5).map(|block| (block, if block == 2 { Err(FillError::Device) } else { Ok(()) })).collect();
    assert_eq!(fixture.ends(5), expected);
    fixture.op(1, write(2));
    assert_eq!(fixture.done(), (1, Err(DeviceError::Media)));
    fixture.op(2, write(1));
    assert_eq!(fixture.done(), (2, Ok(())));
    assert_eq!(fixture.media_errors.load(Ordering::Relaxed), 2, "both are counted");
}

#[test]
fn corrupt_header_or_payload_fails_only_its_block() {
    let fixture = Fixture::new();
    fixture.device.corrupt(|image| {
        image.flip_bit(stride() + 40, 3);
        image.flip_bit(4 * stride() - 1, 0);
    });
    fixture.read(0..5);
    let corrupt = |block| matches!(block, 1 | 3);
    let expected: Vec<_> =
        (0..5).map(|block| (block, if corrupt(block) { Err(FillError::Corrupt) } else { Ok(()) })).collect();
    assert_eq!(fixture.ends(5), expected);
}

#[test]
fn lost_device_fails_everything_once_and_rejects_later_commands() {
    let fixture = Fixture::new();
    fixture.device.inject(Fault::everywhere(FaultKind::Gone));
    fixture.read(0..BLOCKS);
    let ends = fixture.ends(BLOCKS as usize);
    assert!(ends.iter().all(|(_, end)| *end == Err(FillError::Device)));
    assert_eq!(ends.len(), BLOCKS as usize, "each block completes once");
    for token in 0..3 {
        fixture.op(token, DeviceOpKind::Sync);
        assert_eq!(fixture.done(), (token, Err(DeviceError::Lost)));
    }
    fixture.read(0..2);
    assert_eq!(fixture.ends(2), [(0, Err(FillError::Device)), (1, Err(FillError::Device))]);
}

#[test]
fn device_with_too_many_medium_errors_is_lost() {
    let fixture = Fixture::new();
    fixture.device.inject(Fault::everywhere(FaultKind::ReadError));
    fixture.read(0..BLOCKS);
    assert!(fixture.ends(BLOCKS as usize).iter().all(|(_, end)| *end == Err(FillError::Device)));
    fixture.device.heal();
    fixture.op(1, DeviceOpKind::Sync);
    assert_eq!(fixture.done(), (1, Err(DeviceError::Lost)));
}

#[test]
fn failed_sync_loses_the_device() {
    let fixture = Fixture::new();
    fixture.device.inject(Fault::everywhere(FaultKind::SyncError));
    fixture.op(1, DeviceOpKind::Sync);
    assert_eq!(fixture.done(), (1, Err(DeviceError::Lost)));
    fixture.device.heal();
    fixture.op(2, DeviceOpKind::Sync);
    assert_eq!(fixture.done(), (2, Err(DeviceError::Lost)));
}

#[test]
fn full_device_rejects_a_write_and_is_still_read() {
    let fixture = Fixture::new();
    fixture.read(0..5);
    assert!(fixture.ends(5).iter().all(|(_, end)| end.is_ok()));
    fixture.device.inject(Fault::everywhere(FaultKind::Full));
    fixture.op(1, write(3));
    let DeviceReport { lost, done, fills, .. } = fixture.report();
    assert_eq!(lost, None);
    assert!(done == [(OpToken(1), Err(DeviceError::Unwritable))] && fills.is_empty(), "{done:?}, {fills:?}");
    // Memory is unchanged, and the device is read as before.
    assert!((0..5).all(|block| fixture.in_arena(block) == payload(block)));
    fixture.read(0..2);
    assert!(fixture.ends(2).iter().all(|(_, end)| end.is_ok()));
    // Durable blocks are on the device.
    let again = Fixture::on(fixture.device.image());
    again.read(0..BLOCKS);
    assert!(again.ends(BLOCKS as usize).iter().all(|(_, end)| end.is_ok()));
}

#[test]
fn stranded_slots_of_a_lost_device_are_reported() {
    let fixture = Fixture::new();
    let hanging = 2 * stride()..3 * stride();
    fixture.device.inject(Fault::at(FaultKind::Hang, hanging));
    fixture.device.inject(Fault::everywhere(FaultKind::SyncError));
    fixture.read(0..5);
    let others = [0, 1, 3, 4];
    assert_eq!(fixture.ends(4), others.map(|block| (block, Ok(()))));
    fixture.op(1, DeviceOpKind::Sync);
    let DeviceReport { lost, done, fills, .. } = fixture.report();
    assert!(lost.expect("a loss").contains("simulated fault"));
    assert_eq!(done, [(OpToken(1), Err(DeviceError::Lost))]);
    assert!(matches!(fills[..], [(FillId(2), FillUpdate::Failed(FillError::Stranded))]), "{fills:?}");
    // A late write of the device goes to a slot that is not reused.
    fixture.device.release_hung();
}

#[test]
fn lack_of_kernel_memory_does_not_lose_the_device() {
    let fixture = Fixture::new();
    fixture.device.inject(Fault::everywhere(FaultKind::Busy));
    fixture.read(0..BLOCKS);
    assert!(fixture.ends(BLOCKS as usize).iter().all(|(_, end)| *end == Err(FillError::Refused)));
    fixture.op(1, write(0));
    assert_eq!(fixture.done(), (1, Err(DeviceError::Refused)));
    fixture.device.heal();
    fixture.read(0..BLOCKS);
    assert!(fixture.ends(BLOCKS as usize).iter().all(|(_, end)| end.is_ok()));
}

#[test]
fn invalid_operations_are_rejected_individually() {
    let fixture = Fixture::new();
    fixture.op(1, DeviceOpKind::WritePages { offset: 0, bytes: vec![0; 100] });
    assert_eq!(fixture.done(), (1, Err(DeviceError::Refused)));
    let outside = ArenaSlot { region: RegionId(9), offset: 0, bytes: 4096 };
    fixture.op(2, write_from(0, outside));
    assert_eq!(fixture.done(), (2, Err(DeviceError::Refused)));
    fixture.read(0..3);
    assert_eq!(fixture.ends(3).len(), 3);
}

#[test]
fn closed_device_fails_its_work_without_reporting_a_loss() {
    let fixture = Fixture::new();
    fixture.read(0..4);
    fixture.op(1, DeviceOpKind::Sync);
    fixture.command(Command::Close);
    fixture.op(2, DeviceOpKind::Sync);
    fixture.command(Command::Close);
    fixture.read(4..5);
    let (mut done, mut ended) = (Vec::new(), Vec::new());
    while done.len() < 2 || ended.len() < 5 {
        let DeviceReport { lost, done: more, fills, .. } = fixture.report();
        assert_eq!(lost, None, "the device was not lost");
        done.extend(more.into_iter().map(|(token, _)| token.0));
        let ends = |update: &FillUpdate| {
            matches!(update, FillUpdate::Failed(_))
                || matches!(update, FillUpdate::Layers { layers, .. } if *layers == layout().layers())
        };
        ended.extend(fills.iter().filter(|(_, update)| ends(update)).map(|(fill, _)| fill.0));
    }
    done.sort_unstable();
    ended.sort_unstable();
    assert_eq!((done, ended), (vec![1, 2], vec![0, 1, 2, 3, 4]));
    assert!(fixture.device.open_engine().is_ok(), "it has released the device");
}

#[test]
fn awaited_reads_complete_before_prefetches_that_were_queued_first() {
    let (device, worker) = idle_worker();
    let mut worker = worker;
    worker.queue_batch(&Fixture::batch(ReadClass::Prefetch, 0..10));
    worker.queue_batch(&Fixture::batch(ReadClass::Awaited, 10..20));
    let mut offsets = Vec::new();
    while let Some(work) = worker.queue.pop(Tick(0), |_| true) {
        let Work::Piece(class) = work else { panic!("only reads are queued") };
        worker.reads.of(class).queued = ReadsQueued::No;
        let Some((_, read)) = worker.reads.next(class, &worker.pages) else { continue };
        worker.queue_reads(class);
        offsets.push(read.offset);
    }
    let (awaited, prefetched) = offsets.split_at(offsets.len() / 2);
    assert!(awaited.iter().all(|offset| *offset >= 10 * stride()), "{offsets:?}");
    assert!(!prefetched.is_empty() && prefetched.iter().all(|offset| *offset < 10 * stride()), "{offsets:?}");
    drop(device);
}

#[test]
fn promoted_prefetches_precede_other_prefetches_and_alternate_with_awaited_reads() {
    let (device, mut worker) = idle_worker();
    worker.queue_batch(&Fixture::batch(ReadClass::Prefetch, 0..10));
    let mut order = Vec::new();
    let mut step = |worker: &mut Worker| loop {
        let Some(Work::Piece(class)) = worker.queue.pop(Tick(0), |_| true) else { return false };
        worker.reads.of(class).queued = ReadsQueued::No;
        let Some((_, read)) = worker.reads.next(class, &worker.pages) else { continue };
        worker.queue_reads(class);
        order.push(read.offset / stride());
        return true;
    };
    // The first pieces of three blocks are in flight when a load joins blocks 1 and 8.
    (0..3).for_each(|_| assert!(step(&mut worker)));
    worker.queue_batch(&Fixture::batch(ReadClass::Awaited, 20..22));
    worker.promote(vec![FillId(8), FillId(1), FillId(99)]);
    while step(&mut worker) {}
    let blocks = order;
    let pieces = blocks.iter().filter(|block| **block == 0).count();
    let (before, after) = blocks.split_at(3 + 4 * pieces - 1);
    assert_eq!(before[..3], [0, 1, 2]);
    let ahead = before[3..].iter().all(|block| [1, 8, 20, 21].contains(block));
    assert!(ahead, "promoted and awaited reads come first: {blocks:?}");
    assert!(before[3..5].contains(&8) || before[3..5].contains(&1), "a promoted read is next: {blocks:?}");
    assert!(before[3..5].contains(&20), "a read of a load is next: {blocks:?}");
    assert!(after.iter().all(|block| ![1, 8, 20, 21].contains(block)), "{blocks:?}");
    assert_eq!(blocks.len(), 12 * pieces, "each piece is read once");
    assert_eq!(worker.reads.pending(), PendingReads::default());
    drop(device);
}

#[test]
fn promoted_blocks_arrive_once() {
    let fixture = Fixture::new();
    fixture.command(Command::Read(Fixture::batch(ReadClass::Prefetch, 0..20)));
    fixture.command(Command::Promote((0..30).step_by(3).map(FillId).collect()));
    let ends = fixture.ends(20);
    assert!(ends.iter().all(|(_, result)| result.is_ok()), "{ends:?}");
}

#[test]
fn prefetched_blocks_arrive_like_awaited_ones() {
    let fixture = Fixture::new();
    fixture.command(Command::Read(Fixture::batch(ReadClass::Prefetch, 0..20)));
    fixture.read(20..BLOCKS);
    let ends = fixture.ends(BLOCKS as usize);
    assert!(ends.iter().all(|(_, result)| result.is_ok()), "{ends:?}");
}
