//! Slack-aware scheduler: which reads and writes a GPU launches before each layer (Tutti §3.3).
//!
//! ```text
//!            reads due ──► fit the window? ── yes ──► as many as fit, later layers' included
//!  layer ─┤                     └─ no ──────────────► those due, at once: retrieval is the bottleneck
//!            none due, no read in flight ──► as many writes as fit
//!            otherwise ────────────────────► writes stay for later layers, requests and decode
//! ```
//!
//! A pure state machine: it has no clock, and equal inputs give equal launches. One decision launches reads
//! or writes, never both, because a device that does both at once has less than half its bandwidth. Reads of
//! layer n + 1 are due when layer n begins. Outside of windows, the profile's fallback applies.
//!
//! Writes wait within bounds: after [`Limits::deferrals_max`] decisions, or when [`Limits::writes_max`] are
//! pending, writes take one decision for themselves. The decision after it belongs to reads, so that neither
//! direction starves.
//!
//! Invariants:
//! * A launch fits the measured window, or its [`Reason`] states why it was launched anyway.
//! * Each accepted IOCB is launched exactly once, unless it was cancelled before.
//! * Reads are launched in the order of their layers, then of their arrival; writes in that of their arrival.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use super::{Budget, Computation, Direction, Fallback, Io, KernelCost, Profile};

/// Bounds of what waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum pending reads, in IOCBs.
    pub reads_max: usize,
    /// Maximum pending writes, in IOCBs: each one keeps its KV memory from being reused.
    pub writes_max: usize,
    /// Decisions that a write may be deferred.
    pub deferrals_max: u64,
}

impl Default for Limits {
    fn default() -> Limits {
        // A ring has 64 batches; 1,024 decisions are 32 steps of 32 layers.
        Limits { reads_max: 4096, writes_max: 256, deferrals_max: 1024 }
    }
}

/// Number of an accepted IOCB, unique within a scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(u64);

/// Moment of a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// A layer is about to begin.
    Layer {
        /// Computation of the batch.
        computation: Computation,
        /// Number of the layer, from 0.
        layer: u32,
    },
    /// The GPU computes nothing, so I/O slows nothing down.
    Idle,
}

/// IOCBs to launch now, in one kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Direction of all IOCBs.
    pub direction: Direction,
    /// Launched IOCBs, in order. Never empty.
    pub tickets: Vec<Ticket>,
    /// Why they are launched now.
    pub reason: Reason,
    /// Cost by the profile's tables.
    pub predicted: KernelCost,
}

/// Reason of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Reason {
    /// The launch fits the window of the layer.
    InWindow,
    /// No window applies to the computation: the fallback admits the I/O.
    NoWindow,
    /// The window is too small for any kernel, and reads are due.
    NothingFits,
    /// More reads are due than fit the window: retrieval is the bottleneck.
    Bottleneck,
    /// Writes have waited for the longest permitted time, or too many are pending.
    Overdue,
    /// The GPU computes nothing.
    Idle,
}

impl Reason {
    /// All reasons, in the order of counters.
    pub const ALL: [Reason; 6] = [
        Reason::InWindow,
        Reason::NoWindow,
        Reason::NothingFits,
        Reason::Bottleneck,
        Reason::Overdue,
        Reason::Idle,
    ];

    /// Whether the launch may exceed the measured window.
    pub fn is_at_once(self) -> bool {
        !matches!(self, Reason::InWindow | Reason::Idle)
    }

    /// Name of the reason in reports.
    pub fn as_str(self) -> &'static str {
        match self {
            Reason::InWindow => "InWindow",
            Reason::NoWindow => "NoWindow",
            Reason::NothingFits => "NothingFits",
            Reason::Bottleneck => "Bottleneck",
            Reason::Overdue => "Overdue",
            Reason::Idle => "Idle",
        }
    }
}

/// Launches and IOCBs of one direction and reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaunchCount {
    /// Number of launches.
    pub launches: u64,
    /// IOCBs of these launches.
    pub iocbs: u64,
}

/// Counters of a scheduler's decisions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    launched: BTreeMap<(Direction, Reason), LaunchCount>,
    /// Decisions at which writes were pending and none was launched.
    pub deferred: u64,
    /// Launches while I/O of the other direction was in flight.
    pub overlapped: u64,
    /// IOCBs that were rejected because too many were pending.
    pub rejected: u64,
}

impl Counters {
    /// Launches of a direction for a reason.
    pub fn launched(&self, direction: Direction, reason: Reason) -> LaunchCount {
        self.launched.get(&(direction, reason)).copied().unwrap_or_default()
    }
}

