//! Where a replica lies.

use serde::{Deserialize, Serialize};

/// A tier of a node's storage, as the directory and the wire number it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum Tier {
    /// The node's DRAM arena.
    Dram = 1,
    /// The node's NVMe pool; such a replica is durable.
    Nvme = 2,
}

impl Tier {
    /// The tier of a number read from a wire, if it is one.
    pub fn from_wire(number: u8) -> Option<Tier> {
        match number {
            1 => Some(Tier::Dram),
            2 => Some(Tier::Nvme),
            _ => None,
        }
    }
}
