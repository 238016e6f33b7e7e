//! vLLM with Reprise, beside vLLM alone and vLLM with other caches: the time to the first token of a prompt whose KV lies in
//! different places, what a prompt costs that is nowhere, by itself and right behind another one that is still being saved, what the
//! scheduler waits for, memory, and whether the answers are the same. What another cache has no time for is said with the reason
//! ([`absent`]).
//!
//! In each repetition every system has fresh engines and a fresh store, gets the same prompts, and has its turn at another place
//! in the order ([`turns`]). Of each system the legs come in one order, and what is not between save and load of a prompt comes before
//! the saves: save, memory, peer, NVMe, restart. Memory that was idle for a minute is slow at its first touch on virtual machines.
//! A sample is a repetition: the median of its prompts; ratios are taken in each repetition ([`samples`], [`figures`]).
//! Engines compute on all cores (vLLM's CPU backend), one prompt at a time.

mod absent;

mod disk;
mod engine;
mod environment;
mod figures;
mod goals;
mod kept;
mod ours;
mod peers;
mod samples;

use std::fs;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Instant;

use anyhow::Context;
use serde::Serialize;
use serde_json::{Value, json};

use super::Settings;
use super::report::Figure;
use crate::output::bytes_text;
use engine::Surroundings;
use environment::{Environments, Sources};
use kept::Kept;
use samples::{Samples, System};

/// Repetitions, unless told otherwise.
const REPETITIONS: usize = 5;
const REPETITIONS_QUICK: usize = 1;

/// A prompt that is not measured.
const WARM_UP: u64 = 0;

/// Tokens of a block of vLLM's CPU backend.
const BLOCK_TOKENS: u64 = 128;

/// Tokens beyond the last full block: the last token of a prompt is always computed, and the example connector finds a prompt
/// only if it has another one.
const TAIL_TOKENS: u64 = 2;

/// Room for prompts in a store besides those that are measured: the warm-up, and what is read beside what is written.
const PROMPTS_EXTRA: u64 = 4;

/// Times that prompts go back to back: once with each engine first.
const TRAINS: u64 = 2;

/// The least room that agents and peers are given.
const STORE_BYTES_MIN: u64 = 256 << 20;

/// In words, for who reads the figures.
const SAMPLES: &str = "one a repetition, with fresh engines and a fresh store: the median of its prompts; of overheads one a pair; figures named engine_starts \
    count the engines of all repetitions";
const MEMORY_HELD: &str = "after the loads from memory, engine and store of one node together: anonymous and shared memory (Pss_Anon and Pss_Shmem of \
    smaps_rollup, and huge pages), each page once, without pages of programs' files";
const MEMORY_PEAK: &str = "the same, and what each process has had resident above that at its own peak since the warm-up, during saves and loads from memory";

/// Arguments of `reprise bench vllm`.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct VllmArgs {
    /// Other caches measured in the same run, by commas; '' for none. Each is installed into an environment of its own.
    #[arg(long, default_value = "example,mooncake,lmcache")]
    peers: Peers,
    /// A small model, short prompts and one repetition: shows that everything works, and no figure that means anything.
    #[arg(long)]
    quick: bool,
    /// Tokens of a prompt in full blocks, a multiple of 256 [default: 4096; quick 512].
    #[arg(long, value_name = "N", value_parser = prompt_tokens)]
    prompt_tokens: Option<u64>,
    /// Goes on with a run that was interrupted, or takes more repetitions of one: those that were measured count.
    #[arg(long = "continue")]
    resume: bool,
    /// The folder of the Python package's sources in a checkout.
    #[arg(long, value_name = "DIR", default_value = "python")]
    python: PathBuf,
}

/// Another cache for vLLM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Peer {
    /// vLLM's own example, which keeps files.
    Example,
    /// Mooncake's store, with its memory in the engine's process and in another.
    Mooncake,
    /// LMCache with its server.
    Lmcache,
}

/// Peers as they stand in an argument.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Peers(Vec<Peer>);

/// What engines compute with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Precision {
    Bf16,
    /// Where the processor has no AVX-512: bf16 takes vLLM's CPU backend a hundred times as long there.
    Fp32,
}

/// How large everything is.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    precision: Precision,
    layers: u64,
    /// Heads of attention, each with keys and values of its own.
    heads: u64,
    head_dim: u64,
    /// Tokens of a prompt in full blocks.
    cached_tokens: u64,
    prompts: u64,
}

/// The model of the figures: 32 KiB of KV a token, 128 MiB a prompt.
const FULL: Sizes =
    Sizes { precision: Precision::Bf16, layers: 8, heads: 8, head_dim: 128, cached_tokens: 4096, prompts: 4 };

/// 1 MiB a prompt.
const QUICK: Sizes =
    Sizes { precision: Precision::Bf16, layers: 4, heads: 4, head_dim: 32, cached_tokens: 512, prompts: 2 };

/// What every measurement needs.
struct World {
    environments: Environments,
    sizes: Sizes,
    /// Of this benchmark's own files.
    folder: PathBuf,
}

