//! Compact traces, and their construction with checks.
//!
//! ```text
//! ids of a prompt:  7 8 9       blocks: 0 ← 1 ← 2      requests: 2
//!                   7 8 5                    ↖ 3                 3
//! ```
//!
//! Ids are prefix-chained: an id stands for a block and all blocks before it. So each id has one parent, and an id
//! with two parents is used for two prefixes, which the builder refuses.

mod sample;

use std::collections::HashMap;

use super::error::{Problem, TraceError};
use crate::rng::Rng;

/// Parent of a first block.
pub(crate) const NO_BLOCK: u32 = u32::MAX;

/// Tokens of a block where a trace states none: those of Mooncake's traces.
const BLOCK_TOKENS_DEFAULT: u64 = 512;

/// Maximum number of tokens of a block: that of a layout.
const BLOCK_TOKENS_MAX: u64 = u16::MAX as u64;

/// What an id identifies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IdScope {
    /// A prefix in the whole trace.
    #[default]
    Trace,
    /// A prefix in its session: blocks of different sessions are different.
    Session,
}

/// How a trace is read.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReadOptions {
    /// Scope of ids, where the format does not state it.
    pub scope: IdScope,
    /// Tokens of a block, where the trace does not state them.
    pub block_tokens: Option<u64>,
    /// Accept prompts with fewer blocks than tokens.
    pub allow_gaps: bool,
    /// Sort requests by time instead of refusing unsorted ones.
    pub sort: bool,
}

/// Request as a reader found it.
#[derive(Clone, Debug, Default)]
pub struct TraceRequest<'a> {
    /// Arrival in milliseconds, since the start of the trace or of the session.
    pub at_ms: u64,
    /// Number of the session; `None` if the format has none.
    pub session: Option<u32>,
    /// Prompt in tokens.
    pub input_tokens: u64,
    /// Output in tokens.
    pub output_tokens: u64,
    /// Tokens of a block, if the trace states them.
    pub block_tokens: Option<u64>,
    /// Ids of the prompt's blocks.
    pub hash_ids: &'a [u64],
}

/// Request of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Arrival in milliseconds.
    pub at_ms: u64,
    /// Prompt in tokens.
    pub input_tokens: u64,
    /// Output in tokens.
    pub output_tokens: u64,
    /// Session; requests of a trace without sessions are their own.
    pub session: u32,
    /// Last block of the prompt, or [`NO_BLOCK`].
    end: u32,
}

#[derive(Clone, Copy, Debug)]
struct Place {
    parent: u32,
    depth: u32,
}

/// Trace in its compact form.
#[derive(Clone, Debug)]
pub struct Trace {
    blocks: Vec<Place>,
    requests: Vec<Request>,
    sessions: u32,
    block_tokens: u64,
    references: u64,
    /// Whether times count from the start of each session.
    has_session_times: bool,
    /// Whether no block is used by two sessions, because ids are those of a session.
    has_session_ids: bool,
}

/// Builds a trace from requests.
#[derive(Debug)]
pub struct TraceBuilder {
    options: ReadOptions,
    trace: Trace,
    block_tokens: Option<u64>,
    /// Whether a prompt of several blocks fitted the default size.
    fits_default: bool,
    /// Scope of the ids that are read.
    scope: IdScope,
    /// Blocks by id, of the whole trace, and by session and id.
    ids: HashMap<u64, u32>,
    session_ids: HashMap<(u32, u64), u32>,
    /// For each block, the number of the place where it occurred first.
    firsts: Vec<u32>,
    places: Vec<String>,
    /// Session of the previous request, if ids are those of sessions, and its ids and blocks: most requests repeat a
    /// prefix of it.
    last: (Option<u32>, Vec<(u64, u32)>),
}

impl Trace {
    /// Requests in the order of their arrival.
    pub fn requests(&self) -> &[Request] {
        &self.requests
    }

    /// Number of sessions in the trace.
    pub fn sessions(&self) -> u32 {
        self.sessions
    }

    /// Tokens of a block.
    pub fn block_tokens(&self) -> u64 {
        self.block_tokens
    }

    /// Number of blocks of all prompts.
    pub fn references(&self) -> u64 {
        self.references
    }

    /// Number of distinct blocks.
    pub fn distinct(&self) -> u64 {
        self.blocks.len() as u64
    }

    /// Milliseconds between the first and the last arrival.
    pub fn span_ms(&self) -> u64 {
        let (first, last) = (self.requests.first(), self.requests.last());
        first.zip(last).map_or(0, |(first, last)| last.at_ms - first.at_ms)
    }

    /// Whether times count from the start of each session.
    pub fn has_session_times(&self) -> bool {
        self.has_session_times
    }

    /// Whether ids are those of a session, so that no block is used by two sessions.
    pub fn has_session_ids(&self) -> bool {
        self.has_session_ids
    }

    /// Number of blocks of a request's prompt.
    pub fn len_of(&self, request: &Request) -> usize {
        self.blocks.get(request.end as usize).map_or(0, |place| place.depth as usize + 1)
    }

