//! The engine with rings in the pods of the tests: `reprise-e2e-rings SOCKET FIRST COUNT PAIRS`.
//!
//! It saves COUNT blocks from number FIRST with ring writes, loads them into other memory with ring reads, and compares every byte. It
//! repeats the loads until SIGTERM, prints a line of JSON after each, and returns its queue pairs at the end.
//!
//! The content is a function of the key, so an engine also compares blocks of the engines before it. The rings are the
//! host build: threads of this process stand in for a GPU, and the name of the backend states that.

use std::collections::BTreeSet;
use std::io::Write;
use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, ensure};
use reprise_client::{CommitOptions, ExtentStatus};
use reprise_e2e::content::{keys, layout_of};
use reprise_e2e::{Engine, PATIENCE};
use reprise_policy::BlockKey;
use reprise_testkit::kv_function;
use reprise_testkit::rings::{Backend, RingLoad, RingPath, RingPathSettings};
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

/// Entries of each queue.
const DEPTH: u32 = 64;

/// Interval between two loads.
const PAUSE: Duration = Duration::from_millis(200);

/// The engine's session and its KV memory, with slots for the saved blocks and as many for loads.
struct RingEngine {
    path: RingPath,
    blocks: Vec<BlockKey>,
    /// Blocks that this engine has saved, and those that were on the node already.
    saved: u64,
    existed: u64,
    /// Blocks of all loads whose every byte is right.
    verified: u64,
}

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [socket, first, count, pairs] = &arguments[..] else {
        anyhow::bail!("expected SOCKET FIRST COUNT PAIRS");
    };
    let number = |text: &String| text.parse::<u64>().with_context(|| format!("invalid number \"{text}\""));
    let (first, count) = (number(first)?, number(count)?);
    let pairs = u32::try_from(number(pairs)?).context("invalid PAIRS")?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let mut terminate = {
        let _entered = runtime.enter();
        signal(SignalKind::terminate()).context("waiting for a signal")?
    };
    let mut engine = RingEngine::save(Path::new(socket), first..first + count, pairs)?;
    loop {
        engine.load()?;
        writeln!(std::io::stdout(), "{}", engine.report())?;
        let ended = runtime.block_on(async { tokio::time::timeout(PAUSE, terminate.recv()).await });
        if ended.is_ok() {
            return engine.path.close();
        }
    }
}

impl RingEngine {
    /// Opens a session, and saves the blocks with ring writes.
    fn save(socket: &Path, numbers: Range<u64>, pairs: u32) -> anyhow::Result<RingEngine> {
        let session = Engine::connect(socket, layout_of(1, 1))?;
        let blocks = keys(&numbers.collect::<Vec<u64>>());
        let settings =
            RingPathSettings { pairs, depth: DEPTH, timeout: PATIENCE, ..RingPathSettings::default() };
        let path = RingPath::open(session.client(), 2 * blocks.len(), settings)?;
        let mut engine = RingEngine { path, blocks, saved: 0, existed: 0, verified: 0 };
        let mut bytes = engine.object();
        for (slot, key) in engine.blocks.iter().enumerate() {
            for object in 0..engine.path.layout().objects() {
                kv_function::fill(&key.0, object, &mut bytes);
                engine.path.object(slot, object as usize).copy_in(&bytes)?;
            }
        }
        let items: Vec<(usize, BlockKey)> = engine.blocks.iter().copied().enumerate().collect();
        let statuses = engine.path.save(&items, CommitOptions::default(), PATIENCE)?;
        ensure!(statuses.len() == items.len(), "extents for {} of {} blocks", statuses.len(), items.len());
        for status in statuses {
            match status {
                ExtentStatus::Durable => engine.saved += 1,
                ExtentStatus::Exists => engine.existed += 1,
                other => anyhow::bail!("a block that rings have written is not durable: {other:?}"),
            }
        }
        Ok(engine)
    }

    /// Loads the blocks into zeroed memory with ring reads, and compares every byte.
    fn load(&mut self) -> anyhow::Result<()> {
        let count = self.blocks.len();
        let mut bytes = self.object();
        let objects = self.path.layout().objects();
        for slot in count..2 * count {
            for object in 0..objects {
                self.path.object(slot, object as usize).copy_in(&bytes)?;
            }
        }
        let items: Vec<(usize, BlockKey)> = (count..).zip(self.blocks.iter().copied()).collect();
        let loaded = self.path.load(&items)?;
        for ((slot, key), loaded) in items.iter().zip(loaded) {
            ensure!(loaded == RingLoad::Verified, "block {} of {count}: {loaded:?}", slot - count);
            for object in 0..objects {
                self.path.object(*slot, object as usize).copy_out(&mut bytes);
                let wrong = kv_function::mismatches(&key.0, object, &bytes);
                ensure!(wrong == 0, "{wrong} wrong words in object {object} of block {}", slot - count);
            }
            self.verified += 1;
        }
        Ok(())
    }

    /// Returns a zeroed buffer of an object.
    fn object(&self) -> Vec<u8> {
        vec![0; usize::try_from(self.path.layout().object_bytes()).expect("objects fit in memory")]
    }

    /// Describes the work so far and the queue pairs in use.
    fn report(&self) -> serde_json::Value {
        let counters = self.path.ring_counters();
        // In ascending order, as in the status of the allocation. The grant has the order of creation.
        let queues: BTreeSet<u16> = self.path.queue_pairs().into_values().flatten().collect();
        json!({
            "backend": self.path.name(),
            "queues": queues,
            "generations": self.path.generations().into_values().collect::<Vec<u64>>(),
            "saved": self.saved,
            "existed": self.existed,
            "verified": self.verified,
            "batches": counters.batches,
            "contexts": counters.contexts,
            "bytes_read": counters.bytes_read,
            "bytes_written": counters.bytes_written,
        })
    }
}