/// Where and how the figures came about.
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
    /// What `samples` of a figure's `spread` are.
    samples: &'static str,
    /// What figures of these names are.
    memory_held: &'static str,
    memory_peak: &'static str,
}

/// Runs it; `repetitions` as it stands in the arguments.
pub(super) fn run(
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
    let world = World { environments, sizes, folder };
    // The first engine writes it.
    peers::remove_folder(&world.model())?;
    let default = if args.quick { REPETITIONS_QUICK } else { REPETITIONS };
    let repetitions = repetitions.unwrap_or(default);
    let machine = world.machine(repetitions);
    settings.audience.emit(&machine);
    settings.audience.say(machine.words());
    let systems = turns(&args.peers, 0).into_iter().map(|(system, _)| system).collect();
    let kept = Kept::new(&world.folder, &machine, systems);
    let (measured, mut samples) = if args.resume { kept.read()? } else { (0, Samples::default()) };
    for round in settings.some_rounds("vllm", repetitions.saturating_sub(measured)) {
        let round = measured + round;
        samples.begin(round);
        for (system, peer) in turns(&args.peers, round) {
            let begun = Instant::now();
            let measured = match peer {
                None => Ok(ours::measure(&world, &mut samples)?),
                Some(peer) => peers::measure(system, peer, &world, &mut samples),
            };
            match measured {
                Ok(()) => samples.took(system, begun.elapsed().as_secs_f64()),
                // Not measured is not the end: the others still say something.
                Err(error) => {
                    let error = format!("{error:#}");
                    tracing::warn!(system = system.name(), %error, "a peer was not measured");
                    samples.failed(system, error);
                }
            }
        }
        kept.write(round + 1, &samples)?;
    }
    let peers: Vec<System> = args.peers.0.iter().flat_map(|peer| peer.systems()).copied().collect();
    absent::print(settings.audience, &samples.absences(&peers));
    let figures = samples.figures();
    goals::print(settings.audience, &goals::goals(&figures));
    Ok(figures)
}

/// Systems in the order of a round: each has every place once in as many rounds as there are systems.
fn turns(peers: &Peers, round: usize) -> Vec<(System, Option<Peer>)> {
    let mut systems = vec![(System::Reprise, None)];
    systems
        .extend(peers.0.iter().flat_map(|peer| peer.systems().iter().map(|system| (*system, Some(*peer)))));
    let places = systems.len();
    systems.rotate_left(round % places);
    systems
}

impl Peer {
    /// File of what its environment needs; none when it comes with vLLM.
    fn requirements(self) -> Option<&'static str> {
        match self {
            Peer::Example => None,
            Peer::Mooncake => Some("mooncake"),
            Peer::Lmcache => Some("lmcache"),
        }
    }

    /// What is measured of it.
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
                _ => return Err(format!("{name} is none of example, mooncake, lmcache")),
            };
            if !peers.contains(&peer) {
                peers.push(peer);
            }
        }
        Ok(Peers(peers))
    }
}

impl Precision {
    /// What a processor of these flags is fast with.
    fn of_machine(flags: &str) -> Precision {
        if flags.split_whitespace().any(|flag| flag == "avx512f") { Precision::Bf16 } else { Precision::Fp32 }
    }

    /// As vLLM calls it.
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

/// Tokens of a prompt from an argument: whole chunks of LMCache, which are two blocks, in what a model of 8,192 may have.
fn prompt_tokens(text: &str) -> Result<u64, String> {
    let tokens = text.parse::<u64>().ok().filter(|tokens| (256..=7936).contains(tokens) && tokens % 256 == 0);
    tokens.ok_or_else(|| "a multiple of 256 from 256 to 7936".to_owned())
}

impl Sizes {
    /// The same KV of a token in another precision, by other layers.
    fn at(self, precision: Precision, cached_tokens: Option<u64>) -> Sizes {
        Sizes {
            precision,
            layers: self.layers * self.precision.bytes() / precision.bytes(),
            cached_tokens: cached_tokens.unwrap_or(self.cached_tokens),
            ..self
        }
    }

    /// Of a prompt.
    fn tokens(self) -> u64 {
        self.cached_tokens + TAIL_TOKENS
    }

    /// KV of a block: keys and values.
    fn block_bytes(self) -> u64 {
        self.layers * self.heads * self.head_dim * 2 * self.precision.bytes() * BLOCK_TOKENS
    }

    /// KV of a prompt's full blocks.
    fn prompt_bytes(self) -> u64 {
        self.block_bytes() * self.prompt_blocks()
    }

    /// Full blocks of a prompt.
    fn prompt_blocks(self) -> u64 {
        self.cached_tokens / BLOCK_TOKENS
    }

    /// Prompts of a train: one in front, and as many in all trains as are measured one by one.
    fn train_prompts(self) -> u64 {
        self.prompts / TRAINS + 1
    }

    /// Prompts that are measured only where they are nowhere.
    fn misses(self) -> Vec<u64> {
        let first = WARM_UP + 1 + self.prompts;
        (first..first + self.prompts).collect()
    }

