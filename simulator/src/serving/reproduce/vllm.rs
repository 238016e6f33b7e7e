//! The article on tiered KV caches in vLLM: blocks per step, capacity by tier, overhead by offloaded share.

use super::super::costs::Costs;
use super::super::profiles::{GB, Hardware, Model};
use super::{Choice, Figure, Position, Report};

/// Accelerators of the article.
const ACCELERATORS: u32 = 4;

/// Tokens of a block.
const TOKENS: u64 = 16;

/// Tokens of a sequence in the capacity table.
const SEQUENCE: u64 = 4_096;

/// Requests of a decode step.
const BATCH: u64 = 64;

/// Seconds of a decode step that the article budgets with.
const STEP_BUDGET: f64 = 0.015;

/// Memory that the article reserves on each GPU, in bytes.
const RESERVED: f64 = 2.0 * GB;

pub(super) fn report() -> Report {
    let hardware = Hardware::named("a100").expect("a built-in profile is valid");
    let model = Model::named("llama-3-70b").expect("a built-in model is valid");
    let block_bytes = (model.kv_bytes_per_token() * TOKENS / u64::from(ACCELERATORS)) as f64;
    let mut figures = blocks_per_step(&hardware, block_bytes);
    figures.extend(capacity(&hardware, &model, block_bytes));
    let (overheads, limits) = overhead(&hardware, &model, block_bytes);
    figures.extend(overheads);
    Report {
        name: "vllm",
        claims: Vec::new(),
        title: "Tiered KV cache in vLLM v1 (article)",
        figures,
        choices: choices(),
        positions: vec![Position {
            contradiction: "A decode step takes 14.8 ms, but reading 32.5 GB of weights at 2,039 GB/s takes 15.9 ms.",
            side: "Ours is the roofline: weights and KV cache once for each step, so no step is faster than the memory.",
        }],
        limits,
        events: 0,
    }
}

fn choices() -> Vec<Choice> {
    vec![
        Choice {
            parameter: "weights on each GPU",
            value: "35.3 GB, of 70.6 billion parameters in 16 bits on four GPUs".to_owned(),
            reason: "the article uses 32.5 GB, which is not four equal parts of the model",
        },
        Choice {
            parameter: "how often an offloaded block is fetched",
            value: "once in 16 steps".to_owned(),
            reason: "the article does not state it; the block manager acts once for each block of 16 tokens",
        },
        Choice {
            parameter: "overlap of transfers",
            value: "with the whole step, as the article's two streams".to_owned(),
            reason: "a step waits only for the part of the transfer that exceeds it",
        },
    ]
}

fn blocks_per_step(hardware: &Hardware, block_bytes: f64) -> Vec<Figure> {
    let transfer = block_bytes / hardware.link.bytes_per_second as f64;
    let blocks = (STEP_BUDGET / transfer).floor();
    let place = "transfer time budget";
    vec![
        Figure::new(place, "block of Llama 70B on one of four GPUs", "MB", (1.31, block_bytes / 1e6)),
        Figure::new(place, "transfer of a block over PCIe Gen4", "us", (54.6, transfer * 1e6)),
        Figure::new(place, "blocks in a decode step of 15 ms", "blocks", (274.0, blocks)),
        Figure::new(place, "tokens in a decode step of 15 ms", "tokens", (4_384.0, blocks * TOKENS as f64)),
        Figure::new(
            "tier table",
            "bandwidth of HBM over DRAM",
            "x",
            (10.0, hardware.hbm.bytes_per_second as f64 / hardware.dram.bytes_per_second as f64),
        ),
        Figure::new(
            "tier table",
            "bandwidth of HBM over NVMe",
            "x",
            (290.0, hardware.hbm.bytes_per_second as f64 / hardware.nvme_read.bytes_per_second as f64),
        ),
    ]
}

