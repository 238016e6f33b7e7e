//! One pool, one identity: which devices belong together, and what fresh ones become.
//!
//! Devices that hold a pool already must agree on its id and have different indices; their order in the configuration
//! does not matter, so disks may move. Fresh devices join the pool that is there, or found a new one.

use std::fs::File;
use std::io::Read;
use std::time::{SystemTime, UNIX_EPOCH};

use reprise_agent_core::pool::PoolParams;

use super::{Found, Opening, Verdict};
use crate::error::{AgentError, ErrorKind};

/// What each opening thread is told.
///
/// # Errors
/// Devices of different pools, or one device twice.
pub(super) fn decide(
    openings: &[Opening],
    found: &[Found],
    segment_bytes: u64,
) -> Result<Vec<Verdict>, AgentError> {
    let known: Vec<Known> = openings
        .iter()
        .zip(found)
        .filter_map(|(opening, found)| match found {
            Found::Pool(recovered) => Some(Known {
                path: opening.path.display().to_string(),
                uuid: recovered.pool.pool_uuid(),
                index: recovered.pool.device_index(),
            }),
            Found::Blank { .. } => None,
        })
        .collect();
    check(&known)?;
    let uuid = match known.first() {
        Some(known) => known.uuid,
        None => random_uuid()?,
    };
    let mut fresh = (0..=u8::MAX).filter(|index| known.iter().all(|known| known.index != *index));
    let created_unix_us = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| u64::try_from(since.as_micros()).unwrap_or(u64::MAX));
    let verdict = |found: &Found| match found {
        Found::Pool(_) => Verdict::Keep,
        Found::Blank { device_bytes } => Verdict::Format(PoolParams {
            device_bytes: *device_bytes,
            segment_bytes,
            pool_uuid: uuid,
            device_index: fresh.next().expect("there are more indices than devices"),
            created_unix_us,
        }),
    };
    Ok(found.iter().map(verdict).collect())
}

/// A device that belongs to a pool.
struct Known {
    path: String,
    uuid: [u8; 16],
    index: u8,
}

fn check(known: &[Known]) -> Result<(), AgentError> {
    for (position, device) in known.iter().enumerate() {
        for other in &known[..position] {
            let text = if device.uuid != other.uuid {
                format!(
                    "'{}' and '{}' belong to different pools: configure one of them, or erase the other",
                    other.path, device.path
                )
            } else if device.index == other.index {
                format!(
                    "'{}' is a copy of '{}': configure one of them, or erase the other",
                    device.path, other.path
                )
            } else {
                continue;
            };
            return Err(AgentError::new(ErrorKind::Device, format!("pool devices {text}")));
        }
    }
    Ok(())
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

    fn known(path: &str, uuid: u8, index: u8) -> Known {
        Known { path: path.to_owned(), uuid: [uuid; 16], index }
    }

    #[test]
    fn devices_of_one_pool_may_come_in_any_order() {
        assert!(check(&[known("/b", 1, 1), known("/a", 1, 0)]).is_ok());
    }

    #[test]
    fn devices_of_two_pools_and_a_copied_device_are_named() {
        let error = check(&[known("/a", 1, 0), known("/b", 2, 1)]).expect_err("two pools").to_string();
        assert!(error.contains("/a") && error.contains("/b") && error.contains("different pools"), "{error}");
        let error = check(&[known("/a", 1, 0), known("/b", 1, 0)]).expect_err("a copy").to_string();
        assert!(error.contains("copy"), "{error}");
    }
}
