//! Fuzz target of ledgers (`make fuzz`): reports of agents with any numbers.
//!
//! Laws: no panic, and a grant is newer than the version that its node has reported, unless there is no newer one.

use reprise_fuzz::Unstructured;
use reprise_policy::{Amounts, Epoch, NodeId, TenantName};

use crate::budgets::{Budget, Budgets, QuotaReport, TenantReport};

/// Most operations of an input.
const STEPS_MAX: usize = 100;

#[test]
fn member_ledgers() {
    let seeds: Vec<Vec<u8>> = (0..6_u8)
        .map(|seed| (0..96_u8).map(|at| at.wrapping_mul(61).wrapping_add(seed * 41)).collect())
        .collect();
    reprise_fuzz::check("member_ledgers", &seeds, run);
}

fn run(input: &[u8]) {
    let mut choices = Unstructured::new(input);
    let mut budgets = Budgets::new([(NodeId(1), Epoch(1)), (NodeId(2), Epoch(1))]);
    for _ in 0..STEPS_MAX {
        if choices.is_empty() || step(&mut budgets, &mut choices).is_none() {
            break;
        }
    }
}

fn step(budgets: &mut Budgets, choices: &mut Unstructured<'_>) -> Option<()> {
    let tenant: TenantName = choices.choose(&["a", "b"]).ok()?.parse().expect("a name");
    let (node, epoch) = (NodeId(choices.int_in_range(1..=3).ok()?), Epoch(number(choices)?));
    match choices.int_in_range(0..=7_u8).ok()? {
        0 => {
            let limit = amounts(choices)?;
            let reserved = amounts(choices)?;
            let within = |reserved: u64, limit: u64| reserved.min(limit);
            let reserved =
                Amounts { dram: within(reserved.dram, limit.dram), nvme: within(reserved.nvme, limit.nvme) };
            budgets.set_budget(&tenant, Budget { reserved, limit });
        }
        1 => budgets.register(node, epoch),
        2 => budgets.forget(node),
        3 => budgets.remove_budget(&tenant),
        4 | 5 => budgets.rebalance(),
        _ => {
            let version = number(choices)?;
            let (limit, used, limited) = (amounts(choices)?, amounts(choices)?, amounts(choices)?);
            let report = TenantReport { tenant: tenant.clone(), version, limit, used, limited };
            for grant in budgets.report(&QuotaReport { node, epoch, tenants: vec![report] }) {
                assert_eq!((grant.node, grant.epoch), (node, epoch));
                assert!(
                    grant.tenant != tenant || grant.version > version || version == u64::MAX,
                    "an old grant"
                );
            }
        }
    }
    budgets.charged(&tenant);
    Some(())
}

/// A number that is small, at a bound, or any.
fn number(choices: &mut Unstructured<'_>) -> Option<u64> {
    match choices.int_in_range(0..=3_u8).ok()? {
        0 => choices.int_in_range(0..=3).ok(),
        1 => Some(u64::MAX - choices.int_in_range(0..=2).ok()?),
        2 => Some(
            1_u64
                .checked_shl(choices.int_in_range(0..=63).ok()?)?
                .wrapping_sub(choices.int_in_range(0..=1).ok()?),
        ),
        _ => choices.arbitrary().ok(),
    }
}

fn amounts(choices: &mut Unstructured<'_>) -> Option<Amounts> {
    Some(Amounts { dram: number(choices)?, nvme: number(choices)? })
}
