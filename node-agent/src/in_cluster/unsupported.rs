//! Agents that were built without the feature `kubernetes`: types without values.

use std::net::SocketAddr;
use std::path::Path;

use reprise_daemon::scrapers::Review as ScraperReview;

use crate::bindings::BindingsFile;
use crate::config::Settings;
use crate::error::{AgentError, ErrorKind};
use crate::runtime::ClusterParts;
use crate::session::Review;

/// This agent never has additional inputs.
pub(crate) enum ClusterSettings {}

impl ClusterSettings {
    /// Refuses to run on a Kubernetes node.
    ///
    /// # Errors
    /// Always.
    pub(crate) fn read(
        _config: &Path,
        _kubeconfig: Option<&Path>,
        _root: &Path,
    ) -> Result<(Settings, ClusterSettings), AgentError> {
        Err(AgentError::new(
            ErrorKind::Config,
            "--in-cluster: this agent was built without Kubernetes; build it with the default features (make build)",
        ))
    }

    pub(crate) fn reached_at(&self, _listening: SocketAddr) -> SocketAddr {
        match *self {}
    }

    pub(crate) fn failure_domain(&self, _settings: &Settings) -> String {
        match *self {}
    }

    pub(crate) fn bindings(&self) -> Result<Option<BindingsFile>, AgentError> {
        match *self {}
    }

    pub(crate) fn scraper_review(&self) -> Box<ScraperReview> {
        match *self {}
    }

    pub(crate) fn token_review(&self) -> Box<Review> {
        match *self {}
    }
}

/// This agent never has a Kubernetes side.
pub(crate) enum ClusterNode {}

impl ClusterNode {
    pub(crate) fn start(cluster: ClusterSettings, _parts: ClusterParts) -> Result<ClusterNode, AgentError> {
        match cluster {}
    }

    pub(crate) fn begin_stop(self) -> ClusterNode {
        self
    }

    pub(crate) fn join(self) {
        match self {}
    }
}
