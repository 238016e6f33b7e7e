//! Reports about this node's tenants to the members of the control plane, and the quota grants in their
//! replies.
//!
//! The owner of a tenant's hash slot keeps the tenant's budget. A report to a member lists all tenants, and
//! gives usage only for those that the member owns. The names alone show a new owner that this node has
//! reported to a previous owner.
//!
//! A grant is accepted only if it answers the newest full report of its tenant. A late grant of a previous
//! owner is therefore dropped: the new owner has already received the usage without that grant.
//!
//! A report never states less than the node may hold when the report arrives. It includes grants that were
//! accepted but that the core has not confirmed yet.
//!
//! Pure: the caller provides ownership, tenant names and messages.

use std::collections::{BTreeMap, BTreeSet};

use reprise_policy::{Amounts, TenantName};

use crate::event::Grant;
use crate::{NodeUsage, TenantBlocks, TenantUsage};

/// Number of a report; increases over all members.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ReportNumber(u64);

/// Whether a member owns a tenant's hash slot, according to this node's shard map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotOwner {
    /// The member owns the slot.
    ThisMember,
    /// Another member or no member owns the slot.
    Another,
}

/// Part of a report about one tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TenantReport {
    /// Full usage, for the owner of the tenant's slot.
    Full(GrantUsage),
    /// Name only, for members that do not own the slot.
    NameOnly,
}

/// Usage of one tenant on this node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GrantUsage {
    /// Version of the newest grant in force; 0 without a grant.
    pub version: u64,
    /// Maximum bytes that the tenant may hold.
    pub limit: Amounts,
    /// Bytes that the tenant holds.
    pub used: Amounts,
    /// Slots that the tenant holds.
    pub blocks: TenantBlocks,
    /// Bytes evicted or rejected because of the tenant's limit, since the agent started.
    pub limited: Amounts,
}

/// Reports sent and grants accepted during the lifetime of an agent.
#[derive(Clone, Debug, Default)]
pub struct QuotaGrants {
    /// Number of the last report, over all members.
    last: u64,
    /// Newest full report of each tenant.
    newest: BTreeMap<TenantName, ReportNumber>,
    /// Accepted grants that the core has not confirmed yet.
    accepted: BTreeMap<TenantName, AcceptedGrant>,
}

/// Unconfirmed grants of one tenant.
#[derive(Clone, Copy, Debug, Default)]
struct AcceptedGrant {
    /// Version of the newest grant.
    version: u64,
    /// Maximum over the grants' limits.
    limit: Amounts,
}

impl QuotaGrants {
    /// Starts a report; returns its number and its tenants. `tenants` and `node` are the last usage that the
    /// core published.
    pub fn report<'a>(
        &mut self,
        tenants: impl IntoIterator<Item = (&'a TenantName, &'a TenantUsage)>,
        node: &NodeUsage,
        owner: impl Fn(&TenantName) -> SlotOwner,
    ) -> (ReportNumber, Vec<(TenantName, TenantReport)>) {
        self.last += 1;
        let number = ReportNumber(self.last);
        let tenants: BTreeMap<&TenantName, &TenantUsage> = tenants.into_iter().collect();
        self.accepted.retain(|name, accepted| {
            let confirmed = tenants.get(name).and_then(|usage| usage.grant);
            confirmed.is_none_or(|grant| grant.version < accepted.version)
        });
        // A tenant that was reported once stays in every report: grants answer the newest report of their
        // tenant.
        let is_reported =
            |name: &TenantName, usage: &TenantUsage| has_usage(usage) || self.newest.contains_key(name);
        let reported = tenants.iter().filter(|(name, usage)| is_reported(name, usage)).map(|(name, _)| *name);
        let names: BTreeSet<TenantName> = reported.chain(self.accepted.keys()).cloned().collect();
        let mut reports = Vec::new();
        for name in names {
            let report = match owner(&name) {
                SlotOwner::Another => TenantReport::NameOnly,
                SlotOwner::ThisMember => {
                    self.newest.insert(name.clone(), number);
                    let current =
                        tenants.get(&name).map_or(GrantUsage::default(), |usage| grant_usage(usage, node));
                    let accepted = self.accepted.get(&name).map_or(Amounts::default(), |grant| grant.limit);
                    TenantReport::Full(GrantUsage { limit: current.limit.max(accepted), ..current })
                }
            };
            reports.push((name, report));
        }
        (number, reports)
    }

    /// Whether to accept a grant in the reply to a report to this member.
    pub fn accepts(&self, (report, from): (ReportNumber, SlotOwner), tenant: &TenantName) -> bool {
        self.newest.get(tenant).map_or(from == SlotOwner::ThisMember, |newest| *newest == report)
    }

    /// Accepts a grant in the reply to a report to this member, unless it comes from a previous owner.
    /// Returns whether the core must apply the grant.
    pub fn accept(&mut self, answer: (ReportNumber, SlotOwner), tenant: &TenantName, grant: &Grant) -> bool {
        let is_accepted = self.accepts(answer, tenant);
        if is_accepted {
            let accepted = self.accepted.entry(tenant.clone()).or_default();
            let limit = Amounts { dram: grant.dram.limit(), nvme: grant.nvme.limit() };
            *accepted = AcceptedGrant {
                version: accepted.version.max(grant.version),
                limit: accepted.limit.max(limit),
            };
        }
        is_accepted
    }
}

