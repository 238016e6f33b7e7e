//! What the core says of blocks, held against what it has told the directory and what has happened here.

use reprise_agent_core::agent::{BlockOrigin, DramCopy};
use reprise_policy::{BlockKey, Tier};

use crate::world::World;

/// Panics unless the core says of each of these blocks that it is where the directory was told, and for a reason that
/// can be.
pub(crate) fn check(world: &World, keys: impl IntoIterator<Item = BlockKey>) {
    for key in keys {
        let announced = |tier| world.announced.contains(&(key, tier));
        let Some(said) = world.core.describe(&key) else {
            assert!(!announced(Tier::Dram) && !announced(Tier::Nvme), "{key} was announced, and is nowhere");
            continue;
        };
        let readable = matches!(said.dram, Some(DramCopy::Unsaved | DramCopy::Clean));
        assert_eq!(readable, announced(Tier::Dram), "{key}: {said:?}");
        // What was recovered is announced when the control plane asks.
        let recovered = world.recovered.contains(&key);
        assert!(!announced(Tier::Nvme) || said.nvme.is_some(), "{key}: {said:?}");
        assert!(said.nvme.is_none() || announced(Tier::Nvme) || recovered, "{key}: {said:?}");
        let can_be = match said.origin {
            BlockOrigin::Saved => world.committed.contains(&key),
            BlockOrigin::Loaded | BlockOrigin::Placed => true,
            BlockOrigin::Recovered => recovered,
        };
        assert!(can_be, "{key}: {said:?}");
    }
}
