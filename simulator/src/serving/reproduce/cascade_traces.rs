//! Traces of the CASCADE reproduction: two recorded ones, and the synthetic workload that the paper describes.

use super::super::super::replay::{IdScope, ReadOptions, Trace, TraceBuilder, TraceRequest};
use super::super::random::Random;

/// Tokens of a block (section III-F).
const BLOCK_TOKENS: u64 = 256;

/// Seed of the synthetic workload.
const SEED: u64 = 42;

/// Turns of a synthetic session, and the blocks that each adds. ShareGPT has 161 tokens of prompt and 338 of output in
/// the mean (PagedAttention, figure 11): two blocks.
pub(super) const TURNS: u32 = 4;
pub(super) const TURN_BLOCKS: u32 = 2;

/// Milliseconds within which synthetic sessions start, and mean time between the turns of one.
const START_WITHIN_MS: u64 = 3_600_000;
const TURN_GAP_MS: f64 = 60_000.0;

/// A trace with its name in reports.
#[derive(Clone, Debug)]
pub struct NamedTrace {
    /// Name of its file, or of the sample.
    pub name: String,
    /// Requests with the times of one clock.
    pub trace: Trace,
}

/// Recorded traces that the reproduction replays.
#[derive(Clone, Debug)]
pub struct Traces {
    /// Mooncake's conversation trace: its ids are those of the whole trace.
    pub conversation: NamedTrace,
    /// Agentic coding sessions: ids are those of a session.
    pub agentic: NamedTrace,
}

/// Sessions that share system prompts (section IV-A).
#[derive(Clone, Copy, Debug)]
pub(super) struct Synthetic {
    /// Number of system prompts.
    pub(super) prompts: u32,
    /// Tokens of a system prompt.
    pub(super) prefix_tokens: u32,
    /// Sessions of each system prompt.
    pub(super) sessions: u32,
}

impl Synthetic {
    /// Returns the workload. With [`IdScope::Session`], blocks of different sessions have different ids.
    pub(super) fn trace(self, scope: IdScope) -> Trace {
        let mut random = Random::new(SEED);
        let prefix_blocks = self.prefix_tokens / BLOCK_TOKENS as u32;
        let mut turns = Vec::new();
        for session in 0..self.prompts * self.sessions {
            let mut at = random.below(START_WITHIN_MS);
            for turn in 1..=TURNS {
                turns.push((at, session, turn));
                at += random.exponential(TURN_GAP_MS) as u64;
            }
        }
        turns.sort_unstable();
        let options = ReadOptions { scope, block_tokens: Some(BLOCK_TOKENS), ..ReadOptions::default() };
        let mut builder = TraceBuilder::new(options);
        let own = u64::from(self.prompts * prefix_blocks);
        for (at_ms, session, turn) in turns {
            let first = u64::from(session % self.prompts * prefix_blocks);
            let first_own = own + u64::from(session * TURNS * TURN_BLOCKS);
            let hash_ids: Vec<u64> = (first..first + u64::from(prefix_blocks))
                .chain(first_own..first_own + u64::from(turn * TURN_BLOCKS))
                .collect();
            let request = TraceRequest {
                at_ms,
                session: Some(session),
                input_tokens: hash_ids.len() as u64 * BLOCK_TOKENS,
                output_tokens: 1,
                block_tokens: Some(BLOCK_TOKENS),
                hash_ids: &hash_ids,
            };
            builder
                .add("synthetic workload", &request)
                .expect("each id has one prefix, and times are sorted");
        }
        builder.finish("synthetic workload").expect("the workload has requests")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sessions_of_a_prompt_share_its_blocks_unless_ids_are_those_of_sessions() {
        let workload = Synthetic { prompts: 3, prefix_tokens: 2_048, sessions: 5 };
        let shared = workload.trace(IdScope::Trace);
        let own = u64::from(TURNS * TURN_BLOCKS) * 15;
        assert_eq!((shared.distinct(), shared.requests().len()), (3 * 8 + own, 60));
        assert_eq!(workload.trace(IdScope::Session).distinct(), 15 * 8 + own);
        assert!(shared.requests().is_sorted_by_key(|request| request.at_ms));
        let part = shared.of_sessions(4);
        assert_eq!((part.sessions(), part.requests().len()), (4, 4 * TURNS as usize));
        assert_eq!(part.references(), 4 * u64::from(4 * 8 + TURN_BLOCKS * (1 + 2 + 3 + 4)));
    }
}
