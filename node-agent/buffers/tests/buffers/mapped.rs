//! Memory that another process has created.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;

use reprise_buffers::MappedRegion;

const PAGE: u64 = 4096;

/// Creates a memory file without pages that cannot be made shorter.
fn sparse(bytes: u64) -> OwnedFd {
    // SAFETY: the name is a NUL-terminated string that lives through the call (memfd_create(2)).
    let fd = unsafe { libc::memfd_create(c"sparse".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    assert!(fd >= 0, "{}", io::Error::last_os_error());
    // SAFETY: memfd_create returned a new descriptor without another owner.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let file = File::from(fd);
    file.set_len(bytes).expect("enlarged");
    // SAFETY: F_ADD_SEALS takes an int (fcntl(2)); the descriptor is open.
    let rc = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_SHRINK) };
    assert_eq!(rc, 0, "{}", io::Error::last_os_error());
    file.into()
}

#[test]
fn memory_that_its_creator_has_not_allocated_is_refused_untouched() {
    // This machine may have less memory: no page of it may be touched.
    let refused = MappedRegion::map_sealed(sparse(1 << 40), 1 << 40).expect_err("sparse");
    assert!(refused.to_string().contains("fallocate"), "{refused}");
    let file = File::from(sparse(3 * PAGE));
    for page in [0, 2] {
        file.write_all_at(&[1], page * PAGE).expect("written");
    }
    let copy = || OwnedFd::from(file.try_clone().expect("a descriptor"));
    let refused = MappedRegion::map_sealed(copy(), 3 * PAGE).expect_err("a hole");
    assert!(refused.to_string().contains("only 8KiB"), "{refused}");
    file.write_all_at(&[1], PAGE).expect("written");
    let mapped = MappedRegion::map_sealed(copy(), 3 * PAGE).expect("whole");
    assert_eq!(mapped.bytes(), 3 * PAGE);
}

#[test]
fn allocated_memory_can_be_mapped_by_its_receiver() {
    let (own, descriptor) = MappedRegion::allocate(PAGE + 1).expect("memory");
    let theirs = MappedRegion::map_sealed(descriptor, own.bytes()).expect("allocated as a whole");
    own.span(PAGE, 1).expect("inside").copy_in(b"x").expect("writable");
    let mut read = [0];
    theirs.span(PAGE, 1).expect("inside").copy_out(&mut read);
    assert_eq!(&read, b"x");
}
