//! The Directory service: applies batches of changes and answers lookups in parts.
//!
//! A lookup of 8,192 keys receives 128 KiB, runs 8 parts of 1,024 keys (≈ 0.1 µs a key, 0.1 ms a part) under
//! the read lock, and sends up to 512 KiB. It allocates per batch, not per key. Other tasks run between
//! parts, and one worker is always free of directory work ([`Admission`]), so that heartbeats are not
//! delayed.

#[cfg(test)]
pub(crate) mod fuzz;

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use reprise_controlplane_core::lookup_call::LookupAnswer;
use reprise_controlplane_core::{
    AnswerMap, Changes, Invalidation, LiveNodes, LookupCall, LookupResult, MemberView, Opening, Requester,
    Scope, Update, UpdateOutcome,
};
use reprise_identity::access::Call as AccessCall;
use reprise_policy::placement::ReplicaLocation;
use reprise_policy::{BlockKey, Epoch, NodeId, SlotSet};
use reprise_proto::controlplane::directory_server::Directory;
use reprise_proto::controlplane::{
    DescribeReply, DescribeRequest, LookupReply, LookupRequest, NodeReplicas, SlotsReply, SlotsRequest,
    UpdateReply, UpdateRequest,
};
use reprise_proto::local::KEYS_PER_CALL_MAX;
use tonic::{Request, Response, Status};

use crate::admission::{Admission, AdmissionPermit};
use crate::cluster::Cluster;
use crate::grpc_server::caller::Caller;
use crate::membership::node_number;
use crate::metrics::{Call, UpdateResult};
use crate::shards::Shards;

/// Keys processed while the directory's lock is held once: 0.1 ms of lookups, 0.4 ms of changes.
pub const PART_KEYS: usize = 1024;
/// The same for the holders of keys and a choice among them. With 1,000 copies of a block, reading them takes
/// 1 µs and the choice 1 µs, so a part takes 0.5 ms.
const HOLDERS_PART_KEYS: usize = 256;
/// Bytes of a packed replica: u16 node, u8 tier, u8 load class.
pub(crate) const REPLICA_BYTES: usize = 4;

/// The Directory service of one member.
#[derive(Debug)]
pub struct DirectoryService {
    cluster: Arc<Cluster>,
    shards: Arc<Shards>,
    admission: Admission,
}

impl DirectoryService {
    /// Creates the service over the shared state.
    pub fn new(cluster: Arc<Cluster>, shards: Arc<Shards>, admission: Admission) -> DirectoryService {
        DirectoryService { cluster, shards, admission }
    }

