//! Chain of a save's blocks.

use reprise_policy::session::Priority;

use crate::commit::ChainPlace;

/// Place of the first block of a save in its chain, and the priority of the blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SaveChain {
    /// Place of the first block.
    pub place: ChainPlace,
    /// Eviction priority of the blocks; `None`: that of the transfers' options.
    pub priority: Option<Priority>,
}

impl From<ChainPlace> for SaveChain {
    fn from(place: ChainPlace) -> SaveChain {
        SaveChain { place, priority: None }
    }
}
