//! Usage of tenants in a cluster.
//!
//! Each member knows the usage of the tenants in its hash slots, from the reports of nodes. All members are
//! therefore queried concurrently, for all tenants of the cluster. A tenant without an answer is unknown, not
//! unused: its member was not reached, or is not sure of its ownership. A sum is also unknown while nodes
//! have not reported to the member that computes it.
//!
//! A complete answer is cached for [`COMPLETE_TTL`]; a partial one is requested again soon.

use std::collections::BTreeMap;
use std::time::Duration;

use reprise_crds::status::Reason;
use reprise_policy::tenant::TENANTS_MAX;
use reprise_proto::controlplane::placement_client::PlacementClient;
use reprise_proto::controlplane::{self as wire, ListHoldingsReply, ListHoldingsRequest, TenantHolding};
use tokio::time::Instant;
use tonic::transport::Channel;

use super::{CallError, ControlPlanes, RETRY_INTERVAL, TierBytes, call_members, list_first};
use crate::framework::refusal::Refusal;
use crate::reconcile::names::ClusterNames;

/// Lifetime of a complete answer, and thereby the interval between two measurements.
const COMPLETE_TTL: Duration = Duration::from_secs(60);
/// Lifetime of a partial answer.
const PARTIAL_TTL: Duration = RETRY_INTERVAL;

/// Usage of a tenant in a cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MeasuredUsage {
    /// Bytes used in each tier.
    pub used: TierBytes,
    /// Slots per tier, if all nodes report them.
    pub blocks: Option<TierBytes>,
    /// Number of absent nodes, which are not counted.
    pub away: u32,
}

/// The usage, or why it is unknown: with reason `ControlPlaneUnreachable`, members did not respond, or none is sure
/// that it owns the tenant; with reason `NotReported`, nodes have not reported yet.
pub type UsageResult = Result<MeasuredUsage, Refusal>;

/// The last answer by tenant, and the end of its lifetime.
pub(super) type CachedUsage = (Instant, BTreeMap<String, UsageResult>);

impl ControlPlanes {
    /// Returns the usage of a tenant in a cluster that has `tenants`.
    pub async fn usage(&self, cluster: &ClusterNames, tenant: &str, tenants: &[String]) -> UsageResult {
        let shared = self.cache(cluster);
        let mut last = shared.usage.lock().await;
        if let Some((until, cached)) = last.as_ref()
            && Instant::now() < *until
            && let Some(usage) = cached.get(tenant)
        {
            return usage.clone();
        }
        let others = tenants.iter().filter(|other| *other != tenant).cloned();
        let requested: Vec<String> =
            std::iter::once(tenant.to_owned()).chain(others).take(TENANTS_MAX).collect();
        let list = |mut member: PlacementClient<Channel>| {
            let request = ListHoldingsRequest { tenants: requested.clone() };
            async move { Ok(member.list_holdings(request).await?.into_inner()) }
        };
        let request = async {
            let (first, security) = self.connect(cluster).await?;
            call_members(&first, &security, list).await
        };
        let answers = self.call(cluster, "list_holdings", request).await;
        let usages = combine(&requested, answers.map_err(|error| unavailable(&error.to_string()))?);
        let ttl = if usages.values().all(Result::is_ok) { COMPLETE_TTL } else { PARTIAL_TTL };
        let usage = usages[tenant].clone();
        *last = Some((Instant::now() + ttl, usages));
        usage
    }

    /// Drops the cached answer of a cluster: the next one is later than this call.
    pub async fn forget_usage(&self, cluster: &ClusterNames) {
        *self.cache(cluster).usage.lock().await = None;
    }
}

