//! A vLLM engine in another process (`python/bench/measured_engine.py`), driven by lines of JSON.
//!
//! The script is part of this program. The process exits when its standard input is closed, also if this program dies.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use reprise_testkit::process::{Conversation, append};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// Script of the process.
const SCRIPT: &str = include_str!("../../python/bench/measured_engine.py");

/// Time limit of a start: imports and the model take 25 s, and ten times that on a busy machine.
const READY_WITHIN: Duration = Duration::from_secs(600);

/// Time limit of a command: a workload takes half a minute.
const ANSWER_WITHIN: Duration = Duration::from_secs(600);

/// Time limit from the end of the input to the exit of the process.
const STOPPED_WITHIN: Duration = Duration::from_secs(60);

/// Number of characters of the log that an engine's error shows.
const TAIL_CHARACTERS: usize = 2000;

/// Tokens of a block: the default of vLLM's CPU backend.
pub(crate) const BLOCK_TOKENS: u32 = 128;

/// Variables of the engine: 2 GiB for its own cache, all cores for computation, one process, no network access.
const VARIABLES: [(&str, &str); 7] = [
    ("VLLM_CPU_KVCACHE_SPACE", "2"),
    ("VLLM_CPU_NUM_OF_RESERVED_CPU", "0"),
    ("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
    ("HF_HUB_OFFLINE", "1"),
    ("TRANSFORMERS_OFFLINE", "1"),
    ("VLLM_NO_USAGE_STATS", "1"),
    ("VLLM_HOST_IP", "127.0.0.1"),
];

/// Exits with 0 if the packages are installed.
const PACKAGES: &str = "import importlib.util, sys; sys.exit(any(importlib.util.find_spec(name) is None for name in ('vllm', 'reprise')))";

/// Arguments of commands with a vLLM engine.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct VllmArgs {
    /// Run the engine with this Python, which has vLLM and reprise.
    #[arg(long, value_name = "PROGRAM", default_value = "python3")]
    python: PathBuf,
    /// Serve this model [default: random weights of SmolLM2-135M's shape].
    #[arg(long, value_name = "DIR")]
    model_dir: Option<PathBuf>,
    /// Run few and short measurements.
    ///
    /// This shows that everything works; the figures are not meaningful.
    #[arg(long)]
    pub(crate) quick: bool,
}

/// Limits of an engine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EngineLimits {
    /// Largest number of sequences in a step.
    pub(crate) sequences: u32,
    /// Largest number of tokens in a step.
    pub(crate) step_tokens: u32,
}

/// Description of an engine.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(crate) struct Description {
    pub(crate) vllm: String,
    pub(crate) threads: u32,
    pub(crate) parameters: u64,
    pub(crate) layers: u16,
    pub(crate) hidden: u32,
    pub(crate) query_heads: u32,
    pub(crate) kv_heads: u16,
    pub(crate) head_dim: u16,
    pub(crate) dtype: String,
    pub(crate) context: u32,
    pub(crate) block_tokens: u32,
    pub(crate) blocks: u64,
}

/// A request to the engine. Prompts with equal seeds have equal tokens.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct EngineRequest {
    /// Seconds of its arrival; used by [`Engine::serve`] only.
    pub(crate) at: f64,
    /// Seed of the leading tokens.
    pub(crate) prefix_seed: u64,
    /// Number of leading tokens.
    pub(crate) prefix: u32,
    /// Seed of the other tokens.
    pub(crate) seed: u64,
    /// Number of other tokens.
    pub(crate) own: u32,
    /// Tokens that it generates.
    pub(crate) output: u32,
    /// Whether its blocks are saved.
    pub(crate) is_stored: bool,
}

/// A step of the engine.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(crate) struct EngineStep {
    /// Computed tokens of each sequence, and tokens before them.
    pub(crate) chunks: Vec<(u32, u32)>,
    pub(crate) seconds: f64,
}

/// Times of a request that was served alone, in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
pub(crate) struct LoadAnswer {
    pub(crate) ttft: f64,
    /// Time to first token without the last step, which computes the tokens that were not loaded.
    pub(crate) wait: f64,
    /// Tokens that were not computed.
    pub(crate) cached: u32,
}

