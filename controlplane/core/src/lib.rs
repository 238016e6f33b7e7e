//! The pure core of the control plane: nodes and their liveness, and the directory of replicas.
//!
//! * [`NodeTable`]: nodes, their registrations (epochs) and whether their heartbeats arrive.
//! * [`Directory`]: block key → replicas, in 4,096 hash slots. It is soft state, rebuilt from the agents'
//!   inventories.
//! * [`Budgets`]: how many bytes each tenant may hold on each node; [`Ledgers`]: budgets of a member's
//!   tenants.
//! * [`Standing`]: whether a member may answer for its slots. [`MemberList`]: the members and their map.
//! * [`record_watch`]: how records in the store are followed. [`store_writes`]: how they are written.
//! * [`identity_search`]: how a member finds the identity of the store. [`joining`]: how it gets its entry there, and
//!   keeps it.
//! * [`member_parts`]: the order in which these change when agents call, and when nodes fall silent.
//! * [`agent_calls`]: the order in which reports and placement requests are handled. [`PlacementCall`]: the decisions of
//!   one placement request. [`LookupCall`]: the parts of a lookup.
//! * [`rebalance`]: moves of blocks between nodes. [`node_selection`]: inputs for choosing among nodes.
//! * [`LiveNodes`]: the live nodes, passed from node table to directory. The two are separate so that they
//!   can have separate locks: a heartbeat never waits for an update of the directory.
//! * [`ChangeLog`]: the last changes of the directory, in order; [`Follower`]: the messages for one reader of
//!   the log.
//!
//! Time is passed in as [`Tick`](reprise_policy::Tick); nothing here reads a clock, blocks or logs.
//!
//! Persistence is in `reprise-controlplane-store`, gRPC in `reprise-controlplane`, the choice among replicas
//! and nodes in `reprise-policy`.

pub mod agent_calls;
pub mod budgets;
pub mod change_log;
pub mod directory;
pub mod follower;
#[cfg(test)]
mod fuzz;
pub mod identity_search;
pub mod joining;
pub mod ledgers;
pub mod live_nodes;
pub mod lookup_call;
pub mod member_list;
pub mod member_parts;
pub mod node_report;
pub mod node_selection;
pub mod node_table;
pub mod placement_call;
pub mod rebalance;
pub mod record_watch;
pub mod standing;
pub mod store_writes;
pub mod tenant_usage;

pub use budgets::{Budget, Budgets, QuotaGrant, QuotaReport, TenantReport};
pub use change_log::{ChangeLog, LogId, Position, ReplicaChange, Run, Scope};
pub use directory::{
    Changes, Cursor, Directory, DirectorySize, InvalidChanges, Invalidation, LookupResult, NodeReplicas,
    Opening, Operation, ReplicaEntry, Requester, SlotStatus, Update, UpdateOutcome,
};
pub use follower::{Follower, FollowerMessage, SnapshotReason, Source, Step};
pub use ledgers::{KnownNode, LedgerState, Ledgers, MemberPlace, Presence, ReportedTenant, ShareState};
pub use live_nodes::LiveNodes;
pub use lookup_call::{AnswerMap, LookupCall};
pub use member_list::{Member, MemberList, MemberView};
pub use member_parts::{MemberParts, NodeEnd, NodeEvent};
pub use node_report::NodeReport;
pub use node_selection::{ModeRecord, Modes, RebalanceRound};
pub use node_table::{
    HeartbeatResult, LivenessEvent, LivenessSettings, NodeDetails, NodeLiveness, NodeRecord, NodeTable,
    RegistrationError,
};
pub use placement_call::PlacementCall;
pub use record_watch::{RecordChange, RecordUpdate};
pub use standing::{AssignedSlots, Standing};
pub use tenant_usage::{ReportedUsage, UsageAmounts, UsageSummary, UsageTable};
