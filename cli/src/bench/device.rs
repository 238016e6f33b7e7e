//! First line of benchmarks of hardware that a machine may lack: the device, and what ran in place of it.

use reprise_testkit::bench::Settings;
use serde::Serialize;

/// What the figures that follow were measured on.
#[derive(Debug, Serialize)]
pub(super) struct Device {
    pub(super) benchmark: &'static str,
    /// Name of the device, or `none`.
    pub(super) device: String,
    /// What ran: code on the device, or its replacement.
    pub(super) code: &'static str,
    /// Why no device was used.
    pub(super) reason: Option<String>,
}

/// Prints the device before its figures.
pub(super) fn announce(settings: &Settings, device: Device) {
    settings.audience.emit(&device);
    let reason = device.reason.map(|reason| format!(": {reason}")).unwrap_or_default();
    settings.audience.print_line(format!("device: {}, measuring the {}{reason}", device.device, device.code));
}
