//! Helpers of the transport's tests: layouts, blocks with known bytes, nodes that record their events.

// Each test binary uses a part of it.
#![allow(dead_code, unreachable_pub)]

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use reprise_buffers::{Arena, ArenaConfig, HugePolicy, Span, crc32c};
use reprise_identity::authority::{Authority, CERTIFICATE_VALID, Issued};
use reprise_identity::{Identity, Security, Tls};
use reprise_policy::peer::{
    FetchBlock, FetchId, FetchRequest, FillError, FillId, FillUpdate, PeerEvent, PeerRequest, ServeId,
    ServeObjects,
};
use reprise_policy::{ArenaSlot, BlockKey, Layout, LayoutSpec, RegionId, TenantName, Tier};
use reprise_transport::{EventSink, Transport, TransportEvent};

/// Name of the cluster in the certificates of tests.
pub const CLUSTER: &str = "test";

/// The authority of the cluster of all tests.
pub fn authority() -> &'static Authority {
    static AUTHORITY: OnceLock<Authority> = OnceLock::new();
    AUTHORITY.get_or_init(|| Authority::create(CLUSTER).expect("a valid name"))
}

pub fn identity(role: &str) -> Identity {
    Identity::new(CLUSTER, role.parse().expect("a role")).expect("valid names")
}

/// Credentials that trust the authority of the cluster.
pub fn tls_with(issued: Issued) -> Tls {
    Tls::new(issued.into_credentials(authority().certificate()).expect("valid files"))
}

/// Credentials of a process of the cluster.
pub fn tls(role: &str) -> Tls {
    tls_with(authority().issue(&identity(role), CERTIFICATE_VALID).expect("a certificate"))
}

/// Certificates of the agent of a node.
pub fn security_of(node: &str) -> Security {
    Security::Tls(tls(&format!("agent/{node}")))
}

/// Longer than any wait of a passing test, also on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A deadline that no test reaches: what ends only then fails by [`PATIENCE`].
pub const LATER: Duration = Duration::from_secs(600);

/// Bytes of each of the two regions of a test's arena.
pub const REGION_BYTES: u64 = 16 << 20;

/// Region of the blocks that nodes serve.
pub const SOURCES: RegionId = RegionId(0);

/// Region of the destinations of fetches.
pub const DESTINATIONS: RegionId = RegionId(1);

/// The memory of all nodes of a test.
struct Memory {
    arena: Arc<Arena>,
    region_bytes: u64,
    /// Number of used bytes of each region.
    used: [u64; 2],
}

thread_local! {
    /// The memory of the test on this thread.
    static MEMORY: RefCell<Option<Memory>> = const { RefCell::new(None) };
}

fn memory(region_bytes: u64) -> Memory {
    let config = ArenaConfig { bytes: 2 * region_bytes, region_bytes, huge: HugePolicy::Never };
    Memory { arena: Arc::new(Arena::new(&config).expect("memory for a test")), region_bytes, used: [0; 2] }
}

fn with_memory<T>(call: impl FnOnce(&mut Memory) -> T) -> T {
    MEMORY.with_borrow_mut(|current| call(current.get_or_insert_with(|| memory(REGION_BYTES))))
}

/// Replaces the arena of this test: nodes and places from now on belong to the new one.
pub fn renew_arena(region_bytes: u64) {
    MEMORY.set(Some(memory(region_bytes)));
}

/// The arena of all nodes of this test.
pub fn arena() -> Arc<Arena> {
    with_memory(|memory| Arc::clone(&memory.arena))
}

/// Allocates a place of so many bytes; it is never freed.
pub fn place(region: RegionId, bytes: u64) -> ArenaSlot {
    with_memory(|memory| {
        let used = &mut memory.used[usize::from(region.0)];
        let offset = *used;
        *used += bytes.next_multiple_of(4096);
        assert!(*used <= memory.region_bytes, "a test needs a larger arena");
        ArenaSlot { region, offset, bytes }
    })
}

/// Returns the memory of a place.
pub fn span(place: ArenaSlot) -> Span {
    arena().span(place.region.0, place.offset, place.bytes).expect("inside the arena")
}

