//! Texts about runs: a line for each target, a table in Markdown, failed inputs and a summary.

use crate::Folders;
use crate::runs::Outcome;

/// Number of digits of a group.
const GROUP: usize = 3;

/// Writes a number with commas.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let groups = digits.as_bytes().rchunks(GROUP).rev();
    groups.map(|group| String::from_utf8_lossy(group).into_owned()).collect::<Vec<_>>().join(",")
}

/// A line for a target whose run has ended.
pub(crate) fn line(name: &str, outcome: &Outcome) -> String {
    let result = if outcome.is_success() { "passed" } else { "FAILED" };
    let Outcome { inputs, rate, edges, .. } = outcome;
    format!("{name}: {result}, {} inputs, {} per second, {edges} edges", grouped(*inputs), grouped(*rate))
}

/// The table of all targets.
pub(crate) fn table(outcomes: &[(String, Outcome)]) -> Vec<String> {
    let mut lines = vec![
        "| target | inputs | per second | edges | features | memory, MiB |".to_owned(),
        "|---|---|---|---|---|---|".to_owned(),
    ];
    lines.extend(outcomes.iter().map(|(name, outcome)| {
        let Outcome { inputs, rate, edges, features, memory_mib, .. } = outcome;
        let (inputs, rate) = (grouped(*inputs), grouped(*rate));
        format!("| `{name}` | {inputs} | {rate} | {edges} | {features} | {memory_mib} |")
    }));
    lines
}

/// The failed inputs of a target, and how to reproduce each as a test.
pub(crate) fn failure(folders: &Folders, name: &str, outcome: &Outcome) -> Vec<String> {
    let log = folders.log(name);
    let mut texts: Vec<String> = outcome
        .failed
        .iter()
        .map(|path| {
            format!(
                "{name} failed on {path}\n  output: {log}\n  reproduce: mkdir -p fuzz/corpus/{name} && cp {path} \
                 fuzz/corpus/{name}/regression-WHAT && cargo test --locked --workspace --lib --bins --test agent -- \
                 fuzz::{name}",
                path = path.display(),
                log = log.display(),
            )
        })
        .collect();
    texts.extend(outcome.error.iter().map(|error| format!("{name}: {error}\n  output: {}", log.display())));
    texts
}

/// The last line of a run.
pub(crate) fn summary(outcomes: &[(String, Outcome)]) -> String {
    let inputs: u64 = outcomes.iter().map(|(_, outcome)| outcome.inputs).sum();
    let failed: Vec<&str> =
        outcomes.iter().filter(|(_, outcome)| !outcome.is_success()).map(|(name, _)| name.as_str()).collect();
    let end = match failed[..] {
        [] => "none failed".to_owned(),
        _ => format!("FAILED: {}", failed.join(", ")),
    };
    format!("fuzz: {} targets, {} inputs, {end}", outcomes.len(), grouped(inputs))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_counts_inputs_and_names_failed_targets() {
        assert_eq!([0, 999, 1_000, 1_234_567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
        let passed = Outcome { inputs: 1_500, ..Outcome::default() };
        let failed = Outcome { inputs: 1, failed: vec!["crash-1".into()], ..Outcome::default() };
        let outcomes = [("a".to_owned(), passed), ("b".to_owned(), failed)];
        assert_eq!(summary(&outcomes), "fuzz: 2 targets, 1,501 inputs, FAILED: b");
        assert_eq!(summary(&outcomes[..1]), "fuzz: 1 targets, 1,500 inputs, none failed");
    }
}
