//! A device for each engine, of the same size, with access that bypasses the engine.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use reprise_buffers::{Arena, ArenaConfig, HugePolicy, PageBuffer, Span};
use reprise_io::simulated::{CrashMode, Fault, FaultKind, Image, SimulatedDevice, SimulatedSettings};
use reprise_io::{
    BlockDevice, Completion, DeviceFile, EngineChoice, EngineKind, EngineSettings, FileAccess, IO_ALIGN,
    IfMissing, IoEngine, Op, Reserve, Submission, Token, Wait, open_engine,
};
use reprise_nvme::emulated::{
    EmulatedController, Emulation, Fault as ControllerFault, FaultRule, Selection, Storage,
};
use reprise_nvme::spec::{Status, WRITE};
use reprise_nvme::{DeviceSettings, NvmeDevice};
use tempfile::TempDir;

/// Size of the device under test in bytes.
pub(crate) const DEVICE_BYTES: u64 = 16 << 20;

/// Maximum number of operations in flight.
pub(crate) const CAPACITY: usize = 16;

/// Longer than any operation of these tests: a test that waits this long has failed.
pub(crate) const FOREVER: Duration = Duration::from_secs(60);

/// Set for the process that [`Fixture::open_half_full`] starts.
const LIMITED_PROCESS: &str = "REPRISE_IO_TEST_LIMITED_PROCESS";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    IoUring,
    Plain,
    /// The driver in user space on an emulated controller, whose namespace is the file.
    UserNvme,
    /// The same without SGLs, and with logical blocks of 4,096 bytes.
    UserNvmePrp,
    Simulated,
}

pub(crate) struct Fixture {
    kind: Kind,
    directory: TempDir,
    simulated: SimulatedDevice,
    arena: Arena,
}

impl Fixture {
    pub(crate) fn new(kind: Kind) -> Fixture {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
        let config = ArenaConfig { bytes: 8 << 20, region_bytes: 4 << 20, huge: HugePolicy::Prefer };
        let arena = Arena::new(&config).expect("8 MiB");
        let simulated = simulated(Image::new(DEVICE_BYTES), FileAccess::ReadWrite);
        let fixture = Fixture { kind, directory, simulated, arena };
        let mut file =
            DeviceFile::open(&fixture.path(), FileAccess::ReadWrite, IfMissing::Create).expect("a file");
        file.preallocate(DEVICE_BYTES, Reserve::Bytes(0)).expect("16 MiB of space");
        fixture
    }

    pub(crate) fn open(&self) -> Box<dyn IoEngine> {
        match self.kind {
            Kind::Simulated => Box::new(self.simulated.open_engine().expect("a free device")),
            Kind::UserNvme | Kind::UserNvmePrp => self.open_controller(FileAccess::ReadWrite, Vec::new()),
            _ => self.open_file(&self.path(), FileAccess::ReadWrite),
        }
    }

    pub(crate) fn open_read_only(&self) -> Box<dyn IoEngine> {
        match self.kind {
            Kind::Simulated => {
                let device = simulated(self.simulated.image(), FileAccess::ReadOnly);
                Box::new(device.open_engine().expect("a free device"))
            }
            Kind::UserNvme | Kind::UserNvmePrp => self.open_controller(FileAccess::ReadOnly, Vec::new()),
            _ => self.open_file(&self.path(), FileAccess::ReadOnly),
        }
    }

