//! Blocks that their only holder evicts just before a member is killed: finally, no look-up may return the
//! holder.
//!
//! The blocks belong to a separate tenant with a small budget, so that each save evicts the tenant's oldest
//! blocks. The benchmark asks the holder which blocks it has evicted. A look-up that returns the holder is
//! stale until the holder's withdrawals arrive, and wrong if it stays so.

use std::time::Instant;

use anyhow::{Context, ensure};
use reprise_client::{Client, Scope};
use reprise_policy::layout::PAGE_BYTES;
use reprise_policy::{BlockKey, Layout, TenantName};
use reprise_proto::controlplane::placement_client::PlacementClient;
use reprise_proto::controlplane::{Bytes, SetTenantRequest, Tenant};

use super::save;
use reprise_testkit::bench::fixture::{Fixture, PATIENCE, connect_as, keys};
use reprise_testkit::http;

/// Name of the tenant.
const TENANT: &str = "evicting";

/// Number of blocks of a round; at least half of them must be evicted.
const BLOCKS: usize = 100;

/// Number of blocks that the tenant may have on each node: the initial split of its budget. A round's blocks
/// fit.
const ROOM_OF_NODE: u64 = 2 * BLOCKS as u64;

/// Seed of the first round's keys; each round uses two seeds.
const SEED: u64 = 71_001;

/// Clients of the tenant on the holder and on the asking node.
pub(super) struct EvictedBlocks {
    holder: Client,
    asking: Client,
    seed: u64,
}

impl EvictedBlocks {
    /// Sets the tenant's budget, and waits until the holder enforces it.
    pub(super) fn start(fixture: &Fixture, layout: &Layout) -> anyhow::Result<EvictedBlocks> {
        let tenant: TenantName = TENANT.parse().expect("a name of letters");
        let file = fixture.cluster.file();
        let [holder, asking] = [&file.agents[0], &file.agents[1]];
        let evicting = EvictedBlocks {
            holder: connect_as(&holder.socket, layout, &tenant)?,
            asking: connect_as(&asking.socket, layout, &tenant)?,
            seed: SEED,
        };
        let slot_bytes = layout.slot_bytes() + PAGE_BYTES;
        set_budget(&file.members[0].grpc, ROOM_OF_NODE * slot_bytes * file.agents.len() as u64)?;
        let give_up = Instant::now() + PATIENCE;
        while limit(&holder.admin)?.is_none() {
            ensure!(Instant::now() < give_up, "the tenant's budget did not reach the node in time");
        }
        Ok(evicting)
    }

    /// Saves blocks, waits until the asking node finds them, and saves others until half of the first are
    /// evicted.
    ///
    /// Returns the evicted blocks.
    pub(super) fn evict(&mut self) -> anyhow::Result<Vec<BlockKey>> {
        let blocks = keys(self.seed, BLOCKS);
        save(&self.holder, &blocks)?;
        // Drop the copies in DRAM, so that evicting a block from NVMe removes it from the node.
        self.holder.trim().context("trim")?;
        let give_up = Instant::now() + PATIENCE;
        while self.asking.match_keys(&blocks, Scope::Cluster).context("match")?.len() < BLOCKS {
            ensure!(Instant::now() < give_up, "the tenant's blocks were not found in time");
        }
        let mut gone = Vec::new();
        while gone.len() < BLOCKS / 2 {
            ensure!(Instant::now() < give_up, "the tenant is at its limit, but no block was evicted");
            self.seed += 1;
            // The check itself touches the blocks that remain. This many new blocks evict half of the first.
            save(&self.holder, &keys(self.seed, ROOM_OF_NODE as usize - BLOCKS / 2))?;
            gone = answered(&self.holder, &blocks, Scope::Local)?.1;
        }
        self.seed += 1;
        Ok(gone)
    }

    /// Waits until no evicted block is found; returns the number that are still found at the time limit.
    pub(super) fn still_answered(&self, evicted: &[BlockKey]) -> anyhow::Result<usize> {
        let give_up = Instant::now() + PATIENCE;
        let mut still = evicted.to_vec();
        while !still.is_empty() && Instant::now() < give_up {
            still = answered(&self.asking, &still, Scope::Cluster)?.0;
        }
        Ok(still.len())
    }
}

/// Splits blocks into those that are found and those that are not.
fn answered(
    client: &Client,
    blocks: &[BlockKey],
    scope: Scope,
) -> anyhow::Result<(Vec<BlockKey>, Vec<BlockKey>)> {
    let (mut there, mut absent) = (Vec::new(), Vec::new());
    for block in blocks {
        let found = client.match_keys(std::slice::from_ref(block), scope).context("match")?;
        let side = if found.is_empty() { &mut absent } else { &mut there };
        side.push(*block);
    }
    Ok((there, absent))
}

fn set_budget(member: &str, nvme: u64) -> anyhow::Result<()> {
    let (reserved, limit) = (Some(Bytes::default()), Some(Bytes { dram: u64::MAX, nvme }));
    let request = SetTenantRequest { tenant: Some(Tenant { name: TENANT.to_owned(), reserved, limit }) };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut client =
            PlacementClient::connect(format!("http://{member}")).await.context("connecting to a member")?;
        client.set_tenant(request).await.context("setting a tenant's budget")?;
        Ok(())
    })
}

/// Returns the tenant's NVMe limit on a node; `None` before the node has a grant.
fn limit(admin: &str) -> anyhow::Result<Option<u64>> {
    let status: serde_json::Value = serde_json::from_str(&http::get(admin, "/status")?)?;
    let tenants = status["tenants"].as_array().context("`tenants` is missing from an agent's status")?;
    let tenant = tenants.iter().find(|tenant| tenant["name"] == TENANT);
    Ok(tenant.and_then(|tenant| tenant["nvme"]["limit"].as_u64()))
}
