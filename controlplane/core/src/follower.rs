//! What one reader of a directory is to be told next, so that in the end it knows what the directory holds.
//!
//! ```text
//!             a position that the log reaches
//!   new ──────────────────────────────────────────► catching up ──end of the log──► following
//!    │ none, or another one                              ▲                              │
//!    ▼                                                   │ everything read              │
//!   snapshot begins ──► a part of the log, a part of the directory, by turns            │
//!    ▲                                                   │                              │
//!    └────────── the log does not reach the position any more ◄─────────────────────────┘
//! ```
//!
//! The two sources are asked for by name ([`Follower::source`]), so that a runtime takes the lock of one at a time and none
//! while a reader takes its time.
//!
//! # Why a snapshot that takes its time is right
//!
//! The directory is a set of replicas; changes and clearings are operations on it, each of which decides about some replicas
//! whatever was before: *there* or *not there*. The reader gets them in the order in which the directory took them.
//!
//! Let a snapshot begin at number b of the log. Of one replica r the reader learns: each operation on r from b on, in order;
//! and once, when the cursor passes it, that r is there, if it is at that moment (`t`, as a number of the log). Parts of the log
//! that were told before `t` end at or before `t`. Claim: at any number `s ≥ t` up to which the log was told, the reader
//! has r exactly when the directory had it at `s`. Take the last operation on r in b..s:
//! * it was told after the cursor passed: it decided, here and there;
//! * it was told before: r was not touched after it, up to `s`, which is not before `t`; so what the cursor saw is what the
//!   operation left, and adding r again, or not adding it, changes nothing;
//! * there is none: r was at `t` what it is at `s`, and the reader, who began with nothing, has it exactly if the cursor saw it.
//!
//! So when the cursor is at its end at `t'`, what the reader has is right from `t'` on. It is told so ([`Told::Current`]), and
//! can go on from any position it was given after the last part of the directory: a replay of the same operations in the
//! same order decides the same. Before that a message has no position.
//!
//! Parts of the log between parts of the directory keep a reader within the log while it takes a snapshot of 10⁸ replicas: only
//! one that is slower than the changes themselves loses the log, and then gets another snapshot.
//!
//! Deliberately absent: what it was told (a follower is some 64 bytes), waiting, whether nodes live.

use reprise_policy::{BlockKey, NodeId, Tier};

use crate::directory::{Cursor, Directory, HeldReplica, Operation};
use crate::log::{Log, Position, Reach, Read, ReplicaChange, Run};

/// See the module.
#[derive(Clone, Debug)]
pub struct Follower {
    phase: Phase,
    /// Records, or entries of the directory, in one part.
    part_max: usize,
}

/// Where the next part comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// [`Follower::read_log`].
    Log,
    /// [`Follower::read_directory`].
    Directory,
}

/// What comes of asking the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// This is to be told.
    Tell(Told),
    /// Nothing to tell yet; ask again for the source.
    GoOn,
    /// Nothing before the log grows.
    Wait,
}

/// A message to the reader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Told {
    /// Forget everything: a snapshot begins.
    SnapshotBegins(Reason),
    /// This happened, or is so.
    Run {
        /// What.
        run: Run,
        /// Where to go on from after it; none within a snapshot.
        position: Option<Position>,
    },
    /// What was told is what the directory held at this position. Comes once after each snapshot, and once after the start.
    Current(Position),
}

/// Why there is a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// No position was named.
    Start,
    /// The position is of another life of the directory.
    OtherLog,
    /// What came after the position is not in the log any more.
    Behind,
}

#[derive(Clone, Copy, Debug)]
enum Phase {
    New {
        from: Option<Position>,
    },
    Snapshot {
        cursor: Cursor,
        next: u64,
        turn: Source,
    },
    /// Current as soon as `until` is reached, which is the end of the log when it is next looked at, if it is not known yet.
    CatchingUp {
        next: u64,
        until: Option<u64>,
    },
    Following {
        next: u64,
    },
}

impl Follower {
    /// A reader that knows everything before `from`, or nothing. A part has about `part_max` changes.
    pub fn new(from: Option<Position>, part_max: usize) -> Follower {
        Follower { phase: Phase::New { from }, part_max }
    }

