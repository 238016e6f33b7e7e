//! Compares the TCP transport with a bare TCP loop on this machine: 2 MiB blocks between two arenas over
//! loopback, every object verified, sent whole and as 32 KiB objects in layer order across 32 blocks.
//! Repetitions are interleaved; prints medians.
//!
//! ```text
//! cargo run --release -p reprise-transport --example transport_speed [-- CONGESTION [SOCKET_BUFFER_BYTES]]
//! ```
//!
//! `CONGESTION` (`cubic`, `reno`, …) applies to both; the default is the system's. For comparison run `iperf3
//! -s -p 5301 -1 & iperf3 -c 127.0.0.1 -p 5301 -l 1M -t 3` (`-C cubic`).

// The output is for a person at a terminal.
#![allow(clippy::print_stdout)]

use std::error::Error;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, OnceLock, Weak, mpsc};
use std::time::{Duration, Instant};

use reprise_buffers::{Arena, ArenaConfig, HugePolicy};
use reprise_policy::peer::{FetchBlock, FetchId, FetchRequest, FillId, FillUpdate, PeerEvent, ServeObjects};
use reprise_policy::{ArenaSlot, BlockKey, Layout, LayoutSpec, RegionId, TenantName, Tier};
use reprise_transport::bare::stream_loop;
use reprise_transport::{Congestion, EventSink, TcpSettings, TcpTransport, Transport, TransportEvent};

const BLOCKS: usize = 256;
const RUN_BYTES: u64 = 1 << 30;
const REPETITIONS: usize = 15;

/// Number of concurrent fetches, and of the blocks of each.
const FETCHES: usize = 4;
const FETCH_BLOCKS: usize = 32;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let congestion = arguments.next().map_or(Congestion::System, |name| match name.as_str() {
        "system" => Congestion::System,
        _ => Congestion::Named(name),
    });
    let buffer_bytes = arguments.next().map(|bytes| bytes.parse()).transpose()?;
    let pair = Pair::new(&congestion, buffer_bytes)?;
    let mut runs = Vec::new();
    pair.run(RUN_BYTES, Pieces::Blocks)?;
    for _ in 0..REPETITIONS {
        let bare = stream_loop(RUN_BYTES, &congestion)?.bytes_per_second();
        let blocks = pair.run(RUN_BYTES, Pieces::Blocks)?;
        runs.push([bare, blocks, pair.run(RUN_BYTES, Pieces::Objects)?]);
    }
    let summary = |of: &dyn Fn(&[f64; 3]) -> f64| {
        let mut values: Vec<f64> = runs.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        (values[values.len() / 2], values[values.len() - 1])
    };
    let names = ["bare stream, 1 MiB writes", "transport, 2 MiB blocks", "transport, 32 KiB objects"];
    for (index, name) in names.into_iter().enumerate() {
        let (median, best) = summary(&|run| run[index] / 1e9);
        let (ratio, _) = summary(&|run| run[index] / run[0]);
        println!("{name:28} {median:6.2} GB/s   best {best:6.2}   ratio, median of pairs {ratio:6.3}");
    }
    Ok(())
}

/// Order in which the server sends a block.
#[derive(Clone, Copy, PartialEq)]
enum Pieces {
    /// The whole block at once.
    Blocks,
    /// Object by object, in layer order across the blocks of a request.
    Objects,
}

struct Pair {
    layout: Layout,
    requester: TcpTransport,
    server: Arc<TcpTransport>,
    finished: Mutex<mpsc::Receiver<Result<(), String>>>,
    destinations: Vec<ArenaSlot>,
}

impl Pair {
    fn new(congestion: &Congestion, buffer_bytes: Option<usize>) -> Result<Pair, Box<dyn Error>> {
        let layout = LayoutSpec {
            layers: 32,
            kv_heads: 8,
            head_dim: 128,
            tokens_per_block: 16,
            ..LayoutSpec::LLAMA_3_8B
        }
        .validate()?;
        let settings = |name: &str| {
            let listen = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
            TcpSettings {
                congestion: congestion.clone(),
                socket_buffer_bytes: buffer_bytes,
                ..TcpSettings::new(listen, name)
            }
        };
        let server = serve_all(settings("server"), layout)?;
        let (sender, finished) = mpsc::channel();
        let layers_all = layout.layers();
        let sink: EventSink = Arc::new(move |event| {
            let message = match event {
                TransportEvent::Peer(PeerEvent::Fill {
                    update: FillUpdate::Layers { layers, .. }, ..
                }) => {
                    if layers < layers_all {
                        return;
                    }
                    Ok(())
                }
                other => Err(format!("{other:?}")),
            };
            // The receiver is gone only when the run failed.
            let _ = sender.send(message);
        });
        let (arena, destinations) = arena(layout)?;
        let requester = TcpTransport::bind(settings("requester"), arena, sink)?;
        Ok(Pair { layout, requester, server, finished: Mutex::new(finished), destinations })
    }

