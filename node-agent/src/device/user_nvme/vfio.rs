//! A controller on the PCI bus, through VFIO. The checks come before any change: a controller that the kernel uses
//! is not touched.

use reprise_io::{ControllerDescription, DeviceDescription, IoError, IoErrorKind};
use reprise_nvme::host::Host;
use reprise_nvme::vfio::{FunctionError, PciFunction, VfioController};

use super::{Expected, PciAddress, open_namespace};
use crate::device::access::{Creation, OpenDevice};

/// Checks the machine and the function, and opens the controller.
///
/// # Errors
/// `Unavailable` with the missing part of the machine and the remedy; `InUse` if another process has the controller.
pub(in crate::device) fn open(
    controller: &ControllerDescription,
    creation: Creation,
) -> Result<OpenDevice, IoError> {
    check(&Host::at("/"), controller.address, creation.mapped_bytes)?;
    let backing = VfioController::open(PciFunction::new(controller.address)).map_err(|error| {
        let kind = match error {
            FunctionError::GroupBusy { .. } | FunctionError::InUse { .. } | FunctionError::Mounted { .. } => {
                IoErrorKind::InUse
            }
            _ => IoErrorKind::Unavailable,
        };
        IoError::new(kind, format!("NVMe controller {}: {error}", controller.address))
    })?;
    let device = DeviceDescription::Controller(controller.clone());
    open_namespace(&device, Expected::hardware(controller), backing)
}

/// Returns the first obstacle on a machine, as an error.
pub(super) fn check(host: &Host, address: PciAddress, mapped_bytes: u64) -> Result<(), IoError> {
    let function = host.nvme_function(address);
    let first = match &function {
        Err(obstacle) => Some(obstacle.clone()),
        // Uses of the kernel first: the machine need not be set up for a controller that cannot be given up.
        Ok(function) => function.uses.first().and_then(|_| function.obstacles().into_iter().next()),
    };
    let rest = || host.obstacles(mapped_bytes).into_iter().next();
    let of_function = || function.as_ref().ok()?.obstacles().into_iter().next();
    match first.or_else(rest).or_else(of_function) {
        None => Ok(()),
        Some(obstacle) => Err(IoError::new(IoErrorKind::Unavailable, obstacle.to_string())),
    }
}
