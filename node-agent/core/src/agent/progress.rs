//! How far a load has come, layer by layer.
//!
//! `at[l]` counts the blocks whose leading verified layers are exactly `l`; blocks that are complete or failed are
//! in no count. The layers that are ready for the whole load are the smallest `l` with a block in it. Moving a block is
//! O(1); the smallest only grows while no block goes back, so a load costs O(layers) plus O(1) per update of a block.

/// See the module.
#[derive(Debug)]
pub(super) struct LayerProgress {
    at: Box<[u32]>,
    pending: u32,
    ready: u32,
}

impl LayerProgress {
    /// All of `blocks` at layer 0 of `layers` (at least 1).
    pub(super) fn new(layers: u32, blocks: u32) -> LayerProgress {
        let mut at = vec![0; layers as usize].into_boxed_slice();
        at[0] = blocks;
        let mut progress = LayerProgress { at, pending: blocks, ready: 0 };
        progress.settle();
        progress
    }

    /// Layers that are ready for every block that has not failed.
    pub(super) fn ready(&self) -> u32 {
        self.ready
    }

    /// Blocks that are neither complete nor failed.
    pub(super) fn pending(&self) -> u32 {
        self.pending
    }

    /// A pending block has got from one layer to another; to the last one, it is complete.
    pub(super) fn advance(&mut self, from: u32, to: u32) {
        self.at[from as usize] -= 1;
        match self.at.get_mut(to as usize) {
            Some(count) => *count += 1,
            None => self.pending -= 1,
        }
        self.settle();
    }

    /// A pending block has failed.
    pub(super) fn fail(&mut self, at: u32) {
        self.at[at as usize] -= 1;
        self.pending -= 1;
        self.settle();
    }

    /// A pending block begins anew, before anybody was told how far the load is.
    pub(super) fn restart(&mut self, from: u32) {
        self.at[from as usize] -= 1;
        self.at[0] += 1;
        self.ready = 0;
        self.settle();
    }

    fn settle(&mut self) {
        while self.at.get(self.ready as usize) == Some(&0) {
            self.ready += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_is_as_far_as_its_last_block() {
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
    fn a_failed_block_holds_nobody_up() {
        let mut progress = LayerProgress::new(4, 2);
        progress.advance(0, 3);
        progress.fail(0);
        assert_eq!((progress.ready(), progress.pending()), (3, 1));
        progress.fail(3);
        assert_eq!((progress.ready(), progress.pending()), (4, 0));
    }

    #[test]
    fn a_block_that_begins_anew_takes_the_load_back() {
        let mut progress = LayerProgress::new(4, 1);
        progress.advance(0, 2);
        progress.restart(2);
        assert_eq!(progress.ready(), 0);
    }

    #[test]
    fn a_load_of_nothing_is_complete() {
        let progress = LayerProgress::new(4, 0);
        assert_eq!((progress.ready(), progress.pending()), (4, 0));
    }
}
