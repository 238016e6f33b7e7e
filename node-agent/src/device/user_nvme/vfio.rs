//! A controller on the PCI bus, through VFIO. The checks come before any change: a controller that the kernel uses
//! is not touched.

use reprise_io::{ControllerDescription, IoError, IoErrorKind};
use reprise_nvme::host::Host;

use super::PciAddress;
use crate::device::access::{Creation, OpenDevice};

/// Checks the machine and the function, and opens the controller.
///
/// # Errors
/// `Unavailable` with what the machine lacks and the remedy; `InUse` if another process has the controller.
pub(in crate::device) fn open(
    controller: &ControllerDescription,
    creation: Creation,
) -> Result<OpenDevice, IoError> {
    check(&Host::at("/"), controller.address, creation.mapped_bytes)?;
    let text = format!("{controller}: this build has no VFIO backing; use an emulated controller");
    Err(IoError::new(IoErrorKind::NoEngine, text))
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
