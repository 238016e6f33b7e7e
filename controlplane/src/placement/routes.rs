//! `Route`: ranks nodes by the cached prefix of a prompt, for gateways.
//!
//! The cost of a ranking is the number of keys × nodes that hold them. 8,192 keys on 1,000 nodes take 8
//! million steps, 17 ms. So a ranking needs admission ([`crate::admission`]), and yields after every
//! [`PART_STEPS`] (0.3 ms). Waiting for other members needs no admission.

use reprise_policy::routing::{KeyReplicas, RankedNode, Ranker, Ranking};
use reprise_policy::{BlockKey, NodeId, NodeMode, routing::LoadHint};
use reprise_proto::controlplane::{RouteReply, RouteRequest, RoutedNode};
use tonic::Status;

use super::PlacementService;
use crate::directory::unpack;

/// Default and maximum number of nodes in a reply; gateways use few.
const NODES_DEFAULT: usize = 16;
const NODES_MAX: usize = 1024;
/// Steps of a ranking between yields.
const PART_STEPS: usize = 1 << 17;

/// Handles a `Route` request.
pub(super) async fn route(service: &PlacementService, request: RouteRequest) -> Result<RouteReply, Status> {
    let keys = unpack(&request.keys)?;
    let nodes_max = match request.nodes_max {
        0 => NODES_DEFAULT,
        nodes => (nodes as usize).min(NODES_MAX),
    };
    let Some(first) = keys.first() else { return Ok(RouteReply::default()) };
    let chain = service.prefix_matcher.query(&keys).await;
    let permit = service.directory.admit().await?;
    let ranking = rank(first, chain.keys(), |node| service.cluster.load_of(node)).await;
    drop(permit);
    let metrics = &service.cluster.metrics;
    metrics.route_keys.inc_by(keys.len() as u64);
    metrics.route_keys_unanswered.inc_by(u64::from(chain.unanswered));
    let routed = |ranked: &RankedNode| {
        let (name, mode) = service.cluster.name_and_mode(ranked.node)?;
        // A draining node must not receive prompts, but its blocks count for the cluster.
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

/// Ranks in parts, and yields between them.
async fn rank<'a>(
    first: &BlockKey,
    mut chain: impl Iterator<Item = KeyReplicas<'a>>,
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

    /// Number of yields while ranking a chain of `keys` that `nodes` nodes hold.
    fn pauses(keys: usize, nodes: u16) -> usize {
        let replicas: Vec<(NodeId, Tier)> = (1..=nodes).map(|node| (NodeId(node), Tier::Dram)).collect();
        let chain = std::iter::repeat_n(KeyReplicas::Complete(&replicas), keys);
        let first = BlockKey([7; 16]);
        let mut ranking = pin!(rank(&first, chain, |_| LoadHint::default()));
        let mut context = Context::from_waker(Waker::noop());
        (0..).take_while(|_| ranking.as_mut().poll(&mut context).is_pending()).count()
    }

    #[test]
    fn ranking_yields_for_a_long_chain_on_many_nodes_but_not_for_a_short_one() {
        assert_eq!(pauses(1024, 8), 0);
        assert_eq!(pauses(2048, 1000), 2048 * 2001 / PART_STEPS);
    }
}
