//! `reprise check --again-for`: an engine that only hits. It loads the blocks of the check again and again, every byte compared, and says
//! once a second how many came from where.
//!
//! What it counts is what an engine would feel: a look that finds nothing is a block that is computed again, a session that is lost is
//! opened anew. Numbers are sums since the start, but for outages, which are those of their line.
//!
//! Invariant: wrong bytes end it at once, as a failure; nothing else does.

use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};

use reprise_client::{ClientError, Scope, Source};
use serde::Serialize;

use super::{Block, Check, CheckArgs, Wanted, block, connect, name_of};
use crate::output::Audience;

/// Between two rounds: some 50 loads of every block a second.
const ROUND_PAUSE: Duration = Duration::from_millis(20);

/// Between two lines.
const LINE_EVERY: Duration = Duration::from_secs(1);

/// What has been counted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
struct Counts {
    /// Blocks that came and were right, by where they came from.
    hits: BTreeMap<&'static str, u64>,
    /// Looks for the own block that did not find it on this node.
    own_missed: u64,
    /// Looks for others' blocks that found nothing.
    others_missed: u64,
    /// Sessions that were opened after the first.
    sessions: u64,
    /// The longest time without the own block that ended, or still lasts, since the line before.
    longest_outage_ms: u64,
}

/// Since when the own block has not been had.
#[derive(Clone, Copy, Debug)]
struct Outage {
    since: Option<Instant>,
}

/// Goes on until the time is over.
///
/// # Errors
/// Bytes that differ.
pub(super) fn go_on(
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
    let mut said = Instant::now();
    let mut session = Some(check);
    while Instant::now() < until {
        if session.is_none()
            && let Ok(client) = connect(args, namespace, layout)
        {
            counts.sessions += 1;
            session = Some(Check { client, layout, namespace, give_up: until, within: lasts });
        }
        // Nobody serves: everything is missed.
        let is_lost = match &session {
            Some(check) => round(check, &own, &others, &mut counts, &mut outage)?,
            None => {
                counts.missed(&own, &own);
                others.iter().for_each(|other| counts.missed(&own, other));
                outage.goes_on(&mut counts);
                false
            }
        };
        if is_lost {
            session = None;
        }
        if said.elapsed() >= LINE_EVERY {
            said = Instant::now();
            outage.measure(&mut counts);
            audience.emit(&counts);
            audience.say(text(&counts));
            counts.longest_outage_ms = 0;
        }
        thread::sleep(ROUND_PAUSE);
    }
    Ok(())
}

/// Looks for every block once. Whether the session is over.
fn round(
    check: &Check,
    own: &Block,
    others: &[Block],
    counts: &mut Counts,
    outage: &mut Outage,
) -> anyhow::Result<bool> {
    for block in std::iter::once(own).chain(others) {
        let scope = if block == own { Scope::Local } else { Scope::Cluster };
        let found = match check.look(block, scope) {
            Ok(found) => found,
            Err(error) => match error.downcast_ref::<ClientError>() {
                Some(ClientError::AgentLost { .. }) => {
                    counts.missed(own, block);
                    outage.goes_on(counts);
                    return Ok(true);
                }
                // Too late or too busy: missed, and the session goes on.
                Some(_) => None,
                None => return Err(error),
            },
        };
        match found.filter(|source| block != own || Wanted::ThisNode.is(*source)) {
            Some(source) => counts.hit(source),
            None => counts.missed(own, block),
        }
        if block == own {
            match found {
                Some(_) => outage.ends(counts),
                None => outage.goes_on(counts),
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
    fn goes_on(&mut self, counts: &mut Counts) {
        self.since.get_or_insert_with(Instant::now);
        self.measure(counts);
    }

    fn ends(&mut self, counts: &mut Counts) {
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
        "hits: {}; missed: own {own_missed}, others' {others_missed}; longest outage {longest_outage_ms} ms",
        hits.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_is_told_while_it_lasts_and_once_it_has_ended() {
        let (mut counts, mut outage) = (Counts::default(), Outage { since: None });
        outage.ends(&mut counts);
        assert_eq!(counts.longest_outage_ms, 0, "there was none");
        outage.goes_on(&mut counts);
        thread::sleep(Duration::from_millis(5));
        outage.measure(&mut counts);
        assert!(counts.longest_outage_ms >= 5, "{counts:?}");
        counts.longest_outage_ms = 0;
        thread::sleep(Duration::from_millis(5));
        outage.ends(&mut counts);
        assert!(counts.longest_outage_ms >= 10, "from its begin, not from the line: {counts:?}");
        counts.longest_outage_ms = 0;
        outage.measure(&mut counts);
        assert_eq!(counts.longest_outage_ms, 0, "and never again");
    }
}
