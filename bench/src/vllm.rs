//! `reprise-bench vllm`: compares vLLM with Reprise to vLLM alone and to vLLM with other caches.
//!
//! Measured are the time to first token for each location of a prompt's KV, the overhead of a miss (alone,
//! and directly after a prompt that is still being saved), the time that the scheduler waits, and memory.
//! Answers must be equal to those without a connector. Legs that another cache cannot run are reported with
//! the reason ([`unmeasured`]).
//!
//! * In each repetition every system has fresh engines and a fresh store, gets the same prompts, and runs at
//!   another position in the order ([`turns`]).
//! * The legs of each system run in one order: save, memory, peer, NVMe, restart. All other work runs before
//!   the saves, because memory that was idle for a minute is slow on first touch on virtual machines.
//! * A sample is the median over the prompts of one repetition. Ratios are computed within each repetition
//!   ([`samples`], [`figures`]).
//! * Engines compute on all cores (vLLM's CPU backend), one prompt at a time.

mod unmeasured;

mod checkpoint;
mod disk;
mod engine;
mod environment;
mod figures;
mod goals;
mod peer_legs;
mod reprise_legs;
mod samples;

use std::fs;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Instant;

use anyhow::Context;
use serde::Serialize;
use serde_json::{Value, json};

use checkpoint::Checkpoint;
use engine::EngineEnvironment;
use environment::{Environments, Sources};
use reprise_testkit::bench::Settings;
use reprise_testkit::bench::report::Figure;
use reprise_testkit::output::bytes_text;
use samples::{Samples, System};

/// Default number of repetitions.
const REPETITIONS: usize = 5;
const REPETITIONS_QUICK: usize = 1;

/// Seed of the warm-up prompt, which is not measured.
const WARM_UP: u64 = 0;

/// Number of tokens per block of vLLM's CPU backend.
const BLOCK_TOKENS: u64 = 128;

/// Number of tokens after the last full block. vLLM always computes the last token of a prompt, and the
/// example connector finds a prompt only with one more token.
const TAIL_TOKENS: u64 = 2;

/// Space in a store for prompts that are not measured: the warm-up, and buffers for reads during writes.
const PROMPTS_EXTRA: u64 = 4;

/// Number of back-to-back runs: one with each engine first.
const TRAINS: u64 = 2;

/// Minimum size of a store.
const STORE_BYTES_MIN: u64 = 256 << 20;

/// Explanations of the figures in the report.
const SAMPLES: &str = "one per repetition, with fresh engines and a fresh store: the median of its prompts; for overheads one per pair; figures named \
    engine_starts count the engines of all repetitions";
const MEMORY_HELD: &str = "after the loads from memory, of engine and store of one node together: anonymous and shared memory (Pss_Anon and Pss_Shmem of \
    smaps_rollup, and huge pages), each page counted once, without pages of program files";
const MEMORY_PEAK: &str = "memory_held plus, for each process, its peak resident memory above that since the warm-up, during saves and loads from memory";

/// Arguments of `reprise-bench vllm`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct VllmArgs {
    /// Also measure these caches, separated by commas; '' for none.
    ///
    /// Each is installed into its own environment.
    #[arg(long, default_value = "example,mooncake,lmcache")]
    peers: Peers,
    /// Use a small model, short prompts and one repetition.
    ///
    /// This shows that everything works; the figures are not meaningful.
    #[arg(long)]
    quick: bool,
    /// Use prompts of this many tokens [default: 4096; quick: 512].
    ///
    /// Must be a multiple of 256; only tokens of full blocks count.
    #[arg(long, value_name = "N", value_parser = prompt_tokens)]
    prompt_tokens: Option<u64>,
    /// Continue an interrupted run, or add repetitions to a run.
    #[arg(long = "continue")]
    resume: bool,
    /// Use the sources of the Python package in this folder.
    #[arg(long, value_name = "DIR", default_value = "python")]
    python: PathBuf,
}

/// Another cache for vLLM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Peer {
    /// vLLM's example connector, which stores files.
    Example,
    /// Mooncake's store, with its memory in the engine's process or in another process.
    Mooncake,
    /// LMCache with a separate server process.
    Lmcache,
}