/// Too many IOCBs are pending: wait for completions, or drop the write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{pending} IOCBs are pending, the limit: let launched ones complete first, or drop the write")]
pub struct Full {
    /// Pending IOCBs of the direction.
    pub pending: usize,
}

/// State of the scheduler of one GPU.
#[derive(Clone, Debug)]
pub struct Scheduler {
    profile: Arc<Profile>,
    limits: Limits,
    /// Pending reads by the layer that needs them and their arrival.
    reads: BTreeSet<(u32, Ticket)>,
    /// Pending writes with the decision at which they arrived.
    writes: VecDeque<(Ticket, u64)>,
    in_flight: BTreeMap<Ticket, Direction>,
    reads_in_flight: usize,
    next_ticket: u64,
    decisions: u64,
    /// The last decision was taken by overdue writes.
    writes_took_last: bool,
    counters: Counters,
}

impl Scheduler {
    /// Creates a scheduler without pending I/O.
    pub fn new(profile: Arc<Profile>, limits: Limits) -> Scheduler {
        Scheduler {
            profile,
            limits,
            reads: BTreeSet::new(),
            writes: VecDeque::new(),
            in_flight: BTreeMap::new(),
            reads_in_flight: 0,
            next_ticket: 0,
            decisions: 0,
            writes_took_last: false,
            counters: Counters::default(),
        }
    }

    /// Accepts a read IOCB whose blocks layer `layer` needs.
    ///
    /// # Errors
    /// [`Full`]: the limit of pending reads is reached.
    pub fn push_read(&mut self, layer: u32) -> Result<Ticket, Full> {
        self.admit(self.reads.len(), self.limits.reads_max)?;
        let ticket = self.ticket();
        self.reads.insert((layer, ticket));
        Ok(ticket)
    }

    /// Accepts a write IOCB. Its memory must stay unchanged until it completes or is cancelled.
    ///
    /// # Errors
    /// [`Full`]: the limit of pending writes is reached.
    pub fn push_write(&mut self) -> Result<Ticket, Full> {
        self.admit(self.writes.len(), self.limits.writes_max)?;
        let ticket = self.ticket();
        self.writes.push_back((ticket, self.decisions));
        Ok(ticket)
    }

    /// Removes a pending IOCB; returns whether it was pending. A launched one has to complete.
    pub fn cancel(&mut self, ticket: Ticket) -> bool {
        let pending = self.reads.len() + self.writes.len();
        self.reads.retain(|(_, read)| *read != ticket);
        self.writes.retain(|(write, _)| *write != ticket);
        self.reads.len() + self.writes.len() < pending
    }

    /// Ends a launched IOCB; returns whether it was in flight.
    pub fn complete(&mut self, ticket: Ticket) -> bool {
        let direction = self.in_flight.remove(&ticket);
        self.reads_in_flight -= usize::from(direction == Some(Direction::Read));
        direction.is_some()
    }

    /// Decides what to launch now.
    pub fn decide(&mut self, moment: Moment) -> Option<Launch> {
        self.decisions += 1;
        let chosen = match moment {
            Moment::Layer { computation, layer } => self.choose(computation, layer),
            Moment::Idle => self.choose_idle(),
        };
        if !self.writes.is_empty() && chosen.is_none_or(|(direction, ..)| direction == Direction::Read) {
            self.counters.deferred += 1;
        }
        let (direction, count, reason) = chosen?;
        Some(self.launch(direction, count, reason))
    }

    /// Pending IOCBs: reads, writes.
    pub fn pending(&self) -> (usize, usize) {
        (self.reads.len(), self.writes.len())
    }

    /// IOCBs that were launched and have not completed.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Counters of all decisions.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Profile that the scheduler reads.
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    fn admit(&mut self, pending: usize, most: usize) -> Result<(), Full> {
        if pending < most {
            return Ok(());
        }
        self.counters.rejected += 1;
        Err(Full { pending })
    }

    fn ticket(&mut self) -> Ticket {
        self.next_ticket += 1;
        Ticket(self.next_ticket)
    }

    fn choose(&mut self, computation: Computation, layer: u32) -> Option<(Direction, usize, Reason)> {
        let budget = self.profile.budget(computation);
        let due = self.reads.range(..(layer.saturating_add(2), Ticket(0))).count();
        if let Some(chosen) = self.choose_overdue(budget, due) {
            self.writes_took_last = true;
            return Some(chosen);
        }
        self.writes_took_last = false;
        self.choose_reads(budget, due).or_else(|| self.choose_writes(budget))
    }

