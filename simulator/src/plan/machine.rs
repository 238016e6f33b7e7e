//! A node of a plan: accelerators for a model, and the SSDs and the cold store that it may have.

use super::PlanError;
use crate::serving::costs::Costs;
use crate::serving::profiles::{GB, Hardware, Model, ProfileFiles, Rate};

/// Part of the accelerators' memory that engines use (vLLM's default `gpu_memory_utilization`).
const MEMORY_SHARE: f64 = 0.9;

/// Part of that memory that must be left for KV cache: with less, few requests run at once.
const KV_SHARE_MIN: f64 = 0.15;

/// Accelerators of a node.
const ACCELERATORS: [u32; 4] = [1, 2, 4, 8];

/// Years of a drive's warranty, to which its rating of writes refers.
pub(super) const WARRANTY_YEARS: f64 = 5.0;

/// Class of SSDs that nodes can have.
#[derive(Clone, Debug, PartialEq)]
pub struct SsdClass {
    /// Name of the profile.
    pub name: String,
    /// Capacity in bytes.
    pub bytes: u64,
    /// Reads of one drive.
    pub read: Rate,
    /// Writes of one drive.
    pub write: Rate,
    /// Rated drive writes per day, over five years.
    pub drive_writes_per_day: f64,
    /// Price of a gigabyte.
    pub usd_per_gb_hour: f64,
}

impl SsdClass {
    /// Class of the device of a node.
    fn of(node: Hardware) -> SsdClass {
        SsdClass {
            name: node.nvme_name,
            bytes: node.nvme_bytes,
            read: node.nvme_read,
            write: node.nvme_write,
            drive_writes_per_day: node.drive_writes_per_day,
            usd_per_gb_hour: node.nvme_usd_per_gb_hour,
        }
    }

    /// Rated bytes written over the warranty (TBW).
    pub fn rated_bytes(&self) -> f64 {
        self.drive_writes_per_day * self.bytes as f64 * 365.0 * WARRANTY_YEARS
    }
}

/// Node that serves a model.
#[derive(Clone, Debug)]
pub struct Machine {
    /// Hardware of a node.
    pub hardware: Hardware,
    /// Model that is served.
    pub model: Model,
    /// Accelerators of a node, with tensor parallelism.
    pub accelerators: u32,
    /// Times of steps.
    pub costs: Costs,
    /// Bytes for KV cache in the memory of a node's accelerators.
    pub kv_bytes: u64,
    /// Classes of SSDs that are compared.
    pub ssds: Vec<SsdClass>,
}

impl Machine {
    /// Returns the smallest node that holds a model. SSD classes are compared unless the expression names one.
    pub fn new(hardware: &str, model: &str) -> Result<Machine, PlanError> {
        Machine::with_files(hardware, model, &ProfileFiles::default())
    }

    /// The same, where hardware and model may name files.
    pub fn with_files(hardware: &str, model: &str, files: &ProfileFiles) -> Result<Machine, PlanError> {
        let model = files.model(model)?;
        let node = files.hardware(hardware)?;
        let kv = |accelerators: u32| {
            let usable = node.hbm_bytes as f64 * f64::from(accelerators) * MEMORY_SHARE;
            let left = usable - model.weight_bytes() as f64;
            (left >= usable * KV_SHARE_MIN).then_some(left as u64)
        };
        let fitting = ACCELERATORS.into_iter().find_map(|count| Some((count, kv(count)?)));
        let (accelerators, kv_bytes) = fitting.ok_or_else(|| PlanError::ModelTooLarge {
            model: model.name.clone(),
            hardware: hardware.to_owned(),
            weights_gb: model.weight_bytes() as f64 / GB,
            memory_gb: node.hbm_bytes as f64 * f64::from(ACCELERATORS[3]) / GB,
            accelerators: ACCELERATORS[3],
        })?;
        let ssds = files.with_devices(hardware)?.into_iter().map(SsdClass::of).collect();
        Ok(Machine {
            costs: Costs::new(&node, &model, accelerators),
            hardware: node,
            model,
            accelerators,
            kv_bytes,
            ssds,
        })
    }

    /// Tokens whose KV cache the memory of a node's accelerators holds.
    pub fn memory_tokens(&self) -> u64 {
        self.kv_bytes / self.model.kv_bytes_per_token().max(1)
    }

    /// Bytes per second between DRAM and all accelerators of a node.
    pub fn link_bytes_per_second(&self) -> f64 {
        let link = self.hardware.link.bytes_per_second * u64::from(self.accelerators);
        link.min(self.hardware.dram.bytes_per_second) as f64
    }

    /// Price of a second of a node's accelerators.
    pub fn usd_per_second(&self) -> f64 {
        self.hardware.usd_per_hour * f64::from(self.accelerators) / 3_600.0
    }

    /// Short description of a node without cache.
    pub fn title(&self) -> String {
        let accelerator = self.hardware.title.split(';').next().unwrap_or(&self.hardware.title);
        format!("{} × {accelerator}", self.accelerators)
    }
}
