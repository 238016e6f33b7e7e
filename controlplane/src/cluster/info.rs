//! Conversion of a node's state to the [`NodeInfo`] of node lists and watches.

use reprise_controlplane_core::{NodeLiveness, NodeRecord, NodeReport, NodeTable};
use reprise_policy::peer::PeerEndpoint;
use reprise_policy::{DrainProgress, NodeMode};
use reprise_proto::controlplane::{self as wire, NodeInfo, NodeTenants, NodeUsage};

use super::Cluster;
use super::node_selection::wire_mode;
use crate::placement::bytes;

impl Cluster {
    pub(super) fn infos(&self, table: &NodeTable) -> Vec<NodeInfo> {
        table.iter().map(|(record, state)| self.info(table, record, state)).collect()
    }

    pub(super) fn info(&self, table: &NodeTable, record: &NodeRecord, state: NodeLiveness) -> NodeInfo {
        let details = record.details.clone();
        let set = self.mode_of(&record.name);
        let drain = table.drain_of(record.node, set.revision);
        NodeInfo {
            node: u32::from(record.node.0),
            name: record.name.clone(),
            peer_endpoints: details.peer_endpoints.into_iter().map(endpoint).collect(),
            admin_address: details.admin_address,
            epoch: record.epoch.0,
            alive: state == NodeLiveness::Alive,
            failure_domain: details.failure_domain,
            version: details.version,
            mode: wire_mode(set.mode).into(),
            usage: table.report_of(record.node).map(usage),
            drain: drain.filter(|_| set.mode == NodeMode::Draining).map(progress),
            tenants: table
                .tenants_of(record.node)
                .map(|set| NodeTenants { names: set.iter().map(ToString::to_string).collect() }),
        }
    }
}

fn endpoint(PeerEndpoint { protocol, address }: PeerEndpoint) -> wire::PeerEndpoint {
    wire::PeerEndpoint { protocol, address }
}

/// Lists endpoints for a log line.
pub(super) fn addresses(endpoints: &[PeerEndpoint]) -> String {
    let texts = endpoints.iter().map(|endpoint| format!("{}={}", endpoint.protocol, endpoint.address));
    texts.collect::<Vec<_>>().join(", ")
}

fn usage(report: &NodeReport) -> NodeUsage {
    NodeUsage {
        capacity: Some(bytes(report.capacity)),
        used: Some(bytes(report.used)),
        queued_bytes: report.queued_bytes,
    }
}

fn progress(drain: DrainProgress) -> wire::DrainProgress {
    wire::DrainProgress {
        drained: drain.drained,
        walked_blocks: drain.walked_blocks,
        durable_blocks: drain.durable_blocks,
        moved_bytes: drain.moved_bytes,
        nowhere_blocks: drain.nowhere_blocks,
    }
}
