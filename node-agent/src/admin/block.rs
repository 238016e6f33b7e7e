//! `/blocks/<key>`: this node's copies of a block and their origin, as a JSON object.

use reprise_agent_core::effect::DeviceId;
use reprise_agent_core::event::Priority;
use reprise_agent_core::{BlockDescription, BlockOrigin, DramCopy};
use reprise_policy::BlockKey;
use reprise_policy::eviction::Class;
use serde::Serialize;

use super::AdminContext;
use crate::core_loop::LocatedBlock;

/// JSON object of a block.
#[derive(Serialize)]
pub(super) struct Block {
    node: String,
    key: String,
    /// How the block came here: `saved`, `loaded`, `placed` or `recovered`.
    origin: &'static str,
    /// State of the copy in DRAM: `filling`, `unsaved` or `clean`; `null` without one.
    dram: Option<&'static str>,
    /// Copy on a device; `null` without one.
    nvme: Option<Stored>,
    priority: &'static str,
    /// Class in the eviction order: `evictable`, `idle`, `recent` or `active`.
    class: &'static str,
    /// Number of leases on the copy in DRAM.
    leases: u32,
}

#[derive(Serialize)]
struct Stored {
    device: u8,
    path: String,
}

impl Block {
    pub(super) fn new(context: &AdminContext, key: BlockKey, described: LocatedBlock) -> Block {
        let BlockDescription { origin, dram, nvme, priority, class, leases } = described.description;
        let path = described.path.unwrap_or_default();
        let stored = |DeviceId(device)| Stored { device, path };
        Block {
            node: context.settings.node.name.clone(),
            key: key.to_string(),
            origin: origin_name(origin),
            dram: dram.map(copy_name),
            nvme: nvme.map(stored),
            priority: priority_name(priority),
            class: class_name(class),
            leases,
        }
    }
}

fn origin_name(origin: BlockOrigin) -> &'static str {
    match origin {
        BlockOrigin::Saved => "saved",
        BlockOrigin::Loaded => "loaded",
        BlockOrigin::Placed => "placed",
        BlockOrigin::Recovered => "recovered",
    }
}

fn copy_name(copy: DramCopy) -> &'static str {
    match copy {
        DramCopy::Filling => "filling",
        DramCopy::Unsaved => "unsaved",
        DramCopy::Clean => "clean",
    }
}

fn class_name(class: Class) -> &'static str {
    match class {
        Class::Evictable => "evictable",
        Class::Idle => "idle",
        Class::Recent => "recent",
        Class::Active => "active",
    }
}

fn priority_name(priority: Priority) -> &'static str {
    match priority {
        Priority::Low => "low",
        Priority::Normal => "normal",
        Priority::High => "high",
    }
}
