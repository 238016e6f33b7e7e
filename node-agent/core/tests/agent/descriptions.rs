//! Checks descriptions of blocks against the announcements to the directory and the history of the test.

use reprise_agent_core::{BlockOrigin, DramCopy};
use reprise_policy::{BlockKey, Tier};

use crate::harness::Harness;

/// Panics unless each block is described with the tiers that were announced, and with a possible origin.
pub(crate) fn check(harness: &Harness, keys: impl IntoIterator<Item = BlockKey>) {
    for key in keys {
        let announced = |tier| harness.announced.contains(&(key, tier));
        let Some(description) = harness.core.describe(&key) else {
            assert!(!announced(Tier::Dram) && !announced(Tier::Nvme), "{key} was announced and has no copy");
            continue;
        };
        let readable = matches!(description.dram, Some(DramCopy::Unsaved | DramCopy::Clean));
        assert_eq!(readable, announced(Tier::Dram), "{key}: {description:?}");
        // Recovered blocks are announced when the control plane requests the inventory.
        let recovered = harness.recovered.contains(&key);
        assert!(!announced(Tier::Nvme) || description.nvme.is_some(), "{key}: {description:?}");
        assert!(description.nvme.is_none() || announced(Tier::Nvme) || recovered, "{key}: {description:?}");
        let can_be = match description.origin {
            BlockOrigin::Saved => harness.committed.contains(&key),
            BlockOrigin::Loaded | BlockOrigin::Placed => true,
            BlockOrigin::Recovered => recovered,
        };
        assert!(can_be, "{key}: {description:?}");
    }
}
