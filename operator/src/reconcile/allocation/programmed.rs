//! Queue pairs of a grant that exist: their numbers in the status, and the condition `Programmed`. Pure.
//!
//! The agent reports numbers under the uid of the allocation, so those of an earlier object with the same name are not
//! taken for this one. A number is only valid with its generation ([`reprise_crds::queues::QueueGrant::generation`]).

use reprise_crds::GPUQueueAllocationStatus;
use reprise_crds::fields::Text;
use reprise_crds::node::CreatedQueues;
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
        Some(AgentQueues::Reported { created, .. }) if !inputs.is_silent => created,
        Some(AgentQueues::Reported { .. } | AgentQueues::Unconfirmed) | None => &[],
    };
    for grant in &mut status.allocations {
        let found = created.iter().find(|created| created.serial == grant.serial);
        let found = found.filter(|created| !created.queues.is_empty());
        grant.queues = found.map(|created| created.queues.clone()).unwrap_or_default();
        grant.generation = found.map(|created| created.generation);
    }
    status.queues = shown(status).map(Text::new);
}

/// Returns the numbers for display.
fn shown(status: &GPUQueueAllocationStatus) -> Option<String> {
    let grants = status.allocations.iter().filter(|grant| !grant.queues.is_empty());
    let text = |grant: &reprise_crds::queues::QueueGrant| match status.allocations.len() {
        1 => ranges(&grant.queues),
        _ => format!("{} {}", grant.serial, ranges(&grant.queues)),
    };
    let all = grants.map(text).collect::<Vec<_>>().join("; ");
    let shown: String = match all.chars().count() {
        0..=NUMBERS_CHARS_MAX => all,
        _ => all.chars().take(NUMBERS_CHARS_MAX - 1).chain(['…']).collect(),
    };
    (!shown.is_empty()).then_some(shown)
}

/// Returns ascending numbers as ranges: `2-5,9`.
fn ranges(numbers: &[u32]) -> String {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for number in numbers {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == *number => *last = *number,
            _ => ranges.push((*number, *number)),
        }
    }
    let text = |(first, last): &(u32, u32)| {
        if first == last { first.to_string() } else { format!("{first}-{last}") }
    };
    ranges.iter().map(text).collect::<Vec<_>>().join(",")
}

/// Returns the condition `Programmed` of an active grant of `all` queue pairs.
pub(super) fn programmed(report: Option<&AgentQueues>, all: u32, inputs: &GrantInputs) -> Finding {
    let (kind, node) = (ConditionType::Programmed, &inputs.node);
    match report {
        Some(AgentQueues::Reported { made: 1.., .. }) if inputs.is_silent => {
            let message = format!(
                "the agent of node {node} has not reported for a minute, and queue pairs end with it: check the node and its \
                 agent"
            );
            Finding::no(kind, Reason::NotReported, message)
        }
        None | Some(AgentQueues::Unconfirmed) => {
            let message =
                format!("the agent of node {node} has not reported yet that it set the queue pairs aside");
            Finding::no(kind, Reason::Progressing, message)
        }
        Some(AgentQueues::Reported { refused: Some(why), .. }) => {
            let message =
                format!("the agent of node {node} cannot set the queue pairs aside: {why}. It retries");
            Finding::no(kind, Reason::Refused, message)
        }
        Some(AgentQueues::Reported { made, .. }) if *made >= all => Finding::yes(
            kind,
            Reason::AsDesired,
            format!("engines of node {node} have created {made} queue pairs"),
        ),
        Some(AgentQueues::Reported { kept, unavailable: Some(why), .. }) => {
            let message = format!(
                "the agent of node {node} has set {kept} queue pairs aside, and no engine can create them: {why}"
            );
            Finding::no(kind, Reason::Unsupported, message)
        }
        Some(AgentQueues::Reported { made: 0, kept, .. }) => {
            let message = format!(
                "the agent of node {node} has set {kept} queue pairs aside, and no engine has requested them yet"
            );
            Finding::no(kind, Reason::NotRequested, message)
        }
        Some(AgentQueues::Reported { made, .. }) => {
            let message = format!("engines of node {node} have requested {made} of {all} queue pairs");
            Finding::no(kind, Reason::NotRequested, message)
        }
    }
}

#[cfg(test)]
mod tests {
    use reprise_crds::fields::Serial;
    use reprise_crds::queues::QueueGrant;
    use reprise_crds::status::ConditionStatus;

    use super::*;
    use crate::reconcile::allocation::tests::stored::Stored;

