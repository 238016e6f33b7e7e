//! The reference engine in its own process: reads commands and writes answers, one JSON object per line.
//!
//! The demo and the replay start `reprise engine` once per node and control it through [`EngineProcess`].

use std::collections::BTreeSet;
use std::io::{BufRead, Write};
use std::process::Command;
use std::time::Duration;

use anyhow::Context;
use reprise_policy::BlockKey;
use serde::{Deserialize, Serialize};

use reprise_testkit::engine::{DurableCheck, Engine, EngineSettings, HitCounts, RequestOutcome};
use reprise_testkit::model::hex;
use reprise_testkit::process::Conversation;

/// Time limit from the end of the commands to the exit of the process.
const EXITS_WITHIN: Duration = Duration::from_secs(5);

/// Command to an engine process.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
enum EngineCommand {
    /// Serve a request.
    Run { hash_ids: Vec<u64> },
    /// Wait until all saved blocks are durable.
    Settle,
    /// Load and compare every durable block, from this node alone.
    CheckDurable,
    /// Open a new session: the agent was restarted.
    Reconnect,
    /// Count these blocks on the node, by tier.
    Own { keys: Vec<[u8; BlockKey::SIZE]> },
}

/// Answer of an engine process.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
enum EngineAnswer {
    /// To `run`.
    Served { outcome: RequestOutcome },
    /// To `settle`.
    Settled { durable: u64 },
    /// To `check_durable`.
    Checked { check: DurableCheck },
    /// To `own`.
    Owned { counts: HitCounts },
    /// Connected, at the start and after `reconnect`. The backend moves blocks without the arena, if there is one.
    Connected { backend: Option<String> },
    /// The command failed.
    Failed { message: String },
}

/// Engine process started by this process; it ends when dropped.
#[derive(Debug)]
pub(crate) struct EngineProcess {
    conversation: Conversation,
    backend: Option<String>,
}

impl EngineProcess {
    /// Starts `reprise engine` and waits until it is connected.
    pub(crate) fn start(settings: &EngineSettings) -> anyhow::Result<EngineProcess> {
        let program = std::env::current_exe().context("cannot find the path of this program")?;
        let mut command = Command::new(program);
        command.arg("engine").arg("--socket").arg(&settings.socket);
        command.args(["--layout", &hex(&settings.layout.encode()), "--tenant", settings.tenant.as_str()]);
        command.args(["--engine-path", &settings.path.to_string()]);
        let conversation = Conversation::start(command, EXITS_WITHIN)?;
        let mut process = EngineProcess { conversation, backend: None };
        process.backend = process.connected()?;
        Ok(process)
    }

    /// Returns the name of the backend that moves blocks without the arena; `None` if all take the arena.
    pub(crate) fn backend(&self) -> Option<&str> {
        self.backend.as_deref()
    }

    fn connected(&self) -> anyhow::Result<Option<String>> {
        match self.answer()? {
            EngineAnswer::Connected { backend } => Ok(backend),
            other => Err(unexpected(other)),
        }
    }

    pub(crate) fn run(&mut self, hash_ids: &[u64]) -> anyhow::Result<RequestOutcome> {
        match self.call(&EngineCommand::Run { hash_ids: hash_ids.to_vec() })? {
            EngineAnswer::Served { outcome } => Ok(outcome),
            other => Err(unexpected(other)),
        }
    }

    /// Waits until all saved blocks are durable; returns their number.
    pub(crate) fn await_durable(&mut self) -> anyhow::Result<u64> {
        match self.call(&EngineCommand::Settle)? {
            EngineAnswer::Settled { durable } => Ok(durable),
            other => Err(unexpected(other)),
        }
    }

    /// Loads and compares every durable block, from its node alone.
    pub(crate) fn check_durable(&mut self) -> anyhow::Result<DurableCheck> {
        match self.call(&EngineCommand::CheckDurable)? {
            EngineAnswer::Checked { check } => Ok(check),
            other => Err(unexpected(other)),
        }
    }

    /// Opens a new session.
    pub(crate) fn reconnect(&mut self) -> anyhow::Result<()> {
        self.send(&EngineCommand::Reconnect)?;
        self.backend = self.connected()?;
        Ok(())
    }

    /// Counts these blocks on the node by tier; missing blocks are not counted.
    pub(crate) fn own(&mut self, keys: &BTreeSet<BlockKey>) -> anyhow::Result<HitCounts> {
        match self.call(&EngineCommand::Own { keys: keys.iter().map(|key| key.0).collect() })? {
            EngineAnswer::Owned { counts } => Ok(counts),
            other => Err(unexpected(other)),
        }
    }

    fn call(&mut self, command: &EngineCommand) -> anyhow::Result<EngineAnswer> {
        self.send(command)?;
        self.answer()
    }

    fn send(&mut self, command: &EngineCommand) -> anyhow::Result<()> {
        let line = serde_json::to_string(command).context("encoding an engine command")?;
        self.conversation.send(&line).context("the engine process has ended")
    }

    fn answer(&self) -> anyhow::Result<EngineAnswer> {
        let line = self.conversation.receive(Duration::MAX).context("the engine process ended")?;
        serde_json::from_str(&line)
            .with_context(|| format!("invalid answer of the engine process '{}'", line.trim()))
    }
}

/// `reprise engine`: serves commands from standard input until it ends.
pub(crate) fn serve(settings: &EngineSettings) -> anyhow::Result<()> {
    let mut output = std::io::stdout().lock();
    let mut engine = Engine::connect(settings)?;
    send(&mut output, &EngineAnswer::Connected { backend: engine.backend() })?;
    for line in std::io::stdin().lock().lines() {
        let line = line.context("reading commands")?;
        let command: EngineCommand =
            serde_json::from_str(&line).with_context(|| format!("invalid engine command '{line}'"))?;
        let answer = execute(&mut engine, command)
            .unwrap_or_else(|error| EngineAnswer::Failed { message: format!("{error:#}") });
        send(&mut output, &answer)?;
    }
    Ok(())
}

fn execute(engine: &mut Engine, command: EngineCommand) -> anyhow::Result<EngineAnswer> {
    Ok(match command {
        EngineCommand::Run { hash_ids } => EngineAnswer::Served { outcome: engine.run(&hash_ids)? },
        EngineCommand::Settle => EngineAnswer::Settled { durable: engine.await_durable()? },
        EngineCommand::CheckDurable => EngineAnswer::Checked { check: engine.check_durable()? },
        EngineCommand::Reconnect => {
            engine.reconnect()?;
            EngineAnswer::Connected { backend: engine.backend() }
        }
        EngineCommand::Own { keys } => {
            let keys: Vec<BlockKey> = keys.into_iter().map(BlockKey).collect();
            EngineAnswer::Owned { counts: engine.own(&keys)? }
        }
    })
}

fn send(output: &mut impl Write, answer: &EngineAnswer) -> anyhow::Result<()> {
    let mut line = serde_json::to_string(answer).context("encoding an engine answer")?;
    line.push('\n');
    output.write_all(line.as_bytes()).context("writing an answer")?;
    output.flush().context("writing an answer")
}

fn unexpected(answer: EngineAnswer) -> anyhow::Error {
    match answer {
        EngineAnswer::Failed { message } => anyhow::anyhow!("engine: {message}"),
        other => anyhow::anyhow!("engine: unexpected answer {other:?}"),
    }
}
