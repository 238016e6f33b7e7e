//! Which nodes know most of a prompt, for gateways.
//!
//! Ranking keeps a thread busy for as long as keys × nodes that hold them need: 8,192 keys that all of 1,000 nodes hold are 8
//! million steps, 17 ms in one. So it has a turn ([`crate::turns`]) and lets other tasks run after every
//! [`PART_STEPS`]: 0.3 ms. The waiting for other members holds no turn.

use reprise_policy::routing::{Known, RankedNode, Ranker, Ranking};
use reprise_policy::{BlockKey, NodeId, NodeMode, routing::LoadHint};
use reprise_proto::controlplane::{RouteReply, RouteRequest, RoutedNode};
use tonic::Status;

use super::PlacementService;
use crate::directory::unpack;

/// Nodes answered when the request does not say how many, and at the most: what a gateway can make use of.
const NODES_DEFAULT: usize = 16;
const NODES_MAX: usize = 1024;
/// Steps of a ranking without a pause.
const PART_STEPS: usize = 1 << 17;

/// Ranks nodes for a chain of keys.
pub(super) async fn route(service: &PlacementService, request: RouteRequest) -> Result<RouteReply, Status> {
    let keys = unpack(&request.keys)?;
    let nodes_max = match request.nodes_max {
        0 => NODES_DEFAULT,
        nodes => (nodes as usize).min(NODES_MAX),
    };
    let Some(first) = keys.first() else { return Ok(RouteReply::default()) };
    let chain = service.chains.known(&keys).await;
    let turn = service.directory.turn().await?;
    let ranking = rank(first, chain.keys(), |node| service.cluster.load_of(node)).await;
    drop(turn);
    let metrics = &service.cluster.metrics;
    metrics.route_keys.inc_by(keys.len() as u64);
    metrics.route_keys_unanswered.inc_by(u64::from(chain.unanswered));
    let routed = |ranked: &RankedNode| {
        let (name, mode) = service.cluster.name_and_mode(ranked.node)?;
        // What is to leave is no place for a prompt; what it has counts for the cluster.
        (mode != NodeMode::Draining).then(|| RoutedNode {
            node: u32::from(ranked.node.0),
            name,
            run: ranked.run,
            dram_run: ranked.dram_run,
            queued_bytes: ranked.load.0,
        })
    };
    Ok(RouteReply {
        nodes: ranking.nodes.iter().filter_map(routed).take(nodes_max).collect(),
        cluster_run: ranking.cluster_run,
        unanswered: chain.unanswered,
        partial: chain.partial,
    })
}

/// Ranks part by part, and lets other tasks run in between.
async fn rank<'a>(
    first: &BlockKey,
    mut chain: impl Iterator<Item = Known<'a>>,
    load: impl Fn(NodeId) -> LoadHint,
) -> Ranking {
    let mut ranker = Ranker::default();
    while ranker.pass(&mut chain, PART_STEPS).is_continue() {
        tokio::task::yield_now().await;
    }
    ranker.finish(first, load)
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Waker};

    use reprise_policy::Tier;

    use super::*;

    /// How often the ranking of a chain that so many nodes hold lets others run.
    fn pauses(keys: usize, nodes: u16) -> usize {
        let replicas: Vec<(NodeId, Tier)> = (1..=nodes).map(|node| (NodeId(node), Tier::Dram)).collect();
        let chain = std::iter::repeat_n(Known::Replicas(&replicas), keys);
        let first = BlockKey([7; 16]);
        let mut ranking = pin!(rank(&first, chain, |_| LoadHint::default()));
        let mut context = Context::from_waker(Waker::noop());
        (0..).take_while(|_| ranking.as_mut().poll(&mut context).is_pending()).count()
    }

    #[test]
    fn the_ranking_of_a_long_chain_that_many_nodes_hold_lets_others_run_and_a_short_one_makes_no_detour() {
        assert_eq!(pauses(1024, 8), 0);
        assert_eq!(pauses(2048, 1000), 2048 * 2001 / PART_STEPS);
    }
}
