//! Slow operations on devices, each run on its own thread: opening the devices of a pool, with fallback
//! engines, and wiping a device.
//!
//! Foreign data is neither opened nor destroyed, unless the claim allows overwriting it.

use std::io::ErrorKind;

use reprise_agent_core::effect::DeviceId;
use reprise_agent_core::pool::{OWNER_BYTES, owner};
use reprise_agent_kubernetes::{DeviceFault, Engine, ForeignSignatures, Reason};
use reprise_io::{Caching, DeviceDescription, IfMissing, Reserve};

use super::reconciler::{
    DeviceSpec, Kind, OpenDevice, OpenRequest, WipeRequest, missing_file_fault, not_destroyed_fault,
};
use super::{engines, signatures};
use crate::config::{DeviceSettings, IoEngineChoice, PoolSettings};
use crate::device::{
    self, DeviceContext, OpenErrorKind, OpenedDevice, PoolIdentity,
    access::{self, Creation},
    open_error_kind,
};
use crate::error::AgentError;

/// Bytes to overwrite at each end of a device. This covers every known signature, and the bytes that must
/// be zero for a device to count as blank.
const OVERWRITTEN_BYTES: u64 = 4 << 20;

const _: () =
    assert!(OVERWRITTEN_BYTES >= OWNER_BYTES as u64 && OVERWRITTEN_BYTES >= reprise_io::SIGNATURE_BYTES);

/// The result of opening one device.
pub(super) struct OpenResult {
    pub(super) path: String,
    pub(super) id: DeviceId,
    pub(super) result: Result<(Box<OpenedDevice>, OpenDevice), DeviceFault>,
}

/// The engine to try next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Attempt {
    Preferred(IoEngineChoice),
    Fallback(IoEngineChoice),
}

/// Opens devices of one pool, all with their preferred engine first.
pub(super) fn open(
    requests: Vec<OpenRequest>,
    mut identity: PoolIdentity,
    settings: &PoolSettings,
    context: &DeviceContext,
) -> Vec<OpenResult> {
    let mut outcomes = Vec::with_capacity(requests.len());
    let mut pending: Vec<(OpenRequest, Attempt)> = Vec::new();
    for request in requests {
        match prepare(&request).and_then(|()| first_attempt(&request.spec)) {
            Ok(attempt) => pending.push((request, attempt)),
            Err(fault) => outcomes.push(failed(request, fault)),
        }
    }
    while let Some((_, attempt)) = pending.first() {
        let choice = attempt.choice();
        // Devices with the same engine are opened together, so that they agree on one pool identity.
        let (now, later): (Vec<_>, Vec<_>) =
            pending.into_iter().partition(|(_, attempt)| attempt.choice() == choice);
        pending = later;
        let devices: Vec<(DeviceId, DeviceSettings)> =
            now.iter().map(|(request, _)| (request.id, settings_of(request, settings))).collect();
        let settings = PoolSettings { io_engine: choice, devices: Vec::new(), ..settings.clone() };
        let results = device::open_some(&devices, &settings, identity.clone(), context);
        for ((request, attempt), result) in now.into_iter().zip(results) {
            match result {
                Ok(opened) => {
                    identity
                        .enter(&request.description, opened.membership)
                        .expect("it was opened with this identity");
                    outcomes.push(succeeded(request, attempt, opened));
                }
                Err(error) => match next_attempt(&request.spec, attempt, &error) {
                    Some(attempt) => pending.push((request, attempt)),
                    None => {
                        let fault = fault_of(&request.spec, &error);
                        outcomes.push(failed(request, fault));
                    }
                },
            }
        }
    }
    outcomes
}

/// The result of destroying the data of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WipeOutcome {
    /// Nothing is left to do.
    Wiped,
    /// The erased file must be removed ([`remove`]), after the reconciler has recorded that it may be
    /// missing.
    FileRemains,
}

