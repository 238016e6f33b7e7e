//! `reprise check --requests-for`: serves requests like an engine.
//!
//! Each prompt has one block. Prompts come one after the other at a steady rate, in turn a new one, one that
//! this participant has saved, and one of another participant. A block that the cache has is loaded and
//! verified; any other block is computed and saved.
//!
//! An unavailable cache only costs an engine time. So a request counts as *failed* only if it
//! * got wrong bytes,
//! * took longer than [`REQUEST_MAX`], or
//! * got an error other than a lost agent, a timeout or a busy agent.
//!
//! Counters are sums since the start; the longest request is that of one line's interval.
//!
//! Invariants: at most one request per [`REQUEST_EVERY`]; bounded memory ([`DURABLE_MAX`], [`PENDING_MAX`]);
//! no error ends the loop early.
//!
//! Not covered here but by `reprise replay`: concurrent requests, prompts of many blocks and paged memory.

use std::collections::{BTreeMap, VecDeque};
use std::thread;
use std::time::{Duration, Instant};

use reprise_client::{ClientError, CommitStatus, Scope, Source, Ticket};
use reprise_policy::NamespaceDigest;
use serde::Serialize;

use super::{Block, Check, CheckArgs, LOAD_DEADLINE, block_of, connect, name_of};
use reprise_testkit::keyed_blocks::Outcome;
use reprise_testkit::kv_function::mix;
use reprise_testkit::output::Audience;

/// Minimum interval between requests. A third of them are new, so a participant saves 430 KiB per second.
const REQUEST_EVERY: Duration = Duration::from_millis(50);

/// Time limit of a request: twice the deadline of one load.
const REQUEST_MAX: Duration = LOAD_DEADLINE.saturating_mul(2);

/// Number of the latest durable prompts of this participant that are requested again; their blocks are 64
/// MiB.
const DURABLE_MAX: usize = 1024;

/// Saves that await their durability notice. Agents send it within 100 ms, the time of two requests.
const PENDING_MAX: usize = 1024;

/// Interval of the printed lines.
const LINE_EVERY: Duration = Duration::from_secs(1);

/// Counters of one line of output.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
struct Counts {
    /// Served requests.
    requests: u64,
    /// Requests whose block was loaded and verified, by source.
    hits: BTreeMap<&'static str, u64>,
    /// Requests whose block was computed, for any reason.
    computed: u64,
    /// Requests for a block that is durable on this node but was not loaded.
    kept_missed: u64,
    /// Failed loads of blocks that a match had found.
    loads_failed: u64,
    /// Computed blocks that the agent committed.
    saved: u64,
    /// Computed blocks that the agent did not commit: no agent, no space or no reply.
    saves_failed: u64,
    /// Failed requests.
    failed: u64,
    /// 8-byte words that differ from the saved ones.
    wrong_words: u64,
    /// Sessions opened after the first.
    sessions: u64,
    /// Longest request since the previous line.
    longest_request_ms: u64,
}

/// Prompt of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Prompt {
    /// The next new prompt of this participant.
    New(u32),
    /// A prompt of this participant that is durable on this node.
    Durable(u32),
    /// A prompt of another participant, which may not have saved it.
    Others { participant: u32, number: u32 },
}

/// Result of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RequestResult {
    /// The block was loaded or computed.
    Ok,
    /// Wrong bytes, or an unexpected error.
    Failed,
}

/// State of the simulated engine.
struct Engine<'a> {
    args: &'a CheckArgs,
    /// Session with the agent; `None` while the agent is unavailable.
    session: Option<Check>,
    /// Saves of this session that await their durability notice, oldest first.
    pending: VecDeque<(Ticket, u32)>,
    /// Durable prompts of this participant, oldest first.
    durable: VecDeque<u32>,
    /// Number of new prompts so far.
    made: u32,
    counts: Counts,
}

