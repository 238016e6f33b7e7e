//! The Directory service: batches of changes and lookups against the core, in parts.
//!
//! Sketch of a lookup of 8,192 keys: 128 KiB in, 8 parts of 1,024 keys at ≈ 0.1 µs a key = 0.1 ms each under the read
//! lock, up to 512 KiB out; allocations are per batch, none per key. Between parts other tasks run, and one worker is
//! always free of parts ([`Turns`]), so that heartbeats wait for nobody.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use reprise_controlplane_core::{Asker, Changes, Found, LiveNodes, Opening, Scope, Update, Updated, Voided};
use reprise_policy::placement::Holding;
use reprise_policy::{BlockKey, Epoch, NodeId, SlotSet};
use reprise_proto::controlplane::directory_server::Directory;
use reprise_proto::controlplane::{
    DescribeReply, DescribeRequest, LookupReply, LookupRequest, NodeReplicas, SlotsReply, SlotsRequest,
    UpdateReply, UpdateRequest,
};
use reprise_proto::local::KEYS_PER_CALL_MAX;
use tonic::{Request, Response, Status};

use crate::cluster::Cluster;
use crate::membership::node_number;
use crate::metrics::{Call, UpdateResult};
use crate::shards::{MemberView, Shards};
use crate::turns::{Turn, Turns};

/// Keys worked on under one taking of the directory's lock: 0.1 ms of lookups, 0.4 ms of changes.
pub const PART_KEYS: usize = 1024;
/// The same for all holders of keys and a choice among them: each copy of each block is looked at, a microsecond for 1,000 of
/// them and one for the choice, so half a millisecond.
const HOLDINGS_PART_KEYS: usize = 256;
/// Bytes of a packed replica: u16 node, u8 tier, u8 load class.
pub(crate) const REPLICA_BYTES: usize = 4;

/// See the module.
#[derive(Debug)]
pub struct DirectoryService {
    cluster: Arc<Cluster>,
    shards: Arc<Shards>,
    turns: Turns,
}

impl DirectoryService {
    /// A service over the shared state.
    pub fn new(cluster: Arc<Cluster>, shards: Arc<Shards>, turns: Turns) -> DirectoryService {
        DirectoryService { cluster, shards, turns }
    }

