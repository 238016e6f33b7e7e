//! `reprise tenant`: what tenants may have in the whole cluster, and what they hold.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use reprise_policy::{ByteSize, TenantName};
use reprise_proto::connection::is_absence;
use reprise_proto::controlplane::placement_client::PlacementClient;
use reprise_proto::controlplane::{
    Bytes, ListTenantsReply, ListTenantsRequest, RemoveTenantRequest, SetTenantRequest, Tenant, TenantState,
};
use serde::Serialize;
use tonic::transport::Channel;

use crate::cluster::ClusterFile;
use crate::config::Config;
use crate::output::{Audience, Table, bytes_text};
use crate::status;

/// Bound on one member's answer.
const ANSWERED_WITHIN: Duration = Duration::from_secs(5);

/// Arguments of `reprise tenant`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct TenantArgs {
    /// A member's gRPC address, `host:port` [default: those of the running cluster].
    #[arg(long, value_name = "ADDRESS", global = true)]
    controlplane: Option<String>,
    /// Directory of the running cluster [default: the demo's].
    #[arg(long, value_name = "DIR", global = true)]
    cluster: Option<PathBuf>,
    #[command(subcommand)]
    action: Action,
}

#[derive(Clone, Debug, clap::Subcommand)]
enum Action {
    /// Every tenant with a budget: what it may have, what it holds, and where.
    List,
    /// Set what a tenant may have in the whole cluster, and what it is sure of.
    Set(SetArgs),
    /// End a tenant's budget; the limits in the agents' configurations go on.
    Remove {
        /// The tenant.
        name: TenantName,
    },
}

#[derive(Clone, Debug, clap::Args)]
struct SetArgs {
    /// The tenant; that of sessions that name none is 'default'.
    name: TenantName,
    /// DRAM at the most, like 64GiB [default: no limit].
    #[arg(long, value_name = "SIZE")]
    dram: Option<ByteSize>,
    /// NVMe at the most, like 10TiB [default: no limit].
    #[arg(long, value_name = "SIZE")]
    nvme: Option<ByteSize>,
    /// DRAM that the tenant is sure of.
    #[arg(long, value_name = "SIZE", default_value = "0")]
    dram_reserved: ByteSize,
    /// NVMe that the tenant is sure of.
    #[arg(long, value_name = "SIZE", default_value = "0")]
    nvme_reserved: ByteSize,
}

/// Bytes of both kinds, as printed for programs; no limit is `null`.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Amounts {
    dram: Option<u64>,
    nvme: Option<u64>,
}

type Room = fn(&Amounts) -> Option<u64>;

const ROOMS: [(&str, Room); 2] = [("DRAM", |amounts| amounts.dram), ("NVMe", |amounts| amounts.nvme)];

/// All tenants, as printed for programs.
#[derive(Debug, Serialize)]
struct Listed {
    capacity: Amounts,
    overcommitted: Amounts,
    tenants: Vec<ListedTenant>,
}

#[derive(Debug, Serialize)]
struct ListedTenant {
    name: String,
    reserved: Amounts,
    limit: Amounts,
    /// What it holds and may hold; none when no member has its ledger at the moment.
    ledger: Option<Ledger>,
}

#[derive(Debug, Serialize)]
struct Ledger {
    /// Name of the member.
    member: String,
    used: Amounts,
    /// What its nodes may hold at the most.
    granted: Amounts,
    nodes: Vec<Share>,
}

#[derive(Debug, Serialize)]
struct Share {
    node: u32,
    granted: Amounts,
    used: Amounts,
}

/// What was changed, for programs.
#[derive(Debug, Serialize)]
struct Changed {
    tenant: String,
    /// None: it has no budget any more.
    budget: Option<ChangedBudget>,
}

#[derive(Debug, Serialize)]
struct ChangedBudget {
    reserved: Amounts,
    limit: Amounts,
}

