//! Laws of the policy.

use proptest::prelude::*;

use super::*;

const BLOCK: BlockSize = BlockSize { tokens: 16, bytes: 2 << 20 };
const BOUND: WaitBound = WaitBound {
    cap: Duration::from_millis(1000),
    base: Duration::from_millis(50),
    per_token: Duration::from_micros(100),
};
const NOW: Tick = Tick(1_000_000);

/// True rates: of a token, of a token for each one before it, and latency and time of a byte of each source.
#[derive(Clone, Debug)]
struct Rates {
    token: f64,
    per_context: f64,
    sources: [(f64, f64); 4],
}

impl Rates {
    fn compute(&self, prefix: f64, tokens: f64) -> f64 {
        tokens * (self.token + self.per_context * (prefix + tokens / 2.0))
    }

    /// Policy that has measured these rates.
    fn measured(&self) -> LoadPolicy {
        let mut policy = LoadPolicy::new(BOUND, BLOCK);
        for (tokens, prefix) in [(512, 0.0), (2048, 0.0), (1024, 8192.0), (512, 4096.0)] {
            let context = prefix + tokens as f64 / 2.0;
            let seconds = self.compute(prefix, tokens as f64);
            assert!(policy.observe_step(&Step { tokens, context, seconds }));
        }
        for at in 0..4 {
            for blocks in [1, 8, 64] {
                let mut counts = SourceCounts::default();
                counts[at] = blocks;
                let (latency, per_byte) = self.sources[at];
                let seconds = latency + per_byte * policy.bytes(blocks);
                assert!(policy.observe_load(&EndedLoad { requested: counts, loaded: counts, seconds }, NOW));
            }
        }
        policy
    }

    /// Time until the whole chain is in memory if its first blocks are loaded.
    fn total(&self, chain: &Chain<'_>, blocks: usize) -> f64 {
        let loaded = &chain.sources[..blocks];
        let load: f64 = (0..4)
            .map(|at| (at, loaded.iter().filter(|source| **source as usize - 1 == at).count()))
            .filter(|(_, count)| *count > 0)
            .map(|(at, count)| self.sources[at].0 + self.sources[at].1 * (count as f64) * BLOCK.bytes as f64)
            .sum();
        let tokens = |blocks: usize| (blocks as u64 * u64::from(BLOCK.tokens)) as f64;
        let prefix = chain.prefix_tokens as f64 + tokens(blocks);
        load + self.compute(prefix, tokens(chain.sources.len() - blocks))
    }
}

fn rates() -> impl Strategy<Value = Rates> {
    let source = (1e-5..5e-3, 1e-11..2e-8);
    (1e-6..1e-3, 0.0..1e-8, [source.clone(), source.clone(), source.clone(), source])
        .prop_map(|(token, per_context, sources)| Rates { token, per_context, sources })
}

fn sources() -> impl Strategy<Value = Vec<Source>> {
    proptest::collection::vec(proptest::sample::select(Source::ALL.to_vec()), 1..80)
}

fn chain(sources: &[Source], prefix_tokens: u64) -> Chain<'_> {
    Chain { sources, prefix_tokens, is_computing: false }
}

fn counts(source: Source, blocks: u32) -> SourceCounts {
    let mut counts = SourceCounts::default();
    counts[source as usize - 1] = blocks;
    counts
}

/// Time after which a request has all blocks of a load: those in order that arrive before its limit, and then computed
/// ones.
fn finish(limit: WaitLimit, arrivals: &[f64], rates: &Rates, prefix: f64) -> f64 {
    let mut leading = 0;
    while leading < arrivals.len() {
        let arrival = arrivals[..=leading].iter().copied().fold(0.0, f64::max);
        if arrival > limit.after(leading).as_secs_f64() {
            break;
        }
        leading += 1;
    }
    let stopped = match leading == arrivals.len() {
        true => arrivals.iter().copied().fold(0.0, f64::max),
        false => limit.after(leading).as_secs_f64(),
    };
    let tokens = |blocks: usize| (blocks * BLOCK.tokens as usize) as f64;
    stopped + rates.compute(prefix + tokens(leading), tokens(arrivals.len() - leading))
}

