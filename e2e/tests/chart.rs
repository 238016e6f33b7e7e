//! The Helm chart: what it renders, what it refuses, and what a real API server makes of it.
//!
//! Helm is built from its Go module by `e2e/helm/build.sh`. Renders of the main sets of values lie in `chart/golden`, without the
//! definitions, which have a drift check of their own; `REPRISE_GOLDEN=write` writes them anew. What pods do is not tested
//! here: that takes nodes.

#[path = "chart/golden.rs"]
mod golden;
#[path = "chart/helm.rs"]
mod helm;
#[path = "chart/pods.rs"]
mod pods;
#[path = "chart/refusals.rs"]
mod refusals;
#[path = "chart/release.rs"]
mod release;
#[path = "chart/rights.rs"]
mod rights;
#[path = "chart/schemas.rs"]
mod schemas;
#[path = "chart/values.rs"]
mod values;
