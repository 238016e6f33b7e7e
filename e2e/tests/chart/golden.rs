//! Golden files: a review of a template's change shows its effect on the objects.

use std::fs;

use reprise_e2e::tree;

use crate::chart::helm::{chart, helm, path, render_set, sets};

/// Set to `write`, the golden files are written instead of compared.
const GOLDEN: &str = "REPRISE_GOLDEN";

/// Templates that copy files which have their own drift check.
const VERBATIM: [&str; 2] = ["definitions.yaml", "admission-policy.yaml"];

#[test]
fn helm_lint_reports_nothing() {
    for (name, files) in sets() {
        let chart = chart();
        let mut arguments = vec!["lint", "--strict", "--quiet", path(&chart)];
        for file in &files {
            arguments.extend(["--values", path(file)]);
        }
        let linted = helm(&arguments);
        assert!(linted.success, "{name}: {}{}", linted.stdout, linted.stderr);
    }
}

#[test]
fn rendered_objects_match_the_golden_files() {
    for (name, files) in sets() {
        let documents = render_set(&files);
        let own = documents.iter().filter(|one| !VERBATIM.contains(&one.template.as_str()));
        let rendered: String = own.map(|one| format!("---\n{}\n", one.text.trim_end())).collect();
        let golden = tree().join("e2e/tests/chart/golden").join(format!("{name}.yaml"));
        if std::env::var(GOLDEN).is_ok_and(|what| what == "write") {
            fs::write(&golden, rendered).expect("the tree is writable");
            continue;
        }
        let expected = fs::read_to_string(&golden).unwrap_or_default();
        let line = rendered.lines().zip(expected.lines()).take_while(|(one, other)| one == other).count();
        assert!(
            rendered == expected,
            "{name} differs from line {} on: '{}', not '{}'. If this is intended, run the test with {GOLDEN}=write and commit",
            line + 1,
            rendered.lines().nth(line).unwrap_or_default(),
            expected.lines().nth(line).unwrap_or_default(),
        );
    }
}

#[test]
fn release_notes_match_the_values() {
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
        let installed = helm(&arguments);
        assert!(installed.success, "{}", installed.stderr);
        installed.stdout.split("NOTES:").nth(1).expect("notes").to_owned()
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
