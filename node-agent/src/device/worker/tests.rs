//! The worker over a simulated device: bytes come back verified, faults cost what they must and no more.

use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, bounded};
use reprise_agent_core::effect::{ArenaSlot, BlockRead, RegionId};
use reprise_agent_core::pool::PageNumber;
use reprise_agent_core::pool::header::{HeaderFields, encode_header};
use reprise_buffers::{ArenaConfig, HugePolicy, crc32c};
use reprise_io::Waker;
use reprise_io::simulated::{Fault, FaultKind, Image, SimulatedDevice, SimulatedSettings};
use reprise_policy::{BlockKey, ContentId, Dtype, Generation, Layout, LayoutSpec, Parts};

use reprise_agent_core::effect::FillId;

use super::*;
use crate::metrics::Metrics;

/// Longest wait for something that takes microseconds.
const PATIENCE: Duration = Duration::from_secs(20);

/// Blocks on the device, one slot after the other.
const BLOCKS: u32 = 40;

/// A worker on its thread.
struct World {
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
    let spec = LayoutSpec {
        layers: 4,
        parts: Parts::KeyValue,
        kv_heads: 1,
        head_dim: 128,
        dtype: Dtype::Bf16,
        tokens_per_block: 16,
        tp_rank: 0,
        tp_size: 1,
    };
    spec.validate().expect("a valid layout")
}

fn stride() -> u64 {
    PAGE_BYTES + layout().slot_bytes()
}

fn payload(block: u32) -> Vec<u8> {
    (0..layout().slot_bytes()).map(|at| (at * 7 + u64::from(block) * 13) as u8).collect()
}

/// Header page of a block and its checksum.
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
    PageNumber(u32::try_from(u64::from(block) * stride() / PAGE_BYTES).expect("small"))
}

fn slot(block: u32) -> ArenaSlot {
    ArenaSlot {
        region: RegionId(0),
        offset: u64::from(block) * layout().slot_bytes(),
        bytes: layout().slot_bytes(),
    }
}

impl World {
    /// A device that holds all blocks; the arena is blank.
    fn new() -> World {
        let mut image = Image::new(u64::from(BLOCKS) * stride());
        for block in 0..BLOCKS {
            image.write(u64::from(block) * stride(), &header(block).0);
            image.write(u64::from(block) * stride() + PAGE_BYTES, &payload(block));
        }
        World::on(image)
    }

    /// A device that holds an image; the arena is blank.
    fn on(image: Image) -> World {
        let device = SimulatedDevice::new(image, SimulatedSettings::default()).expect("a device");
        let config = ArenaConfig { bytes: 2 << 20, region_bytes: 2 << 20, huge: HugePolicy::Never };
        let arena = Arc::new(Arena::new(&config).expect("2 MiB"));
        let engine = device.open_engine().expect("nobody else has it");
        let (waker, (inbox, inputs)) = (engine.waker(), Inbox::new());
        let (commands, receiver) = bounded(COMMANDS_MAX);
        let media_errors = Arc::<AtomicU32>::default();
        let around = Surroundings {
            device: DeviceId(0),
            path: "simulated".to_owned(),
            commands: receiver,
            inbox,
            arena: arena.clone(),
            clock: Clock::start(),
            metrics: Metrics::new("test", reprise_buffers::PageCoverage::default()).device(DeviceId(0)),
            sync_failed: Arc::default(),
            media_errors: media_errors.clone(),
        };
        let thread = Some(std::thread::spawn(move || Worker::new(around, Box::new(engine)).run()));
        World { device, arena, commands, waker, inputs, thread, media_errors }
    }

    fn command(&self, command: Command) {
        self.commands.send(command).expect("the worker lives");
        self.waker.wake();
    }

    fn read(&self, blocks: impl IntoIterator<Item = u32>) {
        let block = |block| BlockRead {
            fill: FillId(u64::from(block)),
            key: BlockKey([block as u8; 16]),
            page: page(block),
            generation: Generation(1),
            header_crc: header(block).1,
            slot: slot(block),
        };
        let blocks = blocks.into_iter().map(block).collect();
        self.command(Command::Read(ReadBatch { blocks, layout: layout(), read_bytes: 8 << 10 }));
    }

    fn op(&self, token: u64, kind: DeviceOpKind) {
        self.command(Command::Op(DeviceOp { token: OpToken(token), kind }));
    }

