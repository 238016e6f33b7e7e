//! Measures the speed of a file's device: bare io_uring reads at several sizes and depths, next to the
//! io_uring and plain engines of this crate (ratio to the bare loop, and CPU seconds per GB).
//!
//! `cargo run --release -p reprise-io --example device_speed -- [FILE [MiB]]`. FILE is created, written once
//! (reads of unwritten extents run at memory speed), and removed afterwards.

#![allow(clippy::print_stdout, reason = "printing is what this program is for")]

use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use reprise_buffers::{Arena, ArenaConfig, HugePolicy, Span};
use reprise_io::bare::{self, BareLoop};
use reprise_io::{
    Completion, DeviceFile, EngineChoice, EngineSettings, FileAccess, IfMissing, IoEngine, Op, Reserve,
    Submission, Token, Wait, open_engine,
};

type Outcome<T> = Result<T, Box<dyn Error>>;

const SIZES: [u32; 4] = [4 << 10, 32 << 10, 256 << 10, 2 << 20];
const DEPTHS: [usize; 4] = [1, 4, 16, 32];

/// Interleaved repetitions; the median is printed.
const ROUNDS: usize = 3;

/// Maximum number of bytes of one round.
const ROUND_BYTES: u64 = 512 << 20;

/// Maximum number of operations of one round: small ones are slow.
const ROUND_OPS: u64 = 16_384;

struct Case<'a> {
    size: u32,
    depth: usize,
    offsets: &'a [u64],
    arena: &'a Arena,
}

/// Bytes per second, and CPU seconds per byte.
#[derive(Clone, Copy)]
struct Speed {
    rate: f64,
    cpu: f64,
}

fn main() -> Outcome<()> {
    let mut arguments = std::env::args_os().skip(1);
    let path =
        arguments.next().map_or_else(|| std::env::temp_dir().join("reprise-device-speed"), PathBuf::from);
    let mib: u64 = arguments.next().map_or(Ok(1024), |text| text.to_string_lossy().parse())?;
    let bytes = mib << 20;
    let arena =
        Arena::new(&ArenaConfig { bytes: 64 << 20, region_bytes: 64 << 20, huge: HugePolicy::Prefer })?;
    let mut file = DeviceFile::open(&path, FileAccess::ReadWrite, IfMissing::Create)?;
    let outcome = fill(&mut file, bytes, &arena).and_then(|()| {
        println!(
            "{mib} MiB at {}, {:?}, buffers in {} pages",
            path.display(),
            file.caching(),
            arena.page_kind()
        );
        println!(
            "{:>8} {:>5} {:>10} {:>22} {:>22}",
            "bytes", "depth", "bare MB/s", "io_uring (CPU s/GB)", "plain (CPU s/GB)"
        );
        drop(file);
        SIZES.into_iter().try_for_each(|size| measure_size(&path, bytes, size, &arena))
    });
    std::fs::remove_file(&path)?;
    outcome
}

fn fill(file: &mut DeviceFile, bytes: u64, arena: &Arena) -> Outcome<()> {
    file.preallocate(bytes, Reserve::Bytes(0))?;
    let block_bytes = 2 << 20;
    let offsets: Vec<u64> =
        (0..bytes / u64::from(block_bytes)).map(|index| index * u64::from(block_bytes)).collect();
    let buffers = bare::cut(&arena.span(0, 0, 64 << 20)?, block_bytes, 8)?;
    for what in ["first write", "rewrite"] {
        let run = bare::write_loop(&BareLoop {
            file,
            block_bytes,
            offsets: &offsets,
            depth: buffers.len(),
            buffers: &buffers,
            sync_every: None,
        })?;
        println!("{what}, 2 MiB at depth 8, one sync: {:.0} MB/s", run.bytes_per_second() / 1e6);
    }
    Ok(())
}

