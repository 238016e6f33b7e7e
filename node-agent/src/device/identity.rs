//! One pool, one identity: which devices belong together, and what fresh ones become.
//!
//! Devices that hold a pool already must agree on its id and have different indices; their order in the configuration
//! does not matter, so disks may move. Fresh devices join the pool that is there, or found a new one. A pool that is claimed
//! while the agent runs grows in the same way.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use reprise_agent_core::pool::{DevicePool, PoolParams};

use super::{Found, Opening, Verdict};
use crate::error::{AgentError, ErrorKind};

/// A pool, as far as its devices are known.
#[derive(Clone, Debug, Default)]
pub(crate) struct PoolIdentity {
    uuid: Option<[u8; 16]>,
    members: Vec<(u8, PathBuf)>,
}

/// What a device says it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Membership {
    pub(crate) uuid: [u8; 16],
    pub(crate) index: u8,
}

impl Membership {
    pub(super) fn of(pool: &DevicePool) -> Membership {
        Membership { uuid: pool.pool_uuid(), index: pool.device_index() }
    }
}

impl PoolIdentity {
    /// A device that holds a pool is one of this.
    ///
    /// # Errors
    /// It belongs to another pool, or is one of its devices twice.
    pub(crate) fn enter(&mut self, path: &Path, membership: Membership) -> Result<(), AgentError> {
        let other = self.members.first().map(|(_, other)| other.display().to_string()).unwrap_or_default();
        let twin = self.members.iter().find(|(index, _)| *index == membership.index);
        let text = match (self.uuid, twin) {
            (Some(uuid), _) if uuid != membership.uuid => format!(
                "'{other}' and '{}' belong to different pools: configure one of them, or erase the other",
                path.display()
            ),
            (_, Some((_, twin))) => format!(
                "'{}' is a copy of '{}': configure one of them, or erase the other",
                path.display(),
                twin.display()
            ),
            _ => {
                self.uuid = Some(membership.uuid);
                self.members.push((membership.index, path.to_owned()));
                return Ok(());
            }
        };
        Err(AgentError::new(ErrorKind::Device, format!("pool devices {text}")))
    }

    /// What a fresh device becomes.
    fn found(
        &mut self,
        path: &Path,
        device_bytes: u64,
        segment_bytes: u64,
    ) -> Result<PoolParams, AgentError> {
        let pool_uuid = match self.uuid {
            Some(uuid) => uuid,
            None => random_uuid()?,
        };
        let is_free = |index: &u8| self.members.iter().all(|(other, _)| other != index);
        let device_index = (0..=u8::MAX).find(is_free).expect("there are more indices than devices");
        self.enter(path, Membership { uuid: pool_uuid, index: device_index })?;
        let created_unix_us = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| u64::try_from(since.as_micros()).unwrap_or(u64::MAX));
        Ok(PoolParams { device_bytes, segment_bytes, pool_uuid, device_index, created_unix_us })
    }
}

/// What each opening thread is told, in their order; nothing for those that found no device. Those that hold a pool come first.
pub(super) fn decide(
    identity: &mut PoolIdentity,
    openings: &[Opening],
    found: &[Option<Found>],
    segment_bytes: u64,
) -> Vec<Option<Result<Verdict, AgentError>>> {
    let mut verdicts: Vec<Option<Result<Verdict, AgentError>>> = Vec::with_capacity(openings.len());
    verdicts.resize_with(openings.len(), || None);
    for ((opening, found), verdict) in openings.iter().zip(found).zip(&mut verdicts) {
        if let Some(Found::Pool(recovered)) = found {
            let entered = identity.enter(&opening.path, Membership::of(&recovered.pool));
            *verdict = Some(entered.map(|()| Verdict::Keep));
        }
    }
    for ((opening, found), verdict) in openings.iter().zip(found).zip(&mut verdicts) {
        if let Some(Found::Blank { device_bytes }) = found {
            *verdict = Some(identity.found(&opening.path, *device_bytes, segment_bytes).map(Verdict::Format));
        }
    }
    verdicts
}

/// Two pools never share an id, so that a disk that moves is recognised.
fn random_uuid() -> Result<[u8; 16], AgentError> {
    let mut uuid = [0; 16];
    File::open("/dev/urandom")
        .and_then(|mut source| source.read_exact(&mut uuid))
        .map_err(|error| AgentError::new(ErrorKind::Resource, "cannot read /dev/urandom").because(error))?;
    Ok(uuid)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(devices: &[(&str, u8, u8)]) -> Result<(), AgentError> {
        let mut identity = PoolIdentity::default();
        devices.iter().try_for_each(|(path, uuid, index)| {
            identity.enter(Path::new(path), Membership { uuid: [*uuid; 16], index: *index })
        })
    }

    #[test]
    fn devices_of_one_pool_may_come_in_any_order() {
        assert!(check(&[("/b", 1, 1), ("/a", 1, 0)]).is_ok());
    }

    #[test]
    fn devices_of_two_pools_and_a_copied_device_are_named() {
        let error = check(&[("/a", 1, 0), ("/b", 2, 1)]).expect_err("two pools").to_string();
        assert!(error.contains("/a") && error.contains("/b") && error.contains("different pools"), "{error}");
        let error = check(&[("/a", 1, 0), ("/b", 1, 0)]).expect_err("a copy").to_string();
        assert!(error.contains("copy"), "{error}");
    }

    #[test]
    fn a_fresh_device_joins_the_pool_that_is_there_under_a_number_of_its_own() {
        let mut identity = PoolIdentity::default();
        identity.enter(Path::new("/a"), Membership { uuid: [7; 16], index: 0 }).expect("the first");
        let params = identity.found(Path::new("/b"), 1 << 30, 2 << 20).expect("a fresh one");
        assert_eq!((params.pool_uuid, params.device_index), ([7; 16], 1));
    }
}