    /// Admits a call that occupies a thread outside of this service.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED`: the maximum number of calls is admitted.
    pub(crate) async fn admit(&self) -> Result<AdmissionPermit<'_>, Status> {
        self.admission.acquire().await
    }

    /// Applies a validated batch, part by part.
    async fn apply(&self, batch: &Batch) -> UpdateReply {
        let mut expected_sequence = 0;
        for first in (0..batch.count.max(1)).step_by(PART_KEYS) {
            yield_between_parts(first).await;
            let last = batch.count.min(first + PART_KEYS);
            match self.apply_part(batch, first..last) {
                UpdateOutcome::Fenced => return UpdateReply { fenced: true, ..UpdateReply::default() },
                UpdateOutcome::Expecting { expected, .. } => {
                    expected_sequence = expected;
                    // The part was not applied completely, so later parts would be rejected as well.
                    if expected < batch.number_of(last) {
                        break;
                    }
                }
            }
        }
        let slots_version = self.cluster.slots_version();
        UpdateReply { fenced: false, expected_sequence, slots_version }
    }

    /// Applies one part and logs its new changes, while the lock is held once.
    fn apply_part(&self, batch: &Batch, part: Range<usize>) -> UpdateOutcome {
        let (node, first) = (batch.node, part.start);
        let opening = if first == 0 { batch.opening() } else { Opening::Nothing };
        let ends = if part.end == batch.count { &batch.ends } else { &SlotSet::EMPTY };
        let sequence = if first == 0 { batch.sequence } else { batch.number_of(first) };
        let changes =
            Changes::parse(&batch.keys, &batch.operations).expect("validated on arrival").range(part);
        let mut directory = self.cluster.directory_mut();
        let update = Update { node, epoch: batch.epoch, sequence, opening, changes, ends };
        let outcome = directory.update(&update);
        if let UpdateOutcome::Expecting { applied, invalidated, .. } = &outcome {
            match invalidated {
                Invalidation::Nothing => {}
                Invalidation::Node => self.cluster.events.record_clearing(Scope::node(node)),
                Invalidation::Slots(slots) => {
                    slots.iter().for_each(|slot| {
                        self.cluster.events.record_clearing(Scope::node_in_slot(node, slot));
                    });
                }
            }
            let accepted = directory.accepted_changes(node, changes.range(applied.clone()));
            self.cluster.metrics.changes.inc_by(self.cluster.events.record_changes(node, accepted));
        }
        outcome
    }

    /// The current map, if this member's place in it is certain and the directory has the slots of it.
    fn answerable_map(&self) -> Option<Arc<MemberView>> {
        self.shards.answerable_map(self.cluster.slots_epoch())
    }

    /// Looks up replicas if this member's place in the map is certain. Keys of other members are marked.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED`: the maximum number of calls is admitted.
    pub(crate) async fn look_up(
        &self,
        keys: &[BlockKey],
        asking: Option<NodeId>,
    ) -> Result<LookupReply, Status> {
        let _permit = self.admission.acquire().await?;
        let count = u32::try_from(keys.len()).expect("the number of keys of a call fits");
        let mut call = LookupCall::begin(count, self.answerable_map());
        let mut replicas = Vec::new();
        if call.is_certain() {
            let live = self.cluster.live();
            self.find(keys, &live, asking, (&mut call, &mut replicas)).await;
        }
        let known = self.shards.view().map_or(Epoch(0), |view| view.map.epoch());
        let answer = call.end(self.answerable_map(), known);
        if !answer.is_certain {
            replicas.clear();
        }
        let LookupAnswer { offsets, elsewhere, partial, map_epoch, .. } = answer;
        Ok(LookupReply { offsets, replicas: replicas.into(), map_epoch: map_epoch.0, elsewhere, partial })
    }

    /// Passes the holders of each key to `visit` by key index, or `None` for keys of other members; works in
    /// parts like a lookup. Returns the epoch of the map. Returns `None` if this member's place was not
    /// certain throughout; the caller must then discard the results.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED`: the maximum number of calls is admitted.
    pub(crate) async fn holders(
        &self,
        keys: &[BlockKey],
        mut visit: impl FnMut(u32, Option<&[ReplicaLocation]>),
    ) -> Result<Option<Epoch>, Status> {
        let _permit = self.admission.acquire().await?;
        let Some(map) = AnswerMap::begin(self.answerable_map()) else { return Ok(None) };
        let mut holders = Vec::new();
        for (first, part) in (0u32..).step_by(HOLDERS_PART_KEYS).zip(keys.chunks(HOLDERS_PART_KEYS)) {
            yield_between_parts(first as usize).await;
            let directory = self.cluster.directory();
            for (index, key) in (first..).zip(part) {
                holders.clear();
                let owned = directory.holders(key).map(|all| holders.extend(all));
                visit(index, owned.map(|()| holders.as_slice()));
            }
        }
        Ok(map.end(self.answerable_map()))
    }

    /// Looks up replicas, part by part. Adds them to `replicas`, packed.
    async fn find(
        &self,
        keys: &[BlockKey],
        live: &LiveNodes,
        asking: Option<NodeId>,
        (call, replicas): (&mut LookupCall, &mut Vec<u8>),
    ) {
        let peers = self.cluster.peers();
        let asker = Requester { node: asking, peers: &peers };
        let mut found = LookupResult::default();
        let metrics = &self.cluster.metrics;
        metrics.lookups.inc();
        metrics.lookup_keys.inc_by(keys.len() as u64);
        for (first, part) in (0..).step_by(PART_KEYS).zip(keys.chunks(PART_KEYS)) {
            yield_between_parts(first).await;
            self.cluster.directory().lookup_for(asker, part, live, &mut found);
            call.add(&found);
            let keys_found = found.offsets().windows(2).filter(|bounds| bounds[0] < bounds[1]).count();
            metrics.lookup_keys_found.inc_by(keys_found as u64);
            metrics.lookup_keys_elsewhere.inc_by(found.elsewhere().len() as u64);
            metrics.lookup_keys_partial.inc_by(u64::from(found.partial()));
            replicas.reserve(found.replicas().len() * REPLICA_BYTES);
            for replica in found.replicas() {
                let [low, high] = replica.node.0.to_le_bytes();
                replicas.extend_from_slice(&[low, high, replica.tier as u8, replica.load.0]);
            }
        }
    }
}

