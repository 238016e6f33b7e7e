//! Samples of sessions, larger blocks, and the times between uses of blocks.
//!
//! Sessions with ids of their own share no block. So a cache of size `C` that serves all sessions hits as often as one of
//! size `f · C` that serves a random share `f` of them, up to the error of the sample.

use std::collections::{HashMap, HashSet};

use super::{NO_BLOCK, Place, Request, Trace};
use crate::rng::mix;

impl Trace {
    /// Keeps a share of the sessions, which a seed selects; each session is kept whole.
    ///
    /// Sessions of all sizes are kept alike: of those sorted by their references, every `1 / share`-th one. So the sample
    /// has nearly this share of the references too. Blocks that no kept request uses are removed. At least one session is
    /// kept.
    #[must_use]
    pub fn sampled(&self, share: f64, seed: u64) -> Trace {
        let mut references: HashMap<u32, u64> = HashMap::new();
        for request in &self.requests {
            *references.entry(request.session).or_default() += self.len_of(request) as u64;
        }
        let mut sessions: Vec<(u64, u64, u32)> = references
            .into_iter()
            .map(|(session, references)| (references, mix(seed ^ mix(u64::from(session) + 1)), session))
            .collect();
        sessions.sort_unstable();
        let begin = (mix(seed) >> 11) as f64 / (1_u64 << 53) as f64;
        let before = |at: usize| (at as f64 * share.clamp(0.0, 1.0) + begin).floor();
        let mut kept: HashSet<u32> =
            (0..sessions.len()).filter(|at| before(at + 1) > before(*at)).map(|at| sessions[at].2).collect();
        if kept.is_empty() {
            kept.extend(sessions.get(sessions.len() / 2).map(|(_, _, session)| *session));
        }
        self.with_requests(
            self.requests.iter().filter(|request| kept.contains(&request.session)).copied().collect(),
        )
    }

    /// Keeps the requests for which a function is true, with the blocks that they use.
    #[must_use]
    pub fn filtered(&self, is_kept: impl Fn(&Request) -> bool) -> Trace {
        self.with_requests(self.requests.iter().filter(|request| is_kept(request)).copied().collect())
    }

    /// Keeps the first requests, with at most so many references; at least one.
    #[must_use]
    pub fn begin(&self, references: u64) -> Trace {
        let mut sum = 0;
        let is_within = |request: &&Request| {
            sum += self.len_of(request) as u64;
            sum <= references
        };
        let count = self.requests.iter().take_while(is_within).count().max(1).min(self.requests.len());
        self.with_requests(self.requests[..count].to_vec())
    }

    /// Joins each `factor` consecutive blocks of a prompt to one; at least 1. Tokens behind the last one have no block.
    ///
    /// Two prompts share a joined block if they share its last block, because a block has one chain of blocks before it.
    #[must_use]
    pub fn coarsened(&self, factor: u32) -> Trace {
        let factor = factor.max(1);
        let mut blocks = Vec::new();
        // For each block, the last joined block that is complete with it. A block comes after its parent.
        let mut complete: Vec<u32> = Vec::with_capacity(self.blocks.len());
        for place in &self.blocks {
            let before = complete.get(place.parent as usize).copied().unwrap_or(NO_BLOCK);
            if (place.depth + 1).is_multiple_of(factor) {
                complete.push(blocks.len() as u32);
                blocks.push(Place { parent: before, depth: (place.depth + 1) / factor - 1 });
            } else {
                complete.push(before);
            }
        }
        let mut requests = self.requests.clone();
        for request in &mut requests {
            request.end = complete.get(request.end as usize).copied().unwrap_or(NO_BLOCK);
        }
        let block_tokens = self.block_tokens * u64::from(factor);
        let mut joined = Trace { blocks, requests, block_tokens, ..self.clone_without_content() };
        joined.references = joined.requests.iter().map(|request| joined.len_of(request) as u64).sum();
        joined
    }

    /// Gives all sessions other numbers, which a seed selects. Clusters select nodes by these numbers.
    #[must_use]
    pub fn placed(mut self, seed: u64) -> Trace {
        // An odd factor is invertible, so sessions keep different numbers.
        let (factor, offset) = (mix(seed) as u32 | 1, mix(!seed) as u32);
        for request in &mut self.requests {
            request.session = request.session.wrapping_mul(factor).wrapping_add(offset);
        }
        self
    }

    /// Trace of some requests with the blocks that they use.
    fn with_requests(&self, requests: Vec<Request>) -> Trace {
        let mut is_used = vec![false; self.blocks.len()];
        for request in &requests {
            let mut at = request.end;
            while at != NO_BLOCK && !is_used[at as usize] {
                is_used[at as usize] = true;
                at = self.blocks[at as usize].parent;
            }
        }
        self.compacted(requests, &is_used)
    }

    /// Number of sessions that have requests.
    pub fn sessions_used(&self) -> u32 {
        let sessions: HashSet<u32> = self.requests.iter().map(|request| request.session).collect();
        sessions.len() as u32
    }

