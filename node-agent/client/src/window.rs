//! Loads of any number of blocks, in windows.
//!
//! While the caller uses one window, the next one is loading. A request of any length therefore holds at most
//! two windows: `2 × window_blocks` slots of the arena.

use std::ops::ControlFlow;

use crate::client::Client;
use crate::error::ClientError;
use crate::load::{Load, LoadRequest};

impl Client {
    /// Loads the request's keys, any number of them, in windows of `window_blocks` (`1..=8192`). Calls
    /// `use_window` in order with the index of each window's first block and its load. Layers of a window may
    /// still be in flight. Ends early, without an error, when `use_window` breaks.
    ///
    /// The request's deadline applies to each window from its request on, which is sent when the previous
    /// window is used.
    ///
    /// # Errors
    /// As [`Client::load`]; windows that were used before the error remain valid.
    pub fn load_windowed(
        &self,
        request: &LoadRequest,
        window_blocks: usize,
        mut use_window: impl FnMut(usize, &Load) -> ControlFlow<()>,
    ) -> Result<(), ClientError> {
        let start = |keys: &[_], first: usize| {
            let inputs = request.inputs.as_ref();
            let inputs = inputs.map(|inputs| inputs.select((first..inputs.len()).take(keys.len())));
            // A window after the last input has none.
            let inputs = inputs.filter(|inputs| !inputs.is_empty());
            self.start_load(&LoadRequest { keys: keys.to_vec(), inputs, ..*request })
        };
        if window_blocks == 0 {
            return Err(ClientError::BadRequest("invalid window of 0 blocks".into()));
        }
        let mut windows = request.keys.chunks(window_blocks);
        let mut coming = windows.next().map(|keys| start(keys, 0)).transpose()?;
        let mut first_block = 0;
        while let Some(pending) = coming {
            let load = pending.wait()?;
            let next_block = first_block + load.blocks().len();
            coming = windows.next().map(|keys| start(keys, next_block)).transpose()?;
            if use_window(first_block, &load).is_break() {
                break;
            }
            first_block = next_block;
        }
        Ok(())
    }
}
