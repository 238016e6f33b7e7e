//! The driver against a controller that answers arbitrarily: it never panics or hangs, and never reports the end of
//! a command twice or of a command that it did not submit.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use reprise_buffers::Region;
use reprise_nvme::emulated::{EmulatedController, EmulatedMemory};
use reprise_nvme::spec::{CQE_BYTES, Command, SQE_BYTES, offset};
use reprise_nvme::{Backing, Controller, DmaMapping, DmaMemory, DriverSettings, NvmeError};

use crate::bench_rig::emulation;

/// Memory that the test writes too.
struct Memory(std::sync::Arc<EmulatedMemory>);

impl DmaMemory for Memory {
    fn address(&self) -> u64 {
        self.0.address()
    }
    fn bytes(&self) -> usize {
        self.0.bytes()
    }
    fn word(&self, offset: usize) -> &AtomicU64 {
        self.0.word(offset)
    }
    fn half_word(&self, offset: usize) -> &AtomicU32 {
        self.0.half_word(offset)
    }
    fn part(&self, offset: usize, bytes: usize) -> Result<Memory, NvmeError> {
        self.0.part(offset, bytes).map(|part| Memory(std::sync::Arc::new(part)))
    }
}

/// An emulated controller whose memory the test overwrites: it remembers all of it.
struct Hostile {
    inner: EmulatedController,
    memory: Mutex<Vec<std::sync::Arc<EmulatedMemory>>>,
}

impl Backing for Hostile {
    type Memory = Memory;

    fn register_bytes(&self) -> usize {
        self.inner.register_bytes()
    }
    fn read(&self, offset: usize) -> u32 {
        self.inner.read(offset)
    }
    fn write(&self, at: usize, value: u32) {
        // Doorbells of I/O queues are not passed on: the test answers in the place of the controller.
        if at < offset::sq_tail(1, 4) {
            self.inner.write(at, value);
        }
    }
    fn allocate(&self, bytes: usize) -> Result<Memory, NvmeError> {
        let memory = std::sync::Arc::new(self.inner.allocate(bytes)?);
        self.memory.lock().expect("no panic").push(std::sync::Arc::clone(&memory));
        Ok(Memory(memory))
    }
    fn map_region(&self, region: &Region) -> Result<DmaMapping, NvmeError> {
        self.inner.map_region(region)
    }
    fn map_own_bar(&self, bar: u8, _offset: u64, _bytes: u64) -> Result<Memory, NvmeError> {
        Err(NvmeError::Unsupported(format!("BAR {bar}")))
    }
}

const ENTRIES: u32 = 8;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn arbitrary_completions_end_no_command_twice(
        answers in prop::collection::vec((any::<[u32; 4]>(), 0..ENTRIES as usize, any::<bool>()), 0..60),
    ) {
        let inner = EmulatedController::start(emulation()).expect("it starts");
        let backing = Hostile { inner, memory: Mutex::default() };
        let settings = DriverSettings { admin_timeout: Duration::from_secs(60), ..DriverSettings::default() };
        let mut controller = Controller::start(backing, settings).expect("it starts");
        let mut queue = controller.create_queue_pair(ENTRIES).expect("granted");
        let completions = {
            let all = controller.backing().memory.lock().expect("no panic");
            // The last three: submissions, completions, lists.
            std::sync::Arc::clone(&all[all.len() - 2])
        };
        prop_assert!(completions.bytes() >= ENTRIES as usize * CQE_BYTES && SQE_BYTES == 64);
        let (mut token, mut open) = (0_u64, BTreeSet::new());
        let mut ended = Vec::new();
        for (dwords, place, plausible) in answers {
            while queue.free() > 0 {
                if queue.submit(&Command::flush(1), token, Instant::now()).is_err() {
                    break;
                }
                open.insert(token);
                token += 1;
            }
            queue.ring();
            // Plausible answers are of this queue and a command that it can have; others are anything.
            let [a, b, c, d] = dwords;
            let dwords = if plausible { [a, b, 1 << 16 | c & 7, d & 0xffff_1007] } else { [a, b, c, d] };
            for (index, dword) in dwords.into_iter().enumerate() {
                completions.half_word(place * CQE_BYTES + 4 * index).store(dword, Ordering::Relaxed);
            }
            let result = queue.poll(&mut ended);
            for one in ended.drain(..) {
                prop_assert!(open.remove(&one.token), "token {} ends twice or was never submitted", one.token);
            }
            if let Err(error) = result {
                prop_assert!(matches!(error, NvmeError::Violation(_)), "{error}");
                prop_assert!(queue.submit(&Command::flush(1), token, Instant::now()).is_err());
                break;
            }
            prop_assert_eq!(queue.in_flight(), open.len());
        }
    }
}
