//! The Reprise operator: reconciles Reprise's custom resources into Kubernetes objects and control plane
//! settings.
//!
//! ```text
//! API server ──watches──► stores ──changes──► controllers ──► reconcilers ──► API server
//!                                                                │
//!                                   dereference → validate → build → apply → status
//! ```
//!
//! Each kind has one reconciler, a pipeline of five steps, one file each:
//! 1. *Dereference* reads everything that the object refers to from the stores.
//! 2. *Validate* returns why the object is refused, for its conditions.
//! 3. *Build* returns the desired objects as values. It cannot fail and does not call the API server.
//! 4. *Apply* writes the differences by server-side apply.
//! 5. *Status* derives conditions and counts from the observed state.
//!
//! Invariants:
//! * A reconcile is a function of the stored objects. Killed between any two writes, run twice, or run by two
//!   operators, it ends in the same objects.
//! * A converged cluster receives no writes.
//! * The operator owns the fields that it applies. If another writer changes one, it is restored, with an event and a
//!   metric ([`framework::children`]).
//! * One reconciler ([`reconcile::node`]) writes the specs of all `CacheNode`s, for all clusters and pools.
//! * Modes and budgets come from the resources. The operator overwrites differing values in a control plane
//!   ([`reconcile::control_plane`]) and reports values that another client had set.
//! * Unsupported fields are refused with a message, never ignored.
//!
//! Deliberately absent: admission webhooks, per-StorageClass volumes for agents, and growth of a managed
//! etcd. GPU queues are counted and granted here, but agents do not create them yet.

pub mod admin;
pub mod definitions;
pub mod framework;
pub mod reconcile;
pub mod run;
pub mod settings;
pub mod signing;
pub mod uninstall;
