//! The thread that watches the node's `CacheNode`, writes its status and asks whose tokens are, with a runtime of its own.

use std::thread::JoinHandle;

use crossbeam_channel::bounded;
use reprise_agent_kubernetes::{Facts, NodeSettings, NodeWatch, Reviews};
use tokio::sync::{oneshot, watch};

use crate::claims::Desk;
use crate::error::{AgentError, ErrorKind};

/// The running thread.
pub(crate) struct ClusterLink {
    leave: Option<oneshot::Sender<()>>,
    thread: JoinHandle<()>,
}

impl ClusterLink {
    /// Starts it; what was kept on disk is on the desk when this returns.
    ///
    /// # Errors
    /// There is no way to the API server that could come to be, or no thread.
    pub(crate) fn start(
        settings: NodeSettings,
        desk: Desk,
        facts: watch::Receiver<Option<Facts>>,
        reviews: Reviews,
    ) -> Result<ClusterLink, AgentError> {
        let failed = |error| AgentError::new(ErrorKind::Resource, "cannot start a thread").because(error);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let (leave, leaves) = oneshot::channel();
        let (begun, begins) = bounded(1);
        // Not on the caller's thread, which may be one of a runtime itself.
        let body = move || {
            runtime.block_on(async {
                // Ends with the runtime.
                tokio::spawn(reviews.run(settings.access.clone()));
                match NodeWatch::new(settings, move |desired| desk.leave(desired)).await {
                    Ok(watching) => {
                        let _ = begun.send(Ok(()));
                        watching.run(facts, leaves).await;
                    }
                    Err(error) => drop(begun.send(Err(error))),
                }
            });
        };
        let thread = std::thread::Builder::new().name("kubernetes".to_owned()).spawn(body).map_err(failed)?;
        let begun = begins.recv().expect("a thread that panics ends the process");
        begun.map_err(|error| {
            AgentError::new(ErrorKind::Config, "the agent cannot watch its node").because(error)
        })?;
        Ok(ClusterLink { leave: Some(leave), thread })
    }

    /// Has the last status written; it is when the thread has ended.
    pub(crate) fn leave(&mut self) {
        if let Some(leave) = self.leave.take() {
            // A thread that has ended has nothing to write.
            let _ = leave.send(());
        }
    }

    /// Waits for its end, which has a bound.
    pub(crate) fn join(self) {
        let _ = self.thread.join();
    }
}
