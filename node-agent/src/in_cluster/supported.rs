//! Agents with the Kubernetes client.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use reprise_agent_kubernetes::{
    Access, Desired, NodeSettings, StateDirectory, TokenReviewService, TokenReviewer, token_review_channel,
};
use reprise_daemon::scrapers::{Review as ScraperReview, Verdict};
use reprise_policy::identity::{ReviewOutcome, TOKEN_AUDIENCE};
use tokio::sync::watch;

use crate::bindings::BindingsFile;
use crate::config::{KubernetesSettings, PodEnvironment, ReloadableConfig, Settings};
use crate::device_reconciler::{DeviceRecordsFile, ReconcilerParts, ReconcilerThread};
use crate::error::AgentError;
use crate::kubernetes::ClusterLink;
use crate::runtime::ClusterParts;
use crate::session::Review;

/// Additional inputs of an agent on a Kubernetes node.
pub(crate) struct ClusterSettings {
    pod: PodEnvironment,
    config: ReloadableConfig,
    access: Access,
    /// Mount point of the node's root file system.
    root: PathBuf,
    reviewer: TokenReviewer,
    token_reviews: TokenReviewService,
}

impl ClusterSettings {
    /// Reads a configuration file and the environment of the pod. Without a kubeconfig, the agent uses its service
    /// account.
    ///
    /// # Errors
    /// The invalid value, and the allowed ones.
    pub(crate) fn read(
        config: &Path,
        kubeconfig: Option<&Path>,
        root: &Path,
    ) -> Result<(Settings, ClusterSettings), AgentError> {
        let pod = PodEnvironment::read(|name| std::env::var(name).ok())?;
        let config = ReloadableConfig::read(config.to_owned(), pod.clone())?;
        let mut settings = config.running().clone().placed(&pod)?.validate()?;
        // Allocations may come at any time, and say whose queue pairs sessions may have.
        settings.pool.lend_queues = true;
        let access = kubeconfig.map_or(Access::ServiceAccount, |path| Access::Kubeconfig(path.to_owned()));
        let (reviewer, token_reviews) = token_review_channel(TOKEN_AUDIENCE);
        let root = root.to_owned();
        Ok((settings, ClusterSettings { pod, config, access, root, reviewer, token_reviews }))
    }

    /// Returns the address at which others reach a socket of this agent.
    pub(crate) fn reached_at(&self, listening: SocketAddr) -> SocketAddr {
        self.pod.reached_at(listening)
    }

    /// Returns the failure domain of the persisted spec, or an empty string without one. The agent then registers
    /// once, and again only if the spec has changed meanwhile. An unreadable file is reported when the spec is
    /// applied.
    pub(crate) fn failure_domain(&self, settings: &Settings) -> String {
        let state = StateDirectory::new(&settings.kubernetes.state_directory, &self.pod.node);
        let persisted = state.load().ok().flatten();
        let desired = persisted.map(|persisted| Desired::read(persisted.generation, &persisted.spec));
        desired.and_then(|desired| desired.failure_domain).unwrap_or_default()
    }

    /// Reads the mapping of pods to tenants; `None` if the pod has none.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(crate) fn bindings(&self) -> Result<Option<BindingsFile>, AgentError> {
        self.pod.tenants_file.clone().map(BindingsFile::read).transpose()
    }

    /// Returns the review of tokens by the API server.
    pub(crate) fn token_review(&self) -> Box<Review> {
        let reviewer = self.reviewer.clone();
        Box::new(move |token| reviewer.review(token))
    }

    /// Returns the review of scrapers' tokens by the API server.
    pub(crate) fn scraper_review(&self) -> Box<ScraperReview> {
        let reviewer = self.reviewer.clone();
        Box::new(move |token| {
            let reviewer = reviewer.clone();
            Box::pin(async move {
                match reviewer.review_scraper(&token).await {
                    ReviewOutcome::User(_) => Verdict::Accepted,
                    ReviewOutcome::Rejected(reason) => Verdict::Rejected(reason),
                    ReviewOutcome::Unreachable(reason) => Verdict::Unavailable(reason),
                }
            })
        })
    }
}

/// The running Kubernetes side of an agent.
pub(crate) struct ClusterNode {
    reconciler: ReconcilerThread,
    link: ClusterLink,
}

impl ClusterNode {
    /// Starts to watch and reconcile the node's `CacheNode`.
    ///
    /// # Errors
    /// The API server configuration is permanently invalid, or a thread cannot be spawned.
    pub(crate) fn start(cluster: ClusterSettings, parts: ClusterParts) -> Result<ClusterNode, AgentError> {
        let ClusterSettings { pod, config, access, root, token_reviews, reviewer: _ } = cluster;
        let ClusterParts { context, modes, complete, bindings, endpoints, released, admin } = parts;
        let KubernetesSettings { state_directory, status_every } = admin.settings.kubernetes.clone();
        let records = DeviceRecordsFile::new(&state_directory, &pod.node);
        let node = NodeSettings {
            state: StateDirectory::new(&state_directory, &pod.node),
            node: pod.node,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pod: pod.pod,
            cluster: pod.cluster,
            access,
            status_every,
        };
        let (facts, facts_receiver) = watch::channel(None);
        let pool = admin.settings.pool.clone();
        let parts = ReconcilerParts {
            context,
            pool,
            released,
            modes,
            complete,
            admin,
            root,
            records,
            config,
            bindings,
            endpoints,
            facts,
        };
        let reconciler = ReconcilerThread::start(parts)?;
        let link = ClusterLink::start(node, reconciler.handle(), facts_receiver, token_reviews)?;
        Ok(ClusterNode { reconciler, link })
    }

    /// Stops reconciling and requests the final status, which is written concurrently.
    pub(crate) fn begin_stop(self) -> ClusterLink {
        let ClusterNode { reconciler, mut link } = self;
        reconciler.stop();
        link.request_stop();
        link
    }
}