proptest! {
    #[test]
    fn chooses_the_cheapest_part_of_the_chain(rates in rates(), sources in sources(), prefix in 0..100_000u64) {
        let policy = rates.measured();
        let chain = chain(&sources, prefix);
        let decision = policy.decide(&chain, NOW);
        let best = rates.total(&chain, decision.blocks as usize);
        for blocks in 0..=sources.len() {
            let other = rates.total(&chain, blocks);
            prop_assert!(best <= other * 1.001 + 1e-9, "{decision:?}: {best} s, but {other} s with {blocks} blocks");
        }
        prop_assert_eq!(decision.requested.iter().sum::<u32>(), decision.blocks);
        let reason = match decision.blocks as usize {
            0 => Reason::Compute,
            all if all == sources.len() => Reason::Load,
            _ => Reason::Part,
        };
        prop_assert_eq!(decision.reason, reason);
    }

    #[test]
    fn hit_is_never_slower_than_recomputing_by_more_than_the_bound(
        rates in rates(),
        sources in sources(),
        prefix in 0..100_000u64,
        arrivals in proptest::collection::vec(prop_oneof![0.0..0.01, 0.0..10.0, Just(f64::INFINITY)], 80),
    ) {
        let decision = rates.measured().decide(&chain(&sources, prefix), NOW);
        let blocks = decision.blocks as usize;
        let limit = decision.limit.expect("the computation is measured");
        let tokens = u64::from(decision.blocks) * u64::from(BLOCK.tokens);
        let recomputed = rates.compute(prefix as f64, tokens as f64);
        let hit = finish(limit, &arrivals[..blocks], &rates, prefix as f64);
        let bound = BOUND.of_tokens(tokens).as_secs_f64();
        prop_assert!(hit <= recomputed * 1.000_001 + bound + 1e-6, "{hit} s, {recomputed} s to recompute, bound {bound} s");
    }

    #[test]
    fn bound_grows_with_tokens_up_to_the_cap(cap in 0..10_000_000u64, base in 0..1_000_000u64, per_token in 0..10_000u64,
        tokens in any::<u64>()) {
        let micros = Duration::from_micros;
        let bound = WaitBound { cap: micros(cap), base: micros(base), per_token: micros(per_token) };
        let exact = u128::from(base) + u128::from(per_token) * u128::from(tokens);
        prop_assert_eq!(bound.of_tokens(tokens).as_micros(), exact.min(u128::from(cap)));
    }

    #[test]
    fn impossible_measurements_are_counted_and_change_nothing(
        rates in rates(),
        sources in sources(),
        seconds in prop_oneof![Just(0.0), Just(-1.0), Just(f64::NAN), Just(f64::INFINITY), Just(f64::NEG_INFINITY), Just(61.0)],
    ) {
        let mut policy = rates.measured();
        let before = policy.decide(&chain(&sources, 0), NOW);
        let steps = [(0.0, seconds), (f64::NAN, 0.1)];
        let steps = steps.map(|(context, seconds)| Step { tokens: 1000, context, seconds });
        prop_assert!(steps.iter().all(|step| !policy.observe_step(step)));
        let blocks = counts(Source::OwnDram, 4);
        let too_many = EndedLoad { requested: blocks, loaded: counts(Source::OwnDram, 5), seconds: 0.1 };
        prop_assert!(!policy.observe_load(&too_many, NOW));
        let timeless = EndedLoad { requested: blocks, loaded: blocks, seconds: seconds.min(0.0) };
        prop_assert!(!policy.observe_load(&timeless, NOW));
        prop_assert_eq!(policy.ignored(), 4);
        prop_assert_eq!(policy.decide(&chain(&sources, 0), NOW), before);
    }
}

/// Rates at which loads from NVMe take much longer than computing.
fn slow_nvme() -> Rates {
    let mut sources = [(1e-4, 1e-10); 4];
    sources[Source::OwnNvme as usize - 1] = (1e-3, 1e-6);
    Rates { token: 1e-4, per_context: 0.0, sources }
}

#[test]
fn everything_is_loaded_without_limit_before_any_measurement() {
    let policy = LoadPolicy::new(BOUND, BLOCK);
    let decision = policy.decide(&chain(&[Source::OwnNvme; 7], 0), NOW);
    assert_eq!((decision.blocks, decision.reason, decision.limit), (7, Reason::Unmeasured, None));
    assert_eq!(decision.requested, counts(Source::OwnNvme, 7));
}

#[test]
fn unmeasured_source_is_loaded_within_the_bound() {
    let mut policy = LoadPolicy::new(BOUND, BLOCK);
    assert!(policy.observe_step(&Step { tokens: 1000, context: 500.0, seconds: 1.0 }));
    let decision = policy.decide(&chain(&[Source::PeerDram; 10], 0), NOW);
    assert_eq!((decision.blocks, decision.reason), (10, Reason::Unmeasured));
    let limit = decision.limit.expect("a limit");
    assert_eq!(limit, WaitLimit { bound: Duration::from_millis(66), per_block: Duration::from_millis(16) });
}