#[tonic::async_trait]
impl Directory for DirectoryService {
    async fn slots(&self, request: Request<SlotsRequest>) -> Result<Response<SlotsReply>, Status> {
        Caller::authorise_number(&request, AccessCall::Slots, &self.cluster, request.get_ref().node)?;
        let SlotsRequest { node, epoch } = request.into_inner();
        let Some(status) = self.cluster.slot_status(node_number(node)?, Epoch(epoch)) else {
            return Ok(Response::new(SlotsReply { fenced: true, ..SlotsReply::default() }));
        };
        Ok(Response::new(SlotsReply {
            fenced: false,
            slots_version: status.version,
            owned: Bytes::copy_from_slice(&status.owned.to_bytes()),
            wanted: Bytes::copy_from_slice(&status.wanted.to_bytes()),
        }))
    }

    #[tracing::instrument(level = "debug", skip_all, fields(node = request.get_ref().node))]
    async fn update(&self, request: Request<UpdateRequest>) -> Result<Response<UpdateReply>, Status> {
        let start = Instant::now();
        let metrics = &self.cluster.metrics;
        let _permit = self.admission.acquire().await?;
        Caller::authorise_number(&request, AccessCall::Update, &self.cluster, request.get_ref().node)?;
        let batch = Batch::check(request.into_inner())
            .inspect_err(|_| metrics.count_update(UpdateResult::invalid))?;
        let reply = self.apply(&batch).await;
        let end = batch.number_of(batch.count);
        metrics.count_update(match &reply {
            UpdateReply { fenced: true, .. } => UpdateResult::fenced,
            UpdateReply { expected_sequence, .. } if *expected_sequence < end => UpdateResult::gap,
            UpdateReply { .. } => UpdateResult::applied,
        });
        metrics.observe_call(Call::update, start.elapsed());
        Ok(Response::new(reply))
    }

    #[tracing::instrument(level = "debug", skip_all, fields(asking = request.get_ref().asking_node))]
    async fn lookup(&self, request: Request<LookupRequest>) -> Result<Response<LookupReply>, Status> {
        let start = Instant::now();
        let LookupRequest { keys, asking_node } = request.into_inner();
        let asking = Some(node_number(asking_node)?).filter(|node| node.0 != 0);
        let reply = self.look_up(&unpack(&keys)?, asking).await?;
        self.cluster.metrics.observe_call(Call::lookup, start.elapsed());
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
            slots_owned: u32::try_from(size.slots_owned).expect("16 bits"),
            slots_partial: u32::try_from(size.slots_partial).expect("16 bits"),
        }))
    }
}

/// An update with valid node, keys, operations and slot sets.
#[derive(Debug)]
struct Batch {
    node: NodeId,
    epoch: Epoch,
    sequence: u64,
    /// Whether the update invalidates everything that the node announced before.
    reset: bool,
    begins: SlotSet,
    ends: SlotSet,
    keys: Bytes,
    operations: Bytes,
    count: usize,
}

impl Batch {
    fn check(request: UpdateRequest) -> Result<Batch, Status> {
        let UpdateRequest { node, epoch, sequence, keys, operations, reset, begins, ends } = request;
        let node = node_number(node)?;
        check_count(operations.len().max(keys.len() / BlockKey::SIZE))?;
        let count = Changes::parse(&keys, &operations)
            .map_err(|error| Status::invalid_argument(error.to_string()))?
            .len();
        if sequence.checked_add(count as u64 + 1).is_none() {
            return Err(Status::invalid_argument(format!("sequence {sequence}: count changes from 0")));
        }
        let (begins, ends) = (slot_set("begins", &begins)?, slot_set("ends", &ends)?);
        Ok(Batch { node, epoch: Epoch(epoch), sequence, reset, begins, ends, keys, operations, count })
    }

