//! A vLLM engine in a separate process (`python/bench/vllm_engine.py`), driven by lines of JSON.
//!
//! The process exits when its standard input is closed, also if this program dies.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, bail};
use rustix::process::{Pid, Signal, kill_process_group};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use reprise_testkit::process::{Conversation, append};

/// Time limit of a start: imports and the model take 15 s, and ten times that on a busy machine.
const READY_WITHIN: Duration = Duration::from_secs(600);

/// Time limit of a command: several prompts of seconds each.
const ANSWER_WITHIN: Duration = Duration::from_secs(300);

/// Time limit from the end of the input to the exit of the process.
const STOPPED_WITHIN: Duration = Duration::from_secs(60);

/// Seconds within which a computed prompt must be found in the cache.
const SETTLED_WITHIN_S: f64 = 30.0;

/// Number of characters of the log that an engine's error shows.
const TAIL_CHARACTERS: usize = 3000;

/// Environment of an engine's process.
#[derive(Clone, Debug)]
pub(super) struct EngineEnvironment {
    /// Python interpreter.
    pub(super) python: PathBuf,
    /// Script that drives the engine.
    pub(super) script: PathBuf,
    /// Folders for `PYTHONPATH`.
    pub(super) modules: Vec<PathBuf>,
    /// Further environment variables.
    pub(super) variables: Vec<(&'static str, String)>,
    /// Process whose network namespace the engine shares, if any.
    pub(super) network_of: Option<u32>,
    /// File for standard error.
    pub(super) log: PathBuf,
}

/// Variables of every engine: 1 GiB for its own cache, all cores for computation, no network access.
const VARIABLES: [(&str, &str); 6] = [
    ("VLLM_CPU_KVCACHE_SPACE", "1"),
    ("VLLM_CPU_NUM_OF_RESERVED_CPU", "0"),
    ("HF_HUB_OFFLINE", "1"),
    ("TRANSFORMERS_OFFLINE", "1"),
    ("VLLM_NO_USAGE_STATS", "1"),
    ("VLLM_HOST_IP", "127.0.0.1"),
];

/// Answer to one prompt.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(super) struct Answer {
    /// Milliseconds from submission to the first token.
    pub(super) ttft_ms: f64,
    /// Milliseconds from submission to the last token.
    pub(super) ttlt_ms: f64,
    pub(super) tokens: Vec<u32>,
    /// Number of prompt tokens that were not computed.
    pub(super) cached: u64,
}

#[derive(Deserialize)]
struct Answers {
    answers: Vec<Answer>,
}

/// Answers to computed prompts, and to the same prompts from the engine's own cache.
#[derive(Deserialize)]
pub(super) struct OwnCacheAnswers {
    pub(super) answers: Vec<Answer>,
    pub(super) again: Vec<Answer>,
}

#[derive(Deserialize)]
struct Refusal {
    error: String,
}

/// A running engine process.
pub(super) struct Engine {
    conversation: Conversation,
    log: PathBuf,
}

impl Engine {
    /// Starts an engine and waits until it is ready; `first` has the model and the engine's settings.
    pub(super) fn start(environment: &EngineEnvironment, first: &Value) -> anyhow::Result<Engine> {
        Engine::launch(environment, first)?.ready()
    }

    /// Starts an engine without waiting, so that several can start at once while nothing is measured.
    pub(super) fn launch(environment: &EngineEnvironment, first: &Value) -> anyhow::Result<Engine> {
        let mut command = command(environment);
        // A process group, so that its children can be killed with it.
        command.stderr(append(&environment.log)?).process_group(0);
        let conversation = Conversation::start(command, STOPPED_WITHIN)?;
        let mut engine = Engine { conversation, log: environment.log.clone() };
        engine.send(first)?;
        Ok(engine)
    }

    /// Waits until the engine is ready, after [`Engine::launch`].
    pub(super) fn ready(self) -> anyhow::Result<Engine> {
        let _: Value = self.receive(READY_WITHIN)?;
        Ok(self)
    }

    /// Returns the engine's root process.
    pub(super) fn pid(&self) -> u32 {
        self.conversation.id()
    }

