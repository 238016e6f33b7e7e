//! The sequence of messages that brings one reader to the state of the directory and keeps it there.
//!
//! ```text
//!             a position covered by the log
//!   new ──────────────────────────────────────────► catching up ──end of the log──► following
//!    │ no position, or not covered                       ▲                              │
//!    ▼                                                   │ everything read              │
//!   snapshot begins ──► alternately a part of the log and a part of the directory       │
//!    ▲                                                   │                              │
//!    └────────── the position is no longer covered by the log ◄─────────────────────────┘
//! ```
//!
//! The caller reads from one of two sources at a time ([`Follower::source`]). So a runtime locks one of them
//! at a time, and none while the reader is slow.
//!
//! # Why an incremental snapshot is correct
//!
//! The directory is a set of replicas. Changes and clearings are operations on it, each of which sets some
//! replicas to *present* or *absent*, independent of their state before. The reader receives operations in
//! the order in which the directory applied them.
//!
//! Let a snapshot start at number b of the log. About one replica r the reader receives each operation on r
//! from b on, in order. Once, when the cursor passes r at log number `t`, it also receives that r is present,
//! if it is. Parts of the log sent before that end at or before `t`. Claim: at any number `s ≥ t` up to which
//! the log was sent, the reader has r exactly if the directory had it at `s`. Consider the last operation on
//! r in b..s:
//! * Sent after the cursor passed: the operation determines r in both.
//! * Sent before the cursor passed: no later operation on r exists up to `s`, which is not before `t`. So the
//!   cursor saw the result of the operation, and adding r again, or not adding it, changes nothing.
//! * None exists: r is the same at `t` and `s`. The reader started empty, so it has r exactly if the cursor
//!   saw it.
//!
//! So when the cursor has reached its end at `t'`, the reader's state is correct from `t'` on. It receives
//! [`FollowerMessage::Current`], and can resume from any position that it receives after the last part of the
//! directory, because replaying the same operations in order gives the same result. Messages before that have
//! no position.
//!
//! Parts of the log are interleaved with parts of the directory, so that a snapshot of 10⁸ replicas does not
//! fall behind the log. Only a reader that is slower than the changes does, and then gets another snapshot.
//!
//! A follower has about 64 bytes and does not store sent messages. Waiting and liveness are the caller's.

use reprise_policy::{BlockKey, NodeId, Tier};

use crate::change_log::{ChangeLog, Coverage, Position, ReadResult, ReplicaChange, Run};
use crate::directory::{Cursor, Directory, Operation, ReplicaEntry};

/// Position and phase of one reader.
#[derive(Clone, Debug)]
pub struct Follower {
    phase: Phase,
    /// Maximum number of records or directory entries in one part.
    part_max: usize,
}

/// Source of the next part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The change log: call [`Follower::read_log`].
    ChangeLog,
    /// The directory: call [`Follower::read_directory`].
    Directory,
}

/// Result of reading the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Send this message.
    Send(FollowerMessage),
    /// Nothing to send yet; check the source again.
    Continue,
    /// Wait until the log grows.
    Wait,
}

/// A message to the reader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FollowerMessage {
    /// A snapshot begins: discard all state.
    SnapshotBegins(SnapshotReason),
    /// Changes that happened or, within a snapshot, replicas that are present.
    Run {
        /// Records in order.
        run: Run,
        /// Position to resume from after this message; `None` within a snapshot.
        position: Option<Position>,
    },
    /// The reader's state equals the directory at this position. Sent once after the start and after each
    /// snapshot.
    Current(Position),
}

/// Reasons for a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SnapshotReason {
    /// The reader has no position.
    Start,
    /// The position belongs to another log.
    OtherLog,
    /// Records after the position were evicted from the log.
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
        next_source: Source,
    },
    /// Becomes current at `until`, which is set to the end of the log on the next read.
    CatchingUp {
        next: u64,
        until: Option<u64>,
    },
    Following {
        next: u64,
    },
}

impl Follower {
    /// Creates a reader that knows all changes before `from`, or none. A part has about `part_max` changes.
    pub fn new(from: Option<Position>, part_max: usize) -> Follower {
        Follower { phase: Phase::New { from }, part_max }
    }

