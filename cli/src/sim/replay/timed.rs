//! The part of `reprise sim replay` with time: arguments of hardware and model, and their results.

use anyhow::{Context, ensure};
use reprise_simulator::replay::{NodeSettings, Trace};
use reprise_simulator::serving::fabric::ChannelKind;
use reprise_simulator::serving::fleet::{
    BATCH_MAX, FleetResults, FleetSetup, STEP_TOKENS_MAX, WAIT_BOUND, replay_timed,
};
use reprise_simulator::serving::profiles::{Hardware, Model};
use reprise_simulator::serving::statistics::percentile;
use reprise_testkit::output::{Table, bytes_text};
use serde::Serialize;

use super::ReplayArgs;
use crate::profile_files;

/// Nanoseconds of a day.
const DAY_NS: f64 = 86_400e9;

/// Arguments of `reprise sim replay` that give it time.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct TimedArgs {
    /// Serve the trace on nodes with this hardware, with times: h100, or h100+cxl+ps1010 with parts.
    ///
    /// A path names a file, as `./node.toml` or `h100+./ssd.toml`; `reprise profile --vllm` writes such a file.
    /// Without --capacity, --tier and --unlimited, the nodes have the DRAM and the NVMe of this hardware.
    #[arg(long, value_name = "EXPRESSION", requires = "model")]
    pub(super) hardware: Option<String>,
    /// Serve this model, by its name or its file; it also determines the bytes of a token.
    #[arg(long, value_name = "NAME", conflicts_with = "bytes_per_token")]
    pub(super) model: Option<String>,
    /// Run each engine on this many accelerators, with tensor parallelism.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024), requires = "hardware")]
    accelerators: u32,
    /// Multiply the rate of arrivals by this factor.
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = parse_rate, requires = "hardware")]
    rate_scale: f64,
    /// Load all found blocks, instead of computing those that are expected to be computed faster.
    #[arg(long, requires = "hardware")]
    load_all: bool,
    /// Do not read blocks of waiting requests from NVMe into DRAM ahead of their loads.
    #[arg(long, requires = "hardware")]
    no_read_ahead: bool,
    /// Keep no blocks of finished requests in the memory of accelerators.
    #[arg(long, requires = "hardware")]
    no_hbm_cache: bool,
}

/// Hardware and model of a replay with time.
#[derive(Clone, Debug)]
pub(super) struct Machine {
    pub(super) hardware: Hardware,
    pub(super) model: Model,
}

/// Results with time, in a line of the output.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Timed {
    hardware: String,
    model: String,
    accelerators: u32,
    rate_scale: f64,
    /// From the first arrival to the end of the last request.
    pub(super) seconds: f64,
    ttft_ms: Percentiles,
    tpot_ms: Percentiles,
    tokens_in: u64,
    tokens_out: u64,
    output_tokens_per_second: f64,
    /// Requests that are larger than the memory of the accelerators.
    refused_requests: u64,
    preemptions: u64,
    /// Found blocks that were computed, because that was expected to be faster.
    computed_blocks: u64,
    /// Loads that ended at the limit of their wait.
    stopped_loads: u64,
    /// Blocks that were read from NVMe into DRAM for waiting requests.
    read_ahead_blocks: u64,
    channels: Vec<Channel>,
    /// Drives of the profile that hold the NVMe of a node: price, endurance and bandwidth are those of all of them.
    drives_per_node: u64,
    /// Writes per day of each drive of the node that writes most; `null` without NVMe.
    drive_writes_per_day_max: Option<f64>,
    /// Drive writes per day for which the drive is specified.
    drive_writes_per_day_rated: f64,
    /// Price of an hour of all nodes; `null` with unlimited DRAM.
    usd_per_hour: Option<f64>,
    /// Price of a million tokens of prompts and outputs.
    usd_per_million_tokens: Option<f64>,
    steps: u64,
    events: u64,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct Percentiles {
    p50: f64,
    p90: f64,
    p99: f64,
}

/// Traffic of a channel, of all nodes. The compute channel counts operations instead of bytes.
#[derive(Clone, Debug, Serialize)]
struct Channel {
    channel: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tera_operations: Option<u64>,
    /// Share of the time in which the channel was busy, mean of the nodes.
    utilisation: f64,
}

fn parse_rate(text: &str) -> Result<f64, String> {
    let rate: Option<f64> = text.parse().ok();
    rate.filter(|rate| (1e-6..=1e6).contains(rate)).ok_or_else(|| "expected 0.000001 to 1000000".to_owned())
}

