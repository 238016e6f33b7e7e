//! The parts that all reconcilers share, independent of the kind: access to the API server, children, field ownership,
//! finalizers, statuses, events and metrics.
//!
//! Nothing here imports a reconciler (`cargo xtask check`).

pub mod api_client;
pub mod backoff;
pub mod change;
pub mod child;
pub mod child_stores;
pub mod children;
pub mod clock;
pub mod controller;
pub mod digest;
pub mod error;
pub mod events;
pub mod feed;
pub(crate) mod field_ownership;
pub mod finalizers;
pub mod labels;
pub mod lease;
pub mod metrics;
pub mod refusal;
pub mod services;
pub mod status;
#[cfg(test)]
pub(crate) mod test_api_server;
