//! An emulated controller with a file as its namespace: all of the path of a controller, on a machine without one.
//!
//! The file is locked and allocated like that of a pool without a controller. The emulation reads and writes it
//! through the page cache, so a killed process loses nothing; a flush makes writes durable.

use std::fs::OpenOptions;
use std::path::Path;

use reprise_io::{DeviceDescription, DeviceFile, FileAccess, IoError, IoErrorKind, Preallocation};
use reprise_nvme::emulated::{EmulatedController, Emulation, Storage};
use sha2::{Digest, Sha256};

use super::{ControllerKind, Expected, open_namespace};
use crate::device::access::{Creation, OpenDevice};

/// Hexadecimal digits in a serial number, which has at most 20 characters (Base 2.0, 5.17.2.1).
const SERIAL_DIGITS: usize = 12;

/// Locks a file, enlarges it to the configured size, and starts a controller on it.
///
/// # Errors
/// As for [`DeviceFile::open`] and [`DeviceFile::preallocate`]; `Unavailable` if the file is empty.
pub(in crate::device) fn open(path: &Path, creation: Creation) -> Result<OpenDevice, IoError> {
    let description = DeviceDescription::Emulated(path.to_owned());
    let mut file =
        DeviceFile::open_within(path, (FileAccess::ReadWrite, creation.missing), creation.patience)?;
    if let Some(bytes) = creation.bytes.filter(|bytes| *bytes > file.size()) {
        match file.preallocate(bytes, creation.reserve) {
            Ok(Preallocation::Sparse) => {
                tracing::warn!(path = %description, "this file system cannot reserve space: writes may fail if it is full");
            }
            Ok(Preallocation::Reserved | Preallocation::Device) => {}
            Err(error) => {
                if error.kind() == IoErrorKind::NoSpace {
                    file.discard();
                }
                return Err(error);
            }
        }
    }
    let bytes = file.size();
    if bytes == 0 {
        file.discard();
        let text = format!("{description} has no size: configure its bytes");
        return Err(IoError::new(IoErrorKind::Unavailable, text));
    }
    let contents = OpenOptions::new().read(true).write(true).open(path).map_err(|error| {
        IoError::new(IoErrorKind::Unavailable, format!("opening {}: {error}", path.display()))
    })?;
    let storage = Storage::File { file: contents, bytes };
    let emulation = Emulation { serial: serial(path), ..Emulation::of(storage) };
    let controller = EmulatedController::start(emulation).map_err(|error| {
        IoError::new(IoErrorKind::Unavailable, format!("the emulated NVMe controller: {error}"))
    })?;
    tracing::warn!(
        path = %description,
        "this NVMe controller is EMULATED in the agent, for tests and demonstrations: it is slower than hardware"
    );
    let expected = Expected { kind: ControllerKind::Emulated, address: None, serials: &[], namespace: None };
    open_namespace(&description, expected, controller.keeping(file))
}

/// Returns the serial number of the controller on a file: the same after a restart.
fn serial(path: &Path) -> String {
    let digest = Sha256::digest(path.as_os_str().as_encoded_bytes());
    let digits: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("EMU-{}", &digits[..SERIAL_DIGITS])
}