    /// Runs prompts one after the other, each with an empty own cache of the engine.
    pub(super) fn measure(&mut self, seeds: &[u64], tokens: u64) -> anyhow::Result<Vec<Answer>> {
        self.answers(&json!({ "do": "measure", "seeds": seeds, "tokens": tokens }))
    }

    /// Runs each prompt with an empty own cache of the engine, and again from that cache.
    pub(super) fn own_cache(&mut self, seeds: &[u64], tokens: u64) -> anyhow::Result<OwnCacheAnswers> {
        self.send(&json!({ "do": "own_cache", "seeds": seeds, "tokens": tokens }))?;
        self.receive(ANSWER_WITHIN)
    }

    /// Runs prompts back to back, without a pause.
    pub(super) fn back_to_back(&mut self, seeds: &[u64], tokens: u64) -> anyhow::Result<Vec<Answer>> {
        self.answers(&json!({ "do": "back_to_back", "seeds": seeds, "tokens": tokens }))
    }

    /// Waits until the prompts are found in the cache outside the engine, or the time limit expires.
    pub(super) fn await_saved(&mut self, seeds: &[u64], tokens: u64, cached: u64) -> anyhow::Result<()> {
        let command = json!({
            "do": "settle", "seeds": seeds, "tokens": tokens, "cached": cached, "within": SETTLED_WITHIN_S,
        });
        self.send(&command)?;
        let patience = ANSWER_WITHIN + Duration::from_secs_f64(SETTLED_WITHIN_S) * seeds.len() as u32;
        self.receive::<Value>(patience)?;
        Ok(())
    }

    fn answers(&mut self, command: &Value) -> anyhow::Result<Vec<Answer>> {
        self.send(command)?;
        Ok(self.receive::<Answers>(ANSWER_WITHIN)?.answers)
    }

    fn send(&mut self, command: &Value) -> anyhow::Result<()> {
        // If the engine has exited, its log has the reason.
        self.conversation.send(&command.to_string()).or_else(|_| self.failed("it exited"))
    }

    fn receive<T: DeserializeOwned>(&self, within: Duration) -> anyhow::Result<T> {
        let Some(line) = self.conversation.receive(within) else {
            let how = format!("it exited or did not answer within {within:?} (see --prompt-tokens)");
            return self.failed(&how);
        };
        if let Ok(Refusal { error }) = serde_json::from_str(&line) {
            return self.failed(&error);
        }
        serde_json::from_str(&line).with_context(|| format!("invalid answer of the engine: {line}"))
    }

    fn failed<T>(&self, what: &str) -> anyhow::Result<T> {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        let skipped = log.chars().count().saturating_sub(TAIL_CHARACTERS);
        let tail: String = log.chars().skip(skipped).collect();
        bail!("the engine failed: {what}; end of its log {}:\n{tail}", self.log.display())
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.conversation.end();
        // Kill the process group: workers of a crashed engine would run forever.
        let group = i32::try_from(self.conversation.id()).ok().and_then(Pid::from_raw).expect("a process id");
        if let Err(error) = kill_process_group(group, Signal::KILL) {
            tracing::debug!(%error, "no process of the engine is left to kill");
        }
    }
}

fn command(environment: &EngineEnvironment) -> Command {
    let mut command = match environment.network_of {
        Some(pid) => {
            let mut command = Command::new("nsenter");
            command.args(["--target", &pid.to_string(), "--net", "--"]).arg(&environment.python);
            command
        }
        None => Command::new(&environment.python),
    };
    // -P keeps the script's folder off the module path, where its file names would shadow vLLM's modules.
    command.arg("-P").arg(&environment.script);
    command.env("PYTHONPATH", joined(&environment.modules)).envs(VARIABLES);
    command.envs(environment.variables.iter().map(|(name, value)| (name, value)));
    command
}

fn joined(folders: &[PathBuf]) -> String {
    let folders: Vec<_> = folders.iter().map(|folder: &PathBuf| Path::to_string_lossy(folder)).collect();
    folders.join(":")
}
