//! Mappings of the arena regions that the agent granted to this session.
//!
//! The reader thread maps a region once per kind of access, when its descriptor arrives. The mapping lives as
//! long as the session or any span of it. Places of blocks are checked against the mapping's bounds: an
//! invalid place is a protocol error, never an invalid access.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{PoisonError, RwLock};

use reprise_buffers::{Access, MappedRegion, Span};
use reprise_proto::local::{Place, RegionGrant};

use crate::error::ClientError;

/// Maximum number of regions of a session: 1 TiB of DRAM in regions of 256 MiB, read-only and writable.
const REGIONS_MAX: usize = 8192;

/// Mapped regions by number.
#[derive(Debug, Default)]
pub(crate) struct RegionMap {
    regions: RwLock<HashMap<u32, Mappings>>,
}

/// Mappings of one region.
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

    /// Returns the span of `bytes` bytes at each place, in order.
    ///
    /// # Errors
    /// `Protocol` when a place lies outside its region, or in a region that was not granted with this access.
    pub(crate) fn spans<'a>(
        &self,
        places: impl Iterator<Item = Option<&'a Place>>,
        bytes: u64,
        access: Access,
    ) -> Result<Vec<Option<Span>>, ClientError> {
        let regions = self.regions.read().unwrap_or_else(PoisonError::into_inner);
        let span_of = |place: &Place| {
            if place.extent.is_some() {
                return Err(ClientError::Protocol("place of an extent, expected one of the arena".into()));
            }
            let mapping = regions.get(&place.region).and_then(|mappings| mappings.with(access));
            let mapping = mapping
                .ok_or_else(|| ClientError::Protocol(format!("region {} was not granted", place.region)))?;
            mapping.span(place.offset, bytes).map_err(|error| {
                ClientError::Protocol(format!("place outside region {}: {error}", place.region))
            })
        };
        places.map(|place| place.map(span_of).transpose()).collect()
    }
}

impl Mappings {
    /// Returns a mapping that allows at least this access.
    fn with(&self, access: Access) -> Option<&MappedRegion> {
        match access {
            Access::ReadOnly => self.read_only.as_ref().or(self.read_write.as_ref()),
            Access::ReadWrite => self.read_write.as_ref(),
        }
    }
}
