//! Modes of nodes: set in the store by the member that an operator calls, and followed by all. As
//! `controlplane/src/modes.rs`.
//!
//! Not reproduced: the check of the store's identity after a rejected write. A member of another store ends
//! by itself.

use reprise_controlplane_core::ModeRecord;
use reprise_policy::NodeMode;

use super::Purpose;
use crate::messages::StoreRequest;
use crate::simulation::Simulation;
use crate::store::{Condition, Entry, Key, Revision, TransactionError, Value, Write};

/// Maximum number of attempts against concurrent changes of the same node's mode.
const ATTEMPTS_MAX: u32 = 64;

/// An operator's request to set a node's mode.
#[derive(Clone, Copy, Debug)]
pub(super) struct ModeOrder {
    node: usize,
    mode: NodeMode,
    attempts: u32,
}

impl Simulation {
    /// `SetNode`, as in a member. A node that has never registered cannot be set.
    pub(crate) fn set_mode(&mut self, member: usize, node: usize, mode: NodeMode) {
        if self.member(member).knows_host(node) {
            self.read_mode(member, ModeOrder { node, mode, attempts: 0 });
        }
    }

    fn read_mode(&mut self, member: usize, order: ModeOrder) {
        self.ask_store(member, Purpose::ModeBefore(order), StoreRequest::Get(vec![Key::Mode(order.node)]));
    }

    pub(super) fn mode_read(&mut self, member: usize, order: ModeOrder, entry: &Option<Entry>) {
        let key = Key::Mode(order.node);
        let before = entry.as_ref().map(set_by).unwrap_or_default();
        if before.mode == order.mode {
            return;
        }
        let identity = self.identity(member);
        let unchanged =
            entry.as_ref().map_or(Condition::Absent(key), |entry| Condition::Modified(key, entry.modified));
        let conditions =
            vec![unchanged, Condition::Modified(Key::IdentityOf(identity.number), identity.revision)];
        let writes = vec![Write { key, value: Value::Mode(order.mode), lease: None }];
        self.ask_store(member, Purpose::ModePut(order), StoreRequest::Transact { conditions, writes });
    }

    pub(super) fn mode_put(
        &mut self,
        member: usize,
        order: ModeOrder,
        result: Result<Revision, TransactionError>,
    ) {
        match result {
            Ok(revision) => {
                self.count("modes set");
                let set = ModeRecord { mode: order.mode, revision };
                self.member(member).learn_mode(order.node, set);
            }
            Err(_) if order.attempts < ATTEMPTS_MAX => {
                self.read_mode(member, ModeOrder { attempts: order.attempts + 1, ..order });
            }
            Err(_) => {}
        }
    }
}

/// Decodes the mode in an entry.
fn set_by(entry: &Entry) -> ModeRecord {
    match entry.value {
        Value::Mode(mode) => ModeRecord { mode, revision: entry.modified },
        ref other => unreachable!("unexpected value of a mode: {other:?}"),
    }
}
