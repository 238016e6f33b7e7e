//! What the runtime reads of the core: counters, usage, progress, and checks for tests.

use reprise_policy::{BlockKey, DrainProgress, NodeMode};

use crate::audit::{self, Owners};
use crate::cache::{BlockDescription, TenantUsage};
use crate::core::AgentCore;
use crate::counters::Counters;
use crate::effect::DeviceId;
use crate::pool::PoolUsage;
use crate::usage::NodeUsage;

impl AgentCore {
    /// Counters, and gauges as of the last event.
    pub fn counters(&self) -> Counters {
        let mut all = Counters::default();
        self.cache.set_counters(&mut all);
        self.transfer.set_counters(&mut all);
        self.load.set_counters(&mut all);
        self.save.set_counters(&mut all);
        self.serve.set_counters(&mut all);
        self.extents.set_counters(&self.cache, &mut all);
        self.replicate.set_counters(&mut all);
        self.prefetch.set_counters(&mut all);
        self.begun.set_counters(&self.cache, &mut all);
        self.retention.set_counters(&self.cache, &mut all);
        all.sessions = self.sessions.len() as u64;
        all.drained = u64::from(self.drain_progress().drained);
        all.pulls_in_flight_bytes = self.pulls_in_flight_bytes();
        all
    }

    /// Number of blocks that are not durable yet.
    pub fn unsaved_blocks(&self) -> usize {
        self.save.unsaved_blocks()
    }

    /// Checks every invariant of the core. Costs time in proportion to the whole state.
    ///
    /// # Errors
    /// A description of the first violated invariant.
    pub fn audit(&self) -> Result<(), String> {
        let AgentCore {
            cache,
            transfer,
            load,
            save,
            serve,
            extents,
            replicate,
            prefetch,
            begun,
            retention,
            ..
        } = self;
        cache.audit()?;
        transfer.audit(cache)?;
        load.audit(cache)?;
        save.audit(cache)?;
        serve.audit(cache)?;
        extents.audit()?;
        self.quota.audit(cache)?;
        replicate.audit()?;
        prefetch.audit(cache, &self.settings.prefetch)?;
        begun.audit(cache, self.sessions.keys())?;
        retention.audit(cache, &self.settings)?;
        self.erasures.audit(cache)?;
        audit::compare(&Owners {
            sessions: &self.sessions,
            cache,
            transfer,
            load,
            save,
            serve,
            extents,
            replicate,
            prefetch,
            retention,
        })
    }

    /// Usage of each usable device.
    pub fn device_usage(&self) -> impl Iterator<Item = (DeviceId, PoolUsage)> {
        self.cache.device_usage()
    }

    /// Usage and quotas of each tenant as of the last event: configured tenants first, then others in order
    /// of appearance.
    pub fn tenant_usage(&self) -> impl Iterator<Item = TenantUsage> {
        let with_pins = |(index, usage)| {
            let retention = self.retention.usage(&self.cache, &self.settings, index);
            TenantUsage { retention, ..usage }
        };
        self.quota.usage(&self.cache).map(with_pins)
    }

    /// Progress of draining this node; otherwise, the bytes that other nodes have accepted.
    pub fn drain_progress(&self) -> DrainProgress {
        let progress = self.replicate.progress();
        let drained = progress.drained && self.unsaved_blocks() == 0;
        DrainProgress { drained, durable_blocks: self.cache.stored_blocks(), ..progress }
    }

    /// Mode of this node.
    pub fn mode(&self) -> NodeMode {
        self.replicate.mode()
    }

    /// Describes a block; `None` if it is neither on this node nor being filled.
    pub fn describe(&self, key: &BlockKey) -> Option<BlockDescription> {
        self.cache.describe(key)
    }

    /// Capacity and load of this node.
    pub fn node_usage(&self) -> NodeUsage {
        let (dram_capacity, dram_used, pools) = self.cache.usage();
        NodeUsage {
            dram_capacity,
            dram_used,
            nvme_capacity: pools.capacity_bytes,
            nvme_used: pools.slot_bytes_used,
            queued_bytes: self.serve.open_bytes(),
        }
    }
}
