//! `reprise tenant`: lists, sets and removes the cluster-wide budgets of tenants, and creates their secrets.
//!
//! Each tenant's ledger is kept by one member, so `list` asks every member and merges the answers.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use reprise_policy::{ByteSize, TenantName};
use reprise_proto::connection::{REPLY_BYTES_MAX, is_absence};
use reprise_proto::controlplane::placement_client::PlacementClient;
use reprise_proto::controlplane::{
    Bytes, ListTenantsReply, ListTenantsRequest, RemoveTenantRequest, SetTenantRequest, Tenant, TenantState,
};
use reprise_proto::dial::cause;
use serde::Serialize;
use tonic::transport::Channel;

use crate::config::Config;
use crate::encryption_keys::KeyChange;
use crate::members::{Members, MembersArgs, endpoint, runtime};
use crate::{encryption_keys, salts, status};
use reprise_testkit::output::{Audience, Table, bytes_text};

/// Timeout of one call to a member.
const ANSWERED_WITHIN: Duration = Duration::from_secs(5);

/// Arguments of `reprise tenant`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct TenantArgs {
    #[command(flatten)]
    members: MembersArgs,
    #[command(subcommand)]
    action: Action,
}

#[derive(Clone, Debug, clap::Subcommand)]
enum Action {
    /// List the tenants with a budget, their limits and their usage by node.
    List,
    /// Replace a tenant's limits and reservations in the whole cluster.
    ///
    /// An omitted limit is removed; an omitted reservation becomes 0.
    Set(SetArgs),
    /// Remove a tenant's budget; limits in agents' configurations remain.
    Remove {
        /// Name of the tenant.
        name: TenantName,
    },
    #[command(flatten)]
    Secret(SecretAction),
}

#[derive(Clone, Debug, clap::Subcommand)]
enum SecretAction {
    /// Create the secret isolation salt of a tenant on this node.
    ///
    /// Run it on one node and copy the file to all others. Sessions of a tenant without a salt are refused. In
    /// Kubernetes, the operator creates salts.
    CreateSalt {
        /// Name of the tenant.
        name: TenantName,
        /// Create the file in this directory: session.salts of the agents.
        #[arg(long, value_name = "DIR")]
        folder: PathBuf,
    },
    /// Create a key by which agents encrypt a tenant's blocks on devices.
    ///
    /// Run it on one node and copy the file to all others. In Kubernetes, set keySecretRef of the CacheTenant.
    CreateKey {
        /// Name of the tenant.
        name: TenantName,
        /// Create the file in this directory: encryption.keys of the agents.
        #[arg(long, value_name = "DIR")]
        folder: PathBuf,
        /// Put a new key before the existing ones, which still decrypt.
        #[arg(long)]
        rotate: bool,
    },
}

#[derive(Clone, Debug, clap::Args)]
struct SetArgs {
    /// Name of the tenant; sessions without a tenant use 'default'.
    name: TenantName,
    /// Limit the tenant's DRAM, for example 64GiB [default: no limit].
    #[arg(long, value_name = "SIZE")]
    dram: Option<ByteSize>,
    /// Limit the tenant's NVMe, for example 10TiB [default: no limit].
    #[arg(long, value_name = "SIZE")]
    nvme: Option<ByteSize>,
    /// Reserve this much DRAM for the tenant.
    #[arg(long, value_name = "SIZE", default_value = "0")]
    dram_reserved: ByteSize,
    /// Reserve this much NVMe for the tenant.
    #[arg(long, value_name = "SIZE", default_value = "0")]
    nvme_reserved: ByteSize,
}

/// Bytes by tier in JSON output; `null` means no limit.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Amounts {
    dram: Option<u64>,
    nvme: Option<u64>,
}

type TierAmount = fn(&Amounts) -> Option<u64>;

const TIERS: [(&str, TierAmount); 2] = [("DRAM", |amounts| amounts.dram), ("NVMe", |amounts| amounts.nvme)];

/// Output of `reprise tenant list --json`.
#[derive(Debug, Serialize)]
struct TenantList {
    capacity: Amounts,
    overcommitted: Amounts,
    tenants: Vec<TenantEntry>,
}