/// Destroys the data of the claim's pool on a device. Data of other pools, of a pool that was never opened for this
/// claim, and unknown data are refused; a blank device that the pool never used is not written.
pub(super) fn wipe(request: &WipeRequest) -> Result<WipeOutcome, DeviceFault> {
    let device = &request.description;
    let foreign = |what: &str| {
        let message = format!(
            "the device holds {what}, which the agent does not destroy: remove the device from the pool, or set the \
             pool's deletionPolicy to Retain"
        );
        fault(Reason::ForeignSignature, message)
    };
    if let Some(what) = signatures::foreign(device).map_err(unreadable)? {
        return Err(foreign(what));
    }
    let start = match access::read_start(device, OWNER_BYTES) {
        // A missing file counts as wiped if it was never created, or was removed after it was erased. Other
        // missing devices do not.
        Err(error) if error.kind() == ErrorKind::NotFound && request.kind == Kind::File => {
            return if request.is_expected { Err(not_destroyed_fault()) } else { Ok(WipeOutcome::Wiped) };
        }
        start => start.map_err(unreadable)?,
    };
    match owner(&start) {
        Ok(None) if request.kind != Kind::File && !request.is_member => return Ok(WipeOutcome::Wiped),
        Ok(None) => {}
        Ok(Some(pool)) if request.pool == Some(pool) => {}
        Ok(Some(_)) if request.pool.is_none() => {
            return Err(foreign("a pool that this agent has not opened for its SSDPool"));
        }
        Ok(Some(_)) => return Err(foreign("another pool")),
        Err(_) => return Err(foreign("data that is not from a Reprise pool, or a pool that cannot be read")),
    }
    tracing::warn!(path = request.path, "destroying the data of a device, as confirmed in its pool");
    let mut opened = access::open(device, Creation::NONE).map_err(not_erased)?;
    opened.device.erase().map_err(not_erased)?;
    Ok(if request.kind == Kind::File { WipeOutcome::FileRemains } else { WipeOutcome::Wiped })
}

/// Removes an erased file.
pub(super) fn remove(device: &DeviceDescription) -> Result<(), DeviceFault> {
    access::remove(device)
        .map_err(|error| fault(Reason::DeviceFailed, format!("cannot remove the erased file: {error}")))
}

fn fault(reason: Reason, message: String) -> DeviceFault {
    DeviceFault { reason, message }
}

#[allow(clippy::needless_pass_by_value, reason = "it maps errors")]
fn unreadable(error: std::io::Error) -> DeviceFault {
    let reason = match error.kind() {
        ErrorKind::PermissionDenied => Reason::DeviceNotPermitted,
        _ => Reason::DeviceFailed,
    };
    fault(reason, format!("cannot read the device: {error}"))
}

#[allow(clippy::needless_pass_by_value, reason = "it maps errors")]
fn not_erased(error: reprise_io::IoError) -> DeviceFault {
    fault(Reason::DeviceFailed, format!("cannot erase the device: {error}"))
}

impl Attempt {
    fn choice(self) -> IoEngineChoice {
        match self {
            Attempt::Preferred(choice) | Attempt::Fallback(choice) => choice,
        }
    }
}

/// Checks that a required file exists and that the device holds no foreign data. Overwrites foreign
/// signatures if the claim allows it.
fn prepare(request: &OpenRequest) -> Result<(), DeviceFault> {
    let has_to_be = request.spec.kind == Kind::File && request.missing == IfMissing::Fail;
    // If the check itself fails, opening the file reports the cause.
    if has_to_be && access::exists(&request.description).is_ok_and(|is_there| !is_there) {
        return Err(missing_file_fault());
    }
    match (signatures::foreign(&request.description).map_err(unreadable)?, request.spec.foreign) {
        (None, _) => Ok(()),
        (Some(what), ForeignSignatures::Wipe) => {
            tracing::warn!(
                path = request.path,
                what,
                "overwriting foreign data on a device, as its pool allows"
            );
            // Without waiting for its holder, which cannot be a former agent: the other devices of the pool wait.
            let mut opened = access::open_unless_busy(&request.description).map_err(not_erased)?;
            // Erases the ends only, since the other devices of the pool wait for this one. Blocks overwrite
            // the rest.
            opened.erase_ends(OVERWRITTEN_BYTES).map_err(not_erased)
        }
        (Some(what), ForeignSignatures::Refuse) => Err(fault(
            Reason::ForeignSignature,
            format!(
                "the device holds {what}: remove it from the pool, or allow overwriting in the pool's foreignSignatures"
            ),
        )),
    }
}

