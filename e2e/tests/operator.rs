//! The operator against a real API server: the objects that it creates, and convergence after faults.
//!
//! No controller of Kubernetes runs here: StatefulSets have no pods, and orphaned objects are not collected.
//! The tests simulate the kubelet (statuses of StatefulSets) and the agents (statuses of CacheNodes).

#![allow(clippy::needless_pass_by_value, reason = "specs are built in place as arguments")]

#[path = "operator/agents.rs"]
mod agents;
#[path = "operator/agreement.rs"]
mod agreement;
#[path = "operator/assignment.rs"]
mod assignment;
#[path = "operator/chaos.rs"]
mod chaos;
#[path = "operator/children.rs"]
mod children;
#[path = "operator/control_planes.rs"]
mod control_planes;
#[path = "operator/convergence.rs"]
mod convergence;
#[path = "operator/deletion_guard.rs"]
mod deletion_guard;
#[path = "operator/device_access.rs"]
mod device_access;
#[path = "operator/field_ownership.rs"]
mod field_ownership;
#[path = "operator/injection.rs"]
mod injection;
#[path = "operator/kills.rs"]
mod kills;
#[path = "operator/node_condition.rs"]
mod node_condition;
#[path = "operator/pools.rs"]
mod pools;
#[path = "operator/profiles.rs"]
mod profiles;
#[path = "operator/queue_agents.rs"]
mod queue_agents;
#[path = "operator/queue_faults.rs"]
mod queue_faults;
#[path = "operator/queues.rs"]
mod queues;
#[path = "operator/replicas.rs"]
mod replicas;
#[path = "operator/rights.rs"]
mod rights;
#[path = "operator/schemas.rs"]
mod schemas;
#[path = "operator/secured_store.rs"]
mod secured_store;
#[path = "operator/snapshot.rs"]
mod snapshot;
#[path = "operator/stores.rs"]
mod stores;
#[path = "operator/tenants.rs"]
mod tenants;
#[path = "operator/test_cluster.rs"]
mod test_cluster;
#[path = "operator/test_control_plane.rs"]
mod test_control_plane;
#[path = "operator/uninstall.rs"]
mod uninstall;
#[path = "operator/user_simulator.rs"]
mod user_simulator;
#[path = "operator/versions.rs"]
mod versions;
