//! NVMe controllers that this process drives itself, in place of the kernel.
//!
//! | description | backing | opened by |
//! |---|---|---|
//! | PCI address | the function, through VFIO | [`vfio`] |
//! | path | an emulation in this process, with a file as its namespace | [`emulated`] |
//!
//! The engine has its own queue pair. Others reach the controller through a [`ControllerHandle`]: the health log,
//! and queue pairs that are granted to engines. A handle does not keep a controller open.

mod emulated;
mod vfio;

use std::sync::{Arc, Weak};

use reprise_io::{ControllerDescription, DeviceDescription, HealthLog, IoError, IoErrorKind, PciAddress};
use reprise_nvme::{Backing, DataFormat, DeviceSettings, NvmeDevice, OpenController};

use super::access::OpenDevice;

pub(super) use emulated::open as open_emulated;
pub(super) use vfio::open as open_vfio;

/// Whether a controller is hardware.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ControllerKind {
    /// A function on the PCI bus.
    Hardware,
    /// An emulation in this process.
    Emulated,
}

/// Properties of an open controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ControllerProperties {
    pub(crate) kind: ControllerKind,
    /// Place on the PCI bus; `None` for an emulation.
    pub(crate) address: Option<PciAddress>,
    pub(crate) serial: String,
    pub(crate) model: String,
    /// Identifier of the namespace that holds the pool.
    pub(crate) namespace: u32,
    /// I/O queue pairs that the controller has granted, the engine's pair included.
    pub(crate) queue_pairs: u16,
    pub(crate) data_format: DataFormat,
}

/// Access to the controller of an open device, next to its engine.
#[derive(Clone, Debug)]
pub(crate) struct ControllerHandle {
    controller: Weak<dyn OpenController>,
    properties: Arc<ControllerProperties>,
}

impl ControllerHandle {
    /// Returns the properties of the controller.
    pub(crate) fn properties(&self) -> &ControllerProperties {
        &self.properties
    }

    /// Returns the controller; `None` after its device was closed.
    pub(crate) fn controller(&self) -> Option<Arc<dyn OpenController>> {
        self.controller.upgrade()
    }

    /// Reads the health log; `None` if the controller does not answer, or its device was closed. Waits for other
    /// users of the admin queue.
    pub(crate) fn health_log(&self) -> Option<HealthLog> {
        match self.controller()?.health() {
            Ok(log) => Some(log),
            Err(error) => {
                tracing::debug!(serial = self.properties.serial, %error, "cannot read the health log");
                None
            }
        }
    }
}

/// Expected identity of a controller.
#[derive(Clone, Copy, Debug)]
struct Expected<'a> {
    kind: ControllerKind,
    address: Option<PciAddress>,
    serials: &'a [String],
    namespace: Option<u32>,
}

impl<'a> Expected<'a> {
    fn hardware(controller: &'a ControllerDescription) -> Expected<'a> {
        Expected {
            kind: ControllerKind::Hardware,
            address: Some(controller.address),
            serials: &controller.serials,
            namespace: controller.namespace,
        }
    }
}

/// Starts a controller and opens its namespace.
///
/// # Errors
/// `Unavailable` if the controller does not start, has another serial number, or lacks the namespace.
fn open_namespace<B: Backing>(
    device: &DeviceDescription,
    expected: Expected<'_>,
    backing: B,
) -> Result<OpenDevice, IoError> {
    let settings = DeviceSettings { namespace: expected.namespace, ..DeviceSettings::default() };
    let opened = NvmeDevice::open(backing, &settings)?;
    let controller = opened.controller();
    let identity = controller.identity();
    if !expected.serials.is_empty() && !expected.serials.contains(&identity.serial) {
        let text = format!(
            "{device} has the serial number {}, and {} is expected: another drive is at this address; correct the \
             serial number or the address",
            identity.serial,
            expected.serials.join(" or ")
        );
        return Err(IoError::new(IoErrorKind::Unavailable, text));
    }
    let properties = ControllerProperties {
        kind: expected.kind,
        address: expected.address,
        serial: identity.serial.clone(),
        model: identity.model.clone(),
        namespace: opened.namespace().id,
        queue_pairs: controller.granted(),
        data_format: controller.data_format(),
    };
    let shared: Arc<dyn OpenController> = controller.clone();
    let handle = ControllerHandle { controller: Arc::downgrade(&shared), properties: Arc::new(properties) };
    Ok(OpenDevice { device: Box::new(opened), controller: Some(handle) })
}

#[cfg(test)]
pub(crate) mod tests;
