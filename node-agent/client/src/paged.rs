//! Saving from, and loading to, an engine's paged memory.
//!
//! An engine keeps blocks by number, a layer here and a layer there. [`PagedMemory`] is how it shows them; keys and
//! block numbers are all that it says otherwise.
//!
//! ```text
//! save:  window of 32 MiB: reserve → copy each object and take its checksum → commit
//! load:  window of 32 MiB on its way while the one before is copied, layer by layer as layers become ready
//! ```
//!
//! A window's two calls cost about 100 µs, its copy at 8 GB/s 4 ms. Two windows of arena serve a request of any
//! length; blocks for which there was no room are asked for again as long as others come.
//!
//! By layers: an engine that computes a layer at a time needs the first layer of all blocks first, and has it to give
//! first. Within a window both directions go layer by layer; so the windows of such a transfer are larger, 256 MiB, and
//! the layers of the last one are told as they are copied.
//!
//! ```text
//! prompt of 4,096 tokens: 32 blocks × 8 layers × 512 KiB = 128 MiB, copied in 16 ms
//!   windows of  32 MiB: 4; the first layer is whole after 3 windows and 1/8 of the last, 12.5 ms
//!   window  of 256 MiB: 1; the first layer is whole after 1/8 of it, 2 ms; a layer every 2 ms
//! ```
//!
//! Behind a load by layers, computation that takes 2 ms a layer or more waits for the first layer only. The price is
//! arena: up to 512 MiB are held while a long prompt is loaded, against 64 MiB. Of a longer transfer only the last
//! 256 MiB overlap with computation.
//!
//! Invariants: every block has a status in the end, whatever happens to the agent; nobody is waited for longer than
//! `stall_timeout` without a sign of life, the next sign of progress of a load not longer than its `standstill_timeout`,
//! and an engine not longer than `layer_wait` for its next layer; what a failed block's memory holds is unspecified, and
//! nobody writes to it once the call has ended.
//!
//! Deliberately absent: order between blocks of one call (a caller that needs a prefix takes the leading ones), and
//! a look at what is there already before a copy: the agent says `duplicate`.

use std::fmt;
use std::time::Duration;

use reprise_policy::{BlockKey, Layout};
use reprise_proto::local::{FRAME_BYTES_MAX, KEYS_PER_CALL_MAX};

use crate::client::Client;
use crate::error::ClientError;

mod loading;
mod saving;

pub use loading::{LoadOptions, LoadedBlocks};
pub use saving::{LAYER_WAIT_DEFAULT, SaveOptions, SaveStatus, SavedBlocks};

/// How long an agent may show no progress unless told otherwise: about the time in which an engine computes half of a
/// prompt of 4,096 tokens.
pub const STALL_TIMEOUT_DEFAULT: Duration = Duration::from_millis(500);

/// Arena that one window of a load or save takes.
const WINDOW_BYTES: u64 = 32 << 20;

/// The same by layers: a prompt of 8,192 tokens of the model above.
const WINDOW_BYTES_BY_LAYERS: u64 = 256 << 20;

/// Bytes of a block in the answer to a load at the most, besides 4 for each object.
const ANSWER_BYTES_PER_BLOCK: u64 = 128;

/// Number of a block in an engine's paged memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PhysicalBlock(pub usize);

/// An engine's memory of numbered blocks of one layout. Several threads read and write different blocks at a time.
pub trait PagedMemory: fmt::Debug + Send + Sync {
    /// Geometry of its blocks.
    fn layout(&self) -> &Layout;

    /// How many there are: numbers are below.
    fn blocks(&self) -> usize;

    /// Shows one object, layer × parts + part, of a block to `read`.
    fn read_object(&self, block: PhysicalBlock, object: u32, read: &mut dyn FnMut(&[u8]));

    /// Lets `write` overwrite one object of a block.
    fn write_object(&self, block: PhysicalBlock, object: u32, write: &mut dyn FnMut(&mut [u8]));
}

/// In which order bytes are copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Window after window: the least arena.
    ByWindows,
    /// The first layers of all blocks before the others: for who computes beside it.
    ByLayers,
}

/// How a save or load keeps step with the engine whose memory it is.
pub(crate) trait Pace {
    /// In which order it goes.
    fn order(&self) -> Order;

