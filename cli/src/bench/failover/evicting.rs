//! Blocks that their only holder evicts a moment before a member is killed: in the end nobody is sent there for them.
//!
//! They are of a tenant of its own, whose budget is full soon: what it saves next takes the place of its oldest blocks. Which of them
//! the holder has dropped, it says itself. Until its withdrawals have arrived an answer that names it is late, not wrong; wrong is one
//! that stays.

use std::time::Instant;

use anyhow::{Context, ensure};
use reprise_client::{Client, Scope};
use reprise_policy::layout::PAGE_BYTES;
use reprise_policy::{BlockKey, Layout, TenantName};
use reprise_proto::controlplane::placement_client::PlacementClient;
use reprise_proto::controlplane::{Bytes, SetTenantRequest, Tenant};

use super::super::fixture::{Fixture, PATIENCE, connect_as, keys};
use super::keyed;
use crate::http;

/// Whose blocks they are.
const TENANT: &str = "evicting";

/// Blocks of a round, at least half of which must have gone.
const BLOCKS: usize = 100;

/// Blocks that the tenant may have on each of the nodes, as its budget is split at first: a round's blocks are there at one time.
const ROOM_OF_NODE: u64 = 2 * BLOCKS as u64;

/// Seed of the first round's keys; each round has two more.
const SEED: u64 = 71_001;

/// The tenant on the node that holds its blocks, and on the one that asks for them.
pub(super) struct Evicting {
    holder: Client,
    asking: Client,
    seed: u64,
}

impl Evicting {
    /// Sets the tenant's budget, and waits until the holder keeps to it.
    pub(super) fn start(fixture: &Fixture, layout: &Layout) -> anyhow::Result<Evicting> {
        let tenant: TenantName = TENANT.parse().expect("a name of letters");
        let file = fixture.cluster.file();
        let [holder, asking] = [&file.agents[0], &file.agents[1]];
        let evicting = Evicting {
            holder: connect_as(&holder.socket, layout, &tenant)?,
            asking: connect_as(&asking.socket, layout, &tenant)?,
            seed: SEED,
        };
        let slot_bytes = layout.slot_bytes() + PAGE_BYTES;
        set_budget(&file.members[0].grpc, ROOM_OF_NODE * slot_bytes * file.agents.len() as u64)?;
        let give_up = Instant::now() + PATIENCE;
        while limit(&holder.admin)?.is_none() {
            ensure!(Instant::now() < give_up, "the budget of a tenant has not reached its node in time");
        }
        Ok(evicting)
    }

    /// Saves blocks of which the asking node comes to know, then others, until half of the first are gone: those.
    pub(super) fn evict(&mut self) -> anyhow::Result<Vec<BlockKey>> {
        let blocks = keys(self.seed, BLOCKS);
        keyed::save(&self.holder, &blocks)?;
        // What is only on NVMe is gone when it is evicted there.
        self.holder.trim().context("trim")?;
        let give_up = Instant::now() + PATIENCE;
        while self.asking.match_keys(&blocks, Scope::Cluster).context("match")?.len() < BLOCKS {
            ensure!(Instant::now() < give_up, "blocks of the evicting tenant are not found in time");
        }
        let mut gone = Vec::new();
        while gone.len() < BLOCKS / 2 {
            ensure!(Instant::now() < give_up, "a tenant at its limit evicts nothing");
            self.seed += 1;
            // Looking is a use of what is found: so many others at once leave room for half of the first.
            keyed::save(&self.holder, &keys(self.seed, ROOM_OF_NODE as usize - BLOCKS / 2))?;
            gone = answered(&self.holder, &blocks, Scope::Local)?.1;
        }
        self.seed += 1;
        Ok(gone)
    }

    /// Waits until none of the evicted blocks is answered any more; how many are in the end.
    pub(super) fn still_answered(&self, evicted: &[BlockKey]) -> anyhow::Result<usize> {
        let give_up = Instant::now() + PATIENCE;
        let mut still = evicted.to_vec();
        while !still.is_empty() && Instant::now() < give_up {
            still = answered(&self.asking, &still, Scope::Cluster)?.0;
        }
        Ok(still.len())
    }
}

/// Those of the blocks that are answered, and the others.
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

/// What a node may hold of the tenant on NVMe; `None` before it has been told.
fn limit(admin: &str) -> anyhow::Result<Option<u64>> {
    let status: serde_json::Value = serde_json::from_str(&http::get(admin, "/status")?)?;
    let tenants = status["tenants"].as_array().context("an agent's status has no tenants")?;
    let ours = tenants.iter().find(|tenant| tenant["name"] == TENANT);
    Ok(ours.and_then(|tenant| tenant["nvme"]["limit"].as_u64()))
}
