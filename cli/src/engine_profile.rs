//! Profile of a node and its model from measured steps and loads of a vLLM engine.
//!
//! ```text
//! steps   prompts of 16 to 2,048 tokens, decodes of 1 to 16 sequences ─▶ rates and overheads of the accelerator
//! loads   prefixes of 128 to 1,024 tokens in DRAM, then on NVMe        ─▶ link, device
//! ```
//!
//! Each sample of the fit is the median of all steps with equal composition. These runs are apart from every workload
//! that the profile is later compared with: other prompts, other lengths, no arrivals.

use std::collections::BTreeMap;
use std::fmt::Write;

use anyhow::{Context, anyhow, ensure};
use reprise_simulator::serving::costs::fit::{Chunk, MeasuredStep, StepFit, fit, fit_loads};
use reprise_simulator::serving::profiles::{Hardware, Model, NodeProfile};
use reprise_simulator::serving::statistics::median;

use crate::vllm_engine::{
    BLOCK_TOKENS, Description, Engine, EngineLimits, EngineRequest, EngineStep, LoadAnswer,
};
use crate::vllm_node::VllmNode;

/// Limits of the engine.
pub(crate) const LIMITS: EngineLimits = EngineLimits { sequences: 16, step_tokens: 512 };

/// Runs of an engine that give a profile.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    /// Lengths of prompts, each computed alone. Longer ones than a step take several.
    prompts: &'static [u32],
    prompt_repetitions: usize,
    /// Sequences that decode together, and tokens of their prompts.
    batches: &'static [u32],
    contexts: &'static [u32],
    decode_repetitions: usize,
    decoded_tokens: u32,
    /// Blocks of loaded prefixes, and the number of prefixes of each size.
    load_blocks: &'static [u32],
    loads: u64,
}

/// Runs of a profile: a minute on two idle cores.
const FULL: Plan = Plan {
    prompts: &[16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048],
    prompt_repetitions: 3,
    batches: &[1, 2, 4, 8, 12, 16],
    contexts: &[64, 384],
    decode_repetitions: 2,
    decoded_tokens: 12,
    load_blocks: &[1, 2, 4, 8],
    loads: 4,
};

/// The fewest runs that a fit accepts.
const QUICK: Plan = Plan {
    prompts: &[16, 32, 64, 96, 128, 192, 256, 600],
    prompt_repetitions: 1,
    batches: &[1, 2, 4],
    contexts: &[16, 160],
    decode_repetitions: 1,
    decoded_tokens: 3,
    load_blocks: &[1, 4],
    loads: 2,
};

/// Tokens behind a loaded prefix: less than a block, so that they are not saved.
const LOAD_OWN_TOKENS: u32 = 32;

/// Contexts of a decode that count as equal.
const CONTEXT_STEP: u32 = 128;

/// First seed of the prompts; workloads use others.
const SEED: u64 = 1 << 40;

/// A profile with its fit.
#[derive(Clone, Debug)]
pub(crate) struct Measured {
    /// Text of the profile's file.
    pub(crate) text: String,
    pub(crate) fit: StepFit,
    pub(crate) samples: usize,
}

/// Loads of a tier: latency in seconds, bytes per second.
type LoadRate = (f64, f64);

impl Measured {
    /// Describes the fit in one line.
    pub(crate) fn words(&self) -> String {
        let fit = &self.fit;
        format!(
            "{} kinds of steps: {:.2} ms for each step, {:.2} ms for each sequence, {:.3} TFLOPS, {:.3} TFLOPS of \
             attention, {:.1} GB/s; deviations {:.1} % in the median, {:.1} % at most",
            self.samples,
            fit.step_overhead * 1e3,
            fit.sequence_overhead * 1e3,
            fit.flops_per_second / 1e12,
            fit.attention_flops_per_second / 1e12,
            fit.bytes_per_second / 1e9,
            fit.deviation_median * 100.0,
            fit.deviation_max * 100.0
        )
    }
}

