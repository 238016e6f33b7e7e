//! docs/CLI.md and docs/CONFIGURATION.md equal the help and the default configurations that the programs print.
//!
//! A page that differs is written next to the test's data, and the failure names it. Copy it to `docs/` after a review.

use std::fmt::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use reprise_e2e::process::binary;
use reprise_e2e::tree;

/// Programs with a command line, in the order of the page.
const PROGRAMS: [&str; 5] =
    ["reprise", "reprise-agent", "reprise-controlplane", "reprise-operator", "reprise-bench"];

/// Programs with a configuration file.
const CONFIGURED: [&str; 3] = ["reprise-agent", "reprise-controlplane", "reprise"];

const CLI_HEAD: &str = "# Command line\n\n\
    <!-- Generated from the programs' help by the test `generated_pages` of `e2e`. Do not edit. -->\n\n\
    `make build` puts the programs into `~/.cache/reprise/target/release`; `make bench` also builds\n\
    `reprise-bench`. With `--json`, `reprise` prints one JSON object for each line.\n";

const CONFIGURATION_HEAD: &str = "# Configuration\n\n\
    <!-- Generated from `--print-default-config` by the test `generated_pages` of `e2e`. Do not edit. -->\n\n\
    Each program reads one TOML file (`--config FILE`). Unknown keys are errors. Every key has a default unless its\n\
    comment states otherwise. Sizes have a unit (`64MiB`), and so do times (`250ms`). In Kubernetes, the operator\n\
    writes these files from the custom resources.\n";

/// Standard output of a program, which must succeed.
fn output(program: &str, arguments: &[String]) -> String {
    let output = Command::new(binary(program))
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .expect("the program starts");
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).expect("output is UTF-8");
    text.lines().map(|line| format!("{}\n", line.trim_end())).collect()
}

/// Names in the section `Commands:` of a help text, without `help`.
fn commands(help: &str) -> Vec<String> {
    let section = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    section
        .take_while(|line| line.is_empty() || line.starts_with("  "))
        .filter(|line| line.starts_with("  ") && !line.starts_with("   "))
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| *name != "help")
        .map(str::to_owned)
        .collect()
}

fn add_help(page: &mut String, program: &str, path: &[String]) {
    let mut arguments = path.to_vec();
    arguments.push("--help".to_owned());
    let help = output(program, &arguments);
    let title = [&[program.to_owned()], path].concat().join(" ");
    let level = "#".repeat(2 + path.len().min(2));
    let _ = write!(page, "\n{level} {title}\n\n```text\n{}\n```\n", help.trim_end());
    for command in commands(&help) {
        add_help(page, program, &[path, &[command]].concat());
    }
}

fn assert_current(name: &str, page: &str) {
    let path = tree().join("docs").join(name);
    if std::fs::read_to_string(&path).unwrap_or_default() != page {
        let current = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        std::fs::write(&current, page).expect("the target folder is writable");
        panic!("docs/{name} differs from the programs: review {} and copy it", current.display());
    }
}

#[test]
fn the_page_of_the_command_line_equals_the_help_of_the_programs() {
    let mut page = CLI_HEAD.to_owned();
    for program in PROGRAMS {
        add_help(&mut page, program, &[]);
    }
    assert!(page.contains("\n#### reprise bench store\n"), "the page contains nested commands");
    assert_current("CLI.md", &page);
}

#[test]
fn the_page_of_the_configuration_equals_the_defaults_of_the_programs() {
    let mut page = CONFIGURATION_HEAD.to_owned();
    for program in CONFIGURED {
        let defaults = output(program, &["--print-default-config".to_owned()]);
        let _ = write!(page, "\n## {program}\n\n```toml\n{}\n```\n", defaults.trim_end());
    }
    assert_current("CONFIGURATION.md", &page);
}
