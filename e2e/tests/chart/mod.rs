//! The Helm chart: its rendered objects, the values that it rejects, and its objects on a real API server.
//!
//! Helm is built from its Go module by `e2e/helm/build.sh`. The folder `chart/golden` has the rendered
//! objects of the main sets of values, without the definitions, which have their own drift check.
//! `REPRISE_GOLDEN=write` updates it. The behaviour of pods is tested in `cluster.rs`, since it needs nodes.

mod golden;
mod helm;
mod invalid_values;
mod pods;
mod release;
mod rights;
mod schemas;
mod values;