#[derive(Debug, Serialize)]
struct TenantEntry {
    name: String,
    reserved: Amounts,
    limit: Amounts,
    /// Usage and grants; `null` while no member has the tenant's ledger.
    ledger: Option<Ledger>,
}

#[derive(Debug, Serialize)]
struct Ledger {
    /// Name of the member that keeps the ledger.
    member: String,
    used: Amounts,
    /// Sum of the nodes' grants, which bounds the tenant's usage.
    granted: Amounts,
    nodes: Vec<Share>,
}

#[derive(Debug, Serialize)]
struct Share {
    node: u32,
    granted: Amounts,
    used: Amounts,
}

/// Output of `reprise tenant create-salt --json` and `create-key --json`.
#[derive(Debug, Serialize)]
struct CreatedSecret {
    tenant: String,
    file: PathBuf,
}

/// Output of `reprise tenant set --json` and `remove --json`.
#[derive(Debug, Serialize)]
struct BudgetChange {
    tenant: String,
    /// The new budget; `null` if it was removed.
    budget: Option<NewBudget>,
}

#[derive(Debug, Serialize)]
struct NewBudget {
    reserved: Amounts,
    limit: Amounts,
}

pub(crate) fn command(args: &TenantArgs, config: &Config, audience: Audience) -> anyhow::Result<()> {
    let members = || args.members.find(config);
    match &args.action {
        Action::Secret(action) => action.create(audience),
        Action::List => runtime()?.block_on(list(&members()?, audience)),
        Action::Set(set) => {
            let (members, request) = (members()?, set.request()?);
            let call = async |mut client: PlacementClient<Channel>| client.set_tenant(request.clone()).await;
            runtime()?.block_on(at_any(&members, call))?;
            audience.emit(&BudgetChange::to(&request));
            audience.print_line(format!("set the budget of tenant '{}'", set.name));
            Ok(())
        }
        Action::Remove { name } => {
            let (members, request) = (members()?, RemoveTenantRequest { name: name.to_string() });
            let call =
                async |mut client: PlacementClient<Channel>| client.remove_tenant(request.clone()).await;
            runtime()?.block_on(at_any(&members, call))?;
            audience.emit(&BudgetChange { tenant: name.to_string(), budget: None });
            audience.print_line(format!("removed the budget of tenant '{name}'"));
            Ok(())
        }
    }
}

impl SecretAction {
    /// Creates the file of a secret on this node.
    fn create(&self, audience: Audience) -> anyhow::Result<()> {
        let (name, file, what) = match self {
            SecretAction::CreateSalt { name, folder } => {
                (name, salts::create(name, folder)?, "the isolation salt")
            }
            SecretAction::CreateKey { name, folder, rotate } => {
                let change = if *rotate { KeyChange::Rotate } else { KeyChange::Create };
                (name, encryption_keys::create(name, folder, change)?, "an encryption key")
            }
        };
        audience.emit(&CreatedSecret { tenant: name.to_string(), file: file.clone() });
        audience.print_line(format!(
            "created {what} of tenant '{name}': copy {} to all nodes, readable by the agent's user only",
            file.display()
        ));
        Ok(())
    }
}

impl SetArgs {
    fn request(&self) -> anyhow::Result<SetTenantRequest> {
        let reserved = Bytes { dram: self.dram_reserved.0, nvme: self.nvme_reserved.0 };
        ensure!(
            self.dram.is_some() || self.nvme.is_some() || reserved != Bytes::default(),
            "no budget given for tenant '{}': use --dram, --nvme, --dram-reserved or --nvme-reserved",
            self.name
        );
        let limit = |size: Option<ByteSize>| size.map_or(u64::MAX, |size| size.0);
        let limit = Bytes { dram: limit(self.dram), nvme: limit(self.nvme) };
        let tenant = Tenant { name: self.name.to_string(), reserved: Some(reserved), limit: Some(limit) };
        Ok(SetTenantRequest { tenant: Some(tenant) })
    }
}

impl BudgetChange {
    fn to(request: &SetTenantRequest) -> BudgetChange {
        let Tenant { name, reserved, limit } = request.tenant.clone().unwrap_or_default();
        let budget = NewBudget { reserved: amounts(reserved), limit: amounts(limit) };
        BudgetChange { tenant: name, budget: Some(budget) }
    }
}