    /// Opens an engine on a device whose second half has no space behind it. A real file needs a limit on the
    /// file size, which applies to a whole process. The test named `law` is therefore run once more in a
    /// separate process, and the caller gets `None` if it passed there.
    pub(crate) fn open_half_full(&self, law: &str) -> Option<Box<dyn IoEngine>> {
        if self.kind == Kind::Simulated {
            self.simulated.inject(Fault::at(FaultKind::Full, DEVICE_BYTES / 2..DEVICE_BYTES));
            return Some(self.open());
        }
        if matches!(self.kind, Kind::UserNvme | Kind::UserNvmePrp) {
            let block = 1 << self.block_power();
            let blocks = Some((DEVICE_BYTES / 2 / block, DEVICE_BYTES / block - 1));
            let on = Selection { opcode: Some(WRITE), blocks, ..Selection::default() };
            let full = FaultRule { on, fault: ControllerFault::Status(Status::CAPACITY) };
            return Some(self.open_controller(FileAccess::ReadWrite, vec![full]));
        }
        if std::env::var_os(LIMITED_PROCESS).is_some() {
            limit_file_size(DEVICE_BYTES / 2);
            return Some(self.open());
        }
        let module = if self.kind == Kind::IoUring { "io_uring" } else { "plain" };
        let output = Command::new(std::env::current_exe().expect("this test"))
            .args(["--exact", &format!("conformance::{module}::{law}")])
            .env(LIMITED_PROCESS, "1")
            .output()
            .expect("a process");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{}: {text}", output.status);
        None
    }

    /// Truncates the device behind the engine.
    pub(crate) fn truncate(&self, bytes: u64) {
        match self.kind {
            Kind::Simulated => self.simulated.truncate(bytes),
            _ => self.raw_file().set_len(bytes).expect("a truncated file"),
        }
    }

    /// Returns the contents that another process would find, or that survive the worst power loss of a
    /// simulated device, which ends with it.
    pub(crate) fn durable(&self, offset: u64, bytes: usize) -> Vec<u8> {
        let mut found = vec![0; bytes];
        match self.kind {
            Kind::Simulated => self.simulated.crash(CrashMode::UnsyncedDropped).read(offset, &mut found),
            _ => self.raw_file().read_exact_at(&mut found, offset).expect("readable"),
        }
        found
    }

    /// Returns the contents that any reader of the device sees.
    pub(crate) fn seen(&self, offset: u64, bytes: usize) -> Vec<u8> {
        let mut found = vec![0; bytes];
        match self.kind {
            Kind::Simulated => self.simulated.image().read(offset, &mut found),
            _ => self.raw_file().read_exact_at(&mut found, offset).expect("readable"),
        }
        found
    }

    /// Registered memory: `bytes` from `offset` of the arena's first region.
    pub(crate) fn registered(&self, offset: usize, bytes: usize) -> Span {
        self.arena.span(0, offset as u64, bytes as u64).expect("inside the region")
    }

    pub(crate) fn arena(&self) -> &Arena {
        &self.arena
    }

    fn open_file(&self, path: &Path, access: FileAccess) -> Box<dyn IoEngine> {
        let file = DeviceFile::open(path, access, IfMissing::Fail).expect("the file of the fixture");
        let (choice, kind) = match self.kind {
            Kind::IoUring => (EngineChoice::IoUring, EngineKind::IoUring),
            _ => (EngineChoice::Plain, EngineKind::Plain),
        };
        let regions = self.arena.regions().to_vec();
        let settings = EngineSettings { queue_depth: CAPACITY as u32, engine: choice, regions };
        let engine = open_engine(file, &settings)
            .unwrap_or_else(|error| panic!("this machine cannot run the suite for {kind}: {error}"));
        assert_eq!(engine.kind(), kind);
        engine
    }

    /// Size of a logical block of the emulated controller, as a power of two.
    fn block_power(&self) -> u8 {
        if self.kind == Kind::UserNvmePrp { 12 } else { 9 }
    }

