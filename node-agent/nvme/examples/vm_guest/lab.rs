//! A started controller with memory for data, and helpers that run commands to their end.

use std::time::{Duration, Instant};

use reprise_buffers::{Arena, ArenaConfig, HugePolicy, Span};
use reprise_nvme::spec::{Command, READ, Status, WRITE};
use reprise_nvme::vfio::{PciFunction, VfioController};
use reprise_nvme::{
    Backing, Controller, DataFormat, DmaMapping, DmaMemory, DriverSettings, Ended, Piece, QueuePair,
};

use crate::{Outcome, ensure};

/// Size of the data memory.
const ARENA_BYTES: u64 = 8 << 20;
/// Size of a logical block of the lab's namespaces.
pub(crate) const BLOCK: u64 = 512;
/// Limit of waits that end by an event, in an emulated machine.
pub(crate) const LONG: Duration = Duration::from_secs(30);

pub(crate) type Queue = QueuePair<VfioController>;

/// A started controller, and data memory that it can access.
pub(crate) struct Lab {
    pub(crate) controller: Controller<VfioController>,
    arena: Arena,
    mapping: DmaMapping,
}

pub(crate) fn arena() -> Outcome<Arena> {
    let config = ArenaConfig { bytes: ARENA_BYTES, region_bytes: ARENA_BYTES, huge: HugePolicy::Never };
    Ok(Arena::new(&config)?)
}

impl Lab {
    pub(crate) fn open(function: &PciFunction) -> Outcome<Lab> {
        let backing = VfioController::open(function.clone())?;
        let arena = arena()?;
        let mapping = backing.map_region(&arena.regions()[0])?;
        let settings = DriverSettings { admin_timeout: LONG, ..DriverSettings::default() };
        Ok(Lab { controller: Controller::start(backing, settings)?, arena, mapping })
    }

    pub(crate) fn span(&self, at: u64, bytes: u64) -> Span {
        self.arena.span(0, at, bytes).expect("inside")
    }

    /// Fills data memory with bytes that depend on their place and a seed.
    pub(crate) fn fill(&self, at: u64, bytes: u64, seed: u64) {
        self.span(at, bytes).copy_in(&pattern(seed, bytes)).expect("writable");
    }

    pub(crate) fn contents(&self, at: u64, bytes: u64) -> Vec<u8> {
        let mut copy = vec![0; bytes as usize];
        self.span(at, bytes).copy_out(&mut copy);
        copy
    }

    pub(crate) fn piece(&self, at: u64, bytes: u64) -> Piece {
        Piece { address: self.mapping.address() + at, bytes }
    }

    /// Runs a transfer of pieces, described by the format, to its end.
    pub(crate) fn transfer(
        format: DataFormat,
        queue: &mut Queue,
        (opcode, namespace, lba): (u8, u32, u64),
        pieces: &[Piece],
    ) -> Outcome<Status> {
        let bytes: u64 = pieces.iter().map(|piece| piece.bytes).sum();
        let data = format.describe(queue, pieces)?;
        let command = Command::transfer(opcode, namespace, lba, (bytes / BLOCK) as u32).with_data(data);
        run(queue, &command)
    }

    /// Writes pieces to a place of namespace 1.
    pub(crate) fn write(&self, queue: &mut Queue, lba: u64, pieces: &[Piece]) -> Outcome {
        expect(Lab::transfer(self.controller.data_format(), queue, (WRITE, 1, lba), pieces)?)
    }

    /// Reads a place of namespace 1 to pieces.
    pub(crate) fn read(&self, queue: &mut Queue, lba: u64, pieces: &[Piece]) -> Outcome {
        expect(Lab::transfer(self.controller.data_format(), queue, (READ, 1, lba), pieces)?)
    }
}

/// Returns an error for a status that is not a success.
pub(crate) fn expect(status: Status) -> Outcome {
    ensure(status.is_success(), format!("status {status}"))
}

/// Bytes that depend on their place and a seed.
pub(crate) fn pattern(seed: u64, bytes: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    (0..bytes / 8).flat_map(|_| next()).collect()
}

/// Submits one command and waits for its end.
pub(crate) fn run(queue: &mut Queue, command: &Command) -> Outcome<Status> {
    queue.submit(command, u64::MAX, Instant::now() + LONG)?;
    queue.ring();
    let ended = wait(queue, 1)?;
    ensure(ended[0].token == u64::MAX, "another command has ended")?;
    Ok(ended[0].status)
}

/// Waits until at least `count` commands have ended.
pub(crate) fn wait(queue: &mut Queue, count: usize) -> Outcome<Vec<Ended>> {
    let (start, mut ended) = (Instant::now(), Vec::new());
    while ended.len() < count {
        queue.poll(&mut ended)?;
        ensure(start.elapsed() < LONG, format!("{} of {count} commands have ended", ended.len()))?;
        std::thread::yield_now();
    }
    Ok(ended)
}

/// Copies bytes to memory of the controller.
pub(crate) fn store(memory: &impl DmaMemory, at: usize, bytes: &[u8]) {
    for (index, word) in bytes.chunks_exact(8).enumerate() {
        let word = u64::from_ne_bytes(word.try_into().expect("8 bytes"));
        memory.word(at + 8 * index).store(word, std::sync::atomic::Ordering::Relaxed);
    }
}

/// Copies bytes from memory of the controller.
pub(crate) fn load(memory: &impl DmaMemory, at: usize, bytes: usize) -> Vec<u8> {
    let word = |index: usize| memory.word(at + 8 * index).load(std::sync::atomic::Ordering::Relaxed);
    (0..bytes / 8).flat_map(|index| word(index).to_ne_bytes()).collect()
}