    /// Whether it is to go on: asked between the windows of a save, and between the layers of a load.
    fn may_go_on(&self) -> bool;

    /// Waits until a layer of all blocks of a save holds what is to be saved.
    ///
    /// # Errors
    /// Why it never will.
    fn wait_filled(&self, layer: u32) -> Result<(), ClientError>;

    /// So many leading layers of a load have been copied, for every block that has not failed.
    fn note_copied(&self, layers: u32);
}

/// The pace of who waits for the end, with memory that is whole.
#[derive(Debug)]
pub(crate) struct Unpaced;

impl Pace for Unpaced {
    fn order(&self) -> Order {
        Order::ByWindows
    }

    fn may_go_on(&self) -> bool {
        true
    }

    fn wait_filled(&self, _layer: u32) -> Result<(), ClientError> {
        Ok(())
    }

    fn note_copied(&self, _layers: u32) {}
}

impl Order {
    fn window_bytes(self) -> u64 {
        match self {
            Order::ByWindows => WINDOW_BYTES,
            Order::ByLayers => WINDOW_BYTES_BY_LAYERS,
        }
    }
}

/// Why a save or load ends that was told not to go on.
pub(crate) fn cancelled() -> ClientError {
    ClientError::AgentLost { reason: "the transfer was cancelled by this process".to_owned() }
}

/// Checks that a call fits the session and the memory.
fn check(
    client: &Client,
    blocks: &[(BlockKey, PhysicalBlock)],
    memory: &dyn PagedMemory,
) -> Result<(), ClientError> {
    check_layout(client.layout(), memory)?;
    check_blocks(blocks, memory)
}

/// Checks that a memory has the blocks of a session.
pub(crate) fn check_layout(layout: &Layout, memory: &dyn PagedMemory) -> Result<(), ClientError> {
    if memory.layout() == layout {
        return Ok(());
    }
    let (memory, session) = (memory.layout().spec(), layout.spec());
    Err(ClientError::BadRequest(format!("the memory's layout is {memory:?}, the session's {session:?}")))
}

/// Checks that a memory has these blocks.
pub(crate) fn check_blocks(
    blocks: &[(BlockKey, PhysicalBlock)],
    memory: &dyn PagedMemory,
) -> Result<(), ClientError> {
    let count = memory.blocks();
    match blocks.iter().find(|(_, block)| block.0 >= count) {
        Some((_, block)) => {
            Err(ClientError::BadRequest(format!("there is no block {} in a memory of {count}", block.0)))
        }
        None => Ok(()),
    }
}

/// Blocks of one window: by arena, by the number of keys in a call, and by the length of the answer to a load.
fn window_blocks(layout: &Layout, order: Order) -> usize {
    let by_arena = order.window_bytes() / layout.slot_bytes();
    let answer_bytes = 4 * u64::from(layout.objects()) + ANSWER_BYTES_PER_BLOCK;
    let by_answer = FRAME_BYTES_MAX as u64 / answer_bytes;
    let blocks = by_arena.min(by_answer).clamp(1, KEYS_PER_CALL_MAX as u64);
    usize::try_from(blocks).expect("at most 8,192")
}

#[cfg(test)]
mod tests {
    use reprise_policy::{Dtype, LayoutSpec, Parts};

    use super::*;

    fn layout(layers: u16, head_dim: u16) -> Layout {
        let spec = LayoutSpec {
            layers,
            parts: Parts::KeyValue,
            kv_heads: 1,
            head_dim,
            dtype: Dtype::Int8,
            tokens_per_block: 1,
            tp_rank: 0,
            tp_size: 1,
        };
        spec.validate().expect("valid")
    }

    #[test]
    fn a_window_is_bounded_by_arena_keys_and_the_length_of_the_answer() {
        let blocks = |layers, head_dim| window_blocks(&layout(layers, head_dim), Order::ByWindows);
        assert_eq!(blocks(32, 32768), 16, "2 MiB a block");
        assert_eq!(blocks(480, 65535), 1, "60 MiB a block");
        assert_eq!(blocks(1, 1), 8192);
        assert_eq!(blocks(480, 1), 4228);
    }

    #[test]
    fn a_prompt_of_8192_tokens_is_one_window_by_layers() {
        assert_eq!(window_blocks(&layout(32, 65535), Order::ByLayers), 64, "4 MiB a block of 128 tokens");
    }
}