/// List of peers in an argument.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Peers(Vec<Peer>);

/// Data type of the engines' computation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Precision {
    Bf16,
    /// For processors without AVX-512, on which bf16 is a hundred times slower in vLLM's CPU backend.
    Fp32,
}

/// Sizes of model, prompts and runs.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    precision: Precision,
    layers: u64,
    /// Number of attention heads, each with its own keys and values.
    heads: u64,
    head_dim: u64,
    /// Number of tokens of a prompt in full blocks.
    cached_tokens: u64,
    prompts: u64,
}

/// Default sizes: 32 KiB of KV per token, 128 MiB per prompt.
const FULL: Sizes =
    Sizes { precision: Precision::Bf16, layers: 8, heads: 8, head_dim: 128, cached_tokens: 4096, prompts: 4 };

/// Sizes of `--quick`: 1 MiB of KV per prompt.
const QUICK: Sizes =
    Sizes { precision: Precision::Bf16, layers: 4, heads: 4, head_dim: 32, cached_tokens: 512, prompts: 2 };

/// Shared context of all measurements.
struct BenchContext {
    environments: Environments,
    sizes: Sizes,
    /// Folder of the benchmark's files.
    folder: PathBuf,
}

/// Description of the machine and the settings of a run, printed before the figures.
#[derive(Debug, Serialize)]
struct Machine {
    bench: &'static str,
    machine: String,
    repetitions: usize,
    prompts: u64,
    prompt_tokens: u64,
    layers: u64,
    dtype: &'static str,
    kv_bytes_per_prompt: u64,
    /// Explanation of `samples` in a figure's `spread`.
    samples: &'static str,
    /// Explanations of the figures with these names.
    memory_held: &'static str,
    memory_peak: &'static str,
}

/// Runs the benchmark; `repetitions` is the value of the argument, if given.
pub(crate) fn run(
    args: &VllmArgs,
    repetitions: Option<usize>,
    settings: &Settings,
) -> anyhow::Result<Vec<Figure>> {
    let sources = Sources::find(&args.python)?;
    let folder = settings.directory.join("vllm");
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let environments = Environments::install(sources, &args.peers.0, &folder, settings.audience)?;
    let sizes = if args.quick { QUICK } else { FULL };
    let sizes = sizes.at(Precision::of_machine(&cpu_flags()), args.prompt_tokens);
    let context = BenchContext { environments, sizes, folder };
    // The first engine writes the model again.
    peer_legs::remove_folder(&context.model())?;
    let default = if args.quick { REPETITIONS_QUICK } else { REPETITIONS };
    let repetitions = repetitions.unwrap_or(default);
    let machine = context.machine(repetitions);
    settings.audience.emit(&machine);
    settings.audience.print_line(machine.words());
    let systems = turns(&args.peers, 0).into_iter().map(|(system, _)| system).collect();
    let checkpoint = Checkpoint::new(&context.folder, &machine, systems);
    let (measured, mut samples) = if args.resume { checkpoint.read()? } else { (0, Samples::default()) };
    for round in settings.some_rounds("vllm", repetitions.saturating_sub(measured)) {
        let round = measured + round;
        samples.begin(round);
        for (system, peer) in turns(&args.peers, round) {
            let begun = Instant::now();
            let measured = match peer {
                None => Ok(reprise_legs::measure(&context, &mut samples)?),
                Some(peer) => peer_legs::measure(system, peer, &context, &mut samples),
            };
            match measured {
                Ok(()) => samples.took(system, begun.elapsed().as_secs_f64()),
                // A peer that fails does not end the run: the other systems are still comparable.
                Err(error) => {
                    let error = format!("{error:#}");
                    tracing::warn!(system = system.name(), %error, "measurement of a peer failed");
                    samples.failed(system, error);
                }
            }
        }
        checkpoint.write(round + 1, &samples)?;
    }
    let peers: Vec<System> = args.peers.0.iter().flat_map(|peer| peer.systems()).copied().collect();
    unmeasured::print(settings.audience, &samples.unmeasured_legs(&peers));
    let figures = samples.figures();
    goals::print(settings.audience, &goals::goals(&figures));
    Ok(figures)
}

