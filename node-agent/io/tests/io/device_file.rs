//! Opening, locking and sizing the file under an engine.

use std::ffi::CString;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use reprise_buffers::PageBuffer;
use reprise_io::{
    Caching, DeviceFile, EngineChoice, EngineSettings, FileAccess, IfMissing, IoEngine, IoError, IoErrorKind,
    Op, Preallocation, Reserve, Submission, Token, Wait, open_engine,
};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;

/// Tests run on file systems of any size.
const NO_RESERVE: Reserve = Reserve::Bytes(0);

/// Set for the processes that tests of killed holders start: the path that they write to.
const CHILD_PATH: &str = "REPRISE_IO_TEST_CHILD_PATH";

fn directory() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory")
}

/// Returns a directory, and the path of a pool in it that does not exist yet.
fn pool_path() -> (TempDir, PathBuf) {
    let directory = directory();
    let path = directory.path().join("pool");
    (directory, path)
}

fn create(path: &Path) -> DeviceFile {
    DeviceFile::open(path, FileAccess::ReadWrite, IfMissing::Create).expect("a new file")
}

/// The error of an open that does not wait for a holder.
fn open_error(path: &Path, access: FileAccess) -> IoError {
    DeviceFile::open_within(path, (access, IfMissing::Fail), Duration::ZERO).expect_err("it must be refused")
}

#[test]
fn a_new_file_is_empty_private_and_direct() {
    let (_directory, path) = pool_path();
    let file = create(&path);
    assert_eq!((file.size(), file.path()), (0, path.as_path()));
    assert_eq!(file.caching(), Caching::Direct, "the file system of the target directory lacks O_DIRECT");
    assert_eq!(std::fs::metadata(&path).expect("it exists").mode() & 0o777, 0o600);
}

#[test]
fn preallocation_reserves_space_without_writing_and_never_shrinks() {
    let (_directory, path) = pool_path();
    let mut file = create(&path);
    assert_eq!(file.preallocate(8 * MIB, NO_RESERVE).expect("space"), Preallocation::Reserved);
    assert_eq!(file.size(), 8 * MIB);
    let found = std::fs::metadata(&path).expect("it exists");
    assert!(found.len() == 8 * MIB && found.blocks() * 512 >= 8 * MIB);
    assert_eq!(file.preallocate(MIB, NO_RESERVE).expect("space"), Preallocation::Reserved);
    assert_eq!(file.size(), 8 * MIB);
}

#[test]
fn preallocating_more_than_the_available_space_fails_and_changes_nothing() {
    let (_directory, path) = pool_path();
    let mut file = create(&path);
    file.preallocate(MIB, NO_RESERVE).expect("space");
    let error = file.preallocate(1 << 60, NO_RESERVE).expect_err("an exbibyte");
    assert_eq!(error.kind(), IoErrorKind::NoSpace);
    assert!(error.to_string().contains("configure a smaller pool"), "{error}");
    assert_eq!((file.size(), std::fs::metadata(&path).expect("it exists").len()), (MIB, MIB));
}

#[test]
fn a_file_leaves_the_reserve_on_its_file_system_or_is_refused_with_the_possible_size() {
    assert_eq!(Reserve::Default.of(10 << 30), 1 << 30);
    assert_eq!(Reserve::Default.of(100_000_000_000), 5_000_000_000);
    let (_directory, path) = pool_path();
    let mut file = create(&path);
    file.preallocate(MIB, NO_RESERVE).expect("space");
    let error = file.preallocate(2 * MIB, Reserve::Bytes(1 << 60)).expect_err("an exbibyte stays free");
    assert_eq!(error.kind(), IoErrorKind::NoSpace);
    let text = error.to_string();
    assert!(text.contains("at most 1048576 bytes") && text.contains("pool.reserve_bytes"), "{text}");
    assert_eq!(file.size(), MIB);
    // A file that does not grow needs no reserve: it has its space.
    file.preallocate(MIB, Reserve::Bytes(1 << 60)).expect("its space is there");
}

