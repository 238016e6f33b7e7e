//! Requests of a run: arrivals, lengths, and the part of a prompt that a cache has.

use super::events::{Nanos, nanos};
use super::random::Random;

/// Request to an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Time of its arrival.
    pub arrival: Nanos,
    /// Tokens of its prompt; at least 1.
    pub prompt: u32,
    /// Tokens that it generates; at least 1.
    pub output: u32,
    /// Leading tokens of the prompt whose KV cache some tier has.
    pub cached: u32,
    /// Tier of these tokens.
    pub source: CacheSource,
}

/// Tier from which a cached prefix is loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheSource {
    /// In accelerator memory: no load.
    #[default]
    Hbm,
    /// DRAM of the node.
    Dram,
    /// SSD of the node.
    Nvme,
    /// DRAM of a peer.
    Peer,
    /// Store behind all nodes.
    Cold,
}

/// Log-normal lengths of a trace profile.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lengths {
    /// Median tokens of prompts, and the standard deviation of their logarithm.
    pub prompt: (f64, f64),
    /// Median tokens of outputs, and the standard deviation of their logarithm.
    pub output: (f64, f64),
    /// Longest prompt and longest output.
    pub most: u32,
}

/// Trace profiles of TierKV, §4. The paper names the profiles and states lengths of the uniform one only. The others
/// are means or medians of published traces; a sigma of 1 spans a factor of 7 between the quartiles' double.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TraceProfile {
    /// Short prompts, short responses: ShareGPT's means, 161 and 338 tokens (PagedAttention, figure 11).
    Chatbot,
    /// Long prompts, moderate responses: CNN/DailyMail, 781 and 56 words (See et al. 2017) at 1.3 tokens a word.
    Summarization,
    /// Moderate prompts, variable responses: Azure's coding trace, medians 1,500 and 13 (Splitwise, figure 3).
    Code,
    /// 512 and 256 tokens, fixed (TierKV §4).
    Uniform,
    /// The four profiles in turn.
    Mixed,
}

impl TraceProfile {
    /// All profiles, in the order of the paper.
    pub const ALL: [TraceProfile; 5] = [
        TraceProfile::Chatbot,
        TraceProfile::Summarization,
        TraceProfile::Code,
        TraceProfile::Uniform,
        TraceProfile::Mixed,
    ];

    /// Name of the profile in reports.
    pub fn name(self) -> &'static str {
        match self {
            TraceProfile::Chatbot => "chatbot",
            TraceProfile::Summarization => "summarization",
            TraceProfile::Code => "code",
            TraceProfile::Uniform => "uniform",
            TraceProfile::Mixed => "mixed",
        }
    }

    /// Lengths of the request with a number.
    pub fn lengths(self, number: usize) -> Lengths {
        let of = |prompt, output| Lengths { prompt, output, most: 4_096 };
        match self {
            // The median of a log-normal distribution with mean m is m / e^(σ²/2).
            TraceProfile::Chatbot => of((161.0 / 0.5_f64.exp(), 1.0), (338.0 / 0.5_f64.exp(), 1.0)),
            TraceProfile::Summarization => of((1_015.0, 0.5), (73.0, 0.5)),
            TraceProfile::Code => of((1_500.0, 0.5), (13.0, 1.5)),
            TraceProfile::Uniform => of((512.0, 0.0), (256.0, 0.0)),
            TraceProfile::Mixed => TraceProfile::ALL[number % 4].lengths(number),
        }
    }
}

/// Poisson arrivals with lengths of a profile.
#[derive(Clone, Debug)]
pub struct Poisson {
    random: Random,
    profile: TraceProfile,
    at: f64,
    number: usize,
}

impl Poisson {
    /// Requests of a profile; equal seeds give equal requests.
    pub fn new(seed: u64, profile: TraceProfile) -> Poisson {
        Poisson { random: Random::new(seed), profile, at: 0.0, number: 0 }
    }

    /// Returns the next request, at a rate in requests per second.
    pub fn next(&mut self, rate: f64) -> Request {
        self.at += self.random.exponential(1.0 / rate);
        let Lengths { prompt, output, most } = self.profile.lengths(self.number);
        let mut draw =
            |(median, sigma)| (self.random.log_normal(median, sigma).round() as u32).clamp(1, most);
        let (prompt, output) = (draw(prompt), draw(output));
        self.number += 1;
        Request { arrival: Nanos(nanos(self.at)), prompt, output, cached: 0, source: CacheSource::Hbm }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_seeds_give_equal_requests_and_the_mean_gap_is_the_inverse_of_the_rate() {
        let draw = |seed| {
            let mut arrivals = Poisson::new(seed, TraceProfile::Mixed);
            (0..10_000).map(|_| arrivals.next(50.0)).collect::<Vec<_>>()
        };
        let requests = draw(42);
        assert_eq!(requests, draw(42));
        assert_ne!(requests, draw(43));
        let seconds = super::super::events::seconds(requests.last().expect("requests").arrival.0);
        assert!((seconds / 200.0 - 1.0).abs() < 0.05, "{seconds}");
    }

    #[test]
    fn uniform_profile_has_the_lengths_of_the_paper() {
        let request = Poisson::new(1, TraceProfile::Uniform).next(1.0);
        assert_eq!((request.prompt, request.output), (512, 256));
    }
}
