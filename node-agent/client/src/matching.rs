//! Where blocks are looked for and where they were found.

/// Where to look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    /// This node only: never asks the network.
    Local,
    /// This node, then its peers.
    #[default]
    Cluster,
}

/// Where a block was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Source {
    /// This node's DRAM.
    OwnDram = 1,
    /// This node's NVMe.
    OwnNvme = 2,
    /// A peer's DRAM.
    PeerDram = 3,
    /// A peer's NVMe.
    PeerNvme = 4,
}

impl Source {
    /// All sources, in order of expected arrival.
    pub const ALL: [Source; 4] = [Source::OwnDram, Source::OwnNvme, Source::PeerDram, Source::PeerNvme];

    /// The source of a number from the wire, if it is one.
    pub(crate) fn from_wire(number: u32) -> Option<Source> {
        Source::ALL.into_iter().find(|source| *source as u32 == number)
    }
}

impl Scope {
    pub(crate) fn is_local_only(self) -> bool {
        matches!(self, Scope::Local)
    }
}
