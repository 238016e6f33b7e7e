//! Tests specific to the io_uring engine: kernels that reject it in whole or in part, and its thread
//! affinity.
//!
//! The rejections are real: a seccomp filter on the test's own thread, as container runtimes install it.

use std::io;
use std::path::Path;
use std::time::Duration;

use reprise_buffers::{Arena, ArenaConfig, HugePolicy, PageBuffer, PageBufferPool};
use reprise_io::{
    CloseOutcome, DeviceFile, EngineChoice, EngineKind, EngineSettings, FileAccess, IO_ALIGN, IfMissing,
    IoEngine, IoErrorKind, Op, Reserve, RingMode, Submission, Token, Wait, open_engine, probe,
};
use tempfile::TempDir;

const BYTES: u64 = 1 << 20;

/// Opcode of `io_uring_register(2)` that registers buffers.
const REGISTER_BUFFERS: u32 = 0;

/// `io_uring_register(2)`: enable rings that were set up disabled.
const REGISTER_ENABLE_RINGS: u32 = 12;

fn directory() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory")
}

fn device(directory: &TempDir) -> DeviceFile {
    let path = directory.path().join("device");
    let mut file = DeviceFile::open(&path, FileAccess::ReadWrite, IfMissing::Create).expect("a file");
    file.preallocate(BYTES, Reserve::Bytes(0)).expect("space");
    file
}

fn arena() -> Arena {
    let config = ArenaConfig { bytes: 4 << 20, region_bytes: 2 << 20, huge: HugePolicy::Prefer };
    Arena::new(&config).expect("4 MiB")
}

fn settings(engine: EngineChoice, arena: &Arena) -> EngineSettings {
    EngineSettings { queue_depth: 8, engine, regions: arena.regions().to_vec() }
}

fn read_page(engine: &mut dyn IoEngine, target: &mut PageBuffer) -> Result<(), reprise_io::IoError> {
    let op = Op::Read { offset: 0, into: vec![target.span()] };
    engine.submit(Submission { token: Token(1), op }).expect("there is room");
    let mut done = Vec::new();
    while engine.in_flight() > 0 {
        engine.reap(Wait::Until(Duration::from_secs(60)), &mut done)?;
    }
    done.remove(0).result
}

/// Runs `test` on a thread for which `call` (with this second argument, if any) fails with `errno`.
fn without(call: libc::c_long, second_argument: Option<u32>, errno: i32, test: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            deny(call, second_argument, errno).expect("a seccomp filter");
            test();
        });
        thread.join().expect("the refusal is handled");
    });
}

fn deny(call: libc::c_long, second_argument: Option<u32>, errno: i32) -> io::Result<()> {
    let load = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    let equal = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    let give = (libc::BPF_RET | libc::BPF_K) as u16;
    let step = |code, k, jt, jf| libc::sock_filter { code, jt, jf, k };
    // struct seccomp_data: the number at 0, the low half of the second argument at 24 (little endian).
    let mut filter = vec![step(load, 0, 0, 0)];
    match second_argument {
        None => filter.push(step(equal, call as u32, 0, 1)),
        Some(value) => {
            filter.extend([step(equal, call as u32, 0, 3), step(load, 24, 0, 0), step(equal, value, 0, 1)]);
        }
    }
    filter.push(step(give, libc::SECCOMP_RET_ERRNO | errno as u32, 0, 0));
    filter.push(step(give, libc::SECCOMP_RET_ALLOW, 0, 0));
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: PR_SET_NO_NEW_PRIVS takes integers (prctl(2)).
    let promised = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    // SAFETY: the program is valid for the call, which copies it (seccomp(2)); it binds this thread only.
    let filtered =
        unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) };
    if promised != 0 || filtered != 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[test]
fn uses_the_plain_engine_when_the_kernel_rejects_io_uring() {
    for errno in [libc::EPERM, libc::ENOSYS, libc::ENOMEM] {
        let directory = directory();
        without(libc::SYS_io_uring_setup, None, errno, || {
            let arena = arena();
            let mut engine =
                open_engine(device(&directory), &settings(EngineChoice::Auto, &arena)).expect("plain");
            assert_eq!(engine.kind(), EngineKind::Plain);
            read_page(engine.as_mut(), &mut PageBufferPool::new(0).take()).expect("a working engine");
        });
    }
}

#[test]
fn requiring_unavailable_io_uring_is_an_error_with_hints() {
    let directory = directory();
    without(libc::SYS_io_uring_setup, None, libc::EPERM, || {
        let settings = settings(EngineChoice::IoUring, &arena());
        let error = open_engine(device(&directory), &settings).err().expect("refused");
        assert_eq!(error.kind(), IoErrorKind::Unsupported);
        assert!(error.to_string().contains("io_uring_disabled"), "{error}");
        let found = probe(&[]);
        assert_eq!(found.io_uring.expect_err("refused").kind(), IoErrorKind::Unsupported);
        assert!(found.registered_buffers.is_err());
    });
}

