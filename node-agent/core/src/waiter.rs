//! Ids of what waits for a fill.
//!
//! The owner of fills reports to these ids without reading them. The core passes a report to the owner that
//! the id names, which alone knows the object.

/// Party that waits for the fill of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct WaiterId {
    /// Number of the object whose block waits.
    pub(crate) object: u64,
    /// Index of the block in the object.
    pub(crate) block: u32,
    /// Owner of the object.
    pub(crate) owner: WaiterOwner,
}

/// Owner of an object whose blocks wait for fills.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum WaiterOwner {
    /// A load of an engine.
    Load,
    /// A request of a peer.
    Serve,
}

/// Number of a wait: one waiter of one fill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WaitId(pub(crate) u32);

const _: () = assert!(size_of::<WaiterId>() == 16, "every waiting block has one");