    /// Fetches `bytes`; returns the rate in bytes per second.
    fn run(&self, bytes: u64, pieces: Pieces) -> Result<f64, Box<dyn Error>> {
        let finished = self.finished.lock().map_err(|_| "poisoned")?;
        let total = bytes / self.layout.block_bytes();
        let fetches = total / FETCH_BLOCKS as u64;
        let started = Instant::now();
        let mut begun = 0;
        let mut arrived = 0;
        while arrived < fetches * FETCH_BLOCKS as u64 {
            while begun < fetches && begun * (FETCH_BLOCKS as u64) < arrived + (FETCHES * FETCH_BLOCKS) as u64
            {
                self.fetch(begun, pieces)?;
                begun += 1;
            }
            finished.recv_timeout(Duration::from_secs(10))??;
            arrived += 1;
        }
        let moved = fetches * FETCH_BLOCKS as u64 * self.layout.block_bytes();
        Ok(moved as f64 / started.elapsed().as_secs_f64())
    }

    fn fetch(&self, number: u64, pieces: Pieces) -> Result<(), Box<dyn Error>> {
        let first = number * FETCH_BLOCKS as u64;
        let blocks = (first..first + FETCH_BLOCKS as u64)
            .map(|block| FetchBlock {
                fill: FillId(block),
                key: key(block, pieces),
                into: self.destinations[block as usize % BLOCKS],
            })
            .collect();
        let request = FetchRequest {
            fetch: FetchId(number),
            tenant: TenantName::default_tenant(),
            layout: self.layout,
            deadline: Duration::from_secs(20),
            blocks,
        };
        Ok(self.requester.fetch(&self.server.local_address().to_string(), request)?)
    }
}

/// Key of a block of the server, which selects the order of sending.
fn key(block: u64, pieces: Pieces) -> BlockKey {
    let mut key = [0; 16];
    key[0] = (block % BLOCKS as u64) as u8;
    key[1] = pieces as u8;
    BlockKey(key)
}

/// A node that answers every request from its arena.
fn serve_all(settings: TcpSettings, layout: Layout) -> Result<Arc<TcpTransport>, Box<dyn Error>> {
    let (arena, sources) = arena(layout)?;
    let mut checksums = Vec::new();
    for (index, slot) in sources.iter().enumerate() {
        let span = arena.span(slot.region.0, slot.offset, slot.bytes)?;
        let bytes: Vec<u8> = (0..span.len()).map(|at| (at * 31 + at / 4096 + index) as u8).collect();
        span.copy_in(&bytes)?;
        let object_bytes = layout.object_bytes() as usize;
        checksums.push(bytes.chunks(object_bytes).map(reprise_buffers::crc32c).collect::<Vec<u32>>());
    }
    let own: Arc<OnceLock<Weak<TcpTransport>>> = Arc::default();
    let serving = Arc::clone(&own);
    let sink: EventSink = Arc::new(move |event| {
        let TransportEvent::Request { request, .. } = event else { return };
        let Some(transport) = serving.get().and_then(Weak::upgrade) else { return };
        let serve = request.serve;
        let steps = if request.keys[0].0[1] == Pieces::Objects as u8 { layout.objects() } else { 1 };
        let bytes = layout.block_bytes() / u64::from(steps);
        for (block, key) in (0..).zip(&request.keys) {
            transport.serve_header(serve, block, Tier::Dram, &checksums[usize::from(key.0[0])]);
        }
        for step in 0..steps {
            let last = step + 1 == steps;
            for (block, key) in (0..).zip(&request.keys) {
                let offset = u64::from(step) * bytes;
                let slot = sources[usize::from(key.0[0])];
                transport.serve_objects(&ServeObjects { serve, block, slot, offset, bytes, last });
            }
        }
    });
    let transport = Arc::new(TcpTransport::bind(settings, arena, sink)?);
    own.set(Arc::downgrade(&transport)).map_err(|_| "set twice")?;
    Ok(transport)
}

/// Creates an arena and its places, each for one block.
fn arena(layout: Layout) -> Result<(Arc<Arena>, Vec<ArenaSlot>), Box<dyn Error>> {
    let bytes = layout.slot_bytes() * BLOCKS as u64;
    let arena = Arena::new(&ArenaConfig { bytes, region_bytes: 256 << 20, huge: HugePolicy::Prefer })?;
    let per_region = (256 << 20) / layout.slot_bytes();
    let mut places = Vec::new();
    for block in 0..BLOCKS as u64 {
        let region = RegionId(u16::try_from(block / per_region)?);
        let offset = block % per_region * layout.slot_bytes();
        places.push(ArenaSlot { region, offset, bytes: layout.block_bytes() });
    }
    println!("arena pages: {}", arena.page_kind());
    Ok((Arc::new(arena), places))
}
