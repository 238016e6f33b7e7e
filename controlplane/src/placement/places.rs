//! Where further durable replicas go: the directory's answer for each key, and a choice among what nodes have said.
//!
//! Sketch: 256 keys of one call are one part under the directory's read lock, one to two microseconds each, also when 1,000
//! nodes have the block; the table of 1,000 nodes that the choice is made by is copied once a call, 50 µs.

use reprise_policy::placement::{Placed, Placement, PlacementReason};
use reprise_policy::{BlockKey, Epoch, NodeId};
use reprise_proto::controlplane::{PlaceReason, PlaceReply, PlaceRequest};
use tonic::Status;

use super::PlacementService;
use crate::directory::unpack;
use crate::membership::node_number;
use crate::metrics::{Metrics, PlaceResult};

/// Instead of a node number: it has replicas enough; no node will do.
const ENOUGH: u16 = 0;
const NOWHERE: u16 = u16::MAX;

/// A request that can be answered.
struct Asked {
    holder: NodeId,
    epoch: Epoch,
    keys: Vec<BlockKey>,
    slot_bytes: u64,
    reason: PlacementReason,
}

/// What is answered.
#[derive(Debug, Default)]
struct Answer {
    targets: Vec<u8>,
    elsewhere: Vec<u32>,
    enough: u64,
    placed: u64,
    nowhere: u64,
}

/// Answers for each key.
pub(super) async fn place(service: &PlacementService, request: PlaceRequest) -> Result<PlaceReply, Status> {
    let asked = Asked::check(request)?;
    let cluster = &service.cluster;
    if !cluster.is_registered(asked.holder, asked.epoch) {
        return Ok(PlaceReply { fenced: true, ..PlaceReply::default() });
    }
    let mut placement =
        Placement::new(asked.holder, asked.reason, asked.slot_bytes, cluster.placement_nodes());
    let mut answer = Answer::default();
    let certain = service.directory.holdings(&asked.keys, |index, holdings| {
        let placed = holdings.map(|holdings| placement.place(&asked.keys[index as usize], holdings));
        answer.add(index, placed);
    });
    let map_epoch = match certain.await? {
        Some(epoch) => {
            cluster.placed(placement.charges());
            epoch
        }
        // This member's place in the map was not certain all along: nothing of this is an answer.
        None => {
            answer = Answer::default();
            (0u32..).zip(&asked.keys).for_each(|(index, _)| answer.add(index, None));
            service.shards.view().map_or(Epoch(0), |view| view.map.epoch())
        }
    };
    answer.count(&cluster.metrics);
    Ok(PlaceReply {
        fenced: false,
        targets: answer.targets.into(),
        map_epoch: map_epoch.0,
        elsewhere: answer.elsewhere,
    })
}

impl Asked {
    fn check(request: PlaceRequest) -> Result<Asked, Status> {
        let PlaceRequest { holder, epoch, keys, slot_bytes, reason, to } = request;
        let (holder, to) = (node_number(holder)?, node_number(to)?);
        if slot_bytes == 0 {
            return Err(Status::invalid_argument("slot_bytes is 0: say how much room a block takes"));
        }
        let reason = match PlaceReason::try_from(reason) {
            Ok(PlaceReason::Hot) => PlacementReason::Hot,
            Ok(PlaceReason::Drain) => PlacementReason::Drain,
            Ok(PlaceReason::Move) if to.0 == 0 || to == holder => {
                return Err(Status::invalid_argument(format!(
                    "a move to node {to}: name another node in `to`"
                )));
            }
            Ok(PlaceReason::Move) => PlacementReason::Move(to),
            Ok(PlaceReason::Unspecified) | Err(_) => {
                return Err(Status::invalid_argument(format!("reason {reason}: HOT, DRAIN or MOVE")));
            }
        };
        Ok(Asked { holder, epoch: Epoch(epoch), keys: unpack(&keys)?, slot_bytes, reason })
    }
}

impl Answer {
    /// The answer for the next key; none: it is another member's.
    fn add(&mut self, index: u32, placed: Option<Placed>) {
        let target = match placed {
            Some(Placed::Enough) => {
                self.enough += 1;
                ENOUGH
            }
            Some(Placed::On(node)) => {
                self.placed += 1;
                node.0
            }
            Some(Placed::Nowhere) => {
                self.nowhere += 1;
                NOWHERE
            }
            None => {
                self.elsewhere.push(index);
                NOWHERE
            }
        };
        self.targets.extend_from_slice(&target.to_le_bytes());
    }

    fn count(&self, metrics: &Metrics) {
        metrics.placed(PlaceResult::enough, self.enough);
        metrics.placed(PlaceResult::target, self.placed);
        metrics.placed(PlaceResult::nowhere, self.nowhere);
        metrics.placed(PlaceResult::elsewhere, self.elsewhere.len() as u64);
    }
}
