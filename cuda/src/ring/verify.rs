//! Checks that a ring moves the right bytes: random writes and reads on an emulated controller, compared with a model.

use std::time::Duration;

use crate::gpu::Partition;
use crate::gpu_bench::Random;
use crate::kernels::Kernels;
use crate::ring::bench::{BLOCK_BYTES, Rig, ring_settings};
use crate::ring::gpu::with_kernel;
use crate::ring::{
    BatchSettings, BenchSettings, HostRunner, Operation, Ring, RingError, RingMemory, Transfer,
};

/// Places of the namespace that are used, and bytes of memory for each direction.
const AREA_BYTES: usize = 4 << 20;
/// Largest transfer: more than the page lists of one command of a small controller can describe in one page.
const TRANSFER_MAX: u64 = 64 << 10;
/// Time without a completion after which the check fails.
const STALL: Duration = Duration::from_secs(10);

/// Result of a check; all bytes were equal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    /// Transfers in both directions.
    pub transfers: u64,
    /// Bytes in both directions.
    pub bytes: u64,
}

/// Checks the host build: each of `rounds` writes random bytes to all places and reads them in other pieces.
///
/// # Errors
/// `Invalid` for bytes that differ, a transfer that fails, or a setting outside its range; `Memory`, `Nvme`.
pub fn verify(settings: &BenchSettings, rounds: u64, seed: u64) -> Result<Verified, RingError> {
    let rig = Rig::start(settings, RingMemory::allocate)?;
    let mut ring = Ring::on_host(&ring_settings(settings))?;
    for (index, queue) in rig.owned.iter().enumerate() {
        ring.init_queue(index, queue.for_host()?)?;
    }
    let runner = HostRunner::start(&ring, 0..settings.queues)?;
    let verified = run(&rig, &mut ring, rounds, seed);
    drop(runner);
    rig.stop()?;
    verified
}

/// Checks the kernel in the same way; see [`measure_on_gpu`](crate::ring::measure_on_gpu) for its memory.
///
/// # Errors
/// As [`verify`], and `Gpu`.
pub fn verify_on_gpu(
    kernels: &Kernels,
    partition: &Partition,
    settings: &BenchSettings,
    rounds: u64,
    seed: u64,
) -> Result<Verified, RingError> {
    with_kernel(kernels, partition, settings, |rig, ring| run(rig, ring, rounds, seed))
}

fn run(rig: &Rig, ring: &mut Ring, rounds: u64, seed: u64) -> Result<Verified, RingError> {
    let mut random = Random(seed);
    let mut verified = Verified::default();
    for round in 0..rounds {
        let mut model = vec![0_u8; AREA_BYTES];
        model.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&random.draw().to_le_bytes()));
        // Writes: from the first half of the memory, whose bytes lie in the order of the pieces.
        let written = pieces(&mut random);
        for piece in &written {
            rig.memory.span().write_at(piece.memory, &model[piece.place..piece.place + piece.bytes])?;
        }
        transfer(rig, ring, Operation::Write, &written, &mut verified)?;
        // Reads: other pieces, to the second half.
        let mut read = pieces(&mut random);
        read.iter_mut().for_each(|piece| piece.memory += 2 * AREA_BYTES);
        rig.memory.span().write_at(2 * AREA_BYTES, &vec![0xa5; 2 * AREA_BYTES])?;
        transfer(rig, ring, Operation::Read, &read, &mut verified)?;
        for piece in &read {
            let mut found = vec![0; piece.bytes];
            rig.memory.span().read_at(piece.memory, &mut found)?;
            let expected = &model[piece.place..piece.place + piece.bytes];
            if let Some(at) = found.iter().zip(expected).position(|(found, expected)| found != expected) {
                return Err(RingError::Invalid(format!(
                    "round {round} of seed {seed}: byte {at} of {piece:?} is {:#x}, expected {:#x}",
                    found[at], expected[at]
                )));
            }
        }
    }
    Ok(verified)
}

/// A transfer as offsets in bytes.
#[derive(Clone, Copy, Debug)]
struct Piece {
    memory: usize,
    place: usize,
    bytes: usize,
}

/// Divides all places into pieces of random sizes, in random order, with gaps in memory so that pieces start at
/// multiples of 4 bytes. They take at most twice the memory.
fn pieces(random: &mut Random) -> Vec<Piece> {
    let mut all = Vec::new();
    let (mut place, mut memory) = (0, 0);
    while place < AREA_BYTES {
        let block = u64::from(BLOCK_BYTES);
        let bytes =
            (block * (1 + random.below(TRANSFER_MAX / block))).min((AREA_BYTES - place) as u64) as usize;
        memory += 4 * random.below(64) as usize;
        all.push(Piece { memory, place, bytes });
        place += bytes;
        memory += bytes;
    }
    let order = random.permutation(all.len() as u32);
    order.into_iter().map(|index| all[index as usize]).collect()
}

/// Runs the pieces as batches on all queues in turns.
fn transfer(
    rig: &Rig,
    ring: &mut Ring,
    operation: Operation,
    pieces: &[Piece],
    verified: &mut Verified,
) -> Result<(), RingError> {
    let settings = BatchSettings { operation, namespace: 1, timeout: Some(STALL), token: 0 };
    let mut in_flight = 0_usize;
    for (index, batch) in pieces.chunks(pieces.len().div_ceil(2 * rig.owned.len())).enumerate() {
        let Some(mut iocb) = ring.get_iocb(&settings) else {
            return Err(RingError::Invalid("no free batch".to_owned()));
        };
        for piece in batch {
            let address = rig.data.address() + piece.memory as u64;
            let block = piece.place as u64 / u64::from(BLOCK_BYTES);
            iocb.push(&Transfer { address, block, bytes: piece.bytes as u32, checksum: 0 });
            verified.transfers += 1;
            verified.bytes += piece.bytes as u64;
        }
        iocb.issue_io(index % rig.owned.len())?;
        in_flight += 1;
    }
    while in_flight > 0 {
        match ring.wait_cqe(STALL) {
            Some(cqe) if cqe.failed == 0 => in_flight -= 1,
            other => return Err(RingError::Invalid(format!("a batch has not ended well: {other:?}"))),
        }
    }
    Ok(())
}
