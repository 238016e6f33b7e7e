//! `gpu-check`: checks and measures Reprise on a machine with a GPU, and writes a report.
//!
//! Every step is a separate process with a time limit, because a kernel that fails makes all later GPU calls of its
//! process fail. A step prints JSON lines; a failing step does not stop the next ones.
//!
//! Exit codes: 0 if all steps passed, 1 if a step failed, 2 if this machine cannot run GPU code.

mod backends;
mod differential;
mod layers;
mod report;
mod runner;
mod steps;
mod transfers;

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use reprise_cuda::gpu::SmShare;

/// The text that `--help` prints.
const HELP: &str = "\
Check and measure Reprise on a machine with a GPU

Usage: gpu-check [OPTIONS]
       gpu-check step NAME [--small] [--device-code FILE] [--sms SHARE]

Options:
  --out DIR           Write gpu-check.md and gpu-check.json there [default: .]
  --date DATE         Name this date in the report
  --commit COMMIT     Name this commit in the report
  --native DIR        Compile these native sources with nvcc and check that code too
  --nvcc FILE         Compile with this nvcc
  --sanitizer FILE    Run steps under this compute-sanitizer
  --device-code FILE  Load device code from this file instead of the embedded one
  --sms SHARE         SMs for I/O kernels: a number, or a percentage as in 6% [default: 8]
  --seconds N         End after at most N seconds [default: 170]
  --only NAMES        Run only these steps, separated by commas
";

/// Arguments of the command.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    out: PathBuf,
    date: String,
    commit: String,
    native: Option<PathBuf>,
    nvcc: Option<PathBuf>,
    sanitizer: Option<PathBuf>,
    device_code: Option<PathBuf>,
    sms: SmShare,
    limit: Duration,
    only: Vec<String>,
    /// The step of this process; all of them if absent.
    step: Option<String>,
    small: bool,
}

fn main() -> ExitCode {
    let options = match parse(std::env::args().skip(1)) {
        Ok(Some(options)) => options,
        Ok(None) => {
            print(HELP.trim_end());
            return ExitCode::SUCCESS;
        }
        Err(message) => {
            print(&format!("error: {message}\n\n{HELP}"));
            return ExitCode::from(64);
        }
    };
    ExitCode::from(match &options.step {
        Some(step) => steps::run(step, &options),
        None => runner::run(&options),
    })
}

/// Parses the arguments; `None` for `--help`.
fn parse(arguments: impl Iterator<Item = String>) -> Result<Option<Options>, String> {
    let mut options = Options {
        out: PathBuf::from("."),
        date: "unknown".to_owned(),
        commit: "unknown".to_owned(),
        native: None,
        nvcc: None,
        sanitizer: None,
        device_code: None,
        sms: SmShare::Count(8),
        limit: Duration::from_secs(170),
        only: Vec::new(),
        step: None,
        small: false,
    };
    let mut arguments = arguments.peekable();
    if arguments.next_if(|argument| argument == "step").is_some() {
        options.step = Some(arguments.next().ok_or("expected the name of a step")?);
    }
    while let Some(argument) = arguments.next() {
        if matches!(argument.as_str(), "--help" | "-h") {
            return Ok(None);
        }
        if argument == "--small" {
            options.small = true;
            continue;
        }
        let value =
            arguments.next().ok_or_else(|| format!("unknown argument or missing value: {argument}"))?;
        match argument.as_str() {
            "--out" => options.out = value.into(),
            "--date" => options.date = value,
            "--commit" => options.commit = value,
            "--native" => options.native = Some(value.into()),
            "--nvcc" => options.nvcc = Some(value.into()),
            "--sanitizer" => options.sanitizer = Some(value.into()),
            "--device-code" => options.device_code = Some(value.into()),
            "--sms" => options.sms = value.parse().map_err(|error| format!("{error}"))?,
            "--seconds" => {
                let seconds =
                    value.parse().map_err(|_| format!("invalid --seconds {value}: expected a number"))?;
                options.limit = Duration::from_secs(seconds);
            }
            "--only" => options.only = step_names(&value)?,
            other => return Err(format!("unknown argument {other}")),
        }
    }
    Ok(Some(options))
}

/// Parses names of steps that are separated by commas.
fn step_names(list: &str) -> Result<Vec<String>, String> {
    let unknown = list.split(',').find(|name| !runner::names().any(|known| known == *name));
    if let Some(name) = unknown {
        let all: Vec<&str> = runner::names().collect();
        return Err(format!("unknown step \"{name}\": expected some of {}", all.join(",")));
    }
    Ok(list.split(',').map(str::to_owned).collect())
}

/// Prints a line; a closed output does not stop the checks.
pub(crate) fn print(line: &str) {
    let mut output = io::stdout().lock();
    let _ = writeln!(output, "{line}").and_then(|()| output.flush());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Option<Options>, String> {
        parse(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn arguments_are_parsed_and_checked() {
        let options = parsed("step copies --small --sms 6%").expect("valid").expect("no help");
        assert_eq!((options.step.as_deref(), options.small), (Some("copies"), true));
        assert_eq!(options.sms, SmShare::Percent(6));
        let options = parsed("--only kernels,slack").expect("valid").expect("no help");
        assert_eq!(options.only, ["kernels", "slack"]);
        assert!(parsed("--help").expect("valid").is_none());
        for line in ["--sms 0", "--seconds x", "--what 1", "--out", "step", "--only typo", "--only kernels,"]
        {
            assert!(parsed(line).is_err(), "{line}");
        }
    }
}
