//! Conditional writes of records: what a transaction writes, and what follows a conflict.
//!
//! ```text
//!   read ──► decide ──► write ── committed ──► done
//!    ▲                    │ conflict
//!    └── same store ── compare the identity ── another store ──► rejected: this member is about to end
//!                         └─ many conflicts ──► rejected: busy
//! ```
//!
//! Every transaction is conditional on the identity of the store and on the records that were read, so concurrent
//! members cannot assign a number or an epoch twice.
//!
//! Pure: the caller reads, writes and encodes.

use reprise_policy::{Epoch, NodeId, NodeMode};

use crate::node_selection::ModeRecord;
use crate::node_table::{NodeDetails, NodeRecord};

/// Attempts against concurrent changes. Each conflict means that another change succeeded.
pub const ATTEMPTS_MAX: u32 = 64;

/// Conflicts of one write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WriteAttempts {
    conflicts: u32,
}

/// Identity of the store after a conflict, compared with the one at the start of the member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreIdentity {
    /// The same: another change was faster.
    Same,
    /// The store was replaced.
    Other,
}

/// Why a write was given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteRejection {
    /// The store has another identity than at the start of this member.
    OtherStore,
    /// Every attempt conflicted with another change.
    Busy,
}

/// Condition on a record that was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unchanged {
    /// The record does not exist.
    Absent,
    /// The record was last written at this revision.
    At(u64),
}

/// The counter of node numbers, with the revision of its record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NumberCounter {
    /// Next number to assign.
    pub next: u32,
    /// Revision at which it was written.
    pub revision: u64,
}

/// The registration of a node as one transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeRegistration {
    /// The record to write. Its revision is that of the transaction.
    pub record: NodeRecord,
    /// Condition on the node's record.
    pub unchanged: Unchanged,
    /// For a new name: the condition on the counter, and its next value.
    pub counter: Option<(Unchanged, u32)>,
}

/// All node numbers are assigned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoNumberLeft;

impl WriteAttempts {
    /// Records a conflict, after which the identity of the store was compared. Returns whether to read again and
    /// retry.
    ///
    /// # Errors
    /// The write is given up.
    pub fn retry(&mut self, store: StoreIdentity) -> Result<(), WriteRejection> {
        self.conflicts += 1;
        match store {
            StoreIdentity::Other => Err(WriteRejection::OtherStore),
            StoreIdentity::Same if self.conflicts == ATTEMPTS_MAX => Err(WriteRejection::Busy),
            StoreIdentity::Same => Ok(()),
        }
    }
}

impl NodeRegistration {
    /// Registers a known node again, with the next epoch. `known` is its record in the store.
    pub fn again(known: NodeRecord, details: NodeDetails) -> NodeRegistration {
        let unchanged = Unchanged::At(known.revision);
        let record = NodeRecord { epoch: Epoch(known.epoch.0 + 1), details, ..known };
        NodeRegistration { record, unchanged, counter: None }
    }

    /// Registers a new name under the next number. `epoch_base` is the lower bound of epochs under the store's
    /// identity.
    ///
    /// # Errors
    /// All numbers are assigned.
    pub fn first(
        name: &str,
        details: NodeDetails,
        counter: Option<NumberCounter>,
        epoch_base: Epoch,
    ) -> Result<NodeRegistration, NoNumberLeft> {
        let next = counter.map_or(1, |counter| counter.next);
        let node = NodeId(u16::try_from(next).map_err(|_| NoNumberLeft)?);
        let (name, epoch) = (name.to_owned(), Epoch(epoch_base.0 + 1));
        let record = NodeRecord { node, name, epoch, details, revision: 0 };
        let unchanged = counter.map_or(Unchanged::Absent, |counter| Unchanged::At(counter.revision));
        Ok(NodeRegistration { record, unchanged: Unchanged::Absent, counter: Some((unchanged, next + 1)) })
    }

    /// Returns the record as the transaction at `revision` has written it.
    pub fn committed(self, revision: u64) -> NodeRecord {
        NodeRecord { revision, ..self.record }
    }
}

/// The registration of a node, attempt by attempt. The first step is [`RegistrationStep::ReadRecord`].
#[derive(Clone, Debug)]
pub struct RegistrationWrite {
    name: String,
    details: NodeDetails,
    epoch_base: Epoch,
    attempts: WriteAttempts,
    /// The transaction without an answer.
    written: Option<NodeRegistration>,
}

/// Input of a registration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RegistrationInput {
    /// The record of the node in the store, if there is one.
    Record(Option<NodeRecord>),
    /// The counter of node numbers, if there is one.
    Counter(Option<NumberCounter>),
    /// The transaction was committed at this revision.
    Committed(u64),
    /// A condition of the transaction did not hold.
    Conflict,
    /// The identity of the store, compared with the one at the start.
    Compared(StoreIdentity),
}

