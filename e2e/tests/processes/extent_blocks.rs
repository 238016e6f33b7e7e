//! Blocks of engines whose memory no controller may access: a window between extents and the engine's memory, with queue
//! pairs that other sessions may hold.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use reprise_client::path::BlockPath;
use reprise_client::{CommitOptions, ExtentStatus, LoadOptions, PagedMemory, PhysicalBlock};
use reprise_e2e::content::{keys, small};
use reprise_e2e::ring_blocks::{at, prefill, settings};
use reprise_e2e::{AgentConfig, PATIENCE, TestEnv, wait_until};
use reprise_policy::{BlockKey, Layout};
use reprise_testkit::kv_function;
use reprise_testkit::rings::{ExtentBlocks, KvOrder, RingPath, RingPathSettings};

/// Numbers of the blocks of the test.
const BLOCKS: [u64; 8] = [1, 2, 3, 4, 5, 6, 7, 8];

/// Memory of an engine: one vector for each block.
#[derive(Debug)]
struct EngineMemory {
    layout: Layout,
    blocks: Vec<Mutex<Vec<u8>>>,
}

impl EngineMemory {
    fn new(blocks: usize) -> EngineMemory {
        let layout = small();
        let bytes = layout.block_bytes() as usize;
        EngineMemory { layout, blocks: (0..blocks).map(|_| Mutex::new(vec![0; bytes])).collect() }
    }

    fn block(&self, block: PhysicalBlock) -> MutexGuard<'_, Vec<u8>> {
        self.blocks[block.0].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn mismatches(&self, blocks: &[(BlockKey, PhysicalBlock)]) -> u64 {
        let bytes = self.layout.object_bytes() as usize;
        let of_block = |(key, block): &(BlockKey, PhysicalBlock)| -> u64 {
            let block = self.block(*block);
            let objects = block.chunks(bytes).zip(0..);
            objects.map(|(object, number)| kv_function::mismatches(&key.0, number, object)).sum()
        };
        blocks.iter().map(of_block).sum()
    }
}

impl PagedMemory for EngineMemory {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn blocks(&self) -> usize {
        self.blocks.len()
    }

    fn read_object(&self, block: PhysicalBlock, object: u32, read: &mut dyn FnMut(&[u8])) {
        let bytes = self.layout.object_bytes() as usize;
        read(&self.block(block)[object as usize * bytes..][..bytes]);
    }

    fn write_object(&self, block: PhysicalBlock, object: u32, write: &mut dyn FnMut(&mut [u8])) {
        let bytes = self.layout.object_bytes() as usize;
        write(&mut self.block(block)[object as usize * bytes..][..bytes]);
    }
}

#[test]
fn engine_gets_rings_with_the_same_window_when_others_return_their_queue_pairs() {
    let env = TestEnv::new();
    env.require("this NVMe controller is EMULATED");
    let file = env.folder().join("busy.nvme");
    let agent = env.agent(&AgentConfig {
        pool: None,
        session: "extents = true\nqueue_pairs = 3\nqueue_pairs_per_session = 3\nqueue_depth = 64".to_owned(),
        extra: format!("[[pool.devices]]\nemulated = \"{}\"\nbytes = \"64MiB\"", file.display()),
        ..AgentConfig::named("busy")
    });
    let registered = || agent.admin().metric("reprise_agent_registered_memory_bytes", "") as u64;
    let holder = agent.engine(small());
    let all = RingPathSettings { pairs: 3, ..settings(KvOrder::LayerPartBlock) };
    let mut held = RingPath::open(holder.client(), BLOCKS.len(), all).expect("queue pairs are free");
    let saved = at(0, &BLOCKS);
    prefill(&held, &saved);
    let statuses = held.save(&saved, CommitOptions::default(), PATIENCE).expect("saved");
    assert_eq!(statuses, [ExtentStatus::Durable; BLOCKS.len()]);
    let of_holder = registered();

    let engine = agent.engine(small());
    let (extents, memory) = (ExtentBlocks::default(), EngineMemory::new(BLOCKS.len()));
    let placed: Vec<_> = keys(&BLOCKS).into_iter().zip((0..).map(PhysicalBlock)).collect();
    let options = LoadOptions { deadline: PATIENCE, ..LoadOptions::default() };
    let load = || extents.load(engine.client(), &placed, &memory, &options).expect("the agent answers");
    let none = vec![false; BLOCKS.len()];
    assert_eq!(load(), none, "the arena moves the blocks");
    let report = extents.report();
    assert_eq!((report.loads.backend.clone(), report.not_loaded), (None, BLOCKS.len() as u64));
    let reason = &report.loads.unusable[0];
    assert!(reason.contains("gpu-queue") && reason.contains("trying again later"), "{report}");
    assert_eq!(report.saves.unusable, [""; 0], "saves were not tried");
    let window = registered() - of_holder;
    assert!(window > 0, "the window is registered");
    // Refused again at least once: the next attempt uses the same window.
    let until = Instant::now() + Duration::from_millis(2200);
    while Instant::now() < until {
        assert_eq!(load(), none);
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(registered(), of_holder + window);

    held.close().expect("returned");
    let loaded = wait_until("the next attempt", PATIENCE, || {
        let loaded = load();
        loaded.contains(&true).then_some(loaded)
    });
    assert_eq!(loaded, vec![true; BLOCKS.len()]);
    assert_eq!(memory.mismatches(&placed), 0);
    let report = extents.report();
    assert_eq!(report.loads.backend.as_deref(), Some("gpu-queue-emulated"), "{report}");
    assert_eq!((report.saves.backend.clone(), report.loaded), (None, BLOCKS.len() as u64));
    assert_eq!(registered(), of_holder + window, "one window for all attempts");
}
