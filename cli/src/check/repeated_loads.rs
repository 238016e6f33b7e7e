//! `reprise check --again-for`: repeats the loads of the check, verifies every byte, and prints hits by
//! source once per second.
//!
//! The counters show the effect on an engine: a miss is a block that an engine would recompute, and a lost
//! session is opened again. Counters are sums since the start; the longest outage is that of one line's
//! interval.
//!
//! Invariant: only wrong bytes end the loop early, with an error.

use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};

use reprise_client::{ClientError, Scope, Source};
use serde::Serialize;

use super::{Block, Check, CheckArgs, ExpectedSource, block, connect, name_of};
use reprise_testkit::output::Audience;

/// Pause between two rounds, for about 50 loads of each block per second.
const ROUND_PAUSE: Duration = Duration::from_millis(20);

/// Interval of the printed lines.
const LINE_EVERY: Duration = Duration::from_secs(1);

/// Counters of one line of output.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
struct Counts {
    /// Verified loads, by source.
    hits: BTreeMap<&'static str, u64>,
    /// Failed attempts to load the own block from this node.
    own_missed: u64,
    /// Failed attempts to load other participants' blocks.
    others_missed: u64,
    /// Sessions opened after the first.
    sessions: u64,
    /// Longest outage of the own block that was ongoing or ended since the previous line.
    longest_outage_ms: u64,
}

/// Ongoing outage of the own block.
#[derive(Clone, Copy, Debug)]
struct Outage {
    since: Option<Instant>,
}

/// Repeats the loads until the time is over.
///
/// # Errors
/// Wrong bytes.
pub(super) fn run(
    check: Check,
    args: &CheckArgs,
    others: &[u32],
    lasts: Duration,
    audience: Audience,
) -> anyhow::Result<()> {
    let (layout, namespace) = (check.layout, check.namespace);
    let own = block(&namespace, args.index);
    let others: Vec<Block> =
        others.iter().filter(|other| **other != args.index).map(|other| block(&namespace, *other)).collect();
    let until = Instant::now() + lasts;
    let mut counts = Counts::default();
    let mut outage = Outage { since: None };
    let mut printed = Instant::now();
    let mut session = Some(check);
    while Instant::now() < until {
        if session.is_none()
            && let Ok(client) = connect(args, layout)
        {
            counts.sessions += 1;
            session = Some(Check { client, layout, namespace, deadline: until, within: lasts });
        }
        // Without a session, each block counts as missed.
        let is_lost = match &session {
            Some(check) => round(check, &own, &others, &mut counts, &mut outage)?,
            None => {
                counts.missed(&own, &own);
                others.iter().for_each(|other| counts.missed(&own, other));
                outage.extend(&mut counts);
                false
            }
        };
        if is_lost {
            session = None;
        }
        if printed.elapsed() >= LINE_EVERY {
            printed = Instant::now();
            outage.measure(&mut counts);
            audience.emit(&counts);
            audience.print_line(text(&counts));
            counts.longest_outage_ms = 0;
        }
        thread::sleep(ROUND_PAUSE);
    }
    Ok(())
}

/// Loads every block once; returns whether the session is lost.
fn round(
    check: &Check,
    own: &Block,
    others: &[Block],
    counts: &mut Counts,
    outage: &mut Outage,
) -> anyhow::Result<bool> {
    for block in std::iter::once(own).chain(others) {
        let scope = if block == own { Scope::Local } else { Scope::Cluster };
        let found = match check.load_verified(block, scope) {
            Ok(found) => found,
            Err(error) => match error.downcast_ref::<ClientError>() {
                Some(ClientError::AgentLost { .. }) => {
                    counts.missed(own, block);
                    outage.extend(counts);
                    return Ok(true);
                }
                // A timeout or a busy agent: a miss, but the session remains usable.
                Some(_) => None,
                None => return Err(error),
            },
        };
        match found.filter(|source| block != own || ExpectedSource::ThisNode.matches(*source)) {
            Some(source) => counts.hit(source),
            None => counts.missed(own, block),
        }
        if block == own {
            match found {
                Some(_) => outage.end(counts),
                None => outage.extend(counts),
            }
        }
    }
    Ok(false)
}

impl Counts {
    fn hit(&mut self, source: Source) {
        *self.hits.entry(name_of(source)).or_default() += 1;
    }

    fn missed(&mut self, own: &Block, block: &Block) {
        if block == own {
            self.own_missed += 1;
        } else {
            self.others_missed += 1;
        }
    }
}

impl Outage {
    fn extend(&mut self, counts: &mut Counts) {
        self.since.get_or_insert_with(Instant::now);
        self.measure(counts);
    }

    fn end(&mut self, counts: &mut Counts) {
        self.measure(counts);
        self.since = None;
    }

    fn measure(&self, counts: &mut Counts) {
        let lasted = self.since.map_or(Duration::ZERO, |since| since.elapsed());
        let lasted = u64::try_from(lasted.as_millis()).unwrap_or(u64::MAX);
        counts.longest_outage_ms = counts.longest_outage_ms.max(lasted);
    }
}

fn text(counts: &Counts) -> String {
    let hits: Vec<String> = counts.hits.iter().map(|(source, count)| format!("{source} {count}")).collect();
    let Counts { own_missed, others_missed, longest_outage_ms, .. } = counts;
    format!(
        "hits: {}; misses: own {own_missed}, others {others_missed}; longest outage {longest_outage_ms} ms",
        hits.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outage_is_reported_while_it_lasts_and_once_after_its_end() {
        let (mut counts, mut outage) = (Counts::default(), Outage { since: None });
        outage.end(&mut counts);
        assert_eq!(counts.longest_outage_ms, 0, "no outage yet");
        outage.extend(&mut counts);
        thread::sleep(Duration::from_millis(5));
        outage.measure(&mut counts);
        assert!(counts.longest_outage_ms >= 5, "{counts:?}");
        counts.longest_outage_ms = 0;
        thread::sleep(Duration::from_millis(5));
        outage.end(&mut counts);
        assert!(counts.longest_outage_ms >= 10, "measured from the start of the outage: {counts:?}");
        counts.longest_outage_ms = 0;
        outage.measure(&mut counts);
        assert_eq!(counts.longest_outage_ms, 0, "an ended outage is not reported again");
    }
}
