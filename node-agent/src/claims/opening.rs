//! What takes its time with devices, done on threads of its own: opening those of a pool with the engines that they may have, and
//! destroying what is on one.
//!
//! Somebody else's data is neither opened nor destroyed, unless the claim says that it may be overwritten.

use std::path::Path;

use reprise_agent_core::effect::DeviceId;
use reprise_agent_kubernetes::{Engine, FallbackEngine, ForeignSignatures, Reason, Trouble};
use reprise_io::{Caching, DeviceFile, EngineKind, FileAccess, Missing};

use super::board::{Kind, Opened, Recipe, ToOpen};
use super::signatures;
use crate::config::{DeviceSettings, IoEngineChoice, PoolSettings};
use crate::device::{self, DeviceContext, OpenedDevice, PoolIdentity, Unusable, unusable};
use crate::error::AgentError;

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

/// Destroys what is on a place, and a file with it.
pub(super) fn wipe(at: &Path, kind: Kind) -> Result<(), Trouble> {
    let failed = |reason, message: String| Trouble { reason, message };
    match signatures::foreign(at) {
        Ok(None) => {}
        Ok(Some(what)) => {
            let message = format!("it holds {what}, which is not ours to destroy: take it out of the pool");
            return Err(failed(Reason::ForeignSignature, message));
        }
        Err(error) => return Err(failed(Reason::DeviceFailed, format!("it cannot be read: {error}"))),
    }
    if !at.exists() {
        return Ok(());
    }
    let unusable =
        |error: reprise_io::IoError| failed(Reason::DeviceFailed, format!("it cannot be erased: {error}"));
    let file = DeviceFile::open(at, FileAccess::ReadWrite, Missing::Fail).map_err(unusable)?;
    file.erase().map_err(unusable)?;
    if kind == Kind::File {
        std::fs::remove_file(at).map_err(|error| {
            failed(Reason::DeviceFailed, format!("it is erased and cannot be removed: {error}"))
        })?;
    }
    Ok(())
}

impl Attempt {
    fn choice(self) -> IoEngineChoice {
        match self {
            Attempt::Wanted(choice) | Attempt::Fallback(choice) => choice,
        }
    }
}

/// Looks whose data is there, and erases it where the claim says so.
fn prepare(place: &ToOpen) -> Result<(), Trouble> {
    let failed = |reason, message: String| Trouble { reason, message };
    let unreadable =
        |error: std::io::Error| failed(Reason::DeviceFailed, format!("it cannot be read: {error}"));
    match (signatures::foreign(&place.at).map_err(unreadable)?, place.recipe.foreign) {
        (None, _) => Ok(()),
        (Some(what), ForeignSignatures::Wipe) => {
            tracing::warn!(path = place.path, what, "overwriting what is on a device, as its pool says");
            let unusable = |error: reprise_io::IoError| {
                failed(Reason::DeviceFailed, format!("it cannot be erased: {error}"))
            };
            let file = DeviceFile::open(&place.at, FileAccess::ReadWrite, Missing::Fail).map_err(unusable)?;
            file.erase().map_err(unusable)
        }
        (Some(what), ForeignSignatures::Refuse) => Err(failed(
            Reason::ForeignSignature,
            format!(
                "it holds {what} and is left alone: take it out of the pool, or have its data overwritten (foreignSignatures)"
            ),
        )),
    }
}

fn settings_of(place: &ToOpen) -> DeviceSettings {
    DeviceSettings { path: place.at.clone(), bytes: place.recipe.bytes }
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
