//! Backends with a GPU: the same random stores and retrievals as in tests without one, with every byte compared.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use reprise_buffers::{Arena, ArenaConfig, HugePolicy, Span};
use reprise_cuda::gpu::{DeviceMemory, Gpu, HostMemory, Partition, Stream};
use reprise_cuda::kernels::Kernels;
use reprise_cuda::store::verify::{
    Contents, EmulatedRings, StreamMemory, StreamWork, device_bytes, geometries, verify_mover, verify_streams,
};
use reprise_cuda::store::{
    Backend, CuFile, EngineStream, GdsMover, GpuKv, KvGeometry, KvMemory, LayerMover, MoveError,
    MoverCounters, StagedMover,
};
use reprise_io::{DeviceFile, FileAccess, HolderNumber, IfMissing, Reserve, SharedFile};
use reprise_nvme::emulated::{Emulation, Storage};

use crate::Options;
use crate::steps::{StepError, checked};

/// Blocks of KV memory.
const BLOCKS: usize = 48;

fn failed(error: impl std::fmt::Display) -> StepError {
    StepError(error.to_string())
}

fn rounds(options: &Options) -> u64 {
    if options.small { 2 } else { 20 }
}

/// A file in place of a device; it is removed at the end.
struct Device {
    path: PathBuf,
    bytes: u64,
}

impl Device {
    fn new(folder: &Path, geometry: &KvGeometry) -> Device {
        let name = format!("gpu-check-{}.device", std::process::id());
        Device { path: folder.join(name), bytes: device_bytes(geometry) }
    }

    /// Returns a descriptor for direct I/O, as the agent lends one.
    fn lent(&self) -> Result<File, StepError> {
        let open = DeviceFile::open(&self.path, FileAccess::ReadWrite, IfMissing::Create);
        let mut device = open.map_err(failed)?;
        device.preallocate(self.bytes, Reserve::Bytes(0)).map_err(failed)?;
        let shared = SharedFile::of(&device).map_err(failed)?;
        let shared =
            shared.ok_or_else(|| StepError("--out is on a file system without direct I/O".to_owned()))?;
        Ok(File::from(shared.share(HolderNumber(1)).map_err(failed)?))
    }

    fn buffered(&self) -> Result<File, StepError> {
        File::options().read(true).write(true).open(&self.path).map_err(failed)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // A file that is left does not affect other runs.
        let _ = fs::remove_file(&self.path);
    }
}

/// Checks the backends that move paged memory of the GPU: `staged`, and `gds` where the machine has it.
pub(crate) fn run(kernels: &Arc<Kernels>, options: &Options) -> Result<(), StepError> {
    verify(kernels, options, |mover, geometry, contents, _| {
        verify_mover(mover, geometry, contents, (1, rounds(options)))
    })
}

/// Checks the order of requests and a stream of the engine: fills, copies and requests, without a wait of the CPU.
pub(crate) fn streams(kernels: &Arc<Kernels>, options: &Options) -> Result<(), StepError> {
    // An error before other work, if the driver or the GPU lacks it.
    EngineStream::on_gpu(Arc::new(Stream::new(kernels.gpu())?))?;
    captures(kernels.gpu())?;
    ring_streams(kernels, options)?;
    verify(kernels, options, |mover, geometry, contents, memory| {
        let gpu = memory.gpu();
        let snapshots = Arc::new(DeviceMemory::new(gpu, StreamWork::snapshot_bytes(geometry))?);
        let stream = Arc::new(Stream::new(gpu)?);
        verify_order(mover, geometry, contents, (&stream, memory, &snapshots), rounds(options))?;
        // SAFETY: the null handle is the legacy default stream, which is a stream of each context.
        let default = Arc::new(unsafe { Stream::of_engine(gpu, std::ptr::null_mut()) });
        verify_order(mover, geometry, contents, (&default, memory, &snapshots), rounds(options))
    })
}

fn verify_order(
    mover: &mut dyn LayerMover,
    geometry: &KvGeometry,
    contents: (&Contents, &[Contents]),
    (stream, memory, snapshots): (&Arc<Stream>, &Arc<DeviceMemory>, &Arc<DeviceMemory>),
    rounds: u64,
) -> Result<MoverCounters, MoveError> {
    let engine = EngineStream::on_gpu(Arc::clone(stream))?;
    let memory = StreamMemory::Device(Arc::clone(memory));
    let work =
        StreamWork::Gpu { stream: Arc::clone(stream), engine, memory, snapshots: Arc::clone(snapshots) };
    verify_streams(mover, geometry, contents, &work, (1, rounds))
}

/// Checks that queries neither fail during a capture of a graph nor invalidate it, in the thread of the capture and in
/// another one.
fn captures(gpu: &Gpu) -> Result<(), StepError> {
    let (captured, stream) = (Stream::new(gpu)?, Arc::new(Stream::new(gpu)?));
    let engine = EngineStream::on_gpu(Arc::clone(&stream))?;
    let point = engine.mark()?;
    stream.synchronize()?;
    let query = || point.has_passed();
    let queries = captured.while_captured(|| {
        let other = std::thread::scope(|scope| scope.spawn(query).join());
        [other.unwrap_or(Ok(false)), query()]
    })?;
    for query in queries {
        if !query? {
            return Err(StepError("a point of an idle stream has not passed".to_owned()));
        }
    }
    checked("streams", "queries during a capture in the global mode: passed, and the capture is valid");
    Ok(())
}

