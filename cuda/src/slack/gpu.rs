//! Layers and I/O kernels on a GPU.

use reprise_policy::slack::measure::{LayerTime, Lengths, Machine};
use reprise_policy::slack::{Computation, Direction};

use super::pass::PassMachine;
use crate::copy::{CopyJob, CopyKind, KvLayout, KvShape};
use crate::gpu::{DeviceMemory, Event, GpuError, HostMemory, Partition, SmShare, Stream};
use crate::kernels::{DeviceJobs, DeviceLayout, Kernels, Layer, LayerShape, Slots};

/// Bytes of an IOCB: 32 objects of 32 KiB.
pub const IOCB_BYTES: u32 = 1 << 20;
/// Bytes of one part of one layer of a block: 16 tokens, 8 KV heads, 128 values in 16 bits.
const OBJECT_BYTES: u32 = 32 << 10;
/// Tokens of a block.
const BLOCK_TOKENS: u32 = 16;
/// Blocks of an IOCB, keys and values of one layer.
const IOCB_BLOCKS: u32 = IOCB_BYTES / (2 * OBJECT_BYTES);

/// Returns the IOCBs of the KV of one layer of `tokens` tokens.
pub fn iocbs_of_tokens(tokens: u32) -> u32 {
    tokens.div_ceil(BLOCK_TOKENS * IOCB_BLOCKS)
}

/// Streams of I/O kernels: reads and writes.
#[derive(Debug)]
struct IoStreams {
    read: Stream,
    write: Stream,
}

/// A layer, pages of KV in GPU memory, and pinned host memory in place of a device.
///
/// Reads and writes have separate host memory. Kernels of a limited launch use one stream for both directions.
#[derive(Debug)]
pub struct GpuMachine<'a> {
    kernels: &'a Kernels,
    layer: Layer<'a>,
    compute: Stream,
    limited: Stream,
    open: IoStreams,
    jobs: [DeviceJobs; 2],
    io_sms: u32,
    /// Begin of each layer of the passes.
    begins: Vec<Event>,
    /// End of the last layer.
    ends: Vec<Event>,
    /// End of each launch of the passes, in order.
    launches: Vec<Event>,
    // Memory that kernels use, released after the streams.
    _layout: DeviceLayout,
    _pages: DeviceMemory,
    _host: [HostMemory; 2],
}

impl<'a> GpuMachine<'a> {
    /// Allocates a layer of Llama-3-8B for at most `lengths` input and prefix tokens, and I/O of at most `iocbs` IOCBs
    /// in each direction.
    ///
    /// # Errors
    /// Too little memory, or more tokens than a layer can have.
    pub fn new(
        kernels: &'a Kernels,
        io_sms: u32,
        (input, prefix): (u32, u32),
        iocbs: u32,
    ) -> Result<GpuMachine<'a>, GpuError> {
        let gpu = kernels.gpu();
        let blocks = iocbs * IOCB_BLOCKS;
        let shape = KvShape { layers: 1, parts: 2, blocks: 2 * blocks, object_bytes: OBJECT_BYTES };
        let pages = DeviceMemory::new(gpu, shape.bytes())?;
        let layout = DeviceLayout::new(&KvLayout::split(shape)?, &pages)?;
        let bytes = u64::from(blocks) * shape.block_bytes();
        let host = [HostMemory::new(gpu, bytes)?, HostMemory::new(gpu, bytes)?];
        let upload = |index: u32, memory: &HostMemory| {
            // Reads go to the first half of the pages, writes come from the second one.
            let job = |slot: u32| CopyJob { block: index * blocks + slot, slot };
            let jobs: Vec<CopyJob> = (0..blocks).map(job).collect();
            let slots = Slots::on_host(memory, shape.block_bytes(), blocks)?;
            layout.jobs(slots, &jobs, 0..shape.objects(), &[])
        };
        let jobs = [upload(0, &host[0])?, upload(1, &host[1])?];
        let bounded = Partition::with_bounded_grid(gpu, SmShare::Count(io_sms), &"windows of free SMs");
        Ok(GpuMachine {
            kernels,
            layer: Layer::new(kernels, LayerShape::LLAMA_3_8B, input, prefix)?,
            compute: Stream::new(gpu)?,
            limited: bounded.io_stream()?,
            open: IoStreams { read: Stream::new(gpu)?, write: Stream::new(gpu)? },
            jobs,
            io_sms,
            begins: Vec::new(),
            ends: Vec::new(),
            launches: Vec::new(),
            _layout: layout,
            _pages: pages,
            _host: host,
        })
    }

    fn io(&self, stream: &Stream, direction: Direction, iocbs: u32) -> Result<(), GpuError> {
        let (kind, jobs) = match direction {
            Direction::Read => (CopyKind::Scatter, &self.jobs[0]),
            Direction::Write => (CopyKind::Gather, &self.jobs[1]),
        };
        // Larger launches repeat the transfers that there is memory for.
        let mut rest = iocbs * IOCB_BLOCKS;
        while rest > 0 {
            let part = rest.min(jobs.count());
            self.kernels.copy_part(stream, kind, jobs, 0..part)?;
            rest -= part;
        }
        Ok(())
    }

    fn event(&self) -> Result<Event, GpuError> {
        Event::new(self.kernels.gpu())
    }
}

