//! The thread that watches the node's `CacheNode`, writes its status and reviews tokens. It has its own
//! runtime.

use std::thread::JoinHandle;

use crossbeam_channel::bounded;
use reprise_agent_kubernetes::{Facts, NodeSettings, NodeWatch, TokenReviewService};
use tokio::sync::{oneshot, watch};

use crate::device_reconciler::Handle;
use crate::error::{AgentError, ErrorKind};

/// The running Kubernetes thread.
pub(crate) struct ClusterLink {
    request_stop: Option<oneshot::Sender<()>>,
    thread: JoinHandle<()>,
}

impl ClusterLink {
    /// Starts the thread. On return, the persisted spec has been submitted to the reconciler.
    ///
    /// # Errors
    /// The API server configuration is permanently invalid, or the thread cannot be spawned.
    pub(crate) fn start(
        settings: NodeSettings,
        handle: Handle,
        facts: watch::Receiver<Option<Facts>>,
        token_reviews: TokenReviewService,
    ) -> Result<ClusterLink, AgentError> {
        let failed = |error| {
            AgentError::new(ErrorKind::Resource, "cannot spawn the Kubernetes thread").with_source(error)
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let (request_stop, stop_requested) = oneshot::channel();
        let (started, starts) = bounded(1);
        // On a separate thread, since the caller's thread may belong to a runtime.
        let body = move || {
            runtime.block_on(async {
                // The task ends with the runtime.
                tokio::spawn(token_reviews.run(settings.access.clone()));
                match NodeWatch::new(settings, move |desired| handle.set_desired(desired)).await {
                    Ok(node_watch) => {
                        let _ = started.send(Ok(()));
                        node_watch.run(facts, stop_requested).await;
                    }
                    Err(error) => drop(started.send(Err(error))),
                }
            });
        };
        let thread = std::thread::Builder::new().name("kubernetes".to_owned()).spawn(body).map_err(failed)?;
        let started = starts.recv().expect("a thread that panics ends the process");
        started.map_err(|error| {
            AgentError::new(ErrorKind::Config, "cannot watch the CacheNode of this node").with_source(error)
        })?;
        Ok(ClusterLink { request_stop: Some(request_stop), thread })
    }

    /// Requests the final status; it is written when the thread has ended.
    pub(crate) fn request_stop(&mut self) {
        if let Some(request_stop) = self.request_stop.take() {
            // Fails only if the thread has ended.
            let _ = request_stop.send(());
        }
    }

    /// Waits for the thread, which ends within a bounded time.
    pub(crate) fn join(self) {
        let _ = self.thread.join();
    }
}
