//! Fuzz targets of the peer protocol (`make fuzz`): its parsers and its state machines.

mod requester;
mod server;
mod wire;

use std::sync::Arc;

use reprise_buffers::{Arena, ArenaConfig, HugePolicy};
use reprise_policy::{Dtype, Layout, LayoutSpec, Parts};

#[test]
fn peer_wire() {
    reprise_fuzz::check("peer_wire", &wire::seeds(), wire::run);
}

#[test]
fn peer_requester() {
    reprise_fuzz::check("peer_requester", &requester::seeds(), requester::run());
}

#[test]
fn peer_server() {
    reprise_fuzz::check("peer_server", &server::seeds(), server::run());
}

/// Two layouts of small blocks: keys and values of two layers (256 bytes), and three latent layers (384 bytes).
fn layouts() -> [Layout; 2] {
    let layout = |layers, parts, head_dim| {
        let (kv_heads, dtype, tokens_per_block, tp_rank, tp_size) = (1, Dtype::Bf16, 16, 0, 1);
        LayoutSpec { layers, parts, kv_heads, head_dim, dtype, tokens_per_block, tp_rank, tp_size }
            .validate()
            .expect("a valid layout")
    };
    [layout(2, Parts::KeyValue, 2), layout(3, Parts::Latent, 4)]
}

/// An arena of one region with 32 places of 4 KiB.
fn arena() -> Arc<Arena> {
    let bytes = PLACES * PLACE_BYTES;
    let config = ArenaConfig { bytes, region_bytes: bytes, huge: HugePolicy::Never };
    Arc::new(Arena::new(&config).expect("memory for a test"))
}

/// Number of places in the arena of a target.
const PLACES: u64 = 32;

/// Size of a place in bytes.
const PLACE_BYTES: u64 = 4096;
