//! Usage of tenants in a cluster.
//!
//! Each member knows the usage of the tenants in its hash slots, from the reports of nodes. All members are
//! therefore queried concurrently, for all tenants of the cluster. A tenant without an answer is unknown, not
//! unused: its member was not reached, or is not sure of its ownership. A sum is also unknown while nodes
//! have not reported to the member that computes it.
//!
//! A complete answer is cached for [`COMPLETE_TTL`]; a partial one is requested again soon. Calls share the
//! backoff of [`ControlPlanes`]: during a backoff none are made, and a failed call starts one.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use reprise_crds::status::Reason;
use reprise_policy::tenant::TENANTS_MAX;
use reprise_proto::controlplane::placement_client::PlacementClient;
use reprise_proto::controlplane::{self as wire, ListHoldingsReply, ListHoldingsRequest, TenantHolding};
use tokio::time::Instant;
use tonic::transport::Channel;

use super::{CallError, ControlPlanes, RETRY_INTERVAL, Target, TierBytes, call_members};
use crate::framework::metrics::{Call, Metrics};
use crate::framework::refusal::Refusal;
use crate::reconcile::names::ClusterNames;

/// Lifetime of a complete answer, and thereby the interval between two measurements.
const COMPLETE_TTL: Duration = Duration::from_secs(60);
/// Lifetime of a partial answer.
const PARTIAL_TTL: Duration = RETRY_INTERVAL;
/// Maximum number of nodes in a message.
const NAMED_MAX: usize = 4;

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

/// The last answer, cached.
#[derive(Debug)]
pub(super) struct CachedUsage {
    until: Instant,
    requested: BTreeSet<String>,
    answers: Answers,
}

/// Answers of all members.
#[derive(Clone, Debug, Default)]
struct Answers {
    tenants: BTreeMap<String, UsageResult>,
    /// Members that did not respond, with the reason.
    silent: Vec<String>,
}

impl ControlPlanes {
    /// Returns the usage of a tenant in a cluster that has `tenants`.
    pub async fn usage(
        &self,
        cluster: &ClusterNames,
        tenant: &str,
        tenants: &[String],
        metrics: &Metrics,
    ) -> UsageResult {
        let shared = self.cache(cluster);
        let mut last = shared.usage.lock().await;
        let is_current =
            |cached: &&CachedUsage| Instant::now() < cached.until && cached.requested.contains(tenant);
        if let Some(cached) = last.as_ref().filter(is_current) {
            return cached.answers.of(tenant);
        }
        if let Some(error) = self.backoff_error(cluster).await {
            return Err(unavailable(error.message()));
        }
        let others = tenants.iter().filter(|other| *other != tenant);
        let requested: BTreeSet<String> =
            std::iter::once(tenant.to_owned()).chain(others.cloned()).take(TENANTS_MAX).collect();
        let request = async { query_members(&self.target(cluster)?, &requested).await };
        let answered = self.call(cluster, (Call::ListHoldings, metrics), request, |_| {}).await;
        let answers = answered.map_err(|error| unavailable(error.message()))?;
        let ttl = if answers.is_complete(&requested) { COMPLETE_TTL } else { PARTIAL_TTL };
        let held = answers.of(tenant);
        *last = Some(CachedUsage { until: Instant::now() + ttl, requested, answers });
        held
    }
}

impl Answers {
    fn add(&mut self, reply: ListHoldingsReply) {
        let ListHoldingsReply { tenants, unheard, unheard_nodes, away_nodes } = reply;
        let message = (unheard_nodes > 0).then(|| describe_unreported(&unheard, unheard_nodes));
        for TenantHolding { tenant, used, blocks } in tenants {
            let held = MeasuredUsage {
                used: used.map(TierBytes::from).unwrap_or_default(),
                blocks: blocks.map(|wire::Blocks { dram, nvme }| TierBytes { dram, ssd: nvme }),
                away: away_nodes,
            };
            let unreported = |message: &String| Err(Refusal::new(Reason::NotReported, message));
            let held = message.as_ref().map_or(Ok(held), unreported);
            self.tenants.entry(tenant).or_insert(held);
        }
    }

