//! The Reprise operator: reconciles Reprise's custom resources into Kubernetes objects and control plane
//! settings.
//!
//! ```text
//! API server ──watches──► stores ──changes──► controllers ──► reconcilers ──► API server
//!                                                                │
//!                                   dereference → validate → build → apply → status
//! ```
//!
//! Each kind has one reconciler, a pipeline of five steps, one file each (ADR 18):
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
//! * Unsupported fields are refused with a message, never ignored.

pub mod admin;
pub mod definitions;
pub mod framework;
pub mod reconcile;
pub mod run;
pub mod settings;
pub mod signing;
pub mod uninstall;