/// Checks the order of requests and a stream with the ring's kernel, an emulated controller, and KV memory of the host.
fn ring_streams(kernels: &Kernels, options: &Options) -> Result<(), StepError> {
    let (gpu, partition) = (kernels.gpu(), Partition::new(kernels.gpu(), options.sms)?);
    let mut blocks = 0;
    for (layout, geometry) in geometries(BLOCKS) {
        let span = host_memory(geometry.bytes())?;
        let device = Device::new(&options.out, &geometry);
        drop(device.lent()?);
        let emulation = Emulation::of(Storage::file(device.buffered()?).map_err(failed)?);
        // All memory before the kernel: the driver releases memory only when no kernel runs.
        let stream = Arc::new(Stream::new(gpu)?);
        let work = StreamWork::Gpu {
            engine: EngineStream::on_gpu(Arc::clone(&stream))?,
            stream,
            memory: StreamMemory::Host {
                memory: HostMemory::register(gpu, &span)?,
                scratch: DeviceMemory::new(gpu, geometry.object_bytes as u64)?,
            },
            snapshots: Arc::new(DeviceMemory::new(gpu, StreamWork::snapshot_bytes(&geometry))?),
        };
        let of_gpu = Some((kernels, &partition));
        let mut rings = EmulatedRings::start(geometry, &span, vec![emulation], of_gpu).map_err(failed)?;
        let contents = (&Contents::Host(span), &[Contents::File(device.buffered()?)][..]);
        let verified = verify_streams(rings.mover(), &geometry, contents, &work, (1, rounds(options)));
        rings.stop().map_err(failed)?;
        blocks += verified.map_err(|error| StepError(format!("{layout}: {error}")))?.blocks;
    }
    let detail =
        format!("rings by the kernel, 4 layouts, {blocks} layers of blocks on a stream: all bytes equal");
    checked("streams", &detail);
    Ok(())
}

/// Allocates zeroed memory of the host.
fn host_memory(bytes: u64) -> Result<Span, StepError> {
    let config = ArenaConfig { bytes, region_bytes: bytes, huge: HugePolicy::Never };
    Arena::new(&config).and_then(|arena| arena.span(0, 0, bytes)).map_err(failed)
}

/// Runs a check of each backend in each layout.
fn verify(
    kernels: &Arc<Kernels>,
    options: &Options,
    check: impl Fn(
        &mut dyn LayerMover,
        &KvGeometry,
        (&Contents, &[Contents]),
        &Arc<DeviceMemory>,
    ) -> Result<MoverCounters, MoveError>,
) -> Result<(), StepError> {
    let partition = Arc::new(Partition::new(kernels.gpu(), options.sms)?);
    let library = CuFile::load();
    if let Err(reason) = &library {
        checked("backend", &format!("gds is not used: {reason}"));
    }
    let mut verified: Vec<(&str, u64)> = Vec::new();
    for (layout, geometry) in geometries(BLOCKS) {
        let memory = Arc::new(DeviceMemory::new(kernels.gpu(), geometry.bytes())?);
        let (kernels, partition) = (Arc::clone(kernels), Arc::clone(&partition));
        let kv = KvMemory::Gpu(GpuKv { memory: Arc::clone(&memory), kernels, partition });
        let device = Device::new(&options.out, &geometry);
        let mut movers: Vec<Box<dyn LayerMover>> = Vec::new();
        let lent = DeviceFile::lent(device.lent()?).map_err(failed)?;
        movers.push(Box::new(StagedMover::new(geometry, kv.clone(), vec![lent]).map_err(failed)?));
        if let Ok(library) = &library {
            let files = vec![device.lent()?];
            movers.push(Box::new(GdsMover::new(library, geometry, &kv, files).map_err(failed)?));
        }
        for mut mover in movers {
            let contents = (&Contents::Gpu(Arc::clone(&memory)), &[Contents::File(device.buffered()?)][..]);
            let counters = check(&mut *mover, &geometry, contents, &memory);
            let blocks = counters.map_err(|error| StepError(format!("{layout}: {error}")))?.blocks;
            match verified.iter_mut().find(|(name, _)| *name == mover.name()) {
                Some((_, all)) => *all += blocks,
                None => verified.push((mover.name(), blocks)),
            }
        }
    }
    for (name, blocks) in verified {
        checked("backend", &format!("{name}, 4 layouts, {blocks} layers of blocks: all bytes equal"));
    }
    Ok(())
}

/// Checks the backend `gpu-queue` with the ring's kernel, an emulated controller, and KV memory of the host.
pub(crate) fn rings(kernels: &Kernels, partition: &Partition, options: &Options) -> Result<(), StepError> {
    let mut blocks = 0;
    let mut name = "";
    for (layout, geometry) in geometries(BLOCKS) {
        let span = host_memory(geometry.bytes())?;
        let device = Device::new(&options.out, &geometry);
        drop(device.lent()?);
        let emulation = Emulation::of(Storage::file(device.buffered()?).map_err(failed)?);
        let gpu = Some((kernels, partition));
        let mut rings = EmulatedRings::start(geometry, &span, vec![emulation], gpu).map_err(failed)?;
        let contents = (&Contents::Host(span), &[Contents::File(device.buffered()?)][..]);
        let verified = verify_mover(rings.mover(), &geometry, contents, (1, rounds(options)));
        name = rings.mover().name();
        let stopped: Result<(), MoveError> = rings.stop();
        blocks += verified.map_err(|error| StepError(format!("{layout}: {error}")))?.blocks;
        stopped.map_err(failed)?;
    }
    checked(
        "backend",
        &format!("{name}, 4 layouts, {blocks} layers of blocks by the kernel: all bytes equal"),
    );
    Ok(())
}
