//! The store's process: requests, watches, expiry of leases, its death and restart.
//!
//! Not reproduced: the members of an etcd cluster; a client sees one store that is available or not.

use std::time::Duration;

use reprise_policy::Tick;

use crate::clock::PauseClock;
use crate::messages::{CallId, Message, StoreReply, StoreRequest};
use crate::network::{Host, LineId};
use crate::simulation::{Action, Simulation};
use crate::store::{Prefix, Revision, Store};

/// Maximum duration of a write on the store's disk, and of other operations, in microseconds.
const WRITE_US_MAX: u64 = 20_000;
const READ_US_MAX: u64 = 2_000;
/// Time for which a write occupies the disk: etcd commits about 10⁴ writes a second.
const WRITE_BUSY: Duration = Duration::from_micros(100);
/// Additional duration of operations on a slow disk.
pub(crate) const SLOW: Duration = Duration::from_millis(1500);

/// The store's process and its disk.
#[derive(Debug, Default)]
pub(crate) struct StoreProcess {
    pub(crate) store: Store,
    watchers: Vec<Watcher>,
    /// Time of the next check of leases, by its clock.
    expire_at: Option<Tick>,
    /// Time until which the disk is busy: writes are sequential.
    busy_until: Tick,
    /// All operations are slow.
    pub(crate) slow: bool,
    /// Every change is compacted at once.
    pub(crate) compacting: bool,
}

#[derive(Debug)]
struct Watcher {
    of: (LineId, CallId),
    prefix: Prefix,
    /// Last revision that the watch has received.
    sent: Revision,
}

/// A step of the store's process.
#[derive(Debug)]
pub(crate) enum StoreStep {
    /// An answer is ready.
    Answer { line: LineId, call: CallId, reply: StoreReply },
    /// Check for expired leases.
    Expire,
}

impl StoreStep {
    /// Returns a number for the digest of the trace.
    pub(crate) fn code(&self) -> u64 {
        match self {
            StoreStep::Answer { call, .. } => 1 + (call.0 << 8),
            StoreStep::Expire => 2,
        }
    }
}

impl Simulation {
    /// Starts the store's process on the contents of its disk.
    pub(crate) fn start_store(&mut self) {
        self.env.begin_process(Host::Store);
        let now = self.env.time(Host::Store);
        self.store_process.store.restarted(now);
        self.store_process.watchers.clear();
        self.store_process.expire_at = None;
        self.expire_leases();
    }

    pub(crate) fn kill_store(&mut self) {
        self.env.break_lines(Host::Store);
        self.env.end_process(Host::Store);
    }

    pub(crate) fn serve_store_call(&mut self, of: (LineId, CallId), request: StoreRequest) {
        let now = self.env.time(Host::Store);
        let took_us_max = match request {
            StoreRequest::Transact { .. } | StoreRequest::Delete { .. } | StoreRequest::Grant(_) => {
                WRITE_US_MAX
            }
            _ => READ_US_MAX,
        };
        let store = &mut self.store_process.store;
        let reply = match request {
            StoreRequest::Get(keys) => {
                StoreReply::Entries(keys.iter().map(|key| store.get(*key).cloned()).collect())
            }
            StoreRequest::Range(prefix) => {
                StoreReply::Range { revision: store.revision(), entries: store.range(prefix) }
            }
            StoreRequest::Transact { conditions, writes } => {
                StoreReply::Transacted(store.transact(&conditions, writes))
            }
            StoreRequest::Delete { conditions, key } => {
                StoreReply::Transacted(store.delete(&conditions, key))
            }
            StoreRequest::Watch { prefix, from } => return self.watch(of, prefix, from),
            StoreRequest::Grant(time_to_live) => StoreReply::Granted(store.grant(now, time_to_live)),
            StoreRequest::KeepAlive(lease) => StoreReply::Kept { lives: store.keep_alive(now, lease) },
            StoreRequest::Revoke(lease) => {
                store.revoke(lease);
                StoreReply::Revoked
            }
        };
        self.answer(of, took_us_max, reply);
        self.note_budgets();
        self.expire_leases();
        self.notify_watchers();
    }

