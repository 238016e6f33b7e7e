//! The Directory service: batches of changes and lookups against the core, in parts.
//!
//! Sketch of a lookup of 8,192 keys: 128 KiB in, 8 parts of 1,024 keys at ≈ 0.1 µs a key = 0.1 ms each under the read
//! lock, up to 512 KiB out; allocations are per batch, none per key. Between parts other tasks run, and one worker is
//! always free of parts ([`Turns`]), so that heartbeats wait for nobody.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use reprise_controlplane_core::{Begin, Changes, Found, LiveNodes, Update, Updated};
use reprise_policy::{BlockKey, Epoch, NodeId};
use reprise_proto::controlplane::directory_server::Directory;
use reprise_proto::controlplane::{
    DescribeReply, DescribeRequest, LookupReply, LookupRequest, NodeReplicas, UpdateReply, UpdateRequest,
    WatchReply, WatchRequest,
};
use reprise_proto::local::KEYS_PER_CALL_MAX;
use tokio_stream::wrappers::BroadcastStream;
use tokio_stream::wrappers::errors::BroadcastStreamRecvError;
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status};

use crate::cluster::{Cluster, News, replaced};
use crate::membership::node_number;
use crate::metrics::{Call, UpdateResult, WatchLabels, WatchOf};
use crate::turns::Turns;

/// Keys worked on under one taking of the directory's lock: 0.1 ms of lookups, 0.4 ms of changes.
pub const PART_KEYS: usize = 1024;
/// Bytes of a packed replica: u16 node, u8 tier, u8 zero.
const REPLICA_BYTES: usize = 4;

/// See the module.
#[derive(Debug)]
pub struct DirectoryService {
    cluster: Arc<Cluster>,
    turns: Turns,
}

/// The stream of directory changes.
pub type DirectoryChanges = Pin<Box<dyn Stream<Item = Result<WatchReply, Status>> + Send>>;

impl DirectoryService {
    /// A service over the shared state.
    pub fn new(cluster: Arc<Cluster>, turns: Turns) -> DirectoryService {
        DirectoryService { cluster, turns }
    }

    /// Applies a checked batch, part by part.
    async fn apply(&self, batch: &Batch) -> UpdateReply {
        let mut expected_sequence = 0;
        for first in (0..batch.count.max(1)).step_by(PART_KEYS) {
            between_parts(first).await;
            let last = batch.count.min(first + PART_KEYS);
            match self.apply_part(batch, first..last) {
                Updated::Fenced => return UpdateReply { fenced: true, expected_sequence: 0 },
                Updated::Expecting { expected, .. } => {
                    expected_sequence = expected;
                    // Behind this part: something is missing, the rest would be refused as well.
                    if expected < batch.sequence + last as u64 {
                        break;
                    }
                }
            }
        }
        UpdateReply { fenced: false, expected_sequence }
    }

    /// Applies one part and tells the watchers what of it was new, in one taking of the lock.
    fn apply_part(&self, batch: &Batch, part: std::ops::Range<usize>) -> Updated {
        let (node, first) = (batch.node, part.start);
        let begin = if first == 0 { batch.begin } else { Begin::Continue };
        let changes = Changes::parse(&batch.keys, &batch.operations).expect("checked on arrival").range(part);
        let sequence = batch.sequence + first as u64;
        let mut directory = self.cluster.directory_mut();
        let updated = directory.update(&Update { node, epoch: batch.epoch, sequence, begin, changes });
        if let Updated::Expecting { applied, expected } = &updated {
            // An inventory that was taken has moved what is expected to its own end.
            if begin == Begin::Inventory && *expected == sequence + changes.len() as u64 {
                self.cluster.tell_changes(|| replaced(node));
            }
            if !applied.is_empty() {
                let of = first + applied.start..first + applied.end;
                self.cluster.tell_changes(|| WatchReply {
                    node: u32::from(node.0),
                    keys: batch.keys.slice(of.start * BlockKey::SIZE..of.end * BlockKey::SIZE),
                    operations: batch.operations.slice(of),
                    missed: false,
                });
                self.cluster.metrics.changes.inc_by(applied.len() as u64);
            }
        }
        updated
    }

    /// Finds replicas, part by part.
    async fn find(&self, keys: &[BlockKey], live: &LiveNodes, asking: Option<NodeId>) -> LookupReply {
        let mut found = Found::default();
        let mut offsets = Vec::with_capacity(keys.len() + 1);
        let mut replicas = Vec::new();
        offsets.push(0);
        let mut keys_found = 0;
        for (number, part) in keys.chunks(PART_KEYS).enumerate() {
            between_parts(number).await;
            self.cluster.directory().lookup(part, live, asking, &mut found);
            let before = *offsets.last().expect("it begins with 0");
            offsets.extend(found.offsets()[1..].iter().map(|offset| before + offset));
            keys_found += found.offsets().windows(2).filter(|bounds| bounds[0] < bounds[1]).count() as u64;
            replicas.reserve(found.replicas().len() * REPLICA_BYTES);
            for replica in found.replicas() {
                let [low, high] = replica.node.0.to_le_bytes();
                replicas.extend_from_slice(&[low, high, replica.tier as u8, 0]);
            }
        }
        let metrics = &self.cluster.metrics;
        metrics.lookups.inc();
        metrics.lookup_keys.inc_by(keys.len() as u64);
        metrics.lookup_keys_found.inc_by(keys_found);
        LookupReply { offsets, replicas: replicas.into() }
    }
}

