//! `reprise events`: what the members of the control plane hold, and every change of it.
//!
//! One stream for each member, found by `ListMembers` and, when it goes on, by `WatchMembers`. A stream that breaks is
//! opened again at the position of the last line, so that nothing is missed; when the member cannot go on from there, it
//! says so with a `snapshot` line, and all that it holds follows. A member that is listed no more is `gone`, after all that it has
//! said: its slots are others' now, which say what is in them. When it comes back it begins with a snapshot.
//!
//! Lines are printed by a task of their own behind a bounded queue: a reader that stops reading stops the streams, never this
//! process's signals.

mod line;
mod snapshot;
mod stream;

use std::collections::BTreeMap;
use std::io::{BufWriter, ErrorKind, Write};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use reprise_proto::controlplane::membership_client::MembershipClient;
use reprise_proto::controlplane::{ListMembersRequest, MemberInfo, MemberList, WatchMembersRequest};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tonic::transport::{Channel, Endpoint};

use crate::cluster::ClusterFile;
use crate::config::Config;
use crate::output::Audience;
use line::{Line, MemberPosition};
pub(crate) use snapshot::{Replicas, snapshot};
use stream::{Extent, MemberStream, Positions};

/// Messages of lines that wait to be printed: 1,024 lines each.
const MESSAGES_MAX: usize = 4;
/// Bound on connecting.
const CONNECTED_WITHIN: Duration = Duration::from_secs(5);
/// A member whose machine is gone without a word is noticed within both.
const KEEP_ALIVE_EVERY: Duration = Duration::from_secs(10);
const KEEP_ALIVE_ANSWER: Duration = Duration::from_secs(5);
/// Bound on all that one member holds, when that is wanted at once: ten million replicas take seconds.
const CURRENT_WITHIN: Duration = Duration::from_secs(60);
/// Pause before something that failed is tried again.
const RETRY_AFTER: Duration = Duration::from_millis(500);

/// Arguments of `reprise events`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct EventsArgs {
    /// A member's gRPC address, `host:port` [default: that of the running cluster].
    #[arg(long, value_name = "ADDRESS")]
    controlplane: Option<String>,
    /// Directory of the running cluster [default: the demo's].
    #[arg(long, value_name = "DIR")]
    cluster: Option<PathBuf>,
    /// Go on with changes until interrupted.
    #[arg(long)]
    follow: bool,
    /// Go on from a line's position, MEMBER@LOG:NUMBER, instead of a snapshot of that member; once for each member.
    #[arg(long, value_name = "POSITION")]
    from: Vec<MemberPosition>,
}

/// The streams that are open, by the name of their member.
struct Streams {
    members: BTreeMap<String, Open>,
    positions: Positions,
    lines: mpsc::Sender<Vec<Line>>,
    extent: Extent,
}

/// A stream.
struct Open {
    /// Of its member.
    address: String,
    task: JoinHandle<anyhow::Result<()>>,
}

/// `reprise events`.
pub(crate) fn command(args: &EventsArgs, config: &Config, audience: Audience) -> anyhow::Result<()> {
    let addresses = ClusterFile::members_of(args.controlplane.as_ref(), args.cluster.as_deref(), config)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let ended = runtime.block_on(async {
        let (mut terminate, mut interrupt) =
            (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        let (lines, printed) = mpsc::channel(MESSAGES_MAX);
        let mut printer = tokio::spawn(print(printed, audience));
        tokio::select! {
            ended = tell(args, &addresses, lines) => ended?,
            _ = terminate.recv() => return Ok(()),
            _ = interrupt.recv() => return Ok(()),
            // Nobody reads any more.
            ended = &mut printer => return ended?,
        }
        printer.await?
    });
    // A line that nobody reads must not keep the process.
    runtime.shutdown_background();
    ended
}

/// Prints lines until there are no more, or nobody reads them.
async fn print(mut lines: mpsc::Receiver<Vec<Line>>, audience: Audience) -> anyhow::Result<()> {
    let mut output = BufWriter::new(std::io::stdout());
    while let Some(message) = lines.recv().await {
        let written = message.iter().try_for_each(|line| writeln!(output, "{}", line.text(audience)));
        match written.and_then(|()| if lines.is_empty() { output.flush() } else { Ok(()) }) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(()),
            Err(error) => return Err(error).context("cannot write to standard output"),
        }
    }
    output.flush().context("cannot write to standard output")
}