    /// A turn for work that keeps a thread busy beside that on the directory.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED`: too many calls wait already.
    pub(crate) async fn turn(&self) -> Result<Turn<'_>, Status> {
        self.turns.take().await
    }

    /// Applies a checked batch, part by part.
    async fn apply(&self, batch: &Batch) -> UpdateReply {
        let mut expected_sequence = 0;
        for first in (0..batch.count.max(1)).step_by(PART_KEYS) {
            between_parts(first).await;
            let last = batch.count.min(first + PART_KEYS);
            match self.apply_part(batch, first..last) {
                Updated::Fenced => return UpdateReply { fenced: true, ..UpdateReply::default() },
                Updated::Expecting { expected, .. } => {
                    expected_sequence = expected;
                    // Behind this part: something is missing, the rest would be refused as well.
                    if expected < batch.number_of(last) {
                        break;
                    }
                }
            }
        }
        let slots_version = self.cluster.slots_version();
        UpdateReply { fenced: false, expected_sequence, slots_version }
    }

    /// Applies one part and records what of it was new, in one taking of the lock.
    fn apply_part(&self, batch: &Batch, part: Range<usize>) -> Updated {
        let (node, first) = (batch.node, part.start);
        let opening = if first == 0 { batch.opening() } else { Opening::Nothing };
        let ends = if part.end == batch.count { &batch.ends } else { &SlotSet::EMPTY };
        let sequence = if first == 0 { batch.sequence } else { batch.number_of(first) };
        let changes = Changes::parse(&batch.keys, &batch.operations).expect("checked on arrival").range(part);
        let mut directory = self.cluster.directory_mut();
        let update = Update { node, epoch: batch.epoch, sequence, opening, changes, ends };
        let updated = directory.update(&update);
        if let Updated::Expecting { applied, voided, .. } = &updated {
            match voided {
                Voided::Nothing => {}
                Voided::Node => self.cluster.events.cleared(Scope::node(node)),
                Voided::Slots(slots) => {
                    slots
                        .iter()
                        .for_each(|slot| self.cluster.events.cleared(Scope::node_in_slot(node, slot)));
                }
            }
            let taken = directory.taken(node, changes.range(applied.clone()));
            self.cluster.metrics.changes.inc_by(self.cluster.events.changed(node, taken));
        }
        updated
    }

    /// The map by which this member answers: its place in it is certain, and the directory's slots are those of it.
    fn certain_map(&self) -> Option<Arc<MemberView>> {
        self.shards.certain_map().filter(|view| view.map.epoch() == self.cluster.slots_epoch())
    }

    /// Of a member whose place in the map is not certain nobody gets an answer.
    fn find_nothing(&self, keys: usize) -> LookupReply {
        let keys = u32::try_from(keys).expect("few enough for one call");
        let map_epoch = self.shards.view().map_or(0, |view| view.map.epoch().0);
        LookupReply {
            offsets: vec![0; keys as usize + 1],
            elsewhere: (0..keys).collect(),
            map_epoch,
            ..LookupReply::default()
        }
    }

    /// The replicas of keys, when this member's place in the map is certain; of keys of others it says so.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED`: too many calls wait already.
    pub(crate) async fn look_up(
        &self,
        keys: &[BlockKey],
        asking: Option<NodeId>,
    ) -> Result<LookupReply, Status> {
        let _turn = self.turns.take().await?;
        // Looked at before the answer is made and after: it may have run out, or been another, meanwhile. The directory's slots
        // follow the map a moment later: until then they may be another's.
        let Some(before) = self.certain_map() else { return Ok(self.find_nothing(keys.len())) };
        let live = self.cluster.live();
        let reply = self.find(keys, &live, asking).await;
        Ok(match self.certain_map() {
            Some(view) if Arc::ptr_eq(&view, &before) => {
                LookupReply { map_epoch: view.map.epoch().0, ..reply }
            }
            _ => self.find_nothing(keys.len()),
        })
    }

    /// Tells the holders of each key by its index, or none of keys of others; in parts, like a look-up. Returns the epoch
    /// of the map; `None` when this member's place in it was not certain all along: then what was told is worth nothing.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED`: too many calls wait already.
    pub(crate) async fn holdings(
        &self,
        keys: &[BlockKey],
        mut tell: impl FnMut(u32, Option<&[Holding]>),
    ) -> Result<Option<Epoch>, Status> {
        let _turn = self.turns.take().await?;
        let Some(before) = self.certain_map() else { return Ok(None) };
        let mut holdings = Vec::new();
        for (first, part) in (0u32..).step_by(HOLDINGS_PART_KEYS).zip(keys.chunks(HOLDINGS_PART_KEYS)) {
            between_parts(first as usize).await;
            let directory = self.cluster.directory();
            for (index, key) in (first..).zip(part) {
                holdings.clear();
                let owned = directory.holdings(key).map(|all| holdings.extend(all));
                tell(index, owned.map(|()| holdings.as_slice()));
            }
        }
        let same = |view: &Arc<MemberView>| Arc::ptr_eq(view, &before);
        Ok(self.certain_map().filter(same).map(|view| view.map.epoch()))
    }

    /// Finds replicas, part by part.
    async fn find(&self, keys: &[BlockKey], live: &LiveNodes, asking: Option<NodeId>) -> LookupReply {
        let peers = self.cluster.peers();
        let asker = Asker { node: asking, peers: &peers };
        let mut found = Found::default();
        let mut offsets = Vec::with_capacity(keys.len() + 1);
        let mut replicas = Vec::new();
        let (mut elsewhere, mut partial) = (Vec::new(), 0);
        offsets.push(0);
        let mut keys_found = 0;
        for (first, part) in (0u32..).step_by(PART_KEYS).zip(keys.chunks(PART_KEYS)) {
            between_parts(first as usize).await;
            self.cluster.directory().lookup_by(asker, part, live, &mut found);
            elsewhere.extend(found.elsewhere().iter().map(|index| first + index));
            partial += found.partial();
            let before = *offsets.last().expect("it begins with 0");
            offsets.extend(found.offsets()[1..].iter().map(|offset| before + offset));
            keys_found += found.offsets().windows(2).filter(|bounds| bounds[0] < bounds[1]).count() as u64;
            replicas.reserve(found.replicas().len() * REPLICA_BYTES);
            for replica in found.replicas() {
                let [low, high] = replica.node.0.to_le_bytes();
                replicas.extend_from_slice(&[low, high, replica.tier as u8, replica.load.0]);
            }
        }
        let metrics = &self.cluster.metrics;
        metrics.lookups.inc();
        metrics.lookup_keys.inc_by(keys.len() as u64);
        metrics.lookup_keys_found.inc_by(keys_found);
        metrics.lookup_keys_elsewhere.inc_by(elsewhere.len() as u64);
        metrics.lookup_keys_partial.inc_by(u64::from(partial));
        LookupReply { offsets, replicas: replicas.into(), map_epoch: 0, elsewhere, partial }
    }
}

#[tonic::async_trait]
impl Directory for DirectoryService {
    async fn slots(&self, request: Request<SlotsRequest>) -> Result<Response<SlotsReply>, Status> {
        let SlotsRequest { node, epoch } = request.into_inner();
        let Some(standing) = self.cluster.standing(node_number(node)?, Epoch(epoch)) else {
            return Ok(Response::new(SlotsReply { fenced: true, ..SlotsReply::default() }));
        };
        Ok(Response::new(SlotsReply {
            fenced: false,
            slots_version: standing.version,
            owned: Bytes::copy_from_slice(&standing.owned.to_bytes()),
            wanted: Bytes::copy_from_slice(&standing.wanted.to_bytes()),
        }))
    }