fn has_usage(usage: &TenantUsage) -> bool {
    let counts = &usage.counts;
    usage.grant.is_some()
        || usage.dram.used + usage.nvme.used > 0
        || counts.dram_limited_bytes + counts.nvme_limited_bytes > 0
}

fn grant_usage(usage: &TenantUsage, node: &NodeUsage) -> GrantUsage {
    let limit = match usage.grant {
        Some(Grant { dram, nvme, .. }) => Amounts { dram: dram.limit(), nvme: nvme.limit() },
        None => Amounts {
            dram: usage.dram.quota.limit().min(node.dram_capacity),
            nvme: usage.nvme.quota.limit().min(node.nvme_capacity),
        },
    };
    let counts = &usage.counts;
    GrantUsage {
        version: usage.grant.map_or(0, |grant| grant.version),
        limit,
        used: Amounts { dram: usage.dram.used, nvme: usage.nvme.used },
        blocks: usage.blocks,
        limited: Amounts { dram: counts.dram_limited_bytes, nvme: counts.nvme_limited_bytes },
    }
}

#[cfg(test)]
mod tests {
    use reprise_policy::TenantId;
    use reprise_policy::quota::{Quota, QuotaUsage};

    use super::*;
    use crate::TenantCounts;

    const NODE: NodeUsage =
        NodeUsage { dram_capacity: 100, dram_used: 0, nvme_capacity: 1000, nvme_used: 0, queued_bytes: 0 };

    fn name() -> TenantName {
        "a".parse().expect("a name")
    }

    fn grant(version: u64, bytes: u64) -> Grant {
        let quota = Quota::new(0, bytes).expect("nothing is reserved");
        Grant { tenant: TenantId(1), version, dram: quota, nvme: quota }
    }

    fn usage(grant: Option<Grant>, used: u64) -> TenantUsage {
        let current = QuotaUsage { quota: Quota::UNLIMITED, used };
        let (blocks, counts) = (TenantBlocks { dram: used, nvme: used }, TenantCounts::default());
        let retention = reprise_policy::block_command::RetentionUsage::default();
        TenantUsage { tenant: TenantId(1), grant, dram: current, nvme: current, blocks, counts, retention }
    }

    fn report(
        grants: &mut QuotaGrants,
        usage: &TenantUsage,
        to: SlotOwner,
    ) -> (ReportNumber, Vec<(TenantName, TenantReport)>) {
        grants.report([(&name(), usage)], &NODE, |_| to)
    }