#[test]
fn a_second_open_is_in_use_until_the_first_is_dropped() {
    let (_directory, path) = pool_path();
    let first = create(&path);
    for access in [FileAccess::ReadWrite, FileAccess::ReadOnly] {
        let error = open_error(&path, access);
        assert_eq!(error.kind(), IoErrorKind::InUse);
        assert!(error.to_string().contains("two agents cannot share a pool"), "{error}");
    }
    drop(first);
    create(&path);
}

#[test]
fn readers_share() {
    let (_directory, path) = pool_path();
    drop(create(&path));
    let read = || DeviceFile::open(&path, FileAccess::ReadOnly, IfMissing::Fail).expect("shared");
    let _both = (read(), read());
    assert_eq!(open_error(&path, FileAccess::ReadWrite).kind(), IoErrorKind::InUse);
}

#[test]
fn an_unlocked_reader_sees_the_writes_of_the_lock_holder() {
    let (_directory, path) = pool_path();
    let open_unlocked =
        || DeviceFile::open(&path, FileAccess::ReadUnlocked, IfMissing::Fail).expect("opens without a lock");
    assert_eq!(
        open_error(&path, FileAccess::ReadUnlocked).kind(),
        IoErrorKind::Unavailable,
        "it creates nothing"
    );
    let mut holder = create(&path);
    holder.preallocate(MIB, NO_RESERVE).expect("space");
    let mut writer = open_engine(holder, &EngineSettings::default()).expect("an engine");
    let reader = open_unlocked();
    let mut page = PageBuffer::new(4096).expect("a page");
    for byte in [3, 4] {
        page.fill(byte);
        let op = Op::Write { offset: 8192, from: vec![page.span()] };
        complete(writer.as_mut(), op).expect("written");
        page.fill(0);
        reader.read(8192, &mut page).expect("inside");
        assert!(page.iter().all(|read| *read == byte));
    }
    // Dropping it does not release the other's lock.
    drop(reader);
    assert_eq!(open_error(&path, FileAccess::ReadWrite).kind(), IoErrorKind::InUse);
    // While it is open, others can acquire the lock.
    let reader = open_unlocked();
    drop(writer);
    drop(create(&path));
    drop((open_unlocked(), reader));
}

#[test]
fn an_unlocked_reader_can_use_every_engine_but_not_write() {
    let (_directory, path) = pool_path();
    let mut holder = create(&path);
    holder.preallocate(MIB, NO_RESERVE).expect("space");
    for engine in [EngineChoice::Plain, EngineChoice::IoUring] {
        let file = DeviceFile::open(&path, FileAccess::ReadUnlocked, IfMissing::Fail).expect("opens");
        let mut reader =
            open_engine(file, &EngineSettings { engine, ..EngineSettings::default() }).expect("an engine");
        let mut page = PageBuffer::new(4096).expect("a page");
        complete(reader.as_mut(), Op::Read { offset: 0, into: vec![page.span()] }).expect("inside");
        page.fill(9);
        let error = complete(reader.as_mut(), Op::Write { offset: 0, from: vec![page.span()] });
        let error = error.expect_err("a file that was opened for reading");
        assert_eq!(error.kind(), IoErrorKind::Invalid);
        assert!(error.to_string().contains("read"), "{error}");
        holder.read(0, &mut page).expect("inside");
        assert!(page.iter().all(|byte| *byte == 0), "nothing was written");
    }
}

/// Runs one operation to completion.
fn complete(engine: &mut dyn IoEngine, op: Op) -> Result<(), IoError> {
    engine.submit(Submission { token: Token(0), op }).expect("an idle engine accepts an operation");
    let mut done = Vec::new();
    while done.is_empty() {
        engine.reap(Wait::Until(Duration::from_secs(60)), &mut done).expect("a working engine");
    }
    done.remove(0).result
}