/// Measures the profile of a node.
pub(crate) fn measure(node: &mut VllmNode, is_quick: bool) -> anyhow::Result<Measured> {
    let plan = if is_quick { QUICK } else { FULL };
    let description = node.engine.description.clone();
    let model_text = model_text(&description);
    let model = Model::parse("model", &model_text)?;
    let steps = samples(&measure_steps(&mut node.engine, &plan)?);
    let fit = fit(&model, &steps).map_err(|error| anyhow!(error))?;
    let (dram, nvme) = measure_loads(node, &model, &plan)?;
    let text = node_text(&description, &fit, (dram, nvme), steps.len());
    let text = text + &nested("model", &model_text);
    NodeProfile::parse("measured profile", &text).context("the measurement is not a possible profile")?;
    Ok(Measured { text, fit, samples: steps.len() })
}

fn measure_steps(engine: &mut Engine, plan: &Plan) -> anyhow::Result<Vec<Vec<EngineStep>>> {
    let mut seed = SEED;
    let mut request = |own, output| {
        seed += 1;
        EngineRequest { at: 0.0, prefix_seed: 0, prefix: 0, seed, own, output, is_stored: false }
    };
    // The first steps of an engine are slower.
    let warm_up = vec![vec![request(64, 2)], vec![request(plan.prompts[plan.prompts.len() - 1].min(512), 2)]];
    let mut runs = Vec::new();
    for _ in 0..plan.prompt_repetitions {
        runs.extend(plan.prompts.iter().map(|tokens| vec![request(*tokens, 1)]));
    }
    for _ in 0..plan.decode_repetitions {
        for context in plan.contexts {
            for batch in plan.batches {
                runs.push((0..*batch).map(|_| request(*context, plan.decoded_tokens)).collect());
            }
        }
    }
    engine.steps(&warm_up)?;
    engine.steps(&runs)
}

/// Medians of steps with equal composition.
fn samples(runs: &[Vec<EngineStep>]) -> Vec<MeasuredStep> {
    let mut groups: BTreeMap<Vec<(u32, u32)>, Vec<&EngineStep>> = BTreeMap::new();
    for step in runs.iter().flatten().filter(|step| !step.chunks.is_empty()) {
        let mut key: Vec<(u32, u32)> =
            step.chunks.iter().map(|(tokens, prefix)| (*tokens, prefix / CONTEXT_STEP)).collect();
        key.sort_unstable();
        groups.entry(key).or_default().push(step);
    }
    let sample = |steps: &Vec<&EngineStep>| {
        let seconds: Vec<f64> = steps.iter().map(|step| step.seconds).collect();
        // The step in the middle has the mean context.
        let chunks = steps[steps.len() / 2].chunks.iter();
        let chunks = chunks.map(|(tokens, prefix)| Chunk { tokens: *tokens, prefix: *prefix }).collect();
        MeasuredStep { chunks, seconds: median(&seconds) }
    };
    groups.values().map(sample).collect()
}

fn measure_loads(node: &mut VllmNode, model: &Model, plan: &Plan) -> anyhow::Result<(LoadRate, LoadRate)> {
    let request = |(blocks, number): (u32, u64)| EngineRequest {
        at: 0.0,
        prefix_seed: SEED / 2 + u64::from(blocks) * plan.loads + number,
        prefix: blocks * BLOCK_TOKENS,
        seed: SEED / 4 + u64::from(blocks) * plan.loads + number,
        own: LOAD_OWN_TOKENS,
        output: 1,
        is_stored: false,
    };
    let sizes =
        (0..plan.loads).flat_map(|number| plan.load_blocks.iter().map(move |blocks| (*blocks, number)));
    let requests: Vec<EngineRequest> = sizes.map(request).collect();
    node.save(&requests)?;
    let rate = |answers: &[LoadAnswer]| {
        let mut loads = Vec::new();
        for (request, answer) in requests.iter().zip(answers) {
            ensure!(
                answer.cached == request.prefix,
                "{} of {} saved tokens were loaded: pass a model with a smaller KV cache",
                answer.cached,
                request.prefix
            );
            let bytes = f64::from(request.prefix) * model.kv_bytes_per_token() as f64;
            loads.push((bytes, answer.wait));
        }
        fit_loads(&loads).context("loads of one size only")
    };
    // The first loads touch memory for the first time.
    node.engine.loads(&requests)?;
    let dram = rate(&node.engine.loads(&requests)?)?;
    node.empty_dram()?;
    let nvme = rate(&node.engine.loads(&requests)?)?;
    Ok((dram, nvme))
}

