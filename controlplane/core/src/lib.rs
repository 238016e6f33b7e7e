//! The pure core of the control plane: who is in the cluster, and which node holds which block.
//!
//! * [`Members`]: nodes, their registrations (epochs) and whether their heartbeats arrive.
//! * [`Directory`]: block key → replicas, in 4,096 hash slots. Soft state: it can be lost whole and is rebuilt from
//!   the agents' inventories.
//! * [`Budgets`]: how many bytes each tenant may hold on each node; [`Ledgers`]: of those tenants that are a member's.
//! * [`rebalance`]: which nodes give blocks to which. [`choosing`]: what is known of nodes for choosing among them.
//! * [`LiveNodes`]: what the one tells the other. The two are apart so that a runtime can keep them behind locks of
//!   their own: a heartbeat never waits for an update of the directory.
//! * [`Log`]: the last changes of the directory, in order; [`Follower`]: what one reader of it is to be told next.
//!
//! Time arrives as [`Tick`](reprise_policy::Tick); nothing here reads a clock, blocks or logs.
//!
//! Deliberately absent: persistence (`reprise-controlplane-store`), gRPC (`reprise-controlplane`), the order of
//! replicas and the choice of places for more (policy).

pub mod budgets;
pub mod choosing;
pub mod directory;
pub mod follower;
pub mod holdings;
pub mod ledgers;
pub mod live;
pub mod log;
pub mod members;
pub mod rebalance;
pub mod reports;

pub use budgets::{Amounts, Budget, Budgets, Order, Report, TenantReport};
pub use choosing::{Modes, MovesRound, SetMode};
pub use directory::{
    Asker, BadChanges, Changes, Cursor, Directory, DirectorySize, Found, HeldReplica, NodeReplicas, Opening,
    Operation, Replica, Standing, Update, Updated, Voided,
};
pub use follower::{Follower, Reason, Source, Step, Told};
pub use holdings::{Held, HeldTogether, Holdings, TenantSaid};
pub use ledgers::{KnownNode, LedgerState, Ledgers, OwnPlace, Presence, Said, ShareState};
pub use live::LiveNodes;
pub use log::{Log, LogId, Position, ReplicaChange, Run, Scope};
pub use members::{
    Beat, MemberEvent, MemberSettings, MemberState, Members, NodeDetails, NodeRecord, NotRegistered,
};
pub use reports::NodeReport;
