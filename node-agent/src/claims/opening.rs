//! What takes its time with devices, done on threads of its own: opening those of a pool with the engines that they may have, and
//! destroying what is on one.
//!
//! Somebody else's data is neither opened nor destroyed, unless the claim says that it may be overwritten.

use std::io::ErrorKind;
use std::path::Path;

use reprise_agent_core::effect::DeviceId;
use reprise_agent_core::pool::{OWNER_BYTES, owner};
use reprise_agent_kubernetes::{Engine, FallbackEngine, ForeignSignatures, Reason, Trouble};
use reprise_io::{Caching, DeviceFile, EngineKind, FileAccess, Missing};

use super::board::{Kind, Opened, Recipe, ToOpen, ToWipe, missing_file, not_destroyed};
use super::signatures;
use crate::config::{DeviceSettings, IoEngineChoice, PoolSettings};
use crate::device::{self, DeviceContext, OpenedDevice, PoolIdentity, Unusable, unusable};
use crate::error::AgentError;

/// At each end of a device that is overwritten: more than any mark of somebody else lies from it, and than a blank device is looked at.
const OVERWRITTEN_BYTES: u64 = 4 << 20;

const _: () = assert!(OVERWRITTEN_BYTES >= OWNER_BYTES as u64 && OVERWRITTEN_BYTES >= signatures::LOOKED_AT);

/// A place that was tried.
pub(super) struct Tried {
    pub(super) path: String,
    pub(super) id: DeviceId,
    pub(super) result: Result<(Box<OpenedDevice>, Opened), Trouble>,
}

/// How a device is to be tried next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Attempt {
    Wanted(IoEngineChoice),
    Fallback(IoEngineChoice),
}

/// Opens places of one pool.
pub(super) fn open(
    places: Vec<ToOpen>,
    mut identity: PoolIdentity,
    settings: &PoolSettings,
    context: &DeviceContext,
) -> Vec<Tried> {
    let mut tried = Vec::with_capacity(places.len());
    let mut left: Vec<(ToOpen, Attempt)> = Vec::new();
    for place in places {
        match prepare(&place).and_then(|()| first_attempt(&place.recipe)) {
            Ok(attempt) => left.push((place, attempt)),
            Err(trouble) => tried.push(failed(place, trouble)),
        }
    }
    while let Some((_, attempt)) = left.first() {
        let choice = attempt.choice();
        let (now, later): (Vec<_>, Vec<_>) =
            left.into_iter().partition(|(_, attempt)| attempt.choice() == choice);
        left = later;
        let devices: Vec<(DeviceId, DeviceSettings)> =
            now.iter().map(|(place, _)| (place.id, settings_of(place))).collect();
        let settings = PoolSettings { io_engine: choice, devices: Vec::new(), ..settings.clone() };
        let results = device::open_some(&devices, &settings, identity.clone(), context);
        for ((place, attempt), result) in now.into_iter().zip(results) {
            match result {
                Ok(opened) => {
                    identity.enter(&place.at, opened.membership).expect("it was opened as one of them");
                    tried.push(succeeded(place, attempt, opened));
                }
                Err(error) => match next_attempt(&place.recipe, attempt, &error) {
                    Some(attempt) => left.push((place, attempt)),
                    None => {
                        let trouble = trouble_of(&place.recipe, &error);
                        tried.push(failed(place, trouble));
                    }
                },
            }
        }
    }
    tried
}

/// What is left of a place whose data is destroyed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Left {
    /// Nothing to do.
    Nothing,
    /// The file, which goes once it is noted that it need not be there ([`remove`]).
    File,
}

/// Destroys what the claim's pool has on a place. What is another pool's, or was written by nobody known, is refused; a blank device that the pool
/// never used is left as it is.
pub(super) fn wipe(place: &ToWipe) -> Result<Left, Trouble> {
    let at = &place.at;
    let foreign = |what: &str| {
        let message = format!("it holds {what}, which is not ours to destroy: take it out of the pool");
        trouble(Reason::ForeignSignature, message)
    };
    if let Some(what) = signatures::foreign(at).map_err(unreadable)? {
        return Err(foreign(what));
    }
    let start = match signatures::start(at, OWNER_BYTES) {
        // What cannot be found was not wiped, but for a file that nobody has made, or that went after it was erased.
        Err(error) if error.kind() == ErrorKind::NotFound && place.kind == Kind::File => {
            return if place.is_expected { Err(not_destroyed()) } else { Ok(Left::Nothing) };
        }
        start => start.map_err(unreadable)?,
    };
    match owner(&start) {
        Ok(None) if place.kind == Kind::Device && !place.is_member => return Ok(Left::Nothing),
        Ok(None) => {}
        Ok(Some(pool)) if place.pool.is_none_or(|own| own == pool) => {}
        Ok(Some(_)) => return Err(foreign("another pool")),
        Err(_) => return Err(foreign("data that no pool of ours wrote, or a pool that cannot be read")),
    }
    tracing::warn!(path = place.path, "destroying the data of a device, as was confirmed");
    let file = DeviceFile::open(at, FileAccess::ReadWrite, Missing::Fail).map_err(not_erased)?;
    file.erase().map_err(not_erased)?;
    Ok(if place.kind == Kind::File { Left::File } else { Left::Nothing })
}

/// Removes a file that is erased.
pub(super) fn remove(at: &Path) -> Result<(), Trouble> {
    std::fs::remove_file(at).map_err(|error| {
        trouble(Reason::DeviceFailed, format!("it is erased and cannot be removed: {error}"))
    })
}