/// Returns the systems in the order of a round. Over as many rounds as systems, each system has every
/// position once.
fn turns(peers: &Peers, round: usize) -> Vec<(System, Option<Peer>)> {
    let mut systems = vec![(System::Reprise, None)];
    systems
        .extend(peers.0.iter().flat_map(|peer| peer.systems().iter().map(|system| (*system, Some(*peer)))));
    let places = systems.len();
    systems.rotate_left(round % places);
    systems
}

impl Peer {
    /// Name of the requirements file of the peer's environment; `None` if the peer comes with vLLM.
    fn requirements(self) -> Option<&'static str> {
        match self {
            Peer::Example => None,
            Peer::Mooncake => Some("mooncake"),
            Peer::Lmcache => Some("lmcache"),
        }
    }

    /// Returns the systems that measure this peer.
    fn systems(self) -> &'static [System] {
        match self {
            Peer::Example => &[System::Example],
            Peer::Mooncake => &[System::MooncakeSameHost, System::MooncakeTcp],
            Peer::Lmcache => &[System::Lmcache],
        }
    }
}

impl FromStr for Peers {
    type Err = String;

    fn from_str(text: &str) -> Result<Peers, String> {
        let mut peers = Vec::new();
        for name in text.split(',').map(str::trim).filter(|name| !name.is_empty()) {
            let peer = match name {
                "example" => Peer::Example,
                "mooncake" => Peer::Mooncake,
                "lmcache" => Peer::Lmcache,
                _ => return Err(format!("invalid peer \"{name}\": expected example, mooncake or lmcache")),
            };
            if !peers.contains(&peer) {
                peers.push(peer);
            }
        }
        Ok(Peers(peers))
    }
}

impl Precision {
    /// Returns the faster data type on a processor with these flags.
    fn of_machine(flags: &str) -> Precision {
        if flags.split_whitespace().any(|flag| flag == "avx512f") { Precision::Bf16 } else { Precision::Fp32 }
    }

    /// Returns vLLM's name of the data type.
    fn name(self) -> &'static str {
        match self {
            Precision::Bf16 => "bfloat16",
            Precision::Fp32 => "float32",
        }
    }

    fn bytes(self) -> u64 {
        match self {
            Precision::Bf16 => 2,
            Precision::Fp32 => 4,
        }
    }
}

/// Parses the number of tokens of a prompt: whole chunks of LMCache (two blocks), below the model's limit of
/// 8,192.
fn prompt_tokens(text: &str) -> Result<u64, String> {
    let tokens = text.parse::<u64>().ok().filter(|tokens| (256..=7936).contains(tokens) && tokens % 256 == 0);
    tokens.ok_or_else(|| "expected a multiple of 256 from 256 to 7936".to_owned())
}

impl Sizes {
    /// Returns sizes for another precision with the same KV bytes per token, by adapting the number of
    /// layers.
    fn at(self, precision: Precision, cached_tokens: Option<u64>) -> Sizes {
        Sizes {
            precision,
            layers: self.layers * self.precision.bytes() / precision.bytes(),
            cached_tokens: cached_tokens.unwrap_or(self.cached_tokens),
            ..self
        }
    }

    /// Returns the number of tokens of a prompt.
    fn tokens(self) -> u64 {
        self.cached_tokens + TAIL_TOKENS
    }

    /// Returns the KV bytes of a block.
    fn block_bytes(self) -> u64 {
        self.layers * self.heads * self.head_dim * 2 * self.precision.bytes() * BLOCK_TOKENS
    }

    /// Returns the KV bytes of a prompt's full blocks.
    fn prompt_bytes(self) -> u64 {
        self.block_bytes() * self.prompt_blocks()
    }

    /// Returns the number of full blocks of a prompt.
    fn prompt_blocks(self) -> u64 {
        self.cached_tokens / BLOCK_TOKENS
    }

    /// Returns the number of prompts in a train: a leading one, and a share of the measured ones.
    fn train_prompts(self) -> u64 {
        self.prompts / TRAINS + 1
    }

    /// Returns the seeds of prompts that are measured as misses only.
    fn misses(self) -> Vec<u64> {
        let first = WARM_UP + 1 + self.prompts;
        (first..first + self.prompts).collect()
    }

