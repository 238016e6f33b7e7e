//! Access to a device by its description: opening, and everything else that depends on what a device is.
//!
//! Claims, pools and workers use these functions and the trait [`BlockDevice`], so they do not depend on the
//! kind of a device. The kernel serves files and block devices. This process drives NVMe controllers itself
//! ([`user_nvme`]); a controller has one user, so reading its first bytes opens and closes it.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::time::Duration;

use reprise_buffers::PageBuffer;
use reprise_io::{
    BlockDevice, DeviceDescription, DeviceFile, FileAccess, HOLDER_PATIENCE, HealthLog, IO_ALIGN, IfMissing,
    IoError, IoErrorKind, Reserve,
};

use super::user_nvme::{self, ControllerHandle};

/// An open, locked device.
pub(crate) struct OpenDevice {
    pub(crate) device: Box<dyn BlockDevice>,
    /// The controller of a device that this process drives.
    pub(crate) controller: Option<ControllerHandle>,
}

/// How a device is opened that may be missing, too small, or in use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Creation {
    pub(crate) missing: IfMissing,
    /// Size of the file of an emulated controller; `None`: its present size. Other files are enlarged later.
    pub(crate) bytes: Option<u64>,
    /// Space that the file of an emulated controller leaves on its file system.
    pub(crate) reserve: Reserve,
    /// Time to wait for a former holder of a file.
    pub(crate) patience: Duration,
    /// Bytes of the arena, which a controller accesses: they are locked in memory.
    pub(crate) mapped_bytes: u64,
}

impl Creation {
    /// An existing device with its present size.
    pub(crate) const NONE: Creation = Creation {
        missing: IfMissing::Fail,
        bytes: None,
        reserve: Reserve::Default,
        patience: HOLDER_PATIENCE,
        mapped_bytes: 0,
    };
}

/// Opens and locks a device for reading and writing.
///
/// # Errors
/// As for [`DeviceFile::open`]; for controllers, the missing part of the node and the remedy.
pub(crate) fn open(device: &DeviceDescription, creation: Creation) -> Result<OpenDevice, IoError> {
    match device {
        DeviceDescription::Path(path) => {
            let access = (FileAccess::ReadWrite, creation.missing);
            let file = DeviceFile::open_within(path, access, creation.patience)?;
            Ok(OpenDevice { device: Box::new(file), controller: None })
        }
        DeviceDescription::Controller(controller) => user_nvme::open_vfio(controller, creation),
        DeviceDescription::Emulated(path) => user_nvme::open_emulated(path, creation),
    }
}

/// Opens and locks an existing device for reading and writing, unless it is in use now.
///
/// # Errors
/// As for [`open`].
pub(crate) fn open_unless_busy(device: &DeviceDescription) -> Result<Box<dyn BlockDevice>, IoError> {
    let creation = Creation { patience: Duration::ZERO, ..Creation::NONE };
    Ok(open(device, creation)?.device)
}

/// Returns whether a device exists.
///
/// # Errors
/// This cannot be determined.
pub(crate) fn exists(device: &DeviceDescription) -> io::Result<bool> {
    match device {
        DeviceDescription::Path(path) | DeviceDescription::Emulated(path) => path.try_exists(),
        DeviceDescription::Controller(controller) => {
            Path::new("/sys/bus/pci/devices").join(controller.address.to_string()).try_exists()
        }
    }
}

/// Reads up to `bytes` from the start of a device. Files and block devices are read without a lock.
///
/// # Errors
/// The device does not exist or cannot be read.
pub(crate) fn read_start(device: &DeviceDescription, bytes: usize) -> io::Result<Vec<u8>> {
    match device {
        // The namespace of an emulated controller is the file.
        DeviceDescription::Path(path) | DeviceDescription::Emulated(path) => {
            let mut start = Vec::new();
            File::open(path)?.take(bytes as u64).read_to_end(&mut start)?;
            Ok(start)
        }
        DeviceDescription::Controller(_) => {
            let mut opened = open(device, Creation::NONE).map_err(io_error)?.device;
            let whole =
                bytes.next_multiple_of(IO_ALIGN).min(usize::try_from(opened.size()).unwrap_or(usize::MAX));
            let mut pages = PageBuffer::new(whole).map_err(io::Error::other)?;
            opened.read(0, &mut pages).map_err(io_error)?;
            Ok(pages[..bytes.min(whole)].to_vec())
        }
    }
}

fn io_error(error: IoError) -> io::Error {
    let kind = match error.kind() {
        IoErrorKind::InUse => io::ErrorKind::ResourceBusy,
        IoErrorKind::NoEngine => io::ErrorKind::Unsupported,
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, error)
}

/// Removes the file of a device.
///
/// # Errors
/// The device is not a file, or the file cannot be removed.
pub(crate) fn remove(device: &DeviceDescription) -> io::Result<()> {
    match device {
        DeviceDescription::Path(path) | DeviceDescription::Emulated(path) => std::fs::remove_file(path),
        DeviceDescription::Controller(controller) => {
            Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{controller} is not a file")))
        }
    }
}

/// Reads the health of the drive of a device that the kernel serves; `None` where it is not available or not
/// permitted. A drive that hangs answers after a minute. A controller of this process has a
/// [`ControllerHandle`] for it.
pub(crate) fn health_log(device: &DeviceDescription) -> Option<HealthLog> {
    reprise_io::health_log(device.path()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn create(bytes: u64) -> Creation {
        let reserve = Reserve::Bytes(0);
        Creation { missing: IfMissing::Create, bytes: Some(bytes), reserve, ..Creation::NONE }
    }

    #[test]
    fn files_are_opened_read_and_removed() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = DeviceDescription::from(folder.path().join("pool"));
        assert!(!exists(&file).expect("the folder is readable"));
        assert_eq!(read_start(&file, 1).expect_err("missing").kind(), io::ErrorKind::NotFound);
        // An engine enlarges it later.
        assert_eq!(open(&file, create(1 << 20)).expect("created").device.size(), 0);
        std::fs::write(file.path().expect("a path"), b"content").expect("written");
        assert_eq!(read_start(&file, 3).expect("readable"), b"con");
        remove(&file).expect("removed");
        assert!(!exists(&file).expect("the folder is readable"));
    }

    #[test]
    fn a_controller_is_not_removed_and_a_missing_one_does_not_exist() {
        let address = "ffff:ff:1f.7".parse().expect("an address");
        let device = DeviceDescription::Controller(reprise_io::ControllerDescription::at(address));
        assert!(!exists(&device).expect("/sys is readable"));
        let refused = remove(&device).expect_err("not a file").to_string();
        assert!(refused.contains("pci:ffff:ff:1f.7"), "{refused}");
        assert_eq!(health_log(&device), None);
    }
}
