//! The worker and the pool on an NVMe controller that this process drives: power losses on an emulated controller with
//! a volatile write cache.

use std::sync::{Arc, Mutex, PoisonError};

use reprise_buffers::Region;
use reprise_io::simulated::{CrashMode, Image};
use reprise_nvme::emulated::{EmulatedController, EmulatedMemory, Emulation, Storage};
use reprise_nvme::{Backing, DeviceSettings, DmaMapping, NvmeDevice, NvmeError};

use super::power_loss::{Coverage, Random, lives_of};
use super::test_bench::PoweredDevice;
use crate::device::DeviceContent;
use crate::device::open::RawDevice;
use crate::device::open::tests::open_block_device;
use crate::error::AgentError;

/// Number of runs, of three lives each. The controller has its own thread, so a seed does not reproduce a run.
const RUNS: u64 = 12;

/// Unit in which a write is torn: a logical block of the controller.
const BLOCK_BYTES: usize = 512;

/// An emulated controller whose power can be cut.
struct PoweredController {
    /// `None` after the power was cut: the function is gone from the bus.
    controller: Arc<Mutex<Option<EmulatedController>>>,
    seed: u64,
}

/// The driver's side of it.
struct Bus(Arc<Mutex<Option<EmulatedController>>>);

impl Bus {
    fn with<T>(&self, gone: T, use_it: impl FnOnce(&EmulatedController) -> T) -> T {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map_or(gone, use_it)
    }
}

impl Backing for Bus {
    type Memory = EmulatedMemory;

    fn register_bytes(&self) -> usize {
        self.with(0, Backing::register_bytes)
    }

    fn read(&self, offset: usize) -> u32 {
        self.with(u32::MAX, |controller| controller.read(offset))
    }

    fn write(&self, offset: usize, value: u32) {
        self.with((), |controller| controller.write(offset, value));
    }

    fn allocate(&self, bytes: usize) -> Result<EmulatedMemory, NvmeError> {
        self.with(Err(NvmeError::Gone), |controller| controller.allocate(bytes))
    }

    fn map_region(&self, region: &Region) -> Result<DmaMapping, NvmeError> {
        self.with(Err(NvmeError::Gone), |controller| controller.map_region(region))
    }

    fn map_own_bar(&self, bar: u8, offset: u64, bytes: u64) -> Result<EmulatedMemory, NvmeError> {
        self.with(Err(NvmeError::Gone), |controller| controller.map_own_bar(bar, offset, bytes))
    }
}

impl PoweredDevice for PoweredController {
    fn start(image: Image, seed: u64) -> Result<(PoweredController, RawDevice, DeviceContent), AgentError> {
        let mut contents = vec![0; usize::try_from(image.bytes()).expect("a few MiB")];
        image.read(0, &mut contents);
        let storage = Storage::Volatile { durable: contents.clone(), current: contents };
        let controller = EmulatedController::start(Emulation::of(storage)).expect("it starts");
        let controller = Arc::new(Mutex::new(Some(controller)));
        let device =
            NvmeDevice::open(Bus(controller.clone()), &DeviceSettings::default()).expect("one namespace");
        let (open, content) = open_block_device(Box::new(device))?;
        Ok((PoweredController { controller, seed }, open, content))
    }

    fn cut_power(&self, mode: CrashMode) -> Image {
        let controller = self.controller.lock().unwrap_or_else(PoisonError::into_inner).take();
        let (counters, mut namespaces) = controller.expect("the power is cut once").stop();
        assert_eq!((counters.shutdowns, counters.bad_addresses), (0, 0));
        let Some(Storage::Volatile { durable, current }) = namespaces.pop() else { panic!("one namespace") };
        let mut random = Random(self.seed);
        let mut image = Image::new(durable.len() as u64);
        let blocks =
            durable.chunks(BLOCK_BYTES).zip(current.chunks(BLOCK_BYTES)).zip((0..).step_by(BLOCK_BYTES));
        for ((durable, current), offset) in blocks {
            let survives = mode == CrashMode::PowerLost && durable != current && random.below(2) == 0;
            image.write(offset, if survives { current } else { durable });
        }
        image
    }
}

#[test]
fn durable_blocks_survive_power_loss_of_an_nvme_controller() {
    let coverage = (0..RUNS).map(|seed| lives_of::<PoweredController>(seed).0);
    let coverage = coverage.fold(Coverage::default(), Coverage::plus);
    println!("{coverage:?}");
    assert!(
        coverage.survived > 20 && coverage.missing > 0 && coverage.slots_reused > 0,
        "the power losses do not cover all cases: {coverage:?}"
    );
}
