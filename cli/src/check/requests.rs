//! `reprise check --requests-for`: an engine at work. It serves prompts of one block, one after the other at a steady rate: new ones, ones that
//! it has saved before, and ones of other participants. What it finds it loads, every byte compared; what it does not find it
//! computes and saves, as engines do.
//!
//! A cache that is away costs an engine time and nothing else, so few things count as a *failed* request: one that got wrong bytes, one that
//! took longer than [`PATIENCE`], and one whose calls told of something that neither absence nor delay explains. Numbers are sums since
//! the start, but the longest time, which is that of its line.
//!
//! Invariants: never more than one request every [`REQUEST_EVERY`]; memory is bounded ([`KEPT_MAX`], [`PENDING_MAX`]); nothing ends it
//! before its time.
//!
//! Deliberately absent: requests beside each other, prompts of many blocks and paged memory, which `reprise replay` has.

use std::collections::{BTreeMap, VecDeque};
use std::thread;
use std::time::{Duration, Instant};

use reprise_client::{ClientError, CommitStatus, Scope, Source, Ticket};
use reprise_policy::NamespaceDigest;
use serde::Serialize;

use super::{Block, Check, CheckArgs, Found, LOAD_DEADLINE, block_of, connect, name_of};
use crate::kv_function::mix;
use crate::output::Audience;

/// From one request to the next, at the least: a third of them are new, so a participant saves 430 KiB a second.
const REQUEST_EVERY: Duration = Duration::from_millis(50);

/// What a request may take: twice what one load may.
const PATIENCE: Duration = LOAD_DEADLINE.saturating_mul(2);

/// Prompts of one's own that are asked for again: the latest ones that are on a device, 64 MiB.
const KEPT_MAX: usize = 1024;

/// Saves whose end is waited for: agents tell within 100 ms, which are two requests.
const PENDING_MAX: usize = 1024;

/// Between two lines.
const LINE_EVERY: Duration = Duration::from_secs(1);

/// What has been counted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
struct Counts {
    /// Requests that ended.
    requests: u64,
    /// Requests whose block came and was right, by where it came from.
    hits: BTreeMap<&'static str, u64>,
    /// Requests whose block was computed, for whatever reason.
    computed: u64,
    /// Requests for a block that is on a device of this node, and did not come.
    kept_missed: u64,
    /// Loads of blocks that somebody had, and that did not come.
    loads_failed: u64,
    /// Blocks that were computed and taken by the agent.
    saved: u64,
    /// Blocks that were computed and not taken: no agent, no room, no answer.
    saves_failed: u64,
    /// Requests that failed.
    failed: u64,
    /// Words of 8 bytes that are not what was saved.
    wrong_words: u64,
    /// Sessions that were opened after the first.
    sessions: u64,
    /// The longest request since the line before.
    longest_request_ms: u64,
}

/// Which prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Prompt {
    /// One's next.
    New(u32),
    /// One's own, on a device of this node.
    Kept(u32),
    /// Another participant's, which may or may not have been saved.
    Others { participant: u32, number: u32 },
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    /// With bytes, or with a block that was computed.
    Well,
    /// With something that must not be.
    Badly,
}

/// An engine at work.
struct Engine<'a> {
    args: &'a CheckArgs,
    /// None while nobody serves.
    session: Option<Check>,
    /// Saves of this session whose end has not been told, oldest first.
    pending: VecDeque<(Ticket, u32)>,
    /// Own prompts that are on a device, oldest first.
    kept: VecDeque<u32>,
    /// Own prompts so far.
    made: u32,
    counts: Counts,
}

/// Goes on until the time is over.
pub(super) fn serve(check: Check, args: &CheckArgs, lasts: Duration, audience: Audience) {
    let (layout, namespace) = (check.layout, check.namespace);
    let until = Instant::now() + lasts;
    let mut engine = Engine::new(check, args);
    let mut said = Instant::now();
    while Instant::now() < until {
        let began = Instant::now();
        if engine.session.is_none()
            && let Ok(client) = connect(args, namespace, layout)
        {
            engine.counts.sessions += 1;
            engine.session = Some(Check { client, layout, namespace, give_up: until, within: lasts });
        }
        engine.request(&namespace, began);
        if said.elapsed() >= LINE_EVERY {
            said = Instant::now();
            audience.emit(&engine.counts);
            audience.say(text(&engine.counts));
            engine.counts.longest_request_ms = 0;
        }
        thread::sleep(REQUEST_EVERY.saturating_sub(began.elapsed()));
    }
}

