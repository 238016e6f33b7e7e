//! Layers of the reference engine on this CPU, and I/O to a file of the benchmark directory.
//!
//! A layer is the engine's work on one layer of Llama-3-8B: it checks each word of the prefix's KV, and computes
//! the words of the input's KV. An I/O kernel is a thread that reads or writes with direct I/O; it occupies one
//! "multiprocessor", a CPU core.

use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, anyhow, ensure};
use reprise_io::{DeviceFile, FileAccess, IfMissing, Reserve};
use reprise_policy::LayoutSpec;
use reprise_policy::slack::measure::{LayerTime, Lengths, Machine, Plan};
use reprise_policy::slack::{Direction, Measurement};
use reprise_testkit::bench::reference_pool::ReferencePool;
use reprise_testkit::kv_function;
use reprise_testkit::paged_kv::{PagedKv, PhysicalBlock};

/// Bytes of an IOCB: one operation of the bare loop.
const IOCB_BYTES: u32 = 2 << 20;
/// IOCB counts of kernels.
const IOCBS: [u32; 5] = [1, 2, 4, 8, 16];
/// Largest file: the operations of the largest kernel.
const FILE_BYTES: u64 = IOCBS[IOCBS.len() - 1] as u64 * IOCB_BYTES as u64;
/// Operations of an I/O kernel that are in flight.
const DEPTH: usize = 16;
/// Identity of the blocks' words.
const IDENTITY: [u8; 32] = [1; 32];
/// Measured input lengths, in tokens.
const INPUTS: [u32; 2] = [512, 2048];
/// Measured prefix lengths, in tokens.
const PREFIXES: [u32; 2] = [0, 4096];

/// Measures layers and I/O; the file lies in `directory` meanwhile.
///
/// # Errors
/// The file cannot be written, or there is too little memory.
pub(super) fn measure(directory: &Path) -> anyhow::Result<Measurement> {
    let plan = Plan {
        step_tokens: 16,
        iocb_bytes: IOCB_BYTES,
        inputs: INPUTS.to_vec(),
        prefixes: PREFIXES.to_vec(),
        decode_inputs: vec![1],
        iocbs: IOCBS.to_vec(),
        repetitions: 5,
        tolerance_percent: 5.0,
    };
    plan.measure(&mut CpuMachine::new(directory)?)
}

/// Returns the name of the processor, in place of a GPU's product name.
pub(super) fn product() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    format!("CPU: {}", name.map_or("unknown", |(_, name)| name.trim()))
}

/// Memory of one layer, and the file of I/O kernels.
struct CpuMachine {
    layers: Layers,
    file: IoFile,
}

/// KV of one layer.
struct Layers {
    kv: PagedKv,
    blocks: Vec<PhysicalBlock>,
    block_tokens: u32,
}

/// File that I/O kernels read and write; removed at the end.
struct IoFile {
    file: DeviceFile,
    pool: ReferencePool,
    path: PathBuf,
}

impl CpuMachine {
    fn new(directory: &Path) -> anyhow::Result<CpuMachine> {
        Ok(CpuMachine { layers: Layers::new()?, file: IoFile::new(directory)? })
    }
}

impl Layers {
    fn new() -> anyhow::Result<Layers> {
        let spec = LayoutSpec { layers: 1, ..LayoutSpec::LLAMA_3_8B };
        let layout = spec.validate().context("one layer of Llama-3-8B")?;
        let block_tokens = u32::from(spec.tokens_per_block);
        let count = ((INPUTS[1] + PREFIXES[1]) / block_tokens) as usize;
        let mut kv = PagedKv::new(&layout, count)?;
        let blocks = kv.allocate(count).context("blocks of the layer")?;
        for block in &blocks {
            for part in 0..2 {
                kv_function::fill(&IDENTITY, part, kv.object_mut(*block, part as usize));
            }
        }
        Ok(Layers { kv, blocks, block_tokens })
    }

    /// Computes one layer; returns its microseconds.
    fn compute(&mut self, lengths: Lengths) -> anyhow::Result<f64> {
        let prefix = lengths.prefix_tokens.div_ceil(self.block_tokens) as usize;
        let all = prefix + lengths.input_tokens.div_ceil(self.block_tokens) as usize;
        let began = Instant::now();
        let mut wrong = 0;
        for (index, block) in self.blocks.iter().take(all).enumerate() {
            for part in 0..2_u32 {
                if index < prefix {
                    let object = self.kv.object(*block, part as usize);
                    wrong += kv_function::mismatches(&IDENTITY, part, object);
                } else {
                    kv_function::fill(&IDENTITY, part, self.kv.object_mut(*block, part as usize));
                }
            }
        }
        ensure!(wrong == 0, "{wrong} words of the prefix are wrong: check this machine's memory");
        Ok(micros(began))
    }
}

impl IoFile {
    fn new(directory: &Path) -> anyhow::Result<IoFile> {
        std::fs::create_dir_all(directory).with_context(|| format!("creating {}", directory.display()))?;
        let path = directory.join(format!("profile-{}.dat", std::process::id()));
        let mut file = DeviceFile::open(&path, FileAccess::ReadWrite, IfMissing::Create)
            .with_context(|| format!("opening {}", path.display()))?;
        file.preallocate(FILE_BYTES, Reserve::Bytes(0)).context("allocating the file of I/O kernels")?;
        let pool = ReferencePool::new(&path)?;
        let file = IoFile { file, pool, path };
        // Reads of space that was never written do not access the device.
        file.launch(Direction::Write, IOCBS[IOCBS.len() - 1])?;
        Ok(file)
    }

    /// Reads or writes `iocbs` IOCBs; returns the microseconds.
    fn launch(&self, direction: Direction, iocbs: u32) -> anyhow::Result<f64> {
        let offsets: Vec<u64> = (0..iocbs).map(|index| u64::from(index) * u64::from(IOCB_BYTES)).collect();
        let began = Instant::now();
        match direction {
            Direction::Read => self.pool.read(IOCB_BYTES, &offsets, DEPTH)?,
            Direction::Write => self.pool.write(&self.file, &offsets, NonZeroU32::MAX)?,
        };
        Ok(micros(began))
    }
}

impl Drop for IoFile {
    fn drop(&mut self) {
        // A remaining file is in the benchmark's directory, where users may remove it.
        let _ = std::fs::remove_file(&self.path);
    }
}

fn micros(began: Instant) -> f64 {
    began.elapsed().as_secs_f64() * 1e6
}

impl Machine for CpuMachine {
    type Error = anyhow::Error;

    fn layer(&mut self, lengths: Lengths, io: Option<(Direction, u32)>) -> anyhow::Result<LayerTime> {
        let (layers, file) = (&mut self.layers, &self.file);
        std::thread::scope(|scope| {
            let io = io.map(|(direction, iocbs)| scope.spawn(move || file.launch(direction, iocbs)));
            let layer = layers.compute(lengths);
            let io = match io.map(std::thread::ScopedJoinHandle::join) {
                None => Ok(0.0),
                Some(Ok(io)) => io,
                Some(Err(_)) => Err(anyhow!("the thread of an I/O kernel panicked")),
            };
            Ok(LayerTime { layer: layer?, io: io? })
        })
    }

    fn kernel(&mut self, direction: Direction, iocbs: u32) -> anyhow::Result<f64> {
        self.file.launch(direction, iocbs)
    }

    fn sms(&self, _: Direction, _: u32) -> u32 {
        1
    }
}
