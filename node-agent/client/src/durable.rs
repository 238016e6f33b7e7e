//! Durable notices: what has come of the blocks of a commit.
//!
//! The agent sends one notice per ticket, whenever it is ready, perhaps before the caller has read its ticket.
//! The board keeps the latest outcomes so that waiting first or asking later, once or twice, gives the same.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use reprise_policy::BlockKey;
use reprise_proto::local::Durable;

use crate::deadline;
use crate::error::ClientError;

/// Outcomes that are kept at the most: 16,384 × about 64 bytes = 1 MiB. An engine that commits every 10 ms may
/// ask for almost three minutes.
pub const OUTCOMES_MAX: usize = 16_384;

/// Keys of lost blocks that are kept at the most, of all outcomes: 4 MiB. Without a pool every key is lost, up to 8,192 a
/// commit. The latest outcome is always kept.
pub const LOST_KEYS_MAX: usize = 1 << 18;

/// Names a commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// What became of a commit's blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DurableOutcome {
    /// Blocks that survive `kill -9` and power loss from now on.
    pub durable: u32,
    /// Keys of blocks that do not: evicted before they were written, or their device is lost.
    pub lost_keys: Vec<BlockKey>,
}

/// Outcomes of tickets, and those who wait for them.
#[derive(Debug, Default)]
pub(crate) struct DurableBoard {
    state: Mutex<Board>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Board {
    outcomes: BTreeMap<Ticket, DurableOutcome>,
    /// Lost keys of all outcomes.
    lost_keys: usize,
    /// The largest ticket whose outcome was dropped for room.
    forgotten: Option<Ticket>,
    closed: Option<String>,
}

impl DurableBoard {
    /// Notes a notice; `Err` says how it breaks the protocol.
    pub(crate) fn post(&self, notice: &Durable) -> Result<(), ClientError> {
        let lost_keys = BlockKey::unpack(&notice.lost_keys)
            .ok_or_else(|| ClientError::Protocol("a durable notice with a torn run of keys".into()))?;
        let mut board = self.lock();
        board.lost_keys += lost_keys.len();
        let outcome = DurableOutcome { durable: notice.durable, lost_keys };
        if let Some(replaced) = board.outcomes.insert(Ticket(notice.ticket), outcome) {
            board.lost_keys -= replaced.lost_keys.len();
        }
        while board.outcomes.len() > OUTCOMES_MAX
            || (board.lost_keys > LOST_KEYS_MAX && board.outcomes.len() > 1)
        {
            let Some((ticket, outcome)) = board.outcomes.pop_first() else { break };
            board.lost_keys -= outcome.lost_keys.len();
            board.forgotten = Some(ticket).max(board.forgotten);
        }
        drop(board);
        self.changed.notify_all();
        Ok(())
    }

    /// The session has ended: whoever waits learns it now.
    pub(crate) fn close(&self, reason: &str) {
        self.lock().closed = Some(reason.to_owned());
        self.changed.notify_all();
    }

    /// Waits for a ticket's outcome.
    pub(crate) fn wait(&self, ticket: Ticket, timeout: Duration) -> Result<DurableOutcome, ClientError> {
        let deadline = deadline::after(timeout);
        let mut board = self.lock();
        loop {
            if let Some(outcome) = board.outcomes.get(&ticket) {
                return Ok(outcome.clone());
            }
            if board.forgotten.is_some_and(|forgotten| ticket <= forgotten) {
                return Err(ClientError::BadRequest(format!(
                    "the outcome of ticket {} is no longer kept: wait within {OUTCOMES_MAX} commits, or {LOST_KEYS_MAX} lost blocks",
                    ticket.0
                )));
            }
            if let Some(reason) = &board.closed {
                return Err(ClientError::AgentLost { reason: reason.clone() });
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ClientError::Timeout { call: "wait_durable", after: timeout });
            }
            board = self.changed.wait_timeout(board, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Sleeps for `delay`, less when the session ends; `Err` then.
    pub(crate) fn pause(&self, delay: Duration) -> Result<(), ClientError> {
        let deadline = deadline::after(delay);
        let mut board = self.lock();
        loop {
            if let Some(reason) = &board.closed {
                return Err(ClientError::AgentLost { reason: reason.clone() });
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            board = self.changed.wait_timeout(board, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Board> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notice(ticket: u64) -> Durable {
        Durable { ticket, durable: 1, lost_keys: bytes::Bytes::new() }
    }

    #[test]
    fn an_outcome_can_be_asked_for_twice() {
        let board = DurableBoard::default();
        board.post(&notice(7)).expect("well-formed");
        for _ in 0..2 {
            assert_eq!(board.wait(Ticket(7), Duration::ZERO).expect("known").durable, 1);
        }
    }

    #[test]
    fn outcomes_are_bounded_and_a_forgotten_one_is_said_to_be_so() {
        let board = DurableBoard::default();
        for ticket in 0..=OUTCOMES_MAX as u64 {
            board.post(&notice(ticket)).expect("well-formed");
        }
        let error = board.wait(Ticket(0), Duration::from_secs(60)).expect_err("forgotten");
        assert!(matches!(error, ClientError::BadRequest(_)), "{error}");
        assert!(board.wait(Ticket(1), Duration::ZERO).is_ok());
    }

    #[test]
    fn lost_keys_are_bounded_and_the_latest_outcome_is_kept_whatever_its_size() {
        const KEYS: usize = 8192;
        let board = DurableBoard::default();
        let all_lost = |ticket| Durable {
            ticket,
            durable: 0,
            lost_keys: bytes::Bytes::from(vec![7; KEYS * BlockKey::SIZE]),
        };
        let kept = (LOST_KEYS_MAX / KEYS) as u64;
        for ticket in 0..2 * kept {
            board.post(&all_lost(ticket)).expect("well-formed");
        }
        assert!(board.wait(Ticket(kept - 1), Duration::ZERO).is_err(), "forgotten");
        assert_eq!(board.wait(Ticket(kept), Duration::ZERO).expect("kept").lost_keys.len(), KEYS);
        assert!(board.lock().lost_keys <= LOST_KEYS_MAX);
    }

    #[test]
    fn a_closed_board_still_knows_what_it_was_told() {
        let board = DurableBoard::default();
        board.post(&notice(1)).expect("well-formed");
        board.close("end");
        assert!(board.wait(Ticket(1), Duration::ZERO).is_ok());
        let error = board.wait(Ticket(2), Duration::from_secs(60)).expect_err("lost");
        assert!(matches!(error, ClientError::AgentLost { .. }), "{error}");
    }

    #[test]
    fn a_torn_run_of_lost_keys_is_refused() {
        let torn = Durable { lost_keys: bytes::Bytes::from_static(&[0; 15]), ..notice(1) };
        assert!(matches!(DurableBoard::default().post(&torn), Err(ClientError::Protocol(_))));
    }
}
