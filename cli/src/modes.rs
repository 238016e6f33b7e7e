//! `reprise cordon`, `uncordon` and `drain`: what a node is for.
//!
//! Any member sets it, the store keeps it, and the node hears it within about a second. `drain --wait` then looks at what the
//! node says of itself until every durable block is somewhere else as well.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use reprise_policy::Interval;
use reprise_proto::controlplane::membership_client::MembershipClient;
use reprise_proto::controlplane::placement_client::PlacementClient;
use reprise_proto::controlplane::{DrainProgress, ListNodesRequest, NodeInfo, NodeMode, SetNodeRequest};
use serde::Serialize;
use tonic::Code;
use tonic::transport::{Channel, Endpoint};

use crate::cluster::ClusterFile;
use crate::config::Config;
use crate::output::{Audience, bytes_text};

/// Bound on one member's answer.
const ANSWERED_WITHIN: Duration = Duration::from_secs(5);
/// Nodes report once a second; twice as often shows each report within half of one.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// So long nothing need be heard of a drain: members start anew, agents too, and a mode takes a moment to reach all members.
const HEARD_WITHIN: Duration = Duration::from_secs(30);
/// Waiting without a bound is said again at least so often.
const SAY_EVERY: Duration = Duration::from_secs(10);

/// Arguments of `reprise cordon`, `reprise uncordon` and `reprise forget`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ModeArgs {
    /// The node's name.
    #[arg(value_name = "NODE")]
    pub(crate) node: String,
    /// A member's gRPC address, `host:port` [default: those of the running cluster].
    #[arg(long, value_name = "ADDRESS")]
    controlplane: Option<String>,
    /// Directory of the running cluster [default: the demo's].
    #[arg(long, value_name = "DIR")]
    cluster: Option<PathBuf>,
}

/// Arguments of `reprise drain`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct DrainArgs {
    #[command(flatten)]
    mode: ModeArgs,
    /// Return when every durable block of the node is on another one as well, or fail after this time.
    #[arg(long, value_name = "DURATION", num_args = 0..=1, require_equals = true)]
    wait: Option<Option<Interval>>,
}

/// What was set, for programs.
#[derive(Debug, Serialize)]
struct Set<'a> {
    node: &'a str,
    mode: &'static str,
    before: &'static str,
}

/// How far a drain is, for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Drain {
    drained: bool,
    walked_blocks: u64,
    durable_blocks: u64,
    moved_bytes: u64,
    nowhere_blocks: u64,
}

/// The same with whose it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Progress {
    node: String,
    #[serde(flatten)]
    drain: Drain,
}

/// How long a drain has not been heard of.
#[derive(Debug)]
struct Patience {
    heard: Instant,
}

/// What a look at a draining node shows.
#[derive(Debug, PartialEq, Eq)]
enum Look {
    /// It has not said anything about the drain yet.
    Unheard,
    /// It is at it.
    Draining(Progress),
    /// All of it is somewhere else as well.
    Drained(Progress),
}

/// `reprise cordon`.
pub(crate) fn cordon(args: &ModeArgs, config: &Config, audience: Audience) -> anyhow::Result<()> {
    runtime()?.block_on(set(&addresses(args, config)?, &args.node, NodeMode::Cordoned, audience))
}

/// `reprise uncordon`.
pub(crate) fn uncordon(args: &ModeArgs, config: &Config, audience: Audience) -> anyhow::Result<()> {
    runtime()?.block_on(set(&addresses(args, config)?, &args.node, NodeMode::Active, audience))
}

/// `reprise drain`.
pub(crate) fn drain(args: &DrainArgs, config: &Config, audience: Audience) -> anyhow::Result<()> {
    let (addresses, node) = (addresses(&args.mode, config)?, &args.mode.node);
    runtime()?.block_on(async {
        set(&addresses, node, NodeMode::Draining, audience).await?;
        match args.wait {
            None => {
                audience.say(format!(
                    "`reprise status` shows how far it is; `reprise uncordon {node}` takes it back"
                ));
                Ok(())
            }
            Some(bound) => wait(&addresses, node, bound.map(|bound| bound.0), audience).await,
        }
    })
}

/// What a mode is called.
pub(crate) fn mode_name(mode: NodeMode) -> &'static str {
    match mode {
        NodeMode::Unspecified => "unknown",
        NodeMode::Active => "active",
        NodeMode::Cordoned => "cordoned",
        NodeMode::Draining => "draining",
    }
}

/// How far a drain is, in words.
pub(crate) fn drain_text(drain: &Drain) -> String {
    if drain.drained {
        return format!("drained, {} given away", bytes_text(drain.moved_bytes));
    }
    let mut text = format!(
        "{} of {} blocks walked, {} given away",
        drain.walked_blocks,
        drain.durable_blocks,
        bytes_text(drain.moved_bytes)
    );
    if drain.nowhere_blocks > 0 {
        text.push_str(&format!(", {} have nowhere to go", drain.nowhere_blocks));
    }
    text
}

