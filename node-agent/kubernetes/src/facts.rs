//! What the agent tells of its node: plain values, as the agent has them, without a word of Kubernetes' objects.

use std::path::PathBuf;

use reprise_crds::fields::{Engine, NodeMode};
use reprise_crds::node::{DeviceState, PageKind};
use reprise_crds::status::Reason;

/// How the node is, at one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct Facts {
    /// Where the agent is in its life.
    pub phase: Phase,
    /// The [`Desired`](crate::Desired) that the rest was found for.
    pub told: u64,
    /// Generation of the spec that the rest was found for; 0: of none.
    pub generation: i64,
    /// What of the spec cannot be read or done, in words.
    pub problems: Vec<String>,
    /// Digest of the configuration file that the agent runs by.
    pub configuration: Option<String>,
    /// Why it does not run by the wanted one; `None`: it does.
    pub configuration_pending: Option<String>,
    /// By other agents, `host:port`.
    pub peer: Option<String>,
    /// Metrics, health and status, `host:port`.
    pub admin: String,
    /// Directory of the socket of sessions.
    pub socket_directory: PathBuf,
    /// The control plane.
    pub control_plane: ControlPlane,
    /// Memory for blocks.
    pub memory: Memory,
    /// Sessions of engines that are open.
    pub sessions: u32,
    /// Claims that are followed.
    pub claims: Vec<ClaimFact>,
    /// Devices and files of them.
    pub devices: Vec<DeviceFact>,
    /// GPUs of the node.
    pub gpus: Vec<GpuFact>,
    /// Digest of the file by which it knows whose pods are whose; `None`: it has none.
    pub tenants: Option<String>,
    /// Profiles that the agent works by, or has refused.
    pub profiles: Vec<ProfileFact>,
    /// What is kept for GPUs.
    pub queues: Vec<QueueFact>,
    /// NVMe controllers of the node, each serial number once.
    pub controllers: Vec<ControllerFact>,
    /// What the node is used for.
    pub mode: NodeMode,
    /// How far it is emptied.
    pub drain: DrainFact,
}

/// Where the agent is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// It has not done yet what the first spec wants.
    Starting,
    /// It serves.
    Serving,
    /// It was told to stop.
    Leaving,
}

/// What the control plane is to the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControlPlane {
    /// None is configured.
    None,
    /// It does not answer.
    Away {
        /// Members that are known.
        members: u32,
    },
    /// It answers.
    Connected {
        /// Number of the node there.
        node: u16,
        /// Epoch of its registration.
        epoch: u64,
        /// Members that are known.
        members: u32,
        /// Members that answer.
        connected: u32,
    },
}

/// Memory for blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Bytes of it.
    pub total: u64,
    /// Bytes of blocks in it.
    pub used: u64,
    /// Its pages.
    pub pages: PageKind,
}

/// A claim that is followed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimFact {
    /// The pool.
    pub pool: String,
    /// Its unique id.
    pub uid: String,
    /// Generation of the claim that is in effect.
    pub generation: i64,
    /// What keeps it from having devices.
    pub trouble: Option<Trouble>,
}

/// Why something is not as it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trouble {
    /// In one word.
    pub reason: Reason,
    /// In a sentence, with what to do.
    pub message: String,
}

/// A device or file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceFact {
    /// Its stable path.
    pub path: String,
    /// The pool.
    pub pool: String,
    /// What it is.
    pub state: DeviceState,
    /// Why it is not open, or not as wanted.
    pub trouble: Option<Trouble>,
    /// Bytes for blocks.
    pub size: u64,
    /// Bytes of blocks.
    pub used: u64,
    /// How it was to be driven.
    pub wanted: Engine,
    /// How it is driven; `None`: it is not open.
    pub engine: Option<Engine>,
    /// Whether the page cache is passed by.
    pub direct: bool,
    /// Time in microseconds below which 99 of 100 reads of the last minute were, where the pool allows only so much.
    pub read_p99_micros: Option<u32>,
    /// That reads take longer than the pool allows, in words.
    pub slow: Option<String>,
    /// Media errors that were met since it was opened, or that it tells of its life; the greater number. `None`: it is not open.
    pub media_errors: Option<u32>,
    /// Spare capacity that it tells, in percent.
    pub spare_percent: Option<u8>,
    /// That it is more worn than the pool allows, in words.
    pub worn: Option<String>,
    /// Its serial number.
    pub serial: Option<String>,
    /// Its model.
    pub model: Option<String>,
}

/// An NVMe controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControllerFact {
    /// Its serial number.
    pub serial: String,
    /// Its address on the PCI bus.
    pub pci_address: Option<String>,
    /// The pool that has a device of it.
    pub pool: Option<String>,
    /// Queue pairs that it has for I/O.
    pub queue_pairs: u32,
}

/// A GPU.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct GpuFact {
    /// Its unique id.
    pub uuid: String,
    /// What it is, as its driver names it.
    pub product: String,
}

/// Queue pairs that are kept for a GPU, or why not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueFact {
    /// Unique id of the allocation.
    pub uid: String,
    /// How many, on all controllers.
    pub kept: u32,
    /// Why none is.
    pub refused: Option<String>,
}

/// A profile that the agent works by, or has refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProfileFact {
    /// Its name.
    pub name: String,
    /// Digest of the revision.
    pub digest: String,
    /// Why it was refused; `None`: it was not.
    pub refused: Option<String>,
}

/// How far the node is emptied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DrainFact {
    /// Whether every durable block is somewhere else as well.
    pub drained: bool,
    /// Blocks that were looked at.
    pub walked: u64,
    /// Durable blocks.
    pub durable: u64,
    /// Blocks that no node has room for.
    pub nowhere: u64,
}