    /// What to ask next.
    pub fn source(&self) -> Source {
        match self.phase {
            Phase::Snapshot { turn, .. } => turn,
            Phase::New { .. } | Phase::CatchingUp { .. } | Phase::Following { .. } => Source::Log,
        }
    }

    /// Asks the log.
    pub fn read_log(&mut self, log: &Log) -> Step {
        match self.phase {
            Phase::New { from } => self.begin(from, log),
            Phase::Snapshot { next, .. } => self.between_parts(next, log),
            Phase::CatchingUp { next, until } => self.catch_up(next, until, log),
            Phase::Following { next } => match log.read(next, self.part_max) {
                Read::UpToDate => Step::Wait,
                read => self.tell(read, log, |next| Phase::Following { next }),
            },
        }
    }

    /// Asks the directory; only in its turn.
    pub fn read_directory(&mut self, directory: &Directory) -> Told {
        let Phase::Snapshot { cursor, turn: Source::Directory, next } = &mut self.phase else {
            unreachable!("asked out of turn: follow source()")
        };
        let mut held = Vec::new();
        directory.read(cursor, self.part_max, &mut held);
        let (cursor, next) = (*cursor, *next);
        self.phase = if cursor.is_at_end() {
            Phase::CatchingUp { next, until: None }
        } else {
            Phase::Snapshot { cursor, next, turn: Source::Log }
        };
        Told::Run { run: Run::Changes(held.iter().map(HeldReplica::announced).collect()), position: None }
    }

    fn begin(&mut self, from: Option<Position>, log: &Log) -> Step {
        let Some(from) = from else { return self.snapshot(Reason::Start, log) };
        match log.reaches(from) {
            Reach::Foreign => self.snapshot(Reason::OtherLog, log),
            Reach::Gone => self.snapshot(Reason::Behind, log),
            Reach::There => {
                self.phase = Phase::CatchingUp { next: from.next, until: None };
                Step::GoOn
            }
        }
    }

    fn between_parts(&mut self, next: u64, log: &Log) -> Step {
        let Phase::Snapshot { cursor, .. } = self.phase else { unreachable!("it is in a snapshot") };
        let then = |next| Phase::Snapshot { cursor, next, turn: Source::Directory };
        match log.read(next, self.part_max) {
            Read::UpToDate => {
                self.phase = then(next);
                Step::GoOn
            }
            read => self.tell(read, log, then),
        }
    }

    fn catch_up(&mut self, next: u64, until: Option<u64>, log: &Log) -> Step {
        let until = until.unwrap_or(log.end().next);
        if next >= until {
            self.phase = Phase::Following { next };
            return Step::Tell(Told::Current(Position { log: log.end().log, next }));
        }
        let read = log.read(next, self.part_max);
        self.tell(read, log, |next| Phase::CatchingUp { next, until: Some(until) })
    }

    /// Tells what was read and goes on with `then`, or begins a snapshot when it is gone.
    fn tell(&mut self, read: Read, log: &Log, then: impl FnOnce(u64) -> Phase) -> Step {
        let Read::Run(run, next) = read else { return self.snapshot(Reason::Behind, log) };
        self.phase = then(next);
        let within_snapshot = matches!(self.phase, Phase::Snapshot { .. });
        let position = (!within_snapshot).then_some(Position { log: log.end().log, next });
        Step::Tell(Told::Run { run, position })
    }

    fn snapshot(&mut self, reason: Reason, log: &Log) -> Step {
        let next = log.end().next;
        self.phase = Phase::Snapshot { cursor: Cursor::default(), next, turn: Source::Directory };
        Step::Tell(Told::SnapshotBegins(reason))
    }
}

impl HeldReplica {
    /// As the change that says that it is there.
    fn announced(&self) -> ReplicaChange {
        let &HeldReplica { node, key, tier } = self;
        ReplicaChange { node, key, operation: Operation::Announce(tier) }
    }
}

/// For the arithmetic of the module's users.
const _: () = assert!(size_of::<ReplicaChange>() <= 24 && size_of::<(NodeId, BlockKey, Tier)>() <= 24);