impl<'a> Engine<'a> {
    fn new(check: Check, args: &'a CheckArgs) -> Engine<'a> {
        Engine {
            args,
            session: Some(check),
            pending: VecDeque::new(),
            kept: VecDeque::new(),
            made: 0,
            counts: Counts::default(),
        }
    }

    /// Serves one request, and counts what came of it.
    fn request(&mut self, namespace: &NamespaceDigest, began: Instant) {
        self.note_durable();
        let prompt = choose(self.counts.requests, self.args, self.made, &self.kept);
        let ended = self.answer(prompt, &prompt.block(namespace, self.args.index));
        let took = began.elapsed();
        self.counts.requests += 1;
        self.counts.longest_request_ms = self.counts.longest_request_ms.max(millis(took));
        if ended == Ended::Badly || took > PATIENCE {
            self.counts.failed += 1;
        }
        if matches!(prompt, Prompt::New(_)) {
            self.made = self.made.saturating_add(1);
        }
    }

    /// Loads the prompt's block, or computes and saves it.
    fn answer(&mut self, prompt: Prompt, block: &Block) -> Ended {
        let found = match &self.session {
            Some(check) => check.fetch(block, Scope::Cluster),
            None => Ok(Found::Nothing),
        };
        let mut ended = Ended::Well;
        match found {
            Ok(Found::Right(source)) => {
                self.counts.hit(source);
                return Ended::Well;
            }
            Ok(Found::Wrong { words }) => {
                self.counts.wrong_words += words;
                return Ended::Badly;
            }
            Ok(Found::Nothing) => {}
            Ok(Found::NotBrought) => self.counts.loads_failed += 1,
            Err(error) => {
                self.counts.loads_failed += 1;
                ended = self.meet(&error);
            }
        }
        self.counts.computed += 1;
        self.counts.kept_missed += u64::from(matches!(prompt, Prompt::Kept(_)));
        match (self.save(prompt, block), ended) {
            (Ended::Well, Ended::Well) => Ended::Well,
            _ => Ended::Badly,
        }
    }

    /// Saves what was computed. That nobody takes it costs whoever asks next, not this request.
    fn save(&mut self, prompt: Prompt, block: &Block) -> Ended {
        let put = match &self.session {
            Some(check) => check.put(block),
            None => Ok(None),
        };
        let committed = match put {
            Ok(Some(committed)) => committed,
            Ok(None) => {
                self.counts.saves_failed += 1;
                return Ended::Well;
            }
            Err(error) => {
                self.counts.saves_failed += 1;
                return self.meet(&error);
            }
        };
        match committed.statuses.first() {
            Some(CommitStatus::Committed) => {
                self.counts.saved += 1;
                if let Prompt::New(number) = prompt {
                    push_bounded(&mut self.pending, (committed.ticket, number), PENDING_MAX);
                }
            }
            // Somebody else has computed it meanwhile.
            Some(CommitStatus::Duplicate) => self.counts.saved += 1,
            // A slot that was taken back because the agent was slow, or anything else.
            _ => self.counts.saves_failed += 1,
        }
        Ended::Well
    }

    /// What an error means for the request that it came to. A session that has ended is given up.
    fn meet(&mut self, error: &ClientError) -> Ended {
        match error {
            ClientError::AgentLost { .. } | ClientError::AgentAbsent { .. } => {
                self.session = None;
                // What was not told to be durable may be gone.
                self.pending.clear();
                Ended::Well
            }
            ClientError::Timeout { .. } | ClientError::Busy(_) => Ended::Well,
            other => {
                tracing::error!(error = %other, "a request has failed");
                Ended::Badly
            }
        }
    }

    /// Takes up saves that have come to a device.
    fn note_durable(&mut self) {
        let Some(check) = &self.session else { return };
        while let Some((ticket, number)) = self.pending.front().copied() {
            // Not yet, or the session has ended, which the next call tells.
            let Ok(outcome) = check.client.wait_durable(ticket, Duration::ZERO) else { return };
            self.pending.pop_front();
            if outcome.durable == 1 {
                push_bounded(&mut self.kept, number, KEPT_MAX);
            }
        }
    }
}

impl Prompt {
    fn block(self, namespace: &NamespaceDigest, own: u32) -> Block {
        match self {
            Prompt::New(number) | Prompt::Kept(number) => block_of(namespace, &[own, number]),
            Prompt::Others { participant, number } => block_of(namespace, &[participant, number]),
        }
    }
}

impl Counts {
    fn hit(&mut self, source: Source) {
        *self.hits.entry(name_of(source)).or_default() += 1;
    }
}

/// What the next request asks for: in turn a new prompt, a kept one and one of another's, which one by a fixed sequence. All participants
/// work at one rate, so another has saved about as many.
fn choose(request: u64, args: &CheckArgs, made: u32, kept: &VecDeque<u32>) -> Prompt {
    let drawn = mix(request);
    let others = u64::from(args.of - 1);
    match request % 3 {
        1 if !kept.is_empty() => Prompt::Kept(kept[(drawn % kept.len() as u64) as usize]),
        2 if others > 0 && made > 0 => {
            let participant = (mix(drawn) % others) as u32;
            // One's own index is left out.
            let participant = participant + u32::from(participant >= args.index);
            Prompt::Others { participant, number: (drawn % u64::from(made)) as u32 }
        }
        _ => Prompt::New(made),
    }
}

/// The oldest gives way.
fn push_bounded<T>(queue: &mut VecDeque<T>, item: T, most: usize) {
    if queue.len() >= most {
        queue.pop_front();
    }
    queue.push_back(item);
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn text(counts: &Counts) -> String {
    let hits: Vec<String> = counts.hits.iter().map(|(source, count)| format!("{source} {count}")).collect();
    let Counts { requests, computed, saved, failed, wrong_words, longest_request_ms, .. } = counts;
    format!(
        "requests: {requests}; hits: {}; computed {computed}, saved {saved}; failed {failed}; wrong words {wrong_words}; longest request \
         {longest_request_ms} ms",
        hits.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::model;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: CheckArgs,
    }

    fn of(line: &[&str]) -> CheckArgs {
        Line::parse_from(line).args
    }

    #[test]
    fn a_third_of_the_requests_is_new_and_the_others_are_for_what_was_saved() {
        let args = of(&["check", "--run", "a", "--of", "3", "--index", "1"]);
        let kept: VecDeque<u32> = (10..20).collect();
        let all: Vec<Prompt> = (0..300).map(|request| choose(request, &args, 20, &kept)).collect();
        assert_eq!(all.iter().filter(|prompt| **prompt == Prompt::New(20)).count(), 100);
        let asked = |wanted: u32| all.contains(&Prompt::Kept(wanted));
        assert!((10..20).all(asked) && !asked(9) && !asked(20), "{all:?}");
        let from: Vec<u32> = all
            .iter()
            .filter_map(|prompt| match prompt {
                Prompt::Others { participant, number } => (*number < 20).then_some(*participant),
                _ => None,
            })
            .collect();
        assert_eq!(from.len(), 100, "none is beyond what another may have made");
        assert!(from.contains(&0) && from.contains(&2) && !from.contains(&1), "{from:?}");
    }

    #[test]
    fn who_has_nothing_to_ask_for_again_makes_something_new() {
        let alone = of(&["check", "--run", "a"]);
        for request in 0..3 {
            assert_eq!(choose(request, &alone, 0, &VecDeque::new()), Prompt::New(0));
        }
    }

    #[test]
    fn prompts_of_different_participants_and_numbers_are_different_blocks() {
        let args = of(&["check", "--run", "a"]);
        let layout = model::llama_3_8b_scaled(model::SCALE_DEFAULT).expect("valid");
        let namespace = super::super::namespace(&layout, &args.tenant, &args.run);
        let own = Prompt::New(1).block(&namespace, 0);
        assert_eq!(own, Prompt::Kept(1).block(&namespace, 0));
        assert_eq!(own, Prompt::Others { participant: 0, number: 1 }.block(&namespace, 1));
        assert_ne!(own, Prompt::New(2).block(&namespace, 0));
        assert_ne!(own, Prompt::New(1).block(&namespace, 1));
        assert_ne!(own, super::super::block(&namespace, 0), "nor that of the check itself");
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let mut queue: VecDeque<u32> = VecDeque::new();
        (0..5).for_each(|number| push_bounded(&mut queue, number, 3));
        assert_eq!(queue, [2, 3, 4]);
    }
}
