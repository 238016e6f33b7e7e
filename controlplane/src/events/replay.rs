//! Replays for subscribers that missed batches: buffered batches, and a snapshot in place of evicted ones.
//!
//! ```text
//!   requested from ▼                                         next
//!   numbers        ├── evicted ───┬─────── buffered ─────────┤
//!   reply            clear, stored, ..., empty ─┤ then │ ... │ -1
//!                    └ the snapshot             └ second half of the buffer
//! ```
//!
//! Subscribers skip batches whose number is not higher than the last one. So the batches of a snapshot need
//! numbers above the subscriber's last number and below the numbers of the batches that follow. They use the
//! numbers of the evicted batches and of the first half of the buffer. The second half is likely to be still
//! buffered when the snapshot has been sent. Numbers that the snapshot does not need are sent as empty
//! batches, so that there is no gap.
//!
//! The snapshot is consistent for the same reason as a follower's (`reprise_controlplane_core::follower`):
//! the directory is read after the number to continue from was chosen, and the batches from there contain
//! every later change.
//!
//! If there are too few numbers for batches of 256 blocks, batches are larger. With the default of 10,000
//! steps there are 5,000 numbers, and 10 million replicas of 100 nodes are read in rounds of 500,000. A
//! snapshot that needs rounds of more than a million is incomplete: the subscriber sees a gap, and the log
//! names the setting to raise.

use reprise_controlplane_core::{Cursor, ReplicaEntry};
use tokio::io::AsyncWrite;

use super::PART_CHANGES;
use super::format;
use super::publisher::{Batch, Hub, clear_batches, now};
use super::sockets::PeerWriter;
use super::zmtp::ZmtpError;
use crate::metrics::ReplayResult;

/// Number of the message that ends a replay: -1, as in vLLM.
const END: [u8; 8] = [0xff; 8];
/// Snapshots in one replay. A slow subscriber needs another one if the batches after a snapshot were evicted.
const SNAPSHOTS_MAX: usize = 3;
/// Replicas held in memory at once: 20 MB, and again as much in batches.
const ROUND_REPLICAS_MAX: u64 = 1 << 20;
/// Replicas in the smallest round: a few batches for each node of a small cluster.
const ROUND_REPLICAS_MIN: u64 = 8192;
/// Maximum number of blocks in one batch: 1.2 MB.
pub(crate) const BLOCKS_PER_BATCH_LIMIT: u64 = 1 << 16;

/// Numbers that a snapshot may use; the first one is next.
struct Numbers {
    next: u64,
    end: u64,
}

/// Sizes of the rounds and batches of a snapshot.
#[derive(Debug, PartialEq, Eq)]
struct SnapshotPlan {
    /// Replicas read before batches are made of them.
    round: u64,
    blocks_per_batch: u64,
}

/// Sends the batches from `start` on, and the end message.
pub(super) async fn send_replay<W: AsyncWrite + Unpin>(
    hub: &Hub,
    start: u64,
    out: &mut PeerWriter<W>,
) -> Result<(), ZmtpError> {
    let (mut next, mut snapshots, mut result) = (start, 0, ReplayResult::kept);
    loop {
        match hub.batch(next) {
            Batch::Available(payload) => {
                send(hub, next, &payload, out).await?;
                next += 1;
            }
            Batch::Pending => break,
            Batch::Evicted { .. } if snapshots < SNAPSHOTS_MAX => {
                snapshots += 1;
                result = ReplayResult::snapshot;
                match snapshot(hub, next, out).await? {
                    Some(then) => next = then,
                    None => snapshots = SNAPSHOTS_MAX,
                }
            }
            Batch::Evicted { .. } => {
                result = ReplayResult::incomplete;
                tracing::warn!(start, "replay of KV events is incomplete: raise events.buffer_steps");
                break;
            }
        }
    }
    hub.cluster.metrics.count_replay(result);
    out.message(&[b"", b"", &END, b""]).await?;
    out.flush().await
}