#[test]
fn the_lock_ends_with_the_engine() {
    let (_directory, path) = pool_path();
    for engine in [EngineChoice::Plain, EngineChoice::IoUring] {
        let mut file = create(&path);
        file.preallocate(MIB, NO_RESERVE).expect("space");
        let opened =
            open_engine(file, &EngineSettings { engine, ..EngineSettings::default() }).expect("an engine");
        assert_eq!(open_error(&path, FileAccess::ReadWrite).kind(), IoErrorKind::InUse);
        drop(opened);
        create(&path);
    }
}

#[test]
fn discards_only_a_file_that_this_open_created() {
    let (directory, path) = pool_path();
    create(&path).discard();
    assert!(!path.exists(), "created and discarded");
    drop(create(&path));
    create(&path).discard();
    assert!(path.exists(), "it was there before");
    let replaced = create(&directory.path().join("other"));
    std::fs::rename(&path, directory.path().join("other")).expect("renamed");
    replaced.discard();
    assert!(directory.path().join("other").exists(), "the path names another file now");
}

#[test]
fn does_not_open_a_file_that_was_removed_during_the_wait_for_its_lock() {
    let (_directory, path) = pool_path();
    for _ in 0..20 {
        let given_up = create(&path);
        let opened = std::thread::scope(|scope| {
            // It may be waiting for the lock already or start later: in both cases it gets a file that has a
            // name.
            let waiting = scope.spawn(|| create(&path));
            given_up.discard();
            waiting.join().expect("opened")
        });
        let identity = |found: std::fs::Metadata| (found.dev(), found.ino());
        let open = File::from(opened.as_fd().try_clone_to_owned().expect("a descriptor"));
        let open = identity(open.metadata().expect("open"));
        assert_eq!(std::fs::metadata(&path).map(identity).expect("it has a name"), open);
        drop(opened);
        std::fs::remove_file(&path).expect("removed");
    }
}

#[test]
fn reads_pages_without_an_engine() {
    let (_directory, path) = pool_path();
    std::fs::write(&path, [7; 8192]).expect("written");
    let file = create(&path);
    let mut page = PageBuffer::new(4096).expect("a page");
    file.read(4096, &mut page).expect("inside");
    assert!(page.iter().all(|byte| *byte == 7));
    assert_eq!(file.read(8192, &mut page).expect_err("the end").kind(), IoErrorKind::ShortTransfer);
}

#[test]
fn a_killed_process_releases_the_lock() {
    if let Some(path) = std::env::var_os(CHILD_PATH) {
        return write_until_killed(&PathBuf::from(path));
    }
    let (_directory, path) = pool_path();
    create(&path).preallocate(64 * MIB, NO_RESERVE).expect("space");
    let test = "device_file::a_killed_process_releases_the_lock";
    for round in 0..5 {
        start_and_kill_writer(&path, &["--exact", test, "--nocapture"], || {
            if round == 0 {
                assert_eq!(open_error(&path, FileAccess::ReadWrite).kind(), IoErrorKind::InUse);
            }
        });
        create(&path);
    }
}

/// Runs this test binary as a process that keeps writes in flight, and kills it after `check`.
fn start_and_kill_writer(path: &Path, arguments: &[&str], check: impl FnOnce()) {
    let mut child = Command::new(std::env::current_exe().expect("this test"))
        .args(arguments)
        .env(CHILD_PATH, path)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("a child");
    // The child writes a byte to stderr when its writes are in flight.
    let mut stderr = child.stderr.take().expect("piped");
    std::io::Read::read_exact(&mut stderr, &mut [0]).expect("the child works");
    check();
    child.kill().expect("alive");
    child.wait().expect("dead");
}