    fn limit(reports: &[(TenantName, TenantReport)]) -> (u64, Amounts) {
        match reports {
            [(_, TenantReport::Full(holding))] => (holding.version, holding.limit),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn accepts_grant_only_in_reply_to_newest_report_of_its_tenant() {
        let mut grants = QuotaGrants::default();
        let (first, _) = report(&mut grants, &usage(None, 5), SlotOwner::ThisMember);
        let (elsewhere, reports) = report(&mut grants, &usage(None, 5), SlotOwner::Another);
        assert_eq!(reports, [(name(), TenantReport::NameOnly)]);
        assert!(
            !grants.accept((elsewhere, SlotOwner::Another), &name(), &grant(1, 50)),
            "this report had no usage"
        );
        let (second, _) = report(&mut grants, &usage(None, 5), SlotOwner::ThisMember);
        assert!(
            !grants.accept((first, SlotOwner::ThisMember), &name(), &grant(1, 50)),
            "a newer report was sent"
        );
        assert!(grants.accept((second, SlotOwner::ThisMember), &name(), &grant(1, 50)));
    }

    #[test]
    fn accepts_grant_for_tenant_that_no_longer_holds_blocks() {
        let mut grants = QuotaGrants::default();
        report(&mut grants, &usage(None, 5), SlotOwner::ThisMember);
        let (number, reports) = report(&mut grants, &usage(None, 0), SlotOwner::ThisMember);
        assert_eq!(limit(&reports), (0, Amounts { dram: 100, nvme: 1000 }));
        assert!(grants.accept((number, SlotOwner::ThisMember), &name(), &grant(1, 50)));
    }

    #[test]
    fn accepts_grant_of_owner_for_unreported_tenant() {
        let mut grants = QuotaGrants::default();
        let (number, reports) = report(&mut grants, &usage(None, 0), SlotOwner::ThisMember);
        assert!(reports.is_empty());
        assert!(!grants.accept((number, SlotOwner::Another), &name(), &grant(1, 50)));
        assert!(grants.accept((number, SlotOwner::ThisMember), &name(), &grant(1, 50)));
    }

    #[test]
    fn reports_accepted_grant_at_once_and_lower_limit_after_core_applies_it() {
        let mut grants = QuotaGrants::default();
        let (number, reports) = report(&mut grants, &usage(Some(grant(1, 50)), 5), SlotOwner::ThisMember);
        assert_eq!(limit(&reports), (1, Amounts { dram: 50, nvme: 50 }));
        assert!(grants.accept((number, SlotOwner::ThisMember), &name(), &grant(2, 80)));
        let (number, reports) = report(&mut grants, &usage(Some(grant(1, 50)), 5), SlotOwner::ThisMember);
        assert_eq!(limit(&reports), (1, Amounts { dram: 80, nvme: 80 }), "the core may apply it already");
        assert!(grants.accept((number, SlotOwner::ThisMember), &name(), &grant(3, 20)));
        let (_, reports) = report(&mut grants, &usage(Some(grant(2, 80)), 70), SlotOwner::ThisMember);
        assert_eq!(limit(&reports), (2, Amounts { dram: 80, nvme: 80 }));
        let (_, reports) = report(&mut grants, &usage(Some(grant(3, 20)), 70), SlotOwner::ThisMember);
        assert_eq!(limit(&reports), (3, Amounts { dram: 20, nvme: 20 }));
    }

    #[test]
    fn reports_tenant_known_only_from_a_grant() {
        let mut grants = QuotaGrants::default();
        let (number, _) = grants.report([], &NODE, |_| SlotOwner::ThisMember);
        assert!(grants.accept((number, SlotOwner::ThisMember), &name(), &grant(1, 50)));
        let (_, reports) = grants.report([], &NODE, |_| SlotOwner::ThisMember);
        assert_eq!(limit(&reports), (0, Amounts { dram: 50, nvme: 50 }));
        let (_, reports) = grants.report([], &NODE, |_| SlotOwner::Another);
        assert_eq!(reports, [(name(), TenantReport::NameOnly)], "a new owner waits for this node's report");
    }
}