#[test]
fn small_steps_do_not_show_the_time_of_a_token() {
    let mut policy = LoadPolicy::new(BOUND, BLOCK);
    assert!(policy.observe_step(&Step { tokens: STEP_TOKENS_MIN - 1, context: 0.0, seconds: 1.0 }));
    assert_eq!(policy.compute_time(0, 16), None);
    assert!(policy.observe_step(&Step { tokens: STEP_TOKENS_MIN, context: 0.0, seconds: 1.28 }));
    assert_eq!(policy.compute_time(0, 100), Some(Duration::from_secs(1)));
}

#[test]
fn empty_chain_loads_nothing() {
    assert_eq!(slow_nvme().measured().decide(&chain(&[], 0), NOW).blocks, 0);
}

#[test]
fn fast_head_is_loaded_and_slow_rest_computed() {
    let sources = [[Source::OwnDram; 8], [Source::OwnNvme; 8]].concat();
    let decision = slow_nvme().measured().decide(&chain(&sources, 0), NOW);
    assert_eq!((decision.blocks, decision.reason), (8, Reason::Part));
}

#[test]
fn old_measurement_is_repeated_by_one_load() {
    let mut policy = slow_nvme().measured();
    let sources = [Source::OwnNvme; 8];
    assert_eq!(policy.decide(&chain(&sources, 0), NOW).reason, Reason::Compute);
    let later = NOW.after(RATE_LIFETIME + Duration::from_secs(1));
    let decision = policy.decide(&chain(&sources, 0), later);
    assert_eq!((decision.blocks, decision.reason), (8, Reason::Unmeasured));
    policy.load_started(&decision.requested, later);
    assert_eq!(policy.decide(&chain(&sources, 0), later).reason, Reason::Compute);
    // The device has recovered.
    let blocks = counts(Source::OwnNvme, 8);
    assert!(policy.observe_load(&EndedLoad { requested: blocks, loaded: blocks, seconds: 1e-3 }, later));
    policy.load_ended(&decision.requested);
    assert_eq!(policy.decide(&chain(&sources, 0), later).reason, Reason::Load);
}

#[test]
fn load_that_brought_nothing_in_time_makes_its_source_slow() {
    let mut policy = LoadPolicy::new(BOUND, BLOCK);
    policy.observe_step(&Step { tokens: 1000, context: 500.0, seconds: 0.1 });
    let sources = [Source::PeerNvme; 4];
    let requested = counts(Source::PeerNvme, 4);
    assert!(
        policy.observe_load(&EndedLoad { requested, loaded: SourceCounts::default(), seconds: 0.06 }, NOW)
    );
    assert_eq!(policy.decide(&chain(&sources, 0), NOW).reason, Reason::Compute);
    // An early failure, as of a lost session, does not count.
    assert!(
        !policy.observe_load(&EndedLoad { requested, loaded: SourceCounts::default(), seconds: 1e-4 }, NOW)
    );
    assert_eq!(policy.decide(&chain(&sources, 0), NOW).reason, Reason::Compute);
}

#[test]
fn loads_before_count_until_they_end() {
    let mut rates = slow_nvme();
    rates.sources[0] = (0.0, 1e-10);
    let mut policy = rates.measured();
    let long = policy.decide(&chain(&[Source::OwnDram; 100], 0), NOW);
    assert_eq!(long.reason, Reason::Load);
    let short = [Source::OwnDram; 2];
    assert_eq!(policy.decide(&chain(&short, 0), NOW).reason, Reason::Load);
    policy.load_started(&long.requested, NOW);
    assert_eq!(policy.decide(&chain(&short, 0), NOW).reason, Reason::Compute);
    let later = NOW.after(long.load_time);
    assert_eq!(policy.decide(&chain(&short, 0), later).reason, Reason::Load);
    policy.load_ended(&long.requested);
    assert_eq!(policy.decide(&chain(&short, 0), NOW).reason, Reason::Load);
}

#[test]
fn end_of_a_running_step_counts_as_wait() {
    let mut policy = slow_nvme().measured();
    for _ in 0..64 {
        assert!(policy.observe_step(&Step { tokens: 0, context: 0.0, seconds: 0.05 }));
    }
    let sources = [Source::OwnDram; 2];
    let idle = chain(&sources, 0);
    assert_eq!(policy.decide(&idle, NOW).reason, Reason::Load);
    let busy = Chain { is_computing: true, ..idle };
    assert_eq!(policy.decide(&busy, NOW).reason, Reason::Compute);
}

#[test]
fn time_of_mixed_loads_is_divided_as_expected() {
    let rates = slow_nvme();
    let mut policy = rates.measured();
    let mixed = [4, 4, 0, 0];
    let seconds = 2e-4 + 4.0 * 1.0e-10 * BLOCK.bytes as f64 + 1e-3 + 4.0 * 1e-6 * BLOCK.bytes as f64;
    let before = policy.sources[0].seconds(policy.bytes(8)).expect("measured");
    for _ in 0..64 {
        policy.observe_load(&EndedLoad { requested: mixed, loaded: mixed, seconds }, NOW);
    }
    let after = policy.sources[0].seconds(policy.bytes(8)).expect("measured");
    assert!(after < before * 1.5, "{after} s, {before} s before");
}

