//! Time of a step of an engine: a roofline of computation and memory, and constants of the engine.
//!
//! A step computes the tokens of prompts and one token for each decoding request:
//!
//! ```text
//! operations  = Σ tokens · 2 · weights  +  2 · layers · heads · (d_qk + d_v) · Σ tokens · context · e / e_attention
//! bytes       = weights, once           +  Σ KV cache of each request
//! computation = operations / (peak · e),   reads = bytes / HBM bandwidth
//! time        = step overhead + requests · sequence overhead
//!             + max(computation, reads) + (1 − overlap) · min(computation, reads)
//! ```
//!
//! Operations and bytes are amounts on shared channels, so transfers into HBM compete with the step. The rest is a
//! delay before them. With an overlap of 1 and without overheads, as in profiles from data sheets, a step is never slower
//! on this model than on a machine.
//!
//! Left out: collectives of tensor parallelism.

pub mod fit;

use super::events::nanos;
use super::profiles::{Hardware, Model};

/// Operations and bytes of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Operations of the cores.
    pub flops: f64,
    /// Bytes between HBM and the cores.
    pub bytes: f64,
    /// Sequences of which the step computes tokens.
    pub sequences: f64,
}

/// Costs of a model on a number of accelerators with tensor parallelism.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Costs {
    flops_per_token: f64,
    flops_per_pair: f64,
    weight_bytes: f64,
    kv_bytes_per_token: f64,
    /// Operations per second of all accelerators that a step reaches.
    pub flops_per_second: f64,
    /// HBM bandwidth of all accelerators.
    pub bytes_per_second: f64,
    overlap: f64,
    step_overhead: f64,
    sequence_overhead: f64,
}

impl Costs {
    /// Costs of a model on some accelerators.
    pub fn new(hardware: &Hardware, model: &Model, accelerators: u32) -> Costs {
        let attention_share = hardware.compute_efficiency / hardware.attention_efficiency;
        Costs {
            flops_per_token: 2.0 * model.active_parameters,
            flops_per_pair: model.flops_per_pair() * attention_share,
            weight_bytes: model.weight_bytes() as f64,
            kv_bytes_per_token: model.kv_bytes_per_token() as f64,
            flops_per_second: hardware.flops * hardware.compute_efficiency * f64::from(accelerators),
            bytes_per_second: hardware.hbm.bytes_per_second as f64 * f64::from(accelerators),
            overlap: hardware.overlap,
            step_overhead: hardware.step_overhead_nanos as f64 / 1e9,
            sequence_overhead: hardware.sequence_overhead_nanos as f64 / 1e9,
        }
    }

    /// Reading the weights, once for each step.
    pub fn weights(&self) -> Work {
        Work { flops: 0.0, bytes: self.weight_bytes, sequences: 0.0 }
    }

    /// Computing tokens of a prompt behind a prefix.
    pub fn prefill(&self, tokens: u32, prefix: u32) -> Work {
        let (tokens, prefix) = (f64::from(tokens), f64::from(prefix));
        let pairs = tokens * (prefix + tokens / 2.0);
        Work {
            flops: tokens * self.flops_per_token + pairs * self.flops_per_pair,
            bytes: (prefix + tokens) * self.kv_bytes_per_token,
            sequences: 1.0,
        }
    }

    /// Computing one token behind a context.
    pub fn decode(&self, context: u32) -> Work {
        let context = f64::from(context);
        Work {
            flops: self.flops_per_token + context * self.flops_per_pair,
            bytes: context * self.kv_bytes_per_token,
            sequences: 1.0,
        }
    }

    /// Computing one token for each of some requests, behind contexts of this many tokens in sum.
    pub fn decodes(&self, requests: u64, context: u64) -> Work {
        let (requests, context) = (requests as f64, context as f64);
        Work {
            flops: requests * self.flops_per_token + context * self.flops_per_pair,
            bytes: context * self.kv_bytes_per_token,
            sequences: requests,
        }
    }

    /// Computing tokens of a sequence behind a prefix, or decoding one token.
    pub fn chunk(&self, tokens: u32, prefix: u32) -> Work {
        if tokens == 1 { self.decode(prefix) } else { self.prefill(tokens, prefix) }
    }

