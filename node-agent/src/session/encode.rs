//! Encodes replies of the core to frames of the session protocol.
//!
//! A load reply for 8,192 blocks has 2 MiB of checksums. They are written once to a buffer that all blocks
//! of the message share, so encoding takes two copies and no allocation per block.

use std::os::fd::OwnedFd;
use std::time::Duration;

use bytes::Bytes;
use reprise_agent_core::effect::{
    Access, ArenaSlot, CommitStatus, DeviceId, LeaseId, LoadedBlock, LookaheadReport, LossReason, Place,
    RegionGrant, Reply, Source, Ticket,
};
use reprise_agent_core::event::RequestId;
use reprise_agent_core::extents::{PinRefusal, PinnedBlock};
use reprise_agent_core::pool::header::CHECKSUMS_AT;
use reprise_buffers::{Arena, REGIONS_MAX};
use reprise_policy::session::LayerGuidance;
use reprise_policy::{BlockKey, Layout};
use reprise_proto::local::{self, FRAME_BYTES_MAX, KEYS_PER_CALL_MAX, response::Body};

use super::frame::{Descriptor, Frame};

/// Maximum size of a load reply without its blocks, in bytes: ids of the load (48), and every region of an
/// arena (20 each: number, length, access, two tags, a length).
const LOADED_FIXED_BYTES: usize = 48 + REGIONS_MAX * 20;

/// Maximum size of a block in a load reply without its checksums, in bytes: tag and length (4), status and
/// source (4), place (2, plus region 4 and offset 11), tag and length of the checksums (4).
const LOADED_BLOCK_BYTES: usize = 29;

/// Returns the maximum number of blocks of a load whose reply fits into a frame: 4,200 with the maximum
/// number of objects per block, and the limit of a call for up to 494 objects.
pub(super) fn load_blocks_max(layout: Layout) -> usize {
    let block_bytes = LOADED_BLOCK_BYTES + 4 * layout.objects() as usize;
    KEYS_PER_CALL_MAX.min((FRAME_BYTES_MAX - LOADED_FIXED_BYTES) / block_bytes)
}

/// Encodes the reply to a request. `arena` contains the regions that it references; `devices` are those that it
/// references and the session does not have.
pub(super) fn reply(
    arena: &Arena,
    request: RequestId,
    reply: Reply,
    devices: Vec<(DeviceId, Option<OwnedFd>)>,
) -> Frame {
    let grants = devices.iter().map(|(device, descriptor)| local::DeviceGrant {
        device: u32::from(device.0),
        queues_only: descriptor.is_none(),
    });
    let mut granted = Grants { arena, devices: grants.collect(), descriptors: Vec::new() };
    let body = convert(&mut granted, reply);
    // Behind those of regions.
    let devices = devices.into_iter().filter_map(|(_, descriptor)| descriptor.map(Descriptor::Device));
    granted.descriptors.extend(devices);
    Frame::new(&local::Response { id: request.0, body: Some(body) }, granted.descriptors)
}

/// Encodes a rejection that does not come from the core.
pub(super) fn failure(id: u64, kind: local::FailureKind, message: &str) -> Frame {
    let body = failure_body(kind, message.to_owned());
    Frame::new(&local::Response { id, body: Some(body) }, Vec::new())
}

/// Encodes the reply to a report about the engine's computation.
pub(super) fn layer(id: u64, guidance: LayerGuidance) -> Frame {
    let LayerGuidance { layer_micros, slack_micros, io_sms, read_iocbs, write_iocbs } = guidance;
    let reported = local::LayerReported {
        layer_us: layer_micros,
        slack_us: slack_micros,
        io_sms,
        read_iocbs,
        write_iocbs,
    };
    Frame::new(&local::Response { id, body: Some(Body::LayerReported(reported)) }, Vec::new())
}

/// Encodes the answer to the statement of a backend.
pub(super) fn backend_used(id: u64) -> Frame {
    let body = Body::BackendUsed(local::BackendUsed {});
    Frame::new(&local::Response { id, body: Some(body) }, Vec::new())
}

/// Encodes the reply to a greeting, with the progress page.
pub(super) fn welcome(id: u64, welcome: local::Welcome, page: Descriptor) -> Frame {
    Frame::new(&local::Response { id, body: Some(Body::Welcome(welcome)) }, vec![page])
}

/// Encodes the notice that all blocks of a commit have a final state.
pub(super) fn durable(ticket: Ticket, durable: u32, lost: &[BlockKey]) -> Frame {
    let notice = local::Durable { ticket: ticket.0, durable, lost_keys: BlockKey::pack(lost).into() };
    Frame::new(&local::Response { id: 0, body: Some(Body::Durable(notice)) }, Vec::new())
}

/// Grants of the regions and devices that a message references, in its order, and the descriptors of the regions.
struct Grants<'a> {
    arena: &'a Arena,
    devices: Vec<local::DeviceGrant>,
    descriptors: Vec<Descriptor>,
}

