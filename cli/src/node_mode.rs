//! `reprise cordon`, `uncordon` and `drain`: set the mode of a node.
//!
//! Any member can set the mode. The control plane's store persists it, and the node learns it within about a
//! second. `drain --wait` then polls the node's reports until every durable block also exists on another
//! node.

use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use reprise_policy::Interval;
use reprise_proto::controlplane::membership_client::MembershipClient;
use reprise_proto::controlplane::placement_client::PlacementClient;
use reprise_proto::controlplane::{DrainProgress, ListNodesRequest, NodeInfo, NodeMode, SetNodeRequest};
use reprise_proto::dial::cause;
use serde::Serialize;
use tonic::Code;

use crate::config::Config;
use crate::members::{Members, MembersArgs, first_answer, runtime};
use reprise_testkit::output::{Audience, bytes_text};

/// Poll interval of `drain --wait`. Nodes report once per second, so each report is seen within half a
/// second.
const POLL_EVERY: Duration = Duration::from_millis(500);
/// Longest time without a report of the drain. Members and agents may restart, and a new mode takes time to
/// reach all members.
const REPORTED_WITHIN: Duration = Duration::from_secs(30);
/// Unchanged progress is printed again at this interval.
const PRINT_EVERY: Duration = Duration::from_secs(10);

/// Arguments of `reprise cordon`, `reprise uncordon` and `reprise forget`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ModeArgs {
    /// Name of the node.
    #[arg(value_name = "NODE")]
    pub(crate) node: String,
    #[command(flatten)]
    pub(crate) members: MembersArgs,
}

/// Arguments of `reprise drain`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct DrainArgs {
    #[command(flatten)]
    mode: ModeArgs,
    /// Wait until the node is drained; fail after DURATION, if given.
    ///
    /// A node is drained when each of its durable blocks also exists on another node. The command also fails
    /// if the node does not report its drain for 30 s.
    #[arg(long, value_name = "DURATION", num_args = 0..=1, require_equals = true)]
    wait: Option<Option<Interval>>,
}

/// JSON output of a mode change.
#[derive(Debug, Serialize)]
struct ModeChange<'a> {
    node: &'a str,
    mode: &'static str,
    before: &'static str,
}

/// Progress of a drain in JSON output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Drain {
    drained: bool,
    /// Durable blocks that the drain has checked so far.
    walked_blocks: u64,
    durable_blocks: u64,
    /// Bytes of the blocks copied to other nodes.
    moved_bytes: u64,
    /// Blocks that no other node can take.
    nowhere_blocks: u64,
}

/// Progress of a drain, with the name of the node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Progress {
    node: String,
    #[serde(flatten)]
    drain: Drain,
}

/// Watchdog that fails the wait if no report of the drain arrives for [`REPORTED_WITHIN`].
#[derive(Debug)]
struct Watchdog {
    last_report: Instant,
}

/// State of a draining node, from the list of nodes.
#[derive(Debug, PartialEq, Eq)]
enum DrainState {
    /// The node has not reported progress of the drain yet.
    Unreported,
    /// Blocks remain that exist only on this node.
    Draining(Progress),
    /// Every durable block also exists on another node.
    Drained(Progress),
}

pub(crate) fn cordon(args: &ModeArgs, config: &Config, audience: Audience) -> anyhow::Result<()> {
    runtime()?.block_on(set(&args.members.find(config)?, &args.node, NodeMode::Cordoned, audience))
}

pub(crate) fn uncordon(args: &ModeArgs, config: &Config, audience: Audience) -> anyhow::Result<()> {
    runtime()?.block_on(set(&args.members.find(config)?, &args.node, NodeMode::Active, audience))
}

pub(crate) fn drain(args: &DrainArgs, config: &Config, audience: Audience) -> anyhow::Result<()> {
    let (members, node) = (args.mode.members.find(config)?, &args.mode.node);
    runtime()?.block_on(async {
        set(&members, node, NodeMode::Draining, audience).await?;
        match args.wait {
            None => {
                audience.print_line(format!(
                    "`reprise status` shows the progress; `reprise uncordon {node}` cancels the drain"
                ));
                Ok(())
            }
            Some(bound) => wait(&members, node, bound.map(|bound| bound.0), audience).await,
        }
    })
}

/// Returns the name of a mode in output.
pub(crate) fn mode_name(mode: NodeMode) -> &'static str {
    match mode {
        NodeMode::Unspecified => "unknown",
        NodeMode::Active => "active",
        NodeMode::Cordoned => "cordoned",
        NodeMode::Draining => "draining",
    }
}

/// Formats the progress of a drain.
pub(crate) fn drain_text(drain: &Drain) -> String {
    if drain.drained {
        return format!("drained, {} copied away", bytes_text(drain.moved_bytes));
    }
    let mut text = format!(
        "{} of {} blocks checked, {} copied away",
        drain.walked_blocks,
        drain.durable_blocks,
        bytes_text(drain.moved_bytes)
    );
    if drain.nowhere_blocks > 0 {
        text.push_str(&format!(", no target for {}", drain.nowhere_blocks));
    }
    text
}

