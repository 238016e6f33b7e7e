//! New memory of arena regions: devices release the old memory, then the thread for regions replaces it.

use std::collections::BTreeMap;
use std::sync::Arc;

use crossbeam_channel::bounded;
use reprise_agent_core::effect::RegionId;
use reprise_agent_core::event::{Event, Renewal};
use reprise_buffers::Region;

use super::Executor;
use crate::device::{Command, Device};
use crate::region_renewer::Renewing;

/// Regions whose memory was or is being replaced. A device that is opened meanwhile may have registered the old memory.
#[derive(Default)]
pub(super) struct RenewedRegions {
    /// The current memory; `None` while it is being replaced.
    regions: BTreeMap<RegionId, Option<Arc<Region>>>,
}

impl RenewedRegions {
    /// Makes a new device release old memory and register the new one.
    pub(super) fn update_device(&self, device: &Device) {
        for (region, renewed) in &self.regions {
            let command = match renewed {
                Some(renewed) => Command::AddRegion(renewed.clone()),
                None => Command::ReleaseRegion(region.0, bounded(0).0),
            };
            send(device, command);
        }
    }
}

impl Executor {
    /// Starts to replace the memory of a region.
    pub(super) fn renew_region(&mut self, region: RegionId) {
        self.regions.regions.insert(region, None);
        let (sender, released) = bounded(0);
        for entry in self.devices.iter().flatten() {
            send(&entry.device, Command::ReleaseRegion(region.0, sender.clone()));
        }
        drop(sender);
        if self.parts.region_renewer.submit(Renewing { region, released }).is_err() {
            self.feedback.push_back(Event::RegionRenewed { region, renewal: Renewal::Failed });
        }
    }

    /// Lets the devices register the memory of a region: the new one, or the old one if it was not replaced.
    pub(crate) fn region_renewed(&mut self, region: RegionId, memory: Arc<Region>) {
        for entry in self.devices.iter().flatten() {
            send(&entry.device, Command::AddRegion(memory.clone()));
        }
        self.regions.regions.insert(region, Some(memory));
    }
}

/// Sends a command to a device. A device without room for it uses the memory unregistered, or keeps old pages.
fn send(device: &Device, command: Command) {
    if let Err(unsent) = device.submit(command) {
        tracing::warn!(path = %device.info().description, why = %unsent.why, "cannot update the registered memory of a device");
    }
}
