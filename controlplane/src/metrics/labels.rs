//! Labels of the metrics: enums, written in lower case, so that there are as many values as are written here.

use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue};

/// Outcome of a heartbeat.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct BeatLabels {
    /// The outcome.
    pub result: BeatResult,
}

/// Outcomes of a heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(non_camel_case_types, reason = "label values are written in lower case")]
pub enum BeatResult {
    /// Known and alive.
    known,
    /// Was dead, is back.
    returned,
    /// Must register.
    unknown,
}

/// Outcome of an update batch.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct UpdateLabels {
    /// The outcome.
    pub result: UpdateResult,
}

/// Outcomes of an update batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(non_camel_case_types, reason = "label values are written in lower case")]
pub enum UpdateResult {
    /// It is in the directory, now or already.
    applied,
    /// Something before it is missing.
    gap,
    /// An old registration's.
    fenced,
    /// Malformed.
    invalid,
}

/// A node's state.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct StateLabels {
    pub(super) state: StateValue,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(non_camel_case_types, reason = "label values are written in lower case")]
pub(super) enum StateValue {
    alive,
    dead,
    absent,
}

/// What tenants have budgets of.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct RoomLabels {
    pub(super) room: RoomValue,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(non_camel_case_types, reason = "label values are written in lower case")]
pub(super) enum RoomValue {
    dram,
    nvme,
}

/// What a node is for.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct ModeLabels {
    pub(super) mode: ModeValue,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(non_camel_case_types, reason = "label values are written in lower case")]
pub(super) enum ModeValue {
    active,
    cordoned,
    draining,
}

/// Outcome of placing a key.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct PlaceLabels {
    pub(super) result: PlaceResult,
}

/// Outcomes of placing a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(non_camel_case_types, reason = "label values are written in lower case")]
pub enum PlaceResult {
    /// It has replicas enough.
    enough,
    /// A node was named.
    target,
    /// No node has room for it.
    nowhere,
    /// Another member has to answer.
    elsewhere,
}

/// What a stream watches.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct WatchLabels {
    /// What.
    pub of: WatchOf,
}

/// What can be watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(non_camel_case_types, reason = "label values are written in lower case")]
pub enum WatchOf {
    /// The node list.
    nodes,
    /// The directory.
    directory,
    /// The members of the control plane.
    members,
}

/// Outcome of a replay.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct ReplayLabels {
    pub(super) result: ReplayResult,
}

/// Outcomes of a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(non_camel_case_types, reason = "label values are written in lower case")]
pub enum ReplayResult {
    /// All batches were kept.
    kept,
    /// Some were not: a snapshot came in their place.
    snapshot,
    /// Some were not, and there was no room for a snapshot.
    incomplete,
}

/// A timed call.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct CallLabels {
    pub(super) call: Call,
}

/// Timed calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(non_camel_case_types, reason = "label values are written in lower case")]
pub enum Call {
    /// A registration, with its write to the store.
    register,
    /// An update batch.
    update,
    /// A lookup.
    lookup,
    /// A question where replicas go.
    place,
    /// A question which nodes know most of a prompt.
    route,
}
