//! Durable notices: outcomes of the blocks of a commit.
//!
//! The agent sends one notice per ticket when the outcome is known, possibly before the caller has read its
//! ticket. The latest outcomes are kept, so that the order of notice and wait, and repeated waits, make no
//! difference.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use reprise_policy::BlockKey;
use reprise_policy::session::Ticket;
use reprise_proto::local::Durable;

use crate::deadline;
use crate::error::ClientError;

/// Maximum number of kept outcomes: 16,384 × about 64 bytes = 1 MiB. An engine that commits every 10 ms can
/// read an outcome for almost three minutes.
pub const OUTCOMES_MAX: usize = 16_384;

/// Maximum number of kept keys of lost blocks, over all outcomes: 4 MiB. Without a pool every key is lost, up
/// to 8,192 a commit. The latest outcome is always kept.
pub const LOST_KEYS_MAX: usize = 1 << 18;

/// Outcome of a commit's blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DurableOutcome {
    /// Number of blocks that survive `kill -9` and power loss from now on.
    pub durable: u32,
    /// Keys of blocks that do not: evicted before they were written, or their device is lost.
    pub lost_keys: Vec<BlockKey>,
}

/// Outcomes of tickets, and the callers that wait for them.
#[derive(Debug, Default)]
pub(crate) struct DurableOutcomes {
    state: Mutex<OutcomeTable>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct OutcomeTable {
    outcomes: BTreeMap<Ticket, DurableOutcome>,
    /// Total of lost keys over all outcomes.
    lost_keys: usize,
    /// The largest ticket whose outcome was dropped to stay within the limits.
    last_dropped: Option<Ticket>,
    closed: Option<String>,
}

impl DurableOutcomes {
    /// Stores the outcome of a notice; `Err` describes a violation of the protocol.
    pub(crate) fn post(&self, notice: &Durable) -> Result<(), ClientError> {
        let lost_keys = BlockKey::unpack(&notice.lost_keys)
            .ok_or_else(|| ClientError::Protocol("durable notice with an incomplete key".into()))?;
        let mut table = self.lock();
        table.lost_keys += lost_keys.len();
        let outcome = DurableOutcome { durable: notice.durable, lost_keys };
        if let Some(replaced) = table.outcomes.insert(Ticket(notice.ticket), outcome) {
            table.lost_keys -= replaced.lost_keys.len();
        }
        while table.outcomes.len() > OUTCOMES_MAX
            || (table.lost_keys > LOST_KEYS_MAX && table.outcomes.len() > 1)
        {
            let Some((ticket, outcome)) = table.outcomes.pop_first() else { break };
            table.lost_keys -= outcome.lost_keys.len();
            table.last_dropped = Some(ticket).max(table.last_dropped);
        }
        drop(table);
        self.changed.notify_all();
        Ok(())
    }

    /// Ends all waits with the reason for which the session ended.
    pub(crate) fn close(&self, reason: &str) {
        self.lock().closed = Some(reason.to_owned());
        self.changed.notify_all();
    }

    /// Whether a wait for the ticket returns at once.
    pub(crate) fn is_known(&self, ticket: Ticket) -> bool {
        let table = self.lock();
        let is_dropped = table.last_dropped.is_some_and(|last_dropped| ticket <= last_dropped);
        table.outcomes.contains_key(&ticket) || is_dropped || table.closed.is_some()
    }

    /// Waits for a ticket's outcome.
    pub(crate) fn wait(&self, ticket: Ticket, timeout: Duration) -> Result<DurableOutcome, ClientError> {
        let deadline = deadline::after(timeout);
        let mut table = self.lock();
        loop {
            if let Some(outcome) = table.outcomes.get(&ticket) {
                return Ok(outcome.clone());
            }
            if table.last_dropped.is_some_and(|last_dropped| ticket <= last_dropped) {
                return Err(ClientError::BadRequest(format!(
                    "the outcome of ticket {} is no longer kept: call wait_durable within {OUTCOMES_MAX} commits and {LOST_KEYS_MAX} lost blocks",
                    ticket.0
                )));
            }
            if let Some(reason) = &table.closed {
                return Err(ClientError::AgentLost { reason: reason.clone() });
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ClientError::Timeout { call: "wait_durable", after: timeout });
            }
            table = self.changed.wait_timeout(table, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Sleeps for `delay`; returns early with an error when the session ends.
    pub(crate) fn pause(&self, delay: Duration) -> Result<(), ClientError> {
        let deadline = deadline::after(delay);
        let mut table = self.lock();
        loop {
            if let Some(reason) = &table.closed {
                return Err(ClientError::AgentLost { reason: reason.clone() });
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            table = self.changed.wait_timeout(table, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn lock(&self) -> MutexGuard<'_, OutcomeTable> {
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
    fn an_outcome_can_be_read_twice() {
        let table = DurableOutcomes::default();
        table.post(&notice(7)).expect("well-formed");
        for _ in 0..2 {
            assert_eq!(table.wait(Ticket(7), Duration::ZERO).expect("known").durable, 1);
        }
    }

    #[test]
    fn outcomes_are_bounded_and_a_dropped_one_is_an_error() {
        let table = DurableOutcomes::default();
        for ticket in 0..=OUTCOMES_MAX as u64 {
            table.post(&notice(ticket)).expect("well-formed");
        }
        let error = table.wait(Ticket(0), Duration::from_secs(60)).expect_err("dropped");
        assert!(matches!(error, ClientError::BadRequest(_)), "{error}");
        assert!(table.wait(Ticket(1), Duration::ZERO).is_ok());
    }

    #[test]
    fn lost_keys_are_bounded_and_the_latest_outcome_is_always_kept() {
        const KEYS: usize = 8192;
        let table = DurableOutcomes::default();
        let all_lost = |ticket| Durable {
            ticket,
            durable: 0,
            lost_keys: bytes::Bytes::from(vec![7; KEYS * BlockKey::SIZE]),
        };
        let kept = (LOST_KEYS_MAX / KEYS) as u64;
        for ticket in 0..2 * kept {
            table.post(&all_lost(ticket)).expect("well-formed");
        }
        assert!(table.wait(Ticket(kept - 1), Duration::ZERO).is_err(), "dropped");
        assert_eq!(table.wait(Ticket(kept), Duration::ZERO).expect("kept").lost_keys.len(), KEYS);
        assert!(table.lock().lost_keys <= LOST_KEYS_MAX);
    }

    #[test]
    fn known_outcomes_can_be_read_after_the_session_ended() {
        let table = DurableOutcomes::default();
        table.post(&notice(1)).expect("well-formed");
        table.close("end");
        assert!(table.wait(Ticket(1), Duration::ZERO).is_ok());
        let error = table.wait(Ticket(2), Duration::from_secs(60)).expect_err("lost");
        assert!(matches!(error, ClientError::AgentLost { .. }), "{error}");
    }

    #[test]
    fn rejects_an_incomplete_lost_key() {
        let torn = Durable { lost_keys: bytes::Bytes::from_static(&[0; 15]), ..notice(1) };
        assert!(matches!(DurableOutcomes::default().post(&torn), Err(ClientError::Protocol(_))));
    }
}
