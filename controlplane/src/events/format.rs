//! Encoding of KV events in vLLM's format (msgpack).
//!
//! ```text
//!   [ts, [event, ...], data_parallel_rank]
//!   BlockStored       {type, block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name, locality, ownership}
//!   BlockRemoved      {type, block_hashes, medium, locality, ownership}
//!   AllBlocksCleared  {type}
//! ```
//!
//! A batch concerns one node. Its `data_parallel_rank` is the node number, by which subscribers distinguish
//! the caches behind one publisher. Hashes are block keys: 16 opaque bytes. docs/PROTOCOL.md, part 4,
//! specifies the rest.

use std::collections::BTreeMap;
use std::ops::Range;

use reprise_controlplane_core::{Operation, ReplicaChange, ReplicaEntry};
use reprise_policy::{BlockKey, NodeId, Tier};
use rmp::encode::{write_array_len, write_bin, write_f64, write_map_len, write_nil, write_str, write_uint};

/// Maximum number of blocks in a batch; 18 bytes each, 4.5 KiB.
pub(crate) const BLOCKS_PER_BATCH_MAX: usize = 256;
/// Owner of the blocks, for routers that also receive events of the engines' own caches.
const OWNERSHIP: &str = "reprise";
/// Locality relative to the node of the batch.
const LOCALITY: &str = "LOCAL";

/// Message for `expect` on writes to memory.
const IN_MEMORY: &str = "writing to a vector cannot fail";

#[derive(Clone, Copy, Debug)]
pub(super) struct Seconds(pub(super) f64);

/// A batch that clears the blocks of a node, or of all nodes.
pub(super) fn cleared(ts: Seconds, node: Option<NodeId>) -> Vec<u8> {
    let mut out = Vec::new();
    begin(ts, 1, &mut out);
    write_map_len(&mut out, 1).expect(IN_MEMORY);
    pair("type", "AllBlocksCleared", &mut out);
    end(node, &mut out);
    out
}

/// A batch without events.
pub(super) fn empty(ts: Seconds) -> Vec<u8> {
    let mut out = Vec::new();
    begin(ts, 0, &mut out);
    end(None, &mut out);
    out
}

/// Batches of these changes with at most `blocks_max` blocks each. The order of changes is kept within a
/// node.
pub(super) fn changed(ts: Seconds, changes: &[ReplicaChange], blocks_max: usize) -> Vec<Vec<u8>> {
    let mut of_nodes = BTreeMap::<NodeId, Vec<&ReplicaChange>>::new();
    changes.iter().for_each(|change| of_nodes.entry(change.node).or_default().push(change));
    let batches = of_nodes.iter().flat_map(|(node, changes)| {
        changes.chunks(blocks_max).map(|chunk| batch(ts, *node, chunk)).collect::<Vec<_>>()
    });
    batches.collect()
}

/// Batches that store these replicas, with at most `blocks_max` blocks each.
pub(super) fn stored(ts: Seconds, held: &[ReplicaEntry], blocks_max: usize) -> Vec<Vec<u8>> {
    let mut changes: Vec<ReplicaChange> = held
        .iter()
        .map(|&ReplicaEntry { node, key, tier }| ReplicaChange {
            node,
            key,
            operation: Operation::Announce(tier),
        })
        .collect();
    // Sort so that each tier is one event; a new event starts wherever the tier changes.
    changes.sort_unstable_by_key(|change| (change.node, change.operation.wire()));
    changed(ts, &changes, blocks_max)
}

fn batch(ts: Seconds, node: NodeId, changes: &[&ReplicaChange]) -> Vec<u8> {
    let runs = runs(changes);
    let mut out = Vec::with_capacity(changes.len() * (BlockKey::SIZE + 2) + 64 + runs.len() * 192);
    begin(ts, runs.len(), &mut out);
    for run in runs {
        event(changes[run.start].operation, &changes[run], &mut out);
    }
    end(Some(node), &mut out);
    out
}

/// Ranges of consecutive changes with the same operation.
fn runs(changes: &[&ReplicaChange]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for (index, change) in changes.iter().enumerate() {
        match runs.last_mut() {
            Some(run) if changes[run.start].operation == change.operation => run.end = index + 1,
            _ => runs.push(index..index + 1),
        }
    }
    runs
}

fn begin(ts: Seconds, events: usize, out: &mut Vec<u8>) {
    write_array_len(out, 3).expect(IN_MEMORY);
    write_f64(out, ts.0).expect(IN_MEMORY);
    write_array_len(out, u32::try_from(events).expect("at most the blocks of a batch")).expect(IN_MEMORY);
}

fn end(node: Option<NodeId>, out: &mut Vec<u8>) {
    match node {
        Some(node) => drop(write_uint(out, u64::from(node.0)).expect(IN_MEMORY)),
        None => write_nil(out).expect(IN_MEMORY),
    }
}

fn event(operation: Operation, changes: &[&ReplicaChange], out: &mut Vec<u8>) {
    match operation {
        Operation::Announce(tier) => {
            write_map_len(out, 10).expect(IN_MEMORY);
            pair("type", "BlockStored", out);
            hashes(changes, out);
            nil("parent_block_hash", out);
            write_str(out, "token_ids").expect(IN_MEMORY);
            write_array_len(out, 0).expect(IN_MEMORY);
            write_str(out, "block_size").expect(IN_MEMORY);
            write_uint(out, 0).expect(IN_MEMORY);
            nil("lora_id", out);
            nil("lora_name", out);
            location(tier, out);
        }
        Operation::Withdraw(tier) => {
            write_map_len(out, 5).expect(IN_MEMORY);
            pair("type", "BlockRemoved", out);
            hashes(changes, out);
            location(tier, out);
        }
    }
}