    /// Chooses writes that waited too long, unless they took the last decision too.
    fn choose_overdue(&self, budget: Budget, due: usize) -> Option<(Direction, usize, Reason)> {
        let late = |(_, arrival): &&(Ticket, u64)| self.decisions - arrival > self.limits.deferrals_max;
        let overdue = self.writes.iter().take_while(late).count();
        let is_full = self.writes.len() >= self.limits.writes_max;
        if self.writes_took_last || (overdue == 0 && !is_full) {
            return None;
        }
        let rows = self.profile.kernels(Direction::Write);
        let (least, most) = (rows.first()?.iocbs as usize, rows.last()?.iocbs as usize);
        let fitting = self.profile.fitting(Direction::Write, budget) as usize;
        let count = overdue.max(least).min(most).max(fitting).min(self.writes.len());
        let fits = count <= fitting && due == 0 && self.reads_in_flight == 0;
        let reason = if fits { Reason::InWindow } else { Reason::Overdue };
        (count > 0).then_some((Direction::Write, count, reason))
    }

    fn choose_reads(&self, budget: Budget, due: usize) -> Option<(Direction, usize, Reason)> {
        let fitting = self.profile.fitting(Direction::Read, budget) as usize;
        let (count, reason) = match budget {
            Budget::Outside(fallback) if due == 0 && fallback.admits(Io::Prefetch) => {
                (self.reads_of_next_layer(), Reason::NoWindow)
            }
            Budget::Outside(_) => (due, Reason::NoWindow),
            Budget::Window { .. } if due <= fitting => (fitting.min(self.reads.len()), Reason::InWindow),
            Budget::Window { .. } if fitting == 0 => (due, Reason::NothingFits),
            Budget::Window { .. } => (due, Reason::Bottleneck),
        };
        // Reads that no layer waits for let writes in flight finish.
        let writes_in_flight = self.in_flight.len() - self.reads_in_flight;
        let count = if due == 0 && writes_in_flight > 0 { 0 } else { count };
        (count > 0).then_some((Direction::Read, count, reason))
    }

    /// Pending reads of the first layer that has any. With those of later layers in its launch, it would wait for them.
    fn reads_of_next_layer(&self) -> usize {
        let next = self.reads.first().map_or(0, |(layer, _)| *layer);
        self.reads.iter().take_while(|(layer, _)| *layer == next).count()
    }

    fn choose_writes(&self, budget: Budget) -> Option<(Direction, usize, Reason)> {
        if self.reads_in_flight > 0 {
            return None;
        }
        let (count, reason) = match budget {
            Budget::Outside(Fallback::Ignore) => (self.writes.len(), Reason::NoWindow),
            _ => (self.profile.fitting(Direction::Write, budget) as usize, Reason::InWindow),
        };
        let count = count.min(self.writes.len());
        (count > 0).then_some((Direction::Write, count, reason))
    }

    fn choose_idle(&mut self) -> Option<(Direction, usize, Reason)> {
        self.writes_took_last = false;
        let (reads, writes) = self.pending();
        match (reads, writes) {
            (1.., _) => Some((Direction::Read, reads, Reason::Idle)),
            (0, 1..) if self.reads_in_flight == 0 => Some((Direction::Write, writes, Reason::Idle)),
            _ => None,
        }
    }

    fn launch(&mut self, direction: Direction, count: usize, reason: Reason) -> Launch {
        let writes_in_flight = self.in_flight.len() - self.reads_in_flight;
        let tickets: Vec<Ticket> = match direction {
            Direction::Read => {
                self.counters.overlapped += u64::from(writes_in_flight > 0);
                self.reads_in_flight += count;
                (0..count).filter_map(|_| self.reads.pop_first()).map(|(_, ticket)| ticket).collect()
            }
            Direction::Write => {
                self.counters.overlapped += u64::from(self.reads_in_flight > 0);
                self.writes.drain(..count).map(|(ticket, _)| ticket).collect()
            }
        };
        self.in_flight.extend(tickets.iter().map(|ticket| (*ticket, direction)));
        let counted = self.counters.launched.entry((direction, reason)).or_default();
        counted.launches += 1;
        counted.iocbs += count as u64;
        let predicted = self.profile.cost(direction, u32::try_from(count).unwrap_or(u32::MAX));
        Launch { direction, tickets, reason, predicted }
    }
}

#[cfg(test)]
mod tests;