    /// Prompts that are saved by an engine only so that memory has been used.
    fn touches(self) -> Vec<u64> {
        let first = WARM_UP + 1 + 2 * self.prompts + TRAINS * self.train_prompts();
        (first..first + self.prompts).collect()
    }

    /// Prompts that go back to back and nowhere else.
    fn trains(self) -> Vec<Vec<u64>> {
        let first = WARM_UP + 1 + 2 * self.prompts;
        let train = |number| (first + number * self.train_prompts()..).take(self.train_prompts() as usize);
        (0..TRAINS).map(|number| train(number).collect()).collect()
    }

    /// Room of a store in memory: everything that is there at a time fits, and nothing is evicted. Most of it is there on a second
    /// node: the warm-up, trains and the prompts that are measured, or that have made room for them; misses and trains on the first.
    fn store_bytes(self) -> u64 {
        let prompts = self.prompts + TRAINS * self.train_prompts() + PROMPTS_EXTRA;
        (self.prompt_bytes() * prompts).max(STORE_BYTES_MIN)
    }
}

impl World {
    /// Prompts that are measured.
    fn seeds(&self) -> Vec<u64> {
        (WARM_UP + 1..=WARM_UP + self.sizes.prompts).collect()
    }

    /// Where other caches keep files.
    fn peer_files(&self) -> PathBuf {
        self.folder.join("peer-files")
    }

    /// Where the model is, or will be.
    fn model(&self) -> PathBuf {
        let Sizes { layers, heads, head_dim, .. } = self.sizes;
        self.folder.join(format!("model-{layers}-{heads}-{head_dim}"))
    }

    /// What an engine of a name runs in.
    fn surroundings(&self, name: &str) -> Surroundings {
        Surroundings {
            python: self.environments.vllm.clone(),
            script: self.environments.engine_script(),
            modules: self.environments.modules(),
            variables: Vec::new(),
            network_of: None,
            log: self.folder.join(format!("{name}-engine.log")),
        }
    }

    /// What an engine is told first: the model and its settings.
    fn first_line(&self, transfer: Option<&Value>) -> Value {
        let Sizes { layers, heads, head_dim, .. } = self.sizes;
        let mut settings = json!({
            "model": self.model(),
            "skip_tokenizer_init": true,
            "dtype": self.sizes.precision.name(),
            "enforce_eager": true,
            "block_size": BLOCK_TOKENS,
            // A prompt is one step.
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
    /// For people.
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

/// What the first processor can do, in words of the kernel.
fn cpu_flags() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    text.lines().find(|line| line.starts_with("flags")).unwrap_or_default().to_owned()
}

/// Processor, cores, memory and kernel, as the kernel tells them.
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
    fn peers_are_named_by_commas_and_may_be_none() {
        let peers = |line: &[&str]| parse(line).expect("valid").peers.0;
        assert_eq!(peers(&[]), [Peer::Example, Peer::Mooncake, Peer::Lmcache]);
        assert_eq!(peers(&["--peers", ""]), []);
        assert_eq!(peers(&["--peers", "lmcache, example,lmcache"]), [Peer::Lmcache, Peer::Example]);
        let error = parse(&["--peers", "redis"]).expect_err("unknown").to_string();
        assert!(error.contains("redis is none of example, mooncake, lmcache"), "{error}");
    }

    #[test]
    fn every_system_has_every_place_in_the_order_once() {
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
    fn a_prompt_of_the_figures_has_128_mib_of_kv_and_all_of_them_fit() {
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
    fn prompts_of_misses_and_trains_are_new_and_enough_in_all_repetitions_to_judge_their_overhead() {
        let pairs: usize = FULL.trains().iter().map(|train| train.len() - 1).sum();
        assert!(pairs * REPETITIONS >= 20 && FULL.misses().len() * REPETITIONS >= 20);
        assert!(QUICK.trains().iter().all(|train| train.len() > 1));
        let others = [FULL.misses(), FULL.trains().concat(), FULL.touches()].concat();
        assert!(others.iter().all(|seed| *seed > WARM_UP + FULL.prompts));
        let apart: std::collections::BTreeSet<u64> = others.iter().copied().collect();
        assert_eq!(apart.len(), others.len());
    }

    #[test]
    fn a_processor_without_avx_512_computes_with_fp32_and_a_prompt_has_the_same_kv() {
        assert_eq!(Precision::of_machine("flags : fpu avx2 avx512f"), Precision::Bf16);
        let slow = Precision::of_machine("flags : fpu avx2 avx512fx");
        assert_eq!(slow, Precision::Fp32);
        let sizes = FULL.at(slow, None);
        assert_eq!((sizes.layers, sizes.prompt_bytes()), (4, 128 << 20));
        assert_eq!(FULL.at(Precision::Bf16, Some(1024)).prompt_bytes(), 32 << 20);
    }

    #[test]
    fn prompts_are_of_whole_chunks_of_every_peer() {
        assert_eq!(parse(&["--prompt-tokens", "1024"]).expect("valid").prompt_tokens, Some(1024));
        for tokens in ["0", "128", "300", "8192", "x"] {
            assert!(parse(&["--prompt-tokens", tokens]).is_err(), "{tokens}");
        }
    }
}
