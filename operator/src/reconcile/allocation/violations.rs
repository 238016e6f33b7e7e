//! Checks that the controllers of a grant still exist, and that their grants fit the budget. Pure.
//!
//! A grant never shrinks. If a controller is gone or its budget is reduced, the grant remains and the agent
//! keeps its queue pairs. The status then reports the violation and the remedy.

use reprise_crds::GPUQueueAllocation;
use reprise_crds::queues::QueueGrant;
use reprise_crds::status::{ConditionType as Type, Finding, Reason};

use super::dereference::{GrantInputs, name};
use super::grant::ControllerUsage;
use super::lifecycle::{granted, pairs};
use super::status::{describe, join_names};

/// Returns the violation of an existing grant as a condition; `None` if the grant is intact.
pub fn violation(object: &GPUQueueAllocation, inputs: &GrantInputs) -> Option<Finding> {
    let (grants, node) = (granted(object), &inputs.node);
    if inputs.status().is_none_or(|status| status.last_updated.is_none()) {
        let message = format!(
            "{} queue pairs are set aside; the agent of node {node} has not reported its controllers yet",
            pairs(grants)
        );
        return Some(Finding::unknown(Type::Allocated, Reason::NotReported, message));
    }
    let pool = object.spec.pool_ref.name.as_str();
    let lost: Vec<String> = grants.iter().filter_map(|grant| lost(grant, pool, inputs)).collect();
    if !lost.is_empty() {
        let message = format!(
            "{} queue pairs were set aside, but {}: restore the controller, or delete this GPUQueueAllocation and create one for the \
             present controllers",
            pairs(grants),
            join_names(&lost)
        );
        return Some(Finding::no(Type::Allocated, Reason::NoDevices, message));
    }
    let over: Vec<String> = grants.iter().filter_map(|grant| over(grant, inputs)).collect();
    if over.is_empty() {
        return None;
    }
    let message = format!(
        "{} queue pairs were set aside, but the grants exceed the budget: {}. Grants do not shrink: delete one of these \
         allocations, or raise devices.maxGpuQueuePercent of SSDPool {pool}",
        pairs(grants),
        join_names(&over)
    );
    Some(Finding::no(Type::Allocated, Reason::OverBudget, message))
}

/// Describes a controller that the agent no longer reports, or that no longer belongs to the pool.
fn lost(grant: &QueueGrant, pool: &str, inputs: &GrantInputs) -> Option<String> {
    let (serial, node) = (grant.serial.as_str(), &inputs.node);
    let mut reported = inputs.status()?.controllers.iter();
    if !reported.any(|controller| controller.serial.as_str() == serial) {
        return Some(format!("node {node} no longer has controller {serial}"));
    }
    let is_in_pool = inputs.lenders.iter().any(|lender| lender.serial == serial && lender.pool == pool);
    (!is_in_pool)
        .then(|| format!("controller {serial} of node {node} no longer has a device of SSDPool {pool}"))
}

/// Describes a controller whose grants exceed its budget, with the holders.
fn over(grant: &QueueGrant, inputs: &GrantInputs) -> Option<String> {
    let serial = grant.serial.as_str();
    let budget = inputs.lenders.iter().find(|lender| lender.serial == serial)?.budget;
    let mut holders: Vec<(String, u32)> = Vec::new();
    for of in &inputs.allocations {
        let of_it = granted(&of.object).iter().filter(|grant| grant.serial.as_str() == serial);
        holders.extend(of_it.map(|grant| (name(&of.object), grant.queue_pairs)));
    }
    let all = holders.iter().map(|(_, pairs)| *pairs).fold(0, u32::saturating_add);
    (all > budget).then(|| describe(&ControllerUsage { serial: serial.to_owned(), budget, holders }))
}
