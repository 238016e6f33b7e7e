//! `reprise events`: prints the replicas in the directories of all control-plane members, and with `--follow`
//! each change.
//!
//! The command opens one stream per member. It finds members by `ListMembers` and, with `--follow`, by
//! `WatchMembers`.
//!
//! * A stream that breaks is reopened at the position of the last line, so that no change is missed. If the
//!   member no longer has that position, it sends a snapshot: a `snapshot` line, then all its replicas.
//! * A member that is no longer listed gets a `gone` line after its last line. Other members own its slots
//!   then and report their replicas. If the member returns, its stream starts with a snapshot.
//!
//! A separate task prints the lines from a bounded queue. A blocked reader therefore stops the streams, but
//! never the handling of signals.

mod line;
mod proxy;
mod snapshot;
mod stream;

use std::collections::BTreeMap;
use std::io::{BufWriter, ErrorKind, Write};
use std::time::Duration;

use anyhow::Context;
use reprise_proto::controlplane::membership_client::MembershipClient;
use reprise_proto::controlplane::{ListMembersRequest, MemberInfo, MemberList, WatchMembersRequest};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tonic::transport::Channel;

use crate::config::Config;
use crate::members::{Members, MembersArgs, endpoint, first_answer};
use line::{Line, MemberPosition};
use reprise_testkit::output::Audience;
pub(crate) use snapshot::{Replicas, snapshot};
use stream::{Extent, MemberStream, Positions};

/// Capacity of the print queue, in messages of at most 1,024 lines.
const MESSAGES_MAX: usize = 4;
/// Timeout of connecting to a member and of listing members.
const CONNECTED_WITHIN: Duration = Duration::from_secs(5);
/// Interval and timeout of HTTP/2 pings: a machine that vanishes is detected within the sum of both.
const KEEP_ALIVE_EVERY: Duration = Duration::from_secs(10);
const KEEP_ALIVE_ANSWER: Duration = Duration::from_secs(5);
/// Timeout of one member's snapshot; ten million replicas take seconds.
const CURRENT_WITHIN: Duration = Duration::from_secs(60);
/// Pause before a retry.
const RETRY_AFTER: Duration = Duration::from_millis(500);

/// Arguments of `reprise events`.
#[derive(Clone, Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct EventsArgs {
    #[command(subcommand)]
    command: Option<EventsCommand>,
    #[command(flatten)]
    members: MembersArgs,
    /// After the snapshot, print each change until interrupted.
    #[arg(long)]
    follow: bool,
    /// Resume a member's events after this position, without a snapshot.
    ///
    /// Each printed line ends with its position, MEMBER@LOG:NUMBER. Give the option once for each member.
    #[arg(long, value_name = "POSITION")]
    from: Vec<MemberPosition>,
}

#[derive(Clone, Debug, clap::Subcommand)]
enum EventsCommand {
    /// Give routers of this machine plain ZeroMQ sockets of members.
    Proxy(proxy::ProxyArgs),
}

/// Open streams, by the name of the member.
struct Streams {
    /// How members are reached.
    asked: Members,
    members: BTreeMap<String, OpenStream>,
    positions: Positions,
    lines: mpsc::Sender<Vec<Line>>,
    extent: Extent,
}

/// An open stream of one member.
struct OpenStream {
    /// Address of the member.
    address: String,
    task: JoinHandle<anyhow::Result<()>>,
}