impl Grants<'_> {
    fn grant(&mut self, regions: Vec<RegionGrant>) -> Vec<local::RegionGrant> {
        regions.into_iter().filter_map(|grant| self.grant_one(grant)).collect()
    }

    /// Grants the memory of a region; `None` if the region has passed to another tenant since, which happens to replies
    /// whose leases have expired.
    fn grant_one(
        &mut self,
        RegionGrant { region: id, generation, access }: RegionGrant,
    ) -> Option<local::RegionGrant> {
        let region = self.arena.region(id.0).filter(|region| region.generation() == generation)?;
        let bytes = region.bytes();
        self.descriptors.push(Descriptor::Region(region, access));
        Some(local::RegionGrant {
            region: u32::from(id.0),
            bytes,
            writable: matches!(access, Access::ReadWrite),
        })
    }
}

fn convert(grants: &mut Grants<'_>, reply: Reply) -> Body {
    match reply {
        Reply::BadRequest(message) => failure_body(local::FailureKind::BadRequest, message),
        Reply::Busy { message, retry_after } => {
            let text = format!("{message}; retry in {} ms", retry_after.as_millis().max(1));
            failure_body(local::FailureKind::Busy, text)
        }
        Reply::Reserved { regions, leases, retry_after } => Body::Reserved(local::Reserved {
            regions: grants.grant(regions),
            leases: leases.into_iter().map(|(id, at)| lease(id, at)).collect(),
            retry_after_us: micros(retry_after),
            devices: std::mem::take(&mut grants.devices),
        }),
        Reply::Committed { ticket, statuses } => Body::Committed(local::Committed {
            ticket: ticket.map_or(0, |ticket| ticket.0),
            statuses: statuses.into_iter().map(|status| commit_status(status) as i32).collect(),
        }),
        Reply::Aborted => Body::Aborted(local::Aborted {}),
        Reply::DurableAwaited => Body::DurableAwaited(local::DurableAwaited {}),
        Reply::LookaheadAccepted(LookaheadReport { window, ignored, ready }) => {
            Body::LookaheadReported(local::LookaheadReported { window, ignored, ready })
        }
        Reply::Managed(report) => Body::BlocksManaged(super::manage::encode(report)),
        Reply::Matched { sources } => {
            let sources: Vec<u8> = sources.into_iter().map(|source| source as u8).collect();
            Body::Matched(local::Matched { sources: sources.into() })
        }
        Reply::Loaded { load, entry, regions, blocks } => Body::Loaded(local::Loaded {
            load: load.0,
            progress_entry: u32::from(entry.0),
            regions: grants.grant(regions),
            blocks: loaded_blocks(&blocks),
        }),
        Reply::Pinned { blocks } => Body::Pinned(local::Pinned {
            devices: std::mem::take(&mut grants.devices),
            blocks: blocks.into_iter().map(pinned_block).collect(),
        }),
        Reply::Unpinned => Body::Unpinned(local::Unpinned {}),
        Reply::Suspected => Body::Suspected(local::Suspected {}),
        Reply::Released => Body::Released(local::Released {}),
        Reply::Trimmed { blocks } => Body::Trimmed(local::Trimmed { blocks }),
        Reply::Stats(stats) => Body::Stats(local::StatsReply {
            stats: stats
                .into_iter()
                .map(|(name, value)| local::Stat { name: name.to_owned(), value })
                .collect(),
        }),
    }
}

fn failure_body(kind: local::FailureKind, message: String) -> Body {
    Body::Failure(local::Failure { kind: kind as i32, message })
}

fn pinned_block(block: PinnedBlock) -> local::PinnedBlock {
    let status = match block {
        PinnedBlock::Pinned { pin, place: at } => {
            let status = local::PinStatus::PinOk as i32;
            return local::PinnedBlock { status, pin: pin.0, place: Some(place(at)) };
        }
        PinnedBlock::Refused(PinRefusal::Miss) => local::PinStatus::PinMiss,
        PinnedBlock::Refused(PinRefusal::NotDurable) => local::PinStatus::PinNotDurable,
        PinnedBlock::Refused(PinRefusal::Limit) => local::PinStatus::PinLimit,
    };
    local::PinnedBlock { status: status as i32, ..local::PinnedBlock::default() }
}