    /// Rebuilds the trace of some requests, without unused blocks.
    fn compacted(&self, mut requests: Vec<Request>, is_used: &[bool]) -> Trace {
        let mut numbers = vec![NO_BLOCK; self.blocks.len()];
        let mut blocks = Vec::new();
        let moved = |numbers: &[u32], block: u32| numbers.get(block as usize).copied().unwrap_or(NO_BLOCK);
        // A block comes after its parent, so the parent's number is known.
        for (at, place) in self.blocks.iter().enumerate().filter(|(at, _)| is_used[*at]) {
            numbers[at] = blocks.len() as u32;
            blocks.push(Place { parent: moved(&numbers, place.parent), depth: place.depth });
        }
        for request in &mut requests {
            request.end = moved(&numbers, request.end);
        }
        let mut sample = Trace { blocks, requests, ..self.clone_without_content() };
        sample.references = sample.requests.iter().map(|request| sample.len_of(request) as u64).sum();
        sample
    }

    fn clone_without_content(&self) -> Trace {
        let (blocks, requests) = (Vec::new(), Vec::new());
        let Trace { sessions, block_tokens, has_session_times, has_session_ids, .. } = *self;
        Trace { blocks, requests, sessions, block_tokens, references: 0, has_session_times, has_session_ids }
    }

    /// Milliseconds between two uses of a block, for all uses but the first, as the numbers of uses at most `2^n` ms apart.
    pub fn reuse_intervals(&self) -> [u64; 48] {
        let mut last = vec![u64::MAX; self.blocks.len()];
        let mut counts = [0; 48];
        let mut chain = Vec::new();
        for request in &self.requests {
            self.chain(request, &mut chain);
            for block in &chain {
                let before = std::mem::replace(&mut last[*block as usize], request.at_ms);
                if before != u64::MAX {
                    let ms = request.at_ms.saturating_sub(before);
                    let class = u64::BITS - ms.saturating_sub(1).leading_zeros();
                    counts[class.min(47) as usize] += 1;
                }
            }
        }
        counts
    }
}

#[cfg(test)]
mod tests {
    use crate::replay::{IdScope, ReadOptions, Trace, TraceBuilder, TraceRequest};

    fn trace() -> Trace {
        let options =
            ReadOptions { scope: IdScope::Session, block_tokens: Some(10), ..ReadOptions::default() };
        let mut builder = TraceBuilder::new(options);
        for at in 0..200_u64 {
            let session = Some((at % 50) as u32);
            let hash_ids: Vec<u64> = (0..=at / 50).collect();
            let input_tokens = hash_ids.len() as u64 * 10;
            let request = TraceRequest {
                at_ms: at * 1_000,
                session,
                input_tokens,
                hash_ids: &hash_ids,
                ..TraceRequest::default()
            };
            builder.add("here", &request).expect("valid");
        }
        builder.finish("trace").expect("valid")
    }

    #[test]
    fn a_sample_keeps_whole_sessions_and_their_blocks_only() {
        let all = trace();
        let sample = all.sampled(0.4, 7);
        let sessions: std::collections::BTreeSet<u32> =
            sample.requests().iter().map(|request| request.session).collect();
        assert_eq!(sessions.len(), 20, "{sessions:?}");
        assert_eq!(sample.requests().len(), sessions.len() * 4);
        assert_eq!(
            (sample.distinct(), sample.references()),
            (sessions.len() as u64 * 4, sessions.len() as u64 * 10)
        );
        let mut chain = Vec::new();
        for request in sample.requests() {
            sample.chain(request, &mut chain);
            assert_eq!(chain.len() as u64 * 10, request.input_tokens);
        }
        assert_eq!(all.sampled(1.0, 7).distinct(), all.distinct());
        assert!(!all.sampled(0.0, 7).requests().is_empty());
    }

    #[test]
    fn joined_blocks_are_shared_where_their_last_blocks_are() {
        // Prompts of 1 to 4 blocks of 10 tokens in each of 50 sessions.
        let joined = trace().coarsened(2);
        assert_eq!((joined.block_tokens(), joined.references(), joined.distinct()), (20, 50 * 4, 50 * 2));
        let mut chain = Vec::new();
        for request in joined.requests() {
            joined.chain(request, &mut chain);
            assert_eq!(chain.len() as u64, request.input_tokens / 20);
        }
        let (first, last) = (joined.requests()[50], joined.requests()[150]);
        joined.chain(&first, &mut chain);
        let begin = chain.clone();
        joined.chain(&last, &mut chain);
        assert_eq!((first.session, &chain[..1]), (last.session, &begin[..]));
        assert_eq!(trace().coarsened(1).references(), trace().references());
    }

    #[test]
    fn placed_sessions_have_other_numbers_and_the_same_requests() {
        let placed = trace().placed(3);
        assert_eq!((placed.sessions_used(), placed.references()), (50, trace().references()));
        let numbers = |trace: &Trace| trace.requests().iter().map(|one| one.session).collect::<Vec<_>>();
        assert_ne!(numbers(&placed), numbers(&trace()));
        assert_ne!(numbers(&placed), numbers(&trace().placed(4)));
    }

    #[test]
    fn the_begin_of_a_trace_has_at_most_the_given_references() {
        // 50 requests with one block, then 50 with two.
        let begin = trace().begin(60);
        assert_eq!((begin.requests().len(), begin.references(), begin.distinct()), (55, 60, 55));
        assert_eq!((begin.sessions_used(), begin.has_session_ids()), (50, true));
        assert_eq!(trace().begin(0).requests().len(), 1);
        assert_eq!(trace().begin(u64::MAX).references(), trace().references());
    }

    #[test]
    fn intervals_are_counted_by_the_power_of_two_above_them() {
        // Every use but the first of a session's block is 50 s after the one before.
        let counts = trace().reuse_intervals();
        assert_eq!((counts[16], counts.iter().sum::<u64>()), (300, 300));
    }
}
