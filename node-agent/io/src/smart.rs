//! Health of an NVMe drive: the SMART / Health Information log page (NVMe Base Specification 2.0, 5.16.1.3).
//!
//! Fields that are read, of 512 bytes:
//!
//! ```text
//!   0         critical warning; bit 0: spare capacity is below the drive's own threshold
//!   3         available spare, percent of what there was at first
//!   48..64    data units written by the host, of 512,000 bytes; 0 if the drive does not count them
//!   160..176  media and data integrity errors, a counter of the drive's life
//! ```
//!
//! The kernel requires CAP_SYS_ADMIN for the command. Without that capability, and for files and other kinds
//! of devices, [`health_log`] returns `None`, which is not an error. A drive that hangs answers after the
//! kernel's timeout for admin commands (60 s), so do not call this on a thread that others wait for.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

/// Size of the log page in bytes.
const LOG_BYTES: usize = 512;

/// Get Log Page: NVMe Base Specification 2.0, figure 138.
const GET_LOG_PAGE: u8 = 0x02;
/// SMART / Health Information: figure 202.
const HEALTH_LOG: u32 = 0x02;
/// Selects the controller's page instead of the page of one namespace: 5.16.1.3.
const NSID_ALL: u32 = 0xffff_ffff;

const CRITICAL_WARNING: usize = 0;
/// Bit of the critical warning.
const SPARE_IS_LOW: u8 = 1;
const AVAILABLE_SPARE: usize = 3;
const DATA_UNITS_WRITTEN: std::ops::Range<usize> = 48..64;
/// A data unit is a thousand units of 512 bytes.
const DATA_UNIT_BYTES: u128 = 512_000;
const MEDIA_ERRORS: std::ops::Range<usize> = 160..176;

/// `NVME_IOCTL_ADMIN_CMD` of linux/nvme_ioctl.h: `_IOWR('N', 0x41, struct nvme_passthru_cmd)`, encoded as in
/// asm-generic/ioctl.h.
const NVME_IOCTL_ADMIN_CMD: libc::Ioctl = (3 << 30)
    | ((size_of::<PassthroughCommand>() as libc::Ioctl) << 16)
    | ((b'N' as libc::Ioctl) << 8)
    | 0x41;

const _: () =
    assert!(size_of::<PassthroughCommand>() == 72, "struct nvme_passthru_cmd of linux/nvme_ioctl.h");

/// Health of a drive. Values that the drive does not report are `None`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HealthLog {
    /// Media and data integrity errors over the drive's life.
    pub media_errors: u64,
    /// Remaining spare capacity in percent.
    pub spare_percent: Option<u8>,
    /// Bytes that hosts have written over the drive's life, rounded up to data units of 512,000 bytes.
    pub written_bytes: Option<u64>,
}

/// `struct nvme_passthru_cmd` of linux/nvme_ioctl.h.
#[derive(Debug, Default)]
#[repr(C)]
struct PassthroughCommand {
    opcode: u8,
    flags: u8,
    rsvd1: u16,
    nsid: u32,
    cdw2: u32,
    cdw3: u32,
    metadata: u64,
    addr: u64,
    metadata_len: u32,
    data_len: u32,
    cdw10: u32,
    cdw11: u32,
    cdw12: u32,
    cdw13: u32,
    cdw14: u32,
    cdw15: u32,
    timeout_ms: u32,
    result: u32,
}

impl HealthLog {
    /// Decodes a log page.
    pub fn parse(page: &[u8; LOG_BYTES]) -> HealthLog {
        let counter = |bytes: std::ops::Range<usize>| {
            u128::from_le_bytes(page[bytes].try_into().expect("it has 16 bytes"))
        };
        let written = counter(DATA_UNITS_WRITTEN).saturating_mul(DATA_UNIT_BYTES);
        let spare = page[AVAILABLE_SPARE];
        // Drives without spare capacity report 0 and do not set the warning bit.
        let is_told = spare > 0 || page[CRITICAL_WARNING] & SPARE_IS_LOW != 0;
        HealthLog {
            media_errors: u64::try_from(counter(MEDIA_ERRORS)).unwrap_or(u64::MAX),
            // Values above 100 are not percentages.
            spare_percent: (is_told && spare <= 100).then_some(spare),
            written_bytes: (written > 0).then(|| u64::try_from(written).unwrap_or(u64::MAX)),
        }
    }
}

/// Reads the health of the drive behind a device file; `None` where it is not available or not permitted.
pub fn health_log(path: &Path) -> Option<HealthLog> {
    let mut page = [0; LOG_BYTES];
    let device = open(path)?;
    read_log(device.as_fd(), &mut page).then(|| HealthLog::parse(&page))
}

/// Opens block devices, and controllers, which are character devices; `None` for files.
fn open(path: &Path) -> Option<File> {
    let kind = std::fs::metadata(path).ok()?.file_type();
    if !kind.is_block_device() && !kind.is_char_device() {
        return None;
    }
    // O_NONBLOCK: opening must not wait.
    OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).ok()
}