/// `reprise tenant`.
pub(crate) fn command(args: &TenantArgs, config: &Config, audience: Audience) -> anyhow::Result<()> {
    let addresses = ClusterFile::members_of(args.controlplane.as_ref(), args.cluster.as_deref(), config)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        match &args.action {
            Action::List => list(&addresses, audience).await,
            Action::Set(set) => {
                let request = set.request()?;
                let call =
                    async |mut client: PlacementClient<Channel>| client.set_tenant(request.clone()).await;
                at_any(&addresses, call).await?;
                audience.emit(&Changed::to(&request));
                audience.say(format!("the budget of tenant '{}' is set", set.name));
                Ok(())
            }
            Action::Remove { name } => {
                let request = RemoveTenantRequest { name: name.to_string() };
                let call =
                    async |mut client: PlacementClient<Channel>| client.remove_tenant(request.clone()).await;
                at_any(&addresses, call).await?;
                audience.emit(&Changed { tenant: name.to_string(), budget: None });
                audience.say(format!("tenant '{name}' has no budget any more"));
                Ok(())
            }
        }
    })
}

impl SetArgs {
    fn request(&self) -> anyhow::Result<SetTenantRequest> {
        let reserved = Bytes { dram: self.dram_reserved.0, nvme: self.nvme_reserved.0 };
        ensure!(
            self.dram.is_some() || self.nvme.is_some() || reserved != Bytes::default(),
            "say what tenant '{}' may have: --dram, --nvme, --dram-reserved, --nvme-reserved",
            self.name
        );
        let limit = |size: Option<ByteSize>| size.map_or(u64::MAX, |size| size.0);
        let limit = Bytes { dram: limit(self.dram), nvme: limit(self.nvme) };
        let tenant = Tenant { name: self.name.to_string(), reserved: Some(reserved), limit: Some(limit) };
        Ok(SetTenantRequest { tenant: Some(tenant) })
    }
}

impl Changed {
    fn to(request: &SetTenantRequest) -> Changed {
        let Tenant { name, reserved, limit } = request.tenant.clone().unwrap_or_default();
        let budget = ChangedBudget { reserved: amounts(reserved), limit: amounts(limit) };
        Changed { tenant: name, budget: Some(budget) }
    }
}

/// The answer of the first member that can give one; the error is the last one's. A refusal is one for all.
async fn at_any<T>(
    addresses: &[String],
    call: impl AsyncFn(PlacementClient<Channel>) -> Result<tonic::Response<T>, tonic::Status>,
) -> anyhow::Result<T> {
    let mut outcome = Err(anyhow::anyhow!("the cluster has no member of the control plane"));
    for address in addresses {
        outcome = match connect(address).await {
            Err(error) => Err(error),
            Ok(client) => match tokio::time::timeout(ANSWERED_WITHIN, call(client)).await {
                Ok(Ok(reply)) => return Ok(reply.into_inner()),
                Ok(Err(status)) if !is_absence(&status) => bail!("{}", status.message()),
                Ok(Err(status)) => Err(anyhow::anyhow!("{}", status.message())),
                Err(_) => Err(anyhow::anyhow!("the member at {address} did not answer in time")),
            },
        };
    }
    outcome
}

async fn connect(address: &str) -> anyhow::Result<PlacementClient<Channel>> {
    let connecting = PlacementClient::connect(format!("http://{address}"));
    tokio::time::timeout(ANSWERED_WITHIN, connecting)
        .await
        .with_context(|| format!("the control plane at {address} did not answer within {ANSWERED_WITHIN:?}"))?
        .with_context(|| format!("cannot reach the control plane at {address}"))
}

/// A member's answer; its refusals are for people already.
async fn within<T>(
    call: impl Future<Output = Result<tonic::Response<T>, tonic::Status>>,
) -> anyhow::Result<T> {
    let answer =
        tokio::time::timeout(ANSWERED_WITHIN, call).await.context("the member did not answer in time")?;
    answer.map(tonic::Response::into_inner).map_err(|status| anyhow::anyhow!("{}", status.message()))
}

