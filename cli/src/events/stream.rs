//! The stream of one member, opened again whenever it breaks.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, bail};
use reprise_policy::{BlockKey, NodeId, Tier};
use reprise_proto::controlplane::events_client::EventsClient;
use reprise_proto::controlplane::follow_reply::Event as Sent;
use reprise_proto::controlplane::snapshot_begins::Reason;
use reprise_proto::controlplane::{FollowReply, FollowRequest, MemberInfo, Position, ReplicaChanges};
use tokio::sync::mpsc;

use super::line::{Event, Line, MemberPosition, Replica};
use super::{RETRY_AFTER, connect};

/// Bit of an operation that withdraws.
const WITHDRAWN: u8 = 0x80;

/// How far a stream is followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Extent {
    /// Until it has said all that the member holds.
    UntilCurrent,
    /// For ever.
    ForEver,
}

/// The last position of each member; kept while a member is away, and not when it is gone.
#[derive(Clone, Debug)]
pub(super) struct Positions(Arc<Mutex<BTreeMap<String, Position>>>);

/// See the module.
pub(super) struct MemberStream {
    member: MemberInfo,
    positions: Positions,
    lines: mpsc::Sender<Vec<Line>>,
}

/// A replica is there from now on, or not any more.
#[derive(Clone, Copy, Debug)]
pub(super) struct Change {
    pub(super) node: NodeId,
    pub(super) tier: Tier,
    pub(super) key: BlockKey,
    pub(super) is_there: bool,
}

/// Why a stream is not read any further.
enum Ended {
    /// It has said all that the member holds.
    Current,
    /// The lines are not wanted any more.
    Unwanted,
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
        member: &MemberInfo,
        positions: Positions,
        lines: mpsc::Sender<Vec<Line>>,
    ) -> MemberStream {
        MemberStream { member: member.clone(), positions, lines }
    }

    /// Sends the member's lines. A stream that breaks is an error, or opened again when it is to go on for ever.
    pub(super) async fn run(self, extent: Extent) -> anyhow::Result<()> {
        // Told once, until it is there again.
        let mut away = false;
        loop {
            match self.read(extent, &mut away).await {
                Ok(Ended::Current | Ended::Unwanted) => return Ok(()),
                Err(error) if extent == Extent::UntilCurrent => return Err(error),
                Err(error) => {
                    if !std::mem::replace(&mut away, true) {
                        let (member, error) = (&self.member.name, format!("{error:#}"));
                        tracing::warn!(member, error, "the events of a member have stopped; trying again");
                    }
                    tokio::time::sleep(RETRY_AFTER).await;
                }
            }
        }
    }

    async fn read(&self, extent: Extent, away: &mut bool) -> anyhow::Result<Ended> {
        let name = &self.member.name;
        let mut client = EventsClient::new(connect(&self.member.address).await?);
        let request = FollowRequest { from: self.positions.get(name) };
        let stream = client.follow(request).await.with_context(|| format!("following member {name}"))?;
        let mut messages = stream.into_inner();
        while let Some(message) = messages.message().await? {
            *away = false;
            let (position, is_current) = (message.position, matches!(message.event, Some(Sent::Current(_))));
            let lines = lines(name, &message)?;
            if self.lines.send(lines).await.is_err() {
                return Ok(Ended::Unwanted);
            }
            self.positions.set(name, position);
            if is_current && extent == Extent::UntilCurrent {
                return Ok(Ended::Current);
            }
        }
        bail!("the stream has ended")
    }
}

/// The lines of a message.
fn lines(member: &str, message: &FollowReply) -> anyhow::Result<Vec<Line>> {
    let line = |event, position: Option<Position>| {
        let position = position.map(|position| MemberPosition { member: member.to_owned(), position });
        Line { member: member.to_owned(), event, position }
    };
    let end = message.position;
    let one = |event| Ok(vec![line(event, end)]);
    match message.event.as_ref().context("a message of a kind that is not known: is the member newer?")? {
        Sent::Snapshot(begins) => one(Event::Snapshot { reason: reason(begins.reason()) }),
        Sent::Cleared(cleared) => {
            let node = Some(cleared.node).filter(|node| *node != 0);
            one(Event::Cleared { node, slots: cleared.slots.clone() })
        }
        Sent::Current(_) => one(Event::Current),
        Sent::Changes(changes) => {
            let events = events(changes)?;
            // Changes are numbered one by one: each line can be gone on from.
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
        Reason::Behind => "what came after the position is not kept any more",
    }
}

fn events(told: &ReplicaChanges) -> anyhow::Result<Vec<Event>> {
    let event = |Change { node, tier, key, is_there }: Change| {
        let tier = match tier {
            Tier::Dram => "dram",
            Tier::Nvme => "nvme",
        };
        let replica = Replica { node: node.0, tier, key: key.to_string() };
        if is_there { Event::Added(replica) } else { Event::Withdrawn(replica) }
    };
    Ok(changes(told)?.into_iter().map(event).collect())
}

/// The changes of a message, in order.
pub(super) fn changes(told: &ReplicaChanges) -> anyhow::Result<Vec<Change>> {
    let keys = BlockKey::unpack(&told.keys).context("torn keys")?;
    let (nodes, torn) = told.nodes.as_chunks::<2>();
    if !torn.is_empty() || nodes.len() != keys.len() || told.operations.len() != keys.len() {
        bail!("{} keys, {} nodes, {} operations", keys.len(), nodes.len(), told.operations.len());
    }
    let change = |((key, node), operation): ((BlockKey, &[u8; 2]), &u8)| {
        let tier = Tier::from_wire(operation & !WITHDRAWN).context("an unknown tier")?;
        Ok(Change {
            node: NodeId(u16::from_le_bytes(*node)),
            tier,
            key,
            is_there: operation & WITHDRAWN == 0,
        })
    };
    keys.into_iter().zip(nodes).zip(&told.operations).map(change).collect()
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
        FollowReply { position, event: Some(Sent::Changes(changes)) }
    }

    #[test]
    fn every_change_has_a_position_of_its_own_and_none_within_a_snapshot() {
        let lines_of = |position| lines("a", &message(position)).expect("well formed");
        let told = lines_of(Some(Position { log: 5, next: 9 }));
        let positions: Vec<_> =
            told.iter().map(|line| line.position.clone().expect("one").position.next).collect();
        assert_eq!(positions, [8, 9]);
        assert!(
            matches!(&told[0].event, Event::Added(replica) if replica.node == 7 && replica.tier == "dram")
        );
        assert!(
            matches!(&told[1].event, Event::Withdrawn(replica) if replica.node == 258 && replica.tier == "nvme")
        );
        assert!(lines_of(None).iter().all(|line| line.position.is_none()));
    }

    #[test]
    fn torn_changes_are_refused() {
        for (keys, nodes, operations) in [(17, 2, 1), (16, 3, 1), (16, 2, 0), (16, 4, 1)] {
            let (keys, nodes) = (vec![0; keys].into(), vec![0; nodes].into());
            let changes = ReplicaChanges { keys, nodes, operations: vec![1; operations].into() };
            assert!(events(&changes).is_err());
        }
    }
}
