//! Files, KV memory and libraries for backends.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use reprise_buffers::{Arena, ArenaConfig, HugePolicy, Span};
use reprise_cuda::store::verify::{Contents, EmulatedRings, device_bytes};
use reprise_cuda::store::{CuFile, GdsMover, HostMover, KvGeometry, KvMemory, LayerMover, StagedMover};
use reprise_io::{DeviceFile, FileAccess, HolderNumber, IfMissing, Reserve, SharedFile};
use reprise_nvme::emulated::{Emulation, Storage};
use tempfile::TempDir;

/// Limit of the opening of a library: it opens at once, or never.
pub(crate) const OPEN_LIMIT: Duration = Duration::from_secs(2);

/// Devices of each backend.
pub(crate) const DEVICES: usize = 2;

/// Backends that a machine without a GPU can run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Rings,
    Gds,
    Staged,
    Host,
}

impl Kind {
    pub(crate) const ALL: [Kind; 4] = [Kind::Rings, Kind::Gds, Kind::Staged, Kind::Host];
}

/// An open backend, with everything that it moves.
pub(crate) struct Rig {
    open: Open,
    pub(crate) memory: Contents,
    pub(crate) devices: Vec<Contents>,
    files: Vec<PathBuf>,
    _folder: TempDir,
}

enum Open {
    Rings(Box<EmulatedRings<'static>>),
    Other(Box<dyn LayerMover>),
}

impl Rig {
    pub(crate) fn new(kind: Kind, geometry: KvGeometry) -> Rig {
        Rig::with_emulation(kind, geometry, |emulation| emulation)
    }

    /// Opens a backend; a function changes emulated controllers.
    pub(crate) fn with_emulation(
        kind: Kind,
        geometry: KvGeometry,
        change: impl Fn(Emulation) -> Emulation,
    ) -> Rig {
        let folder = folder();
        let span = memory(geometry.bytes());
        let names = (0..DEVICES).map(|index| folder.path().join(format!("device-{index}")));
        let paths: Vec<PathBuf> = names.collect();
        let bytes = device_bytes(&geometry);
        let lent: Vec<File> = paths.iter().map(|path| lent_file(path, bytes)).collect();
        let regions: Vec<Span> = (0..DEVICES).map(|_| memory(bytes)).collect();
        let buffered = |path: &PathBuf| File::options().read(true).write(true).open(path).expect("a file");
        let mut devices: Vec<Contents> = paths.iter().map(|path| Contents::File(buffered(path))).collect();
        let kv = || KvMemory::Host(span.clone());
        let other = |mover: Box<dyn LayerMover>| Open::Other(mover);
        let open = match kind {
            Kind::Rings => {
                let storage = |path| Storage::file(buffered(path)).expect("a file");
                let emulations = paths.iter().map(|path| change(Emulation::of(storage(path)))).collect();
                Open::Rings(Box::new(EmulatedRings::start(geometry, &span, emulations, None).expect("rings")))
            }
            Kind::Gds => {
                let library = FakeCuFile::new(&[]).load().expect("a library");
                other(Box::new(GdsMover::new(&library, geometry, &kv(), lent).expect("registered")))
            }
            Kind::Staged => {
                let lent = lent.into_iter().map(|file| DeviceFile::lent(file).expect("direct I/O")).collect();
                other(Box::new(StagedMover::new(geometry, kv(), lent).expect("opened")))
            }
            Kind::Host => {
                devices = regions.iter().cloned().map(Contents::Host).collect();
                other(Box::new(HostMover::new(geometry, span.clone(), regions).expect("started")))
            }
        };
        Rig { open, memory: Contents::Host(span), devices, files: paths, _folder: folder }
    }

    pub(crate) fn mover(&mut self) -> &mut dyn LayerMover {
        match &mut self.open {
            Open::Rings(rings) => rings.mover(),
            Open::Other(mover) => &mut **mover,
        }
    }

    /// Returns what a check needs at once.
    pub(crate) fn parts(&mut self) -> (&mut dyn LayerMover, &Contents, &[Contents]) {
        let mover: &mut dyn LayerMover = match &mut self.open {
            Open::Rings(rings) => rings.mover(),
            Open::Other(mover) => &mut **mover,
        };
        (mover, &self.memory, &self.devices)
    }

    pub(crate) fn rings(&mut self) -> &mut EmulatedRings<'static> {
        match &mut self.open {
            Open::Rings(rings) => rings,
            Open::Other(mover) => panic!("{} has no rings", mover.name()),
        }
    }

    /// Shortens the file of a device.
    pub(crate) fn cut(&self, device: usize, bytes: u64) {
        let file = File::options().write(true).open(&self.files[device]).expect("a file");
        file.set_len(bytes).expect("shortened");
    }

    pub(crate) fn stop(self) {
        if let Open::Rings(rings) = self.open {
            rings.stop().expect("confirmed");
        }
    }
}

/// Creates a folder on a file system with direct I/O: that of the build.
pub(crate) fn folder() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder")
}

/// Allocates zeroed memory of whole pages.
pub(crate) fn memory(bytes: u64) -> Span {
    let whole = bytes.next_multiple_of(4096);
    let config = ArenaConfig { bytes: whole, region_bytes: whole, huge: HugePolicy::Never };
    Arena::new(&config).expect("memory").span(0, 0, whole).expect("inside")
}

/// Creates a pool file, and returns a descriptor of it as the agent lends one.
pub(crate) fn lent_file(path: &Path, bytes: u64) -> File {
    let mut device = DeviceFile::open(path, FileAccess::ReadWrite, IfMissing::Create).expect("created");
    device.preallocate(bytes, Reserve::Bytes(0)).expect("space");
    let shared = SharedFile::of(&device).expect("answered").expect("direct I/O");
    File::from(shared.share(HolderNumber(1)).expect("lent"))
}

/// A library of cuFile that is compiled for a test.
pub(crate) struct FakeCuFile {
    folder: TempDir,
}

impl FakeCuFile {
    pub(crate) fn new(macros: &[&str]) -> FakeCuFile {
        let folder = folder();
        let mut command = Command::new("cc");
        command.args(["-O2", "-fPIC", "-Wall", "-Werror", "-shared"]);
        command.args(macros.iter().map(|define| format!("-D{define}")));
        command.arg("-o").arg(folder.path().join("libcufile.so.0"));
        command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cuda/fake_cufile.c"));
        assert!(command.status().expect("the compiler starts").success(), "the library compiles");
        FakeCuFile { folder }
    }

    pub(crate) fn load(&self) -> Result<Arc<CuFile>, String> {
        // SAFETY: the library was compiled from a source with the interface of cuFile.
        unsafe { CuFile::load_from(self.folder.path().join("libcufile.so.0"), OPEN_LIMIT) }
    }
}
