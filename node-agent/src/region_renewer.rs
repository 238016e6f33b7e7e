//! The thread that replaces the memory of regions which pass to other tenants.
//!
//! Populating a region takes 0.1 to 1 s for 256 MiB, too long for the core's thread. The old memory is freed before
//! the new one is populated, so that the arena never exceeds its size: after all devices have ended its registration.
//! The queue holds all regions, so it is full only if the thread has ended.

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use reprise_agent_core::effect::RegionId;
use reprise_agent_core::event::Renewal;
use reprise_buffers::Arena;

use crate::core_loop::{Inbox, Input};
use crate::error::{AgentError, ErrorKind};

/// Maximum time to wait for the devices. One that is stuck keeps the old pages allocated, and nothing else.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(10);

/// Handle of the thread, which ends when the handle is dropped.
pub(crate) struct RegionRenewer {
    queue: Sender<Renewing>,
}

/// A region whose memory the thread replaces.
pub(crate) struct Renewing {
    pub(crate) region: RegionId,
    /// Disconnected when all devices have ended the registration of the old memory.
    pub(crate) released: Receiver<()>,
}

/// The replacement was not queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RenewalRejected;

impl RegionRenewer {
    /// Starts the thread.
    ///
    /// # Errors
    /// The thread cannot be spawned.
    pub(crate) fn start(arena: Arc<Arena>, inbox: Inbox) -> Result<RegionRenewer, AgentError> {
        let (queue, waiting) = bounded(arena.regions().len().max(1));
        std::thread::Builder::new()
            .name("regions".to_owned())
            .spawn(move || run(&arena, &inbox, &waiting))
            .map_err(|error| {
            AgentError::new(ErrorKind::Resource, "cannot spawn the thread for regions").with_source(error)
        })?;
        Ok(RegionRenewer { queue })
    }

    /// Queues a replacement; its result is sent as an input of the core.
    ///
    /// # Errors
    /// The replacement is not queued, and no input follows.
    pub(crate) fn submit(&self, renewing: Renewing) -> Result<(), RenewalRejected> {
        self.queue.try_send(renewing).map_err(|_| RenewalRejected)
    }
}

fn run(arena: &Arena, inbox: &Inbox, waiting: &Receiver<Renewing>) {
    for Renewing { region, released } in waiting {
        if released.recv_timeout(RELEASE_TIMEOUT) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!(
                region = region.0,
                "a device does not release the memory of a region that passes to another tenant"
            );
        }
        let renewal = match arena.renew(region.0) {
            Ok(_) => Renewal::Done,
            Err(error) => {
                tracing::warn!(region = region.0, %error, "cannot replace the memory of a region for another tenant, it stays with its tenant");
                Renewal::Failed
            }
        };
        let memory = arena.region(region.0).expect("the core has the regions of the arena");
        if inbox.send(Input::RegionRenewed { renewal, memory }).is_err() {
            return;
        }
    }
}