    /// Returns the seeds of prompts that are saved only to touch memory.
    fn touches(self) -> Vec<u64> {
        let first = WARM_UP + 1 + 2 * self.prompts + TRAINS * self.train_prompts();
        (first..first + self.prompts).collect()
    }

    /// Returns the seeds of the prompts of each back-to-back train.
    fn trains(self) -> Vec<Vec<u64>> {
        let first = WARM_UP + 1 + 2 * self.prompts;
        let train = |number| (first + number * self.train_prompts()..).take(self.train_prompts() as usize);
        (0..TRAINS).map(|number| train(number).collect()).collect()
    }

    /// Returns the size of a store in memory that fits all prompts, so that none is evicted.
    ///
    /// The second node needs the most: the warm-up, the trains, and the measured prompts or those that touch
    /// memory before them. The first node has misses and trains.
    fn store_bytes(self) -> u64 {
        let prompts = self.prompts + TRAINS * self.train_prompts() + PROMPTS_EXTRA;
        (self.prompt_bytes() * prompts).max(STORE_BYTES_MIN)
    }
}

impl BenchContext {
    /// Returns the seeds of the measured prompts.
    fn seeds(&self) -> Vec<u64> {
        (WARM_UP + 1..=WARM_UP + self.sizes.prompts).collect()
    }

    /// Returns the folder of the other caches' files.
    fn peer_files(&self) -> PathBuf {
        self.folder.join("peer-files")
    }

    /// Returns the folder of the model.
    fn model(&self) -> PathBuf {
        let Sizes { layers, heads, head_dim, .. } = self.sizes;
        self.folder.join(format!("model-{layers}-{heads}-{head_dim}"))
    }

    /// Returns the environment of the engine with this name.
    fn engine_environment(&self, name: &str) -> EngineEnvironment {
        EngineEnvironment {
            python: self.environments.vllm.clone(),
            script: self.environments.engine_script(),
            modules: self.environments.modules(),
            variables: Vec::new(),
            network_of: None,
            log: self.folder.join(format!("{name}-engine.log")),
        }
    }

    /// Returns the first line of an engine's input: the model and its settings.
    fn first_line(&self, transfer: Option<&Value>) -> Value {
        let Sizes { layers, heads, head_dim, .. } = self.sizes;
        let mut settings = json!({
            "model": self.model(),
            "skip_tokenizer_init": true,
            "dtype": self.sizes.precision.name(),
            "enforce_eager": true,
            "block_size": BLOCK_TOKENS,
            // Large enough to compute a prompt in one step.
            "max_model_len": 8192,
            "max_num_batched_tokens": 8192,
            "max_num_seqs": 4,
            "seed": 1,
        });
        if let Some(transfer) = transfer {
            settings["kv_transfer_config"] = transfer.clone();
        }
        json!({ "model": { "layers": layers, "heads": heads, "head_dim": head_dim }, "settings": settings })
    }

    fn machine(&self, repetitions: usize) -> Machine {
        Machine {
            bench: "vllm",
            machine: machine(),
            repetitions,
            prompts: self.sizes.prompts,
            prompt_tokens: self.sizes.tokens(),
            layers: self.sizes.layers,
            dtype: self.sizes.precision.name(),
            kv_bytes_per_prompt: self.sizes.prompt_bytes(),
            samples: SAMPLES,
            memory_held: MEMORY_HELD,
            memory_peak: MEMORY_PEAK,
        }
    }
}

impl Machine {
    /// Returns the description as text.
    fn words(&self) -> String {
        format!(
            "{}\n{} repetitions of {} prompts of {} tokens, {} layers of {}, {} of KV each",
            self.machine,
            self.repetitions,
            self.prompts,
            self.prompt_tokens,
            self.layers,
            self.dtype,
            bytes_text(self.kv_bytes_per_prompt)
        )
    }
}

/// Returns the `flags` line of the first processor in `/proc/cpuinfo`.
fn cpu_flags() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    text.lines().find(|line| line.starts_with("flags")).unwrap_or_default().to_owned()
}