/// Next step of a registration. Except after the last two, an input follows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RegistrationStep {
    /// Read the record of the node.
    ReadRecord,
    /// Read the counter of node numbers. The record may be read again instead, if its absence is doubtful.
    ReadCounter,
    /// Write the record and the counter, if the store has its identity and nothing has changed since they were read.
    Write(NodeRegistration),
    /// Compare the identity of the store with the one at the start.
    Compare,
    /// The node is registered with this record.
    Done(NodeRecord),
    /// The registration was given up.
    Rejected(RegistrationRejection),
}

/// Why a registration was given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegistrationRejection {
    /// The store, or concurrent changes.
    Write(WriteRejection),
    /// All node numbers are assigned.
    NoNumberLeft,
}

impl RegistrationWrite {
    /// Begins a registration. `epoch_base` is the lower bound of epochs under the store's identity.
    pub fn new(name: &str, details: NodeDetails, epoch_base: Epoch) -> RegistrationWrite {
        let (name, attempts) = (name.to_owned(), WriteAttempts::default());
        RegistrationWrite { name, details, epoch_base, attempts, written: None }
    }

    /// Processes an input; returns the next step.
    ///
    /// # Panics
    /// The transaction has an answer and was not sent.
    pub fn on(&mut self, input: RegistrationInput) -> RegistrationStep {
        match input {
            RegistrationInput::Record(Some(known)) => {
                self.write(NodeRegistration::again(known, self.details.clone()))
            }
            RegistrationInput::Record(None) => RegistrationStep::ReadCounter,
            RegistrationInput::Counter(counter) => {
                let details = self.details.clone();
                match NodeRegistration::first(&self.name, details, counter, self.epoch_base) {
                    Ok(registration) => self.write(registration),
                    Err(NoNumberLeft) => RegistrationStep::Rejected(RegistrationRejection::NoNumberLeft),
                }
            }
            RegistrationInput::Committed(revision) => {
                let written = self.written.take().expect("the transaction was sent");
                RegistrationStep::Done(written.committed(revision))
            }
            RegistrationInput::Conflict => RegistrationStep::Compare,
            RegistrationInput::Compared(store) => match self.attempts.retry(store) {
                Ok(()) => RegistrationStep::ReadRecord,
                Err(rejection) => RegistrationStep::Rejected(RegistrationRejection::Write(rejection)),
            },
        }
    }

    fn write(&mut self, registration: NodeRegistration) -> RegistrationStep {
        self.written = Some(registration.clone());
        RegistrationStep::Write(registration)
    }
}

/// A change of a node's mode, attempt by attempt. The first step is [`ModeStep::Read`].
#[derive(Clone, Copy, Debug)]
pub struct ModeWrite {
    mode: NodeMode,
    attempts: WriteAttempts,
    /// Mode before the transaction without an answer.
    before: NodeMode,
}

/// Input of a change of a mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModeInput {
    /// The mode in the store, if it was ever set.
    Record(Option<ModeRecord>),
    /// The transaction was committed at this revision.
    Committed(u64),
    /// A condition of the transaction did not hold.
    Conflict,
    /// The identity of the store, compared with the one at the start.
    Compared(StoreIdentity),
}

/// Next step of a change of a mode. Except after the last two, an input follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModeStep {
    /// Read the mode.
    Read,
    /// Write the mode, if the store has its identity and the record is unchanged.
    Write(Unchanged),
    /// Compare the identity of the store with the one at the start.
    Compare,
    /// The mode is set: the mode before, and the record now. Both are equal if nothing was written.
    Done(NodeMode, ModeRecord),
    /// The change was given up.
    Rejected(WriteRejection),
}

impl ModeWrite {
    /// Begins to set this mode.
    pub fn new(mode: NodeMode) -> ModeWrite {
        ModeWrite { mode, attempts: WriteAttempts::default(), before: NodeMode::default() }
    }

    /// Returns the mode that is set.
    pub fn mode(&self) -> NodeMode {
        self.mode
    }