/// Sends the lines of all members; ends when all are current, or never.
async fn tell(args: &EventsArgs, addresses: &[String], lines: mpsc::Sender<Vec<Line>>) -> anyhow::Result<()> {
    let (address, list) = first_list(addresses).await?;
    let address = address.as_str();
    let mut streams = Streams {
        members: BTreeMap::new(),
        positions: Positions::new(&args.from),
        lines,
        extent: if args.follow { Extent::ForEver } else { Extent::UntilCurrent },
    };
    streams.set(&members(list, address)).await?;
    if args.follow {
        return streams.follow(address).await;
    }
    for open in std::mem::take(&mut streams.members).into_values() {
        open.task.await??;
    }
    Ok(())
}

impl Streams {
    /// One stream for each of these members: those that are new, or elsewhere, are opened, those of others closed.
    async fn set(&mut self, members: &[MemberInfo]) -> anyhow::Result<()> {
        let is_listed = |name: &str, open: &Open| {
            members.iter().any(|member| member.name == name && member.address == open.address)
        };
        let closed: Vec<String> = self
            .members
            .iter()
            .filter(|(name, open)| !is_listed(name, open))
            .map(|(name, _)| name.clone())
            .collect();
        for name in closed {
            let Some(open) = self.members.remove(&name) else { continue };
            open.end().await;
            if !members.iter().any(|member| member.name == name) {
                self.positions.forget(&name);
                self.lines.send(vec![Line::gone(name)]).await.context("nobody reads the lines any more")?;
            }
        }
        for member in members {
            if !self.members.contains_key(&member.name) {
                let stream = MemberStream::new(member, self.positions.clone(), self.lines.clone());
                let task = tokio::spawn(stream.run(self.extent));
                self.members.insert(member.name.clone(), Open { address: member.address.clone(), task });
            }
        }
        Ok(())
    }

    /// Follows the members for ever, whichever of them says who they are.
    async fn follow(&mut self, address: &str) -> anyhow::Result<()> {
        loop {
            let known = self.members.values().map(|open| open.address.clone());
            let addresses: Vec<String> = std::iter::once(address.to_owned()).chain(known).collect();
            for of in addresses {
                if let Err(error) = self.follow_members(&of).await {
                    tracing::debug!(
                        address = of,
                        error = format!("{error:#}"),
                        "the list of members is lost"
                    );
                }
            }
            tokio::time::sleep(RETRY_AFTER).await;
        }
    }

    async fn follow_members(&mut self, address: &str) -> anyhow::Result<()> {
        let mut lists = MembershipClient::new(connect(address).await?)
            .watch_members(WatchMembersRequest {})
            .await
            .context("watching members")?
            .into_inner();
        while let Some(list) = lists.message().await? {
            // A member that has just started, or lost its store, knows nobody yet.
            if !list.members.is_empty() {
                self.set(&members(list, address)).await?;
            }
        }
        Ok(())
    }
}

impl Open {
    /// Returns when no more lines come of it.
    async fn end(self) {
        self.task.abort();
        // It was cancelled, or had ended by itself and said why.
        drop(self.task.await);
    }
}

async fn connect(address: &str) -> anyhow::Result<Channel> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))
        .with_context(|| format!("'{address}' is no host:port"))?
        .connect_timeout(CONNECTED_WITHIN)
        .http2_keep_alive_interval(KEEP_ALIVE_EVERY)
        .keep_alive_timeout(KEEP_ALIVE_ANSWER);
    endpoint.connect().await.with_context(|| format!("cannot reach the control plane at {address}"))
}

