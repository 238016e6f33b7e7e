//! Access to a device by its description: opening, and everything else that depends on what a device is.
//!
//! Claims, pools and workers use these functions and the trait [`BlockDevice`], so they do not depend on the
//! kind of a device. The kernel serves files and block devices. An NVMe controller by PCI address needs a
//! driver in user space; this build has none, and [`kernel_path`] rejects such a device.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use reprise_io::{
    BlockDevice, DeviceDescription, DeviceFile, FileAccess, HealthLog, IfMissing, IoError, IoErrorKind,
};

/// Opens and locks a device for reading and writing.
///
/// # Errors
/// `NoEngine` when no I/O engine of this build serves this kind of device; others as for
/// [`DeviceFile::open`].
pub(crate) fn open(device: &DeviceDescription, missing: IfMissing) -> Result<Box<dyn BlockDevice>, IoError> {
    let file = DeviceFile::open(kernel_path(device)?, FileAccess::ReadWrite, missing)?;
    Ok(Box::new(file))
}

/// Opens and locks a device for reading and writing, unless it is in use now.
///
/// # Errors
/// As for [`open`].
pub(crate) fn open_unless_busy(device: &DeviceDescription) -> Result<Box<dyn BlockDevice>, IoError> {
    Ok(Box::new(DeviceFile::open_unless_busy(kernel_path(device)?)?))
}

/// Returns whether a device exists.
///
/// # Errors
/// This cannot be determined.
pub(crate) fn exists(device: &DeviceDescription) -> io::Result<bool> {
    kernel_path(device).map_err(io::Error::other)?.try_exists()
}

/// Reads up to `bytes` from the start of a device, without a lock.
///
/// # Errors
/// The device does not exist or cannot be read.
pub(crate) fn read_start(device: &DeviceDescription, bytes: usize) -> io::Result<Vec<u8>> {
    let mut start = Vec::new();
    File::open(kernel_path(device).map_err(io::Error::other)?)?.take(bytes as u64).read_to_end(&mut start)?;
    Ok(start)
}

/// Removes the file of a device.
///
/// # Errors
/// The device is not a file, or the file cannot be removed.
pub(crate) fn remove(device: &DeviceDescription) -> io::Result<()> {
    std::fs::remove_file(kernel_path(device).map_err(io::Error::other)?)
}

/// Reads the health of the drive of a device; `None` where it is not available or not permitted. A drive that
/// hangs answers after a minute.
pub(crate) fn health_log(device: &DeviceDescription) -> Option<HealthLog> {
    reprise_io::health_log(kernel_path(device).ok()?)
}

/// Returns the path of a device that the kernel serves. This is the only place that rejects other devices.
fn kernel_path(device: &DeviceDescription) -> Result<&Path, IoError> {
    match device {
        DeviceDescription::Path(path) => Ok(path),
        DeviceDescription::Controller(address) => {
            let text = format!(
                "NVMe controller {address} needs a driver in user space (VFIO), which this release does not have: leave \
                 the controller to the kernel's nvme driver, and configure the path of its block device in \
                 /dev/disk/by-id"
            );
            Err(IoError::new(IoErrorKind::NoEngine, text))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_controller_is_rejected_with_the_missing_part_and_the_remedy() {
        let controller = DeviceDescription::Controller("0000:3b:00.0".parse().expect("an address"));
        let refused = open(&controller, IfMissing::Fail).err().expect("no engine serves it");
        assert_eq!(refused.kind(), IoErrorKind::NoEngine);
        let text = refused.to_string();
        for words in ["0000:3b:00.0", "driver in user space (VFIO)", "/dev/disk/by-id"] {
            assert!(text.contains(words), "{text}");
        }
        let errors = [exists(&controller).err(), read_start(&controller, 1).err(), remove(&controller).err()];
        for error in errors {
            assert!(error.expect("rejected").to_string().contains("driver in user space"));
        }
        assert_eq!(health_log(&controller), None);
    }

    #[test]
    fn files_are_opened_read_and_removed() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = DeviceDescription::from(folder.path().join("pool"));
        assert!(!exists(&file).expect("the folder is readable"));
        assert_eq!(read_start(&file, 1).expect_err("missing").kind(), io::ErrorKind::NotFound);
        assert_eq!(open(&file, IfMissing::Create).expect("created").size(), 0);
        std::fs::write(file.path().expect("a path"), b"content").expect("written");
        assert_eq!(read_start(&file, 3).expect("readable"), b"con");
        remove(&file).expect("removed");
        assert!(!exists(&file).expect("the folder is readable"));
    }
}