    fn of(&self, tenant: &str) -> UsageResult {
        let unanswered = || {
            if self.silent.is_empty() {
                return Err(unavailable("no member is currently sure that it owns the tenant"));
            }
            let silent = self.silent.join(", ");
            let owner = "the member that owns the tenant is one of those that did not respond";
            Err(unavailable(format!("{owner}: {silent}")))
        };
        self.tenants.get(tenant).cloned().unwrap_or_else(unanswered)
    }

    fn is_complete(&self, requested: &BTreeSet<String>) -> bool {
        requested.iter().all(|tenant| matches!(self.tenants.get(tenant), Some(Ok(_))))
    }
}

async fn query_members(target: &Target, tenants: &BTreeSet<String>) -> Result<Answers, CallError> {
    let list = |mut member: PlacementClient<Channel>| {
        let request = ListHoldingsRequest { tenants: tenants.iter().cloned().collect() };
        async move { Ok::<_, CallError>(member.list_holdings(request).await?.into_inner()) }
    };
    let mut answers = Answers::default();
    for (member, answer) in call_members(target, &target.connect().await?, list).await? {
        match answer {
            Ok(reply) => answers.add(reply),
            Err(error) => answers.silent.push(format!("{member} ({})", error.message())),
        }
    }
    Ok(answers)
}

fn unavailable(message: impl Into<String>) -> Refusal {
    Refusal::new(Reason::ControlPlaneUnreachable, message)
}

/// Describes the nodes that have not reported yet.
fn describe_unreported(names: &[String], nodes: u32) -> String {
    let named = &names[..names.len().min(NAMED_MAX)];
    let more = usize::try_from(nodes).unwrap_or(usize::MAX).saturating_sub(named.len());
    let more = if more == 0 { String::new() } else { format!(" and {more} more") };
    format!("not all nodes have reported their usage yet: {}{more}", named.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(tenants: &[(&str, u64)], unheard: &[&str], away_nodes: u32) -> ListHoldingsReply {
        let holding = |(tenant, bytes): &(&str, u64)| TenantHolding {
            tenant: (*tenant).to_owned(),
            used: Some(wire::Bytes { dram: 1, nvme: *bytes }),
            blocks: Some(wire::Blocks { dram: 2, nvme: 3 }),
        };
        ListHoldingsReply {
            tenants: tenants.iter().map(holding).collect(),
            unheard: unheard.iter().map(|name| (*name).to_owned()).collect(),
            unheard_nodes: unheard.len() as u32,
            away_nodes,
        }
    }

    fn set_of(tenants: &[&str]) -> BTreeSet<String> {
        tenants.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn combines_answers_of_members_and_missing_ones_are_unknown_instead_of_zero() {
        let mut answers = Answers::default();
        answers.add(reply(&[("a", 10), ("b", 0)], &[], 1));
        assert!(!answers.is_complete(&set_of(&["a", "b", "c"])), "one tenant is missing");
        let message = answers.of("c").expect_err("the member is unknown").message;
        assert!(message.contains("no member is currently sure"), "{message}");
        answers.silent.push("m-1 (refused)".to_owned());
        let message = answers.of("c").expect_err("the member is unknown").message;
        assert!(message.ends_with("did not respond: m-1 (refused)"), "{message}");
        answers.add(reply(&[("c", 30)], &[], 0));
        assert!(answers.is_complete(&set_of(&["a", "b", "c"])));
        for (tenant, ssd, away) in [("a", 10, 1), ("b", 0, 1), ("c", 30, 0)] {
            let (used, blocks) = (TierBytes { dram: 1, ssd }, Some(TierBytes { dram: 2, ssd: 3 }));
            assert_eq!(answers.of(tenant), Ok(MeasuredUsage { used, blocks, away }));
        }
    }

    #[test]
    fn incomplete_sum_is_unknown_and_lists_only_the_first_nodes() {
        let mut answers = Answers::default();
        answers.add(reply(&[("a", 10)], &["n1", "n2", "n3", "n4", "n5", "n6"], 0));
        assert!(!answers.is_complete(&set_of(&["a"])));
        let Refusal { reason, message } = answers.of("a").expect_err("nodes have not reported");
        assert_eq!(reason, Reason::NotReported);
        assert!(message.ends_with(": n1, n2, n3, n4 and 2 more"), "{message}");
        assert!(describe_unreported(&["n1".to_owned()], 1).ends_with(": n1"));
    }
}
