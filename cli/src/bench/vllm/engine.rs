//! A vLLM engine in a process of its own (`python/bench/vllm_engine.py`), spoken to by lines of JSON.
//!
//! It ends with its standard input: kindly when it is stopped, and by itself when this program has gone.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::process::{Pid, Signal, kill_process_group};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

/// Imports, the model and its memory: 15 s, and ten times that on a machine with as much else to do.
const READY_WITHIN: Duration = Duration::from_secs(600);

/// Some prompts of seconds each.
const ANSWER_WITHIN: Duration = Duration::from_secs(300);

/// From the end of its input to its own.
const STOPPED_WITHIN: Duration = Duration::from_secs(60);

/// How long a prompt may take to be found after it was computed, in seconds.
const SETTLED_WITHIN_S: f64 = 30.0;

/// Characters of a log that are told when an engine fails.
const TAIL_CHARACTERS: usize = 3000;

/// What an engine needs from its surroundings.
#[derive(Clone, Debug)]
pub(super) struct Surroundings {
    /// Python of the environment it runs in.
    pub(super) python: PathBuf,
    /// The driver.
    pub(super) script: PathBuf,
    /// Folders in which Python looks for modules.
    pub(super) modules: Vec<PathBuf>,
    /// Further variables.
    pub(super) variables: Vec<(&'static str, String)>,
    /// A process whose network namespace is the engine's, too.
    pub(super) network_of: Option<u32>,
    /// Where its words go.
    pub(super) log: PathBuf,
}

/// Variables of every engine: its cache has a GiB, all cores compute, and nobody is asked anything over a network.
const VARIABLES: [(&str, &str); 6] = [
    ("VLLM_CPU_KVCACHE_SPACE", "1"),
    ("VLLM_CPU_NUM_OF_RESERVED_CPU", "0"),
    ("HF_HUB_OFFLINE", "1"),
    ("TRANSFORMERS_OFFLINE", "1"),
    ("VLLM_NO_USAGE_STATS", "1"),
    ("VLLM_HOST_IP", "127.0.0.1"),
];

/// An answer to one prompt.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(super) struct Answer {
    /// From its submission to its first token.
    pub(super) ttft_ms: f64,
    /// From its submission to its last token.
    pub(super) ttlt_ms: f64,
    pub(super) tokens: Vec<u32>,
    /// Tokens of the prompt that were not computed.
    pub(super) cached: u64,
}

#[derive(Deserialize)]
struct Answers {
    answers: Vec<Answer>,
}

/// Prompts that were computed, and the same ones from the engine's own cache.
#[derive(Deserialize)]
pub(super) struct Twice {
    pub(super) answers: Vec<Answer>,
    pub(super) again: Vec<Answer>,
}

#[derive(Deserialize)]
struct Refusal {
    error: String,
}

/// A running engine.
pub(super) struct Engine {
    child: Child,
    requests: Option<ChildStdin>,
    answers: Receiver<String>,
    log: PathBuf,
}

impl Engine {
    /// Starts one and waits until it is ready; `first` is the model and the engine's settings.
    pub(super) fn start(surroundings: &Surroundings, first: &Value) -> anyhow::Result<Engine> {
        Engine::launch(surroundings, first)?.ready()
    }

