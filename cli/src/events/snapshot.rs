//! Snapshot of all members' directories, read from each member's stream up to its `current` event.

use std::collections::BTreeSet;

use anyhow::{Context, bail, ensure};
use reprise_policy::{BlockKey, NodeId, Tier};
use reprise_proto::controlplane::events_client::EventsClient;
use reprise_proto::controlplane::follow_reply::Event as WireEvent;
use reprise_proto::controlplane::{Cleared, FollowReply, FollowRequest, MemberInfo};

use super::stream::{Change, changes};
use super::{CURRENT_WITHIN, connect, first_list, members};
use crate::members::Members;

#[derive(Debug, Default)]
pub(crate) struct Replicas(BTreeSet<(NodeId, Tier, BlockKey)>);

/// Reads the replicas of all members that the first answering member lists.
pub(crate) async fn snapshot(asked: &Members) -> anyhow::Result<Replicas> {
    let (address, list) = first_list(asked).await?;
    let mut all = Replicas::default();
    for member in members(list, &address) {
        let held = tokio::time::timeout(CURRENT_WITHIN, snapshot_of(asked, &member)).await;
        let held =
            held.with_context(|| format!("no full snapshot of {} within {CURRENT_WITHIN:?}", member.name))??;
        all.join(held).with_context(|| format!("merging the replicas of {}", member.name))?;
    }
    Ok(all)
}

async fn snapshot_of(asked: &Members, member: &MemberInfo) -> anyhow::Result<Replicas> {
    let mut client = EventsClient::new(connect(asked, &member.address).await?);
    let stream = client.follow(FollowRequest { from: None }).await;
    let mut messages = stream.with_context(|| format!("following member {}", member.name))?.into_inner();
    let mut held = Replicas::default();
    while let Some(message) = messages.message().await? {
        if held.apply(&message)? {
            return Ok(held);
        }
    }
    bail!("the stream of {} has ended", member.name)
}

impl Replicas {
    /// Returns the keys of a node in a tier.
    pub(crate) fn of(&self, node: NodeId, tier: Tier) -> BTreeSet<BlockKey> {
        let least = (node, tier, BlockKey([0; BlockKey::SIZE]));
        let most = (node, tier, BlockKey([u8::MAX; BlockKey::SIZE]));
        self.0.range(least..=most).map(|(_, _, key)| *key).collect()
    }

    /// Returns the number of replicas.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Applies a message; returns whether the snapshot is complete.
    fn apply(&mut self, message: &FollowReply) -> anyhow::Result<bool> {
        match message.event.as_ref().context("unknown kind of event: is the member newer?")? {
            WireEvent::Snapshot(_) => self.0.clear(),
            WireEvent::Current(_) => return Ok(true),
            WireEvent::Cleared(cleared) => self.clear(cleared),
            WireEvent::Changes(message) => {
                for Change { node, tier, key, is_added } in changes(message)? {
                    match is_added {
                        true => self.0.insert((node, tier, key)),
                        false => self.0.remove(&(node, tier, key)),
                    };
                }
            }
        }
        Ok(false)
    }

    fn clear(&mut self, Cleared { node, slots }: &Cleared) {
        let is_void = |(of, _, key): &(NodeId, Tier, BlockKey)| {
            (*node == 0 || u32::from(of.0) == *node)
                && (slots.is_empty() || slots.contains(&u32::from(key.hash_slot())))
        };
        self.0.retain(|replica| !is_void(replica));
    }

    /// Adds the replicas of another member. Members own different hash slots, so an overlap is an error.
    fn join(&mut self, other: Replicas) -> anyhow::Result<()> {
        let both = self.0.intersection(&other.0).count();
        ensure!(both == 0, "another member has {both} of these replicas");
        self.0.extend(other.0);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use reprise_proto::controlplane::{Current, ReplicaChanges, SnapshotBegins};

    use super::*;

    fn event(keys: &[u8], node: u16, operation: u8) -> WireEvent {
        WireEvent::Changes(ReplicaChanges {
            keys: keys.iter().flat_map(|key| [*key; BlockKey::SIZE]).collect::<Vec<_>>().into(),
            nodes: keys.iter().flat_map(|_| node.to_le_bytes()).collect::<Vec<_>>().into(),
            operations: vec![operation; keys.len()].into(),
        })
    }

    fn after(events: impl IntoIterator<Item = WireEvent>) -> Replicas {
        let mut held = Replicas::default();
        for event in events {
            let is_current = matches!(event, WireEvent::Current(_));
            let message = FollowReply { position: None, event: Some(event) };
            assert_eq!(held.apply(&message).expect("well formed"), is_current);
        }
        held
    }

    #[test]
    fn snapshot_has_added_replicas_that_were_neither_withdrawn_nor_cleared() {
        let begins = || WireEvent::Snapshot(SnapshotBegins::default());
        let slot = u32::from(BlockKey([3; BlockKey::SIZE]).hash_slot());
        let held = after([
            event(&[9], 1, 1),
            begins(),
            event(&[1, 2, 3], 1, 1),
            event(&[1, 2, 3], 2, 2),
            event(&[2], 1, 0x81),
            WireEvent::Cleared(Cleared { node: 2, slots: vec![slot] }),
            WireEvent::Current(Current {}),
        ]);
        let keys =
            |keys: &[u8]| keys.iter().map(|key| BlockKey([*key; BlockKey::SIZE])).collect::<BTreeSet<_>>();
        assert_eq!(held.of(NodeId(1), Tier::Dram), keys(&[1, 3]));
        assert_eq!(held.of(NodeId(2), Tier::Nvme), keys(&[1, 2]));
        assert_eq!((held.len(), held.of(NodeId(1), Tier::Nvme).len()), (4, 0));
        assert_eq!(after([event(&[1], 1, 1), WireEvent::Cleared(Cleared::default())]).len(), 0);
    }

    #[test]
    fn rejects_a_replica_that_two_members_hold() {
        let mut one = after([event(&[1, 2], 1, 1)]);
        one.join(after([event(&[3], 1, 1)])).expect("another key");
        let refused = one.join(after([event(&[2], 1, 1)])).expect_err("the same key").to_string();
        assert!(refused.contains("another member has 1"), "{refused}");
    }
}
