//! The store's process: requests, watches, expiry of leases, its death and restart.
//!
//! Not reproduced: the members of an etcd cluster; a client sees one store that is available or not.

use std::time::Duration;

use reprise_policy::Tick;

use crate::clock::PauseClock;
use crate::environment::Environment;
use crate::messages::{CallId, Message, StoreReply, StoreRequest};
use crate::network::{Host, LineId};
use crate::observation::Observation;
use crate::simulation::Action;
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

impl StoreProcess {
    /// Starts the store's process on the contents of its disk.
    pub(crate) fn start(&mut self, env: &mut Environment) {
        env.begin_process(Host::Store);
        let now = env.time(Host::Store);
        self.store.restarted(now);
        self.watchers.clear();
        self.expire_at = None;
        self.expire_leases(env);
    }

    pub(crate) fn kill(&self, env: &mut Environment) {
        env.break_lines(Host::Store);
        env.end_process(Host::Store);
    }

    pub(crate) fn serve(&mut self, env: &mut Environment, of: (LineId, CallId), request: StoreRequest) {
        let now = env.time(Host::Store);
        let took_us_max = match request {
            StoreRequest::Transact { .. } | StoreRequest::Delete { .. } | StoreRequest::Grant(_) => {
                WRITE_US_MAX
            }
            _ => READ_US_MAX,
        };
        let store = &mut self.store;
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
            StoreRequest::Watch { prefix, from } => return self.watch(env, of, prefix, from),
            StoreRequest::Grant(time_to_live) => StoreReply::Granted(store.grant(now, time_to_live)),
            StoreRequest::KeepAlive(lease) => StoreReply::Kept { lives: store.keep_alive(now, lease) },
            StoreRequest::Revoke(lease) => {
                store.revoke(lease);
                StoreReply::Revoked
            }
        };
        self.answer(env, of, took_us_max, reply);
        env.observe(Observation::StoreRequested);
        self.expire_leases(env);
        self.notify_watchers(env);
    }

    fn answer(&mut self, env: &mut Environment, of: (LineId, CallId), took_us_max: u64, reply: StoreReply) {
        let mut took = env.rng.micros(50..took_us_max);
        if took_us_max == WRITE_US_MAX {
            let busy_until = self.busy_until.max(env.now).after(WRITE_BUSY);
            self.busy_until = busy_until;
            took += busy_until.since(env.now);
        }
        let delay = if self.slow { took + SLOW } else { took };
        let life = env.host(Host::Store).life;
        let what = StoreStep::Answer { line: of.0, call: of.1, reply };
        env.after(delay, Action::Store { life, what });
    }

    fn watch(&mut self, env: &mut Environment, of: (LineId, CallId), prefix: Prefix, from: Revision) {
        let store = &self.store;
        if store.changes(prefix, from).is_err() {
            let revision = store.revision();
            env.count("watches compacted");
            return self.answer(env, of, READ_US_MAX, StoreReply::Compacted { revision });
        }
        self.watchers.push(Watcher { of, prefix, sent: from - 1 });
        env.send(of.0, 0, Message::StoreReply { call: of.1, reply: StoreReply::Watching });
        self.notify_watchers(env);
    }

    /// Sends every watch the changes that it has not received.
    fn notify_watchers(&mut self, env: &mut Environment) {
        let mut watchers = std::mem::take(&mut self.watchers);
        for watcher in &mut watchers {
            let store = &self.store;
            let Ok(changes) = store.changes(watcher.prefix, watcher.sent + 1) else { continue };
            let revision = store.revision();
            watcher.sent = watcher.sent.max(revision);
            if !changes.is_empty() {
                let reply = StoreReply::Changes { revision, changes };
                env.send(watcher.of.0, 0, Message::StoreReply { call: watcher.of.1, reply });
            }
        }
        self.watchers = watchers;
        if self.compacting {
            self.store.compact();
        }
    }

    pub(crate) fn line_lost(&mut self, line: LineId) {
        self.watchers.retain(|watcher| watcher.of.0 != line);
    }

    pub(crate) fn step(&mut self, env: &mut Environment, life: u64, what: StoreStep) {
        if env.host(Host::Store).life != life || !env.runs(Host::Store) {
            return;
        }
        match what {
            StoreStep::Answer { line, call, reply } => {
                env.send(line, 0, Message::StoreReply { call, reply });
            }
            // A check that was scheduled before an earlier one, or before its clock stopped, has no effect.
            StoreStep::Expire if self.expire_at.is_none_or(|at| at > env.time(Host::Store)) => {}
            StoreStep::Expire => {
                self.expire_at = None;
                self.expire_leases(env);
                self.notify_watchers(env);
            }
        }
    }

    /// Ends expired leases, and schedules the check for the next one.
    fn expire_leases(&mut self, env: &mut Environment) {
        self.store.expire(env.time(Host::Store), env.now);
        let next = self.store.next_expiry();
        if let Some(next) = next.filter(|next| self.expire_at.is_none_or(|at| *next < at)) {
            self.schedule_expiry(env, next);
        }
    }

    fn schedule_expiry(&mut self, env: &mut Environment, next: Tick) {
        self.expire_at = Some(next);
        let (at, life) = (env.when(Host::Store, next), env.host(Host::Store).life);
        env.queue.push(at, Action::Store { life, what: StoreStep::Expire });
    }

    /// Resumes the store's process: its clock may show any time, so its timer is set again.
    pub(crate) fn resume(&mut self, env: &mut Environment, how: PauseClock) {
        if let PauseClock::Jumps(_) = how {
            self.store.clock_jumped();
        }
        if let Some(next) = self.store.next_expiry() {
            self.schedule_expiry(env, next);
        }
    }

    /// Empties the disk, as in a new installation of the store.
    pub(crate) fn wipe(&mut self, env: &mut Environment) {
        if env.runs(Host::Store) {
            self.kill(env);
        }
        self.store.wipe();
        env.observe(Observation::StoreWiped);
        self.start(env);
    }
}
