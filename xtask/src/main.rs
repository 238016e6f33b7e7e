//! Checks and figures of the repository: `cargo xtask check`, `cargo xtask figures`. Bills of materials: `cargo xtask sbom`.
//!
//! Sources are parsed line by line or token by token, which suffices because `rustfmt` formats them. The crate has no
//! dependencies, so its checks run a few seconds after a change.

#![forbid(unsafe_code)]

mod check;
mod figures;
mod manifest;
mod pattern;
mod rust;
mod sbom;
mod toml;
mod tree;
mod yaml;

use std::io::Write as _;
use std::process::ExitCode;

const USAGE: &str = "usage: cargo xtask COMMAND
  check            run all checks of the repository
  figures          print figures about the structure of the sources
  figures --check  also fail if a figure exceeds its limit
  figures operator print the layers, upward arrows, call cycles and lines of the operator
  sbom crate PACKAGE [CARGO TREE ARGUMENTS]
                   print the bill of materials of a package's program (CycloneDX)
  sbom go PROGRAM  print the bill of materials of a Go program";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["check"] => check::run(),
        ["figures"] => figures::run(false),
        ["figures", "--check"] => figures::run(true),
        ["figures", "operator"] => figures::run_operator(),
        ["sbom", "crate", package, ref selection @ ..] => sbom::of_package(package, selection),
        ["sbom", "go", program] => sbom::of_go_program(program),
        _ => {
            report(USAGE);
            ExitCode::from(2)
        }
    }
}

/// Prints a line on standard output.
fn print(line: &str) {
    // A closed pipe ends the output, not the checks.
    let _ = writeln!(std::io::stdout(), "{line}");
}

/// Prints a line on standard error.
fn report(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}