/// A layout of `layers` layers, keys and values, whose objects have `2 × head_dim × tokens` bytes.
pub fn layout(layers: u16, head_dim: u16, tokens: u16) -> Layout {
    LayoutSpec { layers, kv_heads: 1, head_dim, tokens_per_block: tokens, ..LayoutSpec::LLAMA_3_8B }
        .validate()
        .expect("a small layout is valid")
}

/// 4 layers, 8 objects of 4 KiB.
pub fn small_layout() -> Layout {
    layout(4, 128, 16)
}

pub fn key(number: u32) -> BlockKey {
    let mut bytes = [0xee; 16];
    bytes[..4].copy_from_slice(&number.to_le_bytes());
    BlockKey(bytes)
}

/// A block whose bytes identify its number and position.
#[derive(Clone)]
pub struct Block {
    pub key: BlockKey,
    pub layout: Layout,
    pub place: ArenaSlot,
    pub bytes: Arc<Vec<u8>>,
    pub checksums: Vec<u32>,
}

impl Block {
    pub fn new(number: u32, layout: Layout) -> Block {
        let mut state = u64::from(number) ^ 0x9e37_79b9_7f4a_7c15;
        let bytes: Vec<u8> = (0..layout.block_bytes())
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 56) as u8
            })
            .collect();
        let place = place(SOURCES, layout.block_bytes());
        span(place).copy_in(&bytes).expect("writable and of one length");
        let checksums = bytes.chunks(layout.object_bytes() as usize).map(crc32c).collect();
        Block { key: key(number), layout, place, bytes: Arc::new(bytes), checksums }
    }

    /// Serves the block as ranges of `objects` objects each, in order.
    pub fn ranges(&self, objects: u32) -> Vec<(u64, u64)> {
        let step = u64::from(objects) * self.layout.object_bytes();
        let end = self.layout.block_bytes();
        (0..end.div_ceil(step)).map(|index| (index * step, step.min(end - index * step))).collect()
    }

    pub fn objects(&self, serve: ServeId, block: u32, range: (u64, u64), last: bool) -> ServeObjects {
        let (offset, bytes) = range;
        ServeObjects { serve, block, slot: self.place, offset, bytes, last }
    }
}

pub fn bytes_of(place: &ArenaSlot) -> Vec<u8> {
    let mut bytes = vec![0; place.bytes as usize];
    span(*place).copy_out(&mut bytes);
    bytes
}

/// A destination filled with a byte, to detect writes into it.
pub fn marked_place(bytes: u64) -> ArenaSlot {
    let place = place(DESTINATIONS, bytes);
    span(place).copy_in(&vec![0xa5; bytes as usize]).expect("writable");
    place
}

pub fn is_untouched(place: &ArenaSlot) -> bool {
    bytes_of(place).iter().all(|byte| *byte == 0xa5)
}

/// Automatic handling of requests; every event is recorded in any case.
pub type Serve = Arc<dyn Fn(&dyn Transport, &PeerRequest<TenantName>) + Send + Sync>;

/// The test answers the requests.
pub fn by_hand() -> Serve {
    Arc::new(|_, _| {})
}

/// Answers from `blocks`: headers first, then ranges of `objects` objects in layer-major order across blocks.
pub fn serving(blocks: &[Block], objects: u32) -> Serve {
    let blocks: HashMap<BlockKey, Block> = blocks.iter().map(|block| (block.key, block.clone())).collect();
    Arc::new(move |transport, request| {
        let mut found = Vec::new();
        for (index, key) in (0..).zip(&request.keys) {
            match blocks.get(key).filter(|block| block.layout == request.layout) {
                Some(block) => {
                    transport.serve_header(request.serve, index, Tier::Nvme, &block.checksums);
                    found.push((index, block.clone(), block.ranges(objects)));
                }
                None => transport.serve_absent(request.serve, index),
            }
        }
        let rounds = found.iter().map(|(_, _, ranges)| ranges.len()).max().unwrap_or(0);
        for round in 0..rounds {
            for (index, block, ranges) in &found {
                let last = round + 1 == ranges.len();
                transport.serve_objects(&block.objects(request.serve, *index, ranges[round], last));
            }
        }
    })
}

/// Gives a sink access to its transport, which is created later.
#[derive(Clone, Default)]
pub struct TransportHandle {
    transport: Arc<OnceLock<Weak<dyn Transport>>>,
}