fn capacity(hardware: &Hardware, model: &Model, block_bytes: f64) -> Vec<Figure> {
    let blocks = |bytes: f64| (bytes / block_bytes).floor();
    let sequences = |blocks: f64| (blocks / (SEQUENCE / TOKENS) as f64).floor();
    let weights = model.weight_bytes() as f64 / f64::from(ACCELERATORS);
    let hbm = blocks(hardware.hbm_bytes as f64 - weights - RESERVED);
    let active = sequences(hbm);
    let (cpu256, cpu512) = (sequences(blocks(256.0 * GB)), sequences(blocks(512.0 * GB)));
    let (ssd1, ssd4) = (sequences(blocks(1e12)), sequences(blocks(4e12)));
    let place = "capacity analysis";
    let count = |quantity: &str, unit, values| Figure::new(place, quantity, unit, values);
    vec![
        count(
            "HBM for KV cache on each GPU",
            "GB",
            (45.5, (hardware.hbm_bytes as f64 - weights - RESERVED) / GB),
        ),
        count("blocks in HBM", "blocks", (34_732.0, hbm)),
        count("blocks in 256 GB of DRAM", "blocks", (195_420.0, blocks(256.0 * GB))),
        count("blocks in 3.84 TB of NVMe", "blocks", (2_931_298.0, blocks(3.84e12))),
        count("sequences in HBM", "sequences", (135.0, active)),
        count("sequences in 256 GB of DRAM", "sequences", (764.0, cpu256)),
        count("sequences in HBM and 256 GB of DRAM", "sequences", (899.0, active + cpu256)),
        count("sequences in 1 TB of NVMe", "sequences", (3_051.0, ssd1)),
        count("sequences in all tiers, 256 GB and 1 TB", "sequences", (3_950.0, active + cpu256 + ssd1)),
        count("sequences in 512 GB of DRAM", "sequences", (1_528.0, cpu512)),
        count("sequences in 4 TB of NVMe", "sequences", (12_204.0, ssd4)),
        count("sequences in all tiers, 512 GB and 4 TB", "sequences", (13_867.0, active + cpu512 + ssd4)),
    ]
}

/// Decode step with a share of the batch's blocks in DRAM or on NVMe.
fn overhead(hardware: &Hardware, model: &Model, block_bytes: f64) -> (Vec<Figure>, Vec<String>) {
    let costs = Costs::new(hardware, model, ACCELERATORS);
    let decode = costs.decode(SEQUENCE as u32);
    let work = (0..BATCH).fold(costs.weights(), |work, _| work + decode);
    let step = costs.seconds(work);
    let blocks_per_step = (BATCH * SEQUENCE / TOKENS) as f64 / TOKENS as f64;
    let moved =
        |share: f64, bytes_per_second: u64| share * blocks_per_step * block_bytes / bytes_per_second as f64;
    let place = "decode latency by offloaded share";
    let mut figures = vec![Figure::new(place, "decode step, all blocks in HBM", "ms", (14.8, step * 1e3))];
    let mut exposed = Vec::new();
    let (link, nvme) =
        (hardware.link.bytes_per_second, hardware.nvme_read.bytes_per_second / u64::from(ACCELERATORS));
    for (tier, share, bandwidth, published) in [
        ("DRAM", 5, link, 2.0),
        ("DRAM", 20, link, 10.8),
        ("DRAM", 50, link, 29.7),
        ("NVMe", 5, nvme, 13.5),
        ("NVMe", 20, nvme, 52.0),
    ] {
        let transfer = moved(f64::from(share) / 100.0, bandwidth);
        let percent = (transfer - step).max(0.0) / step * 100.0;
        figures.push(Figure::new(
            place,
            format!("overhead of {share} % from {tier}, overlapped"),
            "%",
            (published, percent),
        ));
        exposed.push(format!("{share} % from {tier}: {:.0} %", transfer / step * 100.0));
    }
    let limit = format!(
        "The overheads by offloaded share are not reached: the article does not state how often a block is fetched. \
         With one fetch in 16 steps, a step hides a transfer that is shorter than itself. The share of a step that \
         the transfers take without overlap is: {}. The published values lie between both.",
        exposed.join("; ")
    );
    let step = format!(
        "A decode step of 14.8 ms is not reached: weights and the KV cache of {BATCH} sequences of {SEQUENCE} tokens \
         take {:.1} ms at the bandwidth of the data sheet.",
        step * 1e3
    );
    (figures, vec![limit, step])
}
