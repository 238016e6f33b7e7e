//! Fuzz targets of reports of nodes and of questions where to place copies.

use prost::Message as _;
use reprise_policy::BlockKey;
use reprise_proto::controlplane as wire;

use super::places::CheckedRequest;
use super::reports::parse_tenants;

pub(crate) fn seed() -> Vec<Vec<u8>> {
    let bytes = Some(wire::Bytes { dram: 5, nvme: 6 });
    let tenant = wire::TenantReport {
        tenant: "team-a".to_owned(),
        version: 3,
        limit: bytes,
        used: bytes,
        limited: bytes,
        elsewhere: false,
        blocks: Some(wire::Blocks { dram: 1, nvme: 2 }),
    };
    let report =
        wire::ReportRequest { node: 1, epoch: 2, tenants: vec![tenant], ..wire::ReportRequest::default() };
    let place = wire::PlaceRequest {
        holder: 1,
        epoch: 2,
        keys: vec![5; BlockKey::SIZE].into(),
        slot_bytes: 4096,
        reason: wire::PlaceReason::Move.into(),
        to: 2,
    };
    vec![[&[2][..], &report.encode_to_vec()].concat(), [&[3][..], &place.encode_to_vec()].concat()]
}

/// Decodes the tenants of a report. Laws: no panic, and one entry for each tenant.
pub(crate) fn report(message: &[u8]) {
    let Ok(request) = wire::ReportRequest::decode(message) else { return };
    let count = request.tenants.len();
    if let Ok(tenants) = parse_tenants(request.tenants) {
        assert_eq!(tenants.len(), count);
    }
}

/// Checks a question where to place copies.
pub(crate) fn place(message: &[u8]) {
    let Ok(request) = wire::PlaceRequest::decode(message) else { return };
    let slot_bytes = request.slot_bytes;
    if CheckedRequest::check(request).is_ok() {
        assert!(slot_bytes > 0);
    }
}
