//! `crdgen`: writes the files that are generated from the types, or reports drift with `--check`.
//!
//! It works from any folder of the repository. Exit code 0: success; 1: drift (`--check`), or a file cannot be
//! read or written; 2: invalid arguments.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use reprise_crds::generated::{self, Drift};

const USAGE: &str = "usage: crdgen [--check]\n\
                     Write crds/definitions/*.yaml, docs/resources/*.md and, in charts/reprise,\n\
                     files/definitions/*.yaml and values.schema.json. With --check, write nothing,\n\
                     list files that differ, and exit with 1 if there are any.\n";

/// Mode of one run of the program.
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
        _ => return print(io::stderr(), USAGE, ExitCode::from(2)),
    };
    match run(mode) {
        Ok((text, code)) => print(io::stdout(), &text, code),
        Err(error) => print(io::stderr(), &format!("crdgen: {error}\n"), ExitCode::FAILURE),
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
            let advice = "run `cargo run -p reprise-crds --bin crdgen` and commit the files\n";
            Ok((format!("{}{advice}", list(&drift)), ExitCode::FAILURE))
        }
    }
}

fn root() -> io::Result<PathBuf> {
    let here = std::env::current_dir()?;
    generated::repository_above(&here).ok_or_else(|| {
        let message = format!("\"{}\" is not in a checkout of Reprise: change to one", here.display());
        io::Error::new(io::ErrorKind::NotFound, message)
    })
}

/// Prints the text and returns the exit code. A write error is ignored: the reader has closed the pipe.
fn print(mut to: impl Write, text: &str, code: ExitCode) -> ExitCode {
    let _ = to.write_all(text.as_bytes());
    code
}
