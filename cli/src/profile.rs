//! `reprise profile`: measures the slack of a model's layers, and prints a SlackProfile.
//!
//! Three sources: a GPU with a synthetic layer ([`reprise_cuda::slack`]), a file with timings of any engine
//! ([`timings`]), or the reference engine's layers on this CPU ([`cpu`]). The output names the one that ran.
//!
//! With `--vllm`, the command measures steps and loads of a vLLM engine, and prints a profile for the simulator
//! ([`crate::engine_profile`]).

mod cpu;
mod timings;

use std::path::PathBuf;

use anyhow::{Context, bail};
use reprise_cuda::gpu::Gpu;
use reprise_cuda::kernels::Kernels;
use reprise_cuda::slack::{self, transfer::Method};
use reprise_policy::slack::{Content, Fallback, Measurement, Profile, Subject};
use reprise_testkit::output::{self, Audience};
use serde::Serialize;
use serde_json::json;

use crate::config::Config;
use crate::engine_profile;
use crate::vllm_engine::VllmArgs;
use crate::vllm_node::{Loading, VllmNode};

/// Arguments of `reprise profile`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ProfileArgs {
    /// Measure a synthetic attention and GEMM layer on the first GPU.
    #[arg(long, conflicts_with = "timings")]
    gpu: bool,
    /// Use timings of this file (JSON lines) instead of measuring.
    #[arg(long, value_name = "FILE")]
    timings: Option<PathBuf>,
    /// Measure steps and loads of a vLLM engine; print a profile for `sim`.
    ///
    /// The machine must be idle. `python/bench/engine.sh profile --vllm` installs missing packages and runs this command.
    #[arg(long, conflicts_with_all = ["timings", "gpu"])]
    vllm: bool,
    #[command(flatten)]
    vllm_args: VllmArgs,
    /// Name the SlackProfile.
    #[arg(long, default_value = "measured")]
    name: String,
    /// Name the model, as in the engine.
    #[arg(long)]
    model: Option<String>,
    /// Name the GPU product, as reported by the driver.
    #[arg(long)]
    gpu_product: Option<String>,
    /// Name the engine and its version.
    #[arg(long)]
    engine: Option<String>,
    /// Write NAME.yaml and NAME.json to this directory.
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
}

/// Output of `reprise profile --json`.
#[derive(Serialize)]
struct Measured<'a> {
    measurement: &'a str,
    profile: &'a Content,
}

/// Output of `reprise profile --vllm --json`.
#[derive(Serialize)]
struct NodeMeasured<'a> {
    samples: usize,
    deviation_median_percent: f64,
    deviation_max_percent: f64,
    profile: &'a str,
}

pub(crate) fn command(args: &ProfileArgs, config: &Config, audience: Audience) -> anyhow::Result<()> {
    if args.vllm {
        return of_vllm(args, config, audience);
    }
    let (source, mut content) = match &args.timings {
        Some(path) => {
            let text =
                std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
            let measurement = timings::parse(&text).with_context(|| format!("{}", path.display()))?;
            (format!("timings of {}", path.display()), of_engine("unnamed", "unnamed", measurement))
        }
        None if args.gpu => on_gpu()?,
        None => {
            let measurement = cpu::measure(&config.bench.directory(None))?;
            let source = "the reference engine's layers on this CPU; I/O on one core, to a file".to_owned();
            (source, of_engine("reference engine", &cpu::product(), measurement))
        }
    };
    let subject = &mut content.subject;
    for (given, field) in [
        (&args.model, &mut subject.model),
        (&args.gpu_product, &mut subject.gpu_product),
        (&args.engine, &mut subject.engine_version),
    ] {
        if let Some(given) = given {
            field.clone_from(given);
        }
    }
    let profile = Profile::new(content).context("the measurement is not a valid profile")?;
    let manifest = manifest(&args.name, &source, profile.content())?;
    if let Some(folder) = &args.output {
        std::fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
        let json = serde_json::to_string_pretty(profile.content())? + "\n";
        for (ending, text) in [("yaml", &manifest), ("json", &json)] {
            let path = folder.join(format!("{}.{ending}", args.name));
            std::fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
            audience.print_line(format!("wrote {}", path.display()));
        }
        audience.print_line(format!("measured: {source}"));
    } else if audience != Audience::Program {
        output::print(&manifest);
    }
    audience.emit(&Measured { measurement: &source, profile: profile.content() });
    Ok(())
}