/// Combines the answers of members to the usage of all requested tenants.
fn combine(
    requested: &[String],
    answers: Vec<(String, Result<ListHoldingsReply, CallError>)>,
) -> BTreeMap<String, UsageResult> {
    let (mut known, mut silent) = (BTreeMap::new(), Vec::new());
    for (member, answer) in answers {
        let ListHoldingsReply { tenants, unheard, unheard_nodes, away_nodes } = match answer {
            Ok(reply) => reply,
            Err(error) => {
                silent.push(format!("{member} ({error})"));
                continue;
            }
        };
        let nodes = usize::try_from(unheard_nodes).unwrap_or(usize::MAX);
        let unreported = (nodes > 0).then(|| {
            let nodes = list_first(&unheard, nodes, ", ");
            let message = format!("not all nodes have reported their usage yet: {nodes}");
            Refusal::new(Reason::NotReported, message)
        });
        for TenantHolding { tenant, used, blocks } in tenants {
            let measured = MeasuredUsage {
                used: used.map(TierBytes::from).unwrap_or_default(),
                blocks: blocks.map(|wire::Blocks { dram, nvme }| TierBytes { dram, ssd: nvme }),
                away: away_nodes,
            };
            known.entry(tenant).or_insert(unreported.clone().map_or(Ok(measured), Err));
        }
    }
    let unknown = if silent.is_empty() {
        "no member is currently sure that it owns the tenant".to_owned()
    } else {
        let owner = "the member that owns the tenant is one of those that did not respond";
        format!("{owner}: {}", silent.join(", "))
    };
    let of = |tenant: &String| {
        let usage = known.remove(tenant).unwrap_or_else(|| Err(unavailable(&unknown)));
        (tenant.clone(), usage)
    };
    requested.iter().map(of).collect()
}

fn unavailable(message: &str) -> Refusal {
    Refusal::new(Reason::ControlPlaneUnreachable, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(tenants: &[(&str, u64)], unheard: &[String], away_nodes: u32) -> ListHoldingsReply {
        let holding = |(tenant, bytes): &(&str, u64)| TenantHolding {
            tenant: (*tenant).to_owned(),
            used: Some(wire::Bytes { dram: 1, nvme: *bytes }),
            blocks: Some(wire::Blocks { dram: 2, nvme: 3 }),
        };
        ListHoldingsReply {
            tenants: tenants.iter().map(holding).collect(),
            unheard: unheard.to_vec(),
            unheard_nodes: unheard.len() as u32,
            away_nodes,
        }
    }

    #[test]
    fn combines_answers_of_members_and_missing_ones_are_unknown_instead_of_zero() {
        let of = |ssd, away| {
            let blocks = Some(TierBytes { dram: 2, ssd: 3 });
            Ok(MeasuredUsage { used: TierBytes { dram: 1, ssd }, blocks, away })
        };
        let unreported = |words: &str| {
            let message = format!("not all nodes have reported their usage yet: {words}");
            Err(Refusal::new(Reason::NotReported, message))
        };
        let silent = "the member that owns the tenant is one of those that did not respond: m-1 (refused)";
        let nodes: Vec<String> = (1..=10).map(|number| format!("n{number}")).collect();
        for (second, of_c) in [
            (Ok(reply(&[("c", 30)], &[], 0)), of(30, 0)),
            (Ok(reply(&[], &[], 0)), Err(unavailable("no member is currently sure that it owns the tenant"))),
            (Err(CallError::Unavailable("refused".to_owned())), Err(unavailable(silent))),
            (Ok(reply(&[("c", 30)], &nodes[..1], 0)), unreported("n1")),
            (Ok(reply(&[("c", 30)], &nodes, 0)), unreported("n1, n2, n3, n4, n5, n6, n7, n8, and 2 more")),
        ] {
            let first = Ok(reply(&[("a", 10), ("b", 0)], &[], 1));
            let usages = combine(
                &["a", "b", "c"].map(str::to_owned),
                vec![("m-0".to_owned(), first), ("m-1".to_owned(), second)],
            );
            let expected = [("a", of(10, 1)), ("b", of(0, 1)), ("c", of_c)];
            assert_eq!(usages, expected.map(|(tenant, usage)| (tenant.to_owned(), usage)).into());
        }
    }
}
