//! Which nodes know most of a prompt, for gateways.

use reprise_policy::NodeMode;
use reprise_policy::routing::{RankedNode, rank};
use reprise_proto::controlplane::{RouteReply, RouteRequest, RoutedNode};
use tonic::Status;

use super::PlacementService;
use crate::directory::unpack;

/// Nodes answered when the request does not say how many, and at the most: what a gateway can make use of.
const NODES_DEFAULT: usize = 16;
const NODES_MAX: usize = 1024;

/// Ranks nodes for a chain of keys.
pub(super) async fn route(service: &PlacementService, request: RouteRequest) -> Result<RouteReply, Status> {
    let keys = unpack(&request.keys)?;
    let nodes_max = match request.nodes_max {
        0 => NODES_DEFAULT,
        nodes => (nodes as usize).min(NODES_MAX),
    };
    let Some(first) = keys.first() else { return Ok(RouteReply::default()) };
    let chain = service.chains.known(&keys).await;
    let ranking = rank(first, chain.keys(), |node| service.cluster.load_of(node));
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