impl TransportHandle {
    pub fn set(&self, transport: &Arc<dyn Transport>) {
        assert!(self.transport.set(Arc::downgrade(transport)).is_ok(), "set once");
    }

    fn get(&self) -> Option<Arc<dyn Transport>> {
        self.transport.get().and_then(Weak::upgrade)
    }
}

/// Creates a sink that serves requests and records every event.
pub fn recording_sink(handle: &TransportHandle, serve: Serve) -> (EventSink, Receiver<TransportEvent>) {
    let (sender, receiver): (Sender<TransportEvent>, _) = channel();
    let sender = Mutex::new(sender);
    let handle = handle.clone();
    let sink: EventSink = Arc::new(move |event| {
        let request = match &event {
            TransportEvent::Request { request, .. } => Some(request.clone()),
            _ => None,
        };
        // Recorded before it is served, because the serve may end on another thread at once. The test may
        // have ended.
        let _ = sender.lock().expect("no test panics while sending").send(event);
        if let (Some(request), Some(transport)) = (request, handle.get()) {
            serve(transport.as_ref(), &request);
        }
    });
    (sink, receiver)
}

/// A fetch of blocks by number, with fill = `fill_base` + position.
pub struct TestFetch {
    pub request: FetchRequest<TenantName>,
    pub places: Vec<ArenaSlot>,
}

pub fn wanted(layout: Layout, keys: &[BlockKey], fill_base: u64, deadline: Duration) -> TestFetch {
    let places: Vec<ArenaSlot> = keys.iter().map(|_| marked_place(layout.slot_bytes())).collect();
    let blocks = (fill_base..)
        .zip(keys)
        .zip(&places)
        .map(|((fill, key), into)| FetchBlock { fill: FillId(fill), key: *key, into: *into })
        .collect();
    let (fetch, tenant) = (FetchId(fill_base), TenantName::default_tenant());
    TestFetch { request: FetchRequest { fetch, tenant, layout, deadline, blocks }, places }
}

/// Result of a fill.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FillOutcome {
    /// All layers, with these checksums from this tier.
    Arrived {
        checksums: Vec<u32>,
        tier: Tier,
    },
    Failed(FillError),
}

/// Tracks the events of fills and checks their order.
#[derive(Default)]
pub struct Tracker {
    layouts: HashMap<u64, Layout>,
    layers: HashMap<u64, u32>,
    checksums: HashMap<u64, Vec<u32>>,
    pub outcomes: HashMap<u64, FillOutcome>,
}

impl Tracker {
    pub fn expect(&mut self, request: &FetchRequest<TenantName>) {
        for block in &request.blocks {
            assert!(
                self.layouts.insert(block.fill.0, request.layout).is_none(),
                "fills are unique in a test"
            );
        }
    }

    /// Handles one event; panics when it violates the contract of `TransportEvent`.
    pub fn take(&mut self, event: &TransportEvent) {
        let TransportEvent::Peer(PeerEvent::Fill { fill: FillId(fill), update }) = event else {
            panic!("unexpected event of a requester: {event:?}")
        };
        match update {
            FillUpdate::Layers { layers, checksums, tier } => {
                assert!(!self.outcomes.contains_key(fill), "an event after the last one of fill {fill}");
                let before = self.layers.insert(*fill, *layers);
                assert!(*layers > before.unwrap_or(0), "layers of fill {fill} do not grow");
                assert_eq!(checksums.is_some(), before.is_none(), "only the first event has checksums");
                if let Some(checksums) = checksums {
                    self.checksums.insert(*fill, checksums.to_vec());
                }
                if *layers == self.layouts[fill].layers() {
                    let checksums = self.checksums[fill].clone();
                    self.outcomes.insert(*fill, FillOutcome::Arrived { checksums, tier: *tier });
                }
            }
            FillUpdate::Failed(error) => {
                assert!(self.layouts.contains_key(fill), "a failure of an unknown fill {fill}");
                let before = self.outcomes.insert(*fill, FillOutcome::Failed(*error));
                assert_eq!(before, None, "fill {fill} ended twice");
            }
        }
    }

    pub fn is_over(&self) -> bool {
        self.outcomes.len() == self.layouts.len()
    }
}
