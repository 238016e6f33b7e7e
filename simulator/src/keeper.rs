//! The store among the hosts: questions that arrive, watches, the end of leases, its death and its next life.
//!
//! Deliberately absent: the members of an etcd cluster; a client sees one store that is there or not.

use std::time::Duration;

use reprise_policy::Tick;

use crate::clock::Stopped;
use crate::messages::{CallId, Message, Question, Told};
use crate::network::{Host, LineId};
use crate::store::{Prefix, Revision, Store};
use crate::world::{Action, World};

/// What a write takes on the store's disk, and everything else, in microseconds at the most.
const WRITE_US_MAX: u64 = 20_000;
const READ_US_MAX: u64 = 2_000;
/// What a write keeps its disk from others: etcd commits some 10⁴ a second.
const WRITE_BUSY: Duration = Duration::from_micros(100);
/// A store whose disk is slow takes so long.
pub(crate) const SLOW: Duration = Duration::from_millis(1500);

/// The store's process and its disk.
#[derive(Debug, Default)]
pub(crate) struct Keeper {
    pub(crate) store: Store,
    watchers: Vec<Watcher>,
    /// The next look at leases is when its clock shows this.
    expire_at: Option<Tick>,
    /// Its disk is busy until then: it writes one thing after the other.
    busy_until: Tick,
    /// Everything takes longer.
    pub(crate) slow: bool,
    /// Whatever happens is forgotten at once.
    pub(crate) compacting: bool,
}

#[derive(Debug)]
struct Watcher {
    of: (LineId, CallId),
    prefix: Prefix,
    /// Told up to here.
    told: Revision,
}

/// Something within the store's process.
#[derive(Debug)]
pub(crate) enum KeeperStep {
    /// An answer is ready.
    Answer { line: LineId, call: CallId, told: Told },
    /// Leases may be over.
    Expire,
}

impl KeeperStep {
    /// For the digest of the trace.
    pub(crate) fn code(&self) -> u64 {
        match self {
            KeeperStep::Answer { call, .. } => 1 + (call.0 << 8),
            KeeperStep::Expire => 2,
        }
    }
}

impl World {
    /// The store's process starts on what its disk has.
    pub(crate) fn start_store(&mut self) {
        self.begin_process(Host::Store);
        let now = self.time(Host::Store);
        self.keeper.store.restarted(now);
        self.keeper.watchers.clear();
        self.keeper.expire_at = None;
        self.expire_leases();
    }

    pub(crate) fn kill_store(&mut self) {
        self.break_lines(Host::Store);
        self.end_process(Host::Store);
    }

    pub(crate) fn keep(&mut self, of: (LineId, CallId), question: Question) {
        let now = self.time(Host::Store);
        let took_us_max = match question {
            Question::Transact { .. } | Question::Delete { .. } | Question::Grant(_) => WRITE_US_MAX,
            _ => READ_US_MAX,
        };
        let store = &mut self.keeper.store;
        let told = match question {
            Question::Get(keys) => Told::Entries(keys.iter().map(|key| store.get(*key).cloned()).collect()),
            Question::Range(prefix) => {
                Told::Range { revision: store.revision(), entries: store.range(prefix) }
            }
            Question::Transact { conditions, writes } => {
                Told::Transacted(store.transact(&conditions, writes))
            }
            Question::Delete { conditions, key } => Told::Transacted(store.delete(&conditions, key)),
            Question::Watch { prefix, from } => return self.watch(of, prefix, from),
            Question::Grant(time_to_live) => Told::Granted(store.grant(now, time_to_live)),
            Question::KeepAlive(lease) => Told::Kept { lives: store.keep_alive(now, lease) },
            Question::Revoke(lease) => {
                store.revoke(lease);
                Told::Revoked
            }
        };
        self.answer(of, took_us_max, told);
        self.note_budgets();
        self.expire_leases();
        self.tell_watchers();
    }

