//! A synthetic transformer layer: a load for measurements of slack, with the work of a real layer.

use std::time::Duration;

use cudarc::driver::sys;

use super::Kernels;
use crate::gpu::{DeviceMemory, Event, Gpu, GpuError, Stream};

/// Values of a head; the attention kernel has no other size.
pub const HEAD_VALUES: u32 = 128;
/// Tokens are rounded up to a multiple of this.
pub const TOKENS_MULTIPLE: u32 = 128;
/// Bytes of a value (bf16).
const VALUE_BYTES: u64 = 2;

/// Size of a layer. Heads have 128 values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerShape {
    /// Values of a token between layers, a multiple of 128.
    pub hidden: u32,
    /// Query heads, a multiple of the number of KV heads.
    pub heads: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Values of a token inside the feed-forward part, a multiple of 128.
    pub intermediate: u32,
}

/// A layer with its weights and buffers in GPU memory, filled with pseudo-random values.
///
/// One run computes: projection to queries, keys and values; attention over prefix and input; projection back; the
/// feed-forward part with a gate.
#[derive(Debug)]
pub struct Layer<'a> {
    kernels: &'a Kernels,
    functions: Functions,
    shape: LayerShape,
    input_max: u32,
    prefix_max: u32,
    weights: Weights,
    buffers: Buffers,
}

#[derive(Debug)]
struct Functions {
    gemm: sys::CUfunction,
    attention: sys::CUfunction,
    gate: sys::CUfunction,
    fill: sys::CUfunction,
}

#[derive(Debug)]
struct Weights {
    qkv: DeviceMemory,
    output: DeviceMemory,
    gate_up: DeviceMemory,
    down: DeviceMemory,
}

#[derive(Debug)]
struct Buffers {
    input: DeviceMemory,
    qkv: DeviceMemory,
    keys: DeviceMemory,
    values: DeviceMemory,
    attention: DeviceMemory,
    projected: DeviceMemory,
    gate_up: DeviceMemory,
    gated: DeviceMemory,
    result: DeviceMemory,
}

/// Arguments of the product, as in `native/layer.cuh`.
#[repr(C)]
struct GemmArguments {
    a: u64,
    b: u64,
    c: u64,
    m: u32,
    n: u32,
    k: u32,
}

/// Arguments of the attention, as in `native/layer.cuh`.
#[repr(C)]
struct AttentionArguments {
    queries: u64,
    keys: u64,
    values: u64,
    output: u64,
    query_stride: u32,
    heads: u32,
    kv_heads: u32,
    prefix: u32,
    tokens: u32,
}

// SAFETY: the handles of functions may be used from any thread.
unsafe impl Send for Functions {}
// SAFETY: as for `Send`; they do not change.
unsafe impl Sync for Functions {}

impl LayerShape {
    /// A layer of Llama-3-8B.
    pub const LLAMA_3_8B: LayerShape =
        LayerShape { hidden: 4096, heads: 32, kv_heads: 8, intermediate: 14336 };

    /// Checks that the kernels can compute the shape.
    pub fn check(&self) -> Result<(), GpuError> {
        let multiple = |value: u32| value > 0 && value.is_multiple_of(128);
        let heads = self.kv_heads > 0 && self.heads > 0 && self.heads.is_multiple_of(self.kv_heads);
        if multiple(self.hidden) && multiple(self.intermediate) && heads {
            return Ok(());
        }
        Err(GpuError::Invalid(format!(
            "invalid layer {self:?}: expected multiples of 128 values, and heads that are a multiple of KV heads"
        )))
    }

    /// Returns the floating-point operations of one run.
    pub fn operations(&self, input: u32, prefix: u32) -> f64 {
        let (input, prefix) = (f64::from(input), f64::from(prefix));
        let (hidden, intermediate) = (f64::from(self.hidden), f64::from(self.intermediate));
        let head = f64::from(HEAD_VALUES);
        let projections = hidden * (f64::from(self.qkv_values()) + f64::from(self.heads) * head);
        let keys = prefix + (input + 1.0) / 2.0;
        2.0 * input * (projections + 3.0 * hidden * intermediate + 2.0 * f64::from(self.heads) * head * keys)
    }

    fn qkv_values(&self) -> u32 {
        (self.heads + 2 * self.kv_heads) * HEAD_VALUES
    }
}

/// Rounds a number of tokens up to what the kernels compute.
fn rounded(tokens: u32) -> u32 {
    tokens.max(1).next_multiple_of(TOKENS_MULTIPLE)
}