/// Serves requests until the time is over.
pub(super) fn serve(check: Check, args: &CheckArgs, lasts: Duration, audience: Audience) {
    let (layout, namespace) = (check.layout, check.namespace);
    let until = Instant::now() + lasts;
    let mut engine = Engine::new(check, args);
    let mut printed = Instant::now();
    while Instant::now() < until {
        let began = Instant::now();
        if engine.session.is_none()
            && let Ok(client) = connect(args, layout)
        {
            engine.counts.sessions += 1;
            engine.session = Some(Check { client, layout, namespace, deadline: until, within: lasts });
        }
        engine.request(&namespace, began);
        if printed.elapsed() >= LINE_EVERY {
            printed = Instant::now();
            audience.emit(&engine.counts);
            audience.print_line(text(&engine.counts));
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
            durable: VecDeque::new(),
            made: 0,
            counts: Counts::default(),
        }
    }

    /// Serves one request and updates the counters.
    fn request(&mut self, namespace: &NamespaceDigest, began: Instant) {
        self.collect_durable();
        let prompt = choose(self.counts.requests, self.args, self.made, &self.durable);
        let result = self.answer(prompt, &prompt.block(namespace, self.args.index));
        let took = began.elapsed();
        self.counts.requests += 1;
        self.counts.longest_request_ms = self.counts.longest_request_ms.max(millis(took));
        if result == RequestResult::Failed || took > REQUEST_MAX {
            self.counts.failed += 1;
        }
        if matches!(prompt, Prompt::New(_)) {
            self.made = self.made.saturating_add(1);
        }
    }

    /// Loads the prompt's block, or computes and saves it.
    fn answer(&mut self, prompt: Prompt, block: &Block) -> RequestResult {
        let found = match &self.session {
            Some(check) => check.fetch(block, Scope::Cluster),
            None => Ok(None),
        };
        let mut load_result = RequestResult::Ok;
        match found {
            Ok(Some(Outcome::Verified(source))) => {
                self.counts.hit(source);
                return RequestResult::Ok;
            }
            Ok(Some(Outcome::Wrong { words })) => {
                self.counts.wrong_words += words;
                return RequestResult::Failed;
            }
            Ok(None) => {}
            Ok(Some(Outcome::Missing(_) | Outcome::Corrupt)) => self.counts.loads_failed += 1,
            Err(error) => {
                self.counts.loads_failed += 1;
                load_result = self.handle_error(&error);
            }
        }
        self.counts.computed += 1;
        self.counts.kept_missed += u64::from(matches!(prompt, Prompt::Durable(_)));
        match (self.save(prompt, block), load_result) {
            (RequestResult::Ok, RequestResult::Ok) => RequestResult::Ok,
            _ => RequestResult::Failed,
        }
    }

    /// Saves a computed block. A block that is not committed costs later requests a miss; this request
    /// succeeds.
    fn save(&mut self, prompt: Prompt, block: &Block) -> RequestResult {
        let put = match &self.session {
            Some(check) => check.put(block),
            None => Ok(None),
        };
        let committed = match put {
            Ok(Some(committed)) => committed,
            Ok(None) => {
                self.counts.saves_failed += 1;
                return RequestResult::Ok;
            }
            Err(error) => {
                self.counts.saves_failed += 1;
                return self.handle_error(&error);
            }
        };
        match committed.statuses.first() {
            Some(CommitStatus::Committed) => {
                self.counts.saved += 1;
                if let Prompt::New(number) = prompt {
                    push_bounded(&mut self.pending, (committed.ticket, number), PENDING_MAX);
                }
            }
            // Another participant has computed and saved the block in the meantime.
            Some(CommitStatus::Duplicate) => self.counts.saved += 1,
            // For example, the reservation's lease expired.
            _ => self.counts.saves_failed += 1,
        }
        RequestResult::Ok
    }

    /// Classifies an error, and drops the session if it has ended.
    fn handle_error(&mut self, error: &ClientError) -> RequestResult {
        match error {
            ClientError::AgentLost { .. } | ClientError::AgentAbsent { .. } => {
                self.session = None;
                // Without a durability notice, the blocks may be gone after the agent's restart.
                self.pending.clear();
                RequestResult::Ok
            }
            ClientError::Timeout { .. } | ClientError::Busy(_) => RequestResult::Ok,
            other => {
                tracing::error!(error = %other, "request failed");
                RequestResult::Failed
            }
        }
    }

    /// Moves prompts whose blocks have become durable from `pending` to `durable`.
    fn collect_durable(&mut self) {
        let Some(check) = &self.session else { return };
        while let Some((ticket, number)) = self.pending.front().copied() {
            // Not durable yet, or the session has ended; the next call returns that error.
            let Ok(outcome) = check.client.wait_durable(ticket, Duration::ZERO) else { return };
            self.pending.pop_front();
            if outcome.durable == 1 {
                push_bounded(&mut self.durable, number, DURABLE_MAX);
            }
        }
    }
}

