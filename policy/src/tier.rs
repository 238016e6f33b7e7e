//! Storage tiers of a node.

use serde::{Deserialize, Serialize};

/// Storage tier of a node, with its number in the directory and on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum Tier {
    /// DRAM arena of the node.
    Dram = 1,
    /// NVMe pool of the node; replicas in it are durable.
    Nvme = 2,
}

impl Tier {
    /// Returns the tier with a number read from a wire, if it is valid.
    pub fn from_wire(number: u8) -> Option<Tier> {
        match number {
            1 => Some(Tier::Dram),
            2 => Some(Tier::Nvme),
            _ => None,
        }
    }
}

/// Amounts of DRAM and NVMe, usually in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amounts {
    /// Amount in arenas.
    pub dram: u64,
    /// Amount in pools, including header pages.
    pub nvme: u64,
}

impl Amounts {
    /// Limit that stands for unlimited.
    pub const UNLIMITED: Amounts = Amounts { dram: u64::MAX, nvme: u64::MAX };

    /// The same amount of DRAM and NVMe.
    pub fn both(bytes: u64) -> Amounts {
        Amounts { dram: bytes, nvme: bytes }
    }

    /// Combines the amounts of each tier.
    pub fn with(self, other: Amounts, act: impl Fn(u64, u64) -> u64) -> Amounts {
        Amounts { dram: act(self.dram, other.dram), nvme: act(self.nvme, other.nvme) }
    }

    /// Returns the larger amount of each tier.
    pub fn max(self, other: Amounts) -> Amounts {
        self.with(other, u64::max)
    }

    /// Returns the smaller amount of each tier.
    pub fn min(self, other: Amounts) -> Amounts {
        self.with(other, u64::min)
    }

    /// Returns the sums, at most `u64::MAX`.
    pub fn plus(self, other: Amounts) -> Amounts {
        self.with(other, u64::saturating_add)
    }

    /// Returns the differences, at least zero.
    pub fn minus(self, other: Amounts) -> Amounts {
        self.with(other, u64::saturating_sub)
    }
}
