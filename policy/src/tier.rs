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
