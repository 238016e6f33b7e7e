//! Conversion between the agent's types and the control plane's messages. Received messages are validated.

use prost::bytes::Bytes;
use reprise_agent_core::event::Replica;
use reprise_agent_core::outbox::{Answer, Batch, Opening};
use reprise_policy::routing::LoadClass;
use reprise_policy::{BlockKey, NodeId, SlotSet, Tier};
use reprise_proto::controlplane::{LookupReply, UpdateReply, UpdateRequest};

/// Size of a packed replica: u16 node, u8 tier, u8 load class.
const REPLICA_BYTES: usize = 4;

/// Converts a batch to a request.
pub(super) fn update_request(batch: &Batch) -> UpdateRequest {
    let begins = match &batch.opening {
        Opening::Nothing => Bytes::new(),
        Opening::Slots(slots) | Opening::Reset(slots) => set(slots),
    };
    UpdateRequest {
        node: u32::from(batch.node.0),
        epoch: batch.epoch.0,
        sequence: batch.sequence,
        keys: Bytes::copy_from_slice(&batch.keys),
        operations: Bytes::copy_from_slice(&batch.operations),
        reset: matches!(batch.opening, Opening::Reset(_)),
        begins,
        ends: if batch.ends.is_empty() { Bytes::new() } else { set(&batch.ends) },
    }
}

fn set(slots: &SlotSet) -> Bytes {
    Bytes::copy_from_slice(&slots.to_bytes())
}

/// Converts the directory's reply to a batch.
pub(super) fn answer(reply: &UpdateReply) -> Answer {
    if reply.fenced { Answer::Fenced } else { Answer::Expecting(reply.expected_sequence) }
}

/// Packs keys for a request.
pub(super) fn pack(keys: &[BlockKey]) -> Bytes {
    BlockKey::pack(keys).into()
}

/// Appends the replicas of each key to `found`; returns `None` if the reply does not match the number of
/// keys. Unknown tiers are omitted: a newer control plane may have more.
pub(super) fn unpack_found(reply: &LookupReply, keys: usize, found: &mut Vec<Vec<Replica>>) -> Option<()> {
    let (replicas, rest) = reply.replicas.as_chunks::<REPLICA_BYTES>();
    let whole = rest.is_empty()
        && reply.offsets.len() == keys + 1
        && reply.offsets.first() == Some(&0)
        && reply.offsets.last().is_some_and(|last| *last as usize == replicas.len())
        && reply.elsewhere.iter().all(|index| (*index as usize) < keys);
    if !whole {
        return None;
    }
    for bounds in reply.offsets.windows(2) {
        let of_key = replicas.get(bounds[0] as usize..bounds[1] as usize)?;
        found.push(of_key.iter().filter_map(replica).collect());
    }
    Some(())
}

fn replica(packed: &[u8; REPLICA_BYTES]) -> Option<Replica> {
    let [low, high, tier, load] = *packed;
    let load = LoadClass(load).min(LoadClass::MAX);
    Some(Replica { node: NodeId(u16::from_le_bytes([low, high])), tier: Tier::from_wire(tier)?, load })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replicas_are_split_by_their_offsets() {
        let reply = LookupReply {
            offsets: vec![0, 2, 2, 3],
            replicas: vec![1, 0, 1, 0, 2, 1, 2, 9, 3, 0, 2, 99].into(),
            ..LookupReply::default()
        };
        let mut found = Vec::new();
        assert_eq!(unpack_found(&reply, 3, &mut found), Some(()));
        let replica = |node, tier, load| Replica { node: NodeId(node), tier, load: LoadClass(load) };
        assert_eq!(
            found,
            vec![
                vec![replica(1, Tier::Dram, 0), replica(258, Tier::Nvme, 9)],
                vec![],
                vec![replica(3, Tier::Nvme, 15)]
            ]
        );
    }

    #[test]
    fn reply_that_does_not_match_the_request_is_rejected() {
        let replicas = Bytes::from(vec![1, 0, 1, 0]);
        for (offsets, replicas) in [
            (vec![], replicas.clone()),
            (vec![0, 1, 1], replicas.clone()),
            (vec![0, 2], replicas.clone()),
            (vec![1, 1], replicas.clone()),
            (vec![0, 0], replicas.clone()),
            (vec![0, 1], replicas.slice(..3)),
        ] {
            let reply = LookupReply { offsets: offsets.clone(), replicas, ..LookupReply::default() };
            assert_eq!(unpack_found(&reply, 1, &mut Vec::new()), None, "{offsets:?}");
        }
        let backwards = LookupReply { offsets: vec![0, 1, 0, 1], replicas, ..LookupReply::default() };
        assert_eq!(unpack_found(&backwards, 3, &mut Vec::new()), None);
        let beyond = LookupReply { offsets: vec![0, 0], elsewhere: vec![1], ..LookupReply::default() };
        assert_eq!(unpack_found(&beyond, 1, &mut Vec::new()), None);
    }

    #[test]
    fn batches_and_replies_are_converted() {
        let batch = Batch {
            node: NodeId(7),
            epoch: reprise_policy::Epoch(3),
            sequence: 9,
            opening: Opening::Reset(SlotSet::ALL),
            keys: vec![5; 16],
            operations: vec![0x81],
            ends: SlotSet::EMPTY,
        };
        let request = update_request(&batch);
        assert_eq!((request.node, request.epoch, request.sequence, request.reset), (7, 3, 9, true));
        assert_eq!(
            (request.keys.as_ref(), request.operations.as_ref()),
            ([5; 16].as_slice(), [0x81].as_slice())
        );
        assert_eq!((request.begins.len(), request.ends.len()), (SlotSet::BYTES, 0));
        let slots: SlotSet = [9].into_iter().collect();
        let gained = update_request(&Batch { opening: Opening::Slots(slots.clone()), ends: slots, ..batch });
        assert!(!gained.reset && gained.begins == gained.ends && gained.begins[1] == 2);
        let reply = |fenced| UpdateReply { fenced, expected_sequence: 4, slots_version: 1 };
        assert_eq!(answer(&reply(true)), Answer::Fenced);
        assert_eq!(answer(&reply(false)), Answer::Expecting(4));
    }
}