/// Returns the reply of the first member that processes the call, or the error of the last one.
///
/// A rejection is final: every member would reject the call, so no other member is asked.
async fn at_any<T>(
    members: &Members,
    call: impl AsyncFn(PlacementClient<Channel>) -> Result<tonic::Response<T>, tonic::Status>,
) -> anyhow::Result<T> {
    let mut outcome = Err(anyhow::anyhow!("the cluster has no control-plane member"));
    for address in &members.addresses {
        outcome = match connect(members, address).await {
            Err(error) => Err(error),
            Ok(client) => match tokio::time::timeout(ANSWERED_WITHIN, call(client)).await {
                Ok(Ok(reply)) => return Ok(reply.into_inner()),
                Ok(Err(status)) if !is_absence(&status) => bail!("{}", status.message()),
                Ok(Err(status)) => Err(anyhow::anyhow!("{}", cause(&status))),
                Err(_) => {
                    Err(anyhow::anyhow!("the member at {address} did not answer within {ANSWERED_WITHIN:?}"))
                }
            },
        };
    }
    outcome
}

async fn connect(members: &Members, address: &str) -> anyhow::Result<PlacementClient<Channel>> {
    let endpoint = endpoint(address)?;
    let channel = tokio::time::timeout(ANSWERED_WITHIN, members.connect(address, &endpoint));
    let channel = channel.await.with_context(|| {
        format!("the control plane at {address} did not answer within {ANSWERED_WITHIN:?}")
    })??;
    Ok(PlacementClient::new(channel).max_decoding_message_size(REPLY_BYTES_MAX))
}

/// Returns a member's reply. The message of a rejection is the error text; the gRPC code adds nothing for
/// users.
async fn within_timeout<T>(
    call: impl Future<Output = Result<tonic::Response<T>, tonic::Status>>,
) -> anyhow::Result<T> {
    let answer = tokio::time::timeout(ANSWERED_WITHIN, call)
        .await
        .with_context(|| format!("the member did not answer within {ANSWERED_WITHIN:?}"))?;
    answer.map(tonic::Response::into_inner).map_err(|status| anyhow::anyhow!("{}", status.message()))
}

/// Lists tenants by asking every member; members that do not answer are skipped.
async fn list(asked: &Members, audience: Audience) -> anyhow::Result<()> {
    let (address, members, nodes) = status::members_and_nodes(asked).await?;
    let mut answers: Vec<(String, ListTenantsReply)> = Vec::new();
    for member in &members.members {
        // The address that has just worked: the registered one may be unreachable from here.
        let at = if member.name == members.answering { &address } else { &member.address };
        let Ok(mut client) = connect(asked, at).await else { continue };
        if let Ok(reply) = within_timeout(client.list_tenants(ListTenantsRequest {})).await {
            answers.push((member.name.clone(), reply));
        }
    }
    let listed = merge(answers)?;
    let names: BTreeMap<u32, String> = nodes.into_iter().map(|node| (node.node, node.name)).collect();
    audience.emit(&listed);
    audience.print_line(text(&listed, &names));
    Ok(())
}

