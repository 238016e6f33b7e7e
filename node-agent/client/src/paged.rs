//! Saving from, and loading to, an engine's paged memory.
//!
//! An engine stores blocks by number, with the layers of a block at different places. It implements
//! [`PagedMemory`] to give access to them; otherwise calls only need keys and block numbers.
//!
//! ```text
//! save:  window of 32 MiB: reserve → copy each object and compute its checksum → commit
//! load:  the next window of 32 MiB is loading while the current one is copied, each layer as it becomes ready
//! ```
//!
//! The two calls of a window cost about 100 µs, its copy at 8 GB/s 4 ms. Two windows of arena are enough for
//! a request of any length. Blocks that found no room are requested again as long as other blocks of their
//! window were loaded.
//!
//! By layers: an engine that computes one layer at a time needs the first layer of all blocks first, and
//! produces it first. Within a window both directions proceed layer by layer. The windows of such a transfer
//! are therefore larger, 256 MiB, and the layers of the last window are announced as they are copied.
//!
//! ```text
//! prompt of 4,096 tokens: 32 blocks × 8 layers × 512 KiB = 128 MiB, copied in 16 ms
//!   windows of  32 MiB: 4; the first layer is complete after 3 windows and 1/8 of the last, 12.5 ms
//!   window  of 256 MiB: 1; the first layer is complete after 1/8 of it, 2 ms; a layer every 2 ms
//! ```
//!
//! With a load by layers, a computation that takes 2 ms a layer or more only waits for the first layer. The
//! price is arena: up to 512 MiB are held while a long prompt is loaded, against 64 MiB. Of a longer transfer
//! only the last 256 MiB overlap with computation.
//!
//! Invariants:
//!
//! * Every block has a status in the end, also when the agent dies.
//! * A call waits at most `stall_timeout` for a sign of life of the agent, and a load at most
//!   `standstill_timeout` for its next progress.
//! * A save waits at most `layer_wait` for the engine's next layer.
//! * The memory of a failed block has unspecified contents. The memory is not written after the call has
//!   ended.
//!
//! Not included: an order between the blocks of one call (a caller that needs a prefix uses the leading
//! ones), and a check for existing blocks before a copy: the agent answers `duplicate`.

use std::fmt;
use std::time::{Duration, Instant};

use reprise_policy::{BlockKey, Layout};
use reprise_proto::local::{FRAME_BYTES_MAX, KEYS_PER_CALL_MAX};

use crate::client::Client;
use crate::error::ClientError;

mod loading;
mod saving;

pub use loading::{LoadOptions, LoadedBlocks};
pub use saving::{LAYER_WAIT_DEFAULT, SaveOptions, SaveStatus, SavedBlocks};

/// Default limit for an agent without progress: about the time in which an engine computes half of a prompt
/// of 4,096 tokens.
pub const STALL_TIMEOUT_DEFAULT: Duration = Duration::from_millis(500);

/// Arena that one window of a load or save occupies.
const WINDOW_BYTES: u64 = 32 << 20;

/// The same for transfers by layers: a prompt of 8,192 tokens of the model above.
const WINDOW_BYTES_BY_LAYERS: u64 = 256 << 20;

/// Maximum size of a block in the answer to a load, without the 4 bytes for each object.
const ANSWER_BYTES_PER_BLOCK: u64 = 128;

/// Number of a block in an engine's paged memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PhysicalBlock(pub usize);

/// An engine's memory of numbered blocks with one layout. Several threads access different blocks at the same
/// time.
pub trait PagedMemory: fmt::Debug + Send + Sync {
    /// Returns the geometry of the blocks.
    fn layout(&self) -> &Layout;

    /// Returns the number of blocks; block numbers are below it.
    fn blocks(&self) -> usize;

    /// Calls `read` with the bytes of one object (layer × parts + part) of a block.
    fn read_object(&self, block: PhysicalBlock, object: u32, read: &mut dyn FnMut(&[u8]));

    /// Calls `write` to overwrite one object of a block.
    fn write_object(&self, block: PhysicalBlock, object: u32, write: &mut dyn FnMut(&mut [u8]));
}