/// Measures a vLLM engine and its agent for the simulator.
fn of_vllm(args: &ProfileArgs, config: &Config, audience: Audience) -> anyhow::Result<()> {
    let folder = config.bench.directory(None).join("profile");
    let mut node = VllmNode::start(&args.vllm_args, engine_profile::LIMITS, Loading::All, &folder)?;
    let measured = engine_profile::measure(&mut node, args.vllm_args.quick)?;
    if let Some(folder) = &args.output {
        std::fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
        let path = folder.join(format!("{}.toml", args.name));
        std::fs::write(&path, &measured.text).with_context(|| format!("writing {}", path.display()))?;
        audience.print_line(format!("wrote {}", path.display()));
        audience.print_line(measured.words());
    } else if audience != Audience::Program {
        output::print(&measured.text);
    }
    audience.emit(&NodeMeasured {
        samples: measured.samples,
        deviation_median_percent: measured.fit.deviation_median * 100.0,
        deviation_max_percent: measured.fit.deviation_max * 100.0,
        profile: &measured.text,
    });
    Ok(())
}

fn of_engine(engine: &str, product: &str, measurement: Measurement) -> Content {
    let version = concat!("reprise ", env!("CARGO_PKG_VERSION"));
    Content {
        subject: Subject {
            model: engine.to_owned(),
            gpu_product: product.to_owned(),
            tensor_parallel: 1,
            engine_version: version.to_owned(),
        },
        usable_percent: 80,
        fallback: Fallback::ThrottleWrites,
        max_error_percent: 30,
        measurement,
    }
}

/// Measures on the first GPU.
fn on_gpu() -> anyhow::Result<(String, Content)> {
    let remedy =
        "--gpu needs a GPU and a build with device code: use --timings, or profile the CPU without --gpu";
    if Gpu::count().context(remedy)? == 0 {
        bail!("no GPU: {remedy}");
    }
    let gpu = Gpu::open(0).context(remedy)?;
    let kernels = Kernels::load(&gpu).context(remedy)?;
    let content = slack::profile(&kernels, Method::CopyEngine, &slack::full_plan())?;
    let name = &gpu.info().name;
    Ok((format!("a synthetic layer on GPU 0 ({name}), I/O by {}", Method::CopyEngine), content))
}

/// Returns the manifest of a SlackProfile, with the source in a comment.
fn manifest(name: &str, source: &str, content: &Content) -> anyhow::Result<String> {
    let object = json!({
        "apiVersion": "reprise.dev/v1alpha1",
        "kind": "SlackProfile",
        "metadata": { "name": name },
        "spec": {
            "subject": content.subject,
            "usablePercent": content.usable_percent,
            "fallback": content.fallback,
            "maxErrorPercent": content.max_error_percent,
            "measurement": content.measurement,
        },
    });
    let text = serde_yaml_ng::to_string(&object).context("writing the manifest")?;
    Ok(format!("# Measured: {source}.\n{text}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn manifest_has_the_profile_and_names_its_source() {
        let text = r#"{"kind":"table","stepTokens":32,"iocbBytes":1048576}
            {"kind":"kernel","direction":"Read","iocbs":1,"micros":50,"sms":2}
            {"kind":"kernel","direction":"Write","iocbs":1,"micros":90,"sms":2}
            {"kind":"layer","phase":"Decode","inputTokens":1,"prefixTokens":0,"layerMicros":90,"slackMicros":60,"freeSms":4}"#;
        let content = of_engine("m", "g", timings::parse(text).expect("valid timings"));
        let manifest = manifest("p", "timings of a file", &content).expect("a manifest");
        assert!(manifest.starts_with("# Measured: timings of a file.\n"), "{manifest}");
        let object: serde_json::Value = serde_yaml_ng::from_str(&manifest).expect("YAML");
        assert_eq!(object["spec"]["measurement"]["windows"][0]["slackMicros"], 60);
        let read: Measurement =
            serde_json::from_value(object["spec"]["measurement"].clone()).expect("a measurement");
        assert_eq!(read, content.measurement);
    }
}