    #[tracing::instrument(level = "debug", skip_all, fields(node = request.get_ref().node))]
    async fn update(&self, request: Request<UpdateRequest>) -> Result<Response<UpdateReply>, Status> {
        let start = Instant::now();
        let metrics = &self.cluster.metrics;
        let _turn = self.turns.take().await?;
        let batch =
            Batch::check(request.into_inner()).inspect_err(|_| metrics.updated(UpdateResult::invalid))?;
        let reply = self.apply(&batch).await;
        let end = batch.number_of(batch.count);
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
        let LookupRequest { keys, asking_node } = request.into_inner();
        let asking = Some(node_number(asking_node)?).filter(|node| node.0 != 0);
        let reply = self.look_up(&unpack(&keys)?, asking).await?;
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
            slots_owned: u32::try_from(size.slots_owned).expect("16 bits"),
            slots_partial: u32::try_from(size.slots_partial).expect("16 bits"),
        }))
    }
}

/// An update whose keys and operations are well formed.
#[derive(Debug)]
struct Batch {
    node: NodeId,
    epoch: Epoch,
    sequence: u64,
    /// Everything announced before is gone.
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
            (true, _) => Opening::Anew(&self.begins),
            (false, false) => Opening::Slots(&self.begins),
            (false, true) => Opening::Nothing,
        }
    }

    /// Sequence number of the change at an index.
    fn number_of(&self, change: usize) -> u64 {
        self.sequence + u64::from(self.opening() != Opening::Nothing) + change as u64
    }
}

/// A set of slots of a request; no bytes are the empty set.
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

/// Lets other tasks run before any part but the first: a call of one part is answered without a detour, which would cost
/// it a look at the sockets and the waking of another worker.
async fn between_parts(before: usize) {
    if before > 0 {
        tokio::task::yield_now().await;
    }
}

/// The keys of a request.
pub(crate) fn unpack(keys: &[u8]) -> Result<Vec<BlockKey>, Status> {
    check_count(keys.len() / BlockKey::SIZE)?;
    BlockKey::unpack(keys).ok_or_else(|| {
        Status::invalid_argument(format!("{} bytes of keys are no whole number of 16-byte keys", keys.len()))
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
    use reprise_controlplane_core::MemberSettings;
    use reprise_controlplane_store::{MemoryStore, TimeToLive};
    use reprise_policy::shards::MemberName;
    use std::time::Duration;

    #[tokio::test]
    async fn a_member_answers_for_nothing_until_its_directory_has_the_slots_of_its_map() {
        let second = Duration::from_secs(1);
        let settings = MemberSettings { dead_after: second, forget_after: second };
        let (metrics, _) = Metrics::new();
        let cluster = Arc::new(Cluster::new(settings, 1, Events::new(1 << 16), metrics));
        let name = MemberName::new("a").expect("a name");
        let life = TimeToLive::new(second * 60).expect("within the limits");
        let store = Arc::new(MemoryStore::new());
        let identity = Identity::of(store.as_ref()).await.expect("it has one");
        let shards = Arc::new(Shards::new((store, identity), name, "a:1".to_owned(), life));
        let stop = tokio::sync::watch::Sender::new(false);
        let (holding, following, stopped) = (shards.clone(), shards.clone(), stop.subscribe());
        tokio::spawn(async move { holding.hold(stopped).await });
        tokio::spawn(async move { following.follow().await });
        let mut news = shards.watch();
        while shards.certain_map().is_none() {
            news.changed().await.expect("the sender lives");
        }
        let service = DirectoryService::new(cluster.clone(), shards.clone(), Turns::new(2, 8));
        let ask = async || {
            let request = LookupRequest { keys: vec![7; BlockKey::SIZE].into(), asking_node: 0 };
            service.lookup(Request::new(request)).await.expect("valid").into_inner().elsewhere
        };
        assert_eq!(ask().await, [0], "the slots are not there yet");
        let epoch = shards.view().expect("it follows").map.epoch();
        cluster.own(&shards.kept(&cluster.owned()), epoch);
        assert!(ask().await.is_empty());
        cluster.own(&SlotSet::ALL, Epoch(epoch.0 - 1));
        assert_eq!(ask().await, [0], "they are those of another map");
    }

    #[test]
    fn a_call_of_one_part_makes_no_detour_and_a_longer_one_lets_others_run_in_between() {
        let mut context = Context::from_waker(Waker::noop());
        assert_eq!(pin!(between_parts(0)).poll(&mut context), Poll::Ready(()));
        assert_eq!(pin!(between_parts(1)).poll(&mut context), Poll::Pending);
    }
}
