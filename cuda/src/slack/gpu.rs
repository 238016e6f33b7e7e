//! Layers and I/O kernels on a GPU.

use reprise_policy::slack::measure::{LayerTime, Lengths, Machine};
use reprise_policy::slack::{Computation, Direction};

use super::pass::PassMachine;
use super::transfer::{Lane, Method, Transfers};
use crate::gpu::{Event, GpuError, Partition, SmShare, Stream};
use crate::kernels::{Kernels, Layer, LayerShape};

/// Bytes of an IOCB: 32 objects of 32 KiB.
pub const IOCB_BYTES: u32 = 1 << 20;
/// Bytes of one part of one layer of a block: 16 tokens, 8 KV heads, 128 values in 16 bits.
pub(super) const OBJECT_BYTES: u32 = 32 << 10;
/// Tokens of a block.
const BLOCK_TOKENS: u32 = 16;
/// Blocks of an IOCB, keys and values of one layer.
pub(super) const IOCB_BLOCKS: u32 = IOCB_BYTES / (2 * OBJECT_BYTES);

/// Returns the IOCBs of the KV of one layer of `tokens` tokens.
pub fn iocbs_of_tokens(tokens: u32) -> u32 {
    tokens.div_ceil(BLOCK_TOKENS * IOCB_BLOCKS)
}

/// Streams of launches without limits: reads and writes.
#[derive(Debug)]
struct OpenLanes {
    read: Lane,
    write: Lane,
}

/// A layer, pages of KV in GPU memory, and pinned host memory in place of a device.
///
/// Limited launches use one lane for both directions.
#[derive(Debug)]
pub struct GpuMachine<'a> {
    kernels: &'a Kernels,
    layer: Layer<'a>,
    compute: Stream,
    limited: Lane,
    open: OpenLanes,
    io_sms: u32,
    /// Begin of each layer of the passes.
    begins: Vec<Event>,
    /// End of the last layer.
    ends: Vec<Event>,
    /// End of each launch of the passes, in order.
    launches: Vec<Event>,
    // Released after the streams that use it.
    transfers: Transfers<'a>,
}

impl<'a> GpuMachine<'a> {
    /// Allocates a layer of Llama-3-8B for at most `lengths` input and prefix tokens, and I/O of at most `iocbs` IOCBs
    /// in each direction.
    ///
    /// Kernels behind the copy engine have no limit of multiprocessors: they are short, and a high priority or a large
    /// block would cost computation more than they take.
    ///
    /// # Errors
    /// Too little memory, or more tokens than a layer can have.
    pub fn new(
        kernels: &'a Kernels,
        method: Method,
        (input, prefix): (u32, u32),
        iocbs: u32,
    ) -> Result<GpuMachine<'a>, GpuError> {
        let gpu = kernels.gpu();
        let partition = match method {
            Method::CopyEngine => Partition::unlimited(gpu),
            Method::Kernel { sms } => {
                Partition::with_bounded_grid(gpu, SmShare::Count(sms), &"windows of free SMs")
            }
        };
        Ok(GpuMachine {
            kernels,
            layer: Layer::new(kernels, LayerShape::LLAMA_3_8B, input, prefix)?,
            compute: Stream::new(gpu)?,
            limited: Lane::new(partition.io_stream()?)?,
            open: OpenLanes { read: Lane::new(Stream::new(gpu)?)?, write: Lane::new(Stream::new(gpu)?)? },
            io_sms: partition.io_sms(),
            begins: Vec::new(),
            ends: Vec::new(),
            launches: Vec::new(),
            transfers: Transfers::new(kernels, method, iocbs)?,
        })
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
            self.limited.kernels.wait(&begin)?;
            io_begin.record(&self.limited.kernels)?;
            self.transfers.launch(&self.limited, direction, iocbs)?;
            io_end.record(&self.limited.kernels)?;
            self.limited.kernels.synchronize()?;
        }
        self.compute.synchronize()?;
        let micros = |later: &Event, earlier: &Event| Ok(later.since(earlier)?.as_secs_f64() * 1e6);
        let io = if io.is_some() { micros(&io_end, &io_begin) } else { Ok(0.0) };
        Ok(LayerTime { layer: micros(&end, &begin)?, io: io? })
    }

    fn kernel(&mut self, direction: Direction, iocbs: u32) -> Result<f64, GpuError> {
        let (begin, end) = (self.event()?, self.event()?);
        begin.record(&self.limited.kernels)?;
        self.transfers.launch(&self.limited, direction, iocbs)?;
        end.record(&self.limited.kernels)?;
        self.limited.kernels.synchronize()?;
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
        let lane = match (limited, direction) {
            (true, _) => &self.limited,
            (false, Direction::Read) => &self.open.read,
            (false, Direction::Write) => &self.open.write,
        };
        self.transfers.launch(lane, direction, iocbs)?;
        let end = self.event()?;
        end.record(&lane.kernels)?;
        self.launches.push(end);
        Ok(())
    }

    fn ended(&mut self) -> Result<usize, GpuError> {
        for lane in [&self.limited, &self.open.read, &self.open.write] {
            if !lane.kernels.is_idle()? {
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
        self.compute.synchronize()?;
        for lane in [&self.limited, &self.open.read, &self.open.write] {
            lane.kernels.synchronize()?;
        }
        let Some(first) = self.begins.first() else { return Ok(0.0) };
        let mut last = 0.0;
        for end in self.ends.iter().chain(&self.launches) {
            last = f64::max(last, end.since(first)?.as_secs_f64() * 1e6);
        }
        Ok(last)
    }
}
