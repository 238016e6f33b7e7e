//! Goals of this benchmark, each with the figure that decides it.
//!
//! A goal is met, missed or not judged. Not judged counts as missed; reasons are a peer that was not
//! measured, or too few pairs.

use serde::Serialize;

use reprise_testkit::bench::report::Figure;
use reprise_testkit::output::{Audience, Table};

/// Goals: text, and prefix and suffix of the deciding figures' names. The largest of these figures decides,
/// except the sum of a step's calls ([`SUM`]).
const GOALS: [(&str, &str, &str); 8] = [
    ("load from DRAM: at most Mooncake's time on the same host", "vllm.reprise.dram", ""),
    ("load from a peer over TCP: at most half of Mooncake's time over TCP", "vllm.reprise.peer", ""),
    ("load from NVMe: at most twice own DRAM, or 1.2 times the device's time", "vllm.reprise.nvme", ""),
    ("miss: at most 1 % overhead, or within noise over 20 pairs", "vllm.reprise.miss_overhead", ""),
    (
        "miss of back-to-back prompts, to the last token: the same limit",
        "vllm.reprise.back_to_back_overhead",
        "",
    ),
    ("scheduler, load of 1,024 blocks: waits at most 1 ms (p99) in each call", SCHEDULER_LOAD, ".p99"),
    ("scheduler, save of 1,024 blocks: waits at most 1 ms (p99) in each call", SCHEDULER_SAVE, ".p99"),
    ("answers: equal to those of an engine without a connector", "vllm.reprise.same_answers", ""),
];

const SCHEDULER_LOAD: &str = "vllm.reprise.scheduler_1024_blocks.load.";
const SCHEDULER_SAVE: &str = "vllm.reprise.scheduler_1024_blocks.save.";

/// Suffix of the figure for the sum of a step's calls.
const SUM: &str = ".step.p99";

/// A goal and its result.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Goal {
    /// Text of the goal.
    goal: &'static str,
    /// Name of the deciding figure.
    figure: String,
    /// Measured ratio, or value if the goal is not a ratio; `null` if not measured.
    measured: Option<f64>,
    /// Unit of `measured`.
    unit: &'static str,
    /// Whether the goal was met; `null` if not judged.
    met: Option<bool>,
}

/// Judges all goals by these figures.
pub(super) fn goals(figures: &[Figure]) -> Vec<Goal> {
    let goal = |(goal, first, last): (&'static str, &'static str, &'static str)| {
        let is_it = |name: &str| {
            if last.is_empty() {
                name == first
            } else {
                name.starts_with(first) && name.ends_with(last) && !name.ends_with(SUM)
            }
        };
        let figure = figures
            .iter()
            .filter(|figure| is_it(&figure.name))
            .max_by(|one, other| one.value.total_cmp(&other.value));
        // A figure with a ratio but without a verdict was compared with another reference than the goal's.
        let measured = figure.and_then(|figure| match figure.ratio {
            Some(ratio) => figure.met.map(|_| (ratio, "ratio")),
            None => Some((figure.value, figure.unit)),
        });
        Goal {
            goal,
            figure: figure.map_or_else(|| first.to_owned(), |figure| figure.name.clone()),
            measured: measured.map(|(measured, _)| measured),
            unit: measured.map_or("", |(_, unit)| unit),
            met: figure.and_then(|figure| figure.met),
        }
    };
    GOALS.into_iter().map(goal).collect()
}

/// Prints the goals as a table, or one JSON object per line.
pub(super) fn print(audience: Audience, goals: &[Goal]) {
    let mut table = Table::new(&["goal", "measured", "unit", "met"]);
    for goal in goals {
        audience.emit(goal);
        table.row(vec![
            goal.goal.to_owned(),
            goal.measured.map(|measured| format!("{measured:.3}")).unwrap_or_default(),
            goal.unit.to_owned(),
            goal.words().to_owned(),
        ]);
    }
    audience.print_line(table.render());
}

impl Goal {
    fn words(&self) -> &'static str {
        match self.met {
            Some(true) => "met",
            Some(false) => "MISSED",
            None => "not judged",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use reprise_testkit::bench::report::{Paired, Target};

    #[test]
    fn deciding_figure_makes_a_goal_met_missed_or_not_judged() {
        let paired = Paired { reference: 40.0, subject: 50.0, ratio: 1.25 };
        let against = ("Mooncake, same host", Target::RatioAtMost(1.0));
        let dram = Figure::relative("vllm.reprise.dram", paired, "ms", against);
        let answers = Figure::absolute("vllm.reprise.same_answers", 1.0, "share", Target::AtLeast(1.0));
        let paired = Paired { reference: 80.0, subject: 20.0, ratio: 0.25 };
        let peer = Figure::relative("vllm.reprise.peer", paired, "ms", ("recompute", Target::None));
        let call = |name: &str, p99_ms| {
            Figure::absolute(format!("{SCHEDULER_LOAD}{name}.p99"), p99_ms, "ms", Target::AtMost(1.0))
        };
        let calls = [call("on_new_request", 0.2), call("get_num_new_matched_tokens", 0.7), call("step", 1.2)];
        let goals = goals(&[vec![dram, answers, peer], calls.to_vec()].concat());
        assert_eq!(goals.len(), GOALS.len());
        let of = |name: &str| goals.iter().find(|goal| goal.figure == name).expect("a goal with this figure");
        let dram = of("vllm.reprise.dram");
        assert_eq!((dram.measured, dram.unit, dram.words()), (Some(1.25), "ratio", "MISSED"));
        assert_eq!(of("vllm.reprise.same_answers").words(), "met");
        let peer = of("vllm.reprise.peer");
        assert_eq!((peer.measured, peer.words()), (None, "not judged"), "Mooncake was not measured");
        let slowest = of("vllm.reprise.scheduler_1024_blocks.load.get_num_new_matched_tokens.p99");
        assert_eq!((slowest.measured, slowest.words()), (Some(0.7), "met"));
        let save = of(SCHEDULER_SAVE);
        assert_eq!((save.measured, save.words()), (None, "not judged"));
    }
}
