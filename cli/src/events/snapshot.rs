//! What all members hold, key by key: each member's stream up to where it is current.

use std::collections::BTreeSet;

use anyhow::{Context, bail, ensure};
use reprise_policy::{BlockKey, NodeId, Tier};
use reprise_proto::controlplane::events_client::EventsClient;
use reprise_proto::controlplane::follow_reply::Event as Sent;
use reprise_proto::controlplane::{Cleared, FollowReply, FollowRequest, MemberInfo};

use super::stream::{Change, changes};
use super::{CURRENT_WITHIN, connect, first_list, members};

/// Replicas, each once.
#[derive(Debug, Default)]
pub(crate) struct Replicas(BTreeSet<(NodeId, Tier, BlockKey)>);

/// What the members hold that the first of these that answers lists.
pub(crate) async fn snapshot(addresses: &[String]) -> anyhow::Result<Replicas> {
    let (address, list) = first_list(addresses).await?;
    let mut all = Replicas::default();
    for member in members(list, &address) {
        let held = tokio::time::timeout(CURRENT_WITHIN, snapshot_of(&member)).await;
        let held =
            held.with_context(|| format!("{} is not current within {CURRENT_WITHIN:?}", member.name))??;
        all.join(held).with_context(|| format!("the replicas of {}", member.name))?;
    }
    Ok(all)
}

async fn snapshot_of(member: &MemberInfo) -> anyhow::Result<Replicas> {
    let mut client = EventsClient::new(connect(&member.address).await?);
    let stream = client.follow(FollowRequest { from: None }).await;
    let mut messages = stream.with_context(|| format!("following member {}", member.name))?.into_inner();
    let mut held = Replicas::default();
    while let Some(message) = messages.message().await? {
        if held.take(&message)? {
            return Ok(held);
        }
    }
    bail!("the stream of {} has ended", member.name)
}

impl Replicas {
    /// The keys of a node in a tier, in order.
    pub(crate) fn of(&self, node: NodeId, tier: Tier) -> BTreeSet<BlockKey> {
        let least = (node, tier, BlockKey([0; BlockKey::SIZE]));
        let most = (node, tier, BlockKey([u8::MAX; BlockKey::SIZE]));
        self.0.range(least..=most).map(|(_, _, key)| *key).collect()
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Takes a message; whether all has been told.
    fn take(&mut self, message: &FollowReply) -> anyhow::Result<bool> {
        match message.event.as_ref().context("a message of a kind that is not known: is the member newer?")? {
            Sent::Snapshot(_) => self.0.clear(),
            Sent::Current(_) => return Ok(true),
            Sent::Cleared(cleared) => self.clear(cleared),
            Sent::Changes(told) => {
                for Change { node, tier, key, is_there } in changes(told)? {
                    match is_there {
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

    /// Takes what another member holds, which is in other hash slots.
    fn join(&mut self, other: Replicas) -> anyhow::Result<()> {
        let both = self.0.intersection(&other.0).count();
        ensure!(both == 0, "{both} of them are another member's as well");
        self.0.extend(other.0);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use reprise_proto::controlplane::{Current, ReplicaChanges, SnapshotBegins};

    use super::*;

    fn told(keys: &[u8], node: u16, operation: u8) -> Sent {
        Sent::Changes(ReplicaChanges {
            keys: keys.iter().flat_map(|key| [*key; BlockKey::SIZE]).collect::<Vec<_>>().into(),
            nodes: keys.iter().flat_map(|_| node.to_le_bytes()).collect::<Vec<_>>().into(),
            operations: vec![operation; keys.len()].into(),
        })
    }

    fn after(events: impl IntoIterator<Item = Sent>) -> Replicas {
        let mut held = Replicas::default();
        for event in events {
            let is_current = matches!(event, Sent::Current(_));
            let message = FollowReply { position: None, event: Some(event) };
            assert_eq!(held.take(&message).expect("well formed"), is_current);
        }
        held
    }

    #[test]
    fn a_snapshot_is_what_was_told_and_neither_withdrawn_nor_cleared() {
        let begins = || Sent::Snapshot(SnapshotBegins::default());
        let slot = u32::from(BlockKey([3; BlockKey::SIZE]).hash_slot());
        let held = after([
            told(&[9], 1, 1),
            begins(),
            told(&[1, 2, 3], 1, 1),
            told(&[1, 2, 3], 2, 2),
            told(&[2], 1, 0x81),
            Sent::Cleared(Cleared { node: 2, slots: vec![slot] }),
            Sent::Current(Current {}),
        ]);
        let keys =
            |keys: &[u8]| keys.iter().map(|key| BlockKey([*key; BlockKey::SIZE])).collect::<BTreeSet<_>>();
        assert_eq!(held.of(NodeId(1), Tier::Dram), keys(&[1, 3]));
        assert_eq!(held.of(NodeId(2), Tier::Nvme), keys(&[1, 2]));
        assert_eq!((held.len(), held.of(NodeId(1), Tier::Nvme).len()), (4, 0));
        assert_eq!(after([told(&[1], 1, 1), Sent::Cleared(Cleared::default())]).len(), 0);
    }

    #[test]
    fn a_replica_that_two_members_hold_is_refused() {
        let mut one = after([told(&[1, 2], 1, 1)]);
        one.join(after([told(&[3], 1, 1)])).expect("another key");
        let refused = one.join(after([told(&[2], 1, 1)])).expect_err("the same key").to_string();
        assert!(refused.contains("another member's"), "{refused}");
    }
}