/// Sends a snapshot under the numbers from `from` on. Returns the number to continue from, or `None` if there
/// were too few numbers.
async fn snapshot<W: AsyncWrite + Unpin>(
    hub: &Hub,
    from: u64,
    out: &mut PeerWriter<W>,
) -> Result<Option<u64>, ZmtpError> {
    let _permit = hub.snapshots.acquire().await.expect("the semaphore is never closed");
    let buffered = hub.buffered();
    let then = (buffered.start + (buffered.end - buffered.start) / 2).max(from);
    // Use at most as many evicted numbers as the buffer holds: unused numbers cost an empty batch each.
    let mut numbers =
        Numbers { next: from.max(then.saturating_sub(buffered.end - buffered.start)), end: then };
    let known = hub.known();
    for batch in clear_batches(&known) {
        let Some(number) = numbers.take() else { return Ok(None) };
        send(hub, number, &batch, out).await?;
    }
    let size = hub.cluster.directory().size();
    let Some(plan) = plan_snapshot(size.replicas, size.nodes.len() as u64, numbers.left()) else {
        return Ok(None);
    };
    let blocks = usize::try_from(plan.blocks_per_batch).expect("limited");
    let (mut cursor, mut entries) = (Cursor::default(), Vec::new());
    while !cursor.is_at_end() {
        read(hub, &mut cursor, plan.round, &mut entries).await;
        for batch in format::stored(now(), &entries, blocks) {
            let Some(number) = numbers.take() else { return Ok(None) };
            send(hub, number, &batch, out).await?;
        }
        entries.clear();
    }
    let nothing = format::empty(now());
    while let Some(number) = numbers.take() {
        send(hub, number, &nothing, out).await?;
    }
    Ok(Some(then))
}

/// Reads one round, in parts.
async fn read(hub: &Hub, cursor: &mut Cursor, round: u64, entries: &mut Vec<ReplicaEntry>) {
    while !cursor.is_at_end() && (entries.len() as u64) < round {
        hub.cluster.directory().read(cursor, PART_CHANGES, entries);
        tokio::task::yield_now().await;
    }
}

/// Sizes for a snapshot of `replicas` of `nodes` in at most `numbers` batches. Half of the numbers are for
/// full batches, half for the last batch of each node in each round.
fn plan_snapshot(replicas: u64, nodes: u64, numbers: u64) -> Option<SnapshotPlan> {
    // Allow for growth while the snapshot is read.
    let replicas = replicas + replicas / 4;
    let half = (numbers / 2).saturating_sub(nodes);
    if half == 0 {
        // An empty directory needs no batches.
        return (replicas == 0).then_some(SnapshotPlan { round: ROUND_REPLICAS_MIN, blocks_per_batch: 1 });
    }
    let full = format::BLOCKS_PER_BATCH_MAX as u64;
    Some(SnapshotPlan {
        round: (replicas * nodes).div_ceil(half).clamp(ROUND_REPLICAS_MIN, ROUND_REPLICAS_MAX),
        blocks_per_batch: replicas.div_ceil(half).clamp(full, BLOCKS_PER_BATCH_LIMIT),
    })
}

async fn send<W: AsyncWrite + Unpin>(
    hub: &Hub,
    number: u64,
    payload: &[u8],
    out: &mut PeerWriter<W>,
) -> Result<(), ZmtpError> {
    out.message(&[b"", hub.topic.as_bytes(), &number.to_be_bytes(), payload]).await
}

impl Numbers {
    fn take(&mut self) -> Option<u64> {
        let number = self.next;
        self.next = (number + 1).min(self.end);
        (number < self.end).then_some(number)
    }

    fn left(&self) -> u64 {
        self.end - self.next
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn planned_snapshots_fit_into_the_available_numbers(
            replicas in 0u64..20_000_000,
            nodes in 1u64..2000,
            numbers in 0u64..20_000,
        ) {
            let Some(plan) = plan_snapshot(replicas, nodes, numbers) else {
                prop_assert!(numbers / 2 <= nodes);
                return Ok(());
            };
            let limited = plan.round == ROUND_REPLICAS_MAX || plan.blocks_per_batch == BLOCKS_PER_BATCH_LIMIT;
            let rounds = replicas.div_ceil(plan.round);
            let batches = replicas / plan.blocks_per_batch + rounds * nodes;
            prop_assert!(limited || batches <= numbers, "{plan:?}: {batches} of {numbers}");
        }
    }
}