    /// Starts an emulated controller with small transfers, so that most operations have several commands.
    fn open_controller(&self, access: FileAccess, faults: Vec<FaultRule>) -> Box<dyn IoEngine> {
        let storage = Storage::file(self.raw_file()).expect("a size");
        let emulation = Emulation {
            transfer_max: Some(32 << 10),
            sgl: self.kind == Kind::UserNvme,
            block_power: self.block_power(),
            faults,
            ..Emulation::of(storage)
        };
        let controller = EmulatedController::start(emulation).expect("it starts");
        let settings = DeviceSettings { access, ..DeviceSettings::default() };
        let device = NvmeDevice::open(controller, &settings).expect("one namespace");
        let regions = self.arena.regions().to_vec();
        let settings = EngineSettings { queue_depth: CAPACITY as u32, regions, ..EngineSettings::default() };
        let engine = Box::new(device).start_engine(&settings).expect("a queue pair");
        assert_eq!(engine.kind(), EngineKind::UserNvme);
        engine
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("device")
    }

    fn raw_file(&self) -> File {
        File::options().read(true).write(true).open(self.path()).expect("the file of the fixture")
    }
}

fn simulated(image: Image, access: FileAccess) -> SimulatedDevice {
    let settings = SimulatedSettings { seed: 7, capacity: CAPACITY, access, ..SimulatedSettings::default() };
    SimulatedDevice::new(image, settings).expect("sane settings")
}

/// Makes later writes of this process fail beyond `bytes` of any file, with EFBIG (setrlimit(2),
/// RLIMIT_FSIZE).
fn limit_file_size(bytes: u64) {
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: ignoring a signal runs no handler (signal(2)); the default action would end the process.
    let ignored = unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    assert_ne!(ignored, libc::SIG_ERR);
    // SAFETY: setrlimit(2) reads the struct that it is given.
    let limited = unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) };
    assert_eq!(limited, 0, "{}", std::io::Error::last_os_error());
}

/// Bytes that depend on seed and position, so that a block in a wrong place is detected.
pub(crate) fn pattern(seed: u64, bytes: usize) -> Vec<u8> {
    let mut value = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        value ^= value << 13;
        value ^= value >> 7;
        value ^= value << 17;
        value.to_le_bytes()
    };
    (0..bytes / 8).flat_map(|_| next()).collect()
}

pub(crate) fn page(seed: u64) -> Vec<u8> {
    pattern(seed, IO_ALIGN)
}

/// Creates a page buffer with the contents of `data`.
pub(crate) fn buffer(data: &[u8]) -> PageBuffer {
    let mut buffer = PageBuffer::new(data.len()).expect("whole pages");
    buffer.copy_from_slice(data);
    buffer
}

pub(crate) fn bytes_of(span: &Span) -> Vec<u8> {
    let mut bytes = vec![0; span.len()];
    span.copy_out(&mut bytes);
    bytes
}

pub(crate) fn read(token: u64, offset: u64, into: Vec<Span>) -> Submission {
    Submission { token: Token(token), op: Op::Read { offset, into } }
}

pub(crate) fn write(token: u64, offset: u64, from: Vec<Span>) -> Submission {
    Submission { token: Token(token), op: Op::Write { offset, from } }
}

pub(crate) fn sync(token: u64) -> Submission {
    Submission { token: Token(token), op: Op::Sync }
}

/// Submits an operation, which must be accepted.
pub(crate) fn submit(engine: &mut dyn IoEngine, submission: Submission) {
    engine.submit(submission).expect("there is room");
}

/// Waits until nothing is in flight.
pub(crate) fn finish(engine: &mut dyn IoEngine) -> Vec<Completion> {
    let start = std::time::Instant::now();
    let mut done = Vec::new();
    while engine.in_flight() > 0 {
        engine.reap(Wait::Until(FOREVER), &mut done).expect("a working engine");
        assert!(start.elapsed() < FOREVER, "{} operations never complete", engine.in_flight());
    }
    done
}

/// Runs one operation, which must succeed.
pub(crate) fn run(engine: &mut dyn IoEngine, submission: Submission) {
    let token = submission.token;
    submit(engine, submission);
    let done = finish(engine);
    assert_eq!(done.iter().map(|completion| completion.token).collect::<Vec<_>>(), [token]);
    if let Err(error) = &done[0].result {
        panic!("{error}");
    }
}
