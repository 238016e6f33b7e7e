//! What a node says of its tenants to the members, and which of their orders it takes.
//!
//! A tenant's budget is kept by the owner of the tenant's hash slot. Every report names all tenants, those of other owners by
//! name only, so that who has become the owner does not take a node for heard that has told its former one. An order is
//! taken when it answers the newest report of its tenant: what a former owner had ordered and this node hears late is
//! dropped, because the new owner has been told what was held before.
//!
//! What is said is never less than what the node may hold by then: an order that was taken, and that the core has not said yet
//! that it follows, counts as well.
//!
//! Pure. Who the owner is, names of tenants, and messages are the caller's.

use std::collections::{BTreeMap, BTreeSet};

use reprise_policy::TenantName;

use crate::agent::{Blocks, NodeUsage, TenantUsage};
use crate::event::Grant;

/// Bytes of both kinds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bytes {
    /// Of the arena.
    pub dram: u64,
    /// Of the pool.
    pub nvme: u64,
}

/// Names a report; later ones are higher, over all members.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ReportNumber(u64);

/// Whether a member owns a tenant's hash slot, as far as this node knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// That one.
    ThisMember,
    /// Another, or nobody.
    Another,
}

/// What a report says of a tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Said {
    /// To the owner of its slot.
    Here(Holding),
    /// To others: that there is one.
    Elsewhere,
}

/// What a tenant holds on this node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Holding {
    /// The newest order that holds; 0: none.
    pub version: u64,
    /// What it may hold.
    pub limit: Bytes,
    /// What it uses.
    pub used: Bytes,
    /// In so many slots.
    pub blocks: Blocks,
    /// Bytes dropped or refused for its limit, counted from the start of the agent.
    pub limited: Bytes,
}

/// See the module; for the life of an agent.
#[derive(Clone, Debug, Default)]
pub struct Orders {
    /// Number of the last report, over all members.
    last: u64,
    /// The newest report that said what a tenant holds.
    newest: BTreeMap<TenantName, ReportNumber>,
    /// Orders that were taken, until the core says that it follows them.
    taken: BTreeMap<TenantName, Taken>,
}

/// Orders of one tenant.
#[derive(Clone, Copy, Debug, Default)]
struct Taken {
    /// The newest of them.
    version: u64,
    /// The most that they allow.
    limit: Bytes,
}

impl Bytes {
    fn max(self, other: Bytes) -> Bytes {
        Bytes { dram: self.dram.max(other.dram), nvme: self.nvme.max(other.nvme) }
    }
}

impl Orders {
    /// A report begins: what it says of tenants, as the core has last described them and its node.
    pub fn report<'a>(
        &mut self,
        tenants: impl IntoIterator<Item = (&'a TenantName, &'a TenantUsage)>,
        node: &NodeUsage,
        owner: impl Fn(&TenantName) -> Owner,
    ) -> (ReportNumber, Vec<(TenantName, Said)>) {
        self.last += 1;
        let number = ReportNumber(self.last);
        let tenants: BTreeMap<&TenantName, &TenantUsage> = tenants.into_iter().collect();
        self.taken.retain(|name, taken| {
            let follows = tenants.get(name).and_then(|usage| usage.grant);
            follows.is_none_or(|grant| grant.version < taken.version)
        });
        // Of whom it was told once, it is told again: orders answer the newest report of their tenant.
        let is_told = |name: &TenantName, usage: &TenantUsage| {
            is_worth_telling(usage) || self.newest.contains_key(name)
        };
        let told = tenants.iter().filter(|(name, usage)| is_told(name, usage)).map(|(name, _)| *name);
        let names: BTreeSet<TenantName> = told.chain(self.taken.keys()).cloned().collect();
        let mut said = Vec::new();
        for name in names {
            let says = match owner(&name) {
                Owner::Another => Said::Elsewhere,
                Owner::ThisMember => {
                    self.newest.insert(name.clone(), number);
                    let held = tenants.get(&name).map_or(Holding::default(), |usage| holding(usage, node));
                    let taken = self.taken.get(&name).map_or(Bytes::default(), |taken| taken.limit);
                    Said::Here(Holding { limit: held.limit.max(taken), ..held })
                }
            };
            said.push((name, says));
        }
        (number, said)
    }

    /// Whether an order is taken that answers a report to this member.
    pub fn takes(&self, (report, from): (ReportNumber, Owner), tenant: &TenantName) -> bool {
        self.newest.get(tenant).map_or(from == Owner::ThisMember, |newest| *newest == report)
    }

    /// Takes an order that answers a report to this member, unless it is a former owner's; it is to be followed then.
    pub fn take(&mut self, answer: (ReportNumber, Owner), tenant: &TenantName, grant: &Grant) -> bool {
        let takes = self.takes(answer, tenant);
        if takes {
            let taken = self.taken.entry(tenant.clone()).or_default();
            let limit = Bytes { dram: grant.dram.limit(), nvme: grant.nvme.limit() };
            *taken = Taken { version: taken.version.max(grant.version), limit: taken.limit.max(limit) };
        }
        takes
    }
}

fn is_worth_telling(usage: &TenantUsage) -> bool {
    let counts = &usage.counts;
    usage.grant.is_some()
        || usage.dram.used + usage.nvme.used > 0
        || counts.dram_limited_bytes + counts.nvme_limited_bytes > 0
}

