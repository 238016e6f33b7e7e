//! Values in the store, as members decode them.

use reprise_controlplane_core::{ModeRecord, NodeRecord};

use crate::store::{Entry, Value};

/// Decodes the number of a store or the counter of nodes.
pub(super) fn number_of(entry: &Option<Entry>) -> Option<u32> {
    match entry.as_ref()?.value {
        Value::Number(number) => Some(number),
        _ => None,
    }
}

/// Decodes a node's record.
pub(super) fn node_record(entry: &Entry) -> NodeRecord {
    match &entry.value {
        Value::Node(record) => NodeRecord { revision: entry.modified, ..NodeRecord::clone(record) },
        other => unreachable!("unexpected value of a node record: {other:?}"),
    }
}

/// Decodes a node's mode.
pub(super) fn mode_record(entry: &Entry) -> ModeRecord {
    match entry.value {
        Value::Mode(mode) => ModeRecord { mode, revision: entry.modified },
        ref other => unreachable!("unexpected value of a mode: {other:?}"),
    }
}