fn lease(id: LeaseId, at: Place) -> local::Lease {
    local::Lease { lease: id.0, place: Some(place(at)) }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

fn place(place: Place) -> local::Place {
    match place {
        Place::Arena(ArenaSlot { region, offset, .. }) => {
            local::Place { region: u32::from(region.0), offset, extent: None }
        }
        Place::Extent { device, generation, offset, bytes, header_crc } => {
            let (device, generation) = (u32::from(device.0), generation.0);
            let checksums_at = CHECKSUMS_AT as u32;
            let extent = local::Extent { device, offset, bytes, generation, header_crc, checksums_at };
            local::Place { extent: Some(extent), ..local::Place::default() }
        }
    }
}

fn loaded_blocks(blocks: &[LoadedBlock]) -> Vec<local::LoadedBlock> {
    let checksums = shared_checksums(blocks);
    let mut packed = 0;
    blocks
        .iter()
        .map(|block| match block {
            LoadedBlock::Ok { source, place: at, checksums: own } => {
                let from = packed;
                packed += own.len() * 4;
                local::LoadedBlock {
                    status: local::BlockStatus::BlockOk as i32,
                    source: *source as u32,
                    place: Some(place(*at)),
                    checksums: checksums.slice(from..packed),
                }
            }
            LoadedBlock::Lost(reason) => {
                local::LoadedBlock { status: block_status(*reason) as i32, ..local::LoadedBlock::default() }
            }
        })
        .collect()
}

/// Concatenates the checksums of all blocks, little endian.
fn shared_checksums(blocks: &[LoadedBlock]) -> Bytes {
    let of = |block: &LoadedBlock| match block {
        LoadedBlock::Ok { checksums, .. } => checksums.len(),
        LoadedBlock::Lost(_) => 0,
    };
    let mut packed = Vec::with_capacity(blocks.iter().map(of).sum::<usize>() * 4);
    for block in blocks {
        if let LoadedBlock::Ok { checksums, .. } = block {
            packed.extend(checksums.iter().flat_map(|checksum| checksum.to_le_bytes()));
        }
    }
    Bytes::from(packed)
}

fn block_status(reason: LossReason) -> local::BlockStatus {
    match reason {
        LossReason::Miss => local::BlockStatus::BlockMiss,
        LossReason::Failed => local::BlockStatus::BlockFailed,
        LossReason::NoSpace => local::BlockStatus::BlockNoSpace,
        LossReason::Deadline => local::BlockStatus::BlockDeadline,
    }
}

fn commit_status(status: CommitStatus) -> local::CommitStatus {
    match status {
        CommitStatus::Committed => local::CommitStatus::Committed,
        CommitStatus::Duplicate => local::CommitStatus::Duplicate,
        CommitStatus::NoLease => local::CommitStatus::NoLease,
        CommitStatus::BadItem => local::CommitStatus::BadItem,
        CommitStatus::Durable => local::CommitStatus::Durable,
        CommitStatus::Failed => local::CommitStatus::Failed,
    }
}

// The wire uses the core's numbers for sources; a match reply sends them unchanged.
const _: () = assert!(Source::OwnDram as u8 == 1 && Source::OwnNvme as u8 == 2);
const _: () = assert!(Source::PeerDram as u8 == 3 && Source::PeerNvme as u8 == 4);

#[cfg(test)]
mod tests {
    use prost::Message;
    use reprise_agent_core::effect::RegionId;
    use reprise_policy::LayoutSpec;

    use super::*;

    fn ok(offset: u64, checksums: &[u32]) -> LoadedBlock {
        let place = Place::Arena(ArenaSlot { region: RegionId(2), offset, bytes: 4096 });
        LoadedBlock::Ok { source: Source::OwnNvme, place, checksums: checksums.into() }
    }

    #[test]
    fn every_block_of_a_load_gets_its_own_checksums() {
        let blocks =
            loaded_blocks(&[ok(0, &[1, 2]), LoadedBlock::Lost(LossReason::Deadline), ok(4096, &[3])]);
        assert_eq!(blocks[0].checksums.as_ref(), [1, 0, 0, 0, 2, 0, 0, 0]);
        assert_eq!((blocks[1].status(), blocks[1].checksums.len()), (local::BlockStatus::BlockDeadline, 0));
        assert_eq!(blocks[2].checksums.as_ref(), [3, 0, 0, 0]);
        assert_eq!(blocks[2].place, Some(local::Place { region: 2, offset: 4096, extent: None }));
    }

    #[test]
    fn reply_to_the_largest_load_of_any_layout_fits_into_a_frame() {
        for layers in [1, 32, 247, 248, 480] {
            let layout = LayoutSpec {
                layers,
                kv_heads: 1,
                head_dim: 8,
                tokens_per_block: 1,
                ..LayoutSpec::LLAMA_3_8B
            };
            let layout = layout.validate().expect("a valid layout");
            let blocks_max = load_blocks_max(layout);
            assert_eq!(blocks_max == KEYS_PER_CALL_MAX, layout.objects() <= 494, "{layers} layers");
            let block = ok(u64::MAX, &vec![u32::MAX; layout.objects() as usize]);
            let block = loaded_blocks(&[block]).remove(0);
            let grant = local::RegionGrant { region: REGIONS_MAX as u32, bytes: u64::MAX, writable: true };
            let loaded = local::Loaded {
                load: u64::MAX,
                progress_entry: u32::MAX,
                regions: vec![grant; REGIONS_MAX],
                blocks: vec![block; blocks_max],
            };
            let response = local::Response { id: u64::MAX, body: Some(Body::Loaded(loaded)) };
            assert!(response.encoded_len() <= FRAME_BYTES_MAX, "{layers} layers: {}", response.encoded_len());
        }
    }
}