/// Keeps writes in flight until the process is killed.
fn write_until_killed(path: &Path) {
    let mut engine = open_engine(create(path), &EngineSettings::default()).expect("an engine");
    let mut idle: Vec<PageBuffer> = (0..16).map(|_| PageBuffer::new(2 << 20).expect("whole pages")).collect();
    for (index, buffer) in (0..).zip(&mut idle) {
        let op = Op::Write { offset: index * 2 * MIB, from: vec![buffer.span()] };
        engine.submit(Submission { token: Token(index), op }).expect("there is room");
    }
    let mut done = Vec::new();
    for round in 0u64.. {
        engine.reap(Wait::Until(Duration::from_secs(60)), &mut done).expect("a working engine");
        for completion in done.drain(..) {
            let (token, op) = (completion.token, completion.op);
            engine.submit(Submission { token, op }).expect("one has just ended");
        }
        if round == 8 {
            std::io::Write::write_all(&mut std::io::stderr(), b"w").expect("the parent listens");
        }
    }
}

#[test]
fn rejects_a_path_that_is_neither_file_nor_device() {
    let directory = directory();
    let error = open_error(directory.path(), FileAccess::ReadWrite);
    assert_eq!(error.kind(), IoErrorKind::Unavailable);
    assert!(error.to_string().contains("expected a file or a block device"), "{error}");
    assert_eq!(open_error(Path::new("/dev/null"), FileAccess::ReadWrite).kind(), IoErrorKind::Unavailable);
    let missing = directory.path().join("missing");
    assert_eq!(open_error(&missing, FileAccess::ReadWrite).kind(), IoErrorKind::Unavailable);
}

#[test]
fn rejects_a_queue_depth_outside_its_range() {
    let directory = directory();
    for queue_depth in [0, reprise_io::QUEUE_DEPTH_MAX + 1] {
        let file = create(&directory.path().join("pool"));
        let settings = EngineSettings { queue_depth, ..EngineSettings::default() };
        let error = open_engine(file, &settings).err().expect("refused");
        assert_eq!(error.kind(), IoErrorKind::Invalid);
    }
}

/// Runs `test` with a read-only tmpfs that only its thread sees.
fn with_read_only_tmpfs(test: impl FnOnce(&Path) + Send) {
    let directory = directory();
    let point = directory.path();
    let c_point = CString::new(point.as_os_str().as_bytes()).expect("no zero in it");
    let mount = |source: &std::ffi::CStr, target: &std::ffi::CStr, flags: libc::c_ulong| {
        let (source, kind, options) = (source.as_ptr(), c"tmpfs".as_ptr(), c"size=1m".as_ptr().cast());
        // SAFETY: C strings that outlive the call (mount(2)).
        let result = unsafe { libc::mount(source, target.as_ptr(), kind, flags, options) };
        assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    };
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            // SAFETY: unshare(2) takes flags; a thread may have a private mount namespace.
            let unshared = unsafe { libc::unshare(libc::CLONE_NEWNS) };
            assert_eq!(unshared, 0, "{}", std::io::Error::last_os_error());
            mount(c"none", c"/", libc::MS_REC | libc::MS_PRIVATE);
            mount(c"tmpfs", &c_point, 0);
            File::create(point.join("existing")).expect("a file");
            mount(c"tmpfs", &c_point, libc::MS_REMOUNT | libc::MS_RDONLY);
            test(point);
        });
        thread.join().expect("the test holds");
    });
}

#[test]
#[ignore = "needs CAP_SYS_ADMIN to mount a file system: run with --ignored as root"]
fn a_read_only_file_system_is_unavailable_for_writing_and_readable() {
    with_read_only_tmpfs(|point| {
        let existing = point.join("existing");
        assert_eq!(open_error(&existing, FileAccess::ReadWrite).kind(), IoErrorKind::Unavailable);
        let created = DeviceFile::open(&point.join("new"), FileAccess::ReadWrite, IfMissing::Create);
        assert_eq!(created.expect_err("read-only").kind(), IoErrorKind::Unavailable);
        DeviceFile::open(&existing, FileAccess::ReadOnly, IfMissing::Fail).expect("readable");
    });
}

/// A loop device, detached when this is dropped.
struct LoopDevice(PathBuf);