impl<'a> Layer<'a> {
    /// Allocates a layer for at most `input_max` input tokens behind at most `prefix_max` prefix tokens.
    ///
    /// Both are rounded up to a multiple of 128. Errors: an invalid shape, too little GPU memory.
    pub fn new(
        kernels: &'a Kernels,
        shape: LayerShape,
        input_max: u32,
        prefix_max: u32,
    ) -> Result<Layer<'a>, GpuError> {
        shape.check()?;
        let gpu = kernels.gpu();
        let (input_max, prefix_max) = (rounded(input_max), prefix_max.next_multiple_of(TOKENS_MULTIPLE));
        let matrix = |rows: u32, columns: u32| {
            DeviceMemory::new(gpu, u64::from(rows) * u64::from(columns) * VALUE_BYTES)
        };
        let attention = shape.heads * HEAD_VALUES;
        let keys = input_max + prefix_max;
        let layer = Layer {
            kernels,
            functions: Functions {
                gemm: kernels.function("reprise_gemm")?,
                attention: kernels.function("reprise_attention")?,
                gate: kernels.function("reprise_gate")?,
                fill: kernels.function("reprise_fill")?,
            },
            shape,
            input_max,
            prefix_max,
            weights: Weights {
                qkv: matrix(shape.hidden, shape.qkv_values())?,
                output: matrix(attention, shape.hidden)?,
                gate_up: matrix(shape.hidden, 2 * shape.intermediate)?,
                down: matrix(shape.intermediate, shape.hidden)?,
            },
            buffers: Buffers {
                input: matrix(input_max, shape.hidden)?,
                qkv: matrix(input_max, shape.qkv_values())?,
                keys: matrix(keys, shape.kv_heads * HEAD_VALUES)?,
                values: matrix(keys, shape.kv_heads * HEAD_VALUES)?,
                attention: matrix(input_max, attention)?,
                projected: matrix(input_max, shape.hidden)?,
                gate_up: matrix(input_max, 2 * shape.intermediate)?,
                gated: matrix(input_max, shape.intermediate)?,
                result: matrix(input_max, shape.hidden)?,
            },
        };
        layer.fill(gpu)?;
        Ok(layer)
    }

    /// Returns the shape of the layer.
    pub fn shape(&self) -> LayerShape {
        self.shape
    }

    /// Enqueues one run: `input` tokens behind `prefix` tokens. Errors: more tokens than the layer was allocated for.
    pub fn run(&self, stream: &Stream, input: u32, prefix: u32) -> Result<(), GpuError> {
        let (tokens, prefix) = (rounded(input), prefix.next_multiple_of(TOKENS_MULTIPLE));
        if tokens > self.input_max || prefix > self.prefix_max {
            return Err(GpuError::Invalid(format!(
                "a layer for {} input and {} prefix tokens cannot run {tokens} and {prefix}",
                self.input_max, self.prefix_max
            )));
        }
        let (shape, buffers, weights) = (self.shape, &self.buffers, &self.weights);
        let attention = shape.heads * HEAD_VALUES;
        let qkv = (tokens, shape.qkv_values(), shape.hidden);
        self.multiply(stream, (&buffers.input, &weights.qkv, &buffers.qkv), qkv)?;
        self.attend(stream, tokens, prefix)?;
        let back = (tokens, shape.hidden, attention);
        self.multiply(stream, (&buffers.attention, &weights.output, &buffers.projected), back)?;
        let up = (tokens, 2 * shape.intermediate, shape.hidden);
        self.multiply(stream, (&buffers.projected, &weights.gate_up, &buffers.gate_up), up)?;
        self.gate(stream, tokens)?;
        let down = (tokens, shape.hidden, shape.intermediate);
        self.multiply(stream, (&buffers.gated, &weights.down, &buffers.result), down)
    }

    /// Measures `runs` runs one after the other, behind one that is not counted. Returns the time of each, in order.
    ///
    /// Waits until all have ended. Errors: no runs, more tokens than the layer was allocated for.
    pub fn time(
        &self,
        stream: &Stream,
        input: u32,
        prefix: u32,
        runs: usize,
    ) -> Result<Vec<Duration>, GpuError> {
        if runs == 0 {
            return Err(GpuError::Invalid("no runs of a layer to measure".to_owned()));
        }
        let gpu = self.kernels.gpu();
        let events: Vec<Event> = (0..=runs).map(|_| Event::new(gpu)).collect::<Result<_, _>>()?;
        self.run(stream, input, prefix)?;
        for event in &events[..runs] {
            event.record(stream)?;
            self.run(stream, input, prefix)?;
        }
        events[runs].record(stream)?;
        stream.synchronize()?;
        events.windows(2).map(|pair| pair[1].since(&pair[0])).collect()
    }

    /// Computes `c = a * b` with the layer's kernel: `a` has `size.0` rows and `size.2` columns, `b` has `size.1`
    /// columns. Rows and columns of `c` are multiples of 128, `size.2` is one of 32; values are bf16.
    pub fn multiply(
        &self,
        stream: &Stream,
        (a, b, c): (&DeviceMemory, &DeviceMemory, &DeviceMemory),
        (m, n, k): (u32, u32, u32),
    ) -> Result<(), GpuError> {
        let divisible = m.is_multiple_of(128) && n.is_multiple_of(128) && k.is_multiple_of(32);
        if m == 0 || n == 0 || k == 0 || !divisible {
            return Err(GpuError::Invalid(format!("invalid product of {m} x {k} and {k} x {n} values")));
        }
        let bytes = |rows: u32, columns: u32| u64::from(rows) * u64::from(columns) * VALUE_BYTES;
        let mut arguments = GemmArguments {
            a: a.address(0, bytes(m, k))?,
            b: b.address(0, bytes(k, n))?,
            c: c.address(0, bytes(m, n))?,
            m,
            n,
            k,
        };
        // SAFETY: the kernel has one parameter of this type; the matrices lie inside their memory.
        unsafe {
            self.kernels.launch(
                stream,
                self.functions.gemm,
                (n / 128, m / 128, 256),
                &mut [(&raw mut arguments).cast()],
            )
        }
    }

    /// Enqueues the attention of `tokens` input tokens behind `prefix` tokens, both multiples of 128.
    fn attend(&self, stream: &Stream, tokens: u32, prefix: u32) -> Result<(), GpuError> {
        let (shape, buffers) = (self.shape, &self.buffers);
        let start = |memory: &DeviceMemory| memory.address(0, memory.bytes());
        let mut arguments = AttentionArguments {
            queries: start(&buffers.qkv)?,
            keys: start(&buffers.keys)?,
            values: start(&buffers.values)?,
            output: start(&buffers.attention)?,
            query_stride: shape.qkv_values(),
            heads: shape.heads,
            kv_heads: shape.kv_heads,
            prefix,
            tokens,
        };
        let grid = (shape.heads, tokens / 64, 128);
        // SAFETY: the kernel has one parameter of this type; `run` checked that the tokens fit the buffers.
        unsafe {
            self.kernels.launch(stream, self.functions.attention, grid, &mut [(&raw mut arguments).cast()])
        }
    }

    fn gate(&self, stream: &Stream, tokens: u32) -> Result<(), GpuError> {
        let mut input = self.buffers.gate_up.address(0, self.buffers.gate_up.bytes())?;
        let mut output = self.buffers.gated.address(0, self.buffers.gated.bytes())?;
        let (mut rows, mut width) = (tokens, self.shape.intermediate);
        let parameters = &mut [
            (&raw mut input).cast(),
            (&raw mut output).cast(),
            (&raw mut rows).cast(),
            (&raw mut width).cast(),
        ];
        let blocks = stream.gpu().info().sms * 8;
        // SAFETY: the kernel has these four parameters; `run` checked that the rows fit the buffers.
        unsafe { self.kernels.launch(stream, self.functions.gate, (blocks, 1, 256), parameters) }
    }

    /// Fills weights and buffers; weights are scaled so that results have the scale of inputs.
    fn fill(&self, gpu: &Gpu) -> Result<(), GpuError> {
        let stream = Stream::new(gpu)?;
        let scale = |columns: u32| (3.0 / columns as f32).sqrt();
        let (shape, weights, buffers) = (self.shape, &self.weights, &self.buffers);
        let parts = [
            (&weights.qkv, scale(shape.hidden)),
            (&weights.output, scale(shape.heads * HEAD_VALUES)),
            (&weights.gate_up, scale(shape.hidden)),
            (&weights.down, scale(shape.intermediate)),
            (&buffers.input, 1.0),
            (&buffers.qkv, 1.0),
            (&buffers.keys, 1.0),
            (&buffers.values, 1.0),
        ];
        for (seed, (memory, scale)) in parts.into_iter().enumerate() {
            self.fill_memory(&stream, memory, seed as u32, scale)?;
        }
        stream.synchronize()
    }

    /// Enqueues a fill with pseudo-random bf16 values from `-scale` to `scale`, the same for equal seeds.
    pub fn fill_memory(
        &self,
        stream: &Stream,
        memory: &DeviceMemory,
        seed: u32,
        scale: f32,
    ) -> Result<(), GpuError> {
        let mut address = memory.address(0, memory.bytes())?;
        let mut count = memory.bytes() / VALUE_BYTES;
        let (mut seed, mut scale) = (seed, scale);
        let parameters = &mut [
            (&raw mut address).cast(),
            (&raw mut count).cast(),
            (&raw mut seed).cast(),
            (&raw mut scale).cast(),
        ];
        let blocks = stream.gpu().info().sms * 8;
        // SAFETY: the kernel has these four parameters, and writes `count` values.
        unsafe { self.kernels.launch(stream, self.functions.fill, (blocks, 1, 256), parameters) }
    }

    /// Returns the memory of queries, keys, values and the attention's result, for tests of the attention.
    pub fn attention_memory(&self) -> [&DeviceMemory; 4] {
        [&self.buffers.qkv, &self.buffers.keys, &self.buffers.values, &self.buffers.attention]
    }

    /// Returns the memory of the gate's input and result, for tests of the gate.
    pub fn gate_memory(&self) -> [&DeviceMemory; 2] {
        [&self.buffers.gate_up, &self.buffers.gated]
    }
}
