//! Event stream of one member, reopened whenever it breaks.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, bail};
use reprise_policy::{BlockKey, NodeId, Tier};
use reprise_proto::controlplane::events_client::EventsClient;
use reprise_proto::controlplane::follow_reply::Event as WireEvent;
use reprise_proto::controlplane::snapshot_begins::Reason;
use reprise_proto::controlplane::{FollowReply, FollowRequest, MemberInfo, Position, ReplicaChanges};
use tokio::sync::mpsc;

use super::line::{Event, Line, MemberPosition, Replica};
use super::{RETRY_AFTER, connect};
use crate::members::Members;

/// Bit of an operation that removes a replica.
const WITHDRAWN: u8 = 0x80;

/// End of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Extent {
    /// End after the snapshot.
    UntilCurrent,
    /// Follow changes forever.
    Unlimited,
}

/// Last position of each member, kept while the member is listed, even if it is unreachable.
#[derive(Clone, Debug)]
pub(super) struct Positions(Arc<Mutex<BTreeMap<String, Position>>>);

/// Stream of one member's lines.
pub(super) struct MemberStream {
    asked: Members,
    member: MemberInfo,
    positions: Positions,
    lines: mpsc::Sender<Vec<Line>>,
}

/// Addition or removal of a replica.
#[derive(Clone, Copy, Debug)]
pub(super) struct Change {
    pub(super) node: NodeId,
    pub(super) tier: Tier,
    pub(super) key: BlockKey,
    pub(super) is_added: bool,
}

/// Reason why reading a stream ended without an error.
enum StreamEnd {
    /// The snapshot is complete.
    Current,
    /// The print queue is closed.
    QueueClosed,
}

impl Positions {
    pub(super) fn new(from: &[MemberPosition]) -> Positions {
        let positions = from.iter().map(|from| (from.member.clone(), from.position));
        Positions(Arc::new(Mutex::new(positions.collect())))
    }

    pub(super) fn get(&self, member: &str) -> Option<Position> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(member).copied()
    }

    pub(super) fn forget(&self, member: &str) {
        self.set(member, None);
    }

    fn set(&self, member: &str, position: Option<Position>) {
        let mut positions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match position {
            Some(position) => drop(positions.insert(member.to_owned(), position)),
            None => drop(positions.remove(member)),
        }
    }
}

impl MemberStream {
    pub(super) fn new(
        (asked, member): (&Members, &MemberInfo),
        positions: Positions,
        lines: mpsc::Sender<Vec<Line>>,
    ) -> MemberStream {
        MemberStream { asked: asked.clone(), member: member.clone(), positions, lines }
    }

    /// Sends the member's lines. If the stream breaks, it is reopened with [`Extent::Unlimited`].
    ///
    /// # Errors
    /// The stream breaks with [`Extent::UntilCurrent`].
    pub(super) async fn run(self, extent: Extent) -> anyhow::Result<()> {
        // Log the first failure only, until a message arrives again.
        let mut logged = false;
        loop {
            match self.read(extent, &mut logged).await {
                Ok(StreamEnd::Current | StreamEnd::QueueClosed) => return Ok(()),
                Err(error) if extent == Extent::UntilCurrent => return Err(error),
                Err(error) => {
                    if !std::mem::replace(&mut logged, true) {
                        let (member, error) = (&self.member.name, format!("{error:#}"));
                        tracing::warn!(member, error, "event stream of a member broke; reconnecting");
                    }
                    tokio::time::sleep(RETRY_AFTER).await;
                }
            }
        }
    }

    async fn read(&self, extent: Extent, logged: &mut bool) -> anyhow::Result<StreamEnd> {
        let name = &self.member.name;
        let mut client = EventsClient::new(connect(&self.asked, &self.member.address).await?);
        let request = FollowRequest { from: self.positions.get(name) };
        let stream = client.follow(request).await.with_context(|| format!("following member {name}"))?;
        let mut messages = stream.into_inner();
        while let Some(message) = messages.message().await? {
            *logged = false;
            let (position, is_current) =
                (message.position, matches!(message.event, Some(WireEvent::Current(_))));
            let lines = lines(name, &message)?;
            if self.lines.send(lines).await.is_err() {
                return Ok(StreamEnd::QueueClosed);
            }
            // Set after the lines are queued: a stream that breaks before must send them again.
            self.positions.set(name, position);
            if is_current && extent == Extent::UntilCurrent {
                return Ok(StreamEnd::Current);
            }
        }
        bail!("the stream has ended")
    }
}