/// What the first member that answers lists, and where it has; the error is the last one's.
async fn first_list(addresses: &[String]) -> anyhow::Result<(String, MemberList)> {
    let mut outcome = Err(anyhow::anyhow!("the cluster has no member of the control plane"));
    for address in addresses {
        outcome = list(address).await.map(|list| (address.clone(), list));
        if outcome.is_ok() {
            break;
        }
    }
    outcome
}

async fn list(address: &str) -> anyhow::Result<MemberList> {
    let answer = async {
        let mut membership = MembershipClient::new(connect(address).await?);
        Ok(membership.list_members(ListMembersRequest {}).await.context("listing members")?.into_inner())
    };
    tokio::time::timeout(CONNECTED_WITHIN, answer).await.with_context(|| {
        format!("the control plane at {address} did not answer within {CONNECTED_WITHIN:?}")
    })?
}

/// The members: the one that was asked at the address at which it answered, which may lead through a tunnel, and alone
/// when it knows of nobody since its store is away.
fn members(list: MemberList, asked: &str) -> Vec<MemberInfo> {
    let MemberList { answering, mut members, .. } = list;
    if members.is_empty() {
        return vec![MemberInfo { name: answering, address: asked.to_owned(), ..MemberInfo::default() }];
    }
    if let Some(member) = members.iter_mut().find(|member| member.name == answering) {
        member.address = asked.to_owned();
    }
    members
}

#[cfg(test)]
mod tests {
    use reprise_proto::controlplane::Position;

    use super::*;

    #[tokio::test]
    async fn a_member_that_is_listed_no_more_is_gone_and_one_that_has_moved_is_not() {
        // Nobody is there: the streams try on and say nothing.
        let member = |name: &str, port: u16| MemberInfo {
            name: name.to_owned(),
            address: format!("127.0.0.1:{port}"),
            incarnation: 1,
            ..MemberInfo::default()
        };
        let (lines, mut printed) = mpsc::channel(MESSAGES_MAX);
        let position = |member: &str| MemberPosition {
            member: member.to_owned(),
            position: Position { log: 1, next: 2 },
        };
        let positions = Positions::new(&["a", "b", "c"].map(position));
        let mut streams = Streams { members: BTreeMap::new(), positions, lines, extent: Extent::ForEver };
        streams.set(&[member("a", 1), member("b", 1), member("c", 1)]).await.expect("read");
        streams.set(&[member("a", 1), member("c", 2)]).await.expect("read");
        assert_eq!(printed.try_recv().expect("a line"), [Line::gone("b".to_owned())]);
        assert!(printed.try_recv().is_err(), "nothing else");
        assert_eq!(streams.members.keys().collect::<Vec<_>>(), ["a", "c"]);
        let known = ["a", "b", "c"].map(|name| streams.positions.get(name).is_some());
        assert_eq!(known, [true, false, true], "who is gone begins with a snapshot when it comes back");
        streams.set(&[]).await.expect("read");
    }

    #[test]
    fn the_member_that_was_asked_is_followed_where_it_answered() {
        let member = |name: &str| MemberInfo {
            name: name.to_owned(),
            address: format!("{name}:1"),
            incarnation: 1,
            ..MemberInfo::default()
        };
        let list = |members: &[&str]| MemberList {
            answering: "a".to_owned(),
            members: members.iter().map(|name| member(name)).collect(),
            ..MemberList::default()
        };
        let addresses = |list: MemberList| -> Vec<String> {
            members(list, "here:2").into_iter().map(|member| member.address).collect()
        };
        assert_eq!(addresses(list(&["a", "b"])), ["here:2", "b:1"]);
        assert_eq!(addresses(list(&[])), ["here:2"], "alone, without its store");
        assert_eq!(addresses(list(&["b"])), ["b:1"]);
    }
}