/// Order in which bytes are copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Window after window: needs the least arena.
    ByWindows,
    /// The first layers of all blocks before the others: for an engine that computes during the transfer.
    ByLayers,
}

/// Synchronizes a save or load with the engine that owns the memory.
pub(crate) trait Pace {
    /// Returns the order of the copies.
    fn order(&self) -> Order;

    /// Reports whether to continue; called between the windows of a save, and between the layers of a load.
    fn should_continue(&self) -> bool;

    /// Waits until a layer of all blocks of a save is filled.
    ///
    /// # Errors
    /// The reason for which the layer will not be filled.
    fn wait_filled(&self, layer: u32) -> Result<(), ClientError>;

    /// Announces that `layers` leading layers of a load were copied, for every block that has not failed.
    fn note_copied(&self, layers: u32);

    /// Returns when a load ends of which some leading blocks have arrived; `None`: at its deadline.
    fn limit(&self, _leading: usize) -> Option<Instant> {
        None
    }
}

/// [`Pace`] of a caller that waits for the end, with memory that is completely filled.
#[derive(Debug)]
pub(crate) struct Unpaced;

impl Pace for Unpaced {
    fn order(&self) -> Order {
        Order::ByWindows
    }

    fn should_continue(&self) -> bool {
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

/// Error of a save or load that was cancelled.
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

/// Checks that the memory has the session's layout.
pub(crate) fn check_layout(layout: &Layout, memory: &dyn PagedMemory) -> Result<(), ClientError> {
    if memory.layout() == layout {
        return Ok(());
    }
    let (memory, session) = (memory.layout().spec(), layout.spec());
    Err(ClientError::BadRequest(format!(
        "the memory's layout {memory:?} differs from the session's layout {session:?}"
    )))
}

/// Checks that the memory has these blocks.
pub(crate) fn check_blocks(
    blocks: &[(BlockKey, PhysicalBlock)],
    memory: &dyn PagedMemory,
) -> Result<(), ClientError> {
    let count = memory.blocks();
    match blocks.iter().find(|(_, block)| block.0 >= count) {
        Some((_, block)) => {
            Err(ClientError::BadRequest(format!("invalid block {}: the memory has {count} blocks", block.0)))
        }
        None => Ok(()),
    }
}

/// Number of blocks in one window: limited by arena, by the keys of a call, and by the length of a load's
/// answer.
fn window_blocks(layout: &Layout, order: Order) -> usize {
    let by_arena = order.window_bytes() / layout.slot_bytes();
    let answer_bytes = 4 * u64::from(layout.objects()) + ANSWER_BYTES_PER_BLOCK;
    let by_answer = FRAME_BYTES_MAX as u64 / answer_bytes;
    let blocks = by_arena.min(by_answer).clamp(1, KEYS_PER_CALL_MAX as u64);
    usize::try_from(blocks).expect("at most 8,192")
}

#[cfg(test)]
mod tests {
    use reprise_policy::{Dtype, LayoutSpec};

    use super::*;

    fn layout(layers: u16, head_dim: u16) -> Layout {
        let spec = LayoutSpec {
            layers,
            kv_heads: 1,
            head_dim,
            dtype: Dtype::Int8,
            tokens_per_block: 1,
            ..LayoutSpec::LLAMA_3_8B
        };
        spec.validate().expect("valid")
    }

    #[test]
    fn window_is_limited_by_arena_keys_and_answer_length() {
        let blocks = |layers, head_dim| window_blocks(&layout(layers, head_dim), Order::ByWindows);
        assert_eq!(blocks(32, 32768), 16, "2 MiB a block");
        assert_eq!(blocks(480, 65535), 1, "60 MiB a block");
        assert_eq!(blocks(1, 1), 8192);
        assert_eq!(blocks(480, 1), 4228);
    }

    #[test]
    fn a_prompt_of_8192_tokens_fits_one_window_by_layers() {
        assert_eq!(window_blocks(&layout(32, 65535), Order::ByLayers), 64, "4 MiB a block of 128 tokens");
    }
}
