//! `reprise bench nvme`: reads by the NVMe driver in user space.
//!
//! | controller | measured | next to it |
//! |---|---|---|
//! | named with `--pci` | driver and drive, through VFIO | nothing: the kernel has no access to it |
//! | none | driver and a controller that this process emulates on a file | bare io_uring loop on that file |
//!
//! The controller is only read. Figures of the emulation are those of this processor and of the page cache, not of a
//! drive. A drive answers reads of blocks that were never written without reading its flash.

mod emulated;
mod reads;

use anyhow::{Context, bail};
use reprise_buffers::{Arena, ArenaConfig, HugePolicy};
use reprise_io::{BlockDevice, EngineSettings, FileAccess, IoEngine, PciAddress};
use reprise_nvme::host::{Host, Obstacle};
use reprise_nvme::vfio::{PciFunction, VfioController};
use reprise_nvme::{Backing, DeviceSettings, NvmeDevice, OpenController};
use reprise_testkit::bench::Settings;
use reprise_testkit::bench::report::{Figure, Spread, Target, median};

use super::device::{Device, announce};
pub(super) use emulated::FILE_BYTES;
use reads::{DEPTH_MAX, Latencies, Reads};

/// Memory that is read into. Fewer bytes would measure the processor's cache.
pub(super) const BUFFER_BYTES: u64 = 64 << 20;

/// Arguments of `reprise bench nvme`.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct NvmeArgs {
    /// Read the controller at this PCI address, such as 0000:3b:00.0.
    ///
    /// It must be bound to vfio-pci. The benchmark writes nothing to it.
    #[arg(long, value_name = "ADDRESS")]
    pci: Option<PciAddress>,
    /// Read this namespace of the controller [default: the only one].
    #[arg(long, value_name = "ID", requires = "pci")]
    namespace: Option<u32>,
}

/// Measures the named controller, or an emulated one.
pub(crate) fn run(args: &NvmeArgs, settings: &Settings) -> anyhow::Result<Vec<Figure>> {
    match args.pci {
        Some(address) => on_controller(address, args.namespace, settings),
        None => emulated::run(settings),
    }
}

fn on_controller(
    address: PciAddress,
    namespace: Option<u32>,
    settings: &Settings,
) -> anyhow::Result<Vec<Figure>> {
    let obstacles = obstacles(&Host::at("/"), address);
    if !obstacles.is_empty() {
        let steps: Vec<String> =
            (1..).zip(obstacles).map(|(step, one)| format!("\n  {step}. {one}")).collect();
        bail!("cannot measure the NVMe controller at {address}:{}", steps.concat());
    }
    let backing = VfioController::open(PciFunction::new(address))
        .with_context(|| format!("cannot open the NVMe controller at {address}"))?;
    let memory = memory()?;
    let driver = Driver::open(backing, namespace, &memory)?;
    announce(
        settings,
        Device {
            benchmark: "nvme",
            device: format!("{} at {address}", driver.name),
            code: "driver in user space, through VFIO",
            reason: None,
        },
    );
    let mut engine = driver.engine;
    let mut figures = Vec::new();
    for reads in Reads::all(driver.bytes) {
        let (mut rates, mut latencies) = (Vec::new(), Latencies::new());
        reads.run(&mut *engine, &memory, &mut latencies)?;
        for _ in settings.rounds(reads.label()) {
            rates.push(reads.run(&mut *engine, &memory, &mut latencies)?);
        }
        let spread = Spread::of(&rates);
        let figure = Figure::absolute(reads.name(), median(rates), reads.unit(), Target::None);
        figures.push(Figure { spread, ..figure });
        figures.extend(reads.latency_figures(&latencies));
    }
    Ok(figures)
}

/// Returns what keeps a driver in user space from using a controller, in the order of removing it.
fn obstacles(host: &Host, address: PciAddress) -> Vec<Obstacle> {
    let function = match host.nvme_function(address) {
        Ok(function) => function,
        Err(obstacle) => return vec![obstacle],
    };
    let mut own = function.obstacles();
    if !function.uses.is_empty() {
        // The machine need not be set up for a controller that the kernel keeps. Uses are the first obstacles.
        own.truncate(function.uses.len());
        return own;
    }
    host.obstacles(BUFFER_BYTES).into_iter().chain(own).collect()
}

fn memory() -> anyhow::Result<Arena> {
    let config = ArenaConfig { bytes: BUFFER_BYTES, region_bytes: BUFFER_BYTES, huge: HugePolicy::Prefer };
    Arena::new(&config).context("memory of the reads")
}

/// A started controller, open for reads.
struct Driver {
    engine: Box<dyn IoEngine>,
    /// Model and serial number.
    name: String,
    /// Size of the namespace in bytes.
    bytes: u64,
}

impl Driver {
    /// Starts a controller, and opens a namespace for reads only.
    fn open<B: Backing>(backing: B, namespace: Option<u32>, memory: &Arena) -> anyhow::Result<Driver> {
        let access = FileAccess::ReadOnly;
        let settings = DeviceSettings { namespace, access, ..DeviceSettings::default() };
        let device = NvmeDevice::open(backing, &settings)?;
        let identity = device.controller().identity();
        let name = format!("{} {}", identity.model, identity.serial);
        let bytes = device.size();
        let queue_depth = u32::try_from(DEPTH_MAX).expect("a small depth");
        let regions = memory.regions().to_vec();
        let settings = EngineSettings { queue_depth, regions, ..EngineSettings::default() };
        Ok(Driver { engine: Box::new(device).start_engine(&settings)?, name, bytes })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn obstacles_are_listed_in_the_order_of_removing_them() {
        let root = tempfile::tempdir().expect("a folder");
        let address: PciAddress = "0000:3b:00.0".parse().expect("an address");
        let texts = || -> Vec<String> {
            obstacles(&Host::at(root.path()), address).iter().map(ToString::to_string).collect()
        };
        assert!(matches!(&texts()[..], [one] if one.contains("no function is at")), "{:?}", texts());
        let function = root.path().join("sys/bus/pci/devices/0000:3b:00.0");
        let driver = root.path().join("sys/bus/pci/drivers/nvme");
        fs::create_dir_all(function.join("nvme/nvme0/nvme0n1")).expect("a folder");
        fs::create_dir_all(&driver).expect("a folder");
        fs::write(function.join("class"), "0x010802\n").expect("written");
        symlink(driver, function.join("driver")).expect("a link");
        let steps = texts();
        assert!(steps[0].contains("IOMMU") && steps[1].contains("modprobe vfio-pci"), "{steps:?}");
        assert!(steps.last().expect("a last step").contains("driverctl set-override"), "{steps:?}");
        fs::create_dir_all(root.path().join("proc")).expect("a folder");
        fs::write(root.path().join("proc/mounts"), "/dev/nvme0n1 /data xfs rw 0 0\n").expect("written");
        let steps = texts();
        assert!(matches!(&steps[..], [one] if one.contains("mounted at /data")), "{steps:?}");
    }
}
