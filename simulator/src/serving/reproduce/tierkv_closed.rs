//! The figures of TierKV that follow from its equations alone: block sizes, transfer times, block-size trade-off.

use super::super::profiles::{Hardware, Model, Rate};
use super::super::workload::TraceProfile;
use super::Figure;

/// Tokens of a block.
const TOKENS: u16 = 16;

pub(super) fn figures(hardware: &Hardware) -> Vec<Figure> {
    let mut figures = table_2();
    figures.extend(transfers(hardware));
    figures.extend(block_sizes(hardware));
    figures
}

/// Bytes of a block of a model, from the production layout.
fn block_bytes(model: &str, tokens: u16) -> u64 {
    let model = Model::named(model).expect("a built-in model is valid");
    model.layout(tokens).expect("a built-in layout is valid").block_bytes()
}

fn table_2() -> Vec<Figure> {
    let rows = [("llama-3-8b", 2.0), ("llama-2-13b", 12.5), ("llama-34b", 4.8), ("llama-3-70b", 8.0)];
    let ours = |model| block_bytes(model, TOKENS) as f64 / f64::from(1 << 20);
    rows.map(|(model, published)| {
        Figure::new("table 2", format!("block of {model}"), "MiB", (published, ours(model)))
    })
    .into()
}

fn transfers(hardware: &Hardware) -> Vec<Figure> {
    let micros = |rate: Rate, bytes| rate.transfer_nanos(bytes) as f64 / 1e3;
    let (link, nvme) = (hardware.link, hardware.nvme_read);
    let ratio = hardware.hbm.bytes_per_second as f64 / nvme.bytes_per_second as f64;
    vec![
        Figure::new("appendix C", "2 MB from T1", "us", (45.0, micros(link, 2_000_000))),
        Figure::new("appendix C", "8 MB from T2", "us", (1_200.0, micros(nvme, 8_000_000))),
        Figure::new("section 3.5", "8 MB from T1", "us", (165.0, micros(link, 8_000_000))),
        Figure::new("section 4.6", "8 MB from T1", "us", (470.0, micros(link, 8_000_000))),
        Figure::new("section 3.5", "2 MB from T2", "us", (366.0, micros(nvme, 2_000_000))),
        Figure::new("abstract", "bandwidth of HBM over NVMe", "x", (480.0, ratio)),
    ]
}

/// §4.5: efficiency of transfers of single blocks, and the part of blocks that requests leave empty.
fn block_sizes(hardware: &Hardware) -> Vec<Figure> {
    let efficiency = |tokens| {
        let bytes = block_bytes("llama-3-8b", tokens);
        let alone = Rate { latency_nanos: 0, ..hardware.link }.transfer_nanos(bytes) as f64;
        alone / hardware.link.transfer_nanos(bytes) as f64
    };
    let loss = (1.0 - efficiency(4) / efficiency(16)) * 100.0;
    // The last block of a request is half empty on average. Lengths are those of the mixed workload.
    let lengths = TraceProfile::ALL[..4].iter().map(|profile| {
        let lengths = profile.lengths(0);
        let mean = |(median, sigma): (f64, f64)| median * (sigma * sigma / 2.0_f64).exp();
        mean(lengths.prompt) + mean(lengths.output)
    });
    let mean_tokens = lengths.sum::<f64>() / 4.0;
    let empty = 32.0 / (mean_tokens + 32.0) * 100.0;
    vec![
        Figure::new("section 4.5", "loss of transfer efficiency, 4 against 16 tokens", "%", (24.0, loss)),
        Figure::new("section 4.5", "HBM left empty with blocks of 64 tokens", "%", (31.0, empty)),
    ]
}
