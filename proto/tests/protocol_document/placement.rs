//! Examples of the Placement service's messages.

use prost::bytes::Bytes;
use reprise_proto::controlplane as cluster;

use super::{row, run};

/// Messages that only occur inside other messages.
pub(super) const CARRIED: [&str; 12] = [
    "Bytes",
    "NodeUsage",
    "DrainProgress",
    "TenantReport",
    "TenantOrder",
    "Move",
    "RoutedNode",
    "Tenant",
    "TenantState",
    "TenantShare",
    "Blocks",
    "TenantHolding",
];

fn both(dram: u64, nvme: u64) -> Option<cluster::Bytes> {
    Some(cluster::Bytes { dram, nvme })
}

fn blocks(dram: u64, nvme: u64) -> Option<cluster::Blocks> {
    Some(cluster::Blocks { dram, nvme })
}

pub(super) fn usage() -> cluster::NodeUsage {
    cluster::NodeUsage { capacity: both(1024, 2048), used: both(1, 2), queued_bytes: 3 }
}

pub(super) fn drain() -> cluster::DrainProgress {
    cluster::DrainProgress {
        drained: true,
        walked_blocks: 4,
        durable_blocks: 5,
        moved_bytes: 6,
        nowhere_blocks: 7,
    }
}

fn report_rows() -> Vec<String> {
    let tenant = cluster::TenantReport {
        tenant: "t".to_owned(),
        version: 9,
        limit: both(3, 4),
        used: both(1, 2),
        limited: both(5, 6),
        elsewhere: true,
        blocks: blocks(7, 8),
    };
    let report = cluster::ReportRequest {
        node: 7,
        epoch: 3,
        usage: Some(usage()),
        drain: Some(drain()),
        tenants: vec![tenant],
        map_digest: 0x0102_0304_0506_0708,
        session_tenants: vec!["u".to_owned()],
    };
    let order =
        cluster::TenantOrder { tenant: "t".to_owned(), version: 9, reserved: both(1, 2), limit: both(3, 4) };
    let reply = cluster::ReportReply {
        fenced: true,
        mode: cluster::NodeMode::Draining.into(),
        mode_revision: 12,
        orders: vec![order],
        r#move: Some(cluster::Move { to: 258, bytes: 4096 }),
    };
    vec![
        row(
            "`ReportRequest`",
            "node 7, epoch 3; uses 1 byte of 1 KiB and 2 of 2 KiB, 3 queued; drained, 4, 5, 6, 7; tenant \"t\": version 9, \
             limit 3, 4, used 1, 2, limited 5, 6, elsewhere, blocks 7, 8; map 0x01…08; sessions of \"u\"",
            &report,
        ),
        row(
            "`ReportReply`",
            "fenced; draining by revision 12; \"t\": version 9, reserved 1, 2, limit 3, 4; 4,096 bytes to node 258",
            &reply,
        ),
    ]
}

fn question_rows() -> Vec<String> {
    let place = cluster::PlaceRequest {
        holder: 7,
        epoch: 3,
        keys: run(0x11, 32),
        slot_bytes: 8192,
        reason: cluster::PlaceReason::Move.into(),
        to: 258,
    };
    let placed = cluster::PlaceReply {
        fenced: true,
        targets: Bytes::from_static(&[2, 1, 0xff, 0xff]),
        map_epoch: 12,
        elsewhere: vec![1],
    };
    let node = cluster::RoutedNode { node: 7, name: "n".to_owned(), run: 2, dram_run: 1, queued_bytes: 300 };
    let routed = cluster::RouteReply { nodes: vec![node], cluster_run: 3, unanswered: 4, partial: 5 };
    vec![
        row("`PlaceRequest`", "holder 7, epoch 3; 16 × 11, 16 × 11 of 8 KiB each; moves to node 258", &place),
        row("`PlaceReply`", "fenced; node 258; no node; map epoch 12; key 1 elsewhere", &placed),
        row(
            "`RouteRequest`",
            "16 × 11; 5 nodes",
            &cluster::RouteRequest { keys: run(0x11, 16), nodes_max: 5 },
        ),
        row(
            "`RouteReply`",
            "node 7, \"n\": 2 keys, 1 in DRAM, 300 bytes queued; 3 in the cluster, 4 unanswered, 5 partial",
            &routed,
        ),
    ]
}

fn setting_rows() -> Vec<String> {
    let tenant = || Some(cluster::Tenant { name: "t".to_owned(), reserved: both(1, 2), limit: both(3, 4) });
    let state = cluster::TenantState {
        tenant: tenant(),
        ledger_here: true,
        used: both(5, 6),
        charged: both(7, 8),
        shares: vec![cluster::TenantShare {
            node: 7,
            granted: both(9, 10),
            used: both(11, 12),
            follows: true,
        }],
    };
    let listed = cluster::ListTenantsReply {
        tenants: vec![state],
        capacity: both(1024, 2048),
        overcommitted: both(13, 14),
    };
    vec![
        row(
            "`SetNodeRequest`",
            "\"n\", cordoned",
            &cluster::SetNodeRequest { name: "n".to_owned(), mode: cluster::NodeMode::Cordoned.into() },
        ),
        row(
            "`SetNodeReply`",
            "was draining",
            &cluster::SetNodeReply { before: cluster::NodeMode::Draining.into() },
        ),
        row(
            "`SetTenantRequest`",
            "\"t\", reserved 1, 2, limit 3, 4",
            &cluster::SetTenantRequest { tenant: tenant() },
        ),
        row("`RemoveTenantRequest`", "\"t\"", &cluster::RemoveTenantRequest { name: "t".to_owned() }),
        row(
            "`ListTenantsReply`",
            "that tenant, ledger here, used 5, 6, charged 7, 8, node 7 granted 9, 10, confirmed, used 11, 12; capacity 1 KiB \
             and 2 KiB, overcommitted by 13, 14",
            &listed,
        ),
    ]
}

fn holding_rows() -> Vec<String> {
    let held = cluster::TenantHolding { tenant: "t".to_owned(), used: both(1, 2), blocks: blocks(3, 4) };
    let listed = cluster::ListHoldingsReply {
        tenants: vec![held],
        unheard: vec!["n".to_owned()],
        unheard_nodes: 5,
        away_nodes: 6,
    };
    vec![
        row(
            "`ListHoldingsRequest`",
            "\"t\", \"u\"",
            &cluster::ListHoldingsRequest { tenants: vec!["t".to_owned(), "u".to_owned()] },
        ),
        row(
            "`ListHoldingsReply`",
            "\"t\" used 1, 2, blocks 3, 4; \"n\" unheard, 5 nodes unheard, 6 away",
            &listed,
        ),
    ]
}

pub(super) fn rows() -> Vec<String> {
    [report_rows(), question_rows(), setting_rows(), holding_rows()].concat()
}
