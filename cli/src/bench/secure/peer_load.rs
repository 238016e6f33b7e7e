//! Loads of 2 MiB blocks from a peer, every object verified: two transports of this process on loopback, with and
//! without TLS.
//!
//! Without TLS, a load keeps two cores busy: one sends, one receives. Encryption adds to both. So the ratio depends on
//! the cores that are left, and each case states them.

use std::sync::{Arc, Mutex, OnceLock, Weak, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, ensure};
use reprise_buffers::{Arena, ArenaConfig, HugePolicy};
use reprise_identity::{Security, Tls};
use reprise_policy::peer::{FetchBlock, FetchId, FetchRequest, FillId, FillUpdate, PeerEvent, ServeObjects};
use reprise_policy::{ArenaSlot, BlockKey, Layout, RegionId, TenantName, Tier};
use reprise_testkit::bench::report::{Figure, Target, paired};
use reprise_testkit::bench::{Settings, llama_3_8b};
use reprise_transport::{EventSink, TcpSettings, TcpTransport, Transport, TransportEvent};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Blocks of one load: 256 MiB.
const BLOCKS: usize = 128;

/// Blocks of one request.
const REQUEST_BLOCKS: usize = 32;

/// Bytes of a 2 MiB block and its place.
const BLOCK_BYTES: u64 = 2 << 20;

/// Memory of both arenas.
pub(in crate::bench) const MEMORY_BYTES: u64 = 2 * BLOCKS as u64 * BLOCK_BYTES;

/// Time limit of a load.
const LOADED_WITHIN: Duration = Duration::from_secs(60);

/// Cores that both ends have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Case {
    /// All; at least as many are free as a load without TLS keeps busy.
    Free,
    /// The same two cores.
    Shared,
}

impl Case {
    /// Cases that this machine has enough cores for.
    pub(super) fn possible() -> anyhow::Result<Vec<Case>> {
        let cores = allowed_cores()?.len();
        Ok([Case::Free, Case::Shared].into_iter().filter(|case| case.cores_min() <= cores).collect())
    }

    /// Why some cases are not among these.
    pub(super) fn missing(possible: &[Case]) -> Option<String> {
        let missing: Vec<String> = [Case::Free, Case::Shared]
            .into_iter()
            .filter(|case| !possible.contains(case))
            .map(|case| format!("{} needs {} cores", case.name(), case.cores_min()))
            .collect();
        (!missing.is_empty()).then(|| missing.join(", "))
    }

    fn name(self) -> &'static str {
        match self {
            Case::Free => "secure.peer_load_free_cores",
            Case::Shared => "secure.peer_load_two_cores",
        }
    }

    fn cores_min(self) -> usize {
        match self {
            Case::Free => 4,
            Case::Shared => 2,
        }
    }

    fn target(self) -> Target {
        match self {
            Case::Free => Target::RatioAtLeast(0.8),
            Case::Shared => Target::RatioAtLeast(0.65),
        }
    }
}

/// Cores that this process may use.
pub(super) fn allowed_cores() -> anyhow::Result<Vec<usize>> {
    let allowed = sched_getaffinity(None).context("cannot read the cores of this process")?;
    Ok((0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core)).collect())
}

/// Measures a case. Threads inherit the cores of the thread that starts them.
pub(super) fn run(case: Case, settings: &Settings) -> anyhow::Result<Figure> {
    let settings = settings.clone();
    let measure = move || {
        if case == Case::Shared {
            let mut two = CpuSet::new();
            allowed_cores()?.into_iter().take(2).for_each(|core| two.set(core));
            sched_setaffinity(None, &two).context("cannot bind a thread to two cores")?;
        }
        measure(case, &settings)
    };
    thread::spawn(measure).join().map_err(|_| anyhow!("a measurement panicked"))?
}

fn measure(case: Case, settings: &Settings) -> anyhow::Result<Figure> {
    let layout = llama_3_8b();
    let (sources, destinations) = (Memory::new(layout)?, Memory::new(layout)?);
    sources.fill()?;
    let plain = Pair::new([Security::Plain, Security::Plain], &sources, &destinations)?;
    let with_tls = super::agents(["server", "requester"])?.map(Security::Tls as fn(Tls) -> Security);
    let encrypted = Pair::new(with_tls, &sources, &destinations)?;
    let measured =
        paired(settings.rounds(case.name()), || plain.load(&destinations), || encrypted.load(&destinations))?;
    let reference = "the same loads without TLS";
    Ok(Figure::relative(case.name(), measured, "GB/s", (reference, case.target())))
}

/// Memory of one end, with a place for each block.
struct Memory {
    layout: Layout,
    arena: Arc<Arena>,
    places: Vec<ArenaSlot>,
}

impl Memory {
    fn new(layout: Layout) -> anyhow::Result<Memory> {
        ensure!(layout.slot_bytes() == BLOCK_BYTES, "blocks of {BLOCK_BYTES} bytes");
        let bytes = BLOCKS as u64 * BLOCK_BYTES;
        let arena = Arena::new(&ArenaConfig { bytes, region_bytes: bytes, huge: HugePolicy::Prefer })
            .context("memory of the blocks")?;
        let place = |index| ArenaSlot {
            region: RegionId(0),
            offset: index * BLOCK_BYTES,
            bytes: layout.block_bytes(),
        };
        Ok(Memory { layout, arena: Arc::new(arena), places: (0..BLOCKS as u64).map(place).collect() })
    }