/// Builds the command that reads the page: CDW10 has the page and, from bit 16 on, its number of dwords minus
/// one (figure 197).
fn command(page: &mut [u8; LOG_BYTES]) -> PassthroughCommand {
    let dwords = (LOG_BYTES / size_of::<u32>()) as u32;
    PassthroughCommand {
        opcode: GET_LOG_PAGE,
        nsid: NSID_ALL,
        addr: page.as_mut_ptr().expose_provenance() as u64,
        data_len: LOG_BYTES as u32,
        cdw10: HEALTH_LOG | ((dwords - 1) << 16),
        ..PassthroughCommand::default()
    }
}

/// Sends the command; returns whether the page was read. Errors are ENOTTY and EINVAL for other devices,
/// EACCES and EPERM without the capability, and status codes of the drive, which are positive.
fn read_log(device: BorrowedFd<'_>, page: &mut [u8; LOG_BYTES]) -> bool {
    let mut command = command(page);
    // SAFETY: the argument of NVME_IOCTL_ADMIN_CMD is a struct nvme_passthru_cmd (linux/nvme_ioctl.h), whose
    // layout and size `PassthroughCommand` has. Command and page are borrowed for the call. The kernel writes
    // `data_len` bytes at `addr`, the page, and has finished when ioctl(2) returns. Other devices do not
    // implement an ioctl of this number and answer ENOTTY or EINVAL.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), NVME_IOCTL_ADMIN_CMD, &raw mut command) };
    result == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Encodes a page like a drive, by offsets of the specification.
    fn page(warning: u8, spare: u8, errors: u128) -> [u8; LOG_BYTES] {
        let mut page = [0; LOG_BYTES];
        page[0] = warning;
        // 300 K, 10 % as the threshold of the spare, 4 % used.
        page[1..3].copy_from_slice(&300_u16.to_le_bytes());
        page[3] = spare;
        (page[4], page[5]) = (10, 4);
        // Neighbours of the counter: unsafe shutdowns, entries of the error log.
        page[144..160].copy_from_slice(&7_u128.to_le_bytes());
        page[160..176].copy_from_slice(&errors.to_le_bytes());
        page[176..192].copy_from_slice(&9_u128.to_le_bytes());
        page
    }

    #[test]
    fn spare_and_errors_are_read_where_the_specification_has_them() {
        let log = HealthLog::parse(&page(0, 97, 258));
        assert_eq!(log, HealthLog { media_errors: 258, spare_percent: Some(97), written_bytes: None });
        assert_eq!(HealthLog::parse(&page(0, 100, 0)).spare_percent, Some(100));
        assert_eq!(HealthLog::parse(&page(0, 100, u128::MAX)).media_errors, u64::MAX);
    }

    #[test]
    fn written_bytes_are_counted_in_units_of_512_000_bytes() {
        let written = |units: u128| {
            let mut page = page(0, 100, 0);
            // Neighbours of the counter: data units read, read commands of the host.
            page[32..48].copy_from_slice(&5_u128.to_le_bytes());
            page[48..64].copy_from_slice(&units.to_le_bytes());
            page[64..80].copy_from_slice(&6_u128.to_le_bytes());
            HealthLog::parse(&page).written_bytes
        };
        assert_eq!(
            (written(0), written(1), written(1_000_000)),
            (None, Some(512_000), Some(512_000_000_000))
        );
        assert_eq!(written(u128::MAX), Some(u64::MAX));
    }

    #[test]
    fn an_impossible_spare_is_not_reported() {
        assert_eq!(
            HealthLog::parse(&page(0, 0, 3)),
            HealthLog { media_errors: 3, spare_percent: None, written_bytes: None }
        );
        assert_eq!(HealthLog::parse(&page(0, 101, 0)).spare_percent, None);
        assert_eq!(HealthLog::parse(&page(1, 0, 0)).spare_percent, Some(0), "the drive sets the warning bit");
        assert_eq!(HealthLog::parse(&page(4, 0, 0)).spare_percent, None, "unreliability is another bit");
    }

    #[test]
    fn the_command_number_matches_the_kernel_header() {
        let mut page = [0; LOG_BYTES];
        let at = page.as_ptr().addr() as u64;
        let command = command(&mut page);
        assert_eq!(NVME_IOCTL_ADMIN_CMD as u32, 0xc048_4e41);
        assert_eq!((command.opcode, command.nsid, command.data_len), (2, u32::MAX, 512));
        assert_eq!((command.cdw10, command.addr), (0x007f_0002, at));
        assert_eq!(std::mem::offset_of!(PassthroughCommand, addr), 24);
        assert_eq!(std::mem::offset_of!(PassthroughCommand, cdw10), 40);
        assert_eq!(std::mem::offset_of!(PassthroughCommand, result), 68);
    }

    #[test]
    fn files_and_other_devices_have_no_health_log() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        assert_eq!(health_log(file.path()), None);
        assert_eq!(health_log(Path::new("/dev/null")), None, "it does not support the call");
        assert_eq!(health_log(Path::new("/nowhere/at/all")), None);
    }
}