    /// Seconds of a step alone.
    pub fn seconds(&self, work: Work) -> f64 {
        let (computation, reads) = self.phases(work);
        self.serial_seconds(work) + computation.max(reads)
    }

    /// Nanoseconds of a step that precede its operations and bytes on their channels.
    pub fn serial_nanos(&self, work: Work) -> u64 {
        nanos(self.serial_seconds(work))
    }

    fn serial_seconds(&self, work: Work) -> f64 {
        let (computation, reads) = self.phases(work);
        let constant = self.step_overhead + work.sequences * self.sequence_overhead;
        constant + (1.0 - self.overlap) * computation.min(reads)
    }

    fn phases(&self, work: Work) -> (f64, f64) {
        (work.flops / self.flops_per_second, work.bytes / self.bytes_per_second)
    }
}

impl std::ops::Add for Work {
    type Output = Work;

    fn add(self, other: Work) -> Work {
        Work {
            flops: self.flops + other.flops,
            bytes: self.bytes + other.bytes,
            sequences: self.sequences + other.sequences,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn llama_on_h100() -> Costs {
        let hardware = Hardware::named("h100").expect("valid");
        Costs::new(&hardware, &Model::named("llama-3-8b").expect("valid"), 1)
    }

    #[test]
    fn chunks_of_a_prompt_cost_the_same_operations_as_the_whole_prompt() {
        let costs = llama_on_h100();
        let whole = costs.prefill(8_192, 0).flops;
        let chunks: f64 = (0..16).map(|chunk| costs.prefill(512, 512 * chunk).flops).sum();
        assert!((chunks / whole - 1.0).abs() < 1e-12, "{chunks} instead of {whole}");
    }

    #[test]
    fn decoding_is_bound_by_memory_and_prefill_by_computation() {
        let costs = llama_on_h100();
        // 16.06 GB of weights over 3,350 GB/s are 4.79 ms.
        let empty = costs.seconds(costs.weights());
        assert!((empty - 0.004_794).abs() < 1e-5, "{empty}");
        let prompt = costs.seconds(costs.weights() + costs.prefill(2_048, 0));
        // 2,048 · 2 · 8.03 · 10⁹ operations at 40 % of 989 · 10¹² per second, without attention.
        assert!((prompt - 0.0831).abs() < 0.005, "{prompt}");
        assert!(costs.seconds(costs.decode(1_000)) < empty);
    }

    #[test]
    fn overheads_and_serial_phases_add_to_the_roofline() {
        let mut hardware = Hardware::named("h100").expect("valid");
        let model = Model::named("llama-3-8b").expect("valid");
        let roofline = Costs::new(&hardware, &model, 1);
        let work = roofline.weights() + roofline.prefill(100, 0) + roofline.decode(50);
        (hardware.step_overhead_nanos, hardware.sequence_overhead_nanos) = (1_000_000, 100_000);
        let overheads = Costs::new(&hardware, &model, 1);
        let added = overheads.seconds(work) - roofline.seconds(work);
        assert!((added - 0.001_2).abs() < 1e-9, "{added}");
        hardware.overlap = 0.0;
        let serial = Costs::new(&hardware, &model, 1);
        let (computation, reads) = serial.phases(work);
        assert!((serial.seconds(work) - computation - reads - 0.001_2).abs() < 1e-9);
        assert_eq!(serial.serial_nanos(work), nanos(computation.min(reads) + 0.001_2));
    }

    #[test]
    fn less_efficient_attention_lengthens_only_the_part_between_tokens() {
        let mut hardware = Hardware::named("h100").expect("valid");
        let model = Model::named("llama-3-8b").expect("valid");
        let equal = Costs::new(&hardware, &model, 1).prefill(1_000, 0).flops;
        hardware.attention_efficiency /= 2.0;
        let lower = Costs::new(&hardware, &model, 1).prefill(1_000, 0).flops;
        let pairs = 1_000.0 * 500.0 * model.flops_per_pair();
        assert!(((lower - equal) / pairs - 1.0).abs() < 1e-9);
    }
}