/// Text of the model, in the format of `simulator/profiles/models/`.
fn model_text(of: &Description) -> String {
    let dtype = match of.dtype.as_str() {
        "bfloat16" => "bf16",
        "float16" => "fp16",
        _ => "fp32",
    };
    let billion = of.parameters as f64 / 1e9;
    let Description { layers, hidden, query_heads, kv_heads, head_dim, context, .. } = of;
    format!(
        "name = \"measured\"\ntitle = \"Model of the measured engine\"\nsource = \"configuration of the engine\"\n\
         parameters_billion = {billion}\nactive_parameters_billion = {billion}\nlayers = {layers}\nhidden = {hidden}\n\
         query_heads = {query_heads}\nquery_dim = {head_dim}\nvalue_dim = {head_dim}\ncontext = {context}\n\n\
         [layout]\nparts = \"key_value\"\nkv_heads = {kv_heads}\nhead_dim = {head_dim}\ndtype = \"{dtype}\"\n"
    )
}

/// Text of a file as a table of the node's file.
fn nested(table: &str, text: &str) -> String {
    format!("[{table}]\n{}", text.replace("\n[", &format!("\n[{table}.")))
}

fn node_text(of: &Description, fit: &StepFit, (dram, nvme): (LoadRate, LoadRate), steps: usize) -> String {
    let processor = processor();
    let measured = format!(
        "measured by `reprise profile --vllm`: vLLM {} on {} threads, {processor}; {steps} kinds of steps",
        of.vllm, of.threads
    );
    let usual = Hardware::named("cpu").expect("a built-in profile is valid");
    let price = "open parameter: 0.05 USD for each virtual CPU";
    let teraflops = "open parameter: unit of the measured efficiencies";
    let fitted = format!(
        "{measured}; deviations of the fit {:.1} % in the median, {:.1} % at most",
        fit.deviation_median * 100.0,
        fit.deviation_max * 100.0
    );
    // Above the fastest of both, so that efficiencies are below 1.
    let peak = fit.flops_per_second.max(fit.attention_flops_per_second) * 1.25;
    let loads = "time to first token of loads, without the step that computes the rest";
    let mut text =
        "# Written by `reprise profile --vllm`. Loads from NVMe include the way through DRAM.\n".to_owned();
    let mut part = |table: &str, title: &str, more: &str, figures: &[(&str, f64, &str)]| {
        let _ = write!(text, "[{table}]\nname = \"measured\"\ntitle = \"{title}\"\n{more}");
        for (name, value, source) in figures {
            let _ = write!(text, "\n[{table}.figures.{name}]\nvalue = {value}\nsource = \"{source}\"\n");
        }
        text.push('\n');
    };
    part(
        "accelerator",
        &format!("vLLM {} on {} threads of {processor}", of.vllm, of.threads),
        "parts = [\"local\", \"ddr5\", \"gen4\", \"tcp\", \"object\"]\n",
        &[
            ("memory_gb", memory_bytes() as f64 / 1e9, "MemTotal of /proc/meminfo"),
            ("memory_gb_per_s", fit.bytes_per_second / 1e9, &fitted),
            ("tflops", peak / 1e12, teraflops),
            ("compute_efficiency", fit.flops_per_second / peak, &fitted),
            ("attention_efficiency", fit.attention_flops_per_second / peak, &fitted),
            ("overlap", 0.0, "the fit: times of computation and memory add up on a CPU"),
            ("step_overhead_us", fit.step_overhead * 1e6, &fitted),
            ("sequence_overhead_us", fit.sequence_overhead * 1e6, &fitted),
            ("usd_per_hour", 0.05 * f64::from(of.threads), price),
        ],
    );
    let loaded = format!("{measured}; {loads}, from DRAM of the agent");
    part(
        "link",
        "Copies from the agent's DRAM by the connector",
        "",
        &[("gb_per_s", dram.1 / 1e9, &loaded), ("latency_us", dram.0 * 1e6, &loaded)],
    );
    let read = format!("{measured}; {loads}, from NVMe of the agent");
    // Device and link move a load at the same time in the timed world, and the slower one decides.
    let latency = nvme.0.max(1e-6);
    part(
        "device",
        "Pool file of the agent",
        "",
        &[
            ("capacity_tb", usual.nvme_bytes as f64 / 1e12, "open parameter: as gen4"),
            ("read_gb_per_s", nvme.1 / 1e9, &read),
            ("write_gb_per_s", usual.nvme_write.bytes_per_second as f64 / 1e9, "open parameter: as gen4"),
            ("latency_us", latency * 1e6, &read),
            ("drive_writes_per_day", usual.drive_writes_per_day, "open parameter: as gen4"),
            ("usd_per_gb_hour", usual.nvme_usd_per_gb_hour, "open parameter: as gen4"),
        ],
    );
    text
}