impl LoopDevice {
    fn new(file: &Path, bytes: u64) -> LoopDevice {
        File::create(file).and_then(|file| file.set_len(bytes)).expect("a file with holes");
        let output = Command::new("losetup").args(["--find", "--show"]).arg(file).output();
        let output = output.expect("losetup of util-linux");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        LoopDevice(PathBuf::from(String::from_utf8(output.stdout).expect("a path").trim()))
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let detached = Command::new("losetup").arg("--detach").arg(&self.0).status();
        assert!(std::thread::panicking() || detached.is_ok_and(|status| status.success()), "{:?}", self.0);
    }
}

/// Claims a block device exclusively, as a file system or another agent does.
fn claim(device: &Path) -> File {
    let mut options = File::options();
    options.read(true).write(true).custom_flags(libc::O_EXCL).open(device).expect("a free device")
}

#[test]
#[ignore = "needs loop devices: run with --ignored as root"]
fn waits_until_the_former_holder_has_released_a_block_device_and_then_names_the_cause() {
    let directory = directory();
    let device = LoopDevice::new(&directory.path().join("device"), 64 * MIB);
    let open = || DeviceFile::open(&device.0, FileAccess::ReadWrite, IfMissing::Fail);
    let holder = claim(&device.0);
    let opened = std::thread::scope(|scope| {
        let waiting = scope.spawn(open);
        // It may start to open later: then it does not have to wait.
        std::thread::sleep(Duration::from_millis(300));
        drop(holder);
        waiting.join().expect("no panic")
    });
    assert_eq!(opened.expect("it was released").size(), 64 * MIB);
    let _holder = claim(&device.0);
    let error = open_error(&device.0, FileAccess::ReadWrite);
    assert_eq!(error.kind(), IoErrorKind::InUse);
    let text = error.to_string();
    assert!(text.contains("another process has it open exclusively. Release it"), "{text}");
}

#[test]
#[ignore = "needs loop devices: run with --ignored as root"]
fn opens_a_block_device_at_once_after_its_holder_was_killed() {
    if let Some(path) = std::env::var_os(CHILD_PATH) {
        return write_until_killed(&PathBuf::from(path));
    }
    let directory = directory();
    let device = LoopDevice::new(&directory.path().join("device"), 64 * MIB);
    let test = "device_file::opens_a_block_device_at_once_after_its_holder_was_killed";
    for _ in 0..10 {
        start_and_kill_writer(&device.0, &["--exact", test, "--ignored", "--nocapture"], || {});
        let opened = DeviceFile::open(&device.0, FileAccess::ReadWrite, IfMissing::Fail);
        opened.expect("the device of a killed process");
    }
}

#[test]
fn an_erased_file_reads_as_zeroes_and_keeps_its_size() {
    let (_directory, path) = pool_path();
    std::fs::write(&path, vec![7; 3 * MIB as usize + 4096]).expect("written");
    let file = DeviceFile::open(&path, FileAccess::ReadWrite, IfMissing::Fail).expect("the file exists");
    file.erase().expect("erased");
    drop(file);
    let content = std::fs::read(&path).expect("the file exists");
    assert_eq!(content.len() as u64, 3 * MIB + 4096);
    assert!(content.iter().all(|byte| *byte == 0));
}

#[test]
fn erasing_the_ends_keeps_the_rest_and_nothing_of_a_small_file() {
    let (_directory, path) = pool_path();
    for (size, kept) in [(4 * MIB, MIB..3 * MIB), (MIB, MIB..MIB)] {
        let size = usize::try_from(size).expect("it fits");
        std::fs::write(&path, vec![7; size]).expect("written");
        let file = DeviceFile::open(&path, FileAccess::ReadWrite, IfMissing::Fail).expect("the file exists");
        file.erase_ends(MIB).expect("erased");
        drop(file);
        let content = std::fs::read(&path).expect("the file exists");
        let expected = |at: usize| if kept.contains(&(at as u64)) { 7 } else { 0 };
        assert!(content.len() == size && content.iter().enumerate().all(|(at, byte)| *byte == expected(at)));
    }
}
