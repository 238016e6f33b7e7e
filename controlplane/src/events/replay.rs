//! Answers to subscribers that have missed batches: those that are kept, and a snapshot in the place of those that are not.
//!
//! ```text
//!   asked from ▼                                         next
//!   numbers    ├── not kept ──┬──────── kept ────────────┤
//!   answer        void, stored, ..., empty ─┤ then │ ... │ -1
//!                 └ the snapshot            └ half of what is kept
//! ```
//!
//! The batches of a snapshot need numbers, higher than what the subscriber has and lower than what follows, since subscribers skip
//! what they take for old. They get those of the batches that they stand for: the ones not kept, and half of the kept ones, so
//! that there are some to spend and the others are still kept when the snapshot has been read. What is left of these
//! numbers is spent on empty batches, so that there is no gap before the batches that follow.
//!
//! It is right for the reason that a follower's snapshot is (`reprise_controlplane_core::follower`): the directory is read
//! after the number to go on from was chosen, and every change since is in the batches from there on.
//!
//! Batches of a snapshot have more than 256 blocks when there are fewer numbers than that would need: with the default of 10,000
//! steps there are 5,000, and 10 million replicas of 100 nodes are read in rounds of 500,000. What needs more than a
//! round of a million is not answered whole: the subscriber sees a gap, and the log says which setting to raise.

use reprise_controlplane_core::{Cursor, HeldReplica};
use tokio::io::AsyncWrite;

use super::PART_CHANGES;
use super::format;
use super::publisher::{Batch, Hub, clearings, now};
use super::sockets::Out;
use super::zmtp::ZmtpError;
use crate::metrics::ReplayResult;

/// Number of the message that ends an answer: -1, as vLLM writes it.
const END: [u8; 8] = [0xff; 8];
/// Snapshots in one answer: whoever reads so slowly that the batches behind one are gone gets another.
const SNAPSHOTS_MAX: usize = 3;
/// Replicas held in memory at once: 20 MB, and as much again as batches.
const ROUND_REPLICAS_MAX: u64 = 1 << 20;
/// Replicas in the smallest round: a few batches for each node of a small cluster.
const ROUND_REPLICAS_MIN: u64 = 8192;
/// Blocks of one batch at the most: 1.2 MB.
pub(crate) const BLOCKS_PER_BATCH_LIMIT: u64 = 1 << 16;

/// The numbers that a snapshot may use, the next one first.
struct Numbers {
    next: u64,
    end: u64,
}

/// How a snapshot is cut.
#[derive(Debug, PartialEq, Eq)]
struct Cut {
    /// Replicas that are read before batches are made of them.
    round: u64,
    blocks_per_batch: u64,
}

/// Sends batches from `start` on, then the end.
pub(super) async fn answer<W: AsyncWrite + Unpin>(
    hub: &Hub,
    start: u64,
    out: &mut Out<W>,
) -> Result<(), ZmtpError> {
    let (mut next, mut snapshots, mut result) = (start, 0, ReplayResult::kept);
    loop {
        match hub.batch(next) {
            Batch::There(payload) => {
                send(hub, next, &payload, out).await?;
                next += 1;
            }
            Batch::NotYet => break,
            Batch::Gone { .. } if snapshots < SNAPSHOTS_MAX => {
                snapshots += 1;
                result = ReplayResult::snapshot;
                match snapshot(hub, next, out).await? {
                    Some(then) => next = then,
                    None => snapshots = SNAPSHOTS_MAX,
                }
            }
            Batch::Gone { .. } => {
                result = ReplayResult::incomplete;
                tracing::warn!(start, "a replay of KV events is incomplete: raise events.buffer_steps");
                break;
            }
        }
    }
    hub.cluster.metrics.replayed(result);
    out.message(&[b"", b"", &END, b""]).await?;
    out.flush().await
}

/// Sends what the directory holds under numbers from `from` on; the number to go on from, unless there were too few.
async fn snapshot<W: AsyncWrite + Unpin>(
    hub: &Hub,
    from: u64,
    out: &mut Out<W>,
) -> Result<Option<u64>, ZmtpError> {
    let _turn = hub.snapshots.acquire().await.expect("the semaphore is never closed");
    let kept = hub.kept();
    let then = (kept.start + (kept.end - kept.start) / 2).max(from);
    // Of the numbers that were lost, no more than there are in the buffer: they end as empty batches.
    let mut numbers = Numbers { next: from.max(then.saturating_sub(kept.end - kept.start)), end: then };
    let known = hub.known();
    for batch in clearings(&known) {
        let Some(number) = numbers.take() else { return Ok(None) };
        send(hub, number, &batch, out).await?;
    }
    let size = hub.cluster.directory().size();
    let Some(cut) = cut(size.replicas, size.nodes.len() as u64, numbers.left()) else { return Ok(None) };
    let blocks = usize::try_from(cut.blocks_per_batch).expect("limited");
    let (mut cursor, mut held) = (Cursor::default(), Vec::new());
    while !cursor.is_at_end() {
        read(hub, &mut cursor, cut.round, &mut held).await;
        for batch in format::stored(now(), &held, blocks) {
            let Some(number) = numbers.take() else { return Ok(None) };
            send(hub, number, &batch, out).await?;
        }
        held.clear();
    }
    let nothing = format::empty(now());
    while let Some(number) = numbers.take() {
        send(hub, number, &nothing, out).await?;
    }
    Ok(Some(then))
}

/// Reads a round, in parts.
async fn read(hub: &Hub, cursor: &mut Cursor, round: u64, held: &mut Vec<HeldReplica>) {
    while !cursor.is_at_end() && (held.len() as u64) < round {
        hub.cluster.directory().read(cursor, PART_CHANGES, held);
        tokio::task::yield_now().await;
    }
}

/// How to cut `replicas` of `nodes` into at most `numbers` batches: half of them for full ones, half for the last one of each
/// node in each round.
fn cut(replicas: u64, nodes: u64, numbers: u64) -> Option<Cut> {
    // Some may come while it is read.
    let replicas = replicas + replicas / 4;
    let half = (numbers / 2).saturating_sub(nodes);
    if half == 0 {
        // An empty directory needs none.
        return (replicas == 0).then_some(Cut { round: ROUND_REPLICAS_MIN, blocks_per_batch: 1 });
    }
    let full = format::BLOCKS_PER_BATCH_MAX as u64;
    Some(Cut {
        round: (replicas * nodes).div_ceil(half).clamp(ROUND_REPLICAS_MIN, ROUND_REPLICAS_MAX),
        blocks_per_batch: replicas.div_ceil(half).clamp(full, BLOCKS_PER_BATCH_LIMIT),
    })
}

async fn send<W: AsyncWrite + Unpin>(
    hub: &Hub,
    number: u64,
    payload: &[u8],
    out: &mut Out<W>,
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
        fn a_snapshot_that_is_cut_fits_its_numbers(
            replicas in 0u64..20_000_000,
            nodes in 1u64..2000,
            numbers in 0u64..20_000,
        ) {
            let Some(cut) = cut(replicas, nodes, numbers) else {
                prop_assert!(numbers / 2 <= nodes);
                return Ok(());
            };
            let limited = cut.round == ROUND_REPLICAS_MAX || cut.blocks_per_batch == BLOCKS_PER_BATCH_LIMIT;
            let rounds = replicas.div_ceil(cut.round);
            let batches = replicas / cut.blocks_per_batch + rounds * nodes;
            prop_assert!(limited || batches <= numbers, "{cut:?}: {batches} of {numbers}");
        }
    }
}
