//! A started controller with memory for data, and helpers that run commands to their end.

use std::sync::Arc;
use std::time::{Duration, Instant};

use reprise_buffers::{Arena, ArenaConfig, HugePolicy, Span};
use reprise_nvme::emulated::{EmulatedController, Emulation, EmulationCounters, Storage};
use reprise_nvme::spec::{Command, READ, Status, WRITE};
use reprise_nvme::{
    Backing, Controller, DataFormat, DmaMapping, DriverSettings, Ended, NvmeError, Piece, QueuePair,
};

/// Size of the data memory.
pub(crate) const ARENA_BYTES: u64 = 4 << 20;
/// Limit of waits that end by an event.
pub(crate) const LONG: Duration = Duration::from_secs(60);
/// Size of a logical block.
pub(crate) const BLOCK: u64 = 512;

pub(crate) type Queue = QueuePair<EmulatedController>;

/// A started controller, and data memory that it can access.
pub(crate) struct Rig {
    pub(crate) controller: Controller<EmulatedController>,
    arena: Arena,
    mapping: DmaMapping,
}

pub(crate) fn settings() -> DriverSettings {
    DriverSettings { admin_timeout: LONG, ..DriverSettings::default() }
}

/// Returns a controller with 8 MiB in memory.
pub(crate) fn emulation() -> Emulation {
    Emulation::of(Storage::memory(8 << 20))
}

impl Rig {
    pub(crate) fn new(emulation: Emulation) -> Rig {
        Rig::with(emulation, settings()).expect("it starts")
    }

    pub(crate) fn with(emulation: Emulation, settings: DriverSettings) -> Result<Rig, NvmeError> {
        let backing = EmulatedController::start(emulation)?;
        let config = ArenaConfig { bytes: ARENA_BYTES, region_bytes: ARENA_BYTES, huge: HugePolicy::Never };
        let arena = Arena::new(&config).expect("4 MiB");
        let region = Arc::clone(&arena.regions()[0]);
        let mapping = backing.map_region(&region)?;
        Ok(Rig { controller: Controller::start(backing, settings)?, arena, mapping })
    }

    /// Ends driver and controller.
    pub(crate) fn stop(self, queue: Queue) -> (EmulationCounters, Vec<Storage>) {
        let backing = Arc::clone(self.controller.backing());
        drop((self.controller, queue));
        Arc::into_inner(backing).expect("the only owner").stop()
    }

    pub(crate) fn span(&self, at: u64, bytes: u64) -> Span {
        self.arena.span(0, at, bytes).expect("inside")
    }

    /// Fills data memory with bytes that depend on their place and a seed.
    pub(crate) fn fill(&self, at: u64, bytes: u64, seed: u64) {
        self.span(at, bytes).copy_in(&pattern(bytes as usize, seed)).expect("writable");
    }

    pub(crate) fn contents(&self, at: u64, bytes: u64) -> Vec<u8> {
        let mut copy = vec![0; bytes as usize];
        self.span(at, bytes).copy_out(&mut copy);
        copy
    }

    pub(crate) fn piece(&self, at: u64, bytes: u64) -> Piece {
        Piece { address: self.mapping.address() + at, bytes }
    }

    /// Returns a transfer of pieces, described for the next command of a queue.
    pub(crate) fn transfer(&self, queue: &Queue, opcode: u8, lba: u64, pieces: &[Piece]) -> Command {
        self.transfer_as(self.controller.data_format(), queue, (opcode, lba), pieces)
    }

    pub(crate) fn transfer_as(
        &self,
        format: DataFormat,
        queue: &Queue,
        (opcode, lba): (u8, u64),
        pieces: &[Piece],
    ) -> Command {
        let bytes: u64 = pieces.iter().map(|piece| piece.bytes).sum();
        let data = format.describe(queue, pieces).expect("valid");
        Command::transfer(opcode, 1, lba, (bytes / BLOCK) as u32).with_data(data)
    }

    /// Writes data memory to a place, and waits.
    pub(crate) fn write(&self, queue: &mut Queue, lba: u64, at: u64, bytes: u64) -> Status {
        let command = self.transfer(queue, WRITE, lba, &[self.piece(at, bytes)]);
        run(queue, &command)
    }

    /// Reads a place to data memory, and waits.
    pub(crate) fn read(&self, queue: &mut Queue, lba: u64, at: u64, bytes: u64) -> Status {
        let command = self.transfer(queue, READ, lba, &[self.piece(at, bytes)]);
        run(queue, &command)
    }
}

/// Bytes that depend on their place and a seed.
pub(crate) fn pattern(bytes: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut all = Vec::with_capacity(bytes);
    while all.len() < bytes {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        all.extend_from_slice(&state.to_le_bytes());
    }
    all.truncate(bytes);
    all
}

/// Submits one command and waits for its end.
pub(crate) fn run(queue: &mut Queue, command: &Command) -> Status {
    queue.submit(command, u64::MAX, Instant::now() + LONG).expect("there is room");
    queue.ring();
    let ended = wait(queue, 1);
    assert_eq!(ended[0].token, u64::MAX);
    ended[0].status
}

/// Waits until at least `count` commands have ended.
pub(crate) fn wait(queue: &mut Queue, count: usize) -> Vec<Ended> {
    let start = Instant::now();
    let mut ended = Vec::new();
    while ended.len() < count {
        queue.poll(&mut ended).expect("the controller follows the specification");
        assert!(start.elapsed() < LONG, "{} of {count} commands have ended", ended.len());
        std::thread::yield_now();
    }
    ended
}