    /// Replaces the contents of `chain` by the numbers of a request's blocks, in prompt order.
    pub fn chain(&self, request: &Request, chain: &mut Vec<u32>) {
        chain.clear();
        chain.resize(self.len_of(request), NO_BLOCK);
        let mut block = request.end;
        for place in chain.iter_mut().rev() {
            *place = block;
            block = self.blocks[block as usize].parent;
        }
    }

    /// Starts each session at a random time within a span, and returns the trace with the times of one clock.
    #[must_use]
    pub fn started_at_random(mut self, spread_ms: u64, seed: u64) -> Trace {
        let mut rng = Rng::new(seed);
        let starts: Vec<u64> = (0..self.sessions).map(|_| rng.next() % spread_ms.max(1)).collect();
        for request in &mut self.requests {
            request.at_ms = request.at_ms.saturating_add(starts[request.session as usize]);
        }
        self.has_session_times = false;
        self.sorted()
    }

    /// Returns the requests of the first sessions. Of an archive, their blocks are the first ones.
    #[must_use]
    pub fn of_sessions(&self, sessions: u32) -> Trace {
        let mut part = self.clone();
        part.requests.retain(|request| request.session < sessions);
        part.sessions = part.sessions.min(sessions);
        let ends = part.requests.iter().filter(|request| request.end != NO_BLOCK);
        let last = ends.map(|request| request.end as usize + 1).max().unwrap_or(0);
        part.blocks.truncate(last);
        part.references = part.requests.iter().map(|request| part.len_of(request) as u64).sum();
        part
    }

    /// Returns a trace of several copies, which start at random times. Each copy has its own blocks and sessions.
    ///
    /// # Errors
    /// [`Problem::TooLarge`].
    pub fn copies(mut self, copies: u32, spread_ms: u64, seed: u64) -> Result<Trace, TraceError> {
        let too_large = || TraceError::new("copies", Problem::TooLarge);
        let blocks = u32::try_from(self.blocks.len()).map_err(|_| too_large())?;
        blocks.checked_mul(copies.max(1)).filter(|all| *all < NO_BLOCK).ok_or_else(too_large)?;
        self.sessions.checked_mul(copies.max(1)).ok_or_else(too_large)?;
        let (requests, sessions, references) = (self.requests.len(), self.sessions, self.references);
        let mut rng = Rng::new(seed ^ u64::from(copies));
        let moved = |block: u32, by: u32| if block == NO_BLOCK { block } else { block + by };
        for copy in 1..copies {
            let start = rng.next() % spread_ms.max(1);
            for at in 0..blocks as usize {
                let Place { parent, depth } = self.blocks[at];
                self.blocks.push(Place { parent: moved(parent, copy * blocks), depth });
            }
            for at in 0..requests {
                let request = self.requests[at];
                self.requests.push(Request {
                    at_ms: request.at_ms.saturating_add(start),
                    session: request.session + copy * sessions,
                    end: moved(request.end, copy * blocks),
                    ..request
                });
            }
        }
        self.sessions *= copies.max(1);
        self.references = references * u64::from(copies.max(1));
        Ok(self.sorted())
    }

    fn sorted(mut self) -> Trace {
        // Requests of the same time keep their order.
        self.requests.sort_by_key(|request| request.at_ms);
        self
    }
}

impl TraceBuilder {
    /// Creates a builder without requests.
    pub fn new(options: ReadOptions) -> TraceBuilder {
        let trace = Trace {
            blocks: Vec::new(),
            requests: Vec::new(),
            sessions: 0,
            block_tokens: options.block_tokens.unwrap_or(BLOCK_TOKENS_DEFAULT),
            references: 0,
            has_session_times: false,
            has_session_ids: true,
        };
        TraceBuilder {
            options,
            trace,
            block_tokens: options.block_tokens,
            fits_default: false,
            scope: options.scope,
            ids: HashMap::new(),
            session_ids: HashMap::new(),
            firsts: Vec::new(),
            places: Vec::new(),
            last: (None, Vec::new()),
        }
    }

    /// Options of the reader.
    pub(super) fn options(&self) -> &ReadOptions {
        &self.options
    }

    /// Begins a session whose ids are its own, unless they are those of the trace, and whose times begin at zero;
    /// returns its number. Ids of earlier sessions are forgotten.
    pub(super) fn begin_session(&mut self, scope: IdScope) -> u32 {
        self.scope = scope;
        self.session_ids.clear();
        self.last.1.clear();
        self.trace.has_session_times = true;
        self.trace.sessions
    }

    /// Ends the session that began last.
    pub(super) fn end_session(&mut self) {
        self.trace.sessions += 1;
    }

    /// Number of requests so far.
    pub fn requests(&self) -> usize {
        self.trace.requests.len()
    }