pub(crate) fn command(args: &EventsArgs, config: &Config, audience: Audience) -> anyhow::Result<()> {
    if let Some(EventsCommand::Proxy(proxy)) = &args.command {
        return proxy::command(proxy, config, audience);
    }
    let asked = args.members.find(config)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let ended = runtime.block_on(async {
        let (mut terminate, mut interrupt) =
            (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        let (lines, printed) = mpsc::channel(MESSAGES_MAX);
        let mut printer = tokio::spawn(print(printed, audience));
        tokio::select! {
            ended = send_lines(args, &asked, lines) => ended?,
            _ = terminate.recv() => return Ok(()),
            _ = interrupt.recv() => return Ok(()),
            // The reader has closed the pipe, or writing failed.
            ended = &mut printer => return ended?,
        }
        printer.await?
    });
    // A blocked write to standard output must not delay the exit.
    runtime.shutdown_background();
    ended
}

/// Prints lines until the queue is closed or the reader closes the pipe.
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

/// Sends the lines of all members to the print queue. Returns after all snapshots; with `--follow`, only on
/// an error.
async fn send_lines(
    args: &EventsArgs,
    asked: &Members,
    lines: mpsc::Sender<Vec<Line>>,
) -> anyhow::Result<()> {
    let (address, list) = first_list(asked).await?;
    let address = address.as_str();
    let mut streams = Streams {
        asked: asked.clone(),
        members: BTreeMap::new(),
        positions: Positions::new(&args.from),
        lines,
        extent: if args.follow { Extent::Unlimited } else { Extent::UntilCurrent },
    };
    streams.set_members(&members(list, address)).await?;
    if args.follow {
        return streams.follow(address).await;
    }
    for open in std::mem::take(&mut streams.members).into_values() {
        open.task.await??;
    }
    Ok(())
}

impl Streams {
    /// Opens streams of members that are new or have a new address, and closes those of members that are not
    /// listed.
    async fn set_members(&mut self, members: &[MemberInfo]) -> anyhow::Result<()> {
        let is_listed = |name: &str, open: &OpenStream| {
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
                self.lines.send(vec![Line::gone(name)]).await.context("the print queue is closed")?;
            }
        }
        for member in members {
            if !self.members.contains_key(&member.name) {
                let stream =
                    MemberStream::new((&self.asked, member), self.positions.clone(), self.lines.clone());
                let task = tokio::spawn(stream.run(self.extent));
                self.members
                    .insert(member.name.clone(), OpenStream { address: member.address.clone(), task });
            }
        }
        Ok(())
    }

    /// Follows the list of members forever, from any member that answers.
    async fn follow(&mut self, address: &str) -> anyhow::Result<()> {
        loop {
            let known = self.members.values().map(|open| open.address.clone());
            let addresses: Vec<String> = std::iter::once(address.to_owned()).chain(known).collect();
            for of in addresses {
                if let Err(error) = self.follow_members(&of).await {
                    tracing::debug!(
                        address = of,
                        error = format!("{error:#}"),
                        "cannot watch the list of members"
                    );
                }
            }
            tokio::time::sleep(RETRY_AFTER).await;
        }
    }

    async fn follow_members(&mut self, address: &str) -> anyhow::Result<()> {
        let mut lists = MembershipClient::new(connect(&self.asked, address).await?)
            .watch_members(WatchMembersRequest {})
            .await
            .context("watching members")?
            .into_inner();
        while let Some(list) = lists.message().await? {
            // A member that has just started, or has lost its store, has an empty list.
            if !list.members.is_empty() {
                self.set_members(&members(list, address)).await?;
            }
        }
        Ok(())
    }
}

impl OpenStream {
    /// Stops the stream; returns after its last line.
    async fn end(self) {
        self.task.abort();
        // The result is irrelevant: the task was cancelled, or has already logged its error.
        drop(self.task.await);
    }
}

async fn connect(asked: &Members, address: &str) -> anyhow::Result<Channel> {
    let endpoint = endpoint(address)?
        .connect_timeout(CONNECTED_WITHIN)
        .http2_keep_alive_interval(KEEP_ALIVE_EVERY)
        .keep_alive_timeout(KEEP_ALIVE_ANSWER);
    asked.connect(address, &endpoint).await
}

/// Returns the address and the member list of the first member that answers, or the error of the last one.
async fn first_list(asked: &Members) -> anyhow::Result<(String, MemberList)> {
    first_answer(asked, async |address| Ok((address.to_owned(), list(asked, address).await?))).await
}

async fn list(asked: &Members, address: &str) -> anyhow::Result<MemberList> {
    let answer = async {
        let mut membership = MembershipClient::new(connect(asked, address).await?);
        Ok(membership.list_members(ListMembersRequest {}).await.context("listing members")?.into_inner())
    };
    tokio::time::timeout(CONNECTED_WITHIN, answer).await.with_context(|| {
        format!("the control plane at {address} did not answer within {CONNECTED_WITHIN:?}")
    })?
}

/// Returns the listed members, with the address `asked` for the one that answered, because a tunnel may be in
/// between.
///
/// A member without its store has an empty list; the result is then that member alone.
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
    use reprise_identity::Security;
    use reprise_proto::controlplane::Position;

    use super::*;

    #[tokio::test]
    async fn unlisted_member_is_gone_and_member_with_a_new_address_is_not() {
        // No process listens: the streams keep retrying and send no lines.
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
        let asked = Members { addresses: Vec::new(), security: Security::Plain };
        let mut streams =
            Streams { asked, members: BTreeMap::new(), positions, lines, extent: Extent::Unlimited };
        streams
            .set_members(&[member("a", 1), member("b", 1), member("c", 1)])
            .await
            .expect("the queue is open");
        streams.set_members(&[member("a", 1), member("c", 2)]).await.expect("the queue is open");
        assert_eq!(printed.try_recv().expect("a line"), [Line::gone("b".to_owned())]);
        assert!(printed.try_recv().is_err(), "nothing else");
        assert_eq!(streams.members.keys().collect::<Vec<_>>(), ["a", "c"]);
        let known = ["a", "b", "c"].map(|name| streams.positions.get(name).is_some());
        assert_eq!(known, [true, false, true], "a gone member that returns starts with a snapshot");
        streams.set_members(&[]).await.expect("the queue is open");
    }

    #[test]
    fn follows_the_answering_member_at_the_address_that_was_asked() {
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
