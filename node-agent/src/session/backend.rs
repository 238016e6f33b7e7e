//! What moves the blocks of a session, for metrics and status.
//!
//! The client copies blocks of the arena, also if it states a backend of extents. The backend that the session states
//! with `UseBackend` moves blocks of extents. The agent cannot verify the statement, and decides nothing by it.

use std::sync::atomic::{AtomicU8, Ordering};

use reprise_agent_core::effect::{CommitStatus, LoadedBlock, Reply};
use reprise_policy::session::TransferBackend;
use reprise_proto::local;

use crate::metrics::{BlockPath, Direction};

/// The backend that a session states; 0 until then.
#[derive(Debug, Default)]
pub(super) struct StatedBackend(AtomicU8);

impl StatedBackend {
    pub(super) fn set(&self, backend: TransferBackend) {
        self.0.store(backend.number(), Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> Option<TransferBackend> {
        TransferBackend::from_number(self.0.load(Ordering::Relaxed))
    }
}

/// Returns which blocks a reply confirms as stored, makes readable in the arena, or pins. Blocks of a load that fail
/// later are included. Pinned blocks are not loaded yet: the client reads and verifies them itself, or does not.
pub(super) fn moved_blocks(
    stated: Option<TransferBackend>,
    reply: &Reply,
) -> Option<(BlockPath, Direction, u64)> {
    let arena = match stated {
        Some(TransferBackend::Host) => BlockPath::Backend(TransferBackend::Host),
        _ => BlockPath::Arena,
    };
    let extents = stated.map_or(BlockPath::Unstated, BlockPath::Backend);
    let count = |status, statuses: &[CommitStatus]| statuses.iter().filter(|of| **of == status).count();
    let (path, direction, blocks) = match reply {
        Reply::Committed { statuses, .. } => match count(CommitStatus::Durable, statuses) {
            0 => (arena, Direction::Save, count(CommitStatus::Committed, statuses)),
            durable => (extents, Direction::Save, durable),
        },
        Reply::Loaded { blocks, .. } => {
            let placed = blocks.iter().filter(|block| matches!(block, LoadedBlock::Ok { .. }));
            (arena, Direction::Load, placed.count())
        }
        Reply::Pinned { blocks } => {
            let pinned = blocks.iter().filter(|block| block.pin().is_some());
            (extents, Direction::Pin, pinned.count())
        }
        _ => return None,
    };
    (blocks > 0).then_some((path, direction, blocks as u64))
}

/// Decodes the backend of a request.
///
/// # Errors
/// A text for the client.
pub(super) fn decode(number: i32) -> Result<TransferBackend, String> {
    let known = u8::try_from(number).ok().and_then(TransferBackend::from_number);
    known.ok_or_else(|| {
        format!("use backend: invalid backend {number}: expected 1 to {}", TransferBackend::ALL.len())
    })
}

// The numbers of the protocol are those of the type.
const _: () = assert!(
    local::Backend::GpuQueue as u8 == TransferBackend::GpuQueue as u8
        && local::Backend::GpuQueueEmulated as u8 == TransferBackend::GpuQueueEmulated as u8
        && local::Backend::GpuQueueHost as u8 == TransferBackend::GpuQueueHost as u8
        && local::Backend::Gds as u8 == TransferBackend::Gds as u8
        && local::Backend::Staged as u8 == TransferBackend::Staged as u8
        && local::Backend::StagedHost as u8 == TransferBackend::StagedHost as u8
        && local::Backend::Host as u8 == TransferBackend::Host as u8
);

#[cfg(test)]
mod tests {
    use reprise_agent_core::effect::{DeviceId, Place, Ticket};
    use reprise_agent_core::extents::{PinId, PinRefusal, PinnedBlock};
    use reprise_policy::Generation;

    use super::*;

    #[test]
    fn blocks_of_extents_count_for_the_stated_backend_and_others_for_the_arena() {
        let gds = Some(TransferBackend::Gds);
        let committed = |statuses: &[CommitStatus]| Reply::Committed {
            ticket: Some(Ticket(1)),
            statuses: statuses.to_vec(),
        };
        let durable = committed(&[CommitStatus::Durable, CommitStatus::Duplicate, CommitStatus::Durable]);
        let in_arena = committed(&[CommitStatus::Committed, CommitStatus::NoLease]);
        let gds_path = BlockPath::Backend(TransferBackend::Gds);
        assert_eq!(moved_blocks(gds, &durable), Some((gds_path, Direction::Save, 2)));
        assert_eq!(moved_blocks(None, &durable), Some((BlockPath::Unstated, Direction::Save, 2)));
        assert_eq!(moved_blocks(gds, &in_arena), Some((BlockPath::Arena, Direction::Save, 1)));
        let host = Some(TransferBackend::Host);
        let host_path = BlockPath::Backend(TransferBackend::Host);
        assert_eq!(moved_blocks(host, &in_arena), Some((host_path, Direction::Save, 1)));
        assert_eq!(moved_blocks(gds, &committed(&[CommitStatus::Duplicate])), None);
        assert_eq!(
            moved_blocks(gds, &Reply::Pinned { blocks: vec![PinnedBlock::Refused(PinRefusal::Miss)] }),
            None
        );
        let pinned = PinnedBlock::Pinned {
            pin: PinId(1),
            place: Place::Extent {
                device: DeviceId(0),
                generation: Generation(1),
                offset: 0,
                bytes: 4096,
                header_crc: 0,
            },
        };
        let blocks = vec![pinned, PinnedBlock::Refused(PinRefusal::Miss)];
        let pins = moved_blocks(gds, &Reply::Pinned { blocks });
        assert_eq!(pins, Some((gds_path, Direction::Pin, 1)), "the client may not read a pinned block");
    }

    #[test]
    fn unknown_backends_are_rejected_with_the_range() {
        assert_eq!(decode(2), Ok(TransferBackend::GpuQueueEmulated));
        for number in [0, 8, -1, 258] {
            assert!(decode(number).expect_err("unknown").contains("expected 1 to 7"), "{number}");
        }
    }
}