    /// Writes another pattern into each block.
    fn fill(&self) -> anyhow::Result<()> {
        for (index, place) in self.places.iter().enumerate() {
            let span = self.arena.span(place.region.0, place.offset, place.bytes)?;
            let bytes: Vec<u8> = (0..span.len()).map(|at| (at * 31 + at / 4096 + index) as u8).collect();
            span.copy_in(&bytes)?;
        }
        Ok(())
    }

    /// CRC32C of the objects of each block.
    fn checksums(&self) -> anyhow::Result<Vec<Vec<u32>>> {
        let object_bytes = usize::try_from(self.layout.object_bytes())?;
        let of = |place: &ArenaSlot| {
            let span = self.arena.span(place.region.0, place.offset, place.bytes)?;
            let objects = (0..span.len() / object_bytes)
                .map(|object| Ok(span.slice(object * object_bytes, object_bytes)?.crc32c()));
            objects.collect::<anyhow::Result<Vec<u32>>>()
        };
        self.places.iter().map(of).collect()
    }
}

/// A serving and a requesting transport.
struct Pair {
    server: Arc<TcpTransport>,
    requester: TcpTransport,
    /// A message for each block that has ended.
    ended: Mutex<mpsc::Receiver<Result<(), String>>>,
}

impl Pair {
    fn new(security: [Security; 2], sources: &Memory, destinations: &Memory) -> anyhow::Result<Pair> {
        let [serving, requesting] = security;
        let settings = |name: &str, security| TcpSettings {
            security,
            ..TcpSettings::new(([127, 0, 0, 1], 0).into(), name)
        };
        let server = serve_all(settings("server", serving), sources)?;
        let (sender, ended) = mpsc::channel();
        let layers = destinations.layout.layers();
        let sink: EventSink = Arc::new(move |event| {
            let message = match event {
                TransportEvent::Peer(PeerEvent::Fill {
                    update: FillUpdate::Layers { layers: so_far, .. },
                    ..
                }) => {
                    if so_far < layers {
                        return;
                    }
                    Ok(())
                }
                other => Err(format!("{other:?}")),
            };
            // The receiver is gone only when the run has failed.
            let _ = sender.send(message);
        });
        let requester =
            TcpTransport::bind(settings("requester", requesting), Arc::clone(&destinations.arena), sink)?;
        Ok(Pair { server, requester, ended: Mutex::new(ended) })
    }

    /// Loads all blocks; returns the rate in GB/s.
    fn load(&self, destinations: &Memory) -> anyhow::Result<f64> {
        let ended = self.ended.lock().map_err(|_| anyhow!("an earlier load panicked"))?;
        let address = format!("server@{}", self.server.local_address());
        let started = Instant::now();
        for first in (0..BLOCKS).step_by(REQUEST_BLOCKS) {
            let block = |index: usize| FetchBlock {
                fill: FillId(index as u64),
                key: key(index),
                into: destinations.places[index],
            };
            let request = FetchRequest {
                fetch: FetchId(first as u64),
                tenant: TenantName::default_tenant(),
                layout: destinations.layout,
                deadline: LOADED_WITHIN,
                blocks: (first..first + REQUEST_BLOCKS).map(block).collect(),
            };
            self.requester.fetch(&address, request)?;
        }
        for _ in 0..BLOCKS {
            let message = ended.recv_timeout(LOADED_WITHIN).context("a load does not end")?;
            message.map_err(|event| anyhow!("a block did not arrive: {event}"))?;
        }
        let bytes = BLOCKS as u64 * destinations.layout.block_bytes();
        Ok(bytes as f64 / started.elapsed().as_secs_f64() / 1e9)
    }
}

fn key(index: usize) -> BlockKey {
    let mut key = [0; 16];
    key[..8].copy_from_slice(&(index as u64).to_le_bytes());
    BlockKey(key)
}

/// A node that answers every request from its memory.
fn serve_all(settings: TcpSettings, sources: &Memory) -> anyhow::Result<Arc<TcpTransport>> {
    let (checksums, places) = (sources.checksums()?, sources.places.clone());
    let own: Arc<OnceLock<Weak<TcpTransport>>> = Arc::default();
    let serving = Arc::clone(&own);
    let sink: EventSink = Arc::new(move |event| {
        let TransportEvent::Request { request, .. } = event else { return };
        let Some(transport) = serving.get().and_then(Weak::upgrade) else { return };
        let serve = request.serve;
        for (block, key) in (0..).zip(&request.keys) {
            let index = usize::from(key.0[0]);
            transport.serve_header(serve, block, Tier::Dram, &checksums[index]);
            let slot = places[index];
            transport.serve_objects(&ServeObjects {
                serve,
                block,
                slot,
                offset: 0,
                bytes: slot.bytes,
                last: true,
            });
        }
    });
    let transport = Arc::new(TcpTransport::bind(settings, Arc::clone(&sources.arena), sink)?);
    own.set(Arc::downgrade(&transport)).map_err(|_| anyhow!("set twice"))?;
    Ok(transport)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_that_need_more_cores_are_named() {
        assert_eq!(Case::missing(&[Case::Free, Case::Shared]), None);
        let missing = Case::missing(&[Case::Shared]).expect("one is missing");
        assert!(missing.contains("free_cores needs 4"), "{missing}");
    }
}