impl TimedArgs {
    /// Hardware and model, if time was asked for.
    pub(super) fn machine(&self) -> anyhow::Result<Option<Machine>> {
        let Some(hardware) = &self.hardware else { return Ok(None) };
        let model = self.model.as_deref().context("--hardware needs --model")?;
        let files = profile_files::read(&[hardware, model])?;
        Ok(Some(Machine { hardware: files.hardware(hardware)?, model: files.model(model)? }))
    }

    /// Bytes of the KV cache for a token, if a model was named.
    pub(super) fn bytes_per_token(&self) -> anyhow::Result<Option<u64>> {
        let Some(model) = &self.model else { return Ok(None) };
        Ok(Some(profile_files::read(&[model])?.model(model)?.kv_bytes_per_token()))
    }
}

impl Machine {
    /// Number of drives that hold the NVMe of a node.
    fn drives(&self, tiers: &NodeSettings) -> u64 {
        self.hardware.drives_for(tiers.nvme_blocks.saturating_mul(tiers.block_bytes))
    }

    fn setup(&self, args: &ReplayArgs, tiers: NodeSettings) -> anyhow::Result<FleetSetup> {
        let timed = &args.timed;
        let setup = FleetSetup {
            nodes: args.nodes,
            hardware: self.hardware.clone().with_drives(self.drives(&tiers)),
            model: self.model.clone(),
            accelerators: timed.accelerators,
            tiers,
            load_policy: (!timed.load_all).then_some(WAIT_BOUND),
            reads_ahead: !timed.no_read_ahead,
            has_hbm_cache: !timed.no_hbm_cache,
            has_cold_store: false,
            time_scale: 1.0 / timed.rate_scale,
            batch_max: BATCH_MAX,
            step_tokens_max: STEP_TOKENS_MAX,
        };
        ensure!(
            setup.hbm_tokens() >= 2 * tiers.block_tokens,
            "the weights of {} ({}) leave no room in the memory of {} x {}: use more --accelerators or other --hardware",
            self.model.name,
            bytes_text(self.model.weight_bytes()),
            timed.accelerators,
            bytes_text(self.hardware.hbm_bytes)
        );
        Ok(setup)
    }

    /// Serves a trace with time.
    pub(super) fn replay(
        &self,
        args: &ReplayArgs,
        trace: &Trace,
        tiers: NodeSettings,
    ) -> anyhow::Result<(FleetResults, Timed)> {
        let setup = self.setup(args, tiers)?;
        let results = replay_timed(&setup, trace);
        let timed = Timed::new(args, (&setup, self.drives(&tiers)), &results);
        Ok((results, timed))
    }
}

impl Percentiles {
    fn of(nanos: &[u64]) -> Percentiles {
        let of = |share| percentile(nanos, share) / 1e6;
        Percentiles { p50: of(0.5), p90: of(0.9), p99: of(0.99) }
    }

    fn text(&self) -> String {
        format!("{:.0} / {:.0} / {:.0}", self.p50, self.p90, self.p99)
    }

    fn text_with_tenths(&self) -> String {
        format!("{:.1} / {:.1} / {:.1}", self.p50, self.p90, self.p99)
    }
}

impl Timed {
    fn new(args: &ReplayArgs, (setup, drives_per_node): (&FleetSetup, u64), results: &FleetResults) -> Timed {
        let seconds = results.elapsed_ns as f64 / 1e9;
        let days = results.elapsed_ns as f64 / DAY_NS;
        let written = results.nvme_written_max.saturating_mul(setup.tiers.block_bytes) as f64;
        let has_nvme = setup.tiers.nvme_blocks > 0 && days > 0.0;
        let has_price = setup.tiers.dram_blocks < u64::MAX;
        let usd_per_hour = has_price.then(|| setup.usd_per_hour());
        Timed {
            hardware: setup.hardware.name.clone(),
            model: setup.model.name.clone(),
            accelerators: setup.accelerators,
            rate_scale: args.timed.rate_scale,
            seconds,
            ttft_ms: Percentiles::of(&results.ttft_ns),
            tpot_ms: Percentiles::of(&results.tpot_ns),
            tokens_in: results.tokens_in,
            tokens_out: results.tokens_out,
            output_tokens_per_second: if seconds > 0.0 { results.tokens_out as f64 / seconds } else { 0.0 },
            refused_requests: results.refused,
            preemptions: results.preemptions,
            computed_blocks: results.computed_hits,
            stopped_loads: results.stopped_loads,
            read_ahead_blocks: results.read_ahead,
            channels: channels(results),
            drives_per_node,
            drive_writes_per_day_max: has_nvme
                .then(|| written / days / setup.hardware.nvme_bytes.max(1) as f64),
            drive_writes_per_day_rated: setup.hardware.drive_writes_per_day,
            usd_per_hour,
            usd_per_million_tokens: usd_per_hour.and_then(|usd| results.usd_per_million_tokens(usd)),
            steps: results.steps,
            events: results.events,
        }
    }
}

