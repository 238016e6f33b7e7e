//! Compares the kernels of the synthetic layer with a computation on the CPU.

use reprise_cuda::gpu::{DeviceMemory, GpuError, Stream};
use reprise_cuda::kernels::{HEAD_VALUES, Kernels, Layer, LayerShape};

use crate::steps::{StepError, checked};

const SHAPE: LayerShape = LayerShape { hidden: 256, heads: 4, kv_heads: 2, intermediate: 384 };
const INPUT: u32 = 128;
const PREFIX: u32 = 128;

/// Compares a product of matrices, the attention and the gate of a small layer.
pub(crate) fn run(kernels: &Kernels) -> Result<(), StepError> {
    let stream = Stream::new(kernels.gpu())?;
    let layer = Layer::new(kernels, SHAPE, INPUT, PREFIX)?;
    product(kernels, &layer, &stream)?;
    layer.run(&stream, INPUT, PREFIX)?;
    stream.synchronize()?;
    attention(&layer)?;
    gate(&layer)?;
    let times = layer.time(&stream, INPUT, PREFIX, 3)?;
    checked("layer", &format!("product, attention and gate agree with the CPU; 3 runs took {times:?}"));
    Ok(())
}

fn product(kernels: &Kernels, layer: &Layer<'_>, stream: &Stream) -> Result<(), StepError> {
    let (m, n, k) = (256_usize, 128_usize, 96_usize);
    let gpu = kernels.gpu();
    let memory = |count: usize| DeviceMemory::new(gpu, 2 * count as u64);
    let (a, b, c) = (memory(m * k)?, memory(k * n)?, memory(m * n)?);
    layer.fill_memory(stream, &a, 1, 1.0)?;
    layer.fill_memory(stream, &b, 2, 1.0)?;
    stream.fill((&c, 0), c.bytes(), 0xFF)?;
    layer.multiply(stream, (&a, &b, &c), (m as u32, n as u32, k as u32))?;
    stream.synchronize()?;
    let (a, b, c) = (values(&a)?, values(&b)?, values(&c)?);
    for row in 0..m {
        for column in 0..n {
            let sum: f32 = (0..k).map(|at| a[row * k + at] * b[at * n + column]).sum();
            close("product", row * n + column, c[row * n + column], sum, 0.02)?;
        }
    }
    if a.iter().all(|&value| value == a[0]) {
        return Err(StepError("the fill kernel wrote equal values".to_owned()));
    }
    Ok(())
}

fn attention(layer: &Layer<'_>) -> Result<(), StepError> {
    let [qkv, keys, all_values, output] = layer.attention_memory();
    let (qkv, keys, all_values, output) = (values(qkv)?, values(keys)?, values(all_values)?, values(output)?);
    let head_values = HEAD_VALUES as usize;
    let (heads, kv_heads) = (SHAPE.heads as usize, SHAPE.kv_heads as usize);
    let row = (heads + 2 * kv_heads) * head_values;
    for token in 0..INPUT as usize {
        for head in 0..heads {
            let query = &qkv[token * row + head * head_values..][..head_values];
            let at = |key: usize| (key * kv_heads + head / (heads / kv_heads)) * head_values;
            let weight = |key: usize| {
                let score: f32 = query.iter().zip(&keys[at(key)..]).map(|(a, b)| a * b).sum();
                (score / (head_values as f32).sqrt()).exp()
            };
            let weights: Vec<f32> = (0..=PREFIX as usize + token).map(weight).collect();
            let sum: f32 = weights.iter().sum();
            for value in 0..head_values {
                let mean =
                    weights.iter().enumerate().map(|(key, w)| w * all_values[at(key) + value]).sum::<f32>();
                let index = (token * heads + head) * head_values + value;
                close("attention", index, output[index], mean / sum, 0.01)?;
            }
        }
    }
    Ok(())
}

fn gate(layer: &Layer<'_>) -> Result<(), StepError> {
    let [input, output] = layer.gate_memory();
    let (input, output) = (values(input)?, values(output)?);
    let width = SHAPE.intermediate as usize;
    for (index, &found) in output.iter().enumerate() {
        let at = index / width * 2 * width + index % width;
        let expected = input[at] / (1.0 + (-input[at]).exp()) * input[at + width];
        close("gate", index, found, expected, 0.01)?;
    }
    Ok(())
}

/// Reads bf16 values as fp32.
fn values(memory: &DeviceMemory) -> Result<Vec<f32>, GpuError> {
    let mut bytes = vec![0; memory.bytes() as usize];
    memory.read(0, &mut bytes)?;
    let value = |pair: &[u8]| f32::from_bits(u32::from(u16::from_ne_bytes([pair[0], pair[1]])) << 16);
    Ok(bytes.chunks_exact(2).map(value).collect())
}

/// Compares within the rounding of bf16 and of sums in another order.
fn close(what: &str, index: usize, found: f32, expected: f32, absolute: f32) -> Result<(), StepError> {
    if (found - expected).abs() <= absolute + expected.abs() * 0.01 {
        return Ok(());
    }
    Err(StepError(format!("{what}: value {index} is {found}, expected {expected}")))
}
