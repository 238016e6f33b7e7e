//! The operator on a real API server: what it makes of resources, and that it ends in the same objects whatever happens to it.
//!
//! No controller of Kubernetes runs here, so StatefulSets have no pods and nothing that lost its owner is removed. The tests play the
//! kubelet (statuses of StatefulSets) and the agents (statuses of CacheNodes).

#![allow(clippy::needless_pass_by_value, reason = "specs are made where they are passed")]

#[path = "operator/access.rs"]
mod access;
#[path = "operator/agents.rs"]
mod agents;
#[path = "operator/agreement.rs"]
mod agreement;
#[path = "operator/chaos.rs"]
mod chaos;
#[path = "operator/children.rs"]
mod children;
#[path = "operator/control_planes.rs"]
mod control_planes;
#[path = "operator/convergence.rs"]
mod convergence;
#[path = "operator/established.rs"]
mod established;
#[path = "operator/in_use.rs"]
mod in_use;
#[path = "operator/injection.rs"]
mod injection;
#[path = "operator/kills.rs"]
mod kills;
#[path = "operator/lab.rs"]
mod lab;
#[path = "operator/outcome.rs"]
mod outcome;
#[path = "operator/people.rs"]
mod people;
#[path = "operator/plane.rs"]
mod plane;
#[path = "operator/pools.rs"]
mod pools;
#[path = "operator/profiles.rs"]
mod profiles;
#[path = "operator/put_back.rs"]
mod put_back;
#[path = "operator/queue_agents.rs"]
mod queue_agents;
#[path = "operator/queue_faults.rs"]
mod queue_faults;
#[path = "operator/queues.rs"]
mod queues;
#[path = "operator/readiness.rs"]
mod readiness;
#[path = "operator/replicas.rs"]
mod replicas;
#[path = "operator/rights.rs"]
mod rights;
#[path = "operator/schemas.rs"]
mod schemas;
#[path = "operator/secured_store.rs"]
mod secured_store;
#[path = "operator/stores.rs"]
mod stores;
#[path = "operator/tenants.rs"]
mod tenants;
#[path = "operator/uninstall.rs"]
mod uninstall;
#[path = "operator/versions.rs"]
mod versions;
