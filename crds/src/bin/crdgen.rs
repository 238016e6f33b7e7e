//! `crdgen`: writes the definitions, the reference page and the chart's schema of values from the types, or with `--check` says what has drifted.
//!
//! Works from anywhere in the repository. Exit code 0: all is as it should be; 1: something had drifted (`--check`), or could not
//! be read or written; 2: wrong arguments.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use reprise_crds::generated::{self, Drift};

const USAGE: &str = "usage: crdgen [--check]\n\
                     Writes crds/definitions/*.yaml, docs/RESOURCES.md and, in charts/reprise, files/definitions/*.yaml and\n\
                     values.schema.json; with --check, says what differs and exits with 1.\n";

/// What was asked for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Write,
    Check,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let mode = match arguments.as_slice() {
        [] => Mode::Write,
        ["--check"] => Mode::Check,
        _ => return told(io::stderr(), USAGE, ExitCode::from(2)),
    };
    match run(mode) {
        Ok((text, code)) => told(io::stdout(), &text, code),
        Err(error) => told(io::stderr(), &format!("crdgen: {error}\n"), ExitCode::FAILURE),
    }
}

fn run(mode: Mode) -> io::Result<(String, ExitCode)> {
    let root = root()?;
    let list = |changes: &[Drift]| changes.iter().map(|change| format!("{change}\n")).collect::<String>();
    match mode {
        Mode::Write => {
            let changes = generated::write(&root)?;
            Ok((format!("{}{} files changed\n", list(&changes), changes.len()), ExitCode::SUCCESS))
        }
        Mode::Check => {
            let drift = generated::drift(&root)?;
            if drift.is_empty() {
                return Ok((format!("no drift: {} files\n", generated::files().len()), ExitCode::SUCCESS));
            }
            let advice = "run `cargo run -p reprise-crds --bin crdgen` and commit what it writes\n";
            Ok((format!("{}{advice}", list(&drift)), ExitCode::FAILURE))
        }
    }
}

fn root() -> io::Result<PathBuf> {
    let here = std::env::current_dir()?;
    generated::repository_above(&here).ok_or_else(|| {
        let words = format!("'{}' is not in a checkout of Reprise: run it from one", here.display());
        io::Error::new(io::ErrorKind::NotFound, words)
    })
}

/// A reader that has gone away is no failure of ours.
fn told(mut to: impl Write, text: &str, code: ExitCode) -> ExitCode {
    let _ = to.write_all(text.as_bytes());
    code
}
