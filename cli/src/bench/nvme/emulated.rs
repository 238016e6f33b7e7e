//! The driver on a controller that this process emulates on a file, next to the kernel's io_uring on the same file.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context;
use reprise_buffers::Arena;
use reprise_io::bare::{self, BareLoop};
use reprise_io::{Caching, DeviceFile, FileAccess, IfMissing};
use reprise_nvme::emulated::{EmulatedController, Emulation, Storage};
use reprise_testkit::bench::Settings;
use reprise_testkit::bench::report::{Figure, Target, paired};
use reprise_testkit::kv_function::mix;

use super::reads::{Latencies, Reads};
use super::{Driver, memory};
use crate::bench::device::{Device, announce};

/// Size of the file: the sequential reads of a run.
pub(in crate::bench) const FILE_BYTES: u64 = 128 << 20;

/// Bytes of one write of the file's contents.
const CHUNK_BYTES: u64 = 2 << 20;

/// File of the emulated namespace, removed when dropped.
struct NamespaceFile(PathBuf);

impl NamespaceFile {
    /// Writes the file, because reads of space that was never written cost no device time.
    fn create(directory: &Path) -> anyhow::Result<NamespaceFile> {
        fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))?;
        let path = directory.join(format!("nvme-{}.namespace", std::process::id()));
        let named = NamespaceFile(path);
        named.write().with_context(|| format!("cannot write {}", named.0.display()))?;
        Ok(named)
    }

    fn write(&self) -> std::io::Result<()> {
        let mut file = File::create(&self.0)?;
        for chunk in 0..FILE_BYTES / CHUNK_BYTES {
            let first = chunk * CHUNK_BYTES / 8;
            let words = first..first + CHUNK_BYTES / 8;
            file.write_all(&words.flat_map(|word| mix(word).to_le_bytes()).collect::<Vec<u8>>())?;
        }
        file.sync_all()
    }
}

impl Drop for NamespaceFile {
    fn drop(&mut self) {
        drop(fs::remove_file(&self.0));
    }
}

/// Measures the driver and the kernel in turn.
pub(super) fn run(settings: &Settings) -> anyhow::Result<Vec<Figure>> {
    announce(
        settings,
        Device {
            benchmark: "nvme",
            device: "none".to_owned(),
            code: "driver in user space, on an emulated controller",
            reason: Some("no controller was named: pass --pci ADDRESS to measure one".to_owned()),
        },
    );
    let named = NamespaceFile::create(&settings.directory)?;
    let path = &named.0;
    let contents = OpenOptions::new().read(true).write(true).open(path);
    let storage = Storage::file(contents.with_context(|| format!("cannot open {}", path.display()))?)
        .with_context(|| format!("cannot read the size of {}", path.display()))?;
    let memory = memory()?;
    let controller =
        EmulatedController::start(Emulation::of(storage)).context("cannot start the emulated controller")?;
    let mut engine = Driver::open(controller, None, &memory)?.engine;
    let file = DeviceFile::open(path, FileAccess::ReadUnlocked, IfMissing::Fail)?;
    let mut figures = Vec::new();
    for reads in Reads::all(FILE_BYTES) {
        let mut latencies = Latencies::new();
        let measured = paired(
            settings.rounds(reads.label()),
            || kernel(&reads, &file, &memory),
            || reads.run(&mut *engine, &memory, &mut latencies),
        )?;
        let against = (reference(&file, &reads), Target::None);
        figures.push(Figure::relative(reads.name(), measured, reads.unit(), against));
        figures.extend(reads.latency_figures(&latencies));
    }
    Ok(figures)
}

/// Reads the same offsets with a bare io_uring loop; returns the rate.
fn kernel(reads: &Reads, file: &DeviceFile, memory: &Arena) -> anyhow::Result<f64> {
    let run = bare::read_loop(&BareLoop {
        file,
        block_bytes: reads.bytes(),
        offsets: reads.offsets(),
        depth: reads.depth(),
        buffers: &reads.buffers(memory)?,
        sync_every: None,
    });
    Ok(reads.rate(run.context("the bare read loop")?.elapsed))
}

/// States that the kernel reads the device, and the emulation the page cache.
fn reference(file: &DeviceFile, reads: &Reads) -> String {
    let source = match file.caching() {
        Caching::Direct => "from the device (the emulated controller reads the page cache)",
        Caching::PageCache => "through the page cache",
    };
    format!("bare io_uring loop on the same file, depth {}, {source}", reads.depth())
}

#[cfg(test)]
mod tests {
    use reprise_testkit::output::Audience;

    use super::*;

    #[test]
    fn emulated_controller_and_kernel_are_measured_and_the_file_is_removed() {
        let folder = tempfile::tempdir().expect("a folder");
        let directory = folder.path().to_owned();
        let settings = Settings { directory, repetitions: 1, audience: Audience::Program };
        let figures = run(&settings).expect("it runs");
        let names: Vec<&str> = figures.iter().map(|figure| figure.name.as_str()).collect();
        assert_eq!(
            names,
            [
                "nvme.read_4kib_depth_1",
                "nvme.read_4kib_depth_1_p50",
                "nvme.read_4kib_depth_1_p99",
                "nvme.read_4kib_depth_32",
                "nvme.read_4kib_depth_32_p50",
                "nvme.read_4kib_depth_32_p99",
                "nvme.read_2mib_sequential_depth_8"
            ]
        );
        assert!(figures.iter().all(|figure| figure.value > 0.0), "{figures:?}");
        assert!(figures.iter().filter(|figure| figure.reference.is_some()).count() == 3, "{figures:?}");
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 0);
    }
}