/// Asks every member: each knows the ledgers of its own tenants.
async fn list(addresses: &[String], audience: Audience) -> anyhow::Result<()> {
    let (address, members, nodes) = status::members_and_nodes(addresses).await?;
    let mut answers: Vec<(String, ListTenantsReply)> = Vec::new();
    for member in &members.members {
        // The one that answers is reached where it has answered.
        let at = if member.name == members.answering { &address } else { &member.address };
        let Ok(mut client) = connect(at).await else { continue };
        if let Ok(reply) = within(client.list_tenants(ListTenantsRequest {})).await {
            answers.push((member.name.clone(), reply));
        }
    }
    let listed = listed(answers)?;
    let names: BTreeMap<u32, String> = nodes.into_iter().map(|node| (node.node, node.name)).collect();
    audience.emit(&listed);
    audience.say(text(&listed, &names));
    Ok(())
}

/// What the members say together.
fn listed(answers: Vec<(String, ListTenantsReply)>) -> anyhow::Result<Listed> {
    let (_, first) = answers.first().context("no member of the control plane answers")?;
    let (capacity, overcommitted) = (amounts(first.capacity), amounts(first.overcommitted));
    let mut tenants: BTreeMap<String, ListedTenant> = BTreeMap::new();
    for (member, reply) in answers {
        for state in reply.tenants {
            let Some(tenant) = state.tenant.clone() else { continue };
            let entry = tenants.entry(tenant.name.clone()).or_insert_with(|| ListedTenant {
                name: tenant.name,
                reserved: amounts(tenant.reserved),
                limit: amounts(tenant.limit),
                ledger: None,
            });
            if state.ledger_here {
                entry.ledger = Some(ledger(member.clone(), state));
            }
        }
    }
    Ok(Listed { capacity, overcommitted, tenants: tenants.into_values().collect() })
}

fn ledger(member: String, state: TenantState) -> Ledger {
    let share = |share: reprise_proto::controlplane::TenantShare| Share {
        node: share.node,
        granted: amounts(share.granted),
        used: amounts(share.used),
    };
    Ledger {
        member,
        used: amounts(state.used),
        granted: amounts(state.charged),
        nodes: state.shares.into_iter().map(share).collect(),
    }
}

fn amounts(bytes: Option<Bytes>) -> Amounts {
    let Bytes { dram, nvme } = bytes.unwrap_or_default();
    let limited = |bytes: u64| Some(bytes).filter(|bytes| *bytes < u64::MAX);
    Amounts { dram: limited(dram), nvme: limited(nvme) }
}

