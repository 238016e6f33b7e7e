//! Queue pairs of a grant that exist: their numbers in the status, and the condition `Programmed`. Pure.
//!
//! The agent reports numbers under the uid of the allocation, so those of an earlier object with the same name are not
//! taken for this one. A number is only valid with its generation ([`reprise_crds::queues::QueueGrant::generation`]).

use reprise_crds::GPUQueueAllocationStatus;
use reprise_crds::fields::Text;
use reprise_crds::node::{AppliedQueues, CreatedQueues};
use reprise_crds::queues::QueueGrant;
use reprise_crds::status::{ConditionType, Finding, Reason};

use super::dereference::{AgentQueues, GrantInputs};

/// Maximum length of the numbers for display, in characters.
const NUMBERS_CHARS_MAX: usize = 253;

/// Writes the numbers of the existing queue pairs to the status. Without a current report, none is known to exist.
pub(super) fn record(
    status: &mut GPUQueueAllocationStatus,
    report: Option<&AgentQueues>,
    inputs: &GrantInputs,
) {
    let created: &[CreatedQueues] = match report {
        Some(AgentQueues::Reported(report)) if !inputs.is_silent => &report.created,
        _ => &[],
    };
    for grant in &mut status.allocations {
        let mut existing = created.iter().filter(|created| !created.queues.is_empty());
        let found = existing.find(|created| created.serial == grant.serial);
        grant.queues = found.map(|created| created.queues.clone()).unwrap_or_default();
        grant.generation = found.map(|created| created.generation);
    }
    status.queues = shown(status).map(Text::new);
}

/// Returns the numbers for display.
fn shown(status: &GPUQueueAllocationStatus) -> Option<String> {
    let grants = status.allocations.iter().filter(|grant| !grant.queues.is_empty());
    let text = |grant: &QueueGrant| match status.allocations.len() {
        1 => ranges(&grant.queues),
        _ => format!("{} {}", grant.serial, ranges(&grant.queues)),
    };
    let mut shown = grants.map(text).collect::<Vec<_>>().join("; ");
    if shown.chars().count() > NUMBERS_CHARS_MAX {
        shown = shown.chars().take(NUMBERS_CHARS_MAX - 1).chain(['…']).collect();
    }
    (!shown.is_empty()).then_some(shown)
}

/// Returns ascending numbers as ranges: `2-5,9`.
fn ranges(numbers: &[u32]) -> String {
    let ranges = numbers.chunk_by(|number, next| number + 1 == *next).map(|range| match range {
        [first, .., last] => format!("{first}-{last}"),
        _ => range.iter().map(u32::to_string).collect(),
    });
    ranges.collect::<Vec<_>>().join(",")
}

/// Returns the condition `Programmed` of an active grant of `all` queue pairs.
pub(super) fn programmed(report: Option<&AgentQueues>, all: u32, inputs: &GrantInputs) -> Finding {
    let node = &inputs.node;
    let no = |reason, message: String| Finding::no(ConditionType::Programmed, reason, message);
    let Some(AgentQueues::Reported(report)) = report else {
        let message = "has not reported yet that it set the queue pairs aside";
        return no(Reason::Progressing, format!("the agent of node {node} {message}"));
    };
    let AppliedQueues { queue_pairs: made, kept, unavailable, refused, .. } = report;
    let aside = format!("the agent of node {node} has set {kept} queue pairs aside, and no engine");
    match (made, unavailable, refused) {
        (1.., ..) if inputs.is_silent => {
            let remedy = "and queue pairs end with it: check the node and its agent";
            let message = format!("the agent of node {node} has not reported for a minute, {remedy}");
            no(Reason::NotReported, message)
        }
        (_, _, Some(why)) => {
            let message =
                format!("the agent of node {node} cannot set the queue pairs aside: {why}. It retries");
            no(Reason::Refused, message)
        }
        (made, ..) if *made >= all => {
            let message = format!("engines of node {node} have created {made} queue pairs");
            Finding::yes(ConditionType::Programmed, Reason::AsDesired, message)
        }
        (_, Some(why), _) => no(Reason::Unsupported, format!("{aside} can create them: {why}")),
        (0, ..) => no(Reason::NotRequested, format!("{aside} has requested them yet")),
        _ => {
            let message = format!("engines of node {node} have requested {made} of {all} queue pairs");
            no(Reason::NotRequested, message)
        }
    }
}
