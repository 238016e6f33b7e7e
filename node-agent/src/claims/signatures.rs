//! Whose data is on a device: the marks that file systems, volumes and partition tables leave, as blkid(8) looks for them.
//!
//! Only what is written near the start, which every one of them has: a device that is somebody's is found out by its first
//! [`LOOKED_AT`] bytes. What is ours is nobody else's. Unknown data without a mark is found when the device is opened as a pool.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// The furthest mark is an uberblock of ZFS, in the second half of its first label.
pub(super) const LOOKED_AT: u64 = 256 << 10;

/// First bytes of a pool of ours (docs/FORMAT.md, "Superblock").
const OURS: &[u8] = b"REPRISE\0";

/// A mark at a fixed place.
struct Mark {
    what: &'static str,
    at: usize,
    bytes: &'static [u8],
}

const fn mark(what: &'static str, at: usize, bytes: &'static [u8]) -> Mark {
    Mark { what, at, bytes }
}

/// Places and bytes as in the headers of the kernel and of util-linux' libblkid. A partition table comes last: boot sectors of file
/// systems have its mark too.
const MARKS: &[Mark] = &[
    mark("a LUKS volume", 0, b"LUKS\xba\xbe"),
    mark("an XFS file system", 0, b"XFSB"),
    mark("an ext2, ext3 or ext4 file system", 0x438, b"\x53\xef"),
    mark("a Btrfs file system", 0x1_0040, b"_BHRfS_M"),
    mark("an F2FS file system", 0x400, b"\x10\x20\xf5\xf2"),
    mark("an NTFS file system", 3, b"NTFS    "),
    mark("an LVM volume", 0, b"LABELONE"),
    mark("an LVM volume", 512, b"LABELONE"),
    mark("an LVM volume", 1024, b"LABELONE"),
    mark("an LVM volume", 1536, b"LABELONE"),
    mark("a member of a RAID", 0, b"\xfc\x4e\x2b\xa9"),
    mark("a member of a RAID", 4096, b"\xfc\x4e\x2b\xa9"),
    mark("a swap space", 4086, b"SWAPSPACE2"),
    mark("a swap space", 4086, b"SWAP-SPACE"),
    mark("a GPT partition table", 512, b"EFI PART"),
    mark("a GPT partition table", 4096, b"EFI PART"),
    mark("a partition table or boot sector", 510, b"\x55\xaa"),
];

/// Uberblocks of ZFS: where they lie, how far apart, and their mark in either order of bytes.
const UBERBLOCKS: (usize, usize) = (128 << 10, 1024);
const UBERBLOCK: [&[u8]; 2] = [b"\x0c\xb1\xba\x00\x00\x00\x00\x00", b"\x00\x00\x00\x00\x00\xba\xb1\x0c"];

/// Whether a device begins as a pool of ours, of whomever. One that cannot be read does not.
pub(super) fn is_ours(path: &Path) -> bool {
    start(path, OURS.len()).is_ok_and(|start| start == OURS)
}

/// What is on a device or in a file that is not ours; `None` when there is no mark, or no device.
///
/// # Errors
/// It cannot be read.
pub(super) fn foreign(path: &Path) -> io::Result<Option<&'static str>> {
    match start(path, LOOKED_AT as usize) {
        Ok(start) => Ok(recognise(&start)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// So many of the first bytes of a device or file, or all that it has.
///
/// # Errors
/// It is not there, or cannot be read.
pub(super) fn start(path: &Path, bytes: usize) -> io::Result<Vec<u8>> {
    let mut start = Vec::new();
    File::open(path)?.take(bytes as u64).read_to_end(&mut start)?;
    Ok(start)
}

fn recognise(start: &[u8]) -> Option<&'static str> {
    if start.starts_with(OURS) {
        return None;
    }
    let has = |at: usize, bytes: &[u8]| start.get(at..at + bytes.len()) == Some(bytes);
    let zfs = || {
        let places = (UBERBLOCKS.0..start.len()).step_by(UBERBLOCKS.1);
        let found = places.into_iter().any(|at| UBERBLOCK.iter().any(|mark| has(at, mark)));
        found.then_some("a ZFS pool")
    };
    // A ZFS disk has a partition table of its own as well, and is rather ZFS'.
    zfs().or_else(|| MARKS.iter().find(|mark| has(mark.at, mark.bytes)).map(|mark| mark.what))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(marks: &[(usize, &[u8])]) -> Vec<u8> {
        let mut disk = vec![0; LOOKED_AT as usize];
        for (at, bytes) in marks {
            disk[*at..at + bytes.len()].copy_from_slice(bytes);
        }
        disk
    }

    #[test]
    fn every_owner_is_recognised_by_its_mark() {
        for mark in MARKS {
            assert_eq!(recognise(&disk(&[(mark.at, mark.bytes)])), Some(mark.what));
        }
        for bytes in UBERBLOCK {
            assert_eq!(recognise(&disk(&[(UBERBLOCKS.0 + 5 * 1024, bytes)])), Some("a ZFS pool"));
        }
    }

    #[test]
    fn a_boot_sector_does_not_hide_the_file_system_behind_it() {
        let start = disk(&[(510, b"\x55\xaa"), (3, b"NTFS    ")]);
        assert_eq!(recognise(&start), Some("an NTFS file system"));
    }

    #[test]
    fn blank_short_and_own_devices_are_nobodys() {
        for start in [disk(&[]), Vec::new(), vec![0; 512], disk(&[(0, OURS), (0x438, b"\x53\xef")])] {
            assert_eq!(recognise(&start), None);
        }
    }

    #[test]
    fn a_device_is_looked_at_and_a_missing_one_is_nobodys() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("device");
        assert_eq!(foreign(&path).expect("missing"), None);
        std::fs::write(&path, disk(&[(0, b"XFSB")])).expect("written");
        assert_eq!(foreign(&path).expect("readable"), Some("an XFS file system"));
        assert!(foreign(folder.path()).is_err(), "a directory cannot be read");
        assert!(!is_ours(&path) && !is_ours(folder.path()) && !is_ours(&folder.path().join("missing")));
        std::fs::write(&path, disk(&[(0, OURS)])).expect("written");
        assert!(is_ours(&path));
    }
}