/// For calls, one after the other.
pub(crate) fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?)
}

/// Where members are.
pub(crate) fn addresses(args: &ModeArgs, config: &Config) -> anyhow::Result<Vec<String>> {
    ClusterFile::members_of(args.controlplane.as_ref(), args.cluster.as_deref(), config)
}

/// Sets the mode at the first member that can.
async fn set(addresses: &[String], node: &str, mode: NodeMode, audience: Audience) -> anyhow::Result<()> {
    let mut outcome = Err(anyhow::anyhow!("the cluster has no member of the control plane"));
    for address in addresses {
        outcome = set_at(address, node, mode).await;
        if outcome.is_ok() {
            break;
        }
    }
    let before = mode_name(outcome?.map_err(anyhow::Error::msg)?);
    let mode = mode_name(mode);
    audience.emit(&Set { node, mode, before });
    audience.say(if mode == before {
        format!("{node} is {mode} already")
    } else {
        format!("{node} is {mode} now; it was {before}")
    });
    Ok(())
}

/// The mode before, or why no member will do it; an error when this one cannot.
async fn set_at(address: &str, node: &str, mode: NodeMode) -> anyhow::Result<Result<NodeMode, String>> {
    let mut placement = PlacementClient::new(channel(address).await?);
    let request = SetNodeRequest { name: node.to_owned(), mode: mode.into() };
    match placement.set_node(request).await {
        Ok(reply) => Ok(Ok(NodeMode::try_from(reply.into_inner().before).unwrap_or_default())),
        Err(status) if matches!(status.code(), Code::NotFound | Code::InvalidArgument) => {
            Ok(Err(status.message().to_owned()))
        }
        Err(status) => bail!("{address} has not set the mode of {node}: {}", status.message()),
    }
}

/// A channel to a member.
pub(crate) async fn channel(address: &str) -> anyhow::Result<Channel> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))
        .with_context(|| format!("{address} is no host:port"))?
        .connect_timeout(ANSWERED_WITHIN)
        .timeout(ANSWERED_WITHIN);
    endpoint.connect().await.with_context(|| format!("cannot reach the control plane at {address}"))
}