/// Sets the mode through the first member that can do so.
async fn set(members: &Members, node: &str, mode: NodeMode, audience: Audience) -> anyhow::Result<()> {
    let outcome = first_answer(members, async |address| set_at(members, address, node, mode).await).await;
    let before = mode_name(outcome?.map_err(anyhow::Error::msg)?);
    let mode = mode_name(mode);
    audience.emit(&ModeChange { node, mode, before });
    audience.print_line(if mode == before {
        format!("{node} is already {mode}")
    } else {
        format!("{node} is now {mode} (before: {before})")
    });
    Ok(())
}

/// Returns the previous mode, or the reason why every member would reject the request.
///
/// # Errors
/// This member cannot process the request, but another may.
async fn set_at(
    members: &Members,
    address: &str,
    node: &str,
    mode: NodeMode,
) -> anyhow::Result<Result<NodeMode, String>> {
    let mut placement = PlacementClient::new(members.channel(address).await?);
    let request = SetNodeRequest { name: node.to_owned(), mode: mode.into() };
    match placement.set_node(request).await {
        Ok(reply) => Ok(Ok(NodeMode::try_from(reply.into_inner().before).unwrap_or_default())),
        Err(status)
            if matches!(status.code(), Code::NotFound | Code::InvalidArgument | Code::PermissionDenied) =>
        {
            Ok(Err(status.message().to_owned()))
        }
        Err(status) => bail!("{address} did not set the mode of {node}: {}", cause(&status)),
    }
}

/// Polls until the node is drained, the time limit expires or reports stop.
async fn wait(
    members: &Members,
    node: &str,
    bound: Option<Duration>,
    audience: Audience,
) -> anyhow::Result<()> {
    let (started, mut printed) = (Instant::now(), None);
    let mut watchdog = Watchdog { last_report: started };
    loop {
        let polled = nodes(members).await.and_then(|nodes| drain_state(&nodes, node));
        let state = watchdog.check(node, polled, Instant::now())?;
        let elapsed = started.elapsed();
        if let DrainState::Draining(progress) | DrainState::Drained(progress) = &state {
            let due = |(last, at): &(Progress, Instant)| last != progress || at.elapsed() >= PRINT_EVERY;
            if printed.as_ref().is_none_or(due) {
                audience.emit(progress);
                audience.print_line(format!("{node}: {}", drain_text(&progress.drain)));
                printed = Some((progress.clone(), Instant::now()));
            }
        }
        if let DrainState::Drained(_) = state {
            return Ok(());
        }
        if let Some(bound) = bound.filter(|bound| elapsed >= *bound) {
            bail!("{}", not_drained(node, &state, bound));
        }
        tokio::time::sleep(POLL_EVERY).await;
    }
}

/// Formats the error of a drain that has exceeded its time limit, with the remedy.
fn not_drained(node: &str, state: &DrainState, bound: Duration) -> String {
    match state {
        DrainState::Draining(Progress { drain, .. }) if drain.nowhere_blocks > 0 => format!(
            "{node} is not drained after {bound:?}: no target for {} blocks, because every other node is full, cordoned, \
             draining or unreachable. Add a node, make one active with `reprise uncordon`, or remove the node anyway: \
             engines then recompute these blocks",
            drain.nowhere_blocks
        ),
        _ => {
            format!("{node} is not drained after {bound:?}; the drain continues: see `reprise status`")
        }
    }
}

/// Returns the nodes that the first answering member lists.
async fn nodes(members: &Members) -> anyhow::Result<Vec<NodeInfo>> {
    first_answer(members, async |address| {
        let mut membership = MembershipClient::new(members.channel(address).await?);
        let listed = membership.list_nodes(ListNodesRequest {}).await;
        Ok(listed.with_context(|| format!("cannot list the nodes of {address}"))?.into_inner().nodes)
    })
    .await
}

/// Returns the state of a draining node.
///
/// # Errors
/// The node is not listed, is no longer draining, or is dead.
fn drain_state(nodes: &[NodeInfo], name: &str) -> anyhow::Result<DrainState> {
    let node = nodes.iter().find(|node| node.name == name);
    let node = node.with_context(|| format!("{name} is no longer in the list of nodes"))?;
    let mode = NodeMode::try_from(node.mode).unwrap_or_default();
    ensure!(
        mode == NodeMode::Draining,
        "{name} is now {}: its mode was changed during the drain",
        mode_name(mode)
    );
    ensure!(
        node.alive,
        "{name} sends no heartbeats: blocks that exist only there are lost unless its agent returns and resumes the drain"
    );
    let Some(drain) = &node.drain else { return Ok(DrainState::Unreported) };
    let progress = Progress { node: name.to_owned(), drain: Drain::from(drain) };
    Ok(if drain.drained { DrainState::Drained(progress) } else { DrainState::Draining(progress) })
}

