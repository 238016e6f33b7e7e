//! Runs fuzz targets with libFuzzer: `make fuzz`.
//!
//! Exit codes: 0 if no input failed, 1 if one did, 2 if the targets cannot be built or run.

#![forbid(unsafe_code)]

mod programs;
mod report;
mod runs;

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Mutex;
use std::time::Duration;
use std::{env, thread};

use programs::Target;
use runs::{Limit, Outcome};

const USAGE: &str = "usage: reprise-fuzz COMMAND
  run [--seconds N | --inputs N] [TARGET...]
                   run all or these targets for N seconds in all, or on N inputs in all";

/// Time of all targets together without an option.
const SECONDS_DEFAULT: u64 = 300;

/// Folders of a run.
struct Folders {
    /// The repository.
    root: PathBuf,
    /// Inputs, logs and failed inputs; outside of the tree.
    work: PathBuf,
}

fn main() -> ExitCode {
    match command(&env::args().skip(1).collect::<Vec<_>>()) {
        Ok(code) => code,
        Err(error) => {
            report(&error);
            ExitCode::from(2)
        }
    }
}

fn command(arguments: &[String]) -> Result<ExitCode, String> {
    let folders = Folders::new()?;
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["run", "--seconds", seconds, ref names @ ..] => {
            run(&folders, &Limit::Seconds(number(seconds)?), names)
        }
        ["run", "--inputs", inputs, ref names @ ..] => run(&folders, &Limit::Inputs(number(inputs)?), names),
        ["run", ref names @ ..] if names.iter().all(|name| !name.starts_with('-')) => {
            run(&folders, &Limit::Seconds(SECONDS_DEFAULT), names)
        }
        _ => Err(USAGE.to_owned()),
    }
}

fn number(text: &str) -> Result<u64, String> {
    text.parse().ok().filter(|number| *number > 0).ok_or_else(|| format!("invalid number {text:?}\n{USAGE}"))
}

/// Builds all targets, and returns those of the names: all without names.
fn selected(folders: &Folders, names: &[&str]) -> Result<Vec<Target>, String> {
    let targets = programs::build(folders)?;
    if let Some(unknown) = names.iter().find(|name| targets.iter().all(|target| target.name != **name)) {
        let known: Vec<&str> = targets.iter().map(|target| target.name.as_str()).collect();
        return Err(format!("unknown target {unknown}: expected one of {}", known.join(", ")));
    }
    Ok(targets
        .into_iter()
        .filter(|target| names.is_empty() || names.contains(&target.name.as_str()))
        .collect())
}

/// Runs targets, as many at once as there are processors, and prints a table.
fn run(folders: &Folders, limit: &Limit, names: &[&str]) -> Result<ExitCode, String> {
    let targets = selected(folders, names)?;
    let at_once = thread::available_parallelism().map_or(1, usize::from);
    let share = match limit {
        Limit::Seconds(seconds) => {
            Limit::Seconds((seconds * at_once.min(targets.len()) as u64).div_ceil(targets.len() as u64))
        }
        Limit::Inputs(inputs) => Limit::Inputs(inputs.div_ceil(targets.len() as u64)),
    };
    let (waiting, outcomes) = (Mutex::new(targets.iter()), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..at_once {
            scope.spawn(|| {
                loop {
                    // The lock is released before the run.
                    let next = waiting.lock().expect("no panic under the lock").next();
                    let Some(target) = next else { break };
                    let outcome = runs::run(folders, target, &share);
                    print(&report::line(&target.name, &outcome));
                    outcomes.lock().expect("no panic under the lock").push((target.name.clone(), outcome));
                }
            });
        }
    });
    let mut outcomes = outcomes.into_inner().expect("no panic under the lock");
    outcomes.sort_by(|one, other| one.0.cmp(&other.0));
    Ok(finish(folders, &outcomes))
}

/// Prints the table, each failed input, and the summary.
fn finish(folders: &Folders, outcomes: &[(String, Outcome)]) -> ExitCode {
    print("");
    report::table(outcomes).iter().for_each(|line| print(line));
    for (name, outcome) in outcomes {
        for failure in report::failure(folders, name, outcome) {
            report(&failure);
        }
    }
    print(&report::summary(outcomes));
    if outcomes.iter().all(|(_, outcome)| outcome.is_success()) {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

impl Folders {
    fn new() -> Result<Folders, String> {
        let manifest = env::var_os("CARGO_MANIFEST_DIR").ok_or("run it by cargo: `make fuzz`")?;
        let root = PathBuf::from(manifest).parent().ok_or("the crate is not in the repository")?.to_owned();
        let cache = env::var_os("REPRISE_CACHE").map(PathBuf::from);
        let cache = cache.or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cache/reprise")));
        Ok(Folders { root, work: cache.ok_or("set HOME or REPRISE_CACHE")?.join("fuzz") })
    }

    /// Inputs of a target, of all runs.
    fn inputs(&self, target: &str) -> PathBuf {
        self.work.join("corpus").join(target)
    }

    /// Inputs of a target that have failed.
    fn failed(&self, target: &str) -> PathBuf {
        self.work.join("failed").join(target)
    }

    /// Output of the last run of a target.
    fn log(&self, target: &str) -> PathBuf {
        self.work.join("logs").join(format!("{target}.log"))
    }

    /// Committed inputs of a target.
    fn committed(&self, target: &str) -> PathBuf {
        self.root.join("fuzz/corpus").join(target)
    }
}

impl Limit {
    /// The option of libFuzzer.
    fn option(&self) -> String {
        match self {
            Limit::Seconds(seconds) => format!("-max_total_time={}", Duration::from_secs(*seconds).as_secs()),
            Limit::Inputs(inputs) => format!("-runs={inputs}"),
        }
    }
}

/// Prints a line on standard output.
fn print(line: &str) {
    // A closed pipe ends the output, not the run.
    let _ = writeln!(std::io::stdout(), "{line}");
}

/// Prints a line on standard error.
fn report(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}