    /// Adds a request. `at` is its place in the trace, for errors.
    ///
    /// # Errors
    /// The request is not possible, or not after the ones before.
    pub fn add(&mut self, at: &str, request: &TraceRequest<'_>) -> Result<(), TraceError> {
        self.check_block_size(request)
            .and_then(|()| self.check_time(request))
            .and_then(|()| self.intern(at, request))
            .map_err(|problem| TraceError::new(at, problem))
    }

    /// Returns the trace.
    ///
    /// # Errors
    /// [`Problem::Empty`], at the name of the trace.
    pub fn finish(self, name: &str) -> Result<Trace, TraceError> {
        if self.trace.requests.is_empty() {
            return Err(TraceError::new(name, Problem::Empty));
        }
        Ok(if self.options.sort || self.trace.has_session_times { self.trace.sorted() } else { self.trace })
    }

    fn check_block_size(&mut self, request: &TraceRequest<'_>) -> Result<(), Problem> {
        let stated = request.block_tokens.or(self.block_tokens);
        let block_tokens = stated.unwrap_or(BLOCK_TOKENS_DEFAULT);
        if !(1..=BLOCK_TOKENS_MAX).contains(&block_tokens) {
            return Err(Problem::BlockSize { block_tokens, before: None });
        }
        if let Some(before) = self.block_tokens.filter(|before| *before != block_tokens) {
            return Err(Problem::BlockSize { block_tokens, before: Some(before) });
        }
        let (tokens, blocks) = (request.input_tokens, request.hash_ids.len() as u64);
        let fits = |size: u64| (tokens / size..=tokens.div_ceil(size)).contains(&blocks);
        if !fits(block_tokens) && !self.options.allow_gaps {
            let other = (0..16).rev().map(|power| 1 << power).find(|size| fits(*size));
            return Err(match stated {
                None if !self.fits_default && blocks > 0 && other.is_some() => {
                    Problem::NoBlockSize { fits: other }
                }
                _ => Problem::Gap { tokens, blocks, expected: tokens.div_ceil(block_tokens), block_tokens },
            });
        }
        self.fits_default |= stated.is_none() && blocks > 1;
        if stated.is_some() {
            self.block_tokens = stated;
        }
        self.trace.block_tokens = block_tokens;
        Ok(())
    }

    fn check_time(&mut self, request: &TraceRequest<'_>) -> Result<(), Problem> {
        let before_ms = self.trace.requests.last().map_or(0, |last| last.at_ms);
        let is_unsorted = !self.trace.has_session_times && request.at_ms < before_ms;
        if is_unsorted && !self.options.sort {
            return Err(Problem::Unsorted { ms: request.at_ms, before_ms });
        }
        Ok(())
    }

    fn intern(&mut self, at: &str, request: &TraceRequest<'_>) -> Result<(), Problem> {
        let next = u32::try_from(self.trace.requests.len()).map_err(|_| Problem::TooLarge)?;
        let session = match request.session {
            Some(session) => session,
            None if self.scope == IdScope::Session => return Err(Problem::NoSession),
            None => next,
        };
        if !self.trace.has_session_times {
            let sessions = session.checked_add(1).ok_or(Problem::TooLarge)?;
            self.trace.sessions = self.trace.sessions.max(sessions);
        }
        self.trace.has_session_ids &= self.scope == IdScope::Session;
        let end = self.blocks_of(at, session, request.hash_ids)?;
        self.trace.references += request.hash_ids.len() as u64;
        self.trace.requests.push(Request {
            at_ms: request.at_ms,
            input_tokens: request.input_tokens,
            output_tokens: request.output_tokens,
            session,
            end,
        });
        Ok(())
    }

    /// Returns the last block of a prompt.
    fn blocks_of(&mut self, at: &str, session: u32, hash_ids: &[u64]) -> Result<u32, Problem> {
        let session = (self.scope == IdScope::Session).then_some(session);
        let (last_session, last) = &mut self.last;
        if *last_session != session {
            last.clear();
            *last_session = session;
        }
        let common = last.iter().zip(hash_ids).take_while(|((before, _), id)| before == *id).count();
        last.truncate(common);
        let mut parent = last.last().map_or(NO_BLOCK, |(_, block)| *block);
        let mut place = None;
        for (depth, id) in (0..).zip(hash_ids).skip(common) {
            let next = u32::try_from(self.trace.blocks.len()).map_err(|_| Problem::TooLarge)?;
            let block = match session {
                Some(session) => *self.session_ids.entry((session, *id)).or_insert(next),
                None => *self.ids.entry(*id).or_insert(next),
            };
            if block == next {
                let number = *place.get_or_insert_with(|| {
                    self.places.push(at.to_owned());
                    self.places.len() as u32 - 1
                });
                self.trace.blocks.push(Place { parent, depth });
                self.firsts.push(number);
            }
            if self.trace.blocks[block as usize].parent != parent {
                let first = self.places[self.firsts[block as usize] as usize].clone();
                return Err(Problem::ReusedId { id: *id, first });
            }
            last.push((*id, block));
            parent = block;
        }
        Ok(parent)
    }
}