/// Merges the members' replies; a tenant's usage comes from the member that keeps its ledger.
fn merge(answers: Vec<(String, ListTenantsReply)>) -> anyhow::Result<TenantList> {
    let (_, first) = answers.first().context("no control-plane member answers")?;
    let (capacity, overcommitted) = (amounts(first.capacity), amounts(first.overcommitted));
    let mut tenants: BTreeMap<String, TenantEntry> = BTreeMap::new();
    for (member, reply) in answers {
        for state in reply.tenants {
            let Some(tenant) = state.tenant.clone() else { continue };
            let entry = tenants.entry(tenant.name.clone()).or_insert_with(|| TenantEntry {
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
    Ok(TenantList { capacity, overcommitted, tenants: tenants.into_values().collect() })
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

fn text(listed: &TenantList, names: &BTreeMap<u32, String>) -> String {
    let words = |bytes: Option<u64>| bytes.map_or_else(|| "no limit".to_owned(), bytes_text);
    let mut table = Table::new(&["tenant", "node", "tier", "reserved", "used", "granted", "limit"]);
    for tenant in &listed.tenants {
        let ledger = tenant.ledger.as_ref();
        for (tier, of) in TIERS {
            let known = |of_ledger: Option<Amounts>| {
                of_ledger.map_or_else(|| "?".to_owned(), |amounts| words(of(&amounts)))
            };
            table.row(vec![
                tenant.name.clone(),
                "all".to_owned(),
                tier.to_owned(),
                words(of(&tenant.reserved)),
                known(ledger.map(|ledger| ledger.used)),
                known(ledger.map(|ledger| ledger.granted)),
                words(of(&tenant.limit)),
            ]);
            for share in ledger.iter().flat_map(|ledger| &ledger.nodes) {
                table.row(vec![
                    String::new(),
                    names.get(&share.node).cloned().unwrap_or_else(|| share.node.to_string()),
                    tier.to_owned(),
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
            "RESERVATIONS EXCEED the capacity of live nodes by {} of DRAM and {} of NVMe: lower them, or add nodes\n\n",
            words(dram),
            words(nvme)
        ),
    };
    format!(
        "capacity of live nodes: {} of DRAM, {} of NVMe\n\n{warning}{}",
        words(listed.capacity.dram),
        words(listed.capacity.nvme),
        if listed.tenants.is_empty() { "no tenant has a budget\n".to_owned() } else { table.render() }
    )
}

#[cfg(test)]
mod tests {
    use reprise_identity::Security;

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
    fn takes_usage_from_the_member_that_keeps_the_ledger() {
        let answers = vec![("x".to_owned(), reply(false)), ("y".to_owned(), reply(true))];
        let listed = merge(answers).expect("two replies");
        let ledger = listed.tenants[0].ledger.as_ref().expect("member y keeps the ledger");
        assert_eq!((ledger.member.as_str(), ledger.used.dram), ("y", Some(7)));
        let page = text(&listed, &BTreeMap::new());
        assert!(page.contains("no limit") && !page.contains("EXCEED"), "{page}");
        assert!(merge(Vec::new()).is_err());
    }

    #[test]
    fn asks_the_next_member_if_one_is_unavailable_but_not_after_a_rejection() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let listeners = [0, 1].map(|_| std::net::TcpListener::bind("127.0.0.1:0").expect("a free port"));
        let address = |listener: &std::net::TcpListener| listener.local_addr().expect("bound").to_string();
        let members =
            Members { addresses: listeners.iter().map(address).collect(), security: Security::Plain };
        let outcome_and_calls = |first: fn() -> tonic::Status| {
            let calls = std::cell::Cell::new(0);
            let outcome = runtime.block_on(at_any(&members, async |_| {
                calls.set(calls.get() + 1);
                if calls.get() == 1 { Err(first()) } else { Ok(tonic::Response::new(())) }
            }));
            (outcome.map_err(|error| error.to_string()), calls.get())
        };
        assert_eq!(outcome_and_calls(|| tonic::Status::unavailable("not now")), (Ok(()), 2));
        assert_eq!(outcome_and_calls(|| tonic::Status::failed_precondition("no")), (Err("no".to_owned()), 1));
    }

    #[test]
    fn json_output_of_set_has_null_for_no_limit() {
        let limit = Some(Bytes { dram: 100, nvme: u64::MAX });
        let tenant = Tenant { name: "a".to_owned(), reserved: Some(Bytes::default()), limit };
        let changed = BudgetChange::to(&SetTenantRequest { tenant: Some(tenant) });
        let object = serde_json::to_value(&changed).expect("JSON");
        assert_eq!(object["tenant"].as_str(), Some("a"));
        assert_eq!(object["budget"]["limit"]["dram"].as_u64(), Some(100));
        assert!(object["budget"]["limit"]["nvme"].is_null());
    }

    #[test]
    fn set_rejects_an_empty_budget() {
        let args = |dram| SetArgs {
            name: "a".parse().expect("a name"),
            dram,
            nvme: None,
            dram_reserved: ByteSize(0),
            nvme_reserved: ByteSize(0),
        };
        assert!(args(None).request().expect_err("no budget").to_string().contains("--nvme"));
        let request = args(Some(ByteSize(5))).request().expect("a limit");
        let limit = request.tenant.and_then(|tenant| tenant.limit).expect("the request has a limit");
        assert_eq!((limit.dram, limit.nvme), (5, u64::MAX));
    }
}
