//! The ring against a controller that answers arbitrarily: the test writes completions in its place.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use reprise_cuda::ring::{
    BatchSettings, ContextStatus, Doorbells, HostRunner, QueueShape, Ring, RingMemory, RingQueue,
    RingSettings, Transfer,
};
use reprise_nvme::DataFormat;
use reprise_nvme::spec::CQE_BYTES;

use super::rig::{LONG, reads};

const ENTRIES: u32 = 8;

/// A completion of the test: four dwords, and whether they look like one of this queue.
type Answer = ([u32; 4], usize, bool);

/// A queue pair without a controller.
fn pair(memory: &RingMemory, registers: &RingMemory) -> RingQueue {
    let shape =
        QueueShape { id: 1, entries: ENTRIES, format: DataFormat::Sgl, transfer_max: 4096, block_bytes: 512 };
    let doorbells = Doorbells::mapped(registers.span(), 8, 12).expect("inside");
    RingQueue::new(shape, memory.clone(), 0x10_0000, doorbells).expect("valid")
}

fn answer(memory: &RingMemory, (dwords, place, plausible): Answer) {
    let [a, b, c, d] = dwords;
    let dwords = if plausible { [a, b, 1 << 16 | c & 7, d & 0x0001_1007] } else { [a, b, c, d] };
    let at = QueueShape::completions_offset(ENTRIES) + place * CQE_BYTES;
    for (index, dword) in dwords.into_iter().enumerate() {
        memory.span().atomic_u32(at + 4 * index).store(dword, Ordering::Release);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn arbitrary_completions_end_each_context_once_and_stop_nothing(
        answers in prop::collection::vec((any::<[u32; 4]>(), 0..ENTRIES as usize, any::<bool>()), 0..60),
        batches in prop::collection::vec(1_usize..20, 1..4),
    ) {
        let allocate = |bytes| RingMemory::allocate(bytes).expect("memory");
        let memory = allocate(QueueShape::memory_bytes(ENTRIES, DataFormat::Sgl));
        let registers = allocate(4096);
        let size = RingSettings { depth: 4, queues: 1, entries_max: ENTRIES as usize };
        let mut ring = Ring::on_host(&size).expect("valid");
        ring.init_queue(0, pair(&memory, &registers)).expect("free");
        let runner = HostRunner::start(&ring, [0]).expect("a thread");
        let timeout = Some(Duration::from_millis(3));
        let transfer = Transfer { address: 0x4000, block: 0, bytes: 512, checksum: 0 };
        for (token, count) in batches.iter().enumerate() {
            let settings = BatchSettings { timeout, token: token as u64, ..reads() };
            let mut iocb = ring.get_iocb(&settings).expect("free");
            for _ in 0..*count {
                prop_assert!(iocb.push(&transfer));
            }
            iocb.issue_io(0).expect("the queue exists");
        }
        for one in answers {
            answer(&memory, one);
        }
        let (start, mut ended) = (Instant::now(), Vec::new());
        while ended.len() < batches.len() {
            prop_assert!(start.elapsed() < LONG, "all batches end");
            let Some(cqe) = ring.wait_cqe(Duration::from_millis(100)) else { continue };
            let statuses: Vec<_> = ring.statuses(cqe.ticket).collect();
            prop_assert_eq!(statuses.len(), batches[cqe.token as usize]);
            prop_assert!(!statuses.contains(&ContextStatus::Pending));
            ended.push(cqe.token);
        }
        ended.sort_unstable();
        let expected: Vec<u64> = (0..batches.len() as u64).collect();
        prop_assert_eq!(ended, expected, "each batch ends once");
        prop_assert_eq!(ring.poll_cqe(), None);
        drop(runner);
    }
}