/// Describes processor, cores, memory and kernel, from `/proc`.
fn machine() -> String {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let value = |text: &str, name: &str| {
        let line = text.lines().find(|line| line.starts_with(name));
        line.and_then(|line| line.split(':').nth(1)).unwrap_or("unknown").trim().to_owned()
    };
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    format!(
        "{cores} cores of {}, {} of memory, Linux {}",
        value(&read("/proc/cpuinfo"), "model name"),
        value(&read("/proc/meminfo"), "MemTotal"),
        read("/proc/sys/kernel/osrelease").trim()
    )
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: VllmArgs,
    }

    fn parse(line: &[&str]) -> Result<VllmArgs, clap::Error> {
        Line::try_parse_from([&["vllm"], line].concat()).map(|line| line.args)
    }

    #[test]
    fn peers_are_a_comma_separated_list_that_may_be_empty() {
        let peers = |line: &[&str]| parse(line).expect("valid").peers.0;
        assert_eq!(peers(&[]), [Peer::Example, Peer::Mooncake, Peer::Lmcache]);
        assert_eq!(peers(&["--peers", ""]), []);
        assert_eq!(peers(&["--peers", "lmcache, example,lmcache"]), [Peer::Lmcache, Peer::Example]);
        let error = parse(&["--peers", "redis"]).expect_err("unknown").to_string();
        assert!(error.contains("invalid peer \"redis\": expected example, mooncake or lmcache"), "{error}");
    }

    #[test]
    fn every_system_has_each_position_in_the_order_once() {
        let peers: Peers = "example,mooncake,lmcache".parse().expect("known");
        let rounds: Vec<_> = (0..5).map(|round| turns(&peers, round)).collect();
        for place in 0..5 {
            let mut systems: Vec<System> = rounds.iter().map(|round| round[place].0).collect();
            systems.sort();
            systems.dedup();
            assert_eq!(systems.len(), 5);
        }
        assert_eq!(turns(&Peers(Vec::new()), 3), [(System::Reprise, None)]);
    }

    #[test]
    fn default_prompt_has_128_mib_of_kv_and_all_prompts_fit_the_store() {
        assert_eq!(FULL.block_bytes(), 4 << 20);
        assert_eq!(FULL.prompt_bytes(), 128 << 20);
        let trains = FULL.trains().concat().len();
        for measured in [FULL.misses(), FULL.touches()] {
            let prompts = (1 + trains + measured.len()) as u64;
            assert!(FULL.store_bytes() >= prompts * FULL.prompt_bytes());
        }
        assert_eq!(QUICK.prompt_bytes(), 1 << 20);
    }

    #[test]
    fn miss_and_train_prompts_are_new_and_enough_to_judge_overhead() {
        let pairs: usize = FULL.trains().iter().map(|train| train.len() - 1).sum();
        assert!(pairs * REPETITIONS >= 20 && FULL.misses().len() * REPETITIONS >= 20);
        assert!(QUICK.trains().iter().all(|train| train.len() > 1));
        let others = [FULL.misses(), FULL.trains().concat(), FULL.touches()].concat();
        assert!(others.iter().all(|seed| *seed > WARM_UP + FULL.prompts));
        let apart: std::collections::BTreeSet<u64> = others.iter().copied().collect();
        assert_eq!(apart.len(), others.len());
    }

    #[test]
    fn processor_without_avx_512_uses_fp32_with_the_same_kv_per_prompt() {
        assert_eq!(Precision::of_machine("flags : fpu avx2 avx512f"), Precision::Bf16);
        let slow = Precision::of_machine("flags : fpu avx2 avx512fx");
        assert_eq!(slow, Precision::Fp32);
        let sizes = FULL.at(slow, None);
        assert_eq!((sizes.layers, sizes.prompt_bytes()), (4, 128 << 20));
        assert_eq!(FULL.at(Precision::Bf16, Some(1024)).prompt_bytes(), 32 << 20);
    }

    #[test]
    fn prompt_tokens_must_be_whole_chunks_of_every_peer() {
        assert_eq!(parse(&["--prompt-tokens", "1024"]).expect("valid").prompt_tokens, Some(1024));
        for tokens in ["0", "128", "300", "8192", "x"] {
            assert!(parse(&["--prompt-tokens", tokens]).is_err(), "{tokens}");
        }
    }
}