/// Times of a request among others, in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
pub(crate) struct ServeAnswer {
    /// From its arrival to its first token.
    pub(crate) ttft: f64,
    /// From the start of the run to its last token.
    pub(crate) end: f64,
    /// Tokens that were not computed.
    pub(crate) cached: u32,
}

#[derive(Deserialize)]
struct Answers<T> {
    answers: Vec<T>,
}

#[derive(Deserialize)]
struct Runs {
    runs: Vec<Vec<EngineStep>>,
}

#[derive(Deserialize)]
struct Refusal {
    error: String,
}

/// A running engine process.
pub(crate) struct Engine {
    conversation: Conversation,
    log: PathBuf,
    pub(crate) description: Description,
}

impl Engine {
    /// Starts an engine with the connector to an agent's socket. Files are in `folder`.
    pub(crate) fn start(
        args: &VllmArgs,
        limits: EngineLimits,
        connector: &Value,
        folder: &Path,
    ) -> anyhow::Result<Engine> {
        require_packages(&args.python)?;
        fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
        let (script, log) = (folder.join("measured_engine.py"), folder.join("engine.log"));
        fs::write(&script, SCRIPT).with_context(|| format!("cannot write {}", script.display()))?;
        fs::write(&log, "").with_context(|| format!("cannot write {}", log.display()))?;
        let mut command = Command::new(&args.python);
        // -P keeps the script's folder off the module path.
        command.arg("-P").arg(&script).envs(VARIABLES).stderr(append(&log)?);
        let mut conversation = Conversation::start(command, STOPPED_WITHIN)?;
        let first = json!({
            "settings": settings(args, limits, connector, folder),
            "config": args.model_dir.is_none().then(smollm2_shape),
        });
        let sent = conversation.send(&first.to_string());
        let description = sent.ok().and_then(|()| conversation.receive(READY_WITHIN));
        let description = parsed(description, &log)?;
        Ok(Engine { conversation, log, description })
    }

    /// Runs groups of requests that arrive at once; returns the steps of each group.
    pub(crate) fn steps(&mut self, groups: &[Vec<EngineRequest>]) -> anyhow::Result<Vec<Vec<EngineStep>>> {
        let runs: Vec<Value> = groups.iter().map(|requests| json!({ "requests": requests })).collect();
        Ok(self.ask::<Runs>(&json!({ "do": "steps", "runs": runs }))?.runs)
    }

    /// Serves requests one after another with an empty cache of the engine.
    pub(crate) fn loads(&mut self, requests: &[EngineRequest]) -> anyhow::Result<Vec<LoadAnswer>> {
        Ok(self.ask::<Answers<_>>(&json!({ "do": "loads", "requests": requests }))?.answers)
    }

    /// Serves requests that arrive at their times, beginning with an empty cache of the engine.
    pub(crate) fn serve(&mut self, requests: &[EngineRequest]) -> anyhow::Result<Vec<ServeAnswer>> {
        let answers: Vec<ServeAnswer> =
            self.ask::<Answers<_>>(&json!({ "do": "serve", "requests": requests }))?.answers;
        ensure!(answers.len() == requests.len(), "the engine did not answer all requests");
        Ok(answers)
    }

    /// Ends saves that the engine has begun.
    pub(crate) fn finish_saves(&mut self) -> anyhow::Result<()> {
        self.serve(&[]).map(drop)
    }

    fn ask<T: DeserializeOwned>(&mut self, command: &Value) -> anyhow::Result<T> {
        let sent = self.conversation.send(&command.to_string());
        parsed(sent.ok().and_then(|()| self.conversation.receive(ANSWER_WITHIN)), &self.log)
    }
}

/// Parses an answer; without one, the engine has failed.
fn parsed<T: DeserializeOwned>(line: Option<String>, log: &Path) -> anyhow::Result<T> {
    let line = line.unwrap_or_else(|| json!({ "error": "it exited or was silent" }).to_string());
    if let Ok(Refusal { error }) = serde_json::from_str(&line) {
        let text = fs::read_to_string(log).unwrap_or_default();
        let skipped = text.chars().count().saturating_sub(TAIL_CHARACTERS);
        let tail: String = text.chars().skip(skipped).collect();
        bail!("the engine failed: {error}; end of its log {}:\n{tail}", log.display());
    }
    serde_json::from_str(&line).with_context(|| format!("invalid answer of the engine: {line}"))
}