fn measure_size(path: &Path, bytes: u64, size: u32, arena: &Arena) -> Outcome<()> {
    let blocks = bytes / u64::from(size);
    let count = blocks.min(ROUND_BYTES / u64::from(size)).min(ROUND_OPS);
    // A stride without a common divisor visits scattered places, each once.
    let offsets: Vec<u64> = (0..count).map(|index| index * 7_919 % blocks * u64::from(size)).collect();
    for depth in DEPTHS {
        let case = Case { size, depth, offsets: &offsets, arena };
        let mut speeds: [Vec<Speed>; 3] = Default::default();
        for _ in 0..ROUNDS {
            speeds[0].push(bare_speed(path, &case)?);
            speeds[1].push(engine_speed(path, &case, EngineChoice::IoUring)?);
            speeds[2].push(engine_speed(path, &case, EngineChoice::Plain)?);
        }
        let [bare, uring, plain] = speeds.map(median);
        let column = |speed: Speed| format!("{:.2} x ({:.3})", speed.rate / bare.rate, speed.cpu * 1e9);
        let bare_column = format!("{:.0} ({:.3})", bare.rate / 1e6, bare.cpu * 1e9);
        println!("{size:>8} {depth:>5} {bare_column:>14} {:>22} {:>22}", column(uring), column(plain));
    }
    Ok(())
}

fn bare_speed(path: &Path, case: &Case<'_>) -> Outcome<Speed> {
    let file = DeviceFile::open(path, FileAccess::ReadOnly, IfMissing::Fail)?;
    let buffers = bare::cut(&case.arena.span(0, 0, 64 << 20)?, case.size, case.depth)?;
    let cpu = cpu_time()?;
    let run = bare::read_loop(&BareLoop {
        file: &file,
        block_bytes: case.size,
        offsets: case.offsets,
        depth: case.depth,
        buffers: &buffers,
        sync_every: None,
    })?;
    Ok(Speed { rate: run.bytes_per_second(), cpu: (cpu_time()? - cpu).as_secs_f64() / run.bytes as f64 })
}

fn engine_speed(path: &Path, case: &Case<'_>, engine: EngineChoice) -> Outcome<Speed> {
    let file = DeviceFile::open(path, FileAccess::ReadOnly, IfMissing::Fail)?;
    let settings =
        EngineSettings { queue_depth: case.depth as u32, engine, regions: case.arena.regions().to_vec() };
    let mut engine = open_engine(file, &settings)?;
    let mut idle = bare::cut(&case.arena.span(0, 0, 64 << 20)?, case.size, case.depth)?;
    let (cpu, start) = (cpu_time()?, Instant::now());
    read_all(engine.as_mut(), case.offsets, &mut idle)?;
    let (elapsed, cpu) = (start.elapsed(), cpu_time()? - cpu);
    let bytes = f64::from(case.size) * case.offsets.len() as f64;
    Ok(Speed { rate: bytes / elapsed.as_secs_f64(), cpu: cpu.as_secs_f64() / bytes })
}

fn read_all(engine: &mut dyn IoEngine, offsets: &[u64], idle: &mut Vec<Span>) -> Outcome<()> {
    let (mut todo, mut done) = (offsets.iter(), Vec::<Completion>::new());
    loop {
        while let Some(span) = idle.pop() {
            let Some(offset) = todo.next() else { break };
            let op = Op::Read { offset: *offset, into: vec![span] };
            engine
                .submit(Submission { token: Token(*offset), op })
                .map_err(|_| "more spans than capacity")?;
        }
        if engine.in_flight() == 0 {
            return Ok(());
        }
        engine.reap(Wait::Until(Duration::from_secs(10)), &mut done)?;
        for completion in done.drain(..) {
            completion.result?;
            idle.extend(completion.op.spans().iter().cloned());
        }
    }
}

fn median(mut speeds: Vec<Speed>) -> Speed {
    speeds.sort_by(|a, b| a.rate.total_cmp(&b.rate));
    speeds[speeds.len() / 2]
}

/// User and system time of this process; io_uring's kernel workers count as its threads.
fn cpu_time() -> Outcome<Duration> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks =
        |index: usize| fields.get(index).and_then(|text| text.parse::<u64>().ok()).ok_or("no CPU times");
    // utime and stime, fields 14 and 15 of proc(5), in ticks of 10 ms.
    Ok(Duration::from_millis(10 * (ticks(11)? + ticks(12)?)))
}
