//! Signatures of file systems, volume managers and partition tables, as blkid(8) knows them: data of other programs on
//! a device.
//!
//! Only signatures in the first [`SIGNATURE_BYTES`] are checked; every listed format has one there. A Reprise pool
//! never counts as foreign. Unknown data without a signature is detected when the device is opened as a pool.

/// Bytes to read for the check. The last signature is a ZFS uberblock, in the second half of the first
/// label.
pub const SIGNATURE_BYTES: u64 = 256 << 10;

/// First bytes of a Reprise pool (docs/FORMAT.md, "Superblock").
pub const POOL_MAGIC: &[u8] = b"REPRISE\0";

/// A signature at a fixed offset.
struct Signature {
    what: &'static str,
    at: usize,
    bytes: &'static [u8],
}

const fn mark(what: &'static str, at: usize, bytes: &'static [u8]) -> Signature {
    Signature { what, at, bytes }
}

/// Offsets and bytes as in the kernel's headers and util-linux's libblkid. The boot signature is last,
/// since boot sectors of file systems contain it too.
const SIGNATURES: &[Signature] = &[
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

/// ZFS uberblocks: first offset, distance, and magic number in both byte orders.
const UBERBLOCKS: (usize, usize) = (128 << 10, 1024);
const UBERBLOCK: [&[u8]; 2] = [b"\x0c\xb1\xba\x00\x00\x00\x00\x00", b"\x00\x00\x00\x00\x00\xba\xb1\x0c"];

/// Returns what the start of a device holds of another program; `None` for a pool, or without a signature.
pub fn foreign_signature(start: &[u8]) -> Option<&'static str> {
    if start.starts_with(POOL_MAGIC) {
        return None;
    }
    let has = |at: usize, bytes: &[u8]| start.get(at..at + bytes.len()) == Some(bytes);
    let zfs = || {
        let places = (UBERBLOCKS.0..start.len()).step_by(UBERBLOCKS.1);
        let found = places.into_iter().any(|at| UBERBLOCK.iter().any(|mark| has(at, mark)));
        found.then_some("a ZFS pool")
    };
    // A ZFS disk also has a partition table, so ZFS is checked first.
    zfs().or_else(|| SIGNATURES.iter().find(|mark| has(mark.at, mark.bytes)).map(|mark| mark.what))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(marks: &[(usize, &[u8])]) -> Vec<u8> {
        let mut disk = vec![0; SIGNATURE_BYTES as usize];
        for (at, bytes) in marks {
            disk[*at..at + bytes.len()].copy_from_slice(bytes);
        }
        disk
    }

    #[test]
    fn every_signature_is_recognised() {
        for mark in SIGNATURES {
            assert_eq!(foreign_signature(&disk(&[(mark.at, mark.bytes)])), Some(mark.what));
        }
        for bytes in UBERBLOCK {
            assert_eq!(foreign_signature(&disk(&[(UBERBLOCKS.0 + 5 * 1024, bytes)])), Some("a ZFS pool"));
        }
    }

    #[test]
    fn boot_sector_does_not_hide_its_file_system() {
        let start = disk(&[(510, b"\x55\xaa"), (3, b"NTFS    ")]);
        assert_eq!(foreign_signature(&start), Some("an NTFS file system"));
    }

    #[test]
    fn blank_short_and_own_devices_have_no_signature() {
        for start in [disk(&[]), Vec::new(), vec![0; 512], disk(&[(0, POOL_MAGIC), (0x438, b"\x53\xef")])] {
            assert_eq!(foreign_signature(&start), None);
        }
    }
}
