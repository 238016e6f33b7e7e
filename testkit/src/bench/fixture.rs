//! Shared parts of the benchmarks: a fresh cluster with a client per node, and blocks with known bytes.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use reprise_client::{Client, ClientError, CommitOptions, ConnectOptions, Reservation, Ticket};
use reprise_policy::{BlockKey, ByteSize, Layout, TenantName};

use crate::cluster::{AgentSizes, Cluster, ControlPlanes};
use crate::kv_function::mix;
use crate::{configuration, engine};

use super::Settings;

/// Time limit of a reservation, a flush or a load in a benchmark.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// A cluster that ends with the benchmark, and a client for each agent.
pub struct Fixture {
    /// Declared before the cluster, so that sessions end before their agents.
    pub clients: Vec<Client>,
    pub cluster: Cluster,
}

/// Filled but uncommitted reservations, with their keys.
pub type Filled = Vec<(Reservation, BlockKey)>;

impl Fixture {
    /// Starts `nodes` agents with an embedded control plane.
    pub fn start(
        settings: &Settings,
        nodes: usize,
        layout: &Layout,
        sizes: AgentSizes,
    ) -> anyhow::Result<Fixture> {
        Fixture::start_on(settings, ControlPlanes::Embedded, nodes, (layout, sizes))
    }

    /// Starts `nodes` agents with the given kind of control plane.
    pub fn start_on(
        settings: &Settings,
        control: ControlPlanes,
        nodes: usize,
        (layout, sizes): (&Layout, AgentSizes),
    ) -> anyhow::Result<Fixture> {
        let mut cluster = Cluster::start_controlplane(&settings.directory, control)?;
        cluster.start_agents(nodes, sizes)?;
        let clients = cluster
            .file()
            .agents
            .iter()
            .map(|agent| connect(&agent.socket, layout))
            .collect::<anyhow::Result<Vec<_>>>()?;
        Ok(Fixture { clients, cluster })
    }
}

/// Connects a client with the benchmarks' namespace.
pub fn connect(socket: &Path, layout: &Layout) -> anyhow::Result<Client> {
    connect_as(socket, layout, &TenantName::default_tenant())
}

/// Connects a client for a tenant.
pub fn connect_as(socket: &Path, layout: &Layout, tenant: &TenantName) -> anyhow::Result<Client> {
    configuration::provide_salt(socket, tenant).context("the tenant's salt")?;
    let namespace = engine::namespace(layout);
    let options = ConnectOptions::new(socket, namespace, *layout).client_name("bench").tenant(tenant.clone());
    Client::connect(options).with_context(|| format!("connecting to {}", socket.display()))
}

/// Returns `count` keys that differ from those of every other seed.
pub fn keys(seed: u64, count: usize) -> Vec<BlockKey> {
    (0..count as u64)
        .map(|index| {
            let mut key = [0; 16];
            key[..8].copy_from_slice(&mix(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ index).to_le_bytes());
            key[8..].copy_from_slice(&mix((seed << 32) ^ !index).to_le_bytes());
            BlockKey(key)
        })
        .collect()
}

/// Returns the bytes of a block; the same for every block, because no benchmark depends on them.
pub fn payload(layout: &Layout) -> Vec<u8> {
    let words = layout.block_bytes() / 8;
    (0..words).flat_map(|index| mix(index).to_le_bytes()).collect()
}

/// Reserves slots for `keys` and fills them with `payload`.
pub fn fill(client: &Client, keys: &[BlockKey], payload: &[u8]) -> anyhow::Result<Filled> {
    let object_bytes = usize::try_from(client.layout().object_bytes()).expect("objects fit in memory");
    let objects: Vec<&[u8]> = payload.chunks(object_bytes).collect();
    fill_each(client, keys, |reservation, _| reservation.fill_from(&objects))
}

/// Reserves slots for `keys` and fills each with `fill`.
pub fn fill_each(
    client: &Client,
    keys: &[BlockKey],
    fill_one: impl Fn(&mut Reservation, &BlockKey) -> Result<(), ClientError>,
) -> anyhow::Result<Filled> {
    let mut filled = Vec::with_capacity(keys.len());
    while filled.len() < keys.len() {
        let wanted = u32::try_from(keys.len() - filled.len()).context("too many keys")?;
        let reservations = client.reserve(wanted, PATIENCE).context("reserve")?;
        if reservations.is_empty() {
            bail!("the arena has no space for the benchmark");
        }
        for mut reservation in reservations {
            let key = keys[filled.len()];
            fill_one(&mut reservation, &key)?;
            filled.push((reservation, key));
        }
    }
    Ok(filled)
}

/// Commits filled blocks and returns the ticket for their durability.
pub fn commit(client: &Client, filled: Filled) -> anyhow::Result<Ticket> {
    let count = filled.len();
    let outcome = client.commit(filled, CommitOptions::default()).context("commit")?;
    let committed = outcome.statuses.iter().filter(|status| status.is_committed()).count();
    ensure!(committed == count, "the agent committed {committed} of {count} blocks");
    Ok(outcome.ticket)
}

/// Saves blocks in batches of `batch` and waits until they are durable.
pub fn save_durable(client: &Client, keys: &[BlockKey], batch: usize, payload: &[u8]) -> anyhow::Result<()> {
    keys.chunks(batch).try_for_each(|part| commit_durable(client, fill(client, part, payload)?))
}

/// Commits filled blocks and waits until they are durable.
pub fn commit_durable(client: &Client, filled: Filled) -> anyhow::Result<()> {
    let ticket = commit(client, filled)?;
    let outcome = client.wait_durable(ticket, PATIENCE).context("waiting until durable")?;
    ensure!(outcome.lost_keys.is_empty(), "{} blocks did not become durable", outcome.lost_keys.len());
    Ok(())
}

/// Returns agent sizes from MiB.
pub fn sizes(arena_mib: u64, pool_mib: u64) -> AgentSizes {
    AgentSizes { arena: ByteSize(arena_mib << 20), pool: ByteSize(pool_mib << 20), moves: None }
}