impl Machine for GpuMachine<'_> {
    type Error = GpuError;

    fn layer(&mut self, lengths: Lengths, io: Option<(Direction, u32)>) -> Result<LayerTime, GpuError> {
        let [begin, end, io_begin, io_end] = [self.event()?, self.event()?, self.event()?, self.event()?];
        // A layer before the measured one keeps the GPU busy, as in a pass.
        self.layer.run(&self.compute, lengths.input_tokens, lengths.prefix_tokens)?;
        begin.record(&self.compute)?;
        self.layer.run(&self.compute, lengths.input_tokens, lengths.prefix_tokens)?;
        end.record(&self.compute)?;
        if let Some((direction, iocbs)) = io {
            self.limited.wait(&begin)?;
            io_begin.record(&self.limited)?;
            self.io(&self.limited, direction, iocbs)?;
            io_end.record(&self.limited)?;
            self.limited.synchronize()?;
        }
        self.compute.synchronize()?;
        let micros = |later: &Event, earlier: &Event| Ok(later.since(earlier)?.as_secs_f64() * 1e6);
        let io = if io.is_some() { micros(&io_end, &io_begin) } else { Ok(0.0) };
        Ok(LayerTime { layer: micros(&end, &begin)?, io: io? })
    }

    fn kernel(&mut self, direction: Direction, iocbs: u32) -> Result<f64, GpuError> {
        let (begin, end) = (self.event()?, self.event()?);
        begin.record(&self.limited)?;
        self.io(&self.limited, direction, iocbs)?;
        end.record(&self.limited)?;
        self.limited.synchronize()?;
        Ok(end.since(&begin)?.as_secs_f64() * 1e6)
    }

    fn sms(&self, _: Direction, _: u32) -> u32 {
        self.io_sms
    }
}

impl PassMachine for GpuMachine<'_> {
    type Error = GpuError;

    fn start(&mut self) -> Result<(), GpuError> {
        self.kernels.gpu().synchronize()?;
        self.begins.clear();
        self.ends.clear();
        self.launches.clear();
        Ok(())
    }

    fn enqueue(&mut self, computation: Computation, behind: Option<usize>) -> Result<(), GpuError> {
        let begin = self.event()?;
        if let Some(launch) = behind {
            self.compute.wait(&self.launches[launch])?;
        }
        begin.record(&self.compute)?;
        self.begins.push(begin);
        self.layer.run(&self.compute, computation.input_tokens, computation.prefix_tokens)
    }

    fn wait_begin(&mut self, layer: u32) -> Result<(), GpuError> {
        self.begins[layer as usize].synchronize()
    }

    fn launch(&mut self, direction: Direction, iocbs: u32, limited: bool) -> Result<(), GpuError> {
        let stream = match (limited, direction) {
            (true, _) => &self.limited,
            (false, Direction::Read) => &self.open.read,
            (false, Direction::Write) => &self.open.write,
        };
        self.io(stream, direction, iocbs)?;
        let end = self.event()?;
        end.record(stream)?;
        self.launches.push(end);
        Ok(())
    }

    fn ended(&mut self) -> Result<usize, GpuError> {
        for stream in [&self.limited, &self.open.read, &self.open.write] {
            if !stream.is_idle()? {
                return Ok(0);
            }
        }
        Ok(self.launches.len())
    }

    fn finish(&mut self) -> Result<f64, GpuError> {
        let end = self.event()?;
        end.record(&self.compute)?;
        self.compute.synchronize()?;
        let Some(first) = self.begins.first() else { return Ok(0.0) };
        let micros = end.since(first)?.as_secs_f64() * 1e6;
        self.ends.push(end);
        Ok(micros)
    }

    fn drain(&mut self) -> Result<f64, GpuError> {
        for stream in [&self.compute, &self.limited, &self.open.read, &self.open.write] {
            stream.synchronize()?;
        }
        let Some(first) = self.begins.first() else { return Ok(0.0) };
        let mut last = 0.0;
        for end in self.ends.iter().chain(&self.launches) {
            last = f64::max(last, end.since(first)?.as_secs_f64() * 1e6);
        }
        Ok(last)
    }
}