fn holding(usage: &TenantUsage, node: &NodeUsage) -> Holding {
    let limit = match usage.grant {
        Some(Grant { dram, nvme, .. }) => Bytes { dram: dram.limit(), nvme: nvme.limit() },
        None => Bytes {
            dram: usage.dram.quota.limit().min(node.dram_capacity),
            nvme: usage.nvme.quota.limit().min(node.nvme_capacity),
        },
    };
    let counts = &usage.counts;
    Holding {
        version: usage.grant.map_or(0, |grant| grant.version),
        limit,
        used: Bytes { dram: usage.dram.used, nvme: usage.nvme.used },
        blocks: usage.blocks,
        limited: Bytes { dram: counts.dram_limited_bytes, nvme: counts.nvme_limited_bytes },
    }
}

#[cfg(test)]
mod tests {
    use reprise_policy::TenantId;
    use reprise_policy::quota::{Holding as Held, Quota};

    use super::*;
    use crate::agent::TenantCounts;

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
        let held = Held { quota: Quota::UNLIMITED, used };
        let (blocks, counts) = (Blocks { dram: used, nvme: used }, TenantCounts::default());
        TenantUsage { tenant: TenantId(1), grant, dram: held, nvme: held, blocks, counts }
    }

    fn report(
        orders: &mut Orders,
        usage: &TenantUsage,
        to: Owner,
    ) -> (ReportNumber, Vec<(TenantName, Said)>) {
        orders.report([(&name(), usage)], &NODE, |_| to)
    }

    fn limit(said: &[(TenantName, Said)]) -> (u64, Bytes) {
        match said {
            [(_, Said::Here(holding))] => (holding.version, holding.limit),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn an_order_is_taken_when_it_answers_the_newest_report_of_its_tenant() {
        let mut orders = Orders::default();
        let (first, _) = report(&mut orders, &usage(None, 5), Owner::ThisMember);
        let (elsewhere, said) = report(&mut orders, &usage(None, 5), Owner::Another);
        assert_eq!(said, [(name(), Said::Elsewhere)]);
        assert!(!orders.take((elsewhere, Owner::Another), &name(), &grant(1, 50)), "it was not told");
        let (second, _) = report(&mut orders, &usage(None, 5), Owner::ThisMember);
        assert!(!orders.take((first, Owner::ThisMember), &name(), &grant(1, 50)), "another was told since");
        assert!(orders.take((second, Owner::ThisMember), &name(), &grant(1, 50)));
    }

    #[test]
    fn orders_are_taken_also_when_the_tenant_holds_nothing_any_more() {
        let mut orders = Orders::default();
        report(&mut orders, &usage(None, 5), Owner::ThisMember);
        let (number, said) = report(&mut orders, &usage(None, 0), Owner::ThisMember);
        assert_eq!(limit(&said), (0, Bytes { dram: 100, nvme: 1000 }));
        assert!(orders.take((number, Owner::ThisMember), &name(), &grant(1, 50)));
    }

    #[test]
    fn of_a_tenant_that_was_never_told_of_the_owner_is_obeyed() {
        let mut orders = Orders::default();
        let (number, said) = report(&mut orders, &usage(None, 0), Owner::ThisMember);
        assert!(said.is_empty());
        assert!(!orders.take((number, Owner::Another), &name(), &grant(1, 50)));
        assert!(orders.take((number, Owner::ThisMember), &name(), &grant(1, 50)));
    }

    #[test]
    fn what_was_taken_is_told_at_once_and_a_lower_limit_when_the_core_follows_it() {
        let mut orders = Orders::default();
        let (number, said) = report(&mut orders, &usage(Some(grant(1, 50)), 5), Owner::ThisMember);
        assert_eq!(limit(&said), (1, Bytes { dram: 50, nvme: 50 }));
        assert!(orders.take((number, Owner::ThisMember), &name(), &grant(2, 80)));
        let (number, said) = report(&mut orders, &usage(Some(grant(1, 50)), 5), Owner::ThisMember);
        assert_eq!(limit(&said), (1, Bytes { dram: 80, nvme: 80 }), "the core may follow it already");
        assert!(orders.take((number, Owner::ThisMember), &name(), &grant(3, 20)));
        let (_, said) = report(&mut orders, &usage(Some(grant(2, 80)), 70), Owner::ThisMember);
        assert_eq!(limit(&said), (2, Bytes { dram: 80, nvme: 80 }));
        let (_, said) = report(&mut orders, &usage(Some(grant(3, 20)), 70), Owner::ThisMember);
        assert_eq!(limit(&said), (3, Bytes { dram: 20, nvme: 20 }));
    }

    #[test]
    fn a_tenant_of_which_only_an_order_is_known_is_told_of() {
        let mut orders = Orders::default();
        let (number, _) = orders.report([], &NODE, |_| Owner::ThisMember);
        assert!(orders.take((number, Owner::ThisMember), &name(), &grant(1, 50)));
        let (_, said) = orders.report([], &NODE, |_| Owner::ThisMember);
        assert_eq!(limit(&said), (0, Bytes { dram: 50, nvme: 50 }));
        let (_, said) = orders.report([], &NODE, |_| Owner::Another);
        assert_eq!(said, [(name(), Said::Elsewhere)], "who becomes the owner waits for this node");
    }
}