/// Converts a message into lines.
fn lines(member: &str, message: &FollowReply) -> anyhow::Result<Vec<Line>> {
    let line = |event, position: Option<Position>| {
        let position = position.map(|position| MemberPosition { member: member.to_owned(), position });
        Line { member: member.to_owned(), event, position }
    };
    let end = message.position;
    let one = |event| Ok(vec![line(event, end)]);
    match message.event.as_ref().context("unknown kind of event: is the member newer?")? {
        WireEvent::Snapshot(begins) => one(Event::Snapshot { reason: reason(begins.reason()) }),
        WireEvent::Cleared(cleared) => {
            let node = Some(cleared.node).filter(|node| *node != 0);
            one(Event::Cleared { node, slots: cleared.slots.clone() })
        }
        WireEvent::Current(_) => one(Event::Current),
        WireEvent::Changes(changes) => {
            let events = events(changes)?;
            // Each change has its own number, so that a reader can resume after any line.
            let first = end.map(|end| end.next.saturating_sub(events.len() as u64));
            let at = |index| {
                let end = end?;
                Some(Position { log: end.log, next: first? + index + 1 })
            };
            Ok((0..).zip(events).map(|(index, event)| line(event, at(index))).collect())
        }
    }
}

fn reason(reason: Reason) -> &'static str {
    match reason {
        Reason::Start | Reason::Unspecified => "no position was given",
        Reason::OtherLog => "the member has restarted since the position",
        Reason::Behind => "the member no longer keeps the changes after the position",
    }
}

fn events(message: &ReplicaChanges) -> anyhow::Result<Vec<Event>> {
    let event = |Change { node, tier, key, is_added }: Change| {
        let tier = match tier {
            Tier::Dram => "dram",
            Tier::Nvme => "nvme",
        };
        let replica = Replica { node: node.0, tier, key: key.to_string() };
        if is_added { Event::Added(replica) } else { Event::Withdrawn(replica) }
    };
    Ok(changes(message)?.into_iter().map(event).collect())
}

/// Parses the changes of a message, in order.
pub(super) fn changes(message: &ReplicaChanges) -> anyhow::Result<Vec<Change>> {
    let keys = BlockKey::unpack(&message.keys).context("invalid event: truncated key")?;
    let (nodes, torn) = message.nodes.as_chunks::<2>();
    if !torn.is_empty() || nodes.len() != keys.len() || message.operations.len() != keys.len() {
        bail!(
            "invalid event: {} keys, {} nodes, {} operations",
            keys.len(),
            nodes.len(),
            message.operations.len()
        );
    }
    let change = |((key, node), operation): ((BlockKey, &[u8; 2]), &u8)| {
        let tier = Tier::from_wire(operation & !WITHDRAWN).context("invalid event: unknown tier")?;
        Ok(Change {
            node: NodeId(u16::from_le_bytes(*node)),
            tier,
            key,
            is_added: operation & WITHDRAWN == 0,
        })
    };
    keys.into_iter().zip(nodes).zip(&message.operations).map(change).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(position: Option<Position>) -> FollowReply {
        let changes = ReplicaChanges {
            keys: vec![0x11; 32].into(),
            nodes: vec![7, 0, 2, 1].into(),
            operations: vec![1, 0x82].into(),
        };
        FollowReply { position, event: Some(WireEvent::Changes(changes)) }
    }

    #[test]
    fn each_change_has_a_position_except_within_a_snapshot() {
        let lines_of = |position| lines("a", &message(position)).expect("well formed");
        let changes = lines_of(Some(Position { log: 5, next: 9 }));
        let positions: Vec<_> =
            changes.iter().map(|line| line.position.clone().expect("a position").position.next).collect();
        assert_eq!(positions, [8, 9]);
        assert!(
            matches!(&changes[0].event, Event::Added(replica) if replica.node == 7 && replica.tier == "dram")
        );
        assert!(
            matches!(&changes[1].event, Event::Withdrawn(replica) if replica.node == 258 && replica.tier == "nvme")
        );
        assert!(lines_of(None).iter().all(|line| line.position.is_none()));
    }

    #[test]
    fn rejects_changes_with_inconsistent_lengths() {
        for (keys, nodes, operations) in [(17, 2, 1), (16, 3, 1), (16, 2, 0), (16, 4, 1)] {
            let (keys, nodes) = (vec![0; keys].into(), vec![0; nodes].into());
            let changes = ReplicaChanges { keys, nodes, operations: vec![1; operations].into() };
            assert!(events(&changes).is_err());
        }
    }
}
