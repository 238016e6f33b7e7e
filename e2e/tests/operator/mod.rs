//! The operator against a real API server: the objects that it creates, and convergence after faults.
//!
//! No controller of Kubernetes runs here: StatefulSets have no pods, and orphaned objects are not collected.
//! The tests simulate the kubelet (statuses of StatefulSets) and the agents (statuses of CacheNodes).

#![allow(clippy::needless_pass_by_value, reason = "specs are built in place as arguments")]

mod admin_port;
mod agents;
mod agreement;
mod assignment;
mod certificates;
mod chaos;
mod children;
mod control_planes;
mod convergence;
mod deletion_guard;
mod device_access;
mod examples;
mod field_ownership;
mod injection;
mod kills;
mod node_condition;
mod pools;
mod profiles;
mod queue_agents;
mod queue_engines;
mod queue_faults;
mod queues;
mod replicas;
mod rights;
mod schemas;
mod secured_store;
mod server_pool;
mod snapshot;
mod stores;
mod tenants;
mod test_cluster;
mod test_control_plane;
mod uninstall;
mod user_simulator;
mod versions;
