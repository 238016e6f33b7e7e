//! The goals that this benchmark is there for, each with the figure that decides it: met, missed, or not judged, which is no better
//! than missed and has a reason: a peer that was not measured, or too few pairs.

use serde::Serialize;

use super::super::report::Figure;
use crate::output::{Audience, Table};

/// Goals in words, and the figures that decide them.
const GOALS: [(&str, &str); 7] = [
    ("from DRAM at most Mooncake's time on the same host", "vllm.reprise.dram"),
    ("from a peer over TCP at most half of Mooncake's time over TCP", "vllm.reprise.peer"),
    ("from NVMe at most twice own DRAM, or 1.2 times the device's time", "vllm.reprise.nvme"),
    ("a miss costs at most 1 %, or nothing beyond noise over 20 pairs", "vllm.reprise.miss_overhead"),
    (
        "the scheduler waits at most 1 ms (p99) for a load of 1,024 blocks",
        "vllm.reprise.scheduler_1024_blocks.load.step.p99",
    ),
    (
        "the scheduler waits at most 1 ms (p99) for a save of 1,024 blocks",
        "vllm.reprise.scheduler_1024_blocks.save.step.p99",
    ),
    ("every answer is one of an engine without a connector", "vllm.reprise.same_answers"),
];

/// A goal and what came of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Goal {
    /// In words.
    goal: &'static str,
    /// The figure that decides it.
    figure: &'static str,
    /// What was measured of it: the ratio where the goal is one, else the value; none: nothing.
    measured: Option<f64>,
    /// Unit of `measured`.
    unit: &'static str,
    /// None: it was not judged.
    met: Option<bool>,
}

/// Goals by these figures.
pub(super) fn goals(figures: &[Figure]) -> Vec<Goal> {
    let goal = |(goal, name): (&'static str, &'static str)| {
        let figure = figures.iter().find(|figure| figure.name == name);
        Goal {
            goal,
            figure: name,
            measured: figure.map(|figure| figure.ratio.unwrap_or(figure.value)),
            unit: figure.map_or("", |figure| if figure.ratio.is_some() { "ratio" } else { figure.unit }),
            met: figure.and_then(|figure| figure.met),
        }
    };
    GOALS.into_iter().map(goal).collect()
}

/// Prints them: a table for people, a line each for programs.
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
    audience.say(table.render());
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
    use super::super::super::report::{Paired, Target};
    use super::*;

    #[test]
    fn a_goal_is_met_missed_or_not_judged_by_its_figure() {
        let paired = Paired { reference: 40.0, subject: 50.0, ratio: 1.25 };
        let against = ("Mooncake, same host", Target::RatioAtMost(1.0));
        let dram = Figure::relative("vllm.reprise.dram", paired, "ms", against);
        let answers = Figure::absolute("vllm.reprise.same_answers", 1.0, "share", Target::AtLeast(1.0));
        let goals = goals(&[dram, answers]);
        assert_eq!(goals.len(), GOALS.len());
        let of = |name: &str| goals.iter().find(|goal| goal.figure == name).expect("it is a goal");
        let dram = of("vllm.reprise.dram");
        assert_eq!((dram.measured, dram.unit, dram.words()), (Some(1.25), "ratio", "MISSED"));
        assert_eq!(of("vllm.reprise.same_answers").words(), "met");
        let peer = of("vllm.reprise.peer");
        assert_eq!((peer.measured, peer.words()), (None, "not judged"));
    }
}
