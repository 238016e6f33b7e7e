//! Mappings of the arena regions that the agent granted to this session.
//!
//! A region is mapped once per kind of access, by the reader thread, when its descriptor arrives, and stays mapped
//! as long as the session or any span of it lives. The place of a block is looked up here and checked against the
//! mapping's bounds: a wrong place is an error of the protocol, never a wild access.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{PoisonError, RwLock};

use reprise_buffers::{Access, MappedRegion, Span};
use reprise_proto::local::{Place, RegionGrant};

use crate::error::ClientError;

/// Regions of a session at the most: 1 TiB of DRAM in regions of 256 MiB, read-only and writable.
const REGIONS_MAX: usize = 8192;

/// Mapped regions by number.
#[derive(Debug, Default)]
pub(crate) struct RegionMap {
    regions: RwLock<HashMap<u32, Mappings>>,
}

/// The mappings of one region.
#[derive(Debug, Default)]
struct Mappings {
    read_only: Option<MappedRegion>,
    read_write: Option<MappedRegion>,
}

impl RegionMap {
    /// Maps a granted region.
    ///
    /// # Errors
    /// `Memory` when it cannot be mapped, `Protocol` beyond [`REGIONS_MAX`].
    pub(crate) fn insert(&self, grant: &RegionGrant, descriptor: OwnedFd) -> Result<(), ClientError> {
        let access = if grant.writable { Access::ReadWrite } else { Access::ReadOnly };
        let mapped = MappedRegion::map(descriptor, grant.bytes, access)
            .map_err(|source| ClientError::Memory { context: "map a granted region", source })?;
        let mapped = Some(mapped);
        let mut regions = self.regions.write().unwrap_or_else(PoisonError::into_inner);
        if regions.len() >= REGIONS_MAX {
            return Err(ClientError::Protocol(format!("more than {REGIONS_MAX} regions were granted")));
        }
        let mappings = regions.entry(grant.region).or_default();
        match access {
            Access::ReadOnly => mappings.read_only = mapped,
            Access::ReadWrite => mappings.read_write = mapped,
        }
        Ok(())
    }

    /// The span of `bytes` bytes at each place, in order.
    ///
    /// # Errors
    /// `Protocol` when a place lies in no region granted with this access, or outside it.
    pub(crate) fn spans<'a>(
        &self,
        places: impl Iterator<Item = Option<&'a Place>>,
        bytes: u64,
        access: Access,
    ) -> Result<Vec<Option<Span>>, ClientError> {
        let regions = self.regions.read().unwrap_or_else(PoisonError::into_inner);
        let span_of = |place: &Place| {
            let mapping = regions.get(&place.region).and_then(|mappings| mappings.with(access));
            let mapping = mapping.ok_or_else(|| {
                ClientError::Protocol(format!("region {} is used but was not granted", place.region))
            })?;
            mapping.span(place.offset, bytes).map_err(|error| {
                ClientError::Protocol(format!("a place outside region {}: {error}", place.region))
            })
        };
        places.map(|place| place.map(span_of).transpose()).collect()
    }
}

impl Mappings {
    /// A mapping that allows at least this access.
    fn with(&self, access: Access) -> Option<&MappedRegion> {
        match access {
            Access::ReadOnly => self.read_only.as_ref().or(self.read_write.as_ref()),
            Access::ReadWrite => self.read_write.as_ref(),
        }
    }
}
