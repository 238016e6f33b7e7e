//! Whether what a grant was made of is there still, and within what may be lent. Pure.
//!
//! A grant is never made smaller, so it stands also when a controller is gone, or lends less than before, and its agent keeps what it has; its status says so, and
//! what to do.

use reprise_crds::GPUQueueAllocation;
use reprise_crds::queues::QueueGrant;
use reprise_crds::status::{ConditionType as Type, Finding, Reason};

use super::dereference::Found;
use super::grant::Full;
use super::life::pairs;
use super::status::{few, held};

/// What is to be said against a grant that stands; nothing where all is as it was granted.
pub fn doubt(object: &GPUQueueAllocation, found: &Found) -> Option<Finding> {
    let grants = object.status.as_ref().map(|status| status.allocations.as_slice()).unwrap_or_default();
    let node = &found.node;
    if found.status().is_none_or(|status| status.last_updated.is_none()) {
        let message = format!(
            "{} queue pairs are set aside; the agent of node {node} has not said yet whether their controllers are there",
            pairs(grants)
        );
        return Some(Finding::unknown(Type::Allocated, Reason::NotReported, message));
    }
    let pool = object.spec.pool_ref.name.as_str();
    let lost: Vec<String> = grants.iter().filter_map(|grant| lost(grant, pool, found)).collect();
    if !lost.is_empty() {
        let message = format!(
            "{} queue pairs were set aside, and {}: bring it back, or make a new GPUQueueAllocation for what is there and delete this one",
            pairs(grants),
            few(&lost)
        );
        return Some(Finding::no(Type::Allocated, Reason::NoDevices, message));
    }
    let over: Vec<String> = grants.iter().filter_map(|grant| over(grant, found)).collect();
    if over.is_empty() {
        return None;
    }
    let message = format!(
        "{} queue pairs were set aside, and more is held than may be lent: {}. A grant is not made smaller: delete one of these, or raise \
         devices.maxGpuQueuePercent of SSDPool {pool}",
        pairs(grants),
        few(&over)
    );
    Some(Finding::no(Type::Allocated, Reason::OverBudget, message))
}

/// A controller that the agent does not tell any more, or that the pool does not lend of.
fn lost(grant: &QueueGrant, pool: &str, found: &Found) -> Option<String> {
    let (serial, node) = (grant.serial.as_str(), &found.node);
    let mut told = found.status()?.controllers.iter();
    if !told.any(|controller| controller.serial.as_str() == serial) {
        return Some(format!("node {node} has no controller {serial} any more"));
    }
    let is_lent = found.lenders.iter().any(|lender| lender.serial == serial && lender.pool == pool);
    (!is_lent).then(|| format!("controller {serial} of node {node} has no device of SSDPool {pool} any more"))
}

/// A controller of which more is held than may be lent, and by whom.
fn over(grant: &QueueGrant, found: &Found) -> Option<String> {
    let serial = grant.serial.as_str();
    let budget = found.lenders.iter().find(|lender| lender.serial == serial)?.budget;
    let mut holders: Vec<(String, u32)> = Vec::new();
    for of in &found.allocations {
        let grants = of.object.status.iter().flat_map(|status| &status.allocations);
        let of_it = grants.filter(|grant| grant.serial.as_str() == serial);
        holders.extend(of_it.map(|grant| (of.name(), grant.queue_pairs)));
    }
    let all = holders.iter().map(|(_, pairs)| *pairs).fold(0, u32::saturating_add);
    (all > budget).then(|| held(&Full { serial: serial.to_owned(), budget, holders }))
}
