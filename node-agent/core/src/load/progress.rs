//! Progress of a load, in layers.
//!
//! `at[l]` counts the blocks with exactly `l` leading verified layers; complete and failed blocks are not
//! counted. The number of layers ready for the whole load is the smallest `l` with a block. Moving a block is
//! O(1). The minimum only grows while no block restarts, so a load costs O(layers) plus O(1) per update of a
//! block.

/// Number of blocks at each layer, and their minimum.
#[derive(Debug)]
pub(crate) struct LayerProgress {
    at: Box<[u32]>,
    pending: u32,
    ready: u32,
}

impl LayerProgress {
    /// Creates the progress of `blocks` blocks at layer 0 of `layers`, which is at least 1.
    pub(crate) fn new(layers: u32, blocks: u32) -> LayerProgress {
        let mut at = vec![0; layers as usize].into_boxed_slice();
        at[0] = blocks;
        let mut progress = LayerProgress { at, pending: blocks, ready: 0 };
        progress.recount();
        progress
    }

    /// Number of layers ready in every block that has not failed.
    pub(crate) fn ready(&self) -> u32 {
        self.ready
    }

    /// Number of blocks that are neither complete nor failed.
    pub(crate) fn pending(&self) -> u32 {
        self.pending
    }

    /// Moves a pending block to a later layer; at the last layer it is complete.
    pub(crate) fn advance(&mut self, from: u32, to: u32) {
        self.at[from as usize] -= 1;
        match self.at.get_mut(to as usize) {
            Some(count) => *count += 1,
            None => self.pending -= 1,
        }
        self.recount();
    }

    /// Removes a pending block that failed.
    pub(crate) fn fail(&mut self, at: u32) {
        self.at[at as usize] -= 1;
        self.pending -= 1;
        self.recount();
    }

    /// Moves a pending block back to layer 0. Allowed only before any layer was published.
    pub(crate) fn restart(&mut self, from: u32) {
        self.at[from as usize] -= 1;
        self.at[0] += 1;
        self.ready = 0;
        self.recount();
    }

    fn recount(&mut self) {
        while self.at.get(self.ready as usize) == Some(&0) {
            self.ready += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_is_that_of_the_slowest_block() {
        let mut progress = LayerProgress::new(4, 3);
        progress.advance(0, 2);
        progress.advance(0, 4);
        assert_eq!((progress.ready(), progress.pending()), (0, 2));
        progress.advance(0, 3);
        assert_eq!(progress.ready(), 2);
        progress.advance(2, 3);
        assert_eq!(progress.ready(), 3);
        progress.advance(3, 4);
        progress.advance(3, 4);
        assert_eq!((progress.ready(), progress.pending()), (4, 0));
    }

    #[test]
    fn failed_block_does_not_delay_the_load() {
        let mut progress = LayerProgress::new(4, 2);
        progress.advance(0, 3);
        progress.fail(0);
        assert_eq!((progress.ready(), progress.pending()), (3, 1));
        progress.fail(3);
        assert_eq!((progress.ready(), progress.pending()), (4, 0));
    }

    #[test]
    fn restarted_block_resets_progress() {
        let mut progress = LayerProgress::new(4, 1);
        progress.advance(0, 2);
        progress.restart(2);
        assert_eq!(progress.ready(), 0);
    }

    #[test]
    fn empty_load_is_complete() {
        let progress = LayerProgress::new(4, 0);
        assert_eq!((progress.ready(), progress.pending()), (4, 0));
    }
}
