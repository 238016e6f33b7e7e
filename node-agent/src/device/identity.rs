//! Identity of a pool: which devices belong together, and which indices blank ones get.
//!
//! Devices that hold a pool must agree on its id and have different indices. Their order in the
//! configuration does not matter, so disks may be swapped. Blank devices join the existing pool, or create
//! a new one. A pool that is claimed at run time grows in the same way.

use std::fs::File;
use std::io::Read;
use std::time::{SystemTime, UNIX_EPOCH};

use reprise_agent_core::pool::{DevicePool, PoolParams};
use reprise_io::DeviceDescription;

use super::{DeviceContent, OpenDecision, Opening};
use crate::error::{AgentError, ErrorKind};

/// A pool id and its known members.
#[derive(Clone, Debug, Default)]
pub(crate) struct PoolIdentity {
    uuid: Option<[u8; 16]>,
    members: Vec<(u8, DeviceDescription)>,
}

/// Pool id and index that a device holds.
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
    /// Adds a device that holds a pool.
    ///
    /// # Errors
    /// It belongs to another pool, or is a copy of a member.
    pub(crate) fn enter(
        &mut self,
        device: &DeviceDescription,
        membership: Membership,
    ) -> Result<(), AgentError> {
        let other = self.members.first().map(|(_, other)| other.to_string()).unwrap_or_default();
        let twin = self.members.iter().find(|(index, _)| *index == membership.index);
        let text = match (self.uuid, twin) {
            (Some(uuid), _) if uuid != membership.uuid => format!(
                "'{other}' and '{device}' belong to different pools: configure one of them, or erase the other"
            ),
            (_, Some((_, twin))) => {
                format!("'{device}' is a copy of '{twin}': configure one of them, or erase the other")
            }
            _ => {
                self.uuid = Some(membership.uuid);
                self.members.push((membership.index, device.clone()));
                return Ok(());
            }
        };
        Err(AgentError::new(ErrorKind::Device, format!("pool devices {text}")))
    }

    /// Creates the parameters for a blank device.
    fn found(
        &mut self,
        device: &DeviceDescription,
        device_bytes: u64,
        segment_bytes: u64,
    ) -> Result<PoolParams, AgentError> {
        let pool_uuid = match self.uuid {
            Some(uuid) => uuid,
            None => random_uuid()?,
        };
        let is_free = |index: &u8| self.members.iter().all(|(other, _)| other != index);
        let device_index = (0..=u8::MAX).find(is_free).expect("there are more indices than devices");
        self.enter(device, Membership { uuid: pool_uuid, index: device_index })?;
        let created_unix_us = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| u64::try_from(since.as_micros()).unwrap_or(u64::MAX));
        Ok(PoolParams { device_bytes, segment_bytes, pool_uuid, device_index, created_unix_us })
    }
}

/// Decides for each opening thread, in order; none for those without a device. Devices that hold a pool are
/// considered first.
pub(super) fn decide(
    identity: &mut PoolIdentity,
    openings: &[Opening],
    found: &[Option<DeviceContent>],
    segment_bytes: u64,
) -> Vec<Option<Result<OpenDecision, AgentError>>> {
    let mut decisions: Vec<Option<Result<OpenDecision, AgentError>>> = Vec::with_capacity(openings.len());
    decisions.resize_with(openings.len(), || None);
    for ((opening, found), decision) in openings.iter().zip(found).zip(&mut decisions) {
        if let Some(DeviceContent::Pool(recovered)) = found {
            let entered = identity.enter(&opening.description, Membership::of(&recovered.pool));
            *decision = Some(entered.map(|()| OpenDecision::Keep));
        }
    }
    for ((opening, found), decision) in openings.iter().zip(found).zip(&mut decisions) {
        if let Some(DeviceContent::Blank { device_bytes }) = found {
            *decision = Some(
                identity.found(&opening.description, *device_bytes, segment_bytes).map(OpenDecision::Format),
            );
        }
    }
    decisions
}

/// Pool ids are unique, so that a moved disk is recognised.
fn random_uuid() -> Result<[u8; 16], AgentError> {
    let mut uuid = [0; 16];
    File::open("/dev/urandom").and_then(|mut source| source.read_exact(&mut uuid)).map_err(|error| {
        AgentError::new(ErrorKind::Resource, "cannot read /dev/urandom").with_source(error)
    })?;
    Ok(uuid)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn check(devices: &[(&str, u8, u8)]) -> Result<(), AgentError> {
        let mut identity = PoolIdentity::default();
        devices.iter().try_for_each(|(path, uuid, index)| {
            identity.enter(&Path::new(path).into(), Membership { uuid: [*uuid; 16], index: *index })
        })
    }

    #[test]
    fn devices_of_one_pool_may_be_in_any_order() {
        assert!(check(&[("/b", 1, 1), ("/a", 1, 0)]).is_ok());
    }

    #[test]
    fn devices_of_two_pools_and_copied_devices_are_rejected_by_name() {
        let error = check(&[("/a", 1, 0), ("/b", 2, 1)]).expect_err("two pools").to_string();
        assert!(error.contains("/a") && error.contains("/b") && error.contains("different pools"), "{error}");
        let error = check(&[("/a", 1, 0), ("/b", 1, 0)]).expect_err("a copy").to_string();
        assert!(error.contains("copy"), "{error}");
    }

    #[test]
    fn blank_device_joins_the_existing_pool_with_a_free_index() {
        let mut identity = PoolIdentity::default();
        identity.enter(&Path::new("/a").into(), Membership { uuid: [7; 16], index: 0 }).expect("the first");
        let params =
            identity.found(&Path::new("/b").into(), 1 << 30, 2 << 20).expect("parameters of a blank device");
        assert_eq!((params.pool_uuid, params.device_index), ([7; 16], 1));
    }
}
