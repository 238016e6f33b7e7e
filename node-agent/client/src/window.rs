//! Loads of any length, a window of blocks at a time.
//!
//! While one window is used, the next one is on its way: two windows at the most are held, so a request of any
//! length needs `2 × window_blocks` slots of the arena.

use std::ops::ControlFlow;

use crate::client::Client;
use crate::error::ClientError;
use crate::load::{Load, LoadRequest};

impl Client {
    /// Loads the request's keys, any number of them, in windows of `window_blocks` (`1..=8192`) and calls `use_window`
    /// with each window's first block's index and its load, in order. Layers of a window may still be in flight.
    /// Ends early, without an error, when `use_window` breaks.
    ///
    /// The request's deadline counts for each window from when it is asked for: when the one before is used.
    ///
    /// # Errors
    /// As [`Client::load`]; windows that were used before stay used.
    pub fn load_windowed(
        &self,
        request: &LoadRequest,
        window_blocks: usize,
        mut use_window: impl FnMut(usize, &Load) -> ControlFlow<()>,
    ) -> Result<(), ClientError> {
        let start = |keys: &[_]| self.start_load(&LoadRequest { keys: keys.to_vec(), ..*request });
        if window_blocks == 0 {
            return Err(ClientError::BadRequest("a window of no blocks".into()));
        }
        let mut windows = request.keys.chunks(window_blocks);
        let mut coming = windows.next().map(start).transpose()?;
        let mut first_block = 0;
        while let Some(pending) = coming {
            let load = pending.wait()?;
            coming = windows.next().map(start).transpose()?;
            if use_window(first_block, &load).is_break() {
                break;
            }
            first_block += load.blocks().len();
        }
        Ok(())
    }
}
