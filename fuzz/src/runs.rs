//! Runs of one target: libFuzzer's arguments, and the figures in its output.

use std::fs::{self, File};
use std::io;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use reprise_fuzz::committed;

use crate::Folders;
use crate::programs::Target;

/// Time after which an input counts as a hang. Inputs take microseconds; the machine may be busy.
const INPUT_SECONDS_MAX: u32 = 20;

/// Maximum size of a generated input in bytes: a page of a journal, or some dozen messages.
const INPUT_BYTES_MAX: u32 = 4096;

/// End of a run.
pub(crate) enum Limit {
    /// Time of the run.
    Seconds(u64),
    /// Number of inputs.
    Inputs(u64),
}

/// Result of a run.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// Number of inputs.
    pub(crate) inputs: u64,
    /// Inputs per second.
    pub(crate) rate: u64,
    /// Edges of the control flow that an input has reached.
    pub(crate) edges: u64,
    /// Edges, with how often an input has passed them, and compared values.
    pub(crate) features: u64,
    /// Peak of the memory in MiB.
    pub(crate) memory_mib: u64,
    /// Inputs that failed.
    pub(crate) failed: Vec<PathBuf>,
    /// Why the program ended otherwise.
    pub(crate) error: Option<String>,
}

impl Outcome {
    /// Whether no input failed, and the run was complete.
    pub(crate) fn is_success(&self) -> bool {
        self.failed.is_empty() && self.error.is_none()
    }
}

/// Runs a target to a limit, and reads its figures.
pub(crate) fn run(folders: &Folders, target: &Target, limit: &Limit) -> Outcome {
    let failed = folders.failed(&target.name);
    let before = committed(&failed);
    let ended = start(folders, target, limit);
    let text = fs::read_to_string(folders.log(&target.name)).unwrap_or_default();
    let mut outcome = figures(&text);
    outcome.failed = committed(&failed).into_iter().filter(|path| !before.contains(path)).collect();
    outcome.error = match ended {
        Err(error) => Some(format!("cannot run {}: {error}", target.program.display())),
        Ok(false) if outcome.failed.is_empty() => Some("the program failed without an input".to_owned()),
        Ok(true) if outcome.inputs == 0 => Some("the program ran no input".to_owned()),
        Ok(_) => None,
    };
    outcome
}

/// Runs the program to its end. Returns whether it succeeded.
fn start(folders: &Folders, target: &Target, limit: &Limit) -> io::Result<bool> {
    let (inputs, failed, log) =
        (folders.inputs(&target.name), folders.failed(&target.name), folders.log(&target.name));
    for folder in [&inputs, &failed] {
        fs::create_dir_all(folder)?;
    }
    fs::create_dir_all(log.parent().unwrap_or(&folders.work))?;
    let mut arguments = vec![inputs.display().to_string()];
    let kept = folders.committed(&target.name);
    arguments.extend(kept.is_dir().then(|| kept.display().to_string()));
    arguments.extend([
        limit.option(),
        format!("-artifact_prefix={}/", failed.display()),
        format!("-max_len={INPUT_BYTES_MAX}"),
        format!("-timeout={INPUT_SECONDS_MAX}"),
        "-print_final_stats=1".to_owned(),
    ]);
    let log = File::create(log)?;
    let status = command(target, &arguments).stdout(log.try_clone()?).stderr(log).status()?;
    Ok(status.success())
}

/// The program of a target with arguments of libFuzzer.
pub(crate) fn command(target: &Target, arguments: &[String]) -> Command {
    let mut command = Command::new(&target.program);
    command.args([target.test.as_str(), "--exact", "--nocapture", "--test-threads=1"]);
    command.env("REPRISE_FUZZ_ARGUMENTS", arguments.join("\n")).stdin(Stdio::null());
    command
}

/// Reads the figures in the output of libFuzzer.
fn figures(text: &str) -> Outcome {
    let number = |text: &str| text.split_whitespace().next().and_then(|word| word.parse().ok());
    let after = |words: &str| text.rsplit_once(words).and_then(|(_, rest)| number(rest)).unwrap_or(0);
    Outcome {
        inputs: after("stat::number_of_executed_units:"),
        rate: after("stat::average_exec_per_sec:"),
        edges: after(" cov: "),
        features: after(" ft: "),
        memory_mib: after("stat::peak_rss_mb:"),
        ..Outcome::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_last_figures_of_a_run() {
        let text = "#2\tINITED cov: 24 ft: 25 corp: 1/1b exec/s: 0 rss: 40Mb\n\
                    #99\tDONE   cov: 310 ft: 922 corp: 80/3Kb lim: 400 exec/s: 49 rss: 53Mb\n\
                    Done 99 runs in 2 second(s)\nstat::number_of_executed_units: 99\n\
                    stat::average_exec_per_sec:     49\nstat::peak_rss_mb:              53\n";
        let Outcome { inputs, rate, edges, features, memory_mib, .. } = figures(text);
        assert_eq!((inputs, rate, edges, features, memory_mib), (99, 49, 310, 922, 53));
        assert_eq!(figures("error").inputs, 0);
    }
}