#[test]
fn time_of_a_failed_source_is_not_that_of_the_one_that_delivered() {
    let mut policy = slow_nvme().measured();
    let before = policy.sources[0].seconds(policy.bytes(4)).expect("measured");
    let requested = [4, 0, 0, 4];
    let cut = EndedLoad { requested, loaded: counts(Source::OwnDram, 4), seconds: 0.3 };
    assert!(policy.observe_load(&cut, NOW));
    assert_eq!(policy.sources[0].seconds(policy.bytes(4)), Some(before));
    assert_eq!(policy.decide(&chain(&[Source::OwnDram; 4], 0), NOW).reason, Reason::Load);
    assert_eq!(policy.decide(&chain(&[Source::PeerNvme; 4], 0), NOW).reason, Reason::Compute);
}

#[test]
fn failed_source_next_to_an_unmeasured_one_shows_nothing() {
    let mut policy = LoadPolicy::new(BOUND, BLOCK);
    policy.observe_step(&Step { tokens: 1000, context: 500.0, seconds: 0.1 });
    let requested = [4, 0, 0, 4];
    let cut = EndedLoad { requested, loaded: counts(Source::OwnDram, 4), seconds: 0.3 };
    assert!(!policy.observe_load(&cut, NOW));
    assert_eq!(policy.decide(&chain(&[Source::OwnDram; 4], 0), NOW).reason, Reason::Unmeasured);
    assert_eq!(policy.decide(&chain(&[Source::PeerNvme; 4], 0), NOW).reason, Reason::Unmeasured);
    assert_eq!(policy.ignored(), 0);
}

#[test]
fn blocks_of_another_source_than_found_do_not_show_a_failure() {
    let mut policy = slow_nvme().measured();
    let before = policy.sources[3].seconds(policy.bytes(4)).expect("measured");
    let moved = EndedLoad {
        requested: counts(Source::PeerNvme, 4),
        loaded: counts(Source::OwnDram, 4),
        seconds: 0.3,
    };
    assert!(policy.observe_load(&moved, NOW));
    assert_eq!(policy.sources[3].seconds(policy.bytes(4)), Some(before));
    assert!(policy.sources[0].seconds(policy.bytes(4)) > Some(before));
}

#[test]
fn source_that_a_load_has_not_measured_is_measured_by_the_next() {
    let mut policy = slow_nvme().measured();
    let sources = [[Source::OwnDram; 4], [Source::OwnNvme; 4]].concat();
    let later = NOW.after(RATE_LIFETIME + Duration::from_secs(1));
    let requested = policy.decide(&chain(&sources, 0), later).requested;
    policy.load_started(&requested, later);
    // All blocks were in DRAM meanwhile.
    let moved = EndedLoad { requested, loaded: counts(Source::OwnDram, 8), seconds: 1e-3 };
    assert!(policy.observe_load(&moved, later));
    policy.load_ended(&requested);
    assert_eq!(policy.decide(&chain(&sources, 0), later).reason, Reason::Unmeasured);
    // A full queue drops the load.
    policy.load_started(&requested, later);
    assert_ne!(policy.decide(&chain(&sources, 0), later).reason, Reason::Unmeasured);
    policy.load_ended(&requested);
    assert_eq!(policy.decide(&chain(&sources, 0), later).reason, Reason::Unmeasured);
}

#[test]
fn early_failure_of_an_unmeasured_source_does_not_count() {
    let mut policy = LoadPolicy::new(BOUND, BLOCK);
    policy.observe_step(&Step { tokens: 1000, context: 500.0, seconds: 0.1 });
    let requested = counts(Source::PeerDram, 4);
    let failed = EndedLoad { requested, loaded: SourceCounts::default(), seconds: 1e-4 };
    assert!(!policy.observe_load(&failed, NOW));
    let chain = chain(&[Source::PeerDram; 64], 0);
    assert_eq!(policy.decide(&chain, NOW).reason, Reason::Unmeasured);
    // A lost session is not an impossible measurement.
    assert_eq!(policy.ignored(), 0);
}

#[test]
fn everything_is_loaded_after_steps_are_forgotten() {
    let mut policy = slow_nvme().measured();
    let sources = [Source::OwnNvme; 8];
    assert_eq!(policy.decide(&chain(&sources, 0), NOW).reason, Reason::Compute);
    policy.forget_steps();
    let decision = policy.decide(&chain(&sources, 0), NOW);
    assert_eq!((decision.blocks, decision.reason, decision.limit), (8, Reason::Unmeasured, None));
}