fn processor() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    // The name is part of a string in TOML.
    name.map_or("unknown processor", |(_, name)| name.trim()).replace(['"', '\\'], "")
}

fn memory_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kilobytes = text.lines().find_map(|line| line.strip_prefix("MemTotal:")?.split_whitespace().next());
    kilobytes.and_then(|value| value.parse::<u64>().ok()).unwrap_or(1 << 20) * 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    fn description() -> Description {
        Description {
            vllm: "0.32.0".to_owned(),
            threads: 2,
            parameters: 134_515_008,
            layers: 30,
            hidden: 576,
            query_heads: 9,
            kv_heads: 3,
            head_dim: 64,
            dtype: "bfloat16".to_owned(),
            context: 4096,
            block_tokens: 128,
            blocks: 728,
        }
    }

    #[test]
    fn written_profile_is_read_with_its_figures() {
        let fit = StepFit {
            step_overhead: 0.01,
            sequence_overhead: 0.000_2,
            flops_per_second: 0.4e12,
            attention_flops_per_second: 0.1e12,
            bytes_per_second: 25e9,
            deviation_median: 0.02,
            deviation_max: 0.1,
        };
        let text = node_text(&description(), &fit, ((0.004, 5e9), (0.006, 1e9)), 40);
        let text = text + &nested("model", &model_text(&description()));
        let node = NodeProfile::parse("p.toml", &text).expect("valid");
        assert_eq!(node.model.kv_bytes_per_token(), 23_040);
        let hardware = &node.hardware;
        let close =
            |value: f64, expected: f64| assert!((value / expected - 1.0).abs() < 1e-6, "{value} {expected}");
        close(hardware.flops * hardware.compute_efficiency, 0.4e12);
        close(hardware.flops * hardware.attention_efficiency, 0.1e12);
        assert_eq!((hardware.step_overhead_nanos, hardware.sequence_overhead_nanos), (10_000_000, 200_000));
        assert_eq!((hardware.link.bytes_per_second, hardware.link.latency_nanos), (5_000_000_000, 4_000_000));
        assert_eq!(
            (hardware.nvme_read.bytes_per_second, hardware.nvme_read.latency_nanos),
            (1_000_000_000, 6_000_000)
        );
        assert!(text.contains("vLLM 0.32.0") && text.contains("40 kinds of steps"), "{text}");
    }

    #[test]
    fn samples_are_medians_of_steps_with_equal_composition() {
        let step = |chunks: &[(u32, u32)], seconds| EngineStep { chunks: chunks.to_vec(), seconds };
        let runs = [
            vec![step(&[(512, 0)], 3.0), step(&[(1, 60), (1, 61)], 0.5), step(&[], 0.1)],
            vec![step(&[(512, 0)], 1.0), step(&[(1, 62), (1, 60)], 0.7), step(&[(1, 200)], 0.4)],
            vec![step(&[(512, 0)], 2.0), step(&[(512, 512)], 2.5)],
        ];
        let samples = samples(&runs);
        let found: Vec<(usize, u32, f64)> = samples
            .iter()
            .map(|sample| (sample.chunks.len(), sample.chunks[0].tokens, sample.seconds))
            .collect();
        assert_eq!(found, [(2, 1, 0.6), (1, 1, 0.4), (1, 512, 2.0), (1, 512, 2.5)]);
    }
}
