//! The Helm chart: its rendered objects, the values that it rejects, and its objects on a real API server.
//!
//! Helm is built from its Go module by `e2e/helm/build.sh`. The folder `chart/golden` has the rendered
//! objects of the main sets of values, without the definitions, which have their own drift check.
//! `REPRISE_GOLDEN=write` updates it. The behaviour of pods is tested in `cluster.rs`, since it needs nodes.

#[path = "chart/golden.rs"]
mod golden;
#[path = "chart/helm.rs"]
mod helm;
#[path = "chart/invalid_values.rs"]
mod invalid_values;
#[path = "chart/pods.rs"]
mod pods;
#[path = "chart/release.rs"]
mod release;
#[path = "chart/rights.rs"]
mod rights;
#[path = "chart/schemas.rs"]
mod schemas;
#[path = "chart/values.rs"]
mod values;