fn text(listed: &Listed, names: &BTreeMap<u32, String>) -> String {
    let words = |bytes: Option<u64>| bytes.map_or_else(|| "no limit".to_owned(), bytes_text);
    let mut table = Table::new(&["tenant", "node", "", "reserved", "used", "granted", "at the most"]);
    for tenant in &listed.tenants {
        let ledger = tenant.ledger.as_ref();
        for (room, of) in ROOMS {
            let known = |of_ledger: Option<Amounts>| {
                of_ledger.map_or_else(|| "?".to_owned(), |amounts| words(of(&amounts)))
            };
            table.row(vec![
                tenant.name.clone(),
                "all".to_owned(),
                room.to_owned(),
                words(of(&tenant.reserved)),
                known(ledger.map(|ledger| ledger.used)),
                known(ledger.map(|ledger| ledger.granted)),
                words(of(&tenant.limit)),
            ]);
            for share in ledger.iter().flat_map(|ledger| &ledger.nodes) {
                table.row(vec![
                    String::new(),
                    names.get(&share.node).cloned().unwrap_or_else(|| share.node.to_string()),
                    room.to_owned(),
                    String::new(),
                    words(of(&share.used)),
                    words(of(&share.granted)),
                    String::new(),
                ]);
            }
        }
    }
    let warning = match (listed.overcommitted.dram, listed.overcommitted.nvme) {
        (Some(0), Some(0)) => String::new(),
        (dram, nvme) => format!(
            "RESERVATIONS EXCEED what living nodes have by {} of DRAM and {} of NVMe: lower them, or add nodes\n\n",
            words(dram),
            words(nvme)
        ),
    };
    format!(
        "living nodes have {} of DRAM and {} of NVMe\n\n{warning}{}",
        words(listed.capacity.dram),
        words(listed.capacity.nvme),
        if listed.tenants.is_empty() { "no tenant has a budget\n".to_owned() } else { table.render() }
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(ledger_here: bool) -> ListTenantsReply {
        let both = |bytes| Some(Bytes { dram: bytes, nvme: bytes });
        let limit = Some(Bytes { dram: 100, nvme: u64::MAX });
        let tenant = Tenant { name: "a".to_owned(), reserved: both(0), limit };
        let state =
            TenantState { tenant: Some(tenant), ledger_here, used: both(7), ..TenantState::default() };
        ListTenantsReply { tenants: vec![state], capacity: both(1000), overcommitted: both(0) }
    }

    #[test]
    fn what_a_tenant_holds_is_said_by_the_member_that_has_its_ledger() {
        let answers = vec![("x".to_owned(), reply(false)), ("y".to_owned(), reply(true))];
        let listed = listed(answers).expect("two have answered");
        let ledger = listed.tenants[0].ledger.as_ref().expect("y has it");
        assert_eq!((ledger.member.as_str(), ledger.used.dram), ("y", Some(7)));
        let page = text(&listed, &BTreeMap::new());
        assert!(page.contains("no limit") && !page.contains("EXCEED"), "{page}");
        assert!(super::listed(Vec::new()).is_err());
    }

    #[test]
    fn what_one_member_cannot_do_now_the_next_one_is_asked_and_a_refusal_is_one_for_all() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let listeners = [0, 1].map(|_| std::net::TcpListener::bind("127.0.0.1:0").expect("a free port"));
        let addresses =
            listeners.each_ref().map(|listener| listener.local_addr().expect("bound").to_string());
        let asked = |first: fn() -> tonic::Status| {
            let calls = std::cell::Cell::new(0);
            let outcome = runtime.block_on(at_any(&addresses, async |_| {
                calls.set(calls.get() + 1);
                if calls.get() == 1 { Err(first()) } else { Ok(tonic::Response::new(())) }
            }));
            (outcome.map_err(|error| error.to_string()), calls.get())
        };
        assert_eq!(asked(|| tonic::Status::unavailable("not now")), (Ok(()), 2));
        assert_eq!(asked(|| tonic::Status::failed_precondition("no")), (Err("no".to_owned()), 1));
    }

    #[test]
    fn programs_get_what_was_set_as_one_object_in_which_no_limit_is_null() {
        let limit = Some(Bytes { dram: 100, nvme: u64::MAX });
        let tenant = Tenant { name: "a".to_owned(), reserved: Some(Bytes::default()), limit };
        let changed = Changed::to(&SetTenantRequest { tenant: Some(tenant) });
        let object = serde_json::to_value(&changed).expect("JSON");
        assert_eq!(object["tenant"].as_str(), Some("a"));
        assert_eq!(object["budget"]["limit"]["dram"].as_u64(), Some(100));
        assert!(object["budget"]["limit"]["nvme"].is_null());
    }

    #[test]
    fn a_budget_of_nothing_is_no_budget() {
        let args = |dram| SetArgs {
            name: "a".parse().expect("a name"),
            dram,
            nvme: None,
            dram_reserved: ByteSize(0),
            nvme_reserved: ByteSize(0),
        };
        assert!(args(None).request().expect_err("nothing is said").to_string().contains("--nvme"));
        let request = args(Some(ByteSize(5))).request().expect("a limit");
        let limit = request.tenant.and_then(|tenant| tenant.limit).expect("there is one");
        assert_eq!((limit.dram, limit.nvme), (5, u64::MAX));
    }
}
