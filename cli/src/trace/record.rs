//! `reprise trace record`: writes what agents record to one file.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, ensure};
use reprise_identity::{Expected, Security};
use reprise_policy::Interval;
use reprise_policy::trace::Line;
use reprise_testkit::cluster::ClusterFile;
use reprise_testkit::http::Client;
use reprise_testkit::output::Audience;
use serde::Serialize;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;

use crate::config::Config;
use crate::members::runtime;

/// Time after the end of a recording in which an agent must have sent its last line.
const ENDS_WITHIN: Duration = Duration::from_secs(30);

/// Interval at which recorded calls are written to the file.
const WRITE_EVERY: Duration = Duration::from_secs(1);

/// Arguments of `reprise trace record`.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct RecordArgs {
    /// Record the agent with this admin address (host:port); repeat for several agents.
    ///
    /// Agents answer if their configuration has `admin.trace = true`, and only on their own node: use the address on
    /// loopback. By default the command records all agents of the running cluster.
    #[arg(long, value_name = "ADDRESS")]
    agent: Vec<String>,
    /// Read the agents' addresses from this directory.
    ///
    /// By default the command reads the directory of `reprise demo --hold`.
    #[arg(long, value_name = "DIR")]
    cluster: Option<PathBuf>,
    /// Record for this time, for example 90s or 2h; at most a day. Ctrl-C ends the recording earlier.
    #[arg(long = "for", value_name = "DURATION", default_value = "60s")]
    duration: Interval,
    /// Write the recording to this new file.
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
}

/// Output of `reprise trace record --json`.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Recorded {
    agents: usize,
    calls: u64,
    /// Calls that the agents lost; `null` if the recording was ended early, because agents report it at the end.
    dropped: Option<u64>,
    /// Whether it was ended before its time.
    interrupted: bool,
}

/// The file, and the number of written calls.
struct Sink {
    writer: BufWriter<File>,
    recorded: Recorded,
    /// Number of agents whose recording has not started.
    waiting_for: usize,
    audience: Audience,
}

/// Printed once all agents record: calls from now on are in the recording.
#[derive(Serialize)]
struct Started {
    recording: usize,
}

pub(super) fn command(args: &RecordArgs, config: &Config, audience: Audience) -> anyhow::Result<()> {
    let (agents, security) = match &args.agent[..] {
        [] => {
            let cluster = ClusterFile::read(&config.cluster.directory(args.cluster.as_deref()))?;
            (addresses(&cluster), config.tls.security_for(&cluster)?)
        }
        named => (named.to_vec(), config.tls.security_or(Security::Plain)?),
    };
    // The nodes of named agents are not known.
    let client = Client::new(security, Expected::AnyAgent);
    ensure!(!agents.is_empty(), "the cluster has no agents: name one with --agent");
    let seconds = args.duration.0.as_secs();
    ensure!(seconds > 0, "invalid --for {}: expected at least 1s", args.duration);
    let writer = super::create(&args.out)?;
    let recorded = Recorded { agents: agents.len(), dropped: Some(0), ..Recorded::default() };
    let sink = Arc::new(Mutex::new(Sink { writer, recorded, waiting_for: agents.len(), audience }));
    let outcome = runtime()?.block_on(record(agents, &client, seconds, &sink));
    let mut sink = sink.lock().unwrap_or_else(PoisonError::into_inner);
    sink.writer.flush().with_context(|| format!("cannot write {}", args.out.display()))?;
    if outcome.is_err() && sink.recorded.calls == 0 {
        // So that the command can be repeated.
        let _ = std::fs::remove_file(&args.out);
    }
    let interrupted = outcome.with_context(|| {
        format!("{} has the {} calls recorded so far", args.out.display(), sink.recorded.calls)
    })?;
    sink.recorded.interrupted = interrupted;
    if interrupted {
        sink.recorded.dropped = None;
    }
    let Recorded { calls, dropped, .. } = sink.recorded;
    let lost = match dropped {
        Some(0) => String::new(),
        Some(dropped) => format!("; {dropped} calls were lost: record fewer agents"),
        None => "; ended early, so the number of lost calls is unknown".to_owned(),
    };
    audience.print_line(format!("{calls} calls written to {}{lost}", args.out.display()));
    audience.emit(&sink.recorded);
    Ok(())
}

fn addresses(cluster: &ClusterFile) -> Vec<String> {
    cluster.agents.iter().map(|agent| agent.admin.clone()).collect()
}

/// Records all agents; returns whether a signal ended it. If one fails, the others are recorded to the end.
async fn record(
    agents: Vec<String>,
    client: &Client,
    seconds: u64,
    sink: &Arc<Mutex<Sink>>,
) -> anyhow::Result<bool> {
    let mut recordings = JoinSet::new();
    for agent in agents {
        let (client, sink) = (client.clone(), Arc::clone(sink));
        recordings.spawn(async move {
            let mut has_ended = false;
            let path = format!("/trace/{seconds}");
            let followed = client.follow_lines(&agent, &path, |line| {
                let mut sink = sink.lock().unwrap_or_else(PoisonError::into_inner);
                has_ended |= sink.write(line)?;
                Ok(())
            });
            let limit = Duration::from_secs(seconds).saturating_add(ENDS_WITHIN);
            let followed = tokio::time::timeout(limit, followed).await;
            followed.with_context(|| format!("{agent}: the agent does not end the recording"))??;
            ensure!(has_ended, "{agent}: the agent ended the recording too early");
            Ok(())
        });
    }
    let mut failure = None;
    let mut terminated = signal(SignalKind::terminate()).context("cannot wait for SIGTERM")?;
    let mut write = tokio::time::interval(WRITE_EVERY);
    loop {
        tokio::select! {
            ended = recordings.join_next() => match ended {
                None => return failure.map_or(Ok(false), Err),
                Some(ended) => failure = failure.or(ended.context("recording")?.err()),
            },
            interrupted = tokio::signal::ctrl_c() => {
                interrupted.context("cannot wait for Ctrl-C")?;
                return Ok(true);
            }
            _ = terminated.recv() => return Ok(true),
            _ = write.tick() => {
                sink.lock().unwrap_or_else(PoisonError::into_inner).writer.flush().context("cannot write")?;
            }
        }
    }
}

impl Sink {
    /// Writes a line; returns whether it is the last one of its agent.
    fn write(&mut self, text: &str) -> anyhow::Result<bool> {
        let line: Line = serde_json::from_str(text).context("invalid line of the agent")?;
        self.writer
            .write_all(text.as_bytes())
            .and_then(|()| self.writer.write_all(b"\n"))
            .context("cannot write")?;
        match line {
            Line::Start { .. } => {
                self.waiting_for = self.waiting_for.saturating_sub(1);
                if self.waiting_for == 0 {
                    let agents = self.recorded.agents;
                    self.audience.print_line(format!("Recording {agents} agents; Ctrl-C ends it …"));
                    self.audience.emit(&Started { recording: agents });
                }
                Ok(false)
            }
            Line::Call(_) => {
                self.recorded.calls += 1;
                Ok(false)
            }
            Line::End { dropped, .. } => {
                self.recorded.dropped = self.recorded.dropped.map(|sum| sum + dropped);
                Ok(true)
            }
        }
    }
}
