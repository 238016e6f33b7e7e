//! Descriptors of a pool file for other processes, and the proof that their I/O has ended.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use reprise_buffers::PageBuffer;
use reprise_io::{DeviceFile, FileAccess, HolderNumber, IfMissing, Reserve, SharedFile};
use tempfile::TempDir;

const FIRST: HolderNumber = HolderNumber(1);
const SECOND: HolderNumber = HolderNumber(2);

fn pool() -> (TempDir, DeviceFile, SharedFile) {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let path = directory.path().join("pool");
    let mut file = DeviceFile::open(&path, FileAccess::ReadWrite, IfMissing::Create).expect("a new file");
    file.preallocate(1 << 20, Reserve::Bytes(0)).expect("space");
    let shared = SharedFile::of(&file).expect("examined").expect("a file with direct I/O");
    (directory, file, shared)
}

fn is_held(shared: &SharedFile, holder: HolderNumber) -> bool {
    shared.is_held(holder).expect("examined")
}

/// Waits until a holder has ended. Another test may start a process at the same time, which has a copy of each
/// descriptor until it executes its program.
fn assert_ends(mut is_held: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(60);
    while is_held() {
        assert!(Instant::now() < until, "the holder has not ended");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn holder_is_held_until_its_last_descriptor_is_closed() {
    let (_directory, _file, shared) = pool();
    assert!(!is_held(&shared, FIRST));
    let descriptor = shared.share(FIRST).expect("a descriptor");
    let copy: OwnedFd = descriptor.try_clone().expect("a copy");
    assert!(is_held(&shared, FIRST) && !is_held(&shared, SECOND));
    drop(descriptor);
    assert!(is_held(&shared, FIRST), "a copy of the descriptor exists");
    drop(copy);
    assert_ends(|| is_held(&shared, FIRST));
}

#[test]
fn killed_process_ends_its_holder() {
    let (_directory, _file, shared) = pool();
    let descriptor = shared.share(FIRST).expect("a descriptor");
    // The process gets the descriptor as its standard input.
    let mut child = Command::new("sleep").arg("600").stdin(Stdio::from(descriptor)).spawn().expect("spawned");
    assert!(is_held(&shared, FIRST));
    child.kill().expect("killed");
    child.wait().expect("it exits");
    assert_ends(|| is_held(&shared, FIRST));
}

#[test]
fn holder_of_an_earlier_agent_is_seen_by_the_next_one() {
    let (_directory, file, shared) = pool();
    let path = file.path().to_owned();
    let descriptor = shared.share(FIRST).expect("a descriptor");
    // The agent ends; its client keeps the descriptor, which does not hold the agent's own lock.
    drop((file, shared));
    let file = DeviceFile::open(&path, FileAccess::ReadWrite, IfMissing::Fail).expect("not locked");
    let next = SharedFile::of(&file).expect("examined").expect("a file with direct I/O");
    assert!(next.is_held_by_earlier().expect("examined") && !is_held(&next, FIRST));
    let own = next.share(FIRST).expect("a descriptor");
    drop(descriptor);
    // Own holders do not count.
    assert_ends(|| next.is_held_by_earlier().expect("examined"));
    assert!(is_held(&next, FIRST));
    drop(own);
}

#[test]
fn holder_writes_directly_into_the_pool_file() {
    let (_directory, file, shared) = pool();
    let holder = File::from(shared.share(FIRST).expect("a descriptor"));
    let mut page = PageBuffer::new(4096).expect("memory");
    page.fill(7);
    holder.write_all_at(&page, 8192).expect("written");
    let mut found = PageBuffer::new(4096).expect("memory");
    file.read(8192, &mut found).expect("read");
    assert_eq!(&found[..], &page[..]);
}

#[test]
fn read_only_file_is_not_shared() {
    let (directory, file, shared) = pool();
    drop((file, shared));
    let path = directory.path().join("pool");
    let file = DeviceFile::open(&path, FileAccess::ReadOnly, IfMissing::Fail).expect("opened");
    assert!(SharedFile::of(&file).expect("examined").is_none());
}
