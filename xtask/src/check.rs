//! All checks of the repository. Each states its rule; an offence names the file.

mod crates;
mod documents;
mod fields;
mod language;
mod structure;
mod test_binaries;
pub(crate) mod twins;

pub(crate) use test_binaries::count as test_binaries;

use std::process::ExitCode;

use crate::tree::Tree;
use crate::{figures, print, report};

/// A rule, and the function that returns its offences.
type Check = (&'static str, fn(&Tree) -> Vec<String>);

/// All rules of the repository.
const CHECKS: &[Check] = &[
    ("a source file opens with a `//!` module doc", structure::module_docs),
    ("files are split by responsibility before they grow too long", structure::lengths),
    ("unsafe code lives in the crates that docs/ARCHITECTURE.md lists", structure::unsafe_code),
    ("only what people read has the time of day", structure::times_of_day),
    ("random numbers of tests come from a seed (e2e/src/seed.rs, PROPTEST_RNG_SEED)", structure::seeds),
    ("a module file is declared by its parent, or it is dead", structure::dead_modules),
    ("a note of work to do names its issue, as in TODO(#12)", structure::notes),
    ("#[ignore] has a reason", structure::ignored_tests),
    ("the tree is small and contains no path of one machine", structure::sizes_and_paths),
    ("crate edges are those of docs/ARCHITECTURE.md", crates::edges),
    (
        "a crate has one integration-test binary, and its manifest gives a reason for others",
        test_binaries::several,
    ),
    ("plain English (xtask/language.toml)", language::constructions),
    ("a doc comment of a type or function has at least four words", documents::short_doc_comments),
    ("a public type or function has a doc comment", documents::missing_doc_comments),
    ("lines of documents have at most 120 characters, cells 200", documents::long_lines),
    ("a sentence of a document has at most 40 words", documents::long_sentences),
    ("every field has a reader, a writer, a rejection, or a report that it is unused", fields::effects),
    ("no file of the simulator follows a production loop", twins::offences),
    (
        "nothing of operator/src/framework imports other modules of the operator",
        figures::arrows_from_framework,
    ),
    ("a call cycle of the operator has at most three files", figures::operator_call_cycle),
];

/// Runs all checks and prints the offences.
pub(crate) fn run() -> ExitCode {
    let tree = Tree::read();
    let mut failed = 0;
    for (rule, check) in CHECKS {
        let offences = check(&tree);
        if !offences.is_empty() {
            failed += 1;
            report(&format!("{rule}:\n  {}", offences.join("\n  ")));
        }
    }
    if failed > 0 {
        report(&format!("{failed} of {} checks failed", CHECKS.len()));
        return ExitCode::FAILURE;
    }
    print(&format!("{} checks of {} files passed", CHECKS.len(), tree.files().count()));
    ExitCode::SUCCESS
}