    /// Processes an input; returns the next step.
    pub fn on(&mut self, input: ModeInput) -> ModeStep {
        match input {
            ModeInput::Record(known) => {
                let record = known.unwrap_or_default();
                self.before = record.mode;
                if record.mode == self.mode {
                    return ModeStep::Done(record.mode, record);
                }
                ModeStep::Write(known.map_or(Unchanged::Absent, |known| Unchanged::At(known.revision)))
            }
            ModeInput::Committed(revision) => {
                ModeStep::Done(self.before, ModeRecord { mode: self.mode, revision })
            }
            ModeInput::Conflict => ModeStep::Compare,
            ModeInput::Compared(store) => match self.attempts.retry(store) {
                Ok(()) => ModeStep::Read,
                Err(rejection) => ModeStep::Rejected(rejection),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conflict_is_retried_in_the_same_store_and_not_forever() {
        let mut attempts = WriteAttempts::default();
        assert_eq!(attempts.retry(StoreIdentity::Other), Err(WriteRejection::OtherStore));
        let mut attempts = WriteAttempts::default();
        let retries = (0..).take_while(|_| attempts.retry(StoreIdentity::Same).is_ok()).count();
        assert_eq!(retries as u32, ATTEMPTS_MAX - 1, "the last conflict ends it");
    }

    #[test]
    fn known_node_keeps_its_number_and_gets_the_next_epoch() {
        let details = |version: &str| NodeDetails { version: version.to_owned(), ..NodeDetails::default() };
        let (name, base) = ("a", Epoch(1 << 32));
        let first = NodeRegistration::first(name, details("1"), None, base).expect("a number is left");
        assert_eq!((first.unchanged, first.counter), (Unchanged::Absent, Some((Unchanged::Absent, 2))));
        let record = first.committed(9);
        let number = (record.node, record.epoch, record.revision);
        assert_eq!(number, (NodeId(1), Epoch(base.0 + 1), 9));
        let again = NodeRegistration::again(record, details("2"));
        assert_eq!((again.unchanged, again.counter), (Unchanged::At(9), None));
        let record = again.committed(10);
        assert_eq!((record.node, record.epoch, record.revision), (NodeId(1), Epoch(base.0 + 2), 10));
        assert_eq!(record.details, details("2"));
    }

    #[test]
    fn numbers_are_assigned_by_the_counter_until_none_is_left() {
        let register = |next| {
            let counter = Some(NumberCounter { next, revision: 4 });
            NodeRegistration::first("a", NodeDetails::default(), counter, Epoch(0))
        };
        let last = register(65535).expect("a number is left");
        assert_eq!((last.record.node, last.counter), (NodeId(65535), Some((Unchanged::At(4), 65536))));
        assert_eq!(register(65536), Err(NoNumberLeft));
    }

    #[test]
    fn registration_reads_again_after_a_conflict_until_it_is_committed() {
        let base = Epoch(1 << 32);
        let mut write = RegistrationWrite::new("a", NodeDetails::default(), base);
        assert_eq!(write.on(RegistrationInput::Record(None)), RegistrationStep::ReadCounter);
        let counter = Some(NumberCounter { next: 3, revision: 4 });
        let RegistrationStep::Write(first) = write.on(RegistrationInput::Counter(counter)) else {
            panic!("a number is left")
        };
        assert_eq!((first.record.node, first.counter), (NodeId(3), Some((Unchanged::At(4), 4))));
        assert_eq!(write.on(RegistrationInput::Conflict), RegistrationStep::Compare);
        let same = RegistrationInput::Compared(StoreIdentity::Same);
        assert_eq!(write.on(same), RegistrationStep::ReadRecord);
        let known = first.committed(5);
        let RegistrationStep::Write(again) = write.on(RegistrationInput::Record(Some(known))) else {
            panic!("another call has registered the name")
        };
        assert_eq!(again.unchanged, Unchanged::At(5));
        let done = again.committed(7);
        assert_eq!(write.on(RegistrationInput::Committed(7)), RegistrationStep::Done(done));
        let rejected = |rejection| RegistrationStep::Rejected(rejection);
        let other = RegistrationRejection::Write(WriteRejection::OtherStore);
        assert_eq!(write.on(RegistrationInput::Compared(StoreIdentity::Other)), rejected(other));
        let full = Some(NumberCounter { next: 1 << 16, revision: 4 });
        let none_left = rejected(RegistrationRejection::NoNumberLeft);
        assert_eq!(write.on(RegistrationInput::Counter(full)), none_left);
    }

    #[test]
    fn mode_is_written_only_if_it_differs() {
        let known = |mode| Some(ModeRecord { mode, revision: 3 });
        let first = |known, mode| ModeWrite::new(mode).on(ModeInput::Record(known));
        let (active, draining) = (NodeMode::Active, NodeMode::Draining);
        assert_eq!(first(None, active), ModeStep::Done(active, ModeRecord::default()), "active by default");
        assert_eq!(first(None, draining), ModeStep::Write(Unchanged::Absent));
        assert_eq!(first(known(draining), active), ModeStep::Write(Unchanged::At(3)));
        let unchanged = ModeRecord { mode: draining, revision: 3 };
        assert_eq!(first(Some(unchanged), draining), ModeStep::Done(draining, unchanged));
    }

    #[test]
    fn mode_is_read_again_after_a_conflict() {
        let mut write = ModeWrite::new(NodeMode::Draining);
        assert_eq!(write.on(ModeInput::Record(None)), ModeStep::Write(Unchanged::Absent));
        assert_eq!(write.on(ModeInput::Conflict), ModeStep::Compare);
        assert_eq!(write.on(ModeInput::Compared(StoreIdentity::Same)), ModeStep::Read);
        let cordoned = ModeRecord { mode: NodeMode::Cordoned, revision: 8 };
        assert_eq!(write.on(ModeInput::Record(Some(cordoned))), ModeStep::Write(Unchanged::At(8)));
        let set = ModeRecord { mode: NodeMode::Draining, revision: 9 };
        assert_eq!(write.on(ModeInput::Committed(9)), ModeStep::Done(NodeMode::Cordoned, set));
        let rejected = ModeStep::Rejected(WriteRejection::OtherStore);
        assert_eq!(write.on(ModeInput::Compared(StoreIdentity::Other)), rejected);
    }
}