    fn grant(serial: &str) -> QueueGrant {
        QueueGrant {
            serial: Serial::new(serial),
            pci_address: None,
            queue_pairs: 4,
            queues: Vec::new(),
            generation: None,
        }
    }

    fn reported(created: &[(&str, i64, &[u32])]) -> AgentQueues {
        let created = created.iter().map(|(serial, generation, queues)| CreatedQueues {
            serial: Serial::new(*serial),
            generation: *generation,
            queues: queues.to_vec(),
        });
        let created: Vec<CreatedQueues> = created.collect();
        let made = created.iter().map(|created| created.queues.len()).sum::<usize>() as u32;
        AgentQueues::Reported { kept: 8, made, created, unavailable: None, refused: None }
    }

    #[test]
    fn numbers_follow_the_report_by_controller_and_vanish_with_it() {
        let mut status = GPUQueueAllocationStatus { allocations: vec![grant("A")], ..Default::default() };
        let shown = |status: &GPUQueueAllocationStatus| status.queues.as_ref().map(ToString::to_string);
        let mut inputs = Stored::new().found();
        let record = |status: &mut GPUQueueAllocationStatus, report: Option<&AgentQueues>| {
            super::record(status, report, &inputs);
        };
        record(&mut status, Some(&reported(&[("A", 7, &[2, 3, 4, 9])])));
        assert_eq!((shown(&status).as_deref(), status.allocations[0].generation), (Some("2-4,9"), Some(7)));
        assert_eq!(status.allocations[0].queues, [2, 3, 4, 9]);
        status.allocations.push(grant("B"));
        record(&mut status, Some(&reported(&[("A", 8, &[2]), ("B", 9, &[1, 3]), ("C", 9, &[1])])));
        assert_eq!(shown(&status).as_deref(), Some("A 2; B 1,3"));
        assert_eq!((status.allocations[0].generation, status.allocations[1].generation), (Some(8), Some(9)));
        for none in [Some(reported(&[("A", 8, &[])])), Some(AgentQueues::Unconfirmed), None] {
            let mut status = status.clone();
            record(&mut status, none.as_ref());
            assert_eq!(shown(&status), None);
            let is_blank = |grant: &QueueGrant| grant.queues.is_empty() && grant.generation.is_none();
            assert!(status.allocations.iter().all(is_blank), "{status:?}");
        }
        let many: Vec<u32> = (0..128).map(|number| 2 * number).collect();
        record(&mut status, Some(&reported(&[("A", 8, &many)])));
        let text = shown(&status).expect("numbers");
        assert!(text.chars().count() == NUMBERS_CHARS_MAX && text.ends_with('…'), "{text}");
        inputs.is_silent = true;
        super::record(&mut status, Some(&reported(&[("A", 8, &many)])), &inputs);
        assert_eq!(shown(&status), None, "they have ended with the agent, or will be reported again");
    }

    #[test]
    fn condition_names_the_missing_part() {
        let mut inputs = Stored::new().found();
        let with = |change: &dyn Fn(&mut AgentQueues)| {
            let mut report = reported(&[("A", 7, &[2, 3])]);
            change(&mut report);
            let finding = programmed(Some(&report), 4, &inputs);
            (finding.reason, finding.message)
        };
        let (reason, message) = with(&|_| {});
        assert_eq!(
            (reason, message.as_str()),
            (Reason::NotRequested, "engines of node n1 have requested 2 of 4 queue pairs")
        );
        let (reason, message) = with(&|report| *report = reported(&[]));
        assert_eq!(reason, Reason::NotRequested);
        assert!(message.contains("no engine has requested them yet"), "{message}");
        let (reason, message) = with(&|report| {
            let AgentQueues::Reported { unavailable, .. } = report else { unreachable!("it is a report") };
            *unavailable = Some("the agent does not drive controller A".to_owned());
        });
        assert_eq!(reason, Reason::Unsupported);
        assert!(message.contains("no engine can create them: the agent does not drive"), "{message}");
        assert_eq!(with(&|report| *report = reported(&[("A", 7, &[2, 3, 4, 5])])).0, Reason::AsDesired);
        assert_eq!(with(&|report| *report = AgentQueues::Unconfirmed).0, Reason::Progressing);
        inputs.is_silent = true;
        let finding = programmed(Some(&reported(&[("A", 7, &[2, 3, 4, 5])])), 4, &inputs);
        assert_eq!((finding.status, finding.reason), (ConditionStatus::False, Reason::NotReported));
    }
}
