//! Label types of the metrics. Enum variants are label values, in lower case, so the number of series is
//! bounded.

use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue};

/// Labels of heartbeat counters.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct HeartbeatLabels {
    /// Outcome of the heartbeat.
    pub result: HeartbeatOutcome,
}

/// Outcomes of a heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(non_camel_case_types, reason = "label values are written in lower case")]
pub enum HeartbeatOutcome {
    /// The node is alive.
    known,
    /// The node was dead and is alive again.
    returned,
    /// The registration is not current: the node must register.
    unknown,
}

/// Labels of update counters.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct UpdateLabels {
    /// Outcome of the update batch.
    pub result: UpdateResult,
}

/// Outcomes of an update batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(non_camel_case_types, reason = "label values are written in lower case")]
pub enum UpdateResult {
    /// Applied now or earlier.
    applied,
    /// Earlier changes are missing.
    gap,
    /// Sent under an outdated registration.
    fenced,
    /// Malformed request.
    invalid,
}

/// Labels of node gauges.
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

/// Labels of budget gauges: the kind of storage.
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

/// Labels of node gauges by mode.
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

/// Labels of placement counters.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct PlaceLabels {
    pub(super) result: PlaceResult,
}

/// Outcomes of placing a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(non_camel_case_types, reason = "label values are written in lower case")]
pub enum PlaceResult {
    /// The key has enough replicas.
    enough,
    /// A target node was chosen.
    target,
    /// No node has room for the key.
    nowhere,
    /// Another member owns the key.
    elsewhere,
}

/// Labels of watch streams.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct WatchLabels {
    /// Kind of the watched objects.
    pub of: WatchOf,
}

/// Kinds of watched objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(non_camel_case_types, reason = "label values are written in lower case")]
pub enum WatchOf {
    /// Nodes of the cluster.
    nodes,
    /// Changes of the directory.
    directory,
    /// The members of the control plane.
    members,
}

/// Labels of replay counters.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct ReplayLabels {
    pub(super) result: ReplayResult,
}

/// Outcomes of a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(non_camel_case_types, reason = "label values are written in lower case")]
pub enum ReplayResult {
    /// All requested batches were buffered.
    kept,
    /// A snapshot replaced evicted batches.
    snapshot,
    /// Batches were evicted, and there were too few numbers for a snapshot.
    incomplete,
}

/// Labels of call durations.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct CallLabels {
    pub(super) call: Call,
}

/// Calls with measured duration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(non_camel_case_types, reason = "label values are written in lower case")]
pub enum Call {
    /// Registration, including the write to the store.
    register,
    /// Update of the directory.
    update,
    /// Lookup of replicas.
    lookup,
    /// Placement of new replicas.
    place,
    /// Routing: ranks nodes by the cached prefix of a prompt.
    route,
}
