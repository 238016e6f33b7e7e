//! Renders as they are in the tree: a change of a template shows in review as what it does to the objects.

use std::fs;

use reprise_e2e::tree;

use crate::helm::{chart, helm, path, render_set, sets};

/// Set to `write`, golden files are written, not compared.
const GOLDEN: &str = "REPRISE_GOLDEN";

/// Copies of files that have a drift check of their own.
const VERBATIM: [&str; 2] = ["definitions.yaml", "admission-policy.yaml"];

#[test]
fn the_linter_has_nothing_to_say() {
    for (name, files) in sets() {
        let chart = chart();
        let mut arguments = vec!["lint", "--strict", "--quiet", path(&chart)];
        for file in &files {
            arguments.extend(["--values", path(file)]);
        }
        let said = helm(&arguments);
        assert!(said.worked, "{name}: {}{}", said.output, said.errors);
    }
}

#[test]
fn renders_are_those_of_the_golden_files() {
    for (name, files) in sets() {
        let documents = render_set(&files);
        let own = documents.iter().filter(|one| !VERBATIM.contains(&one.template.as_str()));
        let rendered: String = own.map(|one| format!("---\n{}\n", one.text.trim_end())).collect();
        let golden = tree().join("e2e/tests/chart/golden").join(format!("{name}.yaml"));
        if std::env::var(GOLDEN).is_ok_and(|what| what == "write") {
            fs::write(&golden, rendered).expect("the tree can be written");
            continue;
        }
        let expected = fs::read_to_string(&golden).unwrap_or_default();
        let line = rendered.lines().zip(expected.lines()).take_while(|(one, other)| one == other).count();
        assert!(
            rendered == expected,
            "{name} differs from line {} on: '{}', not '{}'. If that is meant, run the test with {GOLDEN}=write and commit",
            line + 1,
            rendered.lines().nth(line).unwrap_or_default(),
            expected.lines().nth(line).unwrap_or_default(),
        );
    }
}

#[test]
fn what_people_are_told_fits_what_they_have() {
    let notes = |files: &[std::path::PathBuf]| {
        let chart = chart();
        let mut arguments = vec![
            "install",
            "reprise",
            path(&chart),
            "--dry-run=client",
            "--hide-notes=false",
            "--namespace",
            "reprise-system",
        ];
        for file in files {
            arguments.extend(["--values", path(file)]);
        }
        let said = helm(&arguments);
        assert!(said.worked, "{}", said.errors);
        said.output.split("NOTES:").nth(1).expect("notes").to_owned()
    };
    for (name, files) in sets() {
        let notes = notes(&files);
        let has_cluster = name != "default";
        assert_eq!(notes.contains("helm -n reprise-system test reprise"), has_cluster, "{name}: {notes}");
        assert_eq!(notes.contains("There is no cluster yet"), !has_cluster, "{name}: {notes}");
        assert_eq!(
            notes.contains("reprise-seccomp runs as root"),
            ["raw-devices", "everything"].contains(&name)
        );
        assert!(!notes.contains("does not use it"), "{name}: {notes}");
    }
}
