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

/// Returns the condition for setting a node's mode; `None` if the node has that mode already. `known` is its
/// record in the store, if there is one.
pub fn set_mode(known: Option<ModeRecord>, mode: NodeMode) -> Option<Unchanged> {
    let before = known.unwrap_or_default().mode;
    let unchanged = known.map_or(Unchanged::Absent, |known| Unchanged::At(known.revision));
    (before != mode).then_some(unchanged)
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
    fn mode_is_written_only_if_it_differs() {
        let known = |mode| Some(ModeRecord { mode, revision: 3 });
        assert_eq!(set_mode(None, NodeMode::Active), None, "active by default");
        assert_eq!(set_mode(None, NodeMode::Draining), Some(Unchanged::Absent));
        assert_eq!(set_mode(known(NodeMode::Draining), NodeMode::Active), Some(Unchanged::At(3)));
        assert_eq!(set_mode(known(NodeMode::Active), NodeMode::Active), None);
    }
}