impl From<&DrainProgress> for Drain {
    fn from(drain: &DrainProgress) -> Drain {
        Drain {
            drained: drain.drained,
            walked_blocks: drain.walked_blocks,
            durable_blocks: drain.durable_blocks,
            moved_bytes: drain.moved_bytes,
            nowhere_blocks: drain.nowhere_blocks,
        }
    }
}

impl Watchdog {
    /// Returns the polled state. Errors count as unreported until [`REPORTED_WITHIN`] after the last report.
    fn check(
        &mut self,
        node: &str,
        polled: anyhow::Result<DrainState>,
        now: Instant,
    ) -> anyhow::Result<DrainState> {
        if let Ok(DrainState::Draining(_) | DrainState::Drained(_)) = polled {
            self.last_report = now;
            return polled;
        }
        if now.duration_since(self.last_report) < REPORTED_WITHIN {
            return Ok(DrainState::Unreported);
        }
        polled?;
        bail!(
            "{node} has not reported its drain for {REPORTED_WITHIN:?}: check that its agent reaches the control plane and \
             has the same version"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(mode: NodeMode, drain: Option<DrainProgress>) -> NodeInfo {
        NodeInfo { name: "a".to_owned(), alive: true, mode: mode.into(), drain, ..NodeInfo::default() }
    }

    fn halfway() -> DrainProgress {
        DrainProgress {
            walked_blocks: 5,
            durable_blocks: 10,
            moved_bytes: 3 << 20,
            ..DrainProgress::default()
        }
    }

    #[test]
    fn drain_state_is_the_progress_or_an_error_with_the_cause() {
        let state = |node: NodeInfo| drain_state(&[node], "a");
        assert_eq!(state(node(NodeMode::Draining, None)).expect("drains"), DrainState::Unreported);
        let Ok(DrainState::Draining(progress)) = state(node(NodeMode::Draining, Some(halfway()))) else {
            panic!("not draining")
        };
        assert_eq!((progress.drain.walked_blocks, progress.drain.durable_blocks), (5, 10));
        let done = DrainProgress { drained: true, ..halfway() };
        assert!(matches!(state(node(NodeMode::Draining, Some(done))), Ok(DrainState::Drained(_))));
        let cancelled = state(node(NodeMode::Active, Some(done))).expect_err("cancelled");
        assert!(cancelled.to_string().contains("a is now active"), "{cancelled}");
        let dead = NodeInfo { alive: false, ..node(NodeMode::Draining, Some(halfway())) };
        assert!(state(dead).expect_err("dead").to_string().contains("sends no heartbeats"));
        assert!(drain_state(&[], "a").is_err());
    }

    #[test]
    fn wait_fails_only_after_a_long_time_without_a_report() {
        let started = Instant::now();
        let at = |seconds| started + Duration::from_secs(seconds);
        let state = |node: NodeInfo| drain_state(&[node], "a");
        let draining = || state(node(NodeMode::Draining, Some(halfway())));
        let mut watchdog = Watchdog { last_report: started };
        let mut check = |polled, seconds| watchdog.check("a", polled, at(seconds));
        assert!(
            matches!(check(state(node(NodeMode::Active, None)), 1), Ok(DrainState::Unreported)),
            "the mode has not reached the member yet"
        );
        assert!(matches!(check(Err(anyhow::anyhow!("no answer")), 29), Ok(DrainState::Unreported)));
        assert!(matches!(check(draining(), 100), Ok(DrainState::Draining(_))), "a late report counts");
        let dead = || NodeInfo { alive: false, ..node(NodeMode::Draining, Some(halfway())) };
        assert!(
            matches!(check(state(dead()), 129), Ok(DrainState::Unreported)),
            "the time counts from the last report"
        );
        assert!(check(state(dead()), 130).expect_err("for long").to_string().contains("no heartbeats"));
        let unreported = check(state(node(NodeMode::Draining, None)), 130).expect_err("for long");
        assert!(unreported.to_string().contains("not reported its drain"), "{unreported}");
    }

    #[test]
    fn json_progress_of_a_drain_is_one_flat_object() {
        let progress = Progress { node: "a".to_owned(), drain: Drain::from(&halfway()) };
        let object = serde_json::to_value(&progress).expect("JSON");
        assert_eq!((object["node"].as_str(), object["walked_blocks"].as_u64()), (Some("a"), Some(5)));
    }

    #[test]
    fn blocks_without_a_target_are_reported_with_the_remedy() {
        let stuck = DrainProgress { nowhere_blocks: 7, ..halfway() };
        assert_eq!(
            drain_text(&Drain::from(&stuck)),
            "5 of 10 blocks checked, 3.0 MiB copied away, no target for 7"
        );
        let state = drain_state(&[node(NodeMode::Draining, Some(stuck))], "a").expect("drains");
        let words = not_drained("a", &state, Duration::from_secs(60));
        assert!(words.contains("no target for 7 blocks") && words.contains("uncordon"), "{words}");
        assert!(not_drained("a", &DrainState::Unreported, Duration::from_secs(60)).contains("continues"));
    }
}
