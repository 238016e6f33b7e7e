//! Detects foreign data on a device by signatures ([`foreign_signature`]), and pools by theirs.

use std::io;

use reprise_io::{DeviceDescription, POOL_MAGIC, SIGNATURE_BYTES, foreign_signature};

use crate::device::access::read_start;

/// Returns whether a device starts with a Reprise superblock; false if it cannot be read.
pub(super) fn is_pool(device: &DeviceDescription) -> bool {
    read_start(device, POOL_MAGIC.len()).is_ok_and(|start| start == POOL_MAGIC)
}

/// Returns the foreign data on a device or in a file; `None` without a signature, or if it does not exist.
///
/// # Errors
/// The device cannot be read.
pub(super) fn foreign(device: &DeviceDescription) -> io::Result<Option<&'static str>> {
    match read_start(device, SIGNATURE_BYTES as usize) {
        Ok(start) => Ok(foreign_signature(&start)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn signatures_are_read_from_devices_and_missing_devices_have_none() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("device");
        let is_pool = |path: &Path| is_pool(&path.into());
        let foreign = |path: &Path| foreign(&path.into());
        assert_eq!(foreign(&path).expect("missing"), None);
        std::fs::write(&path, b"XFSB").expect("written");
        assert_eq!(foreign(&path).expect("readable"), Some("an XFS file system"));
        assert!(foreign(folder.path()).is_err(), "a directory cannot be read");
        assert!(!is_pool(&path) && !is_pool(folder.path()) && !is_pool(&folder.path().join("missing")));
        std::fs::write(&path, POOL_MAGIC).expect("written");
        assert!(is_pool(&path));
    }
}