#[test]
fn uses_the_plain_engine_when_registered_files_are_rejected() {
    let directory = directory();
    // This rejects every registration, not only of files: without registered files the engine is not
    // worthwhile.
    without(libc::SYS_io_uring_register, None, libc::EINVAL, || {
        let engine = open_engine(device(&directory), &settings(EngineChoice::Auto, &arena())).expect("plain");
        assert_eq!(engine.kind(), EngineKind::Plain);
    });
}

#[test]
fn too_little_locked_memory_only_costs_registered_buffers() {
    let directory = directory();
    without(libc::SYS_io_uring_register, Some(REGISTER_BUFFERS), libc::ENOMEM, || {
        let arena = arena();
        assert!(probe(&arena.regions()).registered_buffers.is_err());
        let mut engine =
            open_engine(device(&directory), &settings(EngineChoice::Auto, &arena)).expect("an engine");
        assert_eq!(engine.kind(), EngineKind::IoUring);
        let op = Op::Read { offset: 0, into: vec![arena.span(0, 0, 4096).expect("inside")] };
        engine.submit(Submission { token: Token(1), op }).expect("there is room");
        let mut done = Vec::new();
        engine.reap(Wait::Until(Duration::from_secs(60)), &mut done).expect("a working engine");
        assert!(done[0].result.is_ok());
    });
}

#[test]
fn a_ring_that_cannot_be_entered_is_lost_and_leaks_its_operations() {
    let directory = directory();
    let mut target = PageBuffer::new(IO_ALIGN).expect("a page");
    without(libc::SYS_io_uring_register, Some(REGISTER_ENABLE_RINGS), libc::EPERM, || {
        let mut engine =
            open_engine(device(&directory), &settings(EngineChoice::Auto, &arena())).expect("an engine");
        let error = read_page(engine.as_mut(), &mut target).expect_err("it cannot be enabled");
        assert_eq!(error.kind(), IoErrorKind::Lost);
        assert_eq!(engine.close(), CloseOutcome::Leaked);
    });
    // The engine cannot know whether the kernel still uses the memory, so it is leaked, not freed.
    assert!(target.is_lent());
}

#[test]
fn an_engine_belongs_to_the_thread_that_used_it_first() {
    if probe(&[]).io_uring.expect("io_uring") != RingMode::DeferredTaskRun {
        panic!("NOT TESTED: this kernel (before 6.1) has no rings that belong to one thread");
    }
    let (directory, arena) = (directory(), arena());
    let mut engine =
        open_engine(device(&directory), &settings(EngineChoice::IoUring, &arena)).expect("an engine");
    let mut target = PageBuffer::new(IO_ALIGN).expect("a page");
    std::thread::scope(|scope| {
        let first = scope.spawn(|| read_page(engine.as_mut(), &mut target).expect("its thread"));
        first.join().expect("it worked");
    });
    let error = read_page(engine.as_mut(), &mut target).expect_err("another thread");
    assert_eq!(error.kind(), IoErrorKind::Invalid);
}

#[test]
fn dropping_an_engine_on_another_thread_leaks_operations_in_flight() {
    if probe(&[]).io_uring.expect("io_uring") != RingMode::DeferredTaskRun {
        panic!("NOT TESTED: this kernel (before 6.1) has no rings that belong to one thread");
    }
    let (directory, arena) = (directory(), arena());
    let file = device(&directory);
    let path = file.path().to_owned();
    let mut engine = open_engine(file, &settings(EngineChoice::IoUring, &arena)).expect("an engine");
    let mut target = PageBuffer::new(IO_ALIGN).expect("a page");
    std::thread::scope(|scope| {
        let first = scope.spawn(|| {
            // No completion, but the ring is entered and from here on belongs to this thread.
            engine.reap(Wait::Until(Duration::ZERO), &mut Vec::new()).expect("its thread");
            let op = Op::Read { offset: 0, into: vec![target.span()] };
            engine.submit(Submission { token: Token(1), op }).expect("there is room");
        });
        first.join().expect("it worked");
    });
    assert_eq!(engine.close(), CloseOutcome::Leaked);
    assert!(target.is_lent());
    assert_reopens(&path);
}

/// Waits for the lock of a leaked engine, which the kernel holds until it is done with the operations,
/// shortly after.
fn assert_reopens(path: &Path) {
    DeviceFile::open(path, FileAccess::ReadWrite, IfMissing::Fail).expect("unlocked");
}

#[test]
fn this_machine_has_io_uring_with_registered_buffers() {
    let arena = arena();
    let found = probe(&arena.regions());
    found.io_uring.expect("io_uring");
    assert_eq!(found.registered_buffers.expect("registered buffers"), arena.regions().len());
}