fn trouble(reason: Reason, message: String) -> Trouble {
    Trouble { reason, message }
}

#[allow(clippy::needless_pass_by_value, reason = "it maps errors")]
fn unreadable(error: std::io::Error) -> Trouble {
    let reason = match error.kind() {
        ErrorKind::PermissionDenied => Reason::DeviceNotPermitted,
        _ => Reason::DeviceFailed,
    };
    trouble(reason, format!("it cannot be read: {error}"))
}

#[allow(clippy::needless_pass_by_value, reason = "it maps errors")]
fn not_erased(error: reprise_io::IoError) -> Trouble {
    trouble(Reason::DeviceFailed, format!("it cannot be erased: {error}"))
}

impl Attempt {
    fn choice(self) -> IoEngineChoice {
        match self {
            Attempt::Wanted(choice) | Attempt::Fallback(choice) => choice,
        }
    }
}

/// Looks whether a file is there that has to be, and whose data is; takes the mark of it away where the claim says so.
fn prepare(place: &ToOpen) -> Result<(), Trouble> {
    let has_to_be = place.recipe.kind == Kind::File && place.missing == Missing::Fail;
    // What cannot be looked at says why when it is opened.
    if has_to_be && place.at.try_exists().is_ok_and(|is_there| !is_there) {
        return Err(missing_file());
    }
    match (signatures::foreign(&place.at).map_err(unreadable)?, place.recipe.foreign) {
        (None, _) => Ok(()),
        (Some(what), ForeignSignatures::Wipe) => {
            tracing::warn!(path = place.path, what, "overwriting what is on a device, as its pool says");
            let file =
                DeviceFile::open(&place.at, FileAccess::ReadWrite, Missing::Fail).map_err(not_erased)?;
            // The other devices of the pool wait for this one: the rest is overwritten by blocks.
            file.erase_ends(OVERWRITTEN_BYTES).map_err(not_erased)
        }
        (Some(what), ForeignSignatures::Refuse) => Err(trouble(
            Reason::ForeignSignature,
            format!(
                "it holds {what} and is left alone: take it out of the pool, or have its data overwritten (foreignSignatures)"
            ),
        )),
    }
}

fn settings_of(place: &ToOpen) -> DeviceSettings {
    DeviceSettings { path: place.at.clone(), bytes: place.recipe.bytes, missing: place.missing }
}

fn first_attempt(recipe: &Recipe) -> Result<Attempt, Trouble> {
    match recipe.engine {
        Engine::IoUring => Ok(Attempt::Wanted(IoEngineChoice::IoUring)),
        Engine::Plain => Ok(Attempt::Wanted(IoEngineChoice::Plain)),
        engine @ (Engine::IoUringCmd | Engine::Gds | Engine::GpuQueue) => match fallback(recipe) {
            Some(choice) => Ok(Attempt::Fallback(choice)),
            None => {
                let message =
                    format!("engine {engine} is not in this release, and the pool names no fallbackEngine");
                Err(Trouble { reason: Reason::EngineUnavailable, message })
            }
        },
    }
}

/// What may be tried after an error.
fn next_attempt(recipe: &Recipe, attempt: Attempt, error: &AgentError) -> Option<Attempt> {
    match (attempt, unusable(error)) {
        (Attempt::Wanted(choice), Unusable::Engine) => {
            fallback(recipe).filter(|other| *other != choice).map(Attempt::Fallback)
        }
        _ => None,
    }
}

fn fallback(recipe: &Recipe) -> Option<IoEngineChoice> {
    match recipe.fallback {
        FallbackEngine::None => None,
        FallbackEngine::Plain => Some(IoEngineChoice::Plain),
        FallbackEngine::IoUring => Some(IoEngineChoice::IoUring),
    }
}

fn trouble_of(recipe: &Recipe, error: &AgentError) -> Trouble {
    let (reason, remedy) = match unusable(error) {
        Unusable::Engine => (
            Reason::EngineUnavailable,
            ". Give the agents a seccomp profile that allows io_uring, or set fallbackEngine: Plain in the pool",
        ),
        Unusable::Foreign => (Reason::ForeignSignature, ""),
        Unusable::Otherwise => (Reason::DeviceFailed, ""),
    };
    let kind = match recipe.kind {
        Kind::File => "file",
        Kind::Device => "device",
    };
    Trouble { reason, message: format!("{kind} refused: {}{remedy}", error.chain()) }
}

fn failed(place: ToOpen, trouble: Trouble) -> Tried {
    Tried { path: place.path, id: place.id, result: Err(trouble) }
}

fn succeeded(place: ToOpen, attempt: Attempt, opened: OpenedDevice) -> Tried {
    let info = opened.device.info();
    let engine = match info.engine {
        EngineKind::IoUring => Engine::IoUring,
        EngineKind::Plain | EngineKind::Simulated => Engine::Plain,
    };
    let fallback = match attempt {
        Attempt::Wanted(_) => None,
        Attempt::Fallback(_) => Some(Trouble {
            reason: Reason::EngineUnavailable,
            message: format!("{} cannot be had here, {engine} is used instead", place.recipe.engine),
        }),
    };
    let direct = info.caching == Caching::Direct;
    let facts = Opened { membership: opened.membership, engine, fallback, direct };
    Tried { path: place.path, id: place.id, result: Ok((Box::new(opened), facts)) }
}

#[cfg(test)]
mod tests;