fn settings_of(request: &OpenRequest, settings: &PoolSettings) -> DeviceSettings {
    let reserve = request.spec.reserve_bytes.map_or(settings.reserve, Reserve::Bytes);
    DeviceSettings {
        description: request.description.clone(),
        bytes: request.spec.bytes,
        missing: request.missing,
        reserve,
    }
}

fn first_attempt(spec: &DeviceSpec) -> Result<Attempt, DeviceFault> {
    // A controller has no block device for another engine, and a block device of the kernel has no controller for the
    // agent. For a file, the agent emulates a controller.
    if (spec.kind == Kind::Controller) != (spec.engine == Engine::UserNvme) && spec.kind != Kind::File {
        let message = format!(
            "engine {} does not fit the device: engine UserNvme and devices of class NvmeController need each other",
            spec.engine
        );
        return Err(DeviceFault { reason: Reason::EngineUnavailable, message });
    }
    let preferred = engines::choice(spec.engine).map(Attempt::Preferred);
    preferred.or_else(|| engines::fallback(spec.fallback).map(Attempt::Fallback)).ok_or_else(|| {
        let message = format!(
            "this release does not support engine {}, and the pool sets no fallbackEngine",
            spec.engine
        );
        DeviceFault { reason: Reason::EngineUnavailable, message }
    })
}

/// Returns the engine to try after an error.
fn next_attempt(spec: &DeviceSpec, attempt: Attempt, error: &AgentError) -> Option<Attempt> {
    match (attempt, open_error_kind(error)) {
        (Attempt::Preferred(choice), OpenErrorKind::Engine) => {
            engines::fallback(spec.fallback).filter(|other| *other != choice).map(Attempt::Fallback)
        }
        _ => None,
    }
}

fn fault_of(spec: &DeviceSpec, error: &AgentError) -> DeviceFault {
    let (reason, remedy) = match open_error_kind(error) {
        OpenErrorKind::Engine => (
            Reason::EngineUnavailable,
            ". Give the agents a seccomp profile that allows io_uring, or set fallbackEngine: Plain in the pool",
        ),
        OpenErrorKind::Unserved => (Reason::Unsupported, ""),
        OpenErrorKind::Foreign => (Reason::ForeignSignature, ""),
        OpenErrorKind::Other => (Reason::DeviceFailed, ""),
    };
    let kind = match spec.kind {
        Kind::File => "file",
        Kind::Device => "device",
        Kind::Controller => "NVMe controller",
    };
    DeviceFault { reason, message: format!("cannot open the {kind}: {}{remedy}", error.chain()) }
}

fn failed(request: OpenRequest, fault: DeviceFault) -> OpenResult {
    OpenResult { path: request.path, id: request.id, result: Err(fault) }
}

fn succeeded(request: OpenRequest, attempt: Attempt, opened: OpenedDevice) -> OpenResult {
    let info = opened.device.info();
    let engine = engines::reported(info.engine);
    let fallback = match attempt {
        Attempt::Preferred(_) => None,
        Attempt::Fallback(_) => Some(DeviceFault {
            reason: Reason::EngineUnavailable,
            message: format!(
                "engine {} is not available on this node; using {engine} instead",
                request.spec.engine
            ),
        }),
    };
    let direct = info.caching == Caching::Direct;
    let facts = OpenDevice { membership: opened.membership, engine, fallback, direct };
    OpenResult { path: request.path, id: request.id, result: Ok((Box::new(opened), facts)) }
}

#[cfg(test)]
mod tests;
