//! The operator of Reprise: what custom resources say, made to be so.
//!
//! ```text
//! API server ──watches──► world (stores) ──changes──► queues ──► reconcilers ──► API server
//!                                                                   │
//!                                      dereference → validate → build → apply → status
//! ```
//!
//! Each kind has one reconciler, a pipeline of five files. *Dereference* reads everything that the object refers to, from the
//! stores. *Validate* says what is refused, as conditions. *Build* makes the wanted objects as values; it cannot fail and knows no
//! API server. *Apply* writes what differs, by server-side apply. *Status* says what is so.
//!
//! Invariants:
//! * a reconcile is a function of what is stored: killed between any two writes, run twice or by two operators, it ends in the same objects;
//! * nothing is written that is there already: a converged cluster is not written to;
//! * a field that somebody else owns is reported, not fought over, unless it is ours alone ([`child::Ownership`]): then it is put back, and said;
//! * one reconciler writes the spec of `CacheNode`s ([`node`]), for all clusters and pools;
//! * modes and budgets are the resources': what a control plane has is made to be so ([`control_plane`]), and said where somebody else had changed it;
//! * what this release does not have is refused with words, never ignored.
//!
//! Deliberately absent: admission webhooks, volumes by storage class for agents, growth of a managed etcd, purging, queues of GPUs that are more than
//! counted.

pub mod admin;
pub mod allocation;
pub mod backoff;
pub mod child;
pub mod children;
pub mod clock;
pub mod cluster;
mod conflict;
pub mod context;
pub mod control_plane;
pub mod definitions;
pub mod digest;
pub mod error;
pub mod finalizers;
pub mod in_use;
pub mod lease;
pub mod metrics;
pub mod names;
pub mod node;
pub mod optional;
pub mod plan;
pub mod pool;
pub mod profile;
pub mod progress;
mod put_back;
pub mod queue;
pub mod requests;
pub mod run;
#[cfg(test)]
mod scripted;
pub mod selection;
pub mod settings;
pub mod status;
mod surplus;
pub mod sweep;
pub mod tenant;
pub mod uninstall;
pub mod watch;
pub mod world;

#[cfg(test)]
mod examples;