/// Looks until the node has given everything away.
async fn wait(
    addresses: &[String],
    node: &str,
    bound: Option<Duration>,
    audience: Audience,
) -> anyhow::Result<()> {
    let (started, mut said) = (Instant::now(), None);
    let mut patience = Patience { heard: started };
    loop {
        let looked = nodes(addresses).await.and_then(|nodes| look(&nodes, node));
        let look = patience.judge(node, looked, Instant::now())?;
        let elapsed = started.elapsed();
        if let Look::Draining(progress) | Look::Drained(progress) = &look {
            let due = |(last, at): &(Progress, Instant)| last != progress || at.elapsed() >= SAY_EVERY;
            if said.as_ref().is_none_or(due) {
                audience.emit(progress);
                audience.say(format!("{node}: {}", drain_text(&progress.drain)));
                said = Some((progress.clone(), Instant::now()));
            }
        }
        if let Look::Drained(_) = look {
            return Ok(());
        }
        if let Some(bound) = bound.filter(|bound| elapsed >= *bound) {
            bail!("{}", not_drained(node, &look, bound));
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// Why a drain has not ended in time, and what to do.
fn not_drained(node: &str, look: &Look, bound: Duration) -> String {
    match look {
        Look::Draining(Progress { drain, .. }) if drain.nowhere_blocks > 0 => format!(
            "{node} is not drained after {bound:?}: {} of its blocks have nowhere to go, because every other node is full, \
             cordoned, draining or away. Add a node, take one back with `reprise uncordon`, or lose them with the node: \
             they are computed again",
            drain.nowhere_blocks
        ),
        _ => {
            format!("{node} is not drained after {bound:?}; it goes on: wait longer, or see `reprise status`")
        }
    }
}

/// The nodes as the first member that answers names them.
async fn nodes(addresses: &[String]) -> anyhow::Result<Vec<NodeInfo>> {
    let mut outcome = Err(anyhow::anyhow!("the cluster has no member of the control plane"));
    for address in addresses {
        outcome = async {
            let mut membership = MembershipClient::new(channel(address).await?);
            let listed = membership.list_nodes(ListNodesRequest {}).await;
            Ok(listed.with_context(|| format!("{address} does not list the nodes"))?.into_inner().nodes)
        }
        .await;
        if outcome.is_ok() {
            break;
        }
    }
    outcome
}

/// What the list of nodes says of a draining one.
fn look(nodes: &[NodeInfo], name: &str) -> anyhow::Result<Look> {
    let node = nodes.iter().find(|node| node.name == name);
    let node = node.with_context(|| format!("{name} is not on the list of nodes any more"))?;
    let mode = NodeMode::try_from(node.mode).unwrap_or_default();
    ensure!(
        mode == NodeMode::Draining,
        "{name} is {} now: somebody has taken it back while it drained",
        mode_name(mode)
    );
    ensure!(
        node.alive,
        "{name} is silent: what only it has is lost unless its agent comes back, which then goes on with the drain"
    );
    let Some(drain) = &node.drain else { return Ok(Look::Unheard) };
    let progress = Progress { node: name.to_owned(), drain: Drain::from(drain) };
    Ok(if drain.drained { Look::Drained(progress) } else { Look::Draining(progress) })
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

impl Patience {
    /// What a look says; why the waiting ends, when it is in vain and the last that was not is long ago.
    fn judge(&mut self, node: &str, looked: anyhow::Result<Look>, now: Instant) -> anyhow::Result<Look> {
        if let Ok(Look::Draining(_) | Look::Drained(_)) = looked {
            self.heard = now;
            return looked;
        }
        if now.duration_since(self.heard) < HEARD_WITHIN {
            return Ok(Look::Unheard);
        }
        looked?;
        bail!(
            "{node} has said nothing of its drain for {HEARD_WITHIN:?}: does its agent reach the control plane, and is it of \
             this version?"
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
    fn a_look_says_how_far_the_node_is_or_why_it_will_not_get_there() {
        let seen = |node: NodeInfo| look(&[node], "a");
        assert_eq!(seen(node(NodeMode::Draining, None)).expect("drains"), Look::Unheard);
        let Ok(Look::Draining(progress)) = seen(node(NodeMode::Draining, Some(halfway()))) else {
            panic!("at it")
        };
        assert_eq!((progress.drain.walked_blocks, progress.drain.durable_blocks), (5, 10));
        let done = DrainProgress { drained: true, ..halfway() };
        assert!(matches!(seen(node(NodeMode::Draining, Some(done))), Ok(Look::Drained(_))));
        let taken_back = seen(node(NodeMode::Active, Some(done))).expect_err("taken back");
        assert!(taken_back.to_string().contains("a is active now"), "{taken_back}");
        let silent = NodeInfo { alive: false, ..node(NodeMode::Draining, Some(halfway())) };
        assert!(seen(silent).expect_err("silent").to_string().contains("is silent"));
        assert!(look(&[], "a").is_err());
    }

    #[test]
    fn looks_in_vain_end_the_waiting_only_when_nothing_was_heard_for_long() {
        let started = Instant::now();
        let at = |seconds| started + Duration::from_secs(seconds);
        let seen = |node: NodeInfo| look(&[node], "a");
        let draining = || seen(node(NodeMode::Draining, Some(halfway())));
        let mut patience = Patience { heard: started };
        let mut judge = |looked, seconds| patience.judge("a", looked, at(seconds));
        assert!(matches!(judge(seen(node(NodeMode::Active, None)), 1), Ok(Look::Unheard)), "not seen yet");
        assert!(matches!(judge(Err(anyhow::anyhow!("nobody answers")), 29), Ok(Look::Unheard)));
        assert!(matches!(judge(draining(), 100), Ok(Look::Draining(_))), "heard, however late");
        let silent = || NodeInfo { alive: false, ..node(NodeMode::Draining, Some(halfway())) };
        assert!(
            matches!(judge(seen(silent()), 129), Ok(Look::Unheard)),
            "counted from the last that was heard"
        );
        assert!(judge(seen(silent()), 130).expect_err("for long").to_string().contains("is silent"));
        let unheard = judge(seen(node(NodeMode::Draining, None)), 130).expect_err("for long");
        assert!(unheard.to_string().contains("said nothing of its drain"), "{unheard}");
    }

    #[test]
    fn what_programs_get_of_a_drain_is_one_object() {
        let progress = Progress { node: "a".to_owned(), drain: Drain::from(&halfway()) };
        let object = serde_json::to_value(&progress).expect("JSON");
        assert_eq!((object["node"].as_str(), object["walked_blocks"].as_u64()), (Some("a"), Some(5)));
    }

    #[test]
    fn blocks_that_have_nowhere_to_go_are_said_with_what_to_do() {
        let stuck = DrainProgress { nowhere_blocks: 7, ..halfway() };
        assert_eq!(
            drain_text(&Drain::from(&stuck)),
            "5 of 10 blocks walked, 3.0 MiB given away, 7 have nowhere to go"
        );
        let look = look(&[node(NodeMode::Draining, Some(stuck))], "a").expect("drains");
        let words = not_drained("a", &look, Duration::from_secs(60));
        assert!(
            words.contains("7 of its blocks have nowhere to go") && words.contains("uncordon"),
            "{words}"
        );
        assert!(not_drained("a", &Look::Unheard, Duration::from_secs(60)).contains("goes on"));
    }
}