    fn answer(&mut self, of: (LineId, CallId), took_us_max: u64, told: Told) {
        let mut took = self.rng.micros(50..took_us_max);
        if took_us_max == WRITE_US_MAX {
            let busy_until = self.keeper.busy_until.max(self.now).after(WRITE_BUSY);
            self.keeper.busy_until = busy_until;
            took += busy_until.since(self.now);
        }
        let delay = if self.keeper.slow { took + SLOW } else { took };
        let life = self.place(Host::Store).life;
        let what = KeeperStep::Answer { line: of.0, call: of.1, told };
        self.after(delay, Action::Store { life, what });
    }

    fn watch(&mut self, of: (LineId, CallId), prefix: Prefix, from: Revision) {
        let store = &self.keeper.store;
        if store.changes(prefix, from).is_err() {
            self.count("watches compacted");
            return self.answer(of, READ_US_MAX, Told::Compacted);
        }
        self.keeper.watchers.push(Watcher { of, prefix, told: from - 1 });
        self.send(of.0, 0, Message::Told { call: of.1, told: Told::Watching });
        self.tell_watchers();
    }

    /// Tells every watch what it has not been told.
    fn tell_watchers(&mut self) {
        let mut watchers = std::mem::take(&mut self.keeper.watchers);
        for watcher in &mut watchers {
            let store = &self.keeper.store;
            let Ok(changes) = store.changes(watcher.prefix, watcher.told + 1) else { continue };
            let revision = store.revision();
            watcher.told = watcher.told.max(revision);
            if !changes.is_empty() {
                let told = Told::Changes { revision, changes };
                self.send(watcher.of.0, 0, Message::Told { call: watcher.of.1, told });
            }
        }
        self.keeper.watchers = watchers;
        if self.keeper.compacting {
            self.keeper.store.compact();
        }
    }

    pub(crate) fn watchers_lost(&mut self, line: LineId) {
        self.keeper.watchers.retain(|watcher| watcher.of.0 != line);
    }

    pub(crate) fn keeper_step(&mut self, life: u64, what: KeeperStep) {
        if self.place(Host::Store).life != life || !self.runs(Host::Store) {
            return;
        }
        match what {
            KeeperStep::Answer { line, call, told } => self.send(line, 0, Message::Told { call, told }),
            // One that was scheduled before an earlier one, or before its clock stood still, changes nothing.
            KeeperStep::Expire if self.keeper.expire_at.is_none_or(|at| at > self.time(Host::Store)) => {}
            KeeperStep::Expire => {
                self.keeper.expire_at = None;
                self.expire_leases();
                self.tell_watchers();
            }
        }
    }

    /// Ends leases that are over, and comes again when the next one is.
    fn expire_leases(&mut self) {
        self.keeper.store.expire(self.time(Host::Store), self.now);
        let next = self.keeper.store.next_expiry();
        if let Some(next) = next.filter(|next| self.keeper.expire_at.is_none_or(|at| *next < at)) {
            self.come_at(next);
        }
    }

    fn come_at(&mut self, next: Tick) {
        self.keeper.expire_at = Some(next);
        let (at, life) = (self.when(Host::Store, next), self.place(Host::Store).life);
        self.queue.push(at, Action::Store { life, what: KeeperStep::Expire });
    }

    /// The store's process goes on after it was stopped: its clock may show anything, so its timer is set anew.
    pub(crate) fn store_goes_on(&mut self, how: Stopped) {
        if let Stopped::Jumps(_) = how {
            self.keeper.store.clock_jumped();
        }
        if let Some(next) = self.keeper.store.next_expiry() {
            self.come_at(next);
        }
    }

    /// The disk is emptied, as by an operator who sets the store up again.
    pub(crate) fn wipe_store(&mut self) {
        if self.runs(Host::Store) {
            self.kill_store();
        }
        self.keeper.store.wipe();
        self.nobody_is_bound();
        self.start_store();
    }
}
