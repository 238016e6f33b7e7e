//! `reprise sim`: simulates clusters.

mod chaos;
mod replay;
mod reproduce;
mod scale;

use reprise_testkit::output::Audience;

/// Arguments of `reprise sim`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct SimArgs {
    #[command(subcommand)]
    simulation: Simulation,
}

#[derive(Clone, Debug, clap::Subcommand)]
enum Simulation {
    /// Simulate random faults, one run per seed; check all invariants.
    ///
    /// Each run checks the invariants at each step.
    Chaos(chaos::ChaosArgs),
    /// Replay a trace through the eviction policies, without time.
    ///
    /// Prints hit rates by tier, bytes, evictions and writes to SSDs. The policies are those of agents.
    Replay(replay::ReplayArgs),
    /// Simulate many agents that register at once, twice.
    ///
    /// All agents register at the first start, and again after all members have lost their memory.
    Scale(scale::ScaleArgs),
    /// Compare figures of papers with those of a simulation with time.
    ///
    /// For each figure, prints the published value, ours and the deviation; then the claims of the text without a figure,
    /// and the choices for parameters that a paper leaves open. Papers: tierkv, tutti, vllm, cascade, or all.
    Reproduce(reproduce::ReproduceArgs),
}

pub(crate) fn command(args: &SimArgs, audience: Audience) -> anyhow::Result<()> {
    match &args.simulation {
        Simulation::Chaos(args) => chaos::command(args, audience),
        Simulation::Replay(args) => replay::command(args, audience),
        Simulation::Scale(args) => scale::command(args, audience),
        Simulation::Reproduce(args) => reproduce::command(args, audience),
    }
}
