//! What the ends of transfers show about the agent and other nodes.

use std::time::{Duration, Instant};

use reprise_policy::session::Scope;

use super::{Job, Outcome, PEER_AVOIDANCE_TIME, RETRY_STANDSTILL_TIMEOUT, Shared};
use crate::deadline;
use crate::error::ClientError;
use crate::load::BlockStatus;
use crate::paged::{LoadOptions, LoadedBlocks};

impl Job {
    /// Notes what the end of this transfer shows.
    pub(super) fn note_health(&self, outcome: &Outcome) {
        match outcome.stopped_by() {
            Some(ClientError::Timeout { .. }) => self.shared.keeper.suspect(),
            Some(ClientError::Stalled { .. }) => self.shared.avoid_peers(),
            Some(ClientError::LimitReached { unanswered, .. }) => self.shared.note_unanswered(*unanswered),
            Some(_) => {}
            None => self.shared.lock().unanswered = Duration::ZERO,
        }
        if let Outcome::Loaded(loaded) = outcome {
            self.shared.note_standstill(loaded);
        }
    }
}

impl Shared {
    /// Suspects the agent after loads that waited up to their limits for a whole stall timeout, without an answer.
    fn note_unanswered(&self, waited: Duration) {
        let mut table = self.lock();
        table.unanswered += waited;
        if table.unanswered >= self.options.load.stall_timeout {
            table.unanswered = Duration::ZERO;
            drop(table);
            self.keeper.suspect();
        }
    }

    /// Avoids peers after loads up to their limits that got no block for [`RETRY_STANDSTILL_TIMEOUT`]: the answer does not
    /// show where a late block is.
    fn note_standstill(&self, loaded: &LoadedBlocks) {
        let mut table = self.lock();
        if loaded.statuses.contains(&BlockStatus::Ok) {
            table.standstill = Duration::ZERO;
        }
        let is_local = self.options.load.scope == Scope::Local
            || table.peers_avoided_until.is_some_and(|until| Instant::now() < until);
        // A load that used no peers shows nothing about them.
        if is_local {
            return;
        }
        table.standstill += loaded.standstill;
        if table.standstill >= RETRY_STANDSTILL_TIMEOUT {
            table.standstill = Duration::ZERO;
            drop(table);
            self.avoid_peers();
        }
    }

    /// Makes later loads use only this node for a while, after a load without progress.
    fn avoid_peers(&self) {
        self.lock().peers_avoided_until = Some(deadline::after(PEER_AVOIDANCE_TIME));
    }

    /// Options of a load that starts now.
    pub(super) fn load_options(&self) -> LoadOptions {
        let options = self.options.load;
        match (self.lock().peers_avoided_until, options.standstill_timeout) {
            (Some(until), Some(standstill)) if Instant::now() < until => LoadOptions {
                scope: Scope::Local,
                standstill_timeout: Some(standstill.min(RETRY_STANDSTILL_TIMEOUT)),
                ..options
            },
            _ => options,
        }
    }
}