    fn answer(&mut self, of: (LineId, CallId), took_us_max: u64, reply: StoreReply) {
        let mut took = self.env.rng.micros(50..took_us_max);
        if took_us_max == WRITE_US_MAX {
            let busy_until = self.store_process.busy_until.max(self.env.now).after(WRITE_BUSY);
            self.store_process.busy_until = busy_until;
            took += busy_until.since(self.env.now);
        }
        let delay = if self.store_process.slow { took + SLOW } else { took };
        let life = self.env.host(Host::Store).life;
        let what = StoreStep::Answer { line: of.0, call: of.1, reply };
        self.env.after(delay, Action::Store { life, what });
    }

    fn watch(&mut self, of: (LineId, CallId), prefix: Prefix, from: Revision) {
        let store = &self.store_process.store;
        if store.changes(prefix, from).is_err() {
            self.env.count("watches compacted");
            return self.answer(of, READ_US_MAX, StoreReply::Compacted);
        }
        self.store_process.watchers.push(Watcher { of, prefix, sent: from - 1 });
        self.env.send(of.0, 0, Message::StoreReply { call: of.1, reply: StoreReply::Watching });
        self.notify_watchers();
    }

    /// Sends every watch the changes that it has not received.
    fn notify_watchers(&mut self) {
        let mut watchers = std::mem::take(&mut self.store_process.watchers);
        for watcher in &mut watchers {
            let store = &self.store_process.store;
            let Ok(changes) = store.changes(watcher.prefix, watcher.sent + 1) else { continue };
            let revision = store.revision();
            watcher.sent = watcher.sent.max(revision);
            if !changes.is_empty() {
                let reply = StoreReply::Changes { revision, changes };
                self.env.send(watcher.of.0, 0, Message::StoreReply { call: watcher.of.1, reply });
            }
        }
        self.store_process.watchers = watchers;
        if self.store_process.compacting {
            self.store_process.store.compact();
        }
    }

    pub(crate) fn watchers_lost(&mut self, line: LineId) {
        self.store_process.watchers.retain(|watcher| watcher.of.0 != line);
    }

    pub(crate) fn store_step(&mut self, life: u64, what: StoreStep) {
        if self.env.host(Host::Store).life != life || !self.env.runs(Host::Store) {
            return;
        }
        match what {
            StoreStep::Answer { line, call, reply } => {
                self.env.send(line, 0, Message::StoreReply { call, reply });
            }
            // A check that was scheduled before an earlier one, or before its clock stopped, has no effect.
            StoreStep::Expire
                if self.store_process.expire_at.is_none_or(|at| at > self.env.time(Host::Store)) => {}
            StoreStep::Expire => {
                self.store_process.expire_at = None;
                self.expire_leases();
                self.notify_watchers();
            }
        }
    }

    /// Ends expired leases, and schedules the check for the next one.
    fn expire_leases(&mut self) {
        self.store_process.store.expire(self.env.time(Host::Store), self.env.now);
        let next = self.store_process.store.next_expiry();
        if let Some(next) = next.filter(|next| self.store_process.expire_at.is_none_or(|at| *next < at)) {
            self.schedule_expiry(next);
        }
    }

    fn schedule_expiry(&mut self, next: Tick) {
        self.store_process.expire_at = Some(next);
        let (at, life) = (self.env.when(Host::Store, next), self.env.host(Host::Store).life);
        self.env.queue.push(at, Action::Store { life, what: StoreStep::Expire });
    }

    /// Resumes the store's process: its clock may show any time, so its timer is set again.
    pub(crate) fn resume_store(&mut self, how: PauseClock) {
        if let PauseClock::Jumps(_) = how {
            self.store_process.store.clock_jumped();
        }
        if let Some(next) = self.store_process.store.next_expiry() {
            self.schedule_expiry(next);
        }
    }

    /// Empties the disk, as in a new installation of the store.
    pub(crate) fn wipe_store(&mut self) {
        if self.env.runs(Host::Store) {
            self.kill_store();
        }
        self.store_process.store.wipe();
        self.clear_bounds();
        self.start_store();
    }
}
