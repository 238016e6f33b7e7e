//! `reprise sim`: simulates clusters.

mod accuracy;
mod chaos;
mod cores;
pub(crate) mod replay;
mod reproduce;
mod scale;

use reprise_testkit::output::Audience;

use crate::config::Config;

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
    /// Serve a trace by the cores of agents and control plane, with the times of hardware.
    ///
    /// Prints hit rates by tier, times to first tokens and bytes by channel. Each run checks the invariants of the
    /// simulation with faults. With --compare, the hits are compared with those of a replay without time.
    Cores(cores::CoresArgs),
    /// Replay a trace through the eviction policies, with or without time.
    ///
    /// Prints hit rates by tier, bytes, evictions and writes to SSDs. The policies are those of agents. With --hardware and
    /// --model, engines serve the trace with times: also prints TTFT, TPOT, traffic of channels and prices.
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
    /// Compare the simulation with time with a real vLLM engine on this machine.
    ///
    /// Measures a profile, then serves three workloads in both. Takes some minutes; the machine must be idle.
    /// `python/bench/engine.sh sim accuracy` installs missing packages and runs this command.
    Accuracy(accuracy::AccuracyArgs),
}

pub(crate) fn command(args: &SimArgs, config: &Config, audience: Audience) -> anyhow::Result<()> {
    match &args.simulation {
        Simulation::Accuracy(args) => accuracy::command(args, config, audience),
        Simulation::Chaos(args) => chaos::command(args, audience),
        Simulation::Cores(args) => cores::command(args, audience),
        Simulation::Replay(args) => replay::command(args, audience),
        Simulation::Scale(args) => scale::command(args, audience),
        Simulation::Reproduce(args) => reproduce::command(args, audience),
    }
}