#[tonic::async_trait]
impl Directory for DirectoryService {
    #[tracing::instrument(level = "debug", skip_all, fields(node = request.get_ref().node))]
    async fn update(&self, request: Request<UpdateRequest>) -> Result<Response<UpdateReply>, Status> {
        let start = Instant::now();
        let metrics = &self.cluster.metrics;
        let _turn = self.turns.take().await?;
        let batch =
            Batch::check(request.into_inner()).inspect_err(|_| metrics.updated(UpdateResult::invalid))?;
        let reply = self.apply(&batch).await;
        let end = batch.sequence + batch.count as u64;
        metrics.updated(match &reply {
            UpdateReply { fenced: true, .. } => UpdateResult::fenced,
            UpdateReply { expected_sequence, .. } if *expected_sequence < end => UpdateResult::gap,
            UpdateReply { .. } => UpdateResult::applied,
        });
        metrics.took(Call::update, start.elapsed());
        Ok(Response::new(reply))
    }

    #[tracing::instrument(level = "debug", skip_all, fields(asking = request.get_ref().asking_node))]
    async fn lookup(&self, request: Request<LookupRequest>) -> Result<Response<LookupReply>, Status> {
        let start = Instant::now();
        let _turn = self.turns.take().await?;
        let LookupRequest { keys, asking_node } = request.into_inner();
        let asking = Some(node_number(asking_node)?).filter(|node| node.0 != 0);
        check_count(keys.len() / BlockKey::SIZE)?;
        let keys = BlockKey::unpack(&keys).ok_or_else(|| {
            Status::invalid_argument(format!(
                "{} bytes of keys are no whole number of 16-byte keys",
                keys.len()
            ))
        })?;
        let live = self.cluster.live();
        let reply = self.find(&keys, &live, asking).await;
        self.cluster.metrics.took(Call::lookup, start.elapsed());
        Ok(Response::new(reply))
    }

    async fn describe(&self, _: Request<DescribeRequest>) -> Result<Response<DescribeReply>, Status> {
        let size = self.cluster.directory().size();
        let nodes = size.nodes.iter().map(|node| NodeReplicas {
            node: u32::from(node.node.0),
            dram: node.dram,
            nvme: node.nvme,
        });
        Ok(Response::new(DescribeReply {
            keys: size.keys,
            replicas: size.replicas,
            bytes: size.bytes,
            lookups: self.cluster.metrics.lookup_keys.get(),
            updates: size.updates,
            nodes: nodes.collect(),
        }))
    }

    type WatchStream = DirectoryChanges;

    async fn watch(&self, _: Request<WatchRequest>) -> Result<Response<DirectoryChanges>, Status> {
        let seat = self.cluster.take_seat(WatchOf::directory)?;
        let metrics = self.cluster.metrics.clone();
        let changes = BroadcastStream::new(self.cluster.watch_directory()).map(move |news| {
            let _open = &seat;
            match news {
                Ok(News::Change(change)) => Ok(change),
                Ok(News::Closing) => Err(Status::unavailable("the control plane is shutting down")),
                Err(BroadcastStreamRecvError::Lagged(_)) => {
                    metrics.watch_missed.get_or_create(&WatchLabels { of: WatchOf::directory }).inc();
                    Ok(WatchReply { missed: true, ..WatchReply::default() })
                }
            }
        });
        Ok(Response::new(Box::pin(changes)))
    }
}

/// An update whose keys and operations are well formed.
#[derive(Debug)]
struct Batch {
    node: NodeId,
    epoch: Epoch,
    sequence: u64,
    begin: Begin,
    keys: Bytes,
    operations: Bytes,
    count: usize,
}

impl Batch {
    fn check(request: UpdateRequest) -> Result<Batch, Status> {
        let UpdateRequest { node, epoch, sequence, keys, operations, reset } = request;
        let node = node_number(node)?;
        check_count(operations.len().max(keys.len() / BlockKey::SIZE))?;
        let count = Changes::parse(&keys, &operations)
            .map_err(|error| Status::invalid_argument(error.to_string()))?
            .len();
        if sequence.checked_add(count as u64).is_none() {
            return Err(Status::invalid_argument(format!("sequence {sequence}: count changes from 0")));
        }
        let begin = if reset { Begin::Inventory } else { Begin::Continue };
        Ok(Batch { node, epoch: Epoch(epoch), sequence, begin, keys, operations, count })
    }
}

/// Lets other tasks run before any part but the first: a call of one part is answered without a detour, which would cost
/// it a look at the sockets and the waking of another worker.
async fn between_parts(before: usize) {
    if before > 0 {
        tokio::task::yield_now().await;
    }
}

fn check_count(keys: usize) -> Result<(), Status> {
    if keys > KEYS_PER_CALL_MAX {
        return Err(Status::invalid_argument(format!(
            "{keys} keys in one call: send at most {KEYS_PER_CALL_MAX}"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    #[test]
    fn a_call_of_one_part_makes_no_detour_and_a_longer_one_lets_others_run_in_between() {
        let mut context = Context::from_waker(Waker::noop());
        assert_eq!(pin!(between_parts(0)).poll(&mut context), Poll::Ready(()));
        assert_eq!(pin!(between_parts(1)).poll(&mut context), Poll::Pending);
    }
}