fn channels(results: &FleetResults) -> Vec<Channel> {
    let channel = |kind: ChannelKind| {
        let bytes = results.channel(kind).bytes;
        let is_compute = kind == ChannelKind::Compute;
        Channel {
            channel: kind.name(),
            bytes: (!is_compute).then_some(bytes),
            // A unit of the compute channel is a thousand operations.
            tera_operations: is_compute.then_some(bytes / 1_000_000_000),
            utilisation: results.utilisation(kind),
        }
    };
    // No node reads from the cold store in a replay.
    ChannelKind::ALL.into_iter().filter(|kind| *kind != ChannelKind::Cold).map(channel).collect()
}

/// Table of times and prices.
pub(super) fn table(lines: &[(&'static str, &Timed)]) -> Table {
    let mut table = Table::new(&[
        "policy",
        "TTFT p50/p90/p99 ms",
        "TPOT p50/p90/p99 ms",
        "output tokens/s",
        "drives a node",
        "writes/day of a drive (rated)",
        "USD per 1M tokens",
    ]);
    for (policy, timed) in lines {
        let writes = timed.drive_writes_per_day_max;
        let writes = writes
            .map(|writes| {
                let note = if writes > timed.drive_writes_per_day_rated { ", wears out early" } else { "" };
                format!("{writes:.2} ({:.2}{note})", timed.drive_writes_per_day_rated)
            })
            .unwrap_or_else(|| "-".to_owned());
        table.row(vec![
            (*policy).to_owned(),
            timed.ttft_ms.text(),
            timed.tpot_ms.text_with_tenths(),
            format!("{:.0}", timed.output_tokens_per_second),
            timed.drives_per_node.to_string(),
            writes,
            timed.usd_per_million_tokens.map_or_else(|| "-".to_owned(), |usd| format!("{usd:.3}")),
        ]);
    }
    table
}

/// Table of the channels of a replay.
pub(super) fn channel_table(timed: &Timed) -> Table {
    let mut table = Table::new(&["channel", "amount", "busy"]);
    for channel in &timed.channels {
        let operations = channel.tera_operations.map(|operations| format!("{operations} TFLOP"));
        table.row(vec![
            channel.channel.to_owned(),
            operations.or(channel.bytes.map(bytes_text)).unwrap_or_default(),
            format!("{:.2} %", 100.0 * channel.utilisation),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Command {
        #[command(flatten)]
        args: ReplayArgs,
    }

    fn machine(hardware: &str, model: &str) -> anyhow::Result<Option<Machine>> {
        let words = ["replay", "--trace", "none", "--hardware", hardware, "--model", model];
        Command::parse_from(words).args.timed.machine()
    }

    #[test]
    fn hardware_and_model_can_be_files_whose_errors_name_the_line() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name).display().to_string();
        let model = include_str!("../../../../simulator/profiles/models/llama-3-8b.toml");
        let link = "[link]\nname = \"l\"\ntitle = \"L\"\nfigures.gb_per_s = { value = 3, source = \"s\" }\n\
            figures.latency_us = { value = 5, source = \"s\" }\n";
        std::fs::write(path("m.toml"), model).expect("writable");
        std::fs::write(path("l.toml"), link).expect("writable");
        std::fs::write(path("bad.toml"), link.replace("value = 3", "value = -3")).expect("writable");
        let hardware = format!("h100+{}", path("l.toml"));
        let found = machine(&hardware, &path("m.toml")).expect("valid").expect("with time");
        assert_eq!(found.hardware.link.bytes_per_second, 3_000_000_000);
        assert_eq!(found.model, Model::named("llama-3-8b").expect("valid"));
        let error = machine(&format!("h100+{}", path("bad.toml")), "llama-3-8b").expect_err("refused");
        let text = format!("{error:#}");
        assert!(text.contains("bad.toml: line 4: impossible gb_per_s -3: expected 0.01"), "{text}");
        let text = format!("{:#}", machine("h100", "no/model.toml").expect_err("refused"));
        assert!(text.contains("cannot read the profile no/model.toml"), "{text}");
    }
}