    fn opening(&self) -> Opening<'_> {
        match (self.reset, self.begins.is_empty()) {
            (true, _) => Opening::Reset(&self.begins),
            (false, false) => Opening::Slots(&self.begins),
            (false, true) => Opening::Nothing,
        }
    }

    /// Sequence number of the change at an index of the batch.
    fn number_of(&self, change: usize) -> u64 {
        self.sequence + u64::from(self.opening() != Opening::Nothing) + change as u64
    }
}

/// Decodes a slot set of a request; no bytes mean the empty set.
fn slot_set(field: &str, bytes: &[u8]) -> Result<SlotSet, Status> {
    if bytes.is_empty() {
        return Ok(SlotSet::EMPTY);
    }
    SlotSet::from_bytes(bytes).ok_or_else(|| {
        Status::invalid_argument(format!(
            "{field} has {} bytes: a set of hash slots has {}",
            bytes.len(),
            SlotSet::BYTES
        ))
    })
}

/// Yields before every part but the first. A single-part call returns without yielding, which would cost a
/// poll of the sockets and wake another worker.
async fn yield_between_parts(before: usize) {
    if before > 0 {
        tokio::task::yield_now().await;
    }
}

/// Decodes the keys of a request.
pub(crate) fn unpack(keys: &[u8]) -> Result<Vec<BlockKey>, Status> {
    check_count(keys.len() / BlockKey::SIZE)?;
    BlockKey::unpack(keys).ok_or_else(|| {
        Status::invalid_argument(format!("invalid keys: {} bytes, expected a multiple of 16", keys.len()))
    })
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
    use crate::events::Events;
    use crate::identity::Identity;
    use crate::metrics::Metrics;
    use reprise_controlplane_core::{AssignedSlots, LivenessSettings};
    use reprise_controlplane_store::{MemoryStore, TimeToLive};
    use reprise_policy::shards::MemberName;
    use std::time::Duration;

    #[tokio::test]
    async fn answers_only_when_the_directory_has_the_slots_of_the_current_map() {
        let second = Duration::from_secs(1);
        let settings = LivenessSettings { dead_after: second, forget_after: second };
        let (metrics, _) = Metrics::new();
        let cluster = Arc::new(Cluster::new(settings, 1, Events::new(1 << 16), metrics));
        let name = MemberName::new("a").expect("a name");
        let life = TimeToLive::new(second * 60).expect("within the limits");
        let store = Arc::new(MemoryStore::new());
        let identity = Identity::load_or_create(store.as_ref()).await.expect("created");
        let shards = Arc::new(Shards::new((store, identity), name, "a:1".to_owned(), life));
        let stop = tokio::sync::watch::Sender::new(false);
        let (holding, following, stopped) = (shards.clone(), shards.clone(), stop.subscribe());
        tokio::spawn(async move { holding.keep_registered(stopped).await });
        tokio::spawn(async move { following.follow().await });
        let mut news = shards.watch();
        while shards.with_place(|_| ()).is_none() {
            news.changed().await.expect("the sender exists");
        }
        let service = DirectoryService::new(cluster.clone(), shards.clone(), Admission::new(2, 8));
        let ask = async || {
            let request = LookupRequest { keys: vec![7; BlockKey::SIZE].into(), asking_node: 0 };
            service.lookup(Request::new(request)).await.expect("valid").into_inner().elsewhere
        };
        assert_eq!(ask().await, [0], "the slots are not assigned yet");
        let AssignedSlots { slots, epoch } = shards.assigned_slots(&cluster.owned());
        cluster.set_owned_slots(&slots, epoch);
        assert!(ask().await.is_empty());
        cluster.set_owned_slots(&SlotSet::ALL, Epoch(epoch.0 - 1));
        assert_eq!(ask().await, [0], "the slots belong to another map");
    }

    #[test]
    fn yields_between_parts_but_not_before_the_first() {
        let mut context = Context::from_waker(Waker::noop());
        assert_eq!(pin!(yield_between_parts(0)).poll(&mut context), Poll::Ready(()));
        assert_eq!(pin!(yield_between_parts(1)).poll(&mut context), Poll::Pending);
    }
}
