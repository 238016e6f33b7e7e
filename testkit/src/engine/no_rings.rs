//! Replacement of registered KV memory in a build without rings: such memory cannot be opened.

use anyhow::bail;
use reprise_client::{Client, CommitOptions, ExtentStatus};
use reprise_policy::BlockKey;

use super::outcome::RingTraffic;
use crate::paged_kv::PhysicalBlock;

/// Memory that rings reach: no value exists in this build.
pub(super) enum RegisteredKv {}

impl RegisteredKv {
    pub(super) fn open(_: &Client, _: usize) -> anyhow::Result<RegisteredKv> {
        bail!("{}", super::path::NOT_BUILT)
    }

    pub(super) fn reopen(&mut self, _: &Client) -> anyhow::Result<()> {
        match *self {}
    }

    pub(super) fn backend(&self) -> String {
        match *self {}
    }

    pub(super) fn allocate(&mut self, _: usize) -> Option<Vec<PhysicalBlock>> {
        match *self {}
    }

    pub(super) fn release(&mut self, _: Vec<PhysicalBlock>) {
        match *self {}
    }

    pub(super) fn read<R>(&mut self, _: PhysicalBlock, _: u32, _: impl FnOnce(&[u8]) -> R) -> R {
        match *self {}
    }

    pub(super) fn write<R>(&mut self, _: PhysicalBlock, _: u32, _: impl FnOnce(&mut [u8]) -> R) -> R {
        match *self {}
    }

    pub(super) fn load(
        &mut self,
        _: &[(PhysicalBlock, BlockKey)],
        _: &mut RingTraffic,
    ) -> anyhow::Result<Vec<bool>> {
        match *self {}
    }

    pub(super) fn save(
        &mut self,
        _: &[(PhysicalBlock, BlockKey)],
        _: CommitOptions,
        _: &mut RingTraffic,
    ) -> anyhow::Result<Vec<ExtentStatus>> {
        match *self {}
    }
}