    /// Source to read next.
    pub fn source(&self) -> Source {
        match self.phase {
            Phase::Snapshot { next_source, .. } => next_source,
            Phase::New { .. } | Phase::CatchingUp { .. } | Phase::Following { .. } => Source::ChangeLog,
        }
    }

    /// Reads the next part of the log.
    pub fn read_log(&mut self, log: &ChangeLog) -> Step {
        match self.phase {
            Phase::New { from } => self.start(from, log),
            Phase::Snapshot { next, .. } => self.between_parts(next, log),
            Phase::CatchingUp { next, until } => self.catch_up(next, until, log),
            Phase::Following { next } => match log.read(next, self.part_max) {
                ReadResult::UpToDate => Step::Wait,
                read => self.send(read, log, |next| Phase::Following { next }),
            },
        }
    }

    /// Reads the next part of the directory. Panics unless [`Follower::source`] is the directory.
    pub fn read_directory(&mut self, directory: &Directory) -> FollowerMessage {
        let Phase::Snapshot { cursor, next_source: Source::Directory, next } = &mut self.phase else {
            unreachable!("the source is not the directory")
        };
        let mut entries = Vec::new();
        directory.read(cursor, self.part_max, &mut entries);
        let (cursor, next) = (*cursor, *next);
        self.phase = if cursor.is_at_end() {
            Phase::CatchingUp { next, until: None }
        } else {
            Phase::Snapshot { cursor, next, next_source: Source::ChangeLog }
        };
        FollowerMessage::Run {
            run: Run::Changes(entries.iter().map(ReplicaEntry::announcement).collect()),
            position: None,
        }
    }

    fn start(&mut self, from: Option<Position>, log: &ChangeLog) -> Step {
        let Some(from) = from else { return self.snapshot(SnapshotReason::Start, log) };
        match log.coverage(from) {
            Coverage::Foreign => self.snapshot(SnapshotReason::OtherLog, log),
            Coverage::Evicted => self.snapshot(SnapshotReason::Behind, log),
            Coverage::Complete => {
                self.phase = Phase::CatchingUp { next: from.next, until: None };
                Step::Continue
            }
        }
    }

    fn between_parts(&mut self, next: u64, log: &ChangeLog) -> Step {
        let Phase::Snapshot { cursor, .. } = self.phase else {
            unreachable!("only called within a snapshot")
        };
        let then = |next| Phase::Snapshot { cursor, next, next_source: Source::Directory };
        match log.read(next, self.part_max) {
            ReadResult::UpToDate => {
                self.phase = then(next);
                Step::Continue
            }
            read => self.send(read, log, then),
        }
    }

    fn catch_up(&mut self, next: u64, until: Option<u64>, log: &ChangeLog) -> Step {
        let until = until.unwrap_or(log.end().next);
        if next >= until {
            self.phase = Phase::Following { next };
            return Step::Send(FollowerMessage::Current(Position { log: log.end().log, next }));
        }
        let read = log.read(next, self.part_max);
        self.send(read, log, |next| Phase::CatchingUp { next, until: Some(until) })
    }

    /// Sends a part and continues with `then`, or starts a snapshot if the part was evicted.
    fn send(&mut self, read: ReadResult, log: &ChangeLog, then: impl FnOnce(u64) -> Phase) -> Step {
        let ReadResult::Run(run, next) = read else { return self.snapshot(SnapshotReason::Behind, log) };
        self.phase = then(next);
        let within_snapshot = matches!(self.phase, Phase::Snapshot { .. });
        let position = (!within_snapshot).then_some(Position { log: log.end().log, next });
        Step::Send(FollowerMessage::Run { run, position })
    }

    fn snapshot(&mut self, reason: SnapshotReason, log: &ChangeLog) -> Step {
        let next = log.end().next;
        self.phase = Phase::Snapshot { cursor: Cursor::default(), next, next_source: Source::Directory };
        Step::Send(FollowerMessage::SnapshotBegins(reason))
    }
}

impl ReplicaEntry {
    /// Returns the change that announces the replica.
    fn announcement(&self) -> ReplicaChange {
        let &ReplicaEntry { node, key, tier } = self;
        ReplicaChange { node, key, operation: Operation::Announce(tier) }
    }
}

// The memory estimates of this crate's users assume this size.
const _: () = assert!(size_of::<ReplicaChange>() <= 24 && size_of::<(NodeId, BlockKey, Tier)>() <= 24);