fn require_packages(python: &Path) -> anyhow::Result<()> {
    let status = Command::new(python).args(["-P", "-c", PACKAGES]).stderr(Stdio::null()).status();
    ensure!(
        status.is_ok_and(|status| status.success()),
        "{} has no packages vllm and reprise: run `python/bench/engine.sh` with this command's arguments in a checkout, \
         which installs vLLM for CPUs (6.4 GB), or pass --python",
        python.display()
    );
    Ok(())
}

fn settings(args: &VllmArgs, limits: EngineLimits, connector: &Value, folder: &Path) -> Value {
    let model = args.model_dir.clone().unwrap_or_else(|| folder.join("model"));
    json!({
        "model": model,
        "load_format": if args.model_dir.is_some() { "auto" } else { "dummy" },
        "skip_tokenizer_init": true,
        "dtype": if has_fast_bf16() { "bfloat16" } else { "float32" },
        "enforce_eager": true,
        "block_size": BLOCK_TOKENS,
        "max_model_len": 4096,
        "max_num_seqs": limits.sequences,
        "max_num_batched_tokens": limits.step_tokens,
        "seed": 1,
        "prefix_caching_hash_algo": "sha256_cbor",
        "kv_transfer_config": {
            "kv_connector": "RepriseConnector",
            "kv_connector_module_path": "reprise.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": connector,
        },
    })
}

/// Configuration of a model with the shape of SmolLM2-135M; steps take the same time with any weights.
fn smollm2_shape() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100_000.0,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": true,
    })
}

/// Whether vLLM computes bf16 fast: without AVX-512, it is a hundred times slower than fp32.
fn has_fast_bf16() -> bool {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let flags = text.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
    flags.split_whitespace().any(|flag| flag == "avx512f")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn python_without_the_packages_is_refused_with_the_script_that_installs_them() {
        for python in ["/nowhere/python3", "false"] {
            let error = require_packages(Path::new(python)).expect_err("no packages").to_string();
            assert!(error.contains(python) && error.contains("python/bench/engine.sh"), "{error}");
        }
    }

    #[test]
    fn answers_of_the_script_are_parsed_and_its_errors_show_the_log() {
        let folder = tempfile::tempdir().expect("a folder");
        let log = folder.path().join("engine.log");
        fs::write(&log, "Traceback of the engine").expect("writable");
        let step = r#"{"runs":[[{"chunks":[[388,512],[1,100]],"seconds":0.5}]]}"#;
        let runs: Runs = parsed(Some(step.to_owned()), &log).expect("valid");
        assert_eq!(runs.runs[0][0].chunks, [(388, 512), (1, 100)]);
        let answer = r#"{"answers":[{"at":0.5,"ttft":0.1,"end":0.7,"cached":640}]}"#;
        let answers: Answers<ServeAnswer> = parsed(Some(answer.to_owned()), &log).expect("valid");
        assert_eq!(answers.answers, [ServeAnswer { ttft: 0.1, end: 0.7, cached: 640 }]);
        for line in [None, Some(r#"{"error":"ValueError: no model"}"#.to_owned())] {
            let error = parsed::<Runs>(line, &log).err().expect("failed").to_string();
            assert!(
                error.contains("the engine failed") && error.contains("Traceback of the engine"),
                "{error}"
            );
        }
    }

    #[test]
    fn default_model_has_random_weights_in_the_shape_of_the_small_one() {
        let args = VllmArgs { python: "python3".into(), model_dir: None, quick: false };
        let limits = EngineLimits { sequences: 16, step_tokens: 512 };
        let settings = settings(&args, limits, &json!({ "socket": "s" }), Path::new("/f"));
        assert_eq!((&settings["load_format"], &settings["model"]), (&json!("dummy"), &json!("/f/model")));
        assert_eq!(settings["kv_transfer_config"]["kv_connector_extra_config"]["socket"], "s");
        let own = VllmArgs { model_dir: Some("/m".into()), ..args };
        assert_eq!(super::settings(&own, limits, &json!({}), Path::new("/f"))["load_format"], "auto");
    }
}