fn hashes(changes: &[&ReplicaChange], out: &mut Vec<u8>) {
    write_str(out, "block_hashes").expect(IN_MEMORY);
    write_array_len(out, u32::try_from(changes.len()).expect("at most the blocks of a batch"))
        .expect(IN_MEMORY);
    changes.iter().for_each(|change| write_bin(out, &change.key.0).expect(IN_MEMORY));
}

fn location(tier: Tier, out: &mut Vec<u8>) {
    let medium = match tier {
        Tier::Dram => "CPU",
        Tier::Nvme => "STORAGE",
    };
    pair("medium", medium, out);
    pair("locality", LOCALITY, out);
    pair("ownership", OWNERSHIP, out);
}

fn pair(name: &str, value: &str, out: &mut Vec<u8>) {
    write_str(out, name).expect(IN_MEMORY);
    write_str(out, value).expect(IN_MEMORY);
}

fn nil(name: &str, out: &mut Vec<u8>) {
    write_str(out, name).expect(IN_MEMORY);
    write_nil(out).expect(IN_MEMORY);
}

#[cfg(test)]
mod tests {
    use rmpv::Value;

    use super::*;

    const TS: Seconds = Seconds(1.5);

    fn change(node: u16, key: u8, operation: Operation) -> ReplicaChange {
        ReplicaChange { node: NodeId(node), key: BlockKey([key; 16]), operation }
    }

    fn read(bytes: &[u8]) -> Value {
        rmpv::decode::read_value(&mut &bytes[..]).expect("msgpack")
    }

    /// Type, medium and first bytes of the hashes of each event.
    fn events(batch: &Value) -> Vec<(String, String, Vec<u8>)> {
        let field = |event: &Value, name: &str| event[name].as_str().unwrap_or_default().to_owned();
        let hashes = |event: &Value| {
            let hashes = event["block_hashes"].as_array().cloned().unwrap_or_default();
            hashes.iter().map(|hash| hash.as_slice().expect("bytes")[0]).collect()
        };
        let events = batch[1].as_array().expect("events").iter();
        events.map(|event| (field(event, "type"), field(event, "medium"), hashes(event))).collect()
    }

    fn expected(kind: &str, medium: &str, hashes: &[u8]) -> (String, String, Vec<u8>) {
        (kind.to_owned(), medium.to_owned(), hashes.to_vec())
    }

    #[test]
    fn keeps_the_order_within_a_node_and_merges_runs_into_one_event() {
        let (to_dram, to_nvme) = (Operation::Announce(Tier::Dram), Operation::Announce(Tier::Nvme));
        let from_dram = Operation::Withdraw(Tier::Dram);
        let changes = [
            change(7, 1, to_dram),
            change(9, 2, to_nvme),
            change(7, 3, to_dram),
            change(7, 1, from_dram),
            change(7, 1, to_dram),
        ];
        let batches = changed(TS, &changes, BLOCKS_PER_BATCH_MAX);
        let batches: Vec<Value> = batches.iter().map(|bytes| read(bytes)).collect();
        assert_eq!(batches.len(), 2);
        assert_eq!((&batches[0][0], &batches[0][2]), (&Value::from(1.5), &Value::from(7)));
        assert_eq!(
            events(&batches[0]),
            [
                expected("BlockStored", "CPU", &[1, 3]),
                expected("BlockRemoved", "CPU", &[1]),
                expected("BlockStored", "CPU", &[1]),
            ]
        );
        assert_eq!(batches[1][2], Value::from(9));
        assert_eq!(events(&batches[1]), [expected("BlockStored", "STORAGE", &[2])]);
        let stored = &batches[1][1][0];
        assert_eq!((&stored["token_ids"], &stored["block_size"]), (&Value::Array(vec![]), &Value::from(0)));
        for field in ["parent_block_hash", "lora_id", "lora_name"] {
            let fields = stored.as_map().expect("a map");
            assert!(fields.contains(&(Value::from(field), Value::Nil)), "{field} has no default in vLLM");
        }
        assert_eq!(
            (stored["locality"].as_str(), stored["ownership"].as_str()),
            (Some("LOCAL"), Some("reprise"))
        );
    }

    #[test]
    fn splits_a_long_run_into_several_batches() {
        let changes: Vec<_> = (0..5).map(|key| change(7, key, Operation::Announce(Tier::Dram))).collect();
        let batches = changed(TS, &changes, 2);
        let decoded: Vec<_> = batches.iter().flat_map(|bytes| events(&read(bytes))).collect();
        let stored = |hashes: &[u8]| expected("BlockStored", "CPU", hashes);
        assert_eq!(decoded, [stored(&[0, 1]), stored(&[2, 3]), stored(&[4])]);
    }

    #[test]
    fn stored_replicas_become_one_event_per_node_and_tier() {
        let held = |node, key, tier| ReplicaEntry { node: NodeId(node), key: BlockKey([key; 16]), tier };
        let all =
            [held(7, 1, Tier::Dram), held(7, 1, Tier::Nvme), held(8, 2, Tier::Nvme), held(7, 3, Tier::Dram)];
        let batches = stored(TS, &all, BLOCKS_PER_BATCH_MAX);
        let counts: Vec<_> = batches.iter().map(|bytes| events(&read(bytes)).len()).collect();
        assert_eq!(counts, [2, 1]);
    }

    #[test]
    fn clear_batches_name_their_node_and_empty_batches_are_valid() {
        assert_eq!(read(&cleared(TS, Some(NodeId(7))))[2], Value::from(7));
        let all = read(&cleared(TS, None));
        assert_eq!((&all[2], &all[1][0]["type"]), (&Value::Nil, &Value::from("AllBlocksCleared")));
        assert_eq!(read(&empty(TS))[1], Value::Array(vec![]));
    }
}
