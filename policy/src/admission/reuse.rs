//! Observed probability of reuse by position in a chain.

use super::Reuse;

/// Classes of positions: 0, 1, 2 to 3, 4 to 7, … 2^31 and above.
const CLASSES: usize = 33;

/// Blocks that count as used before anything is known: at first, every block is admitted.
const PRIOR: u64 = 64;

/// Observed blocks of a class at which its counts are halved, so that old observations lose weight.
const HALVED_AT: u64 = 1 << 16;

/// Blocks committed and used again, by position.
#[derive(Debug)]
pub(super) struct ReuseByPosition {
    classes: [Class; CLASSES],
}

#[derive(Clone, Copy, Debug, Default)]
struct Class {
    committed: u64,
    reused: u64,
}

impl Default for ReuseByPosition {
    fn default() -> ReuseByPosition {
        ReuseByPosition { classes: [Class::default(); CLASSES] }
    }
}

impl ReuseByPosition {
    pub(super) fn committed(&mut self, position: u32) {
        let class = &mut self.classes[class_of(position)];
        class.committed += 1;
        if class.committed >= HALVED_AT {
            class.committed /= 2;
            class.reused /= 2;
        }
    }

    pub(super) fn reused(&mut self, position: u32) {
        let class = &mut self.classes[class_of(position)];
        // Blocks that were committed before the agent started are used too.
        class.reused = (class.reused + 1).min(class.committed);
    }

    /// Odds that a block is used (again): used blocks of all blocks. A block with a use has shown that its class
    /// does not describe it.
    pub(super) fn odds(&self, position: u32, reuse: Reuse) -> (u64, u64) {
        let Class { committed, reused } = self.classes[class_of(position)];
        match reuse {
            Reuse::Used => (1, 1),
            Reuse::None => (reused + PRIOR, committed + PRIOR),
        }
    }
}

fn class_of(position: u32) -> usize {
    (u32::BITS - position.leading_zeros()) as usize
}