    /// Starts one without waiting for it, so that another one can be started meanwhile: while nothing is measured.
    pub(super) fn launch(surroundings: &Surroundings, first: &Value) -> anyhow::Result<Engine> {
        let log = fs::File::options()
            .create(true)
            .append(true)
            .open(&surroundings.log)
            .with_context(|| format!("cannot write {}", surroundings.log.display()))?;
        let mut child = command(surroundings)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log)
            // Its children end with it whatever happens.
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {}", surroundings.python.display()))?;
        let output = BufReader::new(child.stdout.take().expect("piped above"));
        let (sender, answers) = sync_channel(1);
        std::thread::spawn(move || {
            output.lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
        let requests = child.stdin.take();
        let mut engine = Engine { child, requests, answers, log: surroundings.log.clone() };
        engine.send(first)?;
        Ok(engine)
    }

    /// Waits until it can be asked, after [`Engine::launch`].
    pub(super) fn ready(self) -> anyhow::Result<Engine> {
        let _: Value = self.hear(READY_WITHIN)?;
        Ok(self)
    }

    /// Its process, which has started all others of it.
    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Answers to prompts one after the other, each with an empty cache of the engine's own.
    pub(super) fn measure(&mut self, seeds: &[u64], tokens: u64) -> anyhow::Result<Vec<Answer>> {
        self.answers(&json!({ "do": "measure", "seeds": seeds, "tokens": tokens }))
    }

    /// Answers to prompts one after the other, each with an empty cache of the engine's own, and at once again from that cache.
    pub(super) fn own_cache(&mut self, seeds: &[u64], tokens: u64) -> anyhow::Result<Twice> {
        self.send(&json!({ "do": "own_cache", "seeds": seeds, "tokens": tokens }))?;
        self.hear(ANSWER_WITHIN)
    }

    /// Answers to prompts without a pause between them.
    pub(super) fn back_to_back(&mut self, seeds: &[u64], tokens: u64) -> anyhow::Result<Vec<Answer>> {
        self.answers(&json!({ "do": "back_to_back", "seeds": seeds, "tokens": tokens }))
    }

    /// Waits until prompts are found outside the engine, as far as they ever are.
    pub(super) fn settle(&mut self, seeds: &[u64], tokens: u64, cached: u64) -> anyhow::Result<()> {
        let question = json!({
            "do": "settle", "seeds": seeds, "tokens": tokens, "cached": cached, "within": SETTLED_WITHIN_S,
        });
        self.send(&question)?;
        let patience = ANSWER_WITHIN + Duration::from_secs_f64(SETTLED_WITHIN_S) * seeds.len() as u32;
        self.hear::<Value>(patience)?;
        Ok(())
    }

    fn answers(&mut self, question: &Value) -> anyhow::Result<Vec<Answer>> {
        self.send(question)?;
        Ok(self.hear::<Answers>(ANSWER_WITHIN)?.answers)
    }

    fn send(&mut self, question: &Value) -> anyhow::Result<()> {
        let requests = self.requests.as_mut().expect("taken only when dropped");
        // An engine that has ended says why in its log.
        writeln!(requests, "{question}").or_else(|_| self.failed("has ended"))
    }

    fn hear<T: DeserializeOwned>(&self, within: Duration) -> anyhow::Result<T> {
        let Ok(line) = self.answers.recv_timeout(within) else {
            let how = format!("has ended, or has not answered within {within:?} (see --prompt-tokens)");
            return self.failed(&how);
        };
        if let Ok(Refusal { error }) = serde_json::from_str(&line) {
            return self.failed(&error);
        }
        serde_json::from_str(&line).with_context(|| format!("the engine has said {line}"))
    }

    fn failed<T>(&self, what: &str) -> anyhow::Result<T> {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        let skipped = log.chars().count().saturating_sub(TAIL_CHARACTERS);
        let tail: String = log.chars().skip(skipped).collect();
        bail!("the engine: {what}; the end of its log {}:\n{tail}", self.log.display())
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        drop(self.requests.take());
        let give_up = Instant::now() + STOPPED_WITHIN;
        while Instant::now() < give_up && !matches!(self.child.try_wait(), Ok(Some(_))) {
            std::thread::sleep(Duration::from_millis(20));
        }
        // Workers of an engine that did not end well would go on for ever.
        let group = Pid::from_child(&self.child);
        if let Err(error) = kill_process_group(group, Signal::KILL) {
            tracing::debug!(%error, "nothing of the engine is left");
        }
        drop(self.child.wait());
    }
}

fn command(surroundings: &Surroundings) -> Command {
    let mut command = match surroundings.network_of {
        Some(pid) => {
            let mut command = Command::new("nsenter");
            command.args(["--target", &pid.to_string(), "--net", "--"]).arg(&surroundings.python);
            command
        }
        None => Command::new(&surroundings.python),
    };
    // Not the driver's own folder, whose names are not the modules' that vLLM means.
    command.arg("-P").arg(&surroundings.script);
    command.env("PYTHONPATH", joined(&surroundings.modules)).envs(VARIABLES);
    command.envs(surroundings.variables.iter().map(|(name, value)| (name, value)));
    command
}

fn joined(folders: &[PathBuf]) -> String {
    let folders: Vec<_> = folders.iter().map(|folder: &PathBuf| Path::to_string_lossy(folder)).collect();
    folders.join(":")
}