    /// The ends of so many fills: the block and what became of it.
    fn ends(&self, wanted: usize) -> Vec<(u32, Result<(), FillError>)> {
        let mut ends = Vec::new();
        while ends.len() < wanted {
            let Input::Device(DeviceReport { fills, done, .. }) =
                self.inputs.recv_timeout(PATIENCE).expect("news of a fill")
            else {
                panic!("a device reports as a device");
            };
            assert!(done.is_empty(), "only fills were asked for");
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
        match self.inputs.recv_timeout(PATIENCE).expect("the end of an operation") {
            Input::Device(DeviceReport { mut done, fills, .. }) if done.len() == 1 && fills.is_empty() => {
                let (token, result) = done.remove(0);
                (token.0, result)
            }
            _ => panic!("one operation was asked for"),
        }
    }

    /// What the worker says next.
    fn report(&self) -> DeviceReport {
        match self.inputs.recv_timeout(PATIENCE).expect("news of the device") {
            Input::Device(report) => report,
            _ => panic!("a device reports as a device"),
        }
    }

    fn in_arena(&self, block: u32) -> Vec<u8> {
        let mut bytes = vec![0; layout().slot_bytes() as usize];
        self.arena.span(0, slot(block).offset, slot(block).bytes).expect("inside").copy_out(&mut bytes);
        bytes
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // Fails when the worker has panicked, which the join below reports.
        let _ = self.commands.send(Command::Stop);
        self.waker.wake();
        let ended = self.thread.take().expect("joined once").join();
        assert!(ended.is_ok() || std::thread::panicking(), "the worker panicked");
    }
}

#[test]
fn blocks_come_back_verified_byte_by_byte() {
    let world = World::new();
    world.read(0..20);
    world.read(20..BLOCKS);
    assert!(world.ends(BLOCKS as usize).iter().all(|(_, end)| end.is_ok()));
    assert!((0..BLOCKS).all(|block| world.in_arena(block) == payload(block)));
}

#[test]
fn a_block_is_written_with_its_header_in_front_and_survives_once_synced() {
    let world = World::new();
    world.device.corrupt(|image| image.write(0, &vec![0; 5 * stride() as usize]));
    let span = world.arena.span(0, slot(3).offset, slot(3).bytes).expect("inside");
    span.copy_in(&payload(3)).expect("writable");
    world.op(7, DeviceOpKind::WriteBlock { offset: 3 * stride(), header: header(3).0, slot: slot(3) });
    assert_eq!(world.done(), (7, Ok(())));
    world.op(8, DeviceOpKind::WritePages { offset: 0, bytes: vec![9; 8192] });
    assert_eq!(world.done(), (8, Ok(())));
    world.op(9, DeviceOpKind::Sync);
    assert_eq!(world.done(), (9, Ok(())));
    let image = world.device.image();
    let mut on_device = vec![0; stride() as usize];
    image.read(3 * stride(), &mut on_device);
    assert!(on_device[..4096] == *header(3).0 && on_device[4096..] == payload(3));
}

#[test]
fn a_bad_place_costs_one_block_and_one_write() {
    let world = World::new();
    let bad = 2 * stride()..2 * stride() + PAGE_BYTES;
    world.device.inject(Fault::at(FaultKind::ReadError, bad.clone()));
    world.device.inject(Fault::at(FaultKind::WriteError, bad));
    world.read(0..5);
    let expected: Vec<_> =
        (0..5).map(|block| (block, if block == 2 { Err(FillError::Device) } else { Ok(()) })).collect();
    assert_eq!(world.ends(5), expected);
    world.op(1, DeviceOpKind::WriteBlock { offset: 2 * stride(), header: header(2).0, slot: slot(2) });
    assert_eq!(world.done(), (1, Err(DeviceError::Media)));
    world.op(2, DeviceOpKind::WriteBlock { offset: stride(), header: header(1).0, slot: slot(1) });
    assert_eq!(world.done(), (2, Ok(())));
    assert_eq!(world.media_errors.load(Ordering::Relaxed), 2, "both are counted");
}

#[test]
fn a_wrong_byte_in_header_or_payload_is_corrupt_and_its_neighbours_are_not() {
    let world = World::new();
    world.device.corrupt(|image| {
        image.flip_bit(stride() + 40, 3);
        image.flip_bit(4 * stride() - 1, 0);
    });
    world.read(0..5);
    let corrupt = |block| matches!(block, 1 | 3);
    let expected: Vec<_> =
        (0..5).map(|block| (block, if corrupt(block) { Err(FillError::Corrupt) } else { Ok(()) })).collect();
    assert_eq!(world.ends(5), expected);
}

#[test]
fn a_lost_device_fails_everything_once_and_goes_on_answering() {
    let world = World::new();
    world.device.inject(Fault::everywhere(FaultKind::Gone));
    world.read(0..BLOCKS);
    let ends = world.ends(BLOCKS as usize);
    assert!(ends.iter().all(|(_, end)| *end == Err(FillError::Device)));
    assert_eq!(ends.len(), BLOCKS as usize, "each block ends once");
    for token in 0..3 {
        world.op(token, DeviceOpKind::Sync);
        assert_eq!(world.done(), (token, Err(DeviceError::Lost)));
    }
    world.read(0..2);
    assert_eq!(world.ends(2), [(0, Err(FillError::Device)), (1, Err(FillError::Device))]);
}

#[test]
fn a_device_with_too_many_bad_places_is_given_up() {
    let world = World::new();
    world.device.inject(Fault::everywhere(FaultKind::ReadError));
    world.read(0..BLOCKS);
    assert!(world.ends(BLOCKS as usize).iter().all(|(_, end)| *end == Err(FillError::Device)));
    world.device.heal();
    world.op(1, DeviceOpKind::Sync);
    assert_eq!(world.done(), (1, Err(DeviceError::Lost)));
}

#[test]
fn a_sync_that_fails_loses_the_device_because_nothing_is_certain_after_it() {
    let world = World::new();
    world.device.inject(Fault::everywhere(FaultKind::SyncError));
    world.op(1, DeviceOpKind::Sync);
    assert_eq!(world.done(), (1, Err(DeviceError::Lost)));
    world.device.heal();
    world.op(2, DeviceOpKind::Sync);
    assert_eq!(world.done(), (2, Err(DeviceError::Lost)));
}

#[test]
fn a_device_that_is_full_is_given_up_once_with_the_remedy_until_it_is_opened_again() {
    let world = World::new();
    world.read(0..5);
    assert!(world.ends(5).iter().all(|(_, end)| end.is_ok()));
    world.device.inject(Fault::everywhere(FaultKind::Full));
    world.op(1, DeviceOpKind::WriteBlock { offset: 3 * stride(), header: header(3).0, slot: slot(3) });
    let DeviceReport { lost, done, fills, .. } = world.report();
    let reason = lost.expect("news");
    assert!(
        ["no space", "free space on the file system"].iter().all(|words| reason.contains(words)),
        "{reason}"
    );
    assert!(done == [(OpToken(1), Err(DeviceError::Lost))] && fills.is_empty(), "{done:?}, {fills:?}");
    // What is in memory is as it was. Room on the device changes nothing: of its journal nothing is certain.
    assert!((0..5).all(|block| world.in_arena(block) == payload(block)));
    world.device.heal();
    world.op(2, DeviceOpKind::Sync);
    let DeviceReport { lost, done, .. } = world.report();
    assert_eq!((lost, done), (None, vec![(OpToken(2), Err(DeviceError::Lost))]));
    world.read(0..2);
    assert!(world.ends(2).iter().all(|(_, end)| *end == Err(FillError::Device)));
    // What was durable is on it.
    let again = World::on(world.device.image());
    again.read(0..BLOCKS);
    assert!(again.ends(BLOCKS as usize).iter().all(|(_, end)| end.is_ok()));
}

#[test]
fn slots_that_a_lost_device_may_still_write_to_are_reported_as_such() {
    let world = World::new();
    let hanging = 2 * stride()..3 * stride();
    world.device.inject(Fault::at(FaultKind::Hang, hanging));
    world.device.inject(Fault::everywhere(FaultKind::SyncError));
    world.read(0..5);
    let others = [0, 1, 3, 4];
    assert_eq!(world.ends(4), others.map(|block| (block, Ok(()))));
    world.op(1, DeviceOpKind::Sync);
    let DeviceReport { lost, done, fills, .. } = world.report();
    assert!(lost.expect("news").contains("simulated fault"));
    assert_eq!(done, [(OpToken(1), Err(DeviceError::Lost))]);
    assert!(matches!(fills[..], [(FillId(2), FillUpdate::Failed(FillError::Stranded))]), "{fills:?}");
    // What the device does at last, it does to a slot that nobody else has.
    world.device.let_go();
}

#[test]
fn want_of_memory_in_the_kernel_costs_neither_device_nor_places() {
    let world = World::new();
    world.device.inject(Fault::everywhere(FaultKind::Busy));
    world.read(0..BLOCKS);
    assert!(world.ends(BLOCKS as usize).iter().all(|(_, end)| *end == Err(FillError::Refused)));
    world.op(1, DeviceOpKind::WriteBlock { offset: 0, header: header(0).0, slot: slot(0) });
    assert_eq!(world.done(), (1, Err(DeviceError::Refused)));
    world.device.heal();
    world.read(0..BLOCKS);
    assert!(world.ends(BLOCKS as usize).iter().all(|(_, end)| end.is_ok()));
}

#[test]
fn operations_that_make_no_sense_are_refused_one_by_one() {
    let world = World::new();
    world.op(1, DeviceOpKind::WritePages { offset: 0, bytes: vec![0; 100] });
    assert_eq!(world.done(), (1, Err(DeviceError::Refused)));
    let outside = ArenaSlot { region: RegionId(9), offset: 0, bytes: 4096 };
    world.op(2, DeviceOpKind::WriteBlock { offset: 0, header: header(0).0, slot: outside });
    assert_eq!(world.done(), (2, Err(DeviceError::Refused)));
    world.read(0..3);
    assert_eq!(world.ends(3).len(), 3);
}

#[test]
fn a_device_that_is_closed_ends_what_it_has_says_nothing_of_a_loss_and_goes_on_answering() {
    let world = World::new();
    world.read(0..4);
    world.op(1, DeviceOpKind::Sync);
    world.command(Command::Close);
    world.op(2, DeviceOpKind::Sync);
    world.command(Command::Close);
    world.read(4..5);
    let (mut done, mut ended) = (Vec::new(), Vec::new());
    while done.len() < 2 || ended.len() < 5 {
        let DeviceReport { lost, done: more, fills, .. } = world.report();
        assert_eq!(lost, None, "nobody has lost it");
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
    assert!(world.device.open_engine().is_ok(), "it has let go of the device");
}