impl Prompt {
    fn block(self, namespace: &NamespaceDigest, own: u32) -> Block {
        match self {
            Prompt::New(number) | Prompt::Durable(number) => block_of(namespace, &[own, number]),
            Prompt::Others { participant, number } => block_of(namespace, &[participant, number]),
        }
    }
}

impl Counts {
    fn hit(&mut self, source: Source) {
        *self.hits.entry(name_of(source)).or_default() += 1;
    }
}

/// Chooses the prompt of a request: in turn a new one, a durable one and one of another participant, by a
/// fixed sequence.
///
/// All participants run at the same rate, so another participant has saved about `made` prompts.
fn choose(request: u64, args: &CheckArgs, made: u32, durable: &VecDeque<u32>) -> Prompt {
    let drawn = mix(request);
    let others = u64::from(args.of - 1);
    match request % 3 {
        1 if !durable.is_empty() => Prompt::Durable(durable[(drawn % durable.len() as u64) as usize]),
        2 if others > 0 && made > 0 => {
            let participant = (mix(drawn) % others) as u32;
            // Skip this participant's own index.
            let participant = participant + u32::from(participant >= args.index);
            Prompt::Others { participant, number: (drawn % u64::from(made)) as u32 }
        }
        _ => Prompt::New(made),
    }
}

/// Appends an item; drops the oldest if the queue has `max` items.
fn push_bounded<T>(queue: &mut VecDeque<T>, item: T, max: usize) {
    if queue.len() >= max {
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
    use reprise_testkit::model;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: CheckArgs,
    }

    fn of(line: &[&str]) -> CheckArgs {
        Line::parse_from(line).args
    }

    #[test]
    fn one_third_of_requests_is_new_and_the_others_repeat_saved_prompts() {
        let args = of(&["check", "--run", "a", "--of", "3", "--index", "1"]);
        let durable: VecDeque<u32> = (10..20).collect();
        let all: Vec<Prompt> = (0..300).map(|request| choose(request, &args, 20, &durable)).collect();
        assert_eq!(all.iter().filter(|prompt| **prompt == Prompt::New(20)).count(), 100);
        let requested = |number: u32| all.contains(&Prompt::Durable(number));
        assert!((10..20).all(requested) && !requested(9) && !requested(20), "{all:?}");
        let from: Vec<u32> = all
            .iter()
            .filter_map(|prompt| match prompt {
                Prompt::Others { participant, number } => (*number < 20).then_some(*participant),
                _ => None,
            })
            .collect();
        assert_eq!(from.len(), 100, "each number is one that another participant may have saved");
        assert!(from.contains(&0) && from.contains(&2) && !from.contains(&1), "{from:?}");
    }

    #[test]
    fn requests_are_new_while_no_prompt_is_saved() {
        let alone = of(&["check", "--run", "a"]);
        for request in 0..3 {
            assert_eq!(choose(request, &alone, 0, &VecDeque::new()), Prompt::New(0));
        }
    }

    #[test]
    fn prompts_of_different_participants_and_numbers_have_different_blocks() {
        let args = of(&["check", "--run", "a"]);
        let layout = model::llama_3_8b_scaled(model::SCALE_DEFAULT).expect("valid");
        let namespace = super::super::namespace(&layout, &args.run);
        let own = Prompt::New(1).block(&namespace, 0);
        assert_eq!(own, Prompt::Durable(1).block(&namespace, 0));
        assert_eq!(own, Prompt::Others { participant: 0, number: 1 }.block(&namespace, 1));
        assert_ne!(own, Prompt::New(2).block(&namespace, 0));
        assert_ne!(own, Prompt::New(1).block(&namespace, 1));
        assert_ne!(own, super::super::block(&namespace, 0), "the check itself has a different block");
    }

    #[test]
    fn bounded_queue_drops_the_oldest_items() {
        let mut queue: VecDeque<u32> = VecDeque::new();
        (0..5).for_each(|number| push_bounded(&mut queue, number, 3));
        assert_eq!(queue, [2, 3, 4]);
    }
}
